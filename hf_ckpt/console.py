"""The console that commands and summaries print their tables to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console(stderr: bool = False) -> Console:
    """Make a rich console on standard output, or on standard error.

    Without a terminal it has as many columns as the variable COLUMNS says, or else at least 120.
    """
    from rich.console import Console

    console = Console(stderr=stderr)
    # Not a terminal (a log file, CI): rich would fold tables at 80 columns.
    kept = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if kept else Console(stderr=stderr, width=max(console.width, 120))
