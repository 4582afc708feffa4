"""`hf-ckpt`: parse the command line and run a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_ckpt import __version__
from hf_ckpt.cli import app, check, doctor, plan
from hf_ckpt.errors import HfCkptError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 for success, 1 for a failed check, and 2 for an error of hf_ckpt, which is printed."""
    arguments = make_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except HfCkptError as error:
        print(f"hf-ckpt: {error}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line, with all verbs."""
    parser = argparse.ArgumentParser(
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
