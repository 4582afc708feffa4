"""`hf-ckpt doctor`: find mistakes in config files that raise no error.

Reads arguments of Trainer, TRL, axolotl, LLaMA-Factory, ms-swift or NeMo Automodel, and configs of accelerate and
DeepSpeed. Exit code 1 for an error, 2 for a file that cannot be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shlex
from typing import Any

from hf_ckpt.cli.arguments import add_verb, quiet_libraries
from hf_ckpt.console import make_console, print_plain, print_progress
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.question import FIELDS, question


def add(verbs: Any) -> None:
    """Add the verb and its options to the command line."""
    example = "example: hf-ckpt doctor accelerate.yaml train.yaml --model llama-3.1-8b"
    doctor = add_verb(verbs, __name__, run, "find mistakes in config files that raise no error", epilog=example)
    files = "config file; its keys tell which program it belongs to"
    doctor.add_argument("files", nargs="+", metavar="FILE", help=files)
    doctor.add_argument("--model", help="preset, folder, hub id or config.json; only its config is read")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of the table")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings and the command that plans the training. Returns 1 for an error."""
    from rich.table import Table
    from rich.text import Text

    print_progress("reading the files")
    quiet_libraries()
    from hf_ckpt.doctor.files import read_files
    from hf_ckpt.doctor.rules import diagnose
    from hf_ckpt.forecast.model import load_config

    config = load_config(arguments.model).to_dict() if arguments.model else None
    files = read_files(arguments.files, config)
    findings = diagnose(files)
    options = {"model": arguments.model} if arguments.model else {}
    command = _command(files, options)
    if arguments.json:
        rows = [finding._asdict() for finding in findings]
        print(json.dumps({"files": files.owners, "findings": rows, "plan": command}, indent=1))
    else:
        table = Table("", "where", "what, and what to do", show_lines=True)
        for finding in findings:  # as `Text`, because rich would read brackets in keys and values as markup
            table.add_row(finding.severity, Text(finding.where), Text(f"{finding.what}\n-> {finding.fix}"))
        console = make_console()
        print_plain(console, *(f"{path}: a file of {owner}" for path, owner in files.owners.items()))
        result = table if findings else "nothing found"
        console.print(result)
        print_plain(console, f"to see whether it fits: {command}")
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _command(files: Any, options: dict[str, Any]) -> str:
    """Return the command that plans the training, with what only accelerate's config says, or why there is none."""
    from hf_ckpt.doctor.files import fields_of

    try:
        fields = {"model": "MODEL", **fields_of(files, options)}
        question(fields)
        # `--config` reads one file. What changes without accelerate's config has to be options of the command.
        alone = fields_of(dataclasses.replace(files, launch={}), options)
    except HfCkptError as error:
        return f"not known: {error}"
    words = ["hf-ckpt", "plan", fields.pop("model"), *(["--config", files.path] if files.path else [])]
    launched = [FIELDS[name].words(value) for name, value in fields.items() if alone.get(name) != value]
    return shlex.join([*words, *itertools.chain(*launched), "--device", "NAME"])
