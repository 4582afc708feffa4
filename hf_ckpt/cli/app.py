"""`hf-ckpt app`: a page of Gradio that shows what fits, with a slider for the budget and lines to copy.

Serves a page that answers like `hf-ckpt plan`. Needs `pip install gradio plotly`, but no network.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_ckpt.cli.arguments import add_verb, options_in, positive, quiet_libraries
from hf_ckpt.errors import HfCkptError, MissingDependencyError, shown
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.forecast.question import FIELDS, PRESETS, Question, command_of, question
from hf_ckpt.forecast.result import HEADS, Forecast, ForecastRow
from hf_ckpt.units import GIB, exact_size

ON_PAGE = {name: field for name, field in FIELDS.items() if field.label}
"""The fields of a `Question` that are on the page."""
MAIN_FIELDS = ("model", "batch", "tokens", "lora", "load_in_4bit", "device")
"""The fields outside the accordion."""
VALUES = {"batch": "16", "tokens": "1024", "device": "4080"}
"""Initial values that differ from the defaults."""
STEP_GIB = 0.01
"""Distance of two budgets on the slider."""
PART_COLOURS = {"resident": "#d5d8dc", "gradients": "#aab1ba", "kept for backward": "#8b97a5", "temporary": "#566373"}
"""What fills memory -> its colour in the figure."""
ADDRESS = """(...values) => {
    const plain = %s;
    const asked = Object.keys(plain).map((name, place) => [name, values[place] ?? ""]);
    const changed = asked.filter(([name, value]) => String(value) !== String(plain[name]));
    history.replaceState(null, "", "?" + new URLSearchParams(changed));
    return [];
}"""
"""Writes the values of the form into the page's address; `%s` is what is left out, as JSON."""
LOOK = {"theme": "default", "footer_links": [], "ssr_mode": False}
"""Arguments of `Blocks.launch`."""


def add(verbs: Any) -> None:
    """Add the verb and its options to the command line."""
    app = add_verb(verbs, __name__, run, "serve a page that shows what fits, with a slider for the budget")
    app.add_argument("model", nargs="?", default="gpt2", help="first model to plan for (default gpt2)")
    app.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    app.add_argument("--port", type=positive, default=7860, help="port to listen on (default 7860)")
    app.add_argument("--open", action="store_true", help="open the page in the browser")


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until it is interrupted. Returns 0.

    Raises `MissingDependencyError` without gradio or plotly, and `HfCkptError` if the port is in use.
    """
    quiet_libraries(to_plan=True)
    page = build(arguments.model)
    where = {"server_name": arguments.host, "server_port": arguments.port, "inbrowser": arguments.open}
    try:
        page.launch(**where, **LOOK, share=False)
    except OSError as error:
        raise HfCkptError(f"cannot listen on port {arguments.port} of {arguments.host}: {error}") from error
    return 0


def question_of(*values: Any) -> Question:
    """Return the question for the values of the fields of `ON_PAGE`. Empty fields get their defaults.

    Raises `HfCkptError` for invalid values, and for a model that may be a path on this machine.
    """
    fields: dict[str, Any] = {}
    for (name, details), value in zip(ON_PAGE.items(), values, strict=True):
        value = value.strip() if isinstance(value, str) else value
        if value not in ("", None):
            try:
                fields[name] = value if isinstance(value, bool) or details.choices else details.read(value)
            except (HfCkptError, ValueError) as error:
                raise HfCkptError(f"{details.label}: {error}") from None
    training = question(fields)
    name = training.model
    if name.lower() not in PRESETS and (name[:1] in (*"./~\\",) or Path(name).exists()):  # others may use the page
        raise HfCkptError(f"{shown(name)} is neither a preset nor a hub id. To read files, use `hf-ckpt plan`.")
    return training


def plain_value(name: str) -> Any:
    """Return what the form shows in a field that is not asked about."""
    default = FIELDS[name].default
    if isinstance(default, bool):
        return default
    return default or "" if ON_PAGE[name].choices else ""


def form_values(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the form shows for fields of a question: texts, and yes or no."""
    values = {}
    for name, value in fields.items():
        is_text = value is not None and not isinstance(value, bool)
        values[name] = FIELDS[name].words(value)[1] if is_text else value or plain_value(name)
    return values


def values_of_address(query: Mapping[str, str]) -> list[Any]:
    """Return the values of the fields of `ON_PAGE` for the query of an address. Those that it does not name are plain.

    Names that begin with two underscores are of the program that shows the page. Raises `HfCkptError` for others.
    """
    texts = {name: text for name, text in query.items() if not name.startswith("__")}
    for name in texts:
        if name not in ON_PAGE:
            raise HfCkptError(f"the address asks for {name!r}, which is not on the page: use {', '.join(ON_PAGE)}.")
    values = {name: texts.get(name, plain_value(name)) for name in ON_PAGE}
    for name, value in values.items():
        if isinstance(FIELDS[name].default, bool) and isinstance(value, str):
            if value not in ("true", "false"):
                raise HfCkptError(f"the address asks for {name}={value}: it must be true or false.")
            values[name] = value == "true"
    return [*values.values()]


