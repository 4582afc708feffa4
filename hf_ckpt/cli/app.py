"""`hf-ckpt app`: a page on which one asks what fits, moves the budget, and copies what to write. It runs on Gradio."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import threading
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.arguments import importing, positive, quiet_libraries
from hf_ckpt.cli.page import (
    MIB,
    STYLE,
    Answer,
    answer_of,
    blocks_html,
    command_of,
    error_html,
    nearest_html,
    parts_of,
    question_of,
    range_of,
    summary_html,
)
from hf_ckpt.cli.page_figures import (
    Figure,
    Line,
    frontier_figure,
    keeping_all,
    legend_html,
    timeline_figure,
)
from hf_ckpt.errors import HfCkptError, InfeasibleError, MissingDependencyError, shown
from hf_ckpt.prediction.choices import DTYPE_NAMES, PARALLEL, TRAINERS
from hf_ckpt.prediction.devices import DEVICES
from hf_ckpt.prediction.optimizer_names import NAMES
from hf_ckpt.prediction.presets import presets, refuse_missing_model
from hf_ckpt.units import GIB

if TYPE_CHECKING:
    from hf_ckpt.planner.forecast import Forecast, Request
    from hf_ckpt.prediction.workload import Workload

BASES = ("no", "4 bits", "8 bits")
"""Whether the base is quantised, as the page says it."""
CHUNKS = {"as a whole": "full", "in chunks where that helps": "auto"}
"""How the head or a feed-forward may run, as the page names it -> `Request.head`, `Request.mlp`."""
TRAINER_NAMES = {"of transformers": None, **{f"{name.upper()} of TRL": name for name in TRAINERS}}
"""The trainer, as the page names it -> `Workload.trainer`."""
THIS_MACHINE = "this machine"
_tracing = threading.Lock()
"""Held while a model is traced: what that changes in transformers for the time is there for the whole process."""


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked on the page, but for the budget. Raises `HfCkptError` for numbers and names that cannot be."""

    workload: Workload
    device: str
    """A row of the device table; empty for this machine's."""
    head: str
    """As `Request.head`."""
    mlp: str = "full"
    """As `Request.mlp`."""
    compiled: bool = False
    """As `Request.compiled`."""

    @property
    def request(self) -> Request:
        """The request of a forecast, for the budget that is usual for the device."""
        from hf_ckpt.planner.forecast import Request

        device = self.device or None
        return Request(device, head=self.head, mlp=self.mlp, compiled=self.compiled, frontier=True, nearest=True)


def question(
    model: str | None,
    batch: float | None,
    tokens: float | None,
    lora: float | None,
    base: str,
    device: str,
    dtype: str,
    optimizer: str,
    accumulation: float | None,
    head: str,
    lora_dropout: float | None = 0.0,
    trainer: str = "of transformers",
    packing: bool = False,
    ranks: float | None = 1,
    parallel: str = "ddp",
    mlp: str = "as a whole",
    compiled: bool = False,
    *,
    paths: bool = True,
) -> Question:
    """What the fields of the page ask, in their order. An empty number is 0, and a LoRA rank of 0 trains every weight.

    `paths` says whether the model may be a path. Raises `HfCkptError` with the message of the command line for what
    cannot be asked.
    """
    from hf_ckpt.prediction.workload import Workload

    name = (model or "").strip()
    if not name:
        raise HfCkptError("a model is needed: a preset, a folder, or a hub id.")
    if not paths and name not in presets() and (name[0] in "./~\\" or Path(name).exists()):
        raise HfCkptError(f"{shown(name)} is no preset and no hub id, and files of this machine are not read here.")
    workload = Workload(
        model=name,
        batch=int(batch or 0),
        tokens=int(tokens or 0),
        lora=int(lora or 0) or None,
        dtype=dtype,
        optimizer=optimizer,
        accumulation=int(accumulation or 0),
        load_in_4bit=base == "4 bits",
        load_in_8bit=base == "8 bits",
        lora_dropout=float(lora_dropout or 0.0) if lora else 0.0,
        trainer=TRAINER_NAMES[trainer],
        packing=packing,
        ranks=int(ranks or 0),
        parallel=parallel,
    )
    refuse_missing_model(name)
    return Question(workload, "" if device == THIS_MACHINE else device, CHUNKS[head], CHUNKS[mlp], compiled)


