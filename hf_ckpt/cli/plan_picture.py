"""The picture of `hf-ckpt plan --png`: memory through the training step, and step time against peak."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.pictures import import_pyplot, save_figure
from hf_ckpt.spec.actions import colour_of
from hf_ckpt.units import GIB

if TYPE_CHECKING:
    from hf_ckpt.planner.forecast import Forecast


def save_forecast_picture(found: Forecast, path: Path) -> None:
    """Draw memory through the step, with the plan's blocks marked, and time against peak if the frontier was asked for.

    Raises `MissingDependencyError` without matplotlib.
    """
    pyplot = import_pyplot()
    with_frontier = bool(found.frontier)
    shape = {"width_ratios": (3, 2)} if with_frontier else {}
    figure, axes = pyplot.subplots(
        1, 2 if with_frontier else 1, figsize=(13 if with_frontier else 9, 4.6), layout="constrained", **shape
    )
    _draw_timeline(axes[0] if with_frontier else axes, found)
    if with_frontier:
        _draw_frontier(axes[1], found)
    workload = found.workload
    tuning = "full fine-tuning" if workload.lora is None else f"LoRA r={workload.lora}"
    figure.suptitle(
        f"{workload.model}, {tuning}, batch {workload.batch} x {workload.tokens} tokens, "
        f"{found.device.name} (predicted)",
        fontsize=11,
    )
    save_figure(figure, path)


def _draw_timeline(axes: Any, found: Forecast) -> None:
    """Draw bytes alive over the predicted time of the step, stacked from what is always there to the work at hand."""
    actions = {block.name: action for block, action in found.plan.actions}
    xs: list[float] = []
    layers: dict[str, list[float]] = {"always there": [], "gradients": [], "kept for backward": [], "at work": []}
    now = 0.0
    marks: list[tuple[float, float, str]] = []
    for moment in found.timeline.moments:
        levels = list(moment.levels()) or [(moment.start_bytes, moment.gradient_bytes)]
        kept = moment.kept_bytes
        seconds = moment.phase.nanoseconds / 1e9
        for place, (level, gradients) in enumerate(levels):
            xs.append((now + seconds * (place + 1) / len(levels)) * 1e3)
            rest = level - moment.static_bytes - gradients
            stays = min(kept, max(rest, 0))
            for name, size in zip(layers, (moment.static_bytes, gradients, stays, rest - stays), strict=True):
                layers[name].append(max(size, 0) / GIB)
        if moment.block is not None:
            marks.append((now * 1e3, (now + seconds) * 1e3, str(actions[moment.block])))
        now += seconds
    shades = ("0.75", "#c44e52", "#937860", "#64b5cd")
    axes.stackplot(xs, *layers.values(), labels=list(layers), colors=shades, linewidth=0)
    top = found.timeline.peak_bytes / GIB
    for start, end, kind in marks:
        axes.fill_between([start, end], [top * 1.04] * 2, [top * 1.09] * 2, color=colour_of(kind), linewidth=0)
    for kind in dict.fromkeys(kind for _, _, kind in marks):
        axes.fill_between([], [], [], color=colour_of(kind), label=kind)
    axes.axhline(found.budget_bytes / GIB, color="black", linestyle="--", linewidth=1)
    axes.annotate(
        "budget", (now * 1e3, found.budget_bytes / GIB), xytext=(-4, 3), textcoords="offset points", ha="right"
    )
    axes.set(xlabel="predicted time of one micro-step and the optimizer (ms)", ylabel="bytes alive (GiB)")
    axes.set_xlim(0, now * 1e3)
    axes.set_ylim(0, max(top * 1.12, found.budget_bytes / GIB * 1.08 if found.budget_bytes / GIB < 2 * top else 0))
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)


def _draw_frontier(axes: Any, found: Forecast) -> None:
    """Draw step time over peak, of the fastest plans for several budgets and of what they are compared with."""
    prediction = found.plan.prediction
    assert prediction is not None
    ours = found.frontier
    axes.step(
        [option.peak_bytes / GIB for option in ours],
        [option.step_seconds for option in ours],
        where="post",
        marker=".",
        label="hf_ckpt, by budget",
    )
    rows = ("every_n_layers", "x", "every_n_layers (transformers)"), ("segments", "+", "segments: 2 blocks, sqrt")
    for start, marker, label in rows:
        options = [option for option in found.usual if option.name.startswith(start)]
        places = [option.peak_bytes / GIB for option in options], [option.step_seconds for option in options]
        axes.scatter(*places, marker=marker, color="0.5", label=label)
    others = (*found.usual, *found.further)
    single = [option for option in others if not option.name.startswith(tuple(start for start, _, _ in rows))]
    for marker, option in zip("os^vDPh", single, strict=False):
        place = option.peak_bytes / GIB, option.step_seconds
        axes.scatter(*place, marker=marker, color="0.2", s=24, zorder=3, label=option.name)
    axes.scatter(prediction.peak_bytes / GIB, prediction.step_seconds, marker="*", s=140, zorder=4, label="this plan")
    axes.axvline(found.budget_bytes / GIB, color="black", linestyle="--", linewidth=1)
    peaks = [option.peak_bytes / GIB for option in (*ours, *others)]
    axes.set_xlim(min(peaks) * 0.97, max(peaks) * 1.03)
    axes.set(xlabel="peak (GiB)", ylabel="step (s)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
