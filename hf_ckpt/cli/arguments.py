"""What several verbs of the command line share: kinds of arguments, errors, progress, faster and quieter imports."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator

from hf_ckpt.console import make_console
from hf_ckpt.errors import HfCkptError, reason_of, shown
from hf_ckpt.prediction.choices import may_be_attention
from hf_ckpt.units import UnitError, parse_budget, parse_bytes


def memory_budget(text: str) -> str:
    """Return a text that is a budget, for argparse. Raises `ArgumentTypeError` for other texts."""
    return _unless_refused(parse_budget, text)


def memory_size(text: str) -> str:
    """Return a text that is a size in bytes, for argparse. Raises `ArgumentTypeError` for other texts."""
    return _unless_refused(parse_bytes, text)


def _unless_refused(read: Callable[[str], object], text: str) -> str:
    try:
        read(text)
    except UnitError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def attention(text: str) -> str:
    """Return a text that may name an attention implementation, for argparse. Raises `ArgumentTypeError` for others."""
    if not may_be_attention(text):
        raise argparse.ArgumentTypeError(
            "must be sdpa, eager, flex_attention, a version of flash attention (flash_attention_2), or a kernel of the "
            f"hub (owner/name), but is {shown(text)} instead"
        )
    return text


def positive(text: str) -> int:
    """Read a whole number of at least 1, for argparse. Raises `ArgumentTypeError` or `ValueError` for other texts."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {value} instead")
    return value


@contextlib.contextmanager
def told_as(what: str) -> Iterator[None]:
    """Raise an `HfCkptError` that begins with `what` in place of any error, for calls of other libraries."""
    try:
        yield
    except HfCkptError:
        raise
    except Exception as error:
        raise HfCkptError(f"{what}: {reason_of(error)}.") from error


@contextlib.contextmanager
def within_memory(what: str) -> Iterator[None]:
    """Raise an `HfCkptError` that names `what` where memory runs out for it."""
    from hf_ckpt import compat

    try:
        yield
    except Exception as error:
        if not compat.is_out_of_memory(error):
            raise
        raise HfCkptError(f"memory ran out for {what}: {reason_of(error)}.") from error


@contextlib.contextmanager
def progress(first: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show on standard error what is being done, and for how long, beginning with `first`.

    Yields a function to be called with a few words before whatever is done next. With a `total`, a bar counts these
    calls. Where standard error is no terminal there is no bar, and without a total each text is a line of its own.
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


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """As a context for imports of large packages: without garbage collection, a sixth of whose time goes into looking
    through objects that stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def quiet_libraries() -> None:
    """Silence progress bars and warnings of other libraries. To be called before transformers is imported."""
    # torch logs the traceback of a shape that does not fit, beside raising the error.
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # PEFT reads a deprecated name
