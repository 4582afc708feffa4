"""Benchmarks as pictures. All raise `MissingDependencyError` without matplotlib."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import turns
from report import TUNING_NAMES, describe_workload

from hf_ckpt.cli.pictures import PLANNED, colour_of_policy, drawing, label_points, save_figure
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
SHORT = {
    "every_n_layers: ": "every ",
    "compiled, budget ": "compiled ",
    "all matmuls + attention": "matmuls",
    "every 2nd matmul + attention": "every 2nd matmul",
    "selective, save ": "save ",
}
"""Part of the name of a way -> what a label says in its place."""
OPERATIONS = (
    ("UnsafeView", "x @ W (linear layers)"),
    ("Addmm", "x @ W + b (linear layers)"),
    ("linear", "x @ W (linear layers)"),
    ("ScaledDotProduct", "attention(q, k, v)"),
    ("Transpose", "q, k, v with heads first"),
    ("Add", "x + f(x), rotated q and k"),
    ("Mul", "products of two"),
    ("pointwise", "gate * up, and other products"),
    ("activation", "act(gate)"),
    ("NewGELU", "act(gate)"),
    ("SafeSoftmax", "softmax(scores)"),
    ("ToCopy", "casts"),
    ("cast", "casts"),
    ("copy", "copies"),
    ("View", "views"),
    ("embedding", "embedding(ids)"),
    ("(no graph)", "cos, sin, masks"),
)
"""How the name of an autograd node or of a dropped operation begins -> the operation, as one writes it."""
OPERATION_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#ccb974", "#64b5cd")
"""Colours of parts that are no policies."""


def operation_of(name: str) -> str:
    """Return an operation as one writes it, by the name of its autograd node or of the module that computes it."""
    if "Norm" in name:
        return "norm(x)"
    return next((words for start, words in OPERATIONS if name.startswith(start)), name.removesuffix("Backward0"))


def save_peers_picture(result: PeerBench, path: Path) -> None:
    """One panel a model: step time against peak of every way. The marker says whose it is, the colour what it does."""
    count = len(result.cases)
    columns = min(count, 2)
    lines = -(-count // columns)
    with drawing() as pyplot:
        figure, panels = pyplot.subplots(
            lines, columns, figsize=(7 * columns, 5.2 * lines + 1), squeeze=False, layout="constrained"
        )
        every = [axes for line in panels for axes in line]
        found: dict[str, Any] = {}
        drawn = []
        for axes, case in zip(every, result.cases, strict=False):
            drawn.append((axes, *_draw(axes, case)))
            handles, labels = axes.get_legend_handles_labels()
            found.update(zip(labels, handles, strict=True))
        for axes in every[count:]:
            axes.axis("off")
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=5)
        for axes, labels, points in drawn:
            label_points(axes, labels, points)
        save_figure(figure, path)


def _draw(axes: Any, case: PeerCase) -> tuple[list[tuple[float, float, str]], list[tuple[float, float]]]:
    """Draw the points of one model, and return the labels that they get, and the points."""
    rows = [row for row in case.rows if row.allocated_bytes and row.time_ratios]

    def place(row: PeerRow) -> tuple[float, float]:
        return (row.allocated_bytes or 0) / 2**20, row.time_ratio or 0.0

    axes.axhline(1, color="0.6", linestyle=":", linewidth=1)
    for group, marker in MARKERS.items():
        of_group = [row for row in rows if row.group == group and row.budget_bytes is None]
        _scatter(axes, [place(row) for row in of_group], marker, [colour_of_policy(row.name) for row in of_group], 70)
        if of_group and group != "none":
            axes.scatter([], [], marker=marker, color="0.35", s=70, label=group)
    planned = [row for row in rows if row.budget_bytes is not None]
    _scatter(axes, [place(row) for row in planned], "*", [PLANNED] * len(planned), 260)
    if planned:
        axes.scatter([], [], marker="*", color=PLANNED, s=260, label="hf_ckpt, planned for a budget")
    axes.set(xlabel="peak (MiB)", ylabel="step time / none")
    axes.set_title(describe_workload(case.workload), fontsize=11)
    axes.margins(0.1)
    labels = [(*place(row), _label(row)) for row in rows if row.budget_bytes is None]
    return labels, [place(row) for row in rows]


def _label(row: PeerRow) -> str:
    """Return the name of a way, short enough for a label."""
    name = row.name.removesuffix(" (HF)")
    for long, short in SHORT.items():
        name = name.replace(long, short)
    return name


def _scatter(axes: Any, places: Sequence[tuple[float, float]], marker: str, colours: Sequence[str], size: int) -> None:
    if places:
        axes.scatter(*zip(*places, strict=True), marker=marker, color=list(colours), s=size, zorder=3)


def save_engines_picture(result: EngineBench, path: Path) -> None:
    """Two panels: kept bytes and step time of every engine over those of the first, model by model."""
    with drawing() as pyplot:
        figure, panels = pyplot.subplots(2, 1, figsize=(12, 7.4), sharex=True, layout="constrained")
        engines = [row.engine for row in result.cases[0].rows]
        width = 0.8 / len(engines)
        for axes, label in zip(panels, ("kept bytes / none", "step time / none"), strict=True):
            for number, engine in enumerate(engines):
                rows = [case.rows[number] for case in result.cases]
                of_bytes = axes is panels[0]
                values = [row.bytes_ratio if of_bytes else turns.median(row.time_ratios) for row in rows]
                places = [place + (number - (len(engines) - 1) / 2) * width for place in range(len(rows))]
                look: dict[str, Any] = {"hatch": "///", "edgecolor": "white", "linewidth": 0}
                look = {"color": colour_of_policy(engine), **(look if engine.startswith("sac") else {})}
                axes.bar(places, [value or 0 for value in values], width, label=engine, **look)
            axes.axhline(1, color="0.6", linestyle=":", linewidth=1)
            axes.set(ylabel=label)
            axes.grid(axis="x", visible=False)
        names = [f"{case.family}\n{TUNING_NAMES[case.tuning]}" for case in result.cases]
        panels[1].set_xticks(range(len(names)), names, fontsize=11)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
        save_figure(figure, path)


def save_block_picture(result: EngineBench, path: Path, kinds: int = 8) -> None:
    """What one block of the first model keeps under each action, by operation (the `kinds` with most bytes by name).

    Raises `HfCkptError` when the `rebuild` engine was not measured.
    """
    case, settings = result.cases[0], result.settings
    bars = _kept_by_action(case)
    total: collections.Counter[str] = collections.Counter()
    for parts in bars.values():
        total.update(parts)
    named = [name for name, _ in total.most_common(kinds)]
    shown = [*named, *(["other"] if len(total) > kinds else [])]
    with drawing() as pyplot:
        figure, axes = pyplot.subplots(figsize=(10, 4.8), layout="constrained")
        heights = [0.0] * len(bars)
        for name, colour in zip(shown, OPERATION_COLOURS, strict=False):
            sizes = [
                sum(size for kind, size in parts.items() if (kind if kind in named else "other") == name)
                / case.blocks
                / 2**20
                for parts in bars.values()
            ]
            axes.bar(list(bars), sizes, 0.6, bottom=heights, label=name, color=colour)
            heights = [height + size for height, size in zip(heights, sizes, strict=True)]
        for place, height in enumerate(heights):
            axes.annotate(f"{height:.1f}", (place, height), xytext=(0, 3), textcoords="offset points", ha="center")
        axes.set(ylabel="kept by one block (MiB)")
        axes.grid(axis="x", visible=False)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside right center")
        figure.suptitle(
            f"{case.family}, {TUNING_NAMES[case.tuning]}: hidden {settings.hidden}, "
            f"batch {settings.batch} x {settings.tokens} tokens, {settings.dtype}"
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
        "keep": _by_operation(everything),
        "selective": _by_operation(default.kept),
        'selective\n"save": ["attention"]': _by_operation(attention.kept),
        "full": {"block input": case.blocks * case.block_input_bytes},
    }


def _by_operation(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by operation, from bytes by autograd node."""
    found: collections.Counter[str] = collections.Counter()
    for name, size in sizes.items():
        found[operation_of(name)] += size
    return dict(found)
