"""`hf-ckpt doctor`: find silent faults in config files."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shlex
from typing import Any

from hf_ckpt.cli.arguments import quiet_libraries
from hf_ckpt.console import make_console, progress
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.question import FIELDS, question, words_of


def add(verbs: Any) -> None:
    """Add the verb and its options to the command line."""
    doctor = verbs.add_parser(
        "doctor",
        help="find faults in config files that nothing else reports",
        description="Reads arguments of Trainer, TRL, axolotl, LLaMA-Factory, ms-swift or NeMo Automodel, and "
        "configs of accelerate and DeepSpeed. Exit code 1 for an error, 2 for a file that cannot be read.",
        epilog="example: hf-ckpt doctor accelerate.yaml train.yaml --model llama-3.1-8b",
    )
    doctor.add_argument("files", nargs="+", metavar="FILE", help="config, whose owner is recognised by its keys")
    doctor.add_argument("--model", help="preset, folder, hub id or config.json; only its config is read")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of the table")
    doctor.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the findings and the command that plans the training. Returns 1 for an error."""
    from rich.table import Table
    from rich.text import Text

    with progress("reading the files"):
        quiet_libraries()
        from hf_ckpt.doctor.rules import diagnose
        from hf_ckpt.doctor.trainings import read_training
        from hf_ckpt.forecast.model import load_config

        training = read_training(arguments.files, load_config(arguments.model).to_dict() if arguments.model else None)
        findings = diagnose(training)
        command = _command(training, {"model": arguments.model} if arguments.model else {})
    if arguments.json:
        print(
            json.dumps(
                {"files": training.owners, "findings": [finding._asdict() for finding in findings], "plan": command},
                indent=1,
            )
        )
    else:
        table = Table("", "where", "what, and what to do", show_lines=True)
        for finding in findings:  # as `Text`, because rich would read brackets in keys and values as markup
            table.add_row(finding.severity, Text(finding.where), Text(f"{finding.what}\n-> {finding.fix}"))
        for path, owner in training.owners.items():
            make_console().print(f"{path}: a file of {owner}", highlight=False, markup=False, soft_wrap=True)
        make_console().print(table if findings else "nothing found that would go wrong")
        make_console().print(f"whether it fits: {command}", highlight=False, markup=False, soft_wrap=True)
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _command(training: Any, given: dict[str, Any]) -> str:
    """Return the command that plans the training, with what only accelerate's config says, or why there is none."""
    from hf_ckpt.doctor.trainings import fields_of

    try:
        fields = {"model": "MODEL", **fields_of(training, given)}
        question(fields)
        alone = fields_of(dataclasses.replace(training, launch={}), given)
    except HfCkptError as error:
        return f"not known: {error}"
    words = ["hf-ckpt", "plan", fields.pop("model"), *(["--config", training.path] if training.path else [])]
    launched = [words_of(FIELDS[name], value) for name, value in fields.items() if alone.get(name) != value]
    return shlex.join([*words, *itertools.chain(*launched), "--device", "NAME"])
