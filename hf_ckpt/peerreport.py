"""Comparisons with peers as tables and pictures. Free of torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.report import import_pyplot, make_console, save_figure
from hf_ckpt.units import format_bytes, format_percent, format_ratio, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hf_ckpt.peerbench import LargestBench, PeerBench, PeerCase, PeerRow
    from hf_ckpt.setups import Setup

MARKERS = {"none": "s", "transformers": "X", "torch SAC": "^", "TRL": "v", "torch.compile": "D", "hf_ckpt": "o"}
"""Group -> marker."""
COLOURS = {
    "none": "black",
    "transformers": "tab:orange",
    "torch SAC": "tab:green",
    "TRL": "tab:purple",
    "torch.compile": "0.6",
    "hf_ckpt": "tab:blue",
}


def print_peers(result: PeerBench, console: Console | None = None) -> None:
    """Two tables a model: every way, and what is the fastest at each budget."""
    console = console or make_console()
    for case in result.cases:
        console.print(_rows(case))
        for row in case.rows:
            for told in (row.error, row.fault):
                if told:
                    console.print(f"{row.name}: {told}", markup=False, highlight=False, soft_wrap=True)
        console.print(_budgets(case))
    found = result.circumstances
    console.print(
        f"{found['device']}, {found['threads']} threads of {found['cpus']} CPUs; torch {found['torch']}, transformers "
        f"{found['transformers']}, {found['date']}\n"
        "peak:     of the allocator, through a whole optimizer step: weights, gradients and optimizer state included;\n"
        "          a count of all live tensors beside it; `taken` is the process's resident size on a CPU.\n"
        f"step:     forward, backward and optimizer, median of {result.repeats} interleaved steps; ratios within one.\n"
        "error:    measured over predicted, less 1.\n"
        "*:        on the frontier: no other way is as fast with as little memory (compiled ones aside).",
        highlight=False,
    )


def describe_setup(setup: Setup) -> str:
    """A setup in a line."""
    tuning = "full fine-tuning" if setup.lora is None else f"LoRA r={setup.lora}"
    accumulated = f" x {setup.accumulation} micro-steps" if setup.accumulation > 1 else ""
    return (
        f"{setup.model}, {tuning}, batch {setup.batch} x {setup.tokens}{accumulated}, {setup.dtype}, "
        f"{setup.optimizer}, {setup.attention}"
    )


def _rows(case: PeerCase) -> Table:
    names = ("way", "", "peak", "error", "live", "taken", "step", "error", "of none", "spread", "tokens/s", "gradients")
    table = _table(f"{describe_setup(case.setup)}; {case.blocks} blocks", names, left=(0, 1, 11))
    for row in case.rows:
        seconds = row.seconds
        table.add_row(
            row.name,
            "*" if row.frontier else "",
            format_bytes(row.allocated_bytes),
            format_percent(row.peak_error),
            format_bytes(row.live_bytes),
            format_bytes(row.reserved_bytes),
            format_seconds(seconds),
            format_percent(row.seconds_error),
            format_ratio(statistics.median(row.time_ratios) if row.time_ratios else None),
            f"{min(row.time_ratios):.2f}-{max(row.time_ratios):.2f}" if row.time_ratios else "-",
            f"{case.tokens / seconds:,.0f}" if seconds else "-",
            _gradients(row),
        )
    return table


def _gradients(row: PeerRow) -> str:
    if row.error is not None:
        return "[yellow]not measured"
    if row.fault:
        return "[bold red]FAILED"
    if row.group == "none":
        return "reference"
    return "bit-equal" if row.first_difference is None else f"{row.difference or 0:.0e}"


def _budgets(case: PeerCase) -> Table:
    names = ("budget", "", "plan", "peak", "fastest other that fits", "peak", "plan's step over its")
    table = _table("the plan for each budget", names, left=(2, 4))
    rows = {row.name: row for row in case.rows}
    for line in case.at_budgets():
        rival = rows.get(line.rival or "")
        ours = rows[line.ours]
        table.add_row(
            f"{line.share:.0%}",
            format_bytes(line.budget_bytes),
            _short(ours.plan or ""),
            format_bytes(ours.allocated_bytes),
            line.rival or "none",
            format_bytes(rival.allocated_bytes if rival else None),
            format_ratio(line.ratio),
        )
    return table


def _short(plan: str) -> str:
    """The actions of a plan's lines, without its heading."""
    return "; ".join(line.strip() for line in plan.splitlines()[1:])[:60]