def fields_of_row(options: str) -> dict[str, Any]:
    """Return the fields of a question that the options of a row set."""
    fields = options_in(options)
    # A row of a micro-batch says how a step is split, which is no longer to be chosen.
    return fields | ({"global_batch": None} if "accumulation" in fields else {})


def _shown(value: Any) -> Any:
    """Return the update of a part of the page: it has this value, or is hidden if there is none."""
    import gradio

    return gradio.update(value=value or None, visible=bool(value))


def drawn_of(forecast: Forecast) -> Forecast:
    """Return the forecast to draw. If nothing fits, this is the lowest peak, which is of more help than none."""
    return forecast.within(_budgets_of(forecast)[0]) if forecast.frontier and not forecast.plan else forecast


def _parts_of(forecast: Forecast, training: Question) -> list[Any]:
    """Return the updates of the answer, the figure, what to copy, and the rows."""
    text = "\n\n".join([f"## {forecast.verdict}", forecast.assumed, *forecast.left, *forecast.notes])
    drawn = drawn_of(forecast)
    figure = figure_of(drawn) if drawn.plan else None
    arguments, lines, *_ = [*forecast.write.values(), "", ""]
    return [*map(_shown, [text, figure, arguments, lines, command_of(training), forecast.table()])]


def _answer(*values: Any) -> list[Any]:
    """Plan for the values of the fields of `ON_PAGE`: the page's state and slider, and `_parts_of`."""
    import gradio

    from hf_ckpt.forecast.forecast import Forecaster

    try:
        training = question_of(*values)
        forecaster = Forecaster(training)
        forecast = forecaster.answer()
    except HfCkptError as error:
        return _refused(error)
    chosen = forecaster.training
    training = dataclasses.replace(training, batch=chosen.batch, accumulation=chosen.accumulation, global_batch=None)
    gib = [math.ceil(100 * size / GIB) / 100 for size in _budgets_of(forecast)] or [0.0]
    most = max(gib[-1], gib[0] + STEP_GIB)  # a slider needs a length
    value = min(max(round(forecast.budget_bytes / GIB, 2), gib[0]), most)
    slider = gradio.update(minimum=gib[0], maximum=most, value=value, visible=bool(forecast.frontier))
    return [(training, forecast), slider, *_parts_of(forecast, training)]


def _refused(error: HfCkptError) -> list[Any]:
    """Return the page's state, slider and `_parts_of` for a question that has no answer."""
    return [None, *map(_shown, ["", f"## {error}", "", "", "", "", ""])]


def _move(answered: tuple[Question, Forecast], gib: float) -> list[Any]:
    """Return the field of the budget, and `_parts_of` for another budget, from the costs that are measured already."""
    training, forecast = answered
    limit = round(gib * 1024) * 2**20
    return [exact_size(limit), *_parts_of(forecast.within(limit), dataclasses.replace(training, budget=limit))]


def _opened(request: Any, *values: Any) -> list[Any]:
    """Fill the form from the page's address, if that asks something, and answer."""
    query = dict(request.query_params) if request is not None else {}
    if any(not name.startswith("__") for name in query):
        try:
            values = tuple(values_of_address(query))
        except HfCkptError as error:
            return [*values, *_refused(error)]
    return [*values, *_answer(*values)]


def _clicked(event: Any, answered: tuple[Question, Forecast]) -> list[Any]:
    """Fill the form with the options of the row that was clicked."""
    import gradio

    options = answered[1].rows[event.index[0]].options
    values = form_values(fields_of_row(options))
    return [gradio.update(value=values[name]) if name in values else gradio.skip() for name in ON_PAGE]


