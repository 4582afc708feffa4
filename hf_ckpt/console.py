"""The console that commands and summaries print their tables to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console(stderr: bool = False) -> Console:
    """Make a rich console on standard output, or on standard error. Without a terminal it has at least 120 columns."""
    from rich.console import Console

    console = Console(stderr=stderr)
    # Not a terminal (a log file, CI): rich would fold tables at 80 columns.
    return console if console.is_terminal else Console(stderr=stderr, width=max(console.width, 120))
