"""Shared by the commands: argument types, faster and quieter imports."""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from typing import Any

from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.question import FIELDS
from hf_ckpt.units import parse_count


def refused_in_words(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return `read` as an argparse type: an `HfCkptError` or `ValueError` becomes an error of the option."""

    def reader(text: str) -> Any:
        try:
            return read(text)
        except (HfCkptError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reader


def add_verb(verbs: Any, module: str, run: Callable[[argparse.Namespace], int], help: str, **more: Any) -> Any:
    """Add a verb to the command line, and return its parser.

    Args:
        verbs: the subparsers of the command line.
        module: of the verb, whose name is the module's. Its docstring without the first line is the description.
        run: runs the verb, and returns the exit code.
        help: the verb's line in the list of all verbs.
        more: further arguments of the parser.
    """
    description = (sys.modules[module].__doc__ or "").partition("\n\n")[2]  # `python -OO` removes docstrings
    parser = verbs.add_parser(module.rpartition(".")[2], help=help, description=description, **more)
    parser.set_defaults(run=run)
    return parser


positive = refused_in_words(parse_count)
"""argparse type for a whole number of at least 1, such as `4096` or `4k`."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of a `Question` except the model. Options without a value are not set."""
    for field in list(FIELDS.values())[1:]:
        # An option that is not given has no attribute, so that a file's value is not replaced by a default.
        settings: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        text = ": ".join(filter(None, (field.help, ", ".join(field.choices))))
        if isinstance(field.default, bool):
            settings["action"] = "store_false" if field.default else "store_true"
            back = "store_true" if field.default else "store_false"  # over what a file of --config says
            parser.add_argument(field.opposite, **{**settings, "action": back}, help=argparse.SUPPRESS)
        else:
            settings |= {"type": refused_in_words(field.read), "choices": field.choices or None}
            settings["metavar"] = field.metavar or ("NAME" if field.choices else None)
            text += f" (default {field.default})" if field.default is not None else ""
        parser.add_argument(field.flag, **settings, help=text.replace("%", "%%"))  # argparse formats help by `%`


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a `Question` that the command line sets."""
    return {name: vars(arguments)[name] for name in FIELDS if name in arguments}


def options_in(text: str) -> dict[str, Any]:
    """Return the fields of a `Question` that a text of options sets, which may begin with a model."""
    parser = argparse.ArgumentParser(prog="hf-ckpt plan --against", add_help=False)
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS)
    add_options(parser)
    return options_of(parser.parse_args(shlex.split(text)))


def quiet_libraries(*, to_plan: bool = False) -> None:
    """Turn off progress bars, warnings and messages of other libraries. Call it before transformers is imported.

    With `to_plan`, imports take seconds less: packages that no plan needs look as if they were not installed.
    """
    # PEFT imports bitsandbytes, and transformers scipy and sklearn, if they are there: for metrics and kernels.
    unneeded = ("bitsandbytes", "scipy", "sklearn")
    if to_plan and not {"transformers", "peft", *unneeded} & sys.modules.keys():
        gc.set_threshold(500_000)  # collecting garbage takes a sixth of the imports' time, and some at exit
        atexit.register(gc.freeze)
        # None makes an import fail as that of a missing package does; see "The module cache" in Python's reference.
        sys.modules.update(dict.fromkeys(unneeded))  # type: ignore[arg-type]
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for logger in ("transformers", "huggingface_hub", "bitsandbytes"):  # an unreachable hub, missing kernels
        logging.getLogger(logger).setLevel(logging.ERROR)
    # For a shape that does not fit, torch raises an error and also logs its traceback.
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # PEFT reads a deprecated name
    warnings.filterwarnings("ignore", module="peft")  # about shapes and names that it corrects itself
