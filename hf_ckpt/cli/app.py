"""`hf-ckpt app`: a page of Gradio that shows what fits, with a slider for the budget and lines to copy."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from hf_ckpt.cli.arguments import positive, quiet_libraries
from hf_ckpt.errors import HfCkptError, MissingDependencyError, shown
from hf_ckpt.forecast.answer import HEADS, Forecast
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.forecast.figure import budgets_of, figure_of
from hf_ckpt.forecast.presets import presets
from hf_ckpt.forecast.question import FIELDS, Question, about, command_of, option_of, question
from hf_ckpt.units import GIB

ASKED = {name: about(field) for name, field in FIELDS.items() if about(field).label}
"""The fields of a `Question` that are on the page."""
OPTIONS = {option_of(FIELDS[name]): name for name in ASKED}
"""Their options of `hf-ckpt plan`."""
FIRST = ("model", "batch", "tokens", "lora", "load_in_4bit", "device")
"""The fields outside the accordion."""
VALUES = {"batch": "16", "tokens": "1024", "device": "4080"}
"""Initial values that differ from the defaults."""
_FROM_URL = """(fields => () => { const asked = new URLSearchParams(location.search)
    return fields.map(([name, value]) => !asked.has(name) ? value :
        typeof value === 'boolean' ? asked.get(name) === 'true' : asked.get(name)) })"""
_TO_URL = """(fields => (...values) => { const changed = fields.flatMap(([name, value], at) =>
        (value ?? '') === (values[at] ?? '') ? [] : [[name, values[at] ?? '']])
    history.replaceState(null, '', '?' + new URLSearchParams(changed)); return values })"""
"""From and to the page's address, as JavaScript of the names and initial values of its fields."""
LOOK = {"theme": "default", "footer_links": [], "ssr_mode": False}
"""Arguments of `Blocks.launch`."""


