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
from comparison import Table
from harness import Results
from ways import OURS, OURS_COMPILED

from hf_ckpt.spec.files import read_values, write_text
from hf_ckpt.units import format_bytes, format_seconds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MARKED = re.compile(r"<!-- ([\w -]+): figures -->\n(.*?)\n<!-- end of \1: figures -->", re.DOTALL)
"""The name of a table, and the table, between their marks."""


def read(name: str) -> Results:
    """The figures in `NAME-cpu.json`."""
    return Results.read(HERE / f"{name}-cpu.json")


def demo() -> Table:
    """Peak and step time of each plan of the demo."""
    runs = read_values(HERE / "demo-cpu.json")["runs"]
    cells = [
        (f"`{run['name']}`", format_bytes(run["live_peak_bytes"]), format_seconds(run["step_seconds"])) for run in runs
    ]
    return Table("", ("plan", "live peak", "step"), cells)


def peers() -> Table:
    """The plans for three budgets beside the fastest others, without what each plan does."""
    table = peer_figures.budgets_table(read("peers"), (0.3, 0.5, 0.7))
    place = table.columns.index("plan")
    columns, *rows = ((*cells[:place], *cells[place + 1 :]) for cells in (table.columns, *table.rows))
    return Table("", columns, rows)


COMPARED = {
    "LLaMA, GPT-2, BERT, T5": ("peers", OURS),
    "LoRA of rank 8: LLaMA, BERT": ("peers-lora", OURS),
    "dropout of 0.1: GPT-2": ("peers-dropout", OURS),
    "compiled blocks: LLaMA, GPT-2, BERT, T5": ("compiled", OURS_COMPILED),
}
"""What is trained -> file of figures, and the group of the plans in it."""


def ahead() -> Table:
    """How often the plan for a budget is faster than every other way that fits."""
    cells = []
    for training, (name, group) in COMPARED.items():
        lines = [line for case in read(name).good.values() for line in peer_figures.at_budgets(case)]
        lines = [line for line in lines if line.ours["group"] == group]
        ratios = [line.ratio for line in lines if line.ratio is not None]
        fastest = f"{sum(line.ahead for line in lines)} of {len(lines)}"
        cells.append((training, fastest, f"{min(ratios):.2f} to {max(ratios):.2f}"))
    return Table("", ("training", "plan is fastest", "step time / fastest other"), cells)


TABLES: Mapping[str, Callable[[], Table]] = {
    "demo": demo,
    "every way": lambda: peer_figures.ways_of_all(read("peers"), skip="torch.compile"),
    "peers": peers,
    "ahead": ahead,
    "compiled": lambda: peer_figures.ways_of_all(read("compiled")),
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