def build(model: str = "gpt2") -> Any:
    """Return the page as `gradio.Blocks`, to be launched with `LOOK`. `model` is asked about first.

    Raises `MissingDependencyError` without gradio or plotly.
    """
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    require("hf-ckpt app", "plotly", "gradio")
    import gradio

    with gradio.Blocks(title="hf_ckpt: does it fit?", analytics_enabled=False) as page:
        gradio.Markdown("# Does it fit, and with which arguments?\nNo weights are loaded, and no GPU is used.")
        with gradio.Row():
            fields = {name: _input_of(gradio, name, {**VALUES, "model": model}) for name in MAIN_FIELDS}
        with gradio.Accordion("More", open=False), gradio.Row():
            fields |= {name: _input_of(gradio, name, VALUES) for name in ON_PAGE if name not in MAIN_FIELDS}
        button = gradio.Button("Plan", variant="primary", elem_id="hf-plan")
        answer = gradio.Markdown(elem_id="hf-answer")
        budget = gradio.Slider(label="Budget (GiB)", step=STEP_GIB, visible=False, elem_id="hf-slider")
        figure = gradio.Plot(visible=False, elem_id="hf-figure")
        labels = {"arguments": "Training arguments", "lines": "Python", "command": "Command"}
        copies = [gradio.Code(label=label, visible=False, elem_id=f"hf-{name}") for name, label in labels.items()]
        rows = gradio.Dataframe(headers=[*HEADS], visible=False, elem_id="hf-rows")
        parts = [answer, figure, *copies, rows]
        state = gradio.State()
        # One at a time, because a forecast replaces functions of transformers in the whole process.
        how: dict[str, Any] = {"api_visibility": "private", "concurrency_id": "plan", "concurrency_limit": 1}
        inputs = [fields[name] for name in ON_PAGE]

        # Gradio reads from annotations what to pass.
        _opened.__annotations__["request"] = gradio.Request
        _clicked.__annotations__["event"] = gradio.SelectData
        everything = [state, budget, *parts]
        plain = json.dumps({name: plain_value(name) for name in ON_PAGE})
        for event in (
            page.load(_opened, inputs, [*inputs, *everything], **how),
            button.click(_answer, inputs, everything, **how),
            rows.select(_clicked, [state], inputs, **how),
            budget.release(_move, [state, budget], [fields["budget"], *parts], **how),
        ):
            event.then(None, inputs, js=ADDRESS % plain)
    return page


def require(user: str, *packages: str) -> None:
    """Raise `MissingDependencyError` if one of the packages that a command needs is missing."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingDependencyError(package, user, f"pip install {' '.join(sorted(packages))}") from error


def _budgets_of(forecast: Forecast) -> list[int]:
    """The budgets of the frontier in bytes: the lowest that a plan fits, and larger ones that have a faster plan."""
    # Rounded up to a MiB, as specs are written: a budget that is rounded down would not fit its own plan.
    return [-(-row.peak_bytes // 2**20) * 2**20 for row in forecast.frontier]


def figure_of(forecast: Forecast) -> Any:
    """A figure of plotly: what fills memory over the step under the plan, and step time against peak of all rows.

    The star is the plan.
    """
    from plotly.subplots import make_subplots

    titles = ("Memory over one micro-step and the optimizer step", "Step time by peak")
    figure = make_subplots(cols=2, column_widths=[0.6, 0.4], subplot_titles=titles)

    def add_rows(name: str, rows: Sequence[ForecastRow], **look: Any) -> None:
        peaks = [row.peak_bytes / GIB for row in rows]
        seconds = [row.step_seconds for row in rows]
        hover = "%{text}<br>%{x:.2f} GiB, %{y:.4g} s<extra></extra>"
        look = {"text": [row.name for row in rows], "hovertemplate": hover, "row": 1, "col": 2, **look}
        figure.add_scatter(x=peaks, y=seconds, name=name, **look)

    moments = forecast.timeline.moments
    ends = list(itertools.accumulate(moment.part.nanoseconds / 1e9 for moment in moments))
    peaks = [[size / GIB for size in moment.parts().values()] for moment in moments]
    for (name, colour), ys in zip(PART_COLOURS.items(), zip(*peaks, strict=True), strict=True):
        area = {"stackgroup": "memory", "fillcolor": colour, "line": {"width": 0, "color": colour}}
        # Areas are stacked, so that their upper edge is the memory in use.
        figure.add_scatter(x=ends, y=ys, name=name, mode="lines", hovertemplate="%{y:.2f} GiB", **area)
    red = "#c44e52"
    add_rows("fastest plan for each budget", forecast.frontier, mode="lines+markers", marker={"color": red})
    add_rows("without hf_ckpt", forecast.usual, mode="markers", marker={"size": 9, "color": "#4c72b0"})
    add_rows("this plan", [forecast.row], mode="markers", marker={"symbol": "star", "size": 18, "color": red})
    figure.update_layout(xaxis_title="seconds", yaxis_title="GiB", xaxis2_title="peak (GiB)", yaxis2_title="step (s)")
    figure.update_layout(height=560, legend={"orientation": "h", "y": -0.3})
    return figure


def _input_of(gradio: Any, name: str, values: dict[str, str]) -> Any:
    """Return the input of the page for a field of a question."""
    details = ON_PAGE[name]
    default = FIELDS[name].default
    look = {"label": details.label, "elem_id": f"hf-{name}", "min_width": 140}
    if isinstance(default, bool):
        return gradio.Checkbox(default, **look)
    # A device is one of the table's, but a model may be any of the hub, or a folder.
    choices = {"model": sorted(PRESETS), "device": [*DEVICES]}.get(name, [*details.choices])
    if choices:
        value = values.get(name, default or "")
        return gradio.Dropdown(["", *choices], value=value, allow_custom_value=name == "model", **look)
    return gradio.Textbox(values.get(name, ""), placeholder=str(default or "") or None, **look)