def _table(title: str, names: Sequence[str], left: Sequence[int]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", pad_edge=False)
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place in left else "right", no_wrap=place in (0, 2))
    return table


def print_largest(result: LargestBench, console: Console | None = None) -> None:
    """One row for each way."""
    console = console or make_console()
    what = "sequences" if result.what == "batch" else "tokens"
    title = f"{describe_setup(result.setup)}: most {what} within {format_bytes(result.budget_bytes)}"
    table = _table(title, ("way", what, "of none", "peak", "tried", "note"), left=(0, 4, 5))
    for row in result.rows:
        table.add_row(
            row.name,
            "-" if row.largest is None else str(row.largest),
            format_ratio(row.over_none),
            format_bytes(row.peak_bytes),
            str(len(row.tried)),
            row.error or "",
        )
    console.print(table)


def save_peers_picture(result: PeerBench, path: Path) -> None:
    """One panel a model: step time against peak of every way, and the frontier.

    Raises `MissingDependencyError` without matplotlib.
    """
    count = len(result.cases)
    columns = min(count, 2)
    figure, panels = import_pyplot().subplots(
        -(-count // columns), columns, figsize=(6.2 * columns, 4.6 * -(-count // columns)), squeeze=False
    )
    every = [axes for line in panels for axes in line]
    for axes, case in zip(every, result.cases, strict=False):
        _draw(axes, case)
    for axes in every[count:]:
        axes.axis("off")
    found: dict[str, Any] = {}
    for axes in every[:count]:
        handles, labels = axes.get_legend_handles_labels()
        found.update(zip(labels, handles, strict=True))
    figure.legend(found.values(), found.keys(), loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.05 + 0.03 * (count < 3), 1, 1))
    save_figure(figure, path)


def _draw(axes: Any, case: PeerCase) -> None:
    rows = [row for row in case.rows if row.allocated_bytes and row.time_ratios]

    def place(row: PeerRow) -> tuple[float, float]:
        return (row.allocated_bytes or 0) / 2**20, statistics.median(row.time_ratios)

    for group, marker in MARKERS.items():
        fixed = [row for row in rows if row.group == group and row.budget_bytes is None]
        _scatter(axes, [place(row) for row in fixed], marker, COLOURS[group], 36, group)
    planned = [row for row in rows if row.budget_bytes is not None]
    _scatter(axes, [place(row) for row in planned], "*", COLOURS["hf_ckpt"], 150, "hf_ckpt, planned for a budget")
    edge = sorted(place(row) for row in rows if row.frontier)
    if edge:
        axes.step(*zip(*edge, strict=True), where="post", color="0.5", linewidth=1, zorder=0, label="frontier (eager)")
    for row in rows:
        if row.group != "hf_ckpt":
            name = row.name.removesuffix(" (HF)").replace("every_n_layers: ", "every ").replace("compiled, budget ", "")
            axes.annotate(name, place(row), textcoords="offset points", xytext=(5, 3), fontsize=6.5, color="0.3")
    axes.set(xlabel="peak (MiB)", ylabel="step time / none", title=describe_setup(case.setup))
    axes.title.set_fontsize(8.5)
    axes.grid(alpha=0.25)
    axes.margins(x=0.12)


def _scatter(axes: Any, places: Sequence[tuple[float, float]], marker: str, colour: str, size: int, label: str) -> None:
    if places:
        axes.scatter(*zip(*places, strict=True), marker=marker, color=colour, s=size, label=label, zorder=3)
