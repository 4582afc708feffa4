"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_ckpt.cli.arguments import quiet_libraries
from hf_ckpt.errors import HfCkptError

WORKLOAD: dict[str, Any] = {"batch": 4, "tokens": 256, "optimizers": "adamw (default), sgd, momentum"}
"""What is trained unless asked for otherwise."""


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with the script's docstring, and that knows `--json`, as all of them do."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for all figures")
    return parser


def add_only(parser: argparse.ArgumentParser) -> None:
    """The option that leaves ways out."""
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        default=[],
        help='a way, as it stands in the table, or a group of them ("transformers", "torch SAC", "TRL", '
        '"torch.compile", "hf_ckpt"); repeatable (default all; `none` and the plans always run)',
    )


def call(run: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run a benchmark. Returns 0 if all is well, 1 if what it checked does not hold, 2 if it was asked wrongly."""
    arguments = parser.parse_args(argv)
    quiet_libraries()
    try:
        return run(arguments)
    except HfCkptError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