def traced(asked: Question) -> tuple[Forecast, Line]:
    """The forecast for a question, and the memory of a step without checkpointing. Tracing takes seconds, once.

    Raises as `planner.forecast.forecast`; that nothing fits, and what would, is found once, too.
    """
    found = _traced(asked)
    if isinstance(found, InfeasibleError):
        raise found.with_traceback(None)
    return found


@functools.lru_cache(maxsize=16)
def _traced(asked: Question) -> tuple[Forecast, Line] | InfeasibleError:
    from hf_ckpt.planner.forecast import forecast

    try:
        with _tracing:
            found = forecast(asked.workload, asked.request)
    except InfeasibleError as error:
        return error.with_traceback(None)
    return found, keeping_all(found)


@functools.lru_cache(maxsize=512)
def answered(asked: Question, budget_bytes: int) -> tuple[Answer, Figure, Figure]:
    """The answer to a question for a budget, with its two figures: of memory through a step, and of time against peak.

    Raises as `traced`.
    """
    found, kept = traced(asked)
    answer = answer_of(found, budget_bytes)
    drawn, fits = answer.found or found, answer.found is not None
    timeline = timeline_figure(drawn, budget_bytes, kept, fits=fits)
    return answer, timeline, frontier_figure(drawn, budget_bytes, fits=fits)


