"""What follows from figures: ratios, plans against others at each budget, and the tables of the pages.

python recipes/benchmarks/figures.py  # rewrites the tables of the pages from the JSON files beside this script
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from harness import Case, Results
from ways import CHECKED, COMPILED, OURS, OURS_COMPILED

HERE = Path(__file__).resolve().parent
UNITS = {"GB": 10**9, "GiB": 2**30}
ROOT = HERE.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), HERE / "README.md"]
BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of the way from the lowest peak of any plan to the peak without checkpointing."""


def ratio(row: Case) -> float:
    """Step time of a way over that of the reference: the median of the turns' ratios."""
    turns = zip(row["step_seconds"], row["reference_seconds"], strict=False)
    return statistics.median(mine / other for mine, other in turns)


def timed(case: Case) -> list[Case]:
    """The ways that ran."""
    return [row for row in case["rows"] if row["step_seconds"]]


def faults(results: Results) -> list[str]:
    """Models that failed, and rows of hf_ckpt with other gradients, although the head is whole, or no recomputation."""
    told = [f"{name}: {case['error']}" for name, case in results.cases.items() if "error" in case]
    for name, case in results.good.items():
        for row in case["rows"]:
            if "error" in row or row["group"] not in (OURS, CHECKED):
                continue
            if row.get("first_difference") and case["repeatable"] and "head" not in row["name"]:
                told.append(f"{name}: {row['name']}: gradients differ: {row['first_difference']}")
            if row["recomputed"] == 0 and "plan" not in row:  # a plan may keep everything
                told.append(f"{name}: {row['name']}: nothing was recomputed")
    return told


def at_budgets(case: Case) -> Iterator[tuple[Case, Case | None, float]]:
    """Each plan for a budget, the fastest of the others that fits (None if none does), and the ratio of their times.

    Plans of blocks in eager mode are not compared with what is compiled.
    """
    for mine in timed(case):
        if "budget_bytes" in mine:
            skipped = (OURS, OURS_COMPILED, CHECKED, COMPILED)
            fitting = [row for row in timed(case) if row["allocated_bytes"] <= mine["budget_bytes"]]
            other = min((row for row in fitting if row["group"] not in skipped), key=ratio, default=None)
            yield mine, other, 0.0 if other is None else ratio(mine) / ratio(other)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    heading, *lines = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return "\n".join((heading, f"|{'---|' * len(columns)}", *lines))


def mib(row: Case | None, key: str = "allocated_bytes") -> str:
    """Bytes in MiB."""
    return "-" if row is None or row.get(key) is None else f"{row[key] / 2**20:.0f}"


def times(row: Case | None) -> str:
    """Step time over that of the reference, such as `1.05x`."""
    return "-" if row is None or not row["step_seconds"] else f"{ratio(row):.2f}x"


def ways_table(case: Case) -> str:
    """Every way on one model."""
    columns = ("way", "peak MiB", "predicted", "saved MiB", "time", "first s", "recomputed", "gradients")
    lines = []
    for row in case["rows"]:
        if "error" in row:
            lines.append((row["name"], row["error"], *("-" * 6)))
            continue
        equal = "equal" if row.get("first_difference") is None else f"{row['difference']:.0e}"
        sizes = (mib(row, key) for key in ("allocated_bytes", "predicted_peak_bytes", "saved_bytes"))
        lines.append((row["name"], *sizes, times(row), f"{row['first_seconds']:.1f}", str(row["recomputed"]), equal))
    return markdown(columns, lines)


def every_way(results: Results, skip: str = "") -> str:
    """Every way on every model, but those of one group: peak in MiB, and step time over that of no checkpointing."""
    ways = {name: {row["name"]: row for row in timed(case)} for name, case in results.good.items()}
    names = dict.fromkeys(name for rows in ways.values() for name, row in rows.items() if row["group"] != skip)
    cell = lambda row: f"{mib(row)}, {times(row)}" if row else "-"  # noqa: E731
    return markdown(("way", *ways), [(name, *(cell(rows.get(name)) for rows in ways.values())) for name in names])


def budgets_table(results: Results, shares: Sequence[float] = BUDGETS) -> str:
    """The plans for some budgets, and the fastest others that fit."""
    columns = ("model", "budget", "MiB", "peak MiB", "of none", "fastest other", "peak MiB", "of none", "ratio")
    lines = []
    for name, case in results.good.items():
        for mine, other, apart in at_budgets(case):
            if mine["budget_share"] in shares:
                left = (name, f"{mine['budget_share']:.0%}", mib(mine, "budget_bytes"), mib(mine), times(mine))
                right = ("-" if other is None else other["name"], mib(other), times(other), f"{apart:.2f}")
                lines.append((*left, *right))
    return markdown(columns, lines)


