"""Comparisons with peers as tables and pictures. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.report import import_pyplot, make_console, save_figure
from hf_ckpt.units import format_bytes, format_ratio

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hf_ckpt.peerbench import LargestBench, LargestRow, PeerBench, PeerCase, PeerRow
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


PEER_NAMES = (
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
    "tok/s",
    "grad.",
)
BUDGET_NAMES = ("budget", "MiB", "plan", "peak MiB", "of none", "fastest other", "peak MiB", "of none", "ratio")


def print_peers(result: PeerBench, console: Console | None = None) -> None:
    """Two tables a model: every way, and what is the fastest at each budget."""
    console = console or make_console()
    for case in result.cases:
        console.print(_table(_title(case), PEER_NAMES, map(_cells, case.rows), left=(0, 1, 11)))
        for name, told in _told(case):
            console.print(f"{name}: {told}", markup=False, highlight=False, soft_wrap=True)
        lines = _budget_cells(case)
        console.print(_table("the plan for each budget, and the fastest other", BUDGET_NAMES, lines, left=(2, 5)))
    console.print(legend(result), highlight=False)


def peers_as_markdown(result: PeerBench) -> str:
    """The same as Markdown."""
    parts: list[str] = []
    for case in result.cases:
        parts += [f"### {_title(case)}", _markdown(PEER_NAMES, map(_cells, case.rows))]
        parts += ["\n".join(f"- {name}: {told}" for name, told in _told(case))]
        parts += [_markdown(BUDGET_NAMES, _budget_cells(case))]
    return "\n\n".join(part for part in parts if part) + "\n"


def budgets_as_markdown(result: PeerBench, shares: Sequence[float]) -> str:
    """One table of all models: the plans for these budgets, and the fastest others that fit."""
    lines = [
        (case.setup.model, *cells)
        for case in result.cases
        for line, cells in zip(case.at_budgets(), _budget_cells(case), strict=True)
        if line.share in shares
    ]
    return _markdown(("model", *BUDGET_NAMES), lines)


def legend(result: PeerBench) -> str:
    """What the columns mean, and where they were measured."""
    found = result.circumstances
    compared = " or ".join(dict.fromkeys(case.reference for case in result.cases))
    return (
        f"{found['device']}, {found['threads']} threads of {found['cpus']} CPUs; torch {found['torch']}, transformers "
        f"{found['transformers']}, {found['date']}\n"
        "peak:    of the allocator, through a whole optimizer step: weights, gradients and optimizer state included\n"
        "live:    the same, as a count of all live tensors (MiB)\n"
        "taken:   what the process holds, on a CPU its resident size; on an accelerator what its allocator took (MiB)\n"
        f"of none: forward, backward and optimizer: the fastest of a few steps over that of {compared} beside them; "
        f"median and spread of {result.repeats} turns\n"
        "error:   measured over predicted, less 1\n"
        "*:       on the frontier: no other way is as fast with as little memory (compiled ones aside)"
    )


def describe_setup(setup: Setup) -> str:
    """A setup in a line."""
    tuning = "full fine-tuning" if setup.lora is None else f"LoRA r={setup.lora}"
    accumulated = f" x {setup.accumulation} micro-steps" if setup.accumulation > 1 else ""
    return (
        f"{setup.model}, {tuning}, batch {setup.batch} x {setup.tokens}{accumulated}, {setup.dtype}, "
        f"{setup.optimizer}, {setup.attention}"
    )


def _title(case: PeerCase) -> str:
    compared = "" if case.reference == "none" else f"; none does not run, compared with {case.reference}"
    return f"{describe_setup(case.setup)}; {case.blocks} blocks{compared}"


def _told(case: PeerCase) -> list[tuple[str, str]]:
    return [(row.name, told) for row in case.rows for told in (row.error, row.fault) if told]


def _cells(row: PeerRow) -> tuple[str, ...]:
    ratios = row.time_ratios
    return (
        row.name,
        "*" if row.frontier else "",
        _mib(row.allocated_bytes),
        _share(row.peak_error),
        _mib(row.live_bytes),
        _mib(row.reserved_bytes),
        "-" if row.seconds is None else f"{row.seconds * 1e3:.0f}",
        _share(row.seconds_error),
        format_ratio(row.time_ratio),
        f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "-",
        "-" if row.tokens_per_second is None else f"{row.tokens_per_second:.0f}",
        _gradients(row),
    )


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _gradients(row: PeerRow) -> str:
    if row.fault:
        return "FAILED"
    if row.group == "none" or row.difference is None:
        return "-"
    return "equal" if row.first_difference is None else f"{row.difference:.0e}"


def _budget_cells(case: PeerCase) -> list[tuple[str, ...]]:
    rows = {row.name: row for row in case.rows}
    found: list[tuple[str, ...]] = []
    for line in case.at_budgets():
        ours, rival = rows[line.ours], rows.get(line.rival or "")
        found.append(
            (
                f"{line.share:.0%}",
                _mib(line.budget_bytes),
                _short(ours.plan or ""),
                _mib(ours.allocated_bytes),
                format_ratio(ours.time_ratio),
                line.rival or "none fits",
                _mib(rival.allocated_bytes if rival else None),
                format_ratio(rival.time_ratio if rival else None),
                "-" if line.ratio is None else f"{line.ratio:.2f}",
            )
        )
    return found


def _short(plan: str) -> str:
    """What a plan does, without its heading and classes; the stack is named where there are several."""
    lines = [re.sub(r" \(\d+ x [^)]*\)", "", line.strip()) for line in plan.splitlines()[1:]]
    return "; ".join(lines if len(lines) > 1 else [line.partition(": ")[2] for line in lines])


def _markdown(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _table(title: str, names: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", pad_edge=False, collapse_padding=True)
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place in left else "right")
    for cells in rows:
        table.add_row(*map(escape, cells))
    return table


def print_largest(result: LargestBench, console: Console | None = None) -> None:
    """One row for each way."""
    console = console or make_console()
    what = "sequences" if result.what == "batch" else "tokens"
    title = f"{describe_setup(result.setup)}: most {what} within {format_bytes(result.budget_bytes)}"
    names = ("way", what, "of none", "peak", "tried", "note")
    rows = [
        (
            row.name,
            "-" if row.largest is None else str(row.largest),
            format_ratio(row.over_none),
            format_bytes(row.peak_bytes),
            str(len(row.tried)),
            row.error or "",
        )
        for row in result.rows
    ]
    console.print(_table(title, names, rows, left=(0, 5)))


def largest_as_markdown(results: Sequence[LargestBench]) -> str:
    """One table: how far every way goes, a column for each search."""
    heads = [f"{result.setup.model}: {_what(result)} in {format_bytes(result.budget_bytes)}" for result in results]
    names = dict.fromkeys(row.name for result in results for row in result.rows)
    found = [{row.name: row for row in result.rows} for result in results]
    lines = [(name, *(_largest_cell(rows.get(name)) for rows in found)) for name in names]
    return _markdown(("way", *heads), lines)


def _what(result: LargestBench) -> str:
    return "batch" if result.what == "batch" else "tokens"


def _largest_cell(row: LargestRow | None) -> str:
    if row is None or row.largest is None:
        return "-"
    return f"{row.largest} ({format_ratio(row.over_none)})"


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
    figure.legend(found.values(), found.keys(), loc="lower center", ncols=4, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.06 if count > 2 else 0.12, 1, 1))
    save_figure(figure, path)


def _draw(axes: Any, case: PeerCase) -> None:
    rows = [row for row in case.rows if row.allocated_bytes and row.time_ratios]

    def place(row: PeerRow) -> tuple[float, float]:
        return (row.allocated_bytes or 0) / 2**20, row.time_ratio or 0.0

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
