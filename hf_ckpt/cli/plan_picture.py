"""The picture of `hf-ckpt plan --png`: memory through the training step, and step time against peak."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.pictures import PLANNED, colour_of_policy, drawing, label_points, save_figure
from hf_ckpt.spec.actions import colour_of
from hf_ckpt.units import GIB

if TYPE_CHECKING:
    from hf_ckpt.planner.alternatives import Alternative
    from hf_ckpt.planner.forecast import Forecast

PARTS = ("weights and optimizer", "gradients", "kept for backward", "temporary")
"""What fills memory, in the order of `levels_of`."""
SHADES = ("#d5d8dc", "#aab1ba", "#7d8a99", "#3f4a57")
"""Colours of `PARTS`; they are greys, because other colours mean actions."""


def levels_of(found: Forecast) -> Iterator[tuple[float, tuple[int, int, int, int]]]:
    """Yield the memory of the step under the plan as (seconds since its begin, bytes of each of `PARTS`)."""
    now = 0.0
    for moment in found.timeline.moments:
        levels = list(moment.levels()) or [(moment.start_bytes, moment.gradient_bytes)]
        seconds = moment.phase.nanoseconds / 1e9
        for place, (level, gradients) in enumerate(levels):
            rest = max(level - moment.static_bytes - gradients, 0)
            kept = min(moment.kept_bytes, rest)
            yield now + seconds * (place + 1) / len(levels), (moment.static_bytes, gradients, kept, rest - kept)
        now += seconds


def runs_of(found: Forecast) -> Iterator[tuple[float, float, str, list[int]]]:
    """Yield what blocks get, through the step, as (begin, end, action, positions of blocks).

    Times are in seconds. Blocks that run one after the other with the same action are one run.
    """
    actions = {block.name: (block, str(action)) for block, action in found.plan.actions}
    now, seen = 0.0, []
    for moment in found.timeline.moments:
        seconds = moment.phase.nanoseconds / 1e9
        if moment.block is not None:
            block, action = actions[moment.block]
            seen.append((action, block.stack, now, now + seconds, block.index))
        now += seconds
    run: list[Any] = []
    for each in [*seen, None]:
        joins = run and each is not None and each[:2] == run[-1][:2] and each[2] - run[-1][3] < 1e-9
        if run and not joins:
            yield run[0][2], run[-1][3], run[0][0], sorted({index for *_, index in run})
            run = []
        if each is not None:
            run.append(each)


def save_forecast_picture(found: Forecast, path: Path) -> None:
    """Draw memory through the step, with the actions of blocks above, and time against peak if there is a frontier.

    Raises `MissingDependencyError` without matplotlib.
    """
    with drawing() as pyplot:
        wide = bool(found.frontier)
        figure = pyplot.figure(figsize=(12.5 if wide else 8, 5.4), layout="constrained")
        widths = {"width_ratios": (3, 2)} if wide else {}
        grid = figure.add_gridspec(2, 2 if wide else 1, height_ratios=(1, 12), **widths)
        through = figure.add_subplot(grid[1, 0])
        strip = figure.add_subplot(grid[0, 0], sharex=through)
        _draw_timeline(through, found)
        workload = found.workload
        tuning = "full fine-tuning" if workload.lora is None else f"LoRA r={workload.lora}"
        figure.suptitle(
            f"{workload.model}, {tuning}, batch {workload.batch} x {workload.tokens} tokens, "
            f"{found.device.name} (predicted)"
        )
        if wide:
            _draw_frontier(figure.add_subplot(grid[:, 1]), found)
        _draw_strip(strip, found)
        save_figure(figure, path)


def _draw_timeline(axes: Any, found: Forecast) -> None:
    """Draw bytes alive over the predicted time of the step, stacked from what is always there to the work at hand."""
    places = list(levels_of(found))
    xs = [seconds * 1e3 for seconds, _ in places]
    layers = [[sizes[part] / GIB for _, sizes in places] for part in range(len(PARTS))]
    axes.stackplot(xs, *layers, labels=PARTS, colors=SHADES, linewidth=0)
    top, budget = found.timeline.peak_bytes / GIB, found.budget_bytes / GIB
    axes.axhline(budget, color="black", linestyle="--", linewidth=1.2)
    in_sight = budget < 2 * top
    axes.set_ylim(0, 1.12 * max(top, budget if in_sight else 0))
    if in_sight:
        axes.annotate(
            f"budget {budget:.3g} GiB", (0, budget), xytext=(6, 4), textcoords="offset points", ha="left", va="bottom"
        )
    axes.set(xlabel="predicted time of one micro-step and the optimizer (ms)", ylabel="bytes alive (GiB)")
    axes.set_xlim(0, xs[-1])
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def _draw_strip(axes: Any, found: Forecast) -> None:
    """Draw which blocks run when, in the colours of their actions, and write actions and blocks into the strip."""
    runs = [(start * 1e3, end * 1e3, action, blocks) for start, end, action, blocks in runs_of(found)]
    for start, end, action, _ in runs:
        axes.axvspan(start, end, color=colour_of(action), linewidth=0)
    for action in dict.fromkeys(action for _, _, action, _ in runs):
        axes.fill_between([], [], [], color=colour_of(action), label=action)
    axes.set_ylim(0, 1)
    axes.axis("off")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0, title_fontsize=11)
    axes.figure.draw_without_rendering()
    for start, end, _, blocks in runs:
        span = f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"{blocks[0]}"
        for text in (f"blocks {span}", span):
            note = axes.text((start + end) / 2, 0.5, text, ha="center", va="center", fontsize=10, color="black")
            left, right = (axes.transData.transform((x, 0))[0] for x in (start, end))
            if note.get_window_extent().width < right - left - 4:
                break
            note.remove()


def _draw_frontier(axes: Any, found: Forecast) -> None:
    """Draw step time against peak: the fastest plans for several budgets, and what they are compared with."""
    prediction = found.plan.prediction
    assert prediction is not None

    def place(option: Alternative) -> tuple[float, float]:
        return option.peak_bytes / GIB, option.step_seconds

    ours = [place(option) for option in found.frontier]
    axes.scatter(*zip(*ours, strict=True), marker="o", s=26, color=PLANNED, label="plans for several budgets")
    others = [option for option in (*found.usual, *found.further) if not option.name.startswith("segments")]
    for option in others:
        marker = "X" if option.name.startswith("every") or "transformers" in option.name else "s"
        axes.scatter(*place(option), marker=marker, s=44, color=colour_of_policy(option.name), zorder=3)
    chosen = prediction.peak_bytes / GIB, prediction.step_seconds
    look = {"marker": "*", "s": 240, "edgecolors": "black", "linewidths": 0.6, "zorder": 4}
    axes.scatter(*chosen, color=PLANNED, label="this plan", **look)
    axes.axvline(found.budget_bytes / GIB, color="black", linestyle="--", linewidth=1.2)
    axes.margins(x=0.08, y=0.08)
    axes.set(xlabel="peak (GiB)", ylabel="step (s)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    many = [option for option in others if option.name.startswith("every_n_layers")]
    named = [option for option in others if option not in many or option.name.endswith(("2", "4"))]
    labels = [(*place(option), _short(option.name)) for option in named]
    low, high = axes.get_ylim()
    line = [(found.budget_bytes / GIB, low + (high - low) * part / 40) for part in range(41)]
    label_points(axes, labels, [*ours, chosen, *map(place, others), *line])


def _short(name: str) -> str:
    """Return the name of an option as a label in the picture."""
    return name.replace("every_n_layers: ", "every ").replace("selective, saved in", "selective, in")
