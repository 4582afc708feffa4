"""How commands and summaries print to the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console(stderr: bool = False) -> Console:
    """Make a rich console on stdout or stderr. If that is not a terminal, it has at least 120 columns."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal:  # in a log file, tables would be folded at 80 columns: no command could be copied
        console.width = max(console.width, 120)
    return console


def print_plain(console: Console, *lines: str, style: str = "") -> None:
    """Print lines as they are: rich would colour numbers, read brackets as markup, and break long lines.

    A command or a line of YAML that is broken in two cannot be copied.
    """
    for line in lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def print_progress(text: str) -> None:
    """Print to stderr what is done now."""
    print(f"hf-ckpt: {text} ...", file=sys.stderr, flush=True)
