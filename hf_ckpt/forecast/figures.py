"""The figures of a report, for plotly: memory over a step, and step time against peak.

A figure is a dict of `data` and `layout` for plotly.js, so creating one takes milliseconds and needs no package.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from hf_ckpt.spec.actions import FULL, KEEP, OFFLOAD, SELECTIVE, colour_of
from hf_ckpt.spec.plan import spans
from hf_ckpt.units import GIB, format_bytes

if TYPE_CHECKING:
    from hf_ckpt.forecast.record import Forecast
    from hf_ckpt.planner.alternatives import Alternative

Figure = dict[str, Any]
"""`data`, a list of traces, and `layout`. Source: https://plotly.com/javascript/reference/."""
Line = tuple[list[float], list[float]]
"""Milliseconds since the beginning of a step, and GiB alive then."""
HEIGHT = 380
"""Pixels of each figure."""
SLICES = 160
"""Number of slices of a step in the figure of its memory, which shows the largest moment of each."""
PARTS = {
    "weights and optimizer": "#d5d8dc",
    "gradients": "#aab1ba",
    "kept for backward": "#8b97a5",
    "temporary": "#566373",
}
"""What fills memory, in the order of `levels_of` -> its colour: greys, because other colours mean actions."""
PLANNED = "#c44e52"
"""Colour of plans for a budget, which mix actions."""
_GREY, _LINES = "#7f8690", "rgba(128,128,128,0.25)"
_SLOW = 1.6
"""Options slower than `full` by more than this factor are not drawn: all others would be squeezed onto a line."""
_MARKS = {"square": "&#9632;", "x": "&#10005;", "star": "&#9733;"}
"""Symbols of plotly -> the same in HTML; others get a disc."""
_HOVER = "%{text}<br>peak %{x:.2f} GiB, step %{y:.4g} s<extra></extra>"


def option_named(forecast: Forecast, name: str) -> Alternative:
    """One of transformers' own options, by its name in tables. Raises `StopIteration` if there is none."""
    return next(option for option in forecast.usual if option.name == name)


def css_colour(colour: str) -> str:
    """Convert a colour to CSS; matplotlib's greys are numbers."""
    return colour if colour.startswith("#") else "#808080"


