"""The figures of the page of a plan, in the terms of plotly: memory through a step, and step time against peak.

A figure is a dict of `data` and `layout`, as plotly.js takes it, so that a new one takes milliseconds and no package.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.page import css_colour, option_named, slices_of
from hf_ckpt.cli.pictures import PLANNED, colour_of_policy
from hf_ckpt.cli.plan_picture import PARTS, runs_of
from hf_ckpt.spec.actions import colour_of
from hf_ckpt.spec.plan import spans
from hf_ckpt.units import GIB, format_bytes

if TYPE_CHECKING:
    from hf_ckpt.planner.alternatives import Alternative
    from hf_ckpt.planner.forecast import Forecast

Figure = dict[str, Any]
"""`data`, a list of traces, and `layout`. Source: https://plotly.com/javascript/reference/."""
Line = tuple[list[float], list[float]]
"""Milliseconds since the begin of a step, and GiB alive then."""
HEIGHT = 380
"""Pixels of each figure."""
SHADES = ("#d5d8dc", "#aab1ba", "#8b97a5", "#566373")
"""Colours of `PARTS`, which can be seen on white and on black."""
_GREY, _LINES = "#7f8690", "rgba(128,128,128,0.25)"
_SLOW = 1.6
"""Options that take more than so many times as long as `full` are not drawn: all others would lie on a line."""
_MARKS = {"square": "&#9632;", "x": "&#10005;", "star": "&#9733;"}
"""Symbols of plotly -> the same in a text; a disc for others."""
_HOVER = "%{text}<br>peak %{x:.2f} GiB, step %{y:.4g} s<extra></extra>"


def keeping_all(found: Forecast) -> Line:
    """The memory of a step without checkpointing, which every picture of a plan is compared with."""
    places = slices_of(found.within(max(option_named(found, "none").peak_bytes, found.floor_bytes)))
    return [_rounded(seconds * 1e3) for seconds, _ in places], [_rounded(sum(sizes) / GIB) for _, sizes in places]


def timeline_figure(found: Forecast, budget_bytes: int, kept: Line, *, fits: bool = True) -> Figure:
    """Bytes alive through a micro-step and the optimizer under the plan, with what blocks do above.

    Axes are the same for all budgets, with the memory of no checkpointing as a dotted line.

    Args:
        found: the forecast within the budget; where none fits, any.
        budget_bytes: the peak that is allowed.
        kept: as `keeping_all` returns it.
        fits: whether a plan fits into it; without one, only no checkpointing is drawn.
    """
    xs, ys = kept
    budget = budget_bytes / GIB
    dotted = {"color": _GREY, "dash": "dot", "width": 1.5}
    whole = _trace("no checkpointing", x=xs, y=ys, mode="lines", line=dotted, hoverinfo="skip")
    layout = {
        "xaxis": {**_axis("time (ms)"), "range": [0, _longest(found)]},
        "yaxis": {**_axis("memory (GiB)"), "range": [0, 1.06 * max(*ys, budget)], "domain": [0, 0.86]},
        "yaxis2": {"range": [0, 1], "domain": [0.9, 1], "visible": False, "fixedrange": True},
        "hovermode": "x unified",
        "barmode": "overlay",
        "shapes": [{**_DASHED, "xref": "paper", "x0": 0, "x1": 1, "y0": budget, "y1": budget}],
        "annotations": [{**_budget_named(budget), "xref": "paper", "x": 1, "y": budget, "xanchor": "right"}],
    }
    traces = [*_levels(found), *_actions(found)] if fits else []
    return {"data": [*traces, whole], "layout": {**_LAYOUT, **layout}}


def frontier_figure(found: Forecast, budget_bytes: int, *, fits: bool = True) -> Figure:
    """Step time against peak: plans for all budgets, the one for this budget, and what transformers offers.

    Args:
        found: the forecast within the budget; where none fits, any. It has a frontier.
        budget_bytes: the peak that is allowed.
        fits: whether a plan fits into it; without one, none is marked.
    """
    budget = budget_bytes / GIB
    texts = [f"planned for {format_bytes(option.budget_bytes)}" for option in found.frontier]
    line = {"color": PLANNED, "width": 1.5}
    traces = [_points("plans", found.frontier, texts, {"color": PLANNED, "size": 6}, mode="lines+markers", line=line)]
    for name, mark, options in _others(found):
        look = {"color": css_colour(colour_of_policy(options[0].name)), "size": 10, "symbol": mark}
        traces.append(_points(name, options, [option.name for option in options], look))
    if fits and found.plan.prediction is not None:
        x, y = found.plan.prediction.peak_bytes / GIB, found.plan.prediction.step_seconds
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
    """The legend of a figure as HTML, which has room in a narrow window, too. Bars are left out."""
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


def _levels(found: Forecast) -> list[dict[str, Any]]:
    """What fills memory, stacked from what is always there to the work at hand."""
    places = slices_of(found)
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
        for part, (name, shade) in enumerate(zip(PARTS, SHADES, strict=True))
    ]


def _actions(found: Forecast) -> list[dict[str, Any]]:
    """Which blocks run when, as bars in the colours of their actions."""
    by_action: dict[str, list[tuple[float, float, list[int]]]] = {}
    for start, end, action, blocks in runs_of(found):
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


def _others(found: Forecast) -> list[tuple[str, str, list[Alternative]]]:
    """What plans are compared with, as (name, mark, options); without those that are very slow."""
    slowest = _SLOW * option_named(found, "full").step_seconds
    options = [option for option in (*found.usual, *found.further) if option.step_seconds <= slowest]

    def those(*begins: str) -> list[Alternative]:
        return [option for option in options if option.name.startswith(begins)]

    every = tuple(f"every_n_layers: {number}" for number in (2, 3, 4))
    groups = [
        ("no checkpointing", "square", those("none")),
        ("full", "square", [option for option in options if option.name == "full"]),
        ("every 2nd, 3rd, 4th block full", "x", [option for option in options if option.name in every]),
        ("offload", "square", those("offload")),
        ("selective, saved in host memory", "square", those("selective")),
        ("full, head in chunks", "x", those("full,")),
    ]
    return [group for group in groups if group[2]]


def _longest(found: Forecast) -> float:
    """Milliseconds of the micro-step and the optimizer under `full`, or under the plan where that takes longer."""
    optimizer, count = found.costs.optimizer_nanoseconds / 1e6, found.costs.accumulation
    steps = (option_named(found, "full").step_seconds * 1e3, found.step_seconds * 1e3)
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
    """A number for a picture, in few characters."""
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
"""What both figures share. The page around them sets the colour of texts."""
