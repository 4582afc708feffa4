"""`hf-ckpt app`: a page, made with Gradio, that shows what fits, with a slider for the budget and lines to copy."""

from __future__ import annotations

import argparse
import functools
import ipaddress
import os
import threading
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.arguments import importing, positive, quiet_libraries
from hf_ckpt.errors import HfCkptError, InfeasibleError, MissingDependencyError, shown
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.forecast.html import STYLE, error_html, import_plotly, misfit_html, report_of
from hf_ckpt.prediction.presets import presets, refuse_missing_model
from hf_ckpt.prediction.question import FIELDS, Question, about, question
from hf_ckpt.units import parse_count

if TYPE_CHECKING:
    from hf_ckpt.forecast.nearest import Setting

ASKED = {name: about(field) for name, field in FIELDS.items() if about(field).label}
"""The fields of a `Question` that are on the page."""
FIRST = ("model", "batch", "tokens", "lora", "load_in_4bit", "device")
"""The fields outside the accordion."""
VALUES = {"batch": 16, "tokens": 1024, "device": "4080"}
"""Initial values that differ from the defaults."""
_tracing = threading.Lock()
"""Held while a model is traced, because tracing replaces functions of transformers in the whole process."""


def question_of(*values: Any, paths: bool = True, **more: Any) -> Question:
    """Return the question for the values on the page. Empty fields get their defaults.

    Args:
        values: of the fields, in the order of `ASKED`.
        paths: whether the model may be a path.
        more: other fields of the question.

    Raises `HfCkptError` with the message of the command line for invalid values.
    """
    given = {}
    for (name, known), value in zip(ASKED.items(), values, strict=True):
        value = value.strip() if isinstance(value, str) else value
        optional = FIELDS[name].default is None
        if value is None or value == "" or (optional and value == 0):
            value = 0 if known.read is parse_count and not optional else None
        elif known.read is parse_count:
            value = int(value)
        if value is not None:
            given[name] = value
    if not paths and "model" in given:
        _refuse_path(given["model"])
    asked = question({**given, **more})
    refuse_missing_model(asked.model)
    return asked


def _refuse_path(name: str) -> None:
    """Raise `HfCkptError` if the name of a model is, or may be, a path on this machine."""
    if name not in presets() and (name[0] in "./~\\" or Path(name).exists()):
        raise HfCkptError(f"{shown(name)} is no preset and no hub id, and files of this machine are not read here.")


