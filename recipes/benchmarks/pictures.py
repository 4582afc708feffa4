"""Benchmarks as pictures. All raise `MissingDependencyError` without matplotlib."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import turns
from report import TUNING_NAMES, describe_workload

from hf_ckpt.cli.pictures import import_pyplot, save_figure
from hf_ckpt.errors import HfCkptError

if TYPE_CHECKING:
    from engines import EngineBench, EngineCase
    from figures import PeerBench, PeerCase, PeerRow

MARKERS = {
    "none": "s",
    "transformers": "X",
    "torch SAC": "^",
    "TRL": "v",
    "torch.compile": "D",
    "hf_ckpt": "o",
    "hf_ckpt compiled": "P",
}
"""Group -> marker."""
COLOURS = {
    "none": "black",
    "transformers": "tab:orange",
    "torch SAC": "tab:green",
    "TRL": "tab:purple",
    "torch.compile": "0.6",
    "hf_ckpt": "tab:blue",
    "hf_ckpt compiled": "tab:brown",
}
"""Group -> colour."""


def save_peers_picture(result: PeerBench, path: Path) -> None:
    """One panel a model: step time against peak of every way, and the frontier."""
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
    axes.set(xlabel="peak (MiB)", ylabel="step time / none", title=describe_workload(case.workload))
    axes.title.set_fontsize(8.5)
    axes.grid(alpha=0.25)
    axes.margins(x=0.12)


def _scatter(axes: Any, places: Sequence[tuple[float, float]], marker: str, colour: str, size: int, label: str) -> None:
    if places:
        axes.scatter(*zip(*places, strict=True), marker=marker, color=colour, s=size, label=label, zorder=3)


def save_engines_picture(result: EngineBench, path: Path) -> None:
    """Two panels: kept bytes and step time of every engine over those of the first, model by model."""
    figure, panels = import_pyplot().subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    engines = [row.engine for row in result.cases[0].rows]
    width = 0.8 / len(engines)
    for axes, label in zip(panels, ("kept bytes / none", "step time / none"), strict=True):
        for number, engine in enumerate(engines):
            rows = [case.rows[number] for case in result.cases]
            of_bytes = axes is panels[0]
            values = [row.bytes_ratio if of_bytes else turns.median(row.time_ratios) for row in rows]
            places = [place + (number - (len(engines) - 1) / 2) * width for place in range(len(rows))]
            axes.bar(places, [value or 0 for value in values], width, label=engine)
        axes.axhline(1, color="0.6", linestyle=":", linewidth=1)
        axes.set(ylabel=label)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    names = [f"{case.family}\n{TUNING_NAMES[case.tuning]}" for case in result.cases]
    panels[1].set_xticks(range(len(names)), names)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    save_figure(figure, path)


def save_block_picture(result: EngineBench, path: Path, kinds: int = 9) -> None:
    """What one block of the first model keeps under each action, by what made it (the largest `kinds` by name).

    Raises `HfCkptError` when the `rebuild` engine was not measured.
    """
    case, settings = result.cases[0], result.settings
    bars = _kept_by_action(case)
    total: collections.Counter[str] = collections.Counter()
    for parts in bars.values():
        total.update(parts)
    named = [name for name, _ in total.most_common(kinds)]
    figure, axes = import_pyplot().subplots(figsize=(9, 4.2), layout="constrained")
    heights = [0.0] * len(bars)
    for name in [*named, "other"]:
        sizes = [
            sum(size for kind, size in parts.items() if (kind if kind in named else "other") == name)
            / case.blocks
            / 2**20
            for parts in bars.values()
        ]
        axes.bar(list(bars), sizes, 0.6, bottom=heights, label=name.removesuffix("0").removesuffix("Backward"))
        heights = [height + size for height, size in zip(heights, sizes, strict=True)]
    axes.set(ylabel="kept by one block (MiB)")
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    figure.suptitle(
        f"{case.family}, {TUNING_NAMES[case.tuning]}: hidden {settings.hidden}, "
        f"batch {settings.batch} x {settings.tokens} tokens, {settings.dtype}",
        fontsize=11,
    )
    save_figure(figure, path)


def _kept_by_action(case: EngineCase) -> dict[str, Mapping[str, int]]:
    """Action -> bytes that all blocks keep under it, by what made them."""
    rebuilt = {row.engine: row for row in case.rows if row.kept}
    if not {"rebuild", "rebuild, save attention"} <= rebuilt.keys():
        raise HfCkptError("this picture needs figures of `rebuild` and of `rebuild, save attention`.")
    default, attention = rebuilt["rebuild"], rebuilt["rebuild, save attention"]
    everything = collections.Counter(default.kept)
    everything.update(default.dropped)
    everything.subtract(default.kept_to_rebuild)
    return {
        "keep": dict(everything),
        "selective": default.kept,
        'selective\n"save": ["attention"]': attention.kept,
        "full": {"block input": case.blocks * case.block_input_bytes},
    }