def add(verbs: Any) -> None:
    """Add the verb and its options to the command line."""
    app = verbs.add_parser(
        "app",
        help="a page in the browser: what fits, with a slider for the budget",
        description="Serves a page that answers like `hf-ckpt plan`. Needs `pip install gradio plotly`, no network.",
    )
    app.add_argument("model", nargs="?", default="gpt2", help="asked about first (default gpt2)")
    others = "with others, no files of this machine are read"
    app.add_argument("--host", default="127.0.0.1", help=f"address (default 127.0.0.1: this machine only; {others})")
    app.add_argument("--port", type=positive, default=7860, help="port to listen on (default 7860)")
    app.add_argument("--open", action="store_true", help="open the page in the browser")
    app.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve the page until it is interrupted. Returns 0.

    Raises `MissingDependencyError` without gradio or plotly, and `HfCkptError` if the port is in use.
    """
    paths = arguments.host in ("127.0.0.1", "localhost", "::1")
    quiet_libraries(to_plan=True)
    _refuse_model(arguments.model, paths)
    page = build(arguments.model, paths=paths)
    where = {"server_name": arguments.host, "server_port": arguments.port, "inbrowser": arguments.open}
    try:
        page.launch(**where, **LOOK, share=False)
    except OSError as error:
        raise HfCkptError(f"cannot listen on port {arguments.port} of {arguments.host}: {error}") from error
    return 0


def _refuse_model(name: str, paths: bool) -> None:
    """Raise `HfCkptError` without `paths` for a name that may be a path on this machine."""
    if not paths and name.lower() not in presets() and (name[:1] in (*"./~\\",) or Path(name).exists()):
        raise HfCkptError(f"{shown(name)} is no preset and no hub id, and files of this machine are not read here.")


def question_of(*values: Any, paths: bool = True) -> Question:
    """Return the question for the values of the fields of `ASKED`. Empty fields get their defaults.

    Raises `HfCkptError` for invalid values, and for a path without `paths`.
    """
    fields: dict[str, Any] = {}
    for (name, known), value in zip(ASKED.items(), values, strict=True):
        value = value.strip() if isinstance(value, str) else value
        if value not in ("", None):
            try:
                fields[name] = value if isinstance(value, bool) or known.choices else known.read(value)
            except (HfCkptError, ValueError) as error:
                raise HfCkptError(f"{known.label}: {error}") from None
    asked = question(fields)
    _refuse_model(asked.model, paths)
    return asked


def changed(options: str, *values: Any) -> list[Any]:
    """Return the values of the fields of `ASKED` with these options of `hf-ckpt plan`, which `ASKED` has."""
    fields, name = dict(zip(ASKED, values, strict=True)), ""
    for word in options.split():
        name = OPTIONS.get(word, name)  # an option, or the value of the one before
        fields[name] = not FIELDS[name].default if word in OPTIONS else word
    if "--batch" in options.split():
        fields["global_batch"] = ""
    return [*fields.values()]


def build(model: str = "gpt2", *, paths: bool = True) -> Any:
    """Return the page as `gradio.Blocks`, to be launched with `LOOK`.

    `model` is asked about first. With `paths`, a model may be a path on the machine that the page runs on.
    Raises `MissingDependencyError` without gradio or plotly.
    """
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio
        import plotly  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(str(error.name), "hf-ckpt app", "pip install gradio plotly") from error
    from hf_ckpt.forecast.forecast import Forecaster

    with gradio.Blocks(title="hf_ckpt: what fits?", analytics_enabled=False) as page:
        gradio.Markdown("# Does it fit, and what do I write?\nNo weights are loaded, and no GPU is used.")
        with gradio.Row():
            fields = {name: _field(gradio, name, {**VALUES, "model": model}) for name in FIRST}
        with gradio.Accordion("More", open=False), gradio.Row():
            fields |= {name: _field(gradio, name, VALUES) for name in ASKED if name not in FIRST}
        button = gradio.Button("Plan", variant="primary", elem_id="hf-plan")
        answer = gradio.Markdown(elem_id="hf-answer")
        ways = gradio.Radio(label="Plan again with", visible=False, elem_id="hf-ways")
        budget = gradio.Slider(label="Budget of a step (GiB)", step=0.01, visible=False, elem_id="hf-slider")
        figure = gradio.Plot(visible=False, elem_id="hf-figure")
        names = ("arguments", "lines", "command")
        copies = [gradio.Code(label=name, visible=False, elem_id=f"hf-{name}") for name in names]
        rows = gradio.Dataframe(headers=[*HEADS], visible=False, elem_id="hf-rows")
        parts = [answer, figure, *copies, rows]
        state = gradio.State()

        def if_any(value: Any) -> Any:
            return gradio.update(value=value or None, visible=bool(value))

        def parts_of(forecast: Forecast, asked: Question) -> list[Any]:
            text = "\n\n".join([f"## {forecast.answer}", forecast.assumed, *forecast.notes])
            shown = forecast.within(budgets_of(forecast)[0]) if forecast.frontier and not forecast.plan else forecast
            drawn = figure_of(shown) if shown.plan else None
            arguments, lines, *_ = [*forecast.write.values(), "", ""]
            return [*map(if_any, [text, drawn, arguments, lines, command_of(asked), forecast.table()])]

        def plan(*values: Any) -> list[Any]:
            try:
                training = question_of(*values, paths=paths)
                forecaster = Forecaster(training)
                forecast = forecaster.answer()
            except HfCkptError as error:
                return [None, *map(if_any, ["", "", f"## {error}", "", "", "", "", ""])]
            chosen = forecaster.training
            training = dataclasses.replace(
                training, batch=chosen.batch, accumulation=chosen.accumulation, global_batch=None
            )
            gib = [math.ceil(100 * size / GIB) / 100 for size in budgets_of(forecast)] or [0.0]
            most = max(gib[-1], gib[0] + budget.step)  # a slider needs a length
            value = min(max(round(forecast.budget_bytes / GIB, 2), gib[0]), most)
            slider = gradio.update(minimum=gib[0], maximum=most, value=value, visible=bool(forecast.frontier))
            options = [(f"{row.name}: {row.options}", row.options) for row in forecast.rows if row.options]
            change = gradio.update(choices=options, value=None, visible=bool(options))
            return [(training, forecast), slider, change, *parts_of(forecast, training)]

        def move(answered: tuple[Question, Forecast], gib: float) -> list[Any]:
            limit = round(gib * 1024) * 2**20
            return parts_of(answered[1].within(limit), dataclasses.replace(answered[0], budget=limit))

        # One at a time, because a forecast replaces functions of transformers in the whole process.
        how: dict[str, Any] = {"api_visibility": "private", "concurrency_id": "plan", "concurrency_limit": 1}
        inputs, outputs = [fields[name] for name in ASKED], [state, budget, ways, *parts]
        initial = json.dumps([(name, fields[name].value) for name in ASKED])
        asking = page.load(None, outputs=inputs, js=f"{_FROM_URL}({initial})")
        for event in (button.click, asking.then, ways.input(changed, [ways, *inputs], inputs, **how).then):
            event(plan, inputs, outputs, js=f"{_TO_URL}({initial})", **how)
        budget.release(move, inputs=[state, budget], outputs=parts, **how)
    return page


def _field(gradio: Any, name: str, values: dict[str, str]) -> Any:
    """Return the input of the page for a field of a question."""
    known, default = ASKED[name], FIELDS[name].default
    look = {"label": known.label, "elem_id": f"hf-{name}", "min_width": 140}
    if isinstance(default, bool):
        return gradio.Checkbox(default, **look)
    if listed := {"model": sorted(presets()), "device": [*DEVICES]}.get(name, [*known.choices]):
        value, own = values.get(name, default or ""), name == "model"
        return gradio.Dropdown(["", *listed], value=value, allow_custom_value=own, **look)
    return gradio.Textbox(values.get(name, ""), placeholder=str(default or "") or None, **look)
