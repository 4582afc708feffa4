"""What follows from the figures of `peers.py`: the frontier, plans against others at each budget, tables, a picture."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison import Table
from harness import Case, Results, median, mib, ratios, spread
from pictures import PLANNED, colour_of_policy, drawing, label_points, save_figure
from ways import OURS, OURS_COMPILED

from hf_ckpt.units import format_ratio

BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of the way from the lowest peak of any plan to the peak without checkpointing."""
Row = dict[str, Any]
"""Figures of one way. Bytes are peaks of an optimizer step, with weights, gradients and optimizer state: of the
allocator (`allocated_bytes`), of all live tensors (`live_bytes`), and of the process or the device
(`reserved_bytes`)."""


def is_compiled(row: Row) -> bool:
    """Whether another kind of program runs, which is listed apart."""
    return "compile" in row["group"]


def time_ratio(row: Row) -> float | None:
    """The median of the turns' ratios: step time over that of the reference."""
    return median(ratios(row["step_seconds"], row["reference_seconds"]))


def seconds(case: Case, row: Row) -> float | None:
    """Seconds of a step: its ratio of the reference's fastest."""
    beside = [value for other in case["rows"] for value in other["reference_seconds"]]
    beside += [value for other in case["rows"] if other["name"] == case["reference"] for value in other["step_seconds"]]
    ratio = time_ratio(row)
    return None if ratio is None or not beside else ratio * min(beside)


def peak_error(row: Row) -> float | None:
    """Measured over predicted peak, less 1."""
    peak, predicted = row.get("allocated_bytes"), row.get("predicted_peak_bytes")
    return None if peak is None or predicted is None else peak / predicted - 1


def seconds_error(case: Case, row: Row) -> float | None:
    """Measured over predicted step time, less 1."""
    taken, predicted = seconds(case, row), row.get("predicted_seconds")
    return taken / predicted - 1 if taken and predicted else None


def fault(case: Case, row: Row) -> str | None:
    """What must not happen to a row of hf_ckpt: other gradients, although its head is whole, or nothing recomputed."""
    if row["group"] != OURS or "error" in row:
        return None
    if row["first_difference"] is not None and case["repeatable"] and "head" not in row["name"]:
        return f"{row['name']}: gradients differ: {row['first_difference']}"
    return f"{row['name']}: nothing was recomputed" if row["recomputed"] == 0 and "plan" not in row else None


def on_frontier(case: Case, row: Row) -> bool:
    """Whether nothing else is as fast with as little memory; what is compiled is left aside."""
    points = [
        (other["allocated_bytes"], time_ratio(other))
        for other in case["rows"]
        if not is_compiled(other) and other["step_seconds"]
    ]
    mine = (row.get("allocated_bytes"), time_ratio(row))
    return mine in points and not any(point != mine and point[0] <= mine[0] and point[1] <= mine[1] for point in points)


@dataclasses.dataclass(frozen=True)
class AtBudget:
    """The plan for one budget against the fastest of the others that fits into it."""

    ours: Row
    rival: Row | None
    """None if none of them fits."""

    @property
    def fits(self) -> bool:
        """Whether the plan's measured peak is within the budget."""
        return "error" not in self.ours and self.ours["allocated_bytes"] <= self.ours["budget_bytes"]

    @property
    def ratio(self) -> float | None:
        """Step time over the rival's."""
        mine, theirs = time_ratio(self.ours), None if self.rival is None else time_ratio(self.rival)
        return None if mine is None or theirs is None else mine / theirs

    @property
    def ahead(self) -> bool:
        """Whether the plan fits and nothing else that fits is faster."""
        return self.fits and (self.ratio is None or self.ratio <= 1)


def at_budgets(case: Case) -> list[AtBudget]:
    """One line a budget. Plans of blocks in eager mode are not compared with what is compiled."""
    others = [row for row in case["rows"] if row["group"] not in (OURS, OURS_COMPILED) and row["step_seconds"]]
    found = []
    for ours in case["rows"]:
        if "budget_bytes" in ours:
            fitting = [
                other
                for other in others
                if other["allocated_bytes"] <= ours["budget_bytes"] and (is_compiled(ours) or not is_compiled(other))
            ]
            found.append(AtBudget(ours, min(fitting, key=lambda other: time_ratio(other) or 0.0, default=None)))
    return found


# --- tables and the picture -------------------------------------------------------------------------------------------


def ways_table(name: str, case: Case) -> Table:
    """Every way on one model. `*` marks the frontier, `error` is measured over predicted, less 1."""
    columns = (
        "way",
        "",
        "peak MiB",
        "error",
        "live",
        "taken",
        "step ms",
        "error",
        "of none",
        "spread",
        "first s",
        "grad.",
    )
    cells = [
        (
            row["name"],
            "*" if on_frontier(case, row) else "",
            mib(row.get("allocated_bytes")),
            _share(peak_error(row)),
            mib(row.get("live_bytes")),
            mib(row.get("reserved_bytes")),
            "-" if (taken := seconds(case, row)) is None else f"{taken * 1e3:.0f}",
            _share(seconds_error(case, row)),
            format_ratio(time_ratio(row)),
            spread(ratios(row["step_seconds"], row["reference_seconds"])),
            "-" if row.get("first_seconds") is None else f"{row['first_seconds']:.1f}",
            _gradients(case, row),
        )
        for row in case["rows"]
    ]
    return Table(f"{name}, {case['blocks']} blocks, compared with {case['reference']}", columns, cells, (0, 1, 11))


