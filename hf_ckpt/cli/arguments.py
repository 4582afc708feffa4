"""Shared by the commands: argument types, errors, progress, faster and quieter imports."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from hf_ckpt.console import make_console
from hf_ckpt.errors import HfCkptError, reason_of, shown
from hf_ckpt.prediction.question import FIELDS, about, option_of
from hf_ckpt.units import parse_count


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and exit with code 2."""

    def error(self, message: str) -> NoReturn:
        """Print an error and exit with code 2."""
        message = message.removeprefix("argument ").rstrip(".")
        self.exit(2, f"hf-ckpt: {message}{'' if message.endswith('?') else '.'} See {self.prog} --help\n")

    def options(self) -> list[str]:
        """Return the names of all options of this parser and its commands."""
        found: list[str] = []
        for action in self._actions:
            found += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                found += [name for verb in action.choices.values() for name in verb.options()]
        return found


def refused_in_words(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return `read` as an argparse type: an `HfCkptError` becomes an `ArgumentTypeError` with its message."""

    def reader(text: str) -> Any:
        try:
            return read(text)
        except HfCkptError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return reader


positive = refused_in_words(parse_count)
"""argparse type for a whole number of at least 1, such as `4096` or `4k`."""


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Return an argparse type that accepts these names, in any case."""
    known = {name.lower(): name for name in names}

    def read(text: str) -> str:
        if text.lower() not in known:
            near = difflib.get_close_matches(text.lower(), known, n=2)
            names = " or ".join(known[name] for name in near)
            hint = f"did you mean {names}?" if near else f"known are {', '.join(known.values())}"
            raise argparse.ArgumentTypeError(f"{shown(text)} is not known; {hint}")
        return known[text.lower()]

    return read


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of a `Question` except the model. Options without a value are not set."""
    for field in list(FIELDS.values())[1:]:
        known = about(field)
        told = known.help.replace("%", "%%")
        if isinstance(field.default, bool):
            action = "store_false" if field.default else "store_true"
            parser.add_argument(option_of(field), dest=field.name, action=action, default=argparse.SUPPRESS, help=told)
            continue
        values = known.choices
        if values:
            listed = ", ".join(f"{value} (default)" if value == field.default else value for value in values)
            told = f"{told}: {listed}" if told else listed
        elif field.default is not None:
            told += f" (default {field.default})"
        parser.add_argument(
            option_of(field),
            dest=field.name,
            type=one_of(values) if values else refused_in_words(known.read),
            default=argparse.SUPPRESS,
            metavar=known.metavar or ("NAME" if values else None),
            help=told,
        )


def asked_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a `Question` that the command line sets."""
    return {name: vars(arguments)[name] for name in FIELDS if name in arguments}


@contextlib.contextmanager
def told_as(what: str) -> Iterator[None]:
    """Turn errors of other libraries into an `HfCkptError` that begins with `what`."""
    try:
        yield
    except HfCkptError:
        raise
    except Exception as error:
        raise HfCkptError(f"{what}: {reason_of(error)}.") from error


@contextlib.contextmanager
def within_memory(what: str) -> Iterator[None]:
    """Turn an out-of-memory error into an `HfCkptError` that names `what`."""
    from hf_ckpt import compat

    try:
        yield
    except Exception as error:
        if not compat.is_out_of_memory(error):
            raise
        raise HfCkptError(f"memory ran out for {what}: {reason_of(error)}.") from error


@contextlib.contextmanager
def progress(first: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show progress and elapsed time on stderr, beginning with the text `first`.

    Yields a function that takes the next text. With a `total`, a bar counts its calls. If stderr is not a terminal,
    there is no bar, and without a total each text is a line.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = make_console(stderr=True)
    counted = () if total is None else (BarColumn(), MofNCompleteColumn())
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *counted, TimeElapsedColumn())
    lines = total is None and not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(first, total=total)
        begun = 0

        def tell(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, completed=begun)
            begun += 1
            if lines:
                print(f"hf-ckpt: {text} ...", file=sys.stderr, flush=True)

        if lines:
            print(f"hf-ckpt: {first} ...", file=sys.stderr, flush=True)
        yield tell


_NOT_PLANNED = ("bitsandbytes", "scipy", "sklearn")
"""Packages that transformers and PEFT import if they are installed, and that a plan does not need."""


@contextlib.contextmanager
def importing(*, to_plan: bool = False) -> Iterator[None]:
    """Context manager for imports of large packages: pauses garbage collection, which takes a sixth of their time.

    With `to_plan`, packages that a plan does not need look as if they were not installed, unless one has been imported
    already. This saves a second or more, and is for processes that only plan.
    """
    if to_plan and not {"transformers", "peft", *_NOT_PLANNED} & sys.modules.keys():
        sys.modules.update(dict.fromkeys(_NOT_PLANNED))  # type: ignore[arg-type]  # None: imports fail
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.enable()


def quiet_libraries() -> None:
    """Turn off progress bars and warnings of other libraries. Call it before transformers is imported."""
    # For a shape that does not fit, torch raises an error and also logs its traceback.
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # PEFT reads a deprecated name


def quiet_program(*, plans: bool) -> None:
    """Turn off messages of libraries about models without weights, for the rest of the process.

    Args:
        plans: whether the command plans. It reports an unknown family itself.
    """
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    # They report an unreachable hub and missing kernels.
    for logger in ("transformers", "huggingface_hub", "bitsandbytes", *(["hf_ckpt.attach.attach"] if plans else [])):
        logging.getLogger(logger).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="peft")  # about shapes and names that it corrects itself
