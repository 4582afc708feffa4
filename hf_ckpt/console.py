"""Where commands and summaries print."""

from __future__ import annotations

import os
import sys
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


def print_beside_bars(text: str) -> None:
    """Print lines on standard error, above the progress bars that tqdm draws there."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)
