"""`hf-ckpt`: parse the command line and run a command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from hf_ckpt import __version__
from hf_ckpt.cli import app, check, doctor, plan
from hf_ckpt.errors import HfCkptError
from hf_ckpt.spec.reading import did_you_mean


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 for success, 1 for a failed check, and 2 for an error of hf_ckpt, which is printed."""
    arguments = make_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except HfCkptError as error:
        print(f"hf-ckpt: {error}", file=sys.stderr)
        return 2


class Parser(argparse.ArgumentParser):
    """Asks in its errors whether a similar verb, option or choice was meant."""

    def error(self, message: str) -> NoReturn:
        """Print a message with the usage, and exit."""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        option = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        if choice:
            message += did_you_mean(choice[1], re.findall(r"[\w+-]+", choice[2]))
        elif option:
            message += did_you_mean(option[1], sorted(self._flags()))
        super().error(message)

    def _flags(self) -> set[str]:
        """The options of this parser and of its verbs, as `--help` lists them."""
        flags: set[str] = set()
        for action in self._actions:
            if isinstance(action.choices, dict):
                flags.update(*(verb._flags() for verb in action.choices.values()))
            elif action.help != argparse.SUPPRESS:
                flags.update(action.option_strings)
        return flags


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line, with all verbs."""
    parser = Parser(
        prog="hf-ckpt",
        description="Per-block activation checkpointing for Hugging Face models. To run a training script of your own "
        "with hf_ckpt in every model: python -m hf_ckpt script.py ...",
    )
    parser.add_argument("--version", action="version", version=f"hf-ckpt {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for verb in (plan, check, doctor, app):
        verb.add(verbs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
