"""`hf-ckpt`: the entry of the command line, which parses the arguments and calls the verb."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_ckpt import __version__
from hf_ckpt.cli import app, check, demo, doctor, plan
from hf_ckpt.errors import HfCkptError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb of the command line, and return its exit code.

    That is 0 if it succeeded, 1 if what it checked does not hold, and 2 for any error of hf_ckpt's, which is printed.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except HfCkptError as error:
        print(f"hf-ckpt: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-ckpt",
        description="Per-block activation checkpointing for Hugging Face models. To run a training script of your own "
        "with hf_ckpt in every model: python -m hf_ckpt script.py ...",
    )
    parser.add_argument("--version", action="version", version=f"hf-ckpt {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    for verb in (demo, check, plan, app, doctor):
        verb.add(verbs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
