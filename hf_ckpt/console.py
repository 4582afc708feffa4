"""How commands and summaries print to the terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console(stderr: bool = False) -> Console:
    """Make a rich console on stdout or stderr.

    If that is not a terminal, the width is the environment variable COLUMNS, or at least 120 columns.
    """
    from rich.console import Console

    console = Console(stderr=stderr)
    # Not a terminal (a log file, CI): rich would fold tables at 80 columns.
    kept = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if kept else Console(stderr=stderr, width=max(console.width, 120))


def print_beside_bars(text: str) -> None:
    """Print lines to stderr, above the progress bars of tqdm."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)
