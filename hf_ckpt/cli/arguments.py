"""What several verbs of the command line share: a kind of argument, a progress bar, and quieter libraries."""

from __future__ import annotations

import argparse
import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def positive(text: str) -> int:
    """Read a whole number of at least 1, for argparse. Raises `ArgumentTypeError` or `ValueError` for other texts."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {value} instead")
    return value


@contextlib.contextmanager
def progress_bar(console: Console, total: int | None) -> Iterator[Callable[[str], None]]:
    """Show a progress bar, and yield a function to be called with a few words before each of `total` steps.

    Without a total the bar shows only what is being done, and for how long.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    counts = () if total is None else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=total is None) as progress:
        task = progress.add_task("starting", total=total)
        started = False

        def on_progress(description: str) -> None:
            nonlocal started
            progress.update(task, description=description, advance=1 if started else 0)
            started = True

        yield on_progress
        progress.update(task, description="done", advance=1)


def quiet_libraries() -> None:
    """Silence progress bars and warnings of other libraries. To be called before transformers is imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # PEFT reads a deprecated name
