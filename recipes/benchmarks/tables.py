"""The tables of the pages, written from the figures that lie beside this file: one between each pair of marks.

python recipes/benchmarks/tables.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import engines
import largest
import peer_figures
from harness import Results

from hf_ckpt.cli.comparison import Table
from hf_ckpt.cli.demo_run import DemoResult
from hf_ckpt.spec.files import read_values, write_text
from hf_ckpt.units import format_bytes, format_seconds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MARKED = re.compile(r"<!-- ([\w -]+): figures -->\n(.*?)\n<!-- end of \1: figures -->", re.DOTALL)
"""The name of a table, and the table, between their marks."""


def read(name: str) -> Results:
    """The figures in `NAME-cpu.json`."""
    return Results.read(HERE / f"{name}-cpu.json")


def together(*names: str) -> Results:
    """The cases of several files as one, with the settings of the first."""
    first, *others = map(read, names)
    for other in others:
        first.cases |= other.cases
    return first


def demo() -> Table:
    """Peak and step time of each plan of the demo."""
    runs = DemoResult.from_dict(read_values(HERE / "demo-cpu.json")).runs
    cells = [(f"`{run.name}`", format_bytes(run.live_peak_bytes), format_seconds(run.step_seconds)) for run in runs]
    return Table("", ("plan", "live peak", "step"), cells)


def peers() -> Table:
    """The plans for three budgets beside the fastest others, without what each plan does."""
    table = peer_figures.budgets_table(read("peers"), (0.3, 0.5, 0.7))
    place = table.columns.index("plan")
    columns, *rows = ((*cells[:place], *cells[place + 1 :]) for cells in (table.columns, *table.rows))
    return Table("", columns, rows)


TABLES: Mapping[str, Callable[[], Table]] = {
    "demo": demo,
    "every way": lambda: peer_figures.ways_of_all(read("peers"), skip="torch.compile"),
    "peers": peers,
    "compiled": lambda: peer_figures.ways_of_all(together("compiled", "compiled-t5", "compiled-bert")),
    "engines": lambda: engines.all_engines(read("engines")),
    "watch": lambda: engines.checks(read("watch")),
    "dropout": lambda: engines.all_engines(read("dropout")),
    "largest": lambda: largest.largest_table([read("max-batch"), read("max-seq")]),
}
"""What stands between the marks of a name."""


def pages() -> list[Path]:
    """The pages that may have such tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), HERE / "README.md"]


def rewritten(text: str) -> str:
    """A page with all of its tables written anew. Raises `KeyError` for a name that is not in `TABLES`."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- {match[1]}: figures -->\n{TABLES[match[1]]().markdown()}\n<!-- end of {match[1]}: figures -->"

    return MARKED.sub(table, text)


def main() -> int:
    """Rewrite all pages."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if text != rewritten(text):
            write_text(page, rewritten(text))
            print(f"rewrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