def levels_of(forecast: Forecast) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield the memory of the step under the plan as (seconds since its beginning, bytes of each of `PARTS`)."""
    now = 0.0
    for moment in forecast.timeline.moments:
        levels = list(moment.levels()) or [(moment.start_bytes, moment.gradient_bytes)]
        seconds = moment.phase.nanoseconds / 1e9
        for place, (level, gradients) in enumerate(levels):
            rest = max(level - moment.static_bytes - gradients, 0)
            kept = min(moment.kept_bytes, rest)
            yield now + seconds * (place + 1) / len(levels), (moment.static_bytes, gradients, kept, rest - kept)
        now += seconds


def slices_of(forecast: Forecast, slices: int = SLICES) -> list[tuple[float, tuple[int, ...]]]:
    """Like `levels_of`, but only the moment with the most bytes in each of `slices` equal parts of the step."""
    places = list(levels_of(forecast))
    end = places[-1][0] or 1.0
    most: dict[int, tuple[float, tuple[int, ...]]] = {}
    for seconds, sizes in places:
        number = min(int(seconds / end * slices), slices - 1)
        if number not in most or sum(sizes) >= sum(most[number][1]):
            most[number] = seconds, sizes
    return [*most.values(), places[-1]]


def runs_of(forecast: Forecast) -> Iterator[tuple[float, float, str, list[int]]]:
    """Yield the actions of blocks over the step as (start, end, action, positions of blocks), with times in seconds.

    Consecutive blocks of a stack with the same action form one run.
    """
    known: dict[str | None, Any] = {
        block.name: ((block.stack, str(action)), block.index) for block, action in forecast.plan.actions
    }
    known[None] = (None, 0)
    now = 0.0
    for key, group in itertools.groupby(forecast.timeline.moments, key=lambda moment: known[moment.block][0]):
        moments = list(group)
        begin, now = now, now + sum(moment.phase.nanoseconds for moment in moments) / 1e9
        if key is not None:
            yield begin, now, key[1], sorted({known[moment.block][1] for moment in moments})


def keeping_all(forecast: Forecast) -> Line:
    """The memory of a step without checkpointing, which every figure of a plan shows for comparison."""
    places = slices_of(forecast.within(max(option_named(forecast, "none").peak_bytes, forecast.floor_bytes)))
    return [_rounded(seconds * 1e3) for seconds, _ in places], [_rounded(sum(sizes) / GIB) for _, sizes in places]


def timeline_figure(forecast: Forecast, budget_bytes: int, kept: Line, *, fits: bool = True) -> Figure:
    """Bytes alive over a micro-step and the optimizer's step under the plan, with the actions of blocks above.

    Axes are the same for all budgets. A dotted line shows the memory of no checkpointing.

    Args:
        forecast: the forecast within the budget; any, if none fits.
        budget_bytes: the peak that is allowed.
        kept: the result of `keeping_all`.
        fits: whether a plan fits; if not, only no checkpointing is drawn.
    """
    xs, ys = kept
    budget = budget_bytes / GIB
    dotted = {"color": _GREY, "dash": "dot", "width": 1.5}
    whole = _trace("no checkpointing", x=xs, y=ys, mode="lines", line=dotted, hoverinfo="skip")
    layout = {
        "xaxis": {**_axis("time (ms)"), "range": [0, _longest(forecast)]},
        "yaxis": {**_axis("memory (GiB)"), "range": [0, 1.06 * max(*ys, budget)], "domain": [0, 0.86]},
        "yaxis2": {"range": [0, 1], "domain": [0.9, 1], "visible": False, "fixedrange": True},
        "hovermode": "x unified",
        "barmode": "overlay",
        "shapes": [{**_DASHED, "xref": "paper", "x0": 0, "x1": 1, "y0": budget, "y1": budget}],
        "annotations": [{**_budget_named(budget), "xref": "paper", "x": 1, "y": budget, "xanchor": "right"}],
    }
    traces = [*_levels(forecast), *_actions(forecast)] if fits else []
    return {"data": [*traces, whole], "layout": {**_LAYOUT, **layout}}


def frontier_figure(forecast: Forecast, budget_bytes: int, *, fits: bool = True) -> Figure:
    """Step time against peak: plans for all budgets, the plan for this budget, and other options.

    Args:
        forecast: the forecast within the budget; any, if none fits. It has a frontier.
        budget_bytes: the peak that is allowed.
        fits: whether a plan fits; if not, none is marked.
    """
    budget = budget_bytes / GIB
    texts = [f"planned for {format_bytes(option.budget_bytes)}" for option in forecast.frontier]
    line = {"color": PLANNED, "width": 1.5}
    traces = [
        _points("plans", forecast.frontier, texts, {"color": PLANNED, "size": 6}, mode="lines+markers", line=line)
    ]
    for name, mark, colour, options in _others(forecast):
        look = {"color": css_colour(colour), "size": 10, "symbol": mark}
        traces.append(_points(name, options, [option.name for option in options], look))
    if fits and forecast.plan.prediction is not None:
        x, y = forecast.plan.prediction.peak_bytes / GIB, forecast.plan.prediction.step_seconds
        star = {"color": PLANNED, "size": 18, "symbol": "star", "line": {"color": "#222", "width": 1}}
        name = "this plan"
        traces.append(_trace(name, x=[x], y=[y], text=[name], mode="markers", marker=star, hovertemplate=_HOVER))
    peaks = [x for trace in traces for x in trace["x"]]
    side = "right" if 2 * budget > min(peaks) + max(peaks) else "left"
    layout = {
        "xaxis": _axis("peak memory (GiB)"),
        "yaxis": _axis("step time (s)"),
        "shapes": [{**_DASHED, "yref": "paper", "x0": budget, "x1": budget, "y0": 0, "y1": 1}],
        "annotations": [{**_budget_named(budget), "yref": "paper", "x": budget, "y": 1, "xanchor": side}],
    }
    return {"data": traces, "layout": {**_LAYOUT, **layout}}


def legend_html(figure: Figure) -> str:
    """The legend of a figure as HTML, which also fits a narrow window. Bars are left out."""
    items = ""
    for trace in figure["data"]:
        marker = trace.get("marker")
        if trace["type"] == "bar":
            continue
        if marker:
            colour, sign = marker["color"], _MARKS.get(marker.get("symbol"), "&#9679;")
        else:
            colour, sign = trace["line"]["color"], "&#9632;" if "fillcolor" in trace else "&#8943;"
        items += f'<li><b style="color:{colour}" aria-hidden="true">{sign}</b>{escape(trace["name"])}</li>'
    return f'<ul class="hf-legend">{items}</ul>'


def _levels(forecast: Forecast) -> list[dict[str, Any]]:
    """What fills memory, stacked from weights to temporary tensors."""
    places = slices_of(forecast)
    return [
        _trace(
            name,
            x=[_rounded(seconds * 1e3) for seconds, _ in places],
            y=[_rounded(sizes[part] / GIB) for _, sizes in places],
            mode="lines",
            line={"width": 0, "color": shade},
            fillcolor=shade,
            stackgroup="memory",
            hovertemplate="%{y:.2f} GiB",
        )
        for part, (name, shade) in enumerate(PARTS.items())
    ]


def _actions(forecast: Forecast) -> list[dict[str, Any]]:
    """Which blocks run when, as bars in the colours of their actions."""
    by_action: dict[str, list[tuple[float, float, list[int]]]] = {}
    for start, end, action, blocks in runs_of(forecast):
        by_action.setdefault(action, []).append((start * 1e3, end * 1e3, blocks))
    return [
        _trace(
            action,
            type="bar",
            x=[_rounded((start + end) / 2) for start, end, _ in runs],
            width=[_rounded(end - start) for start, end, _ in runs],
            y=[1] * len(runs),
            yaxis="y2",
            marker={"color": css_colour(colour_of(action)), "line": {"width": 0}},
            text=[f"blocks {spans(blocks)}" for *_, blocks in runs],
            textposition="none",
            hovertemplate="%{text}: " + action + "<extra></extra>",
        )
        for action, runs in by_action.items()
    ]


def _others(forecast: Forecast) -> Iterator[tuple[str, str, str, list[Alternative]]]:
    """The options that plans are compared with, as (name, mark, colour, options), without very slow ones."""
    slowest = _SLOW * option_named(forecast, "full").step_seconds
    every = tuple(f"every_n_layers: {number}" for number in (2, 3, 4))
    for name, mark, colour, names in (
        ("no checkpointing", "square", colour_of(KEEP), ("none",)),
        ("full", "square", colour_of(FULL), ("full",)),
        ("every 2nd, 3rd, 4th block full", "x", "#f0bd97", every),
        ("offload", "square", colour_of(OFFLOAD), ("offload", "offload (transformers)", "offload, head in chunks")),
        (
            "selective, saved in host memory",
            "square",
            colour_of(dataclasses.replace(SELECTIVE, moved=True)),
            ("selective, saved in host memory",),
        ),
        ("full, head in chunks", "x", colour_of(FULL), ("full, head in chunks",)),
    ):
        options = [
            way for way in (*forecast.usual, *forecast.further) if way.name in names and way.step_seconds <= slowest
        ]
        if options:
            yield name, mark, colour, options


def _longest(forecast: Forecast) -> float:
    """Milliseconds of the micro-step and the optimizer's step under `full`, or under the plan if that is slower."""
    optimizer, count = forecast.costs.optimizer_nanoseconds / 1e6, forecast.costs.accumulation
    steps = (option_named(forecast, "full").step_seconds * 1e3, forecast.step_seconds * 1e3)
    return max((step - optimizer) / count + optimizer for step in steps)