def ways_of_all(results: Results, skip: str = "") -> Table:
    """Every way on every model, but those of one group: peak in MiB, and step time over that of no checkpointing."""
    every = [row for case in results.good.values() for row in case["rows"]]
    names = dict.fromkeys(row["name"] for row in every if row["step_seconds"] and row["group"] != skip)
    rows = {name: {row["name"]: row for row in case["rows"]} for name, case in results.good.items()}
    return Table("every way", ("way", *rows), [(way, *(_cell(of.get(way)) for of in rows.values())) for way in names])


def _cell(row: Row | None) -> str:
    return f"{mib(row['allocated_bytes'])}, {format_ratio(time_ratio(row))}" if row and row["step_seconds"] else "-"


def budgets_table(results: Results, shares: Sequence[float] = BUDGETS) -> Table:
    """The plans for some budgets, and the fastest others that fit."""
    columns = ("model", "budget", "MiB", "plan", "peak MiB", "of none", "fastest other", "peak MiB", "of none", "ratio")
    cells = []
    for name, case in results.good.items():
        for line in at_budgets(case):
            ours, rival = line.ours, line.rival or {"name": "none fits", "step_seconds": [], "reference_seconds": []}
            if ours["budget_share"] in shares:
                plan, ratio = _short(ours["plan"]), "-" if line.ratio is None else f"{line.ratio:.2f}"
                row = (name, f"{ours['budget_share']:.0%}", mib(ours["budget_bytes"]), plan)
                for side in (ours, rival):
                    row += () if side is ours else (side["name"],)
                    row += (mib(side.get("allocated_bytes")), format_ratio(time_ratio(side)))
                cells.append((*row, ratio))
    return Table("the plan for each budget, and the fastest other", columns, cells, (0, 3, 6))


def _short(plan: str) -> str:
    """What a plan does, without its heading and classes; the stack is named if there are several."""
    lines = [re.sub(r" \(\d+ x [^)]*\)", "", line.strip()) for line in plan.splitlines()[1:]]
    return "; ".join(lines if len(lines) > 1 else [line.partition(": ")[2] for line in lines])


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _gradients(case: Case, row: Row) -> str:
    if "error" in row:
        return "failed"
    if row["name"] == case["reference"]:
        return "-"
    return "equal" if row["first_difference"] is None else f"{row['difference']:.0e}"


def tables(results: Results) -> list[Table]:
    """A table of all ways for each model, what failed, and the plans for budgets."""
    errors = [
        (name, row["name"], row["error"])
        for name, case in results.good.items()
        for row in case["rows"]
        if "error" in row
    ]
    shown = [ways_table(name, case) for name, case in results.good.items()]
    shown += [Table("what did not run", ("model", "way", "error"), errors, (0, 1, 2))] if errors else []
    return [*shown, budgets_table(results)]


MARKERS = {
    "none": "s",
    "transformers": "X",
    "torch SAC": "^",
    "torch_remat": "<",
    "TRL": "v",
    "torch.compile": "D",
    "hf_ckpt": "o",
    "hf_ckpt compiled": "P",
}
"""Group -> marker of the picture."""
SHORT = {
    " (HF)": "",
    "every_n_layers: ": "every ",
    "compiled, budget ": "compiled ",
    "all matmuls + attention": "matmuls",
    "every 2nd matmul + attention": "every 2nd matmul",
    "selective, save ": "save ",
    "torch_remat": "remat",
}
"""Part of the name of a way -> what its label says instead."""


def draw(results: Results, path: Path) -> None:
    """One panel a model: step time against peak of every way. The marker says whose it is, the colour what it does."""
    count = len(results.good)
    columns, lines = min(count, 2), -(-count // 2)
    with drawing() as pyplot:
        size = (7 * columns, 5.2 * lines + 1)
        figure, panels = pyplot.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
        legend: dict[str, Any] = {}
        for axes, (name, case) in zip(panels.flat, results.good.items(), strict=False):
            axes.axhline(1, color="0.6", linestyle=":", linewidth=1)
            for row in case["rows"]:
                if not row["step_seconds"]:
                    continue
                planned = "budget_bytes" in row
                marker, area = ("*", 260) if planned else (MARKERS[row["group"]], 70)
                colour = PLANNED if planned else colour_of_policy(row["name"])
                axes.scatter(*_point(row), marker=marker, color=colour, s=area, zorder=3)
                label = "hf_ckpt, planned for a budget" if planned else row["group"]
                if label not in legend and label != "none":
                    legend[label] = axes.scatter([], [], marker=marker, color=PLANNED if planned else "0.35", s=area)
            axes.set(xlabel="peak (MiB)", ylabel=f"step time / {case['reference']}")
            axes.set_title(name, fontsize=11)
            axes.margins(0.1)
        for axes in panels.flat[count:]:
            axes.axis("off")
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=5)
        for axes, case in zip(panels.flat, results.good.values(), strict=False):
            rows = [row for row in case["rows"] if row["step_seconds"]]
            labels = [(*_point(row), _label(row["name"])) for row in rows if "budget_bytes" not in row]
            label_points(axes, labels, [_point(row) for row in rows])
        save_figure(figure, path)


def _point(row: Row) -> tuple[float, float]:
    return row["allocated_bytes"] / 2**20, time_ratio(row) or 0.0


def _label(name: str) -> str:
    for long, short in SHORT.items():
        name = name.replace(long, short)
    return name
