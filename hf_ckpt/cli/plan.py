"""`hf-ckpt plan`: find the fastest plan of a training within a memory budget, with its peak and step time.

Chooses for each block which activations to keep and which to recompute, so that a training step is as fast as the
budget allows. Prints the peak and what fills it, step time and tokens per second, all predicted. Exit code 2 if nothing
fits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from hf_ckpt.cli.app import drawn_of, figure_of, require
from hf_ckpt.cli.arguments import add_options, add_verb, options_in, options_of, quiet_libraries
from hf_ckpt.console import make_console, print_plain, print_progress
from hf_ckpt.forecast.printing import Printer, print_comparison
from hf_ckpt.forecast.question import FIELDS, Question, question
from hf_ckpt.forecast.result import Forecast
from hf_ckpt.spec.files import refuse_unwritable
from hf_ckpt.spec.plan import SUFFIXES

_AGAINST = "compare the lowest peaks with those of a training file or of options in quotes, part by part"


def add(verbs: Any) -> None:
    """Add the verb and its options to the command line."""
    example = "example: hf-ckpt plan llama-3.1-8b --seq 8192 --lora 16 --load-in-4bit --head auto --device 4090"
    help = "plan a training run within a memory budget, without weights or a GPU"
    plan = add_verb(verbs, __name__, run, help, epilog=example)
    model = f"{FIELDS['model'].help} (default: the model in --config)"
    plan.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=model)
    add_options(plan)
    plan.add_argument("--config", type=Path, metavar="FILE", help="training arguments (YAML/JSON); options override it")
    plan.add_argument("--against", metavar="OTHER", help=_AGAINST)
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.add_argument("--html", type=Path, metavar="FILE", help="write the figure of hf-ckpt app to this file")
    out = 'save the plan to this file (.yaml or .json); the spec {"plan": FILE} loads it'
    plan.add_argument("--out", type=Path, help=out)


def run(arguments: argparse.Namespace) -> int:
    """Print whether the training fits, what to write, the plan and its costs; with `--out`, save the plan.

    Returns 2 if no plan fits into the budget, or the plan does not fit into the device.
    """
    if arguments.out is not None:
        refuse_unwritable(arguments.out, SUFFIXES)  # not only after minutes of planning
    if arguments.html is not None:
        refuse_unwritable(arguments.html, (".html",))
        require("hf-ckpt plan --html", "plotly")
    quiet_libraries(to_plan=True)
    training, program = _read_config(options_of(arguments), arguments.config)
    console = make_console(stderr=arguments.json)  # stdout is then JSON, whole and alone
    print_progress(f"{training.model}: loading torch and transformers")
    from hf_ckpt.forecast.forecast import Forecaster

    if arguments.against is not None:
        return _compare(arguments, training, console)
    saved_as = {} if arguments.out is None else {"saved_as": str(arguments.out)}
    printer = Printer(console)
    forecaster = Forecaster(training, print_progress, **saved_as)
    if arguments.json:
        forecast = _for_program(forecaster.answer(), program)
        print(json.dumps(forecast.to_dict(), indent=1))
    else:
        answered = forecaster.answer(lambda first: printer.show(_for_program(first, program)), printer.add)
        forecast = _for_program(answered, program)
        printer.end(forecast)
    drawn = None if arguments.html is None else drawn_of(forecast)
    if drawn is not None and drawn.plan is not None:
        figure_of(drawn).write_html(arguments.html)
        print_plain(console, f"wrote the figure to {arguments.html}")
    if forecast.plan is None:
        return 2
    if arguments.out is not None:
        forecast.plan.save(arguments.out)
        spec = json.dumps({"plan": str(arguments.out)})
        print_plain(console, f"wrote the plan to {arguments.out}; the spec to train with it: {spec}")
    return 0 if forecast.fits else 2


def _for_program(forecast: Forecast, program: str) -> Forecast:
    """The forecast with what a program takes, whose files have other keys than `TrainingArguments`."""
    if not program or not forecast.plan:
        return forecast
    title = f"The spec, for {program} (docs/integrations.md says where)"
    return dataclasses.replace(forecast, write={title: json.dumps(forecast.spec)})


def _compare(arguments: argparse.Namespace, training: Question, console: Any) -> int:
    """Print the lowest peaks of two questions side by side. Returns 0."""
    from hf_ckpt.forecast.forecast import comparison

    options = options_of(arguments)
    if Path(arguments.against).is_file():
        shared = {name: value for name, value in options.items() if name in ("device", "budget")}
        other, _ = _read_config(shared, Path(arguments.against))
    else:
        other, _ = _read_config({**options, **options_in(arguments.against)}, arguments.config)
    compared = comparison(training, other, print_progress)
    if arguments.json:
        print(json.dumps(compared, indent=1))
    else:
        print_comparison(compared, console)
    return 0


def _read_config(options: dict[str, Any], config: Path | None) -> tuple[Question, str]:
    """Return the question of the options and of a training file, and the file's owner. Findings go to stderr."""
    if config is None:
        return question(options), ""
    print_progress(f"reading {config}")
    from hf_ckpt.doctor.files import fields_of, read_files
    from hf_ckpt.doctor.rules import diagnose

    files = read_files([config])
    owner = files.owner
    print(f"hf-ckpt: {config}: a file of {files.owners[str(config)]}", file=sys.stderr)
    for finding in diagnose(files):
        print(f"hf-ckpt: {config}: {finding.where}: {finding.what}", file=sys.stderr)
    program = owner.name if owner.needs else ""
    return question(fields_of(files, options)), program
