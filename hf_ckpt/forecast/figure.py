"""The figure of `hf-ckpt app`, drawn by plotly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hf_ckpt.forecast.answer import Forecast, Row
from hf_ckpt.units import GIB

PARTS = {"resident": "#d5d8dc", "gradients": "#aab1ba", "kept for backward": "#8b97a5", "temporary": "#566373"}
"""What fills memory -> its colour."""


def budgets_of(forecast: Forecast) -> list[int]:
    """The budgets of the frontier in bytes: the lowest that a plan fits, and larger ones that have a faster plan."""
    return [-(-row.peak_bytes // 2**20) * 2**20 for row in forecast.frontier]


def figure_of(forecast: Forecast) -> Any:
    """A figure of plotly: what fills memory over the step under the plan, and step time against peak of all rows.

    The star is the plan.
    """
    from plotly.subplots import make_subplots

    titles = ("Memory over one micro-step and the optimizer", "Step time against peak")
    figure = make_subplots(cols=2, column_widths=[0.6, 0.4], subplot_titles=titles)

    def add_rows(name: str, rows: Sequence[Row], **look: Any) -> None:
        peaks = [row.peak_bytes / GIB for row in rows]
        seconds = [row.step_seconds for row in rows]
        hover = "%{text}<br>%{x:.2f} GiB, %{y:.4g} s<extra></extra>"
        look = {"text": [row.name for row in rows], "hovertemplate": hover, "row": 1, "col": 2, **look}
        figure.add_scatter(x=peaks, y=seconds, name=name, **look)

    moments = forecast.timeline.moments
    ends = list(itertools.accumulate(moment.part.nanoseconds / 1e9 for moment in moments))
    peaks = [[size / GIB for size in moment.parts().values()] for moment in moments]
    for (name, colour), ys in zip(PARTS.items(), zip(*peaks, strict=True), strict=True):
        area = {"stackgroup": "memory", "fillcolor": colour, "line": {"width": 0, "color": colour}}
        figure.add_scatter(x=ends, y=ys, name=name, mode="lines", hovertemplate="%{y:.2f} GiB", **area)
    red = "#c44e52"
    add_rows("plans for budgets", forecast.frontier, mode="lines+markers", marker={"color": red})
    add_rows("without hf_ckpt", forecast.usual, mode="markers", marker={"size": 9, "color": "#4c72b0"})
    add_rows("this plan", forecast.rows[:1], mode="markers", marker={"symbol": "star", "size": 18, "color": red})
    figure.update_layout(xaxis_title="seconds", yaxis_title="GiB", xaxis2_title="peak (GiB)", yaxis2_title="step (s)")
    figure.update_layout(height=560, legend={"orientation": "h", "y": -0.3})
    return figure
