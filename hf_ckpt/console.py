"""How commands and summaries print to the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """Show what is done on stderr, beginning with the text `first`: as a spinner in a terminal, else as lines.

    Yields a function that takes the next text.
    """
    console = make_console(stderr=True)
    if console.is_terminal:
        with console.status(first) as status:
            yield status.update
    else:

        def tell(text: str) -> None:
            print(f"hf-ckpt: {text} ...", file=sys.stderr, flush=True)

        tell(first)
        yield tell
