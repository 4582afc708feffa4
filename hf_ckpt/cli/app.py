"""`hf-ckpt app`: a page on which one asks what fits, moves the budget, and copies what to write. It runs on Gradio."""

from __future__ import annotations

import argparse
import functools
import os
import threading
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.arguments import importing, positive, quiet_libraries
from hf_ckpt.cli.page import STYLE, error_html, nearest_html, parts_of
from hf_ckpt.cli.report_html import import_plotly, report_of
from hf_ckpt.errors import HfCkptError, InfeasibleError, MissingDependencyError, shown
from hf_ckpt.prediction.choices import DTYPE_NAMES, PARALLEL, TRAINERS
from hf_ckpt.prediction.devices import DEVICES
from hf_ckpt.prediction.optimizer_names import NAMES
from hf_ckpt.prediction.presets import presets, refuse_missing_model

if TYPE_CHECKING:
    from hf_ckpt.planner.forecast import Request
    from hf_ckpt.prediction.workload import Workload

BASES = ("no", "4 bits", "8 bits")
"""Whether the base is quantised, as the page says it."""
CHUNKS = {"as a whole": "full", "in chunks where that helps": "auto"}
"""How the head or a feed-forward may run, as the page names it -> `Request.head`, `Request.mlp`."""
TRAINER_NAMES: dict[str, dict[str, Any]] = {
    "of transformers": {},
    **{f"{name.upper()} of TRL": {"trainer": name} for name in TRAINERS},
    "GRPO of TRL, with vLLM": {"trainer": "grpo", "generation": "vllm"},
}
"""The trainer, as the page names it -> the fields of `Workload` that say so."""
THIS_MACHINE = "this machine"
_tracing = threading.Lock()
"""Held while a model is traced: what that changes in transformers for the time is there for the whole process."""


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
    budget: str | None = "",
    *,
    paths: bool = True,
) -> tuple[Workload, Request]:
    """What the fields of the page ask, in their order. An empty number is 0, and a LoRA rank of 0 trains every weight.

    `paths` says whether the model may be a path. Raises `HfCkptError` with the message of the command line for what
    cannot be asked.
    """
    from hf_ckpt.planner.forecast import Request
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
        **TRAINER_NAMES[trainer],
        packing=packing,
        ranks=int(ranks or 0),
        parallel=parallel,
    )
    refuse_missing_model(name)
    asked = Request(
        None if device == THIS_MACHINE else device,
        (budget or "").strip() or None,
        frontier=True,
        head=CHUNKS[head],
        mlp=CHUNKS[mlp],
        compiled=compiled,
        nearest=True,
    )
    return workload, asked


def answered(workload: Workload, asked: Request, plotly: str) -> str:
    """The report that answers a question, as `report_html.report_of`. It is made once, which takes seconds.

    Args:
        workload: what is trained.
        asked: the request, with `frontier`.
        plotly: the address of plotly.js.

    Raises as `planner.forecast.forecast`; that nothing fits, and what would, is found once, too.
    """
    found = _answered(workload, asked, plotly)
    if isinstance(found, InfeasibleError):
        raise found.with_traceback(None)
    return found


@functools.lru_cache(maxsize=16)
def _answered(workload: Workload, asked: Request, plotly: str) -> str | InfeasibleError:
    from hf_ckpt.planner.forecast import forecast

    try:
        with _tracing:
            found = forecast(workload, asked)
    except InfeasibleError as error:
        return error.with_traceback(None)
    return report_of(found, f'<script src="{escape(plotly)}"></script>', asked)


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
                gradio.Textbox("", label="Budget", info="as 20GiB or 80%", elem_id="hf-asked", min_width=140),
            ]
    return fields


def _plan(gradio: Any, plotly: str, paths: bool, *values: Any) -> list[Any]:
    """Answer what the fields ask with a report in a frame of its own, or say what is wrong or what would fit."""
    hidden = gradio.update(value="", visible=False)

    def only(text: str) -> list[Any]:
        return [gradio.update(value=text, visible=True), hidden]

    try:
        workload, asked = question(*values, paths=paths)
        text = answered(workload, asked, plotly)
    except InfeasibleError as error:
        return only(_misfit(error, asked))
    except HfCkptError as error:
        return only(error_html(str(error)))
    frame = f'<iframe title="The answer" srcdoc="{escape(text)}"></iframe>'
    return [hidden, gradio.update(value=frame, visible=True)]


def _misfit(error: InfeasibleError, asked: Request) -> str:
    """That nothing fits, as the command line says it."""
    from hf_ckpt.planner.answers import headline
    from hf_ckpt.planner.forecast import device_of

    text = headline(error.floor_bytes, error.budget_bytes, device_of(asked), None)
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
#hf-report iframe { width: 100%; height: 80vh; border: 0; color-scheme: light; }
.dark #hf-report iframe { color-scheme: dark; }
.gradio-container .hf-table, .gradio-container .hf-table tr, .gradio-container .hf-table tbody { border: 0 !important; }
.gradio-container h1 { font-size: 1.4rem; margin: 0; }
"""