def _points(
    name: str,
    options: Sequence[Alternative],
    texts: list[str],
    marker: dict[str, Any],
    mode: str = "markers",
    **more: Any,
) -> dict[str, Any]:
    """A trace with a point for each option."""
    xs, ys = [option.peak_bytes / GIB for option in options], [option.step_seconds for option in options]
    return _trace(name, x=xs, y=ys, text=texts, mode=mode, marker=marker, hovertemplate=_HOVER, **more)


def _trace(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "scatter", "name": name, **fields}


def _rounded(value: float) -> float:
    """A number for a figure, with few digits."""
    return float(f"{value:.5g}")


def _axis(title: str) -> dict[str, Any]:
    return {"title": {"text": title}, "gridcolor": _LINES, "zeroline": False, "fixedrange": True}


def _budget_named(budget_gib: float) -> dict[str, Any]:
    return {"text": f"budget {budget_gib:.4g} GiB", "showarrow": False, "yanchor": "bottom"}


_DASHED = {"type": "line", "line": {"color": PLANNED, "dash": "dash", "width": 1.8}}
_LAYOUT: dict[str, Any] = {
    "height": HEIGHT,
    "margin": {"l": 58, "r": 12, "t": 24, "b": 46},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 13},
    "showlegend": False,
}
"""Layout of both figures. The page sets the colour of text."""
