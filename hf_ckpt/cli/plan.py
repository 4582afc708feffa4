"""`hf-ckpt plan`: find the fastest plan of a training within a memory budget, with its peak and step time."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.arguments import add_options, asked_of, importing, quiet_libraries
from hf_ckpt.console import make_console, progress
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.forecast.html import SUFFIXES as REPORTS
from hf_ckpt.forecast.html import import_plotly, save_report
from hf_ckpt.prediction.presets import refuse_missing_model
from hf_ckpt.prediction.question import FIELDS, Question, about, question
from hf_ckpt.spec.files import refuse_unwritable
from hf_ckpt.spec.plan import SUFFIXES

if TYPE_CHECKING:
    from rich.console import Console

    from hf_ckpt.forecast.record import Forecast

MODEL_HELP = about(FIELDS["model"]).help
"""Help of an argument that names a model without weights."""


def add(verbs: Any) -> None:
    """Add the verb and its options to the command line."""
    plan = verbs.add_parser(
        "plan",
        help="plan a training for a memory budget, without weights and without a GPU",
        description="Which blocks keep, rebuild or recompute so that a training step is the fastest that fits, with "
        "its peak and what fills it, step time and tokens a second, all predicted. Exit code 2 if nothing fits.",
        epilog="example: hf-ckpt plan llama-3.1-8b --seq 8192 --lora 16 --load-in-4bit --head auto --device 4090",
    )
    plan.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, help=f"{MODEL_HELP}; or as in the file of --config"
    )
    add_options(plan)
    plan.add_argument("--config", type=Path, metavar="FILE", help="training arguments, YAML or JSON; options win")
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.add_argument("--out", type=Path, help='file for the plan (.yaml or .json), for {"plan": FILE}')
    plan.add_argument("--html", type=Path, help="file for a report with a slider for the budget (.html)")
    plan.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print whether the training fits, what to write, the plan and its costs; with options, write files.

    Returns 2 if no plan fits into the budget, or the plan does not fit into the device.
    """
    if arguments.out is not None:
        refuse_unwritable(arguments.out, SUFFIXES)
    if arguments.html is not None:
        refuse_unwritable(arguments.html, REPORTS)
        import_plotly("a report in HTML")
    quiet_libraries()
    given = asked_of(arguments)
    asked = question(given if arguments.config is None else _read_config(arguments.config, given))
    refuse_missing_model(asked.model)
    console = make_console(stderr=arguments.json)
    whole = dataclasses.replace(asked, frontier=asked.frontier or arguments.html is not None)
    found = _traced(whole, console, as_json=arguments.json)
    if found is None:
        return 2
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print_forecast(found, console, frontier=asked.frontier)
    if arguments.out is not None:
        found.plan.save(arguments.out)
        _say_written(console, "the plan", arguments.out, how_to_train_with(arguments.out))
    if arguments.html is not None:
        save_report(found, arguments.html)
        _say_written(console, "a report with a slider for the budget", arguments.html)
    return 0 if found.fits else 2


def _traced(asked: Question, console: Console, *, as_json: bool) -> Forecast | None:
    """Return the forecast from a trace of the model. If no plan fits, print what would, and return None."""
    with contextlib.ExitStack() as shown_progress:
        tell = shown_progress.enter_context(progress(f"{asked.model}: loading torch and transformers"))
        with importing(to_plan=True):
            from hf_ckpt.forecast.forecast import Forecaster
        forecaster = Forecaster(asked, lambda text: tell(text))
        try:
            return forecaster.forecast()
        except InfeasibleError as error:
            shown_progress.close()
            _say_misfit(error, forecaster, console, as_json=as_json)
            return None


def print_forecast(forecast: Forecast, console: Console, *, frontier: bool = False) -> None:
    """Print a forecast; with `frontier`, also the plans for other budgets in it."""
    from hf_ckpt.forecast.answers import answer_of
    from hf_ckpt.forecast.text import print_answer

    print_answer(answer_of(forecast, frontier=frontier), console, str(forecast.plan))


def _say_misfit(error: InfeasibleError, forecaster: Any, console: Console, *, as_json: bool) -> None:
    """Print that no plan fits, then search for what fits and print it."""
    from hf_ckpt.forecast.answers import misfit_in_numbers, misfit_of, nearest_table
    from hf_ckpt.forecast.text import print_answer, print_table

    asked, device = forecaster.asked, forecaster.device
    if not as_json:
        print_answer(misfit_of(error, asked, device), console)
    with progress("looking for what fits") as forecaster.tell:
        nearest = forecaster.nearest()
    if as_json:
        print(json.dumps(misfit_in_numbers(error, asked, device, nearest), indent=1))
    elif nearest:
        print_table(nearest_table(nearest, error.budget_bytes), console)
        kwargs = json.dumps(dict(nearest[0].spec))
        console.print(f"activation_checkpointing_kwargs for the first: {kwargs}", highlight=False, markup=False)
    else:
        console.print("Nothing near it fits, either:", highlight=False)
        for hint in error.hints:
            console.print(f"  - {hint}", highlight=False, markup=False)


def how_to_train_with(plan: Path) -> str:
    """Return two lines to copy: how to train with a saved plan."""
    spec = json.dumps({"plan": str(plan)})
    return (
        f"  in Python:           hf_ckpt.install(model, {spec})\n"
        "  without a change:    python -m hf_ckpt train.py --activation_checkpointing "
        f"--activation_checkpointing_kwargs {shlex.quote(spec)}"
    )


def _say_written(console: Console, what: str, path: Path, then: str = "") -> None:
    """Print that a file was written, and how to use it."""
    text = f"wrote {what} to {path}" + (f"; train with it by either of\n{then}" if then else "")
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _read_config(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a training file sets, with `given` over them. Remarks on its keys go to stderr."""
    with progress(f"reading {path}"), importing(to_plan=True):
        from hf_ckpt.doctor.rules import diagnose
        from hf_ckpt.doctor.trainings import fields_of, read_training

        training = read_training([path])
        for finding in diagnose(training):
            print(f"hf-ckpt: {path}: {finding.where}: {finding.what}", file=sys.stderr)
        return fields_of(training, given)
