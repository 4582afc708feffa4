"""Shared by the commands: argument types, faster and quieter imports."""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.question import FIELDS, about, option_of
from hf_ckpt.units import parse_count


def refused_in_words(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return `read` as an argparse type: an `HfCkptError` or `ValueError` becomes an error of the option."""

    def reader(text: str) -> Any:
        try:
            return read(text)
        except (HfCkptError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reader


positive = refused_in_words(parse_count)
"""argparse type for a whole number of at least 1, such as `4096` or `4k`."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of a `Question` except the model. Options without a value are not set."""
    for field in list(FIELDS.values())[1:]:
        known = about(field)
        settings: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        text = ": ".join(filter(None, (known.help, ", ".join(known.choices))))
        if isinstance(field.default, bool):
            settings["action"] = "store_false" if field.default else "store_true"
        else:
            settings |= {"type": refused_in_words(known.read), "choices": known.choices or None}
            settings["metavar"] = known.metavar or ("NAME" if known.choices else None)
            text += f" (default {field.default})" if field.default is not None else ""
        parser.add_argument(option_of(field), **settings, help=text.replace("%", "%%"))


def asked_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a `Question` that the command line sets."""
    return {name: vars(arguments)[name] for name in FIELDS if name in arguments}


def quiet_libraries(*, to_plan: bool = False) -> None:
    """Turn off progress bars, warnings and messages of other libraries. Call it before transformers is imported.

    With `to_plan`, imports take seconds less: packages that no plan needs look as if they were not installed.
    """
    unneeded = ("bitsandbytes", "scipy", "sklearn")
    if to_plan and not {"transformers", "peft", *unneeded} & sys.modules.keys():
        gc.set_threshold(500_000)  # collecting garbage takes a sixth of the imports' time, and some at exit
        atexit.register(gc.freeze)
        sys.modules.update(dict.fromkeys(unneeded))  # type: ignore[arg-type]  # None: imports fail
        logging.getLogger("hf_ckpt.attach.attach").disabled = True  # a plan tells of unknown families itself
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for logger in ("transformers", "huggingface_hub", "bitsandbytes"):  # an unreachable hub, missing kernels
        logging.getLogger(logger).setLevel(logging.ERROR)
    # For a shape that does not fit, torch raises an error and also logs its traceback.
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # PEFT reads a deprecated name
    warnings.filterwarnings("ignore", module="peft")  # about shapes and names that it corrects itself