def tables(results: Results) -> list[str]:
    """A table of all ways for each model, and the plans for budgets."""
    return [*(f"{name}\n\n{ways_table(case)}" for name, case in results.good.items()), budgets_table(results)]


def read(name: str) -> Results:
    """The figures in `NAME-cpu.json`."""
    return Results.read(HERE / f"{name}-cpu.json")


def ahead() -> str:
    """How often the plan for a budget fits, and nothing else that fits is faster."""
    compared = {
        "LLaMA, GPT-2, BERT, T5": "peers",
        "LoRA of rank 8: LLaMA, BERT": "peers-lora",
        "dropout of 0.1: GPT-2": "peers-dropout",
    }
    lines = []
    for training, name in compared.items():
        plans = [line for case in read(name).good.values() for line in at_budgets(case)]
        first = sum(mine["allocated_bytes"] <= mine["budget_bytes"] and apart <= 1 for mine, _, apart in plans)
        known = [apart for _, other, apart in plans if other is not None]
        lines.append((training, f"{first} of {len(plans)}", f"{min(known):.2f} to {max(known):.2f}"))
    return markdown(("training", "plan is fastest", "step time / fastest other"), lines)


SHOWN = ("selective", "selective, save attention", "SAC, all matmuls + attention", "full", "every_n_layers: 2 (HF)")


def kept() -> str:
    """What a forward leaves for backward, and the step time, both over those of no checkpointing."""
    lines = []
    for training, name in {"": "peers", ", LoRA": "peers-lora", ", dropout": "peers-dropout"}.items():
        for model, case in read(name).good.items():
            rows = {row["name"]: row for row in timed(case)}
            shares = [rows[way]["saved_bytes"] / rows["none"]["saved_bytes"] for way in SHOWN]
            cells = [f"{share:.2f}, {times(rows[way])}" for way, share in zip(SHOWN, shares, strict=True)]
            lines.append((model.removesuffix("-dropout") + training, *cells))
    return markdown(("model", *SHOWN), lines)


def gpu_cells(row: Case) -> dict[str, str]:
    """What tables show of a row of `gpu.py`. `-` stands for what was not measured, or cannot be."""
    gib = lambda key: f"{row[key] / 2**30:.2f} GiB" if key in row else "-"  # noqa: E731
    reference = row.get("reference", "none")
    return {
        "model": row["model"],
        "way": row["name"] + (f" ({gib('budget_bytes')})" if "budget_bytes" in row else ""),
        "step": f"{1e3 * statistics.median(row['step_seconds']):.1f} ms" if "step_seconds" in row else "-",
        "of none": times({"step_seconds": [], **row}) + ("" if reference == "none" else f" of {reference}"),
        "peak": gib("allocated_bytes"),
        "reserved": gib("reserved_bytes"),
        "predicted": gib("predicted_peak_bytes"),
        "host, a block": f"{1e6 * row['host_seconds']:.0f} µs" if "host_seconds" in row else "-",
        "left out": row.get("left_out", ""),
    }


def gpu_table(results: Results, part: str, columns: Sequence[str] = ()) -> str:
    """A part of `gpu.py`. Without `columns`, it has those that are not empty."""
    rows = [gpu_cells(row) for row in results.good.values() if row["part"] == part]
    columns = columns or [name for name in (rows or [{}])[0] if {row[name] for row in rows} - {"-", ""}]
    return markdown(columns, [[row[name] for name in columns] for row in rows])


def published() -> str:
    """What others have measured, and what is predicted for the same question: see `published.py`."""
    lines = []
    for row in json.loads((HERE / "published.json").read_text(encoding="utf-8")):
        unit = UNITS[row["unit"]]
        figures = (f"{row['reported']} {row['unit']}", f"{row['predicted_bytes'] / unit:.1f}", f"{row['ratio']:.2f}")
        lines.append((row["who"], row["what"], row["counted"], *figures, row["differs"]))
    columns = ("who", "training", "counted", "reported", "predicted", "ratio", "what differs")
    return markdown(columns, lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "every way": lambda: every_way(read("peers"), skip=COMPILED),
    "peers": lambda: budgets_table(read("peers"), (0.3, 0.5, 0.7)),
    "ahead": ahead,
    "compiled": lambda: every_way(read("compiled")),
    "kept": kept,
    "published": published,
    "gpu": lambda: gpu_table(Results.read(HERE / "gpu.json"), "table", ("way", "step", "of none", "peak")),
}
"""What stands between the marks of a name."""
MARKED = re.compile(r"(<!-- ([\w -]+): figures -->\n)(.*?)(\n<!-- end of \2: figures -->)", re.DOTALL)


def rewritten(text: str) -> str:
    """A page with all of its tables written anew. Raises `KeyError` for a name that is not in `TABLES`."""
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[4]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
