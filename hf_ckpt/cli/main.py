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
from hf_ckpt.spec.reading import did_you_mean, similar

LISTED_CHOICES = 8
"""Choices that an error lists all; of more, it names those that are similar to what was given, if there are any."""


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
            allowed = re.findall(r"[\w+-]+", choice[2])
            near = similar(choice[1], allowed, 3)
            if near and len(allowed) > LISTED_CHOICES:
                message = message.replace(choice[2], f"{', '.join(map(repr, near))}; --help lists all {len(allowed)}")
            message += did_you_mean(choice[1], allowed)
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
    usage = "To use it in an unchanged training script: python -m hf_ckpt script.py ..."
    parser = Parser(prog="hf-ckpt", description=f"Per-block activation checkpointing for Hugging Face models. {usage}")
    parser.add_argument("--version", action="version", version=f"hf-ckpt {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for verb in (plan, check, doctor, app):
        verb.add(verbs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