def is_own_address(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@functools.lru_cache(maxsize=16)
def answered(asked: Question, plotly: str) -> tuple[bool, str]:
    """Return (True, report as HTML) if a plan fits, or (False, what would fit as HTML). Takes seconds; cached.

    Args:
        asked: the question, with `frontier`.
        plotly: the address of plotly.js.

    Raises `HfCkptError` for a model that cannot be found or traced.
    """
    from hf_ckpt.forecast.answers import misfit_of
    from hf_ckpt.forecast.forecast import Forecaster

    with _tracing:
        forecaster = Forecaster(asked)
        try:
            found = forecaster.forecast()
        except InfeasibleError as error:
            nearest: list[Setting] = forecaster.nearest()
            return False, misfit_html(misfit_of(error, forecaster.asked, forecaster.device), nearest, error)
    return True, report_of(found, f'<script src="{escape(plotly)}"></script>')


def import_gradio() -> Any:
    """Import `gradio` with its telemetry off. Raises `MissingDependencyError` if it is not installed."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio
    except ImportError as error:
        raise MissingDependencyError("gradio", "hf-ckpt app", "pip install gradio plotly") from error
    return gradio


def look(gradio: Any) -> dict[str, Any]:
    """Return arguments of `Blocks.launch` for the look of the page, with fonts that every machine has."""
    theme = gradio.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"], primary_hue="red"
    )
    return {"theme": theme, "css": STYLE + _STYLE, "ssr_mode": False, "footer_links": []}


def build(model: str = "gpt2", *, paths: bool = True) -> Any:
    """Return the page as `gradio.Blocks`, to be launched with the arguments of `look`.

    Args:
        model: initial value of the model's field.
        paths: whether a model may be a path on the machine that the page runs on.

    Raises `MissingDependencyError` without gradio or plotly.
    """
    gradio = import_gradio()
    plotly = Path(import_plotly("hf-ckpt app").__file__).parent / "package_data" / "plotly.min.js"
    gradio.set_static_paths([plotly])
    with gradio.Blocks(title="hf_ckpt: what fits?", analytics_enabled=False) as page:
        gradio.HTML(_TITLE)
        fields = _fields(gradio, model)
        button = gradio.Button("Plan", variant="primary", elem_id="hf-plan")
        refused = gradio.HTML(elem_id="hf-refused", visible=False)
        report = gradio.HTML(elem_id="hf-report", visible=False)
        plan = functools.partial(_plan, gradio, f"gradio_api/file={plotly}", paths)
        asking = {
            "inputs": fields,
            "outputs": [refused, report],
            "show_progress_on": [button],
            "api_visibility": "private",
            "concurrency_id": "trace",
            "concurrency_limit": 1,
        }
        button.click(plan, **asking)
        page.load(plan, **asking)
    return page


def _fields(gradio: Any, model: str) -> list[Any]:
    """Return the inputs of the page, in the order of `ASKED`."""
    fields = {}
    with gradio.Row(elem_id="hf-form"):
        fields.update({name: _field(gradio, name, {**VALUES, "model": model}) for name in FIRST})
    with gradio.Accordion("More", open=False, elem_id="hf-more"), gradio.Row():
        fields.update({name: _field(gradio, name, VALUES) for name in ASKED if name not in FIRST})
    return [fields[name] for name in ASKED]


def _field(gradio: Any, name: str, values: dict[str, Any]) -> Any:
    """Return the input of the page for a field of a question."""
    known, default = ASKED[name], FIELDS[name].default
    value = values.get(name, default)
    look = {"label": known.label, "elem_id": f"hf-{name}", "min_width": 140}
    if name == "model":
        return gradio.Dropdown(list(presets()), value=value, allow_custom_value=True, **look)
    if name == "device":
        cards = [(device.title, name) for name, device in DEVICES.items() if name != "cpu"]
        return gradio.Dropdown([*cards, ("this machine", "")], value=value, **look)
    if isinstance(default, bool):
        return gradio.Checkbox(value, **look)
    if known.choices:
        return gradio.Dropdown(
            [*([("none", "")] if default is None else []), *known.choices], value=value or "", **look
        )
    if isinstance(default, float) or known.read is parse_count:
        whole = {} if isinstance(default, float) else {"precision": 0}
        return gradio.Number(value or 0, **whole, **look)
    if name in ("head", "mlp"):
        return gradio.Dropdown([("as a whole", "full"), ("in chunks where that helps", "auto")], value=value, **look)
    return gradio.Textbox(value or "", placeholder="20GiB or 80%", **look)


def _plan(gradio: Any, plotly: str, paths: bool, *values: Any) -> list[Any]:
    """Return updates of the page: the report in a frame, or an error, or what would fit."""
    try:
        fits, text = answered(question_of(*values, paths=paths, frontier=True), plotly)
    except HfCkptError as error:
        fits, text = False, error_html(str(error))
    if fits:
        text = f'<iframe title="The answer" srcdoc="{escape(text)}"></iframe>'
    shown, hidden = gradio.update(value=text, visible=True), gradio.update(value="", visible=False)
    return [hidden, shown] if fits else [shown, hidden]


def add(verbs: Any) -> None:
    """Add the verb and its options to the command line."""
    app = verbs.add_parser(
        "app",
        help="a page in the browser: what fits, with a slider for the budget",
        description="Opens a page on this machine, on which to ask what `hf-ckpt plan` answers: model, batch, length, "
        "adapters and card, with a slider for the budget, and lines to copy. Needs `pip install gradio plotly`, and "
        "no network.",
    )
    app.add_argument("model", nargs="?", default="gpt2", help="asked about first (default gpt2)")
    app.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default 127.0.0.1: this machine only; "
        "with others, models are presets and hub ids, and no files of this machine are read)",
    )
    app.add_argument("--port", type=positive, default=7860, help="port to listen on (default 7860)")
    app.add_argument("--open", action="store_true", help="open the page in the browser")
    app.set_defaults(run=run)


def run(arguments: argparse.Namespace, wait: Callable[[Any], None] | None = None) -> int:
    """Serve the page until it is interrupted. Returns 0.

    Args:
        arguments: `model`, `host`, `port` and `open`.
        wait: called while the page is served; by default, it waits for Ctrl+C.

    Raises `MissingDependencyError` without gradio or plotly, and `HfCkptError` if the port is in use.
    """
    paths = is_own_address(arguments.host)
    if not paths:  # others could read files of this machine
        _refuse_path(arguments.model)
    gradio = import_gradio()
    quiet_libraries()
    refuse_missing_model(arguments.model)
    with importing(to_plan=True):
        import hf_ckpt.forecast.forecast  # noqa: F401  before the first question, which should not wait for it
    page = build(arguments.model, paths=paths)
    where = {"server_name": arguments.host, "server_port": arguments.port, "inbrowser": arguments.open}
    try:
        page.launch(**where, **look(gradio), prevent_thread_lock=True, share=False)
    except OSError as error:
        raise HfCkptError(f"cannot listen on port {arguments.port} of {arguments.host}: {error}") from error
    try:
        (wait or gradio.Blocks.block_thread)(page)
    finally:
        page.close()
    return 0


_TITLE = """<h1>Does it fit, and what do I write?</h1>
<p class="hf-quiet">The peak memory of a training step, and the fastest plan for the activations of each block within a
budget. Predicted from the model's config: no weights are loaded, and no GPU is used.</p>"""
_STYLE = """
#hf-report iframe { width: 100%; height: 80vh; border: 0; color-scheme: light; }
.dark #hf-report iframe { color-scheme: dark; }
.gradio-container .hf-table, .gradio-container .hf-table tr, .gradio-container .hf-table tbody { border: 0 !important; }
.gradio-container h1 { font-size: 1.4rem; margin: 0; }
"""
