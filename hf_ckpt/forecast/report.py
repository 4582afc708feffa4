"""The report of `hf-ckpt plan --html` and the figure of `hf-ckpt app`, drawn by plotly."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from hf_ckpt.errors import MissingDependencyError
from hf_ckpt.forecast.answer import Forecast, Row, print_forecast
from hf_ckpt.spec.files import write_text
from hf_ckpt.units import GIB

SUFFIXES = (".html",)
"""Suffixes that the path of a report may have."""
PARTS = {"resident": "#d5d8dc", "gradients": "#aab1ba", "kept for backward": "#8b97a5", "temporary": "#566373"}
"""What fills memory -> its colour."""
PLANNED = "#c44e52"
"""Colour of plans for a budget."""
_FOLLOW = """document.getElementById("{plot_id}").on("plotly_sliderchange", (event) => {
  for (const text of document.querySelectorAll("pre")) text.hidden = text.id !== "at-" + event.step.value;
});"""
"""Shows the answer for the slider's position. plotly fills in the id."""


def import_plotly(purpose: str) -> Any:
    """Return the package `plotly`. Without it, raises `MissingDependencyError`, which names the purpose."""
    try:
        import plotly.io
        import plotly.subplots
    except ImportError as error:
        raise MissingDependencyError("plotly", purpose, "pip install plotly") from error
    return plotly


def budgets_of(forecast: Forecast) -> list[int]:
    """The budgets of the frontier in bytes: the lowest that a plan fits, and larger ones that have a faster plan."""
    return [-(-row.peak_bytes // 2**20) * 2**20 for row in forecast.frontier]


def save_report(forecast: Forecast, path: Path) -> None:
    """Write a self-contained page: the figure with a slider for the budget, and the answer for each of its positions.

    The forecast has a frontier. Its own answer is shown first. Raises `MissingDependencyError` without plotly, and
    `FileError` if the file cannot be written.
    """
    from rich.console import Console

    plotly = import_plotly("a report in HTML")
    stops = sorted([forecast, *map(forecast.within, budgets_of(forecast))], key=lambda stop: stop.budget_bytes)
    figure, frames, steps, texts = figure_of(forecast), [], [], ""
    instantly = {"mode": "immediate", "frame": {"duration": 0}, "transition": {"duration": 0}}
    for number, stop in enumerate(stops):
        frames.append({"name": str(number), "data": _of_plan(stop), "traces": list(range(len(PARTS) + 1))})
        step = {"label": f"{stop.budget_bytes / GIB:.4g} GiB", "value": str(number), "method": "animate"}
        steps.append({**step, "args": [[str(number)], instantly]})
        console = Console(file=io.StringIO(), width=140, record=True)
        print_forecast(stop, console)
        texts += f'<pre id="at-{number}"{"" if stop is forecast else " hidden"}>{escape(console.export_text())}</pre>'
    figure.frames = frames
    slider = {"active": stops.index(forecast), "steps": steps, "currentvalue": {"prefix": "budget: "}}
    figure.update_layout(sliders=[slider])
    title = escape(f"Plan for {forecast.workload.model}")
    drawn = plotly.io.to_html(figure, include_plotlyjs=True, full_html=False, auto_play=False, post_script=_FOLLOW)
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>'
    write_text(path, f"{head}<body><h1>{title}</h1>{drawn}{texts}</body></html>\n")


def figure_of(forecast: Forecast) -> Any:
    """A figure of plotly: memory over the step under the plan, and step time against peak of all rows.

    The dotted line is the step without checkpointing, and the star is the plan.
    """
    titles = ("Memory over one micro-step and the optimizer", "Step time against peak")
    figure = import_plotly("a figure").subplots.make_subplots(cols=2, column_widths=[0.6, 0.4], subplot_titles=titles)
    none = forecast.within(next(row.peak_bytes for row in forecast.rows if row.name == "none"))
    seconds, levels = _levels(none)
    ys = list(map(sum, levels))
    dotted = {"name": "no checkpointing", "x": seconds, "y": ys, "line": {"color": "#7f8690", "dash": "dot"}}
    figure.add_traces(_of_plan(forecast))
    figure.add_traces([{"type": "scatter", "mode": "lines", "hoverinfo": "skip", **dotted}])
    figure.add_traces(
        [_points("plans for budgets", forecast.frontier, mode="lines+markers", marker={"color": PLANNED})]
    )
    blue = {"size": 9, "color": "#4c72b0"}
    figure.add_traces([_points("without hf_ckpt", forecast.usual, mode="markers", marker=blue)])
    memory = {"title": "GiB", "range": [0, 1.06 * max(ys)]}
    figure.update_layout(xaxis_title="seconds", yaxis=memory, xaxis2_title="peak (GiB)", yaxis2_title="step (s)")
    figure.update_layout(height=560, legend={"orientation": "h", "y": -0.3})
    return figure


def _of_plan(forecast: Forecast) -> list[dict[str, Any]]:
    """What changes with the budget: what fills memory, stacked, and the plan's point."""
    seconds, levels = _levels(forecast)
    area = {"type": "scatter", "mode": "lines", "stackgroup": "memory", "x": seconds, "hovertemplate": "%{y:.2f} GiB"}
    star = {"symbol": "star", "size": 18, "color": PLANNED, "line": {"color": "#222", "width": 1}}
    traces = []
    for part, (name, colour) in enumerate(PARTS.items()):
        ys = [sizes[part] for sizes in levels]
        traces.append({**area, "name": name, "y": ys, "fillcolor": colour, "line": {"width": 0, "color": colour}})
    return [*traces, _points("this plan", forecast.rows[:1], mode="markers", marker=star)]


def _levels(forecast: Forecast) -> tuple[list[float], list[tuple[float, ...]]]:
    """At the end of each part of the step, its seconds, and the GiB of each of `PARTS` at the part's peak."""
    seconds, levels, now = [], [], 0
    for moment in forecast.timeline.moments:
        now += moment.part.nanoseconds
        kept = max(0, min(moment.kept_bytes, moment.start_bytes - moment.static_bytes - moment.gradient_bytes))
        resident, gradients = moment.static_bytes, moment.gradient_bytes
        sizes = (resident, gradients, kept, moment.peak_bytes - resident - gradients - kept)
        seconds.append(now / 1e9)
        levels.append(tuple(round(size / GIB, 4) for size in sizes))
    return seconds, levels


def _points(name: str, rows: Sequence[Row], **look: Any) -> dict[str, Any]:
    places = {"x": [row.peak_bytes / GIB for row in rows], "y": [row.step_seconds for row in rows]}
    hover = {"text": [row.name for row in rows], "hovertemplate": "%{text}<br>%{x:.2f} GiB, %{y:.4g} s<extra></extra>"}
    return {"type": "scatter", "name": name, "xaxis": "x2", "yaxis": "y2", **places, **hover, **look}
