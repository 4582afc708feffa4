"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from figures import write_json

from hf_ckpt import compat
from hf_ckpt.cli.arguments import progress, quiet_libraries
from hf_ckpt.cli.pictures import PICTURES
from hf_ckpt.console import make_console
from hf_ckpt.errors import HfCkptError
from hf_ckpt.spec.files import refuse_unwritable

WORKLOAD: dict[str, Any] = {"batch": 4, "tokens": 256, "optimizers": ("adamw", "sgd", "momentum")}
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


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option that chooses the CPU where there is an accelerator."""
    devices = tuple(dict.fromkeys(("cpu", compat.accelerator_type() or "cpu")))
    parser.add_argument(
        "--device", choices=devices, metavar="NAME", help=f"{' or '.join(devices)} (default: the accelerator, if any)"
    )


def _refuse_unwritable(arguments: argparse.Namespace) -> None:
    """Raise `FileError` where a file that is asked for cannot be written, before anything is measured for it."""
    suffixes = {"json": (".json",), "png": PICTURES, "block_png": PICTURES, "markdown": ()}
    for name, endings in suffixes.items():
        if getattr(arguments, name, None) is not None:
            refuse_unwritable(getattr(arguments, name), endings)


def carry_out(
    bench: Callable[..., Any], settings: Any, steps: int, show: Callable[..., None], arguments: argparse.Namespace
) -> int:
    """Measure with a bar, print the table, and write all figures. Returns 0 if the result is `ok`, and 1 else.

    Args:
        bench: called with the settings, and with `on_progress` before each step.
        settings: what is measured.
        steps: how many steps the bar has.
        show: prints a result on a console.
        arguments: of the command line, with the name of the file for all figures.
    """
    console = make_console()
    with progress("starting", steps) as on_progress:
        result = bench(settings, on_progress=on_progress)
    show(result, console)
    write_json(arguments.json, result.to_dict())
    return 0 if result.ok else 1


def call(run: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run a benchmark. Returns 0 if all is well, 1 if what it checked does not hold, 2 if it was asked wrongly."""
    arguments = parser.parse_args(argv)
    quiet_libraries()
    try:
        _refuse_unwritable(arguments)
        return run(arguments)
    except HfCkptError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