def import_gradio() -> Any:
    """Return `gradio`, set to send nothing anywhere. Raises `MissingDependencyError` without gradio."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio
    except ImportError as error:
        raise MissingDependencyError("gradio", "hf-ckpt app", "pip install 'hf-ckpt[app]'") from error
    return gradio


def look(gradio: Any) -> dict[str, Any]:
    """Arguments of `Blocks.launch` for how the page looks, with letters that every machine has."""
    theme = gradio.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"], primary_hue="red"
    )
    return {"theme": theme, "css": STYLE + _STYLE, "ssr_mode": False, "footer_links": []}


def build(model: str = "gpt2", *, paths: bool = True) -> Any:
    """Return the page as `gradio.Blocks`, to be launched with the arguments of `look`.

    Args:
        model: that is asked about first.
        paths: whether a model may be a path on the machine that the page runs on.

    Raises `MissingDependencyError` without gradio.
    """
    gradio = import_gradio()
    with gradio.Blocks(title="hf_ckpt: what fits?", analytics_enabled=False) as page:
        gradio.HTML(_TITLE)
        fields = _fields(gradio, model)
        button = gradio.Button("Plan", variant="primary", elem_id="hf-plan")
        state = gradio.State()
        summary_first = gradio.HTML(elem_id="hf-refused", visible=False)
        with gradio.Column(visible=False) as results:
            line = gradio.HTML(elem_id="hf-question")
            slider = gradio.Slider(1, 2, label="Memory that a step may take (GiB)", elem_id="hf-budget")
            shown_parts = _parts(gradio)
        everything = [state, summary_first, results, line, slider, *shown_parts]
        plan = functools.partial(_plan, gradio, paths)
        common = {"api_visibility": "private", "concurrency_id": "trace", "concurrency_limit": 1}
        button.click(plan, fields, everything, show_progress_on=[button], **common)
        page.load(plan, fields, everything, show_progress_on=[button], **common)
        moved = {"show_progress": "hidden", "trigger_mode": "always_last", "queue": False}
        slider.input(_move, [state, slider], shown_parts, api_visibility="private", **moved)
    return page


def _fields(gradio: Any, model: str) -> list[Any]:
    """The fields of a question, in the order of the parameters of `question`."""
    devices = [(device.title, name) for name, device in DEVICES.items() if name != "cpu"]
    with gradio.Row(elem_id="hf-form"):
        fields = [
            gradio.Dropdown(
                list(presets()),
                value=model,
                label="Model",
                info="preset, path or hub id",
                allow_custom_value=True,
                elem_id="hf-model",
                min_width=200,
            ),
            gradio.Number(16, label="Batch", info="sequences", precision=0, elem_id="hf-batch", min_width=120),
            gradio.Number(1024, label="Length", info="tokens", precision=0, elem_id="hf-tokens", min_width=120),
            gradio.Number(0, label="LoRA rank", info="0: no LoRA", precision=0, elem_id="hf-lora", min_width=120),
            gradio.Dropdown(
                list(BASES), value=BASES[0], label="Quantised", info="base of LoRA", elem_id="hf-base", min_width=150
            ),
            gradio.Dropdown(
                [*devices, (THIS_MACHINE, THIS_MACHINE)],
                value="4080",
                label="Card",
                info="memory and speed",
                elem_id="hf-device",
                min_width=180,
            ),
        ]
    with gradio.Accordion("More", open=False, elem_id="hf-more"):
        with gradio.Row():
            fields += [
                gradio.Dropdown(list(DTYPE_NAMES), value="bfloat16", label="Type of the weights", min_width=140),
                gradio.Dropdown(list(NAMES), value="adamw", label="Optimizer", min_width=140),
                gradio.Number(1, label="Micro-steps of a step", precision=0, min_width=140),
                gradio.Dropdown(list(CHUNKS), value="as a whole", label="The head and its loss run", min_width=180),
                gradio.Number(0, label="LoRA dropout", step=0.05, min_width=140),
            ]
        with gradio.Row():
            fields += [
                gradio.Dropdown(list(TRAINER_NAMES), value="of transformers", label="Trainer", min_width=140),
                gradio.Checkbox(False, label="Packed", info="sequences in one row", min_width=140),
                gradio.Number(1, label="Ranks", info="a device each", precision=0, min_width=140),
                gradio.Dropdown(list(PARALLEL), value="ddp", label="Shared by", min_width=140),
                gradio.Dropdown(list(CHUNKS), value="as a whole", label="Feed-forwards run", min_width=180),
                gradio.Checkbox(False, label="Compiled", info="blocks, one by one", min_width=140),
            ]
    return fields


def _parts(gradio: Any) -> list[Any]:
    """What changes as the slider moves, in the order of `_shown`."""
    summary = gradio.HTML(elem_id="hf-summary")
    with gradio.Row():
        with gradio.Column(scale=3, min_width=320):
            gradio.HTML("<h3>Memory through one micro-step and the optimizer</h3>")
            timeline = gradio.Plot(show_label=False, elem_id="hf-timeline")
            timeline_legend = gradio.HTML()
        with gradio.Column(scale=2, min_width=320):
            gradio.HTML("<h3>Step time against peak</h3>")
            frontier = gradio.Plot(show_label=False, elem_id="hf-frontier")
            frontier_legend = gradio.HTML()
    code = functools.partial(gradio.Code, interactive=False, lines=1, wrap_lines=True, buttons=["copy"])
    with gradio.Row():
        with gradio.Column(scale=3, min_width=320):
            gradio.HTML("<h3>What to copy</h3>")
            lines = [
                code(label="Training arguments (YAML)", language="yaml", elem_id="hf-arguments"),
                code(label="The same policy as a spec (JSON)", language="json", elem_id="hf-spec"),
                code(label="With the model (Python)", language="python", elem_id="hf-lines"),
                code(label="This question on the command line", language="shell", elem_id="hf-command"),
            ]
        with gradio.Column(scale=2, min_width=320):
            gradio.HTML("<h3>What each block does</h3>")
            blocks = gradio.HTML(elem_id="hf-blocks")
    return [summary, timeline, timeline_legend, frontier, frontier_legend, *lines, blocks]


def _shown(asked: Question, budget_bytes: int) -> list[Any]:
    """Values of the components of `_parts`."""
    answer, timeline, frontier = answered(asked, budget_bytes)
    command = command_of(asked.workload, asked.device, budget_bytes, asked.head, asked.mlp, asked.compiled)
    lines = [answer.arguments, answer.spec, answer.model, command]
    figures = [part for figure in (timeline, frontier) for part in (_plotted(figure), legend_html(figure))]
    return [summary_html(answer), *figures, *lines, blocks_html(answer)]


def _plotted(figure: Figure) -> Any:
    """A figure as the component `Plot` takes it, whose plotly.js draws it."""
    from gradio.components.plot import PlotData

    return PlotData(type="plotly", plot=json.dumps(figure))


def _plan(gradio: Any, paths: bool, *values: Any) -> list[Any]:
    """Answer what the fields ask, for the budget that is usual for the card, or say what is wrong or what would fit."""

    def only(text: str) -> list[Any]:
        return [None, gradio.update(value=text, visible=True), gradio.update(visible=False), *[gradio.skip()] * 12]

    try:
        asked = question(*values, paths=paths)
        found, _ = traced(asked)
    except InfeasibleError as error:
        return only(_misfit(error, asked))
    except HfCkptError as error:
        return only(error_html(str(error)))
    low, high = range_of(found)
    step = 0.01 if high - low > GIB else 0.001
    budget = min(found.budget_bytes, high)
    slider = gradio.update(
        minimum=_rounded(low, step),
        maximum=round(_rounded(high, step) + step, 3),
        value=_rounded(budget, step),
        step=step,
    )
    line = f'<p class="hf-quiet">{escape(question_of(found))}</p>'
    cleared = [gradio.update(visible=False), gradio.update(visible=True)]
    return [asked, *cleared, line, slider, *_shown(asked, budget // MIB * MIB)]


def _rounded(size_bytes: int, step: float) -> float:
    """Bytes as GiB, rounded down to steps of the slider."""
    return round(int(size_bytes / GIB / step) * step, 3)


def _move(asked: Question, gib: float) -> list[Any]:
    """Answer for the budget that the slider says."""
    return _shown(asked, max(int(gib * GIB) // MIB, 1) * MIB)


def _misfit(error: InfeasibleError, asked: Question) -> str:
    """That nothing fits, as the command line says it."""
    from hf_ckpt.planner.answers import headline
    from hf_ckpt.planner.forecast import device_of

    text = headline(error.floor_bytes, error.budget_bytes, device_of(asked.request), None)
    return nearest_html(text, parts_of(error), error.nearest, error.hints)


def add(verbs: Any) -> None:
    """Add the verb and its options to the command line."""
    app = verbs.add_parser(
        "app",
        help="a page in the browser: what fits, with a slider for the budget",
        description="Opens a page on this machine, on which to ask what `hf-ckpt plan` answers: model, batch, length, "
        "adapters and card, with a slider for the budget, and lines to copy. Needs `pip install 'hf-ckpt[app]'`, and "
        "no network.",
    )
    app.add_argument("model", nargs="?", default="gpt2", help="asked about first (default gpt2)")
    app.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    app.add_argument("--port", type=positive, default=7860, help="port to listen on (default 7860)")
    app.add_argument("--open", action="store_true", help="open the page in the browser")
    app.set_defaults(run=run)


def run(arguments: argparse.Namespace, wait: Callable[[Any], None] | None = None) -> int:
    """Serve the page until it is interrupted. Returns 0.

    Args:
        arguments: `model`, `host`, `port` and `open`.
        wait: what to do while it is served; waits for Ctrl+C by default.

    Raises `MissingDependencyError` without gradio or plotly, and `HfCkptError` where the port is taken.
    """
    gradio = import_gradio()
    quiet_libraries()
    refuse_missing_model(arguments.model)
    with importing():
        import hf_ckpt.planner.forecast  # noqa: F401  before the first question, which should not wait for it
    page = build(arguments.model)
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
.gradio-container .hf-table, .gradio-container .hf-table tr, .gradio-container .hf-table tbody { border: 0 !important; }
.gradio-container .modebar-container { display: none; }
.gradio-container .js-plotly-plot text { fill: var(--body-text-color) !important; }
.gradio-container .hoverlayer .bg, .gradio-container .hoverlayer .hovertext > path {
  fill: var(--background-fill-primary) !important; }
.gradio-container h1 { font-size: 1.4rem; margin: 0; }
.gradio-container h3 { font-size: 1.05rem; margin: .4rem 0 0; }
"""
