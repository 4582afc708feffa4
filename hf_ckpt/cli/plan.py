"""`hf-ckpt plan` answers: what is the fastest plan for this training within a memory budget, and what will it cost?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.arguments import attention, memory_budget, memory_size, positive, progress_bar, quiet_libraries
from hf_ckpt.cli.pictures import PICTURES, import_pyplot
from hf_ckpt.console import make_console
from hf_ckpt.prediction.choices import DTYPE_NAMES
from hf_ckpt.prediction.devices import DEVICES
from hf_ckpt.prediction.optimizer_names import NAMES
from hf_ckpt.spec.files import refuse_unwritable
from hf_ckpt.spec.plan import SUFFIXES
from hf_ckpt.units import format_bytes, format_ratio, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from hf_ckpt.planner.alternatives import Alternative
    from hf_ckpt.planner.forecast import Forecast
    from hf_ckpt.prediction.workload import Workload


MODEL_HELP = "preset (llama-3.1-8b, gpt2-xl, bert-large, t5-3b, ...), folder, hub id or config.json"
"""Help for an argument that names a model whose weights are not needed."""


def add_workload_options(
    parser: argparse.ArgumentParser, *, batch: int, tokens: int, optimizers: Iterable[str]
) -> None:
    """Add the options that describe a training, from which `workload_of` makes a `Workload`.

    `batch` and `tokens` are the defaults of `--batch` and `--seq`; `optimizers` are the values of `--optimizer`.
    """
    parser.add_argument("--batch", type=positive, default=batch, help=f"sequences a micro-step (default {batch})")
    parser.add_argument("--seq", type=positive, default=tokens, help=f"tokens a sequence (default {tokens})")
    parser.add_argument("--target-seq", type=positive, help="tokens a target sequence, for T5 (default: as --seq)")
    parser.add_argument("--lora", type=positive, metavar="R", help="rank of adapters on every linear layer")
    add_choice(parser, "--dtype", DTYPE_NAMES, "of the weights", default="bfloat16")
    add_choice(parser, "--autocast", DTYPE_NAMES, "type that autocast computes in")
    add_choice(parser, "--optimizer", optimizers, "", default="adamw")
    parser.add_argument("--accum", type=positive, default=1, help="micro-steps a step (default 1)")
    parser.add_argument("--attention", type=attention, default="sdpa", help="attention implementation (default sdpa)")
    parser.add_argument("--padded", action="store_true", help="sequences are padded, so attention gets a mask")
    parser.add_argument("--architecture", help="class of the model, in place of its config's")


def add_choice(
    parser: argparse.ArgumentParser, name: str, choices: Iterable[str], words: str, default: str | None = None
) -> None:
    """Add an option that takes one of some names, which its help lists after `words`."""
    listed = ", ".join(f"{choice} (default)" if choice == default else choice for choice in choices)
    help_text = f"{words}: {listed}" if words else listed
    parser.add_argument(name, choices=tuple(choices), default=default, metavar="NAME", help=help_text)


def add(verbs: Any) -> None:
    """Add the verb and its options to the command line."""
    plan = verbs.add_parser(
        "plan",
        help="plan a training for a memory budget, without weights and without a GPU",
        description="Which blocks keep, rebuild or recompute so that a training step is the fastest that fits, with "
        "its peak and what fills it, step time and tokens a second, all predicted. Exit code 2 if nothing fits.",
        epilog="example: hf-ckpt plan llama-3.1-8b --batch 2 --seq 4096 --lora 16 --device 4090 --budget 22GiB",
    )
    plan.add_argument("model", help=MODEL_HELP)
    add_workload_options(plan, batch=1, tokens=512, optimizers=NAMES)
    add_choice(plan, "--device", DEVICES, "assumed in place of this machine's")
    plan.add_argument(
        "--budget",
        type=memory_budget,
        help="peak allowed: 20GiB, or 80%% or 0.8 of the device (default: 90%% of the device)",
    )
    plan.add_argument(
        "--host-budget", type=memory_size, help="host memory that the plan may offload to (default: none)"
    )
    plan.add_argument(
        "--head", type=_head, default="full", help="auto: the plan may take the head in chunks; or tokens a chunk"
    )
    plan.add_argument("--compile", action="store_true", help="blocks are compiled, one by one; the plan gives shares")
    plan.add_argument("--frontier", action="store_true", help="show time against peak, and what transformers offers")
    plan.add_argument("--max-batch", action="store_true", help="the largest batch that fits into the budget")
    plan.add_argument("--max-seq", action="store_true", help="the longest sequences that fit into the budget")
    plan.add_argument("--measure", action="store_true", help="time blocks on this machine instead of using a table")
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.add_argument("--out", type=Path, help='file for the plan (.yaml or .json), for {"plan": FILE}')
    plan.add_argument("--png", type=Path, help="file for a picture of memory through the step, and of the frontier")
    plan.set_defaults(run=run)


def _head(text: str) -> int | str:
    """Read `auto`, `full` or a number of tokens, for argparse."""
    return text if text in ("auto", "full") else positive(text)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and what it is predicted to cost, save and draw it where that is asked, and return 0."""
    if arguments.out is not None:
        refuse_unwritable(arguments.out, SUFFIXES)
    if arguments.png is not None:
        refuse_unwritable(arguments.png, PICTURES)
        import_pyplot()
    quiet_libraries()
    from hf_ckpt.cli.plan_picture import save_forecast_picture
    from hf_ckpt.planner.forecast import Request, forecast

    workload = workload_of(arguments, arguments.model)
    console = make_console(stderr=arguments.json)
    asked = Request(
        device=arguments.device,
        budget=arguments.budget,
        frontier=arguments.frontier or arguments.png is not None,
        max_batch=arguments.max_batch,
        max_tokens=arguments.max_seq,
        measure=arguments.measure,
        head=arguments.head,
        compiled=arguments.compile,
        host_budget=arguments.host_budget,
    )
    with progress_bar(console, None) as on_progress:
        found = forecast(workload, asked, on_progress=on_progress)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print_forecast(found, console)
    if arguments.out is not None:
        found.plan.save(arguments.out)
    if arguments.png is not None:
        save_forecast_picture(found, arguments.png)
    return 0


def workload_of(arguments: argparse.Namespace, model: str) -> Workload:
    """Return the training that the options of `add_workload_options` describe, for a model."""
    from hf_ckpt.prediction.workload import Workload

    return Workload(
        model=model,
        batch=arguments.batch,
        tokens=arguments.seq,
        target_tokens=arguments.target_seq,
        lora=arguments.lora,
        dtype=arguments.dtype,
        autocast=arguments.autocast,
        optimizer=arguments.optimizer,
        accumulation=arguments.accum,
        attention=arguments.attention,
        padded=arguments.padded,
        architecture=arguments.architecture,
    )


def print_forecast(found: Forecast, console: Console | None = None) -> None:
    """Print the plan, what fills its peak, and how it compares with what transformers offers."""
    console = console or make_console()
    _print_workload(found, console)
    console.print(str(found.plan), highlight=False)
    graphs = found.plan.graphs()
    if graphs:
        each = ", ".join(f"{kind} at share {share:g}" for kind, share in graphs)
        console.print(f"compiles {len(graphs)} graphs with their backward: {each}", highlight=False)
    _print_peak(found, console)
    _print_comparison(found, console)
    for asked, answer, unit in (("batch", found.max_batch, "sequences"), ("seq", found.max_tokens, "tokens")):
        if answer is not None:
            console.print(f"largest --{asked} within the budget: {answer} {unit}", highlight=False)
    for note in found.costs.notes:
        console.print(f"note: {note}", highlight=False)


def _print_workload(found: Forecast, console: Console) -> None:
    """Print what was asked about: the model, the training, the device and the budget."""
    workload = found.workload
    tuning = "every weight" if workload.lora is None else f"LoRA r={workload.lora} on every linear layer"
    accumulated = f" x {workload.accumulation} micro-steps" if workload.accumulation > 1 else ""
    computing = f", autocast {workload.autocast}" if workload.autocast else ""
    console.print(
        f"{workload.model}: {tuning}, {workload.dtype}{computing}, {workload.optimizer}, "
        f"batch {workload.batch} x {workload.tokens} tokens{accumulated}, {workload.attention}; "
        f"{found.device.name}, budget {format_bytes(found.budget_bytes)}",
        highlight=False,
    )


def _print_peak(found: Forecast, console: Console) -> None:
    """Print what fills the peak of the plan, and a hint where the head is most of it."""
    from rich.table import Table

    plan, static = found.plan, found.costs.static
    prediction = plan.prediction
    assert prediction is not None
    worst = found.timeline.worst
    table = Table(title=f"peak: {format_bytes(prediction.peak_bytes)}, in {worst.label}", title_justify="left")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_row("weights", format_bytes(static.parameters))
    table.add_row("optimizer state", format_bytes(static.optimizer))
    table.add_row("buffers and batch", format_bytes(static.buffers + static.batch))
    for name, size in list(prediction.parts)[1:]:
        table.add_row(name, format_bytes(size))
    console.print(table)
    parts = found.timeline.parts()
    of_head = list(parts.values())[-1]
    if found.timeline.is_heads and plan.head == "full" and of_head > parts["kept for backward"]:
        work = format_bytes(of_head)
        console.print(
            f'the head and its loss are the peak, with {work} that no policy on blocks saves: --head auto ("head": '
            '"auto") takes them in chunks',
            highlight=False,
            markup=False,
        )


def _print_comparison(found: Forecast, console: Console) -> None:
    """Print the speed of the plan, and its peak and time beside those of other plans."""
    from rich.table import Table

    prediction = found.plan.prediction
    assert prediction is not None
    speed = prediction.tokens_per_second
    console.print(
        f"step {format_seconds(prediction.step_seconds)}, {speed:,.0f} tokens/s (predicted)"
        if speed
        else f"step {format_seconds(prediction.step_seconds)} (predicted)",
        highlight=False,
    )
    table = Table(title="against it", title_justify="left")
    for place, name in enumerate(("option", "peak", "", "step", "", "fits")):
        table.add_column(name, justify="left" if place == 0 else "right")
    rows = [("this plan", prediction.peak_bytes, prediction.step_seconds)]
    shown = [*_few(found.usual), *found.further, *found.frontier]
    rows += [(option.name, option.peak_bytes, option.step_seconds) for option in shown]
    for name, peak, seconds in rows:
        table.add_row(
            name,
            format_bytes(peak),
            format_ratio(peak / prediction.peak_bytes),
            format_seconds(seconds),
            format_ratio(seconds / prediction.step_seconds),
            "yes" if peak <= found.budget_bytes else "no",
        )
    console.print(table)


def _few(options: Sequence[Alternative]) -> list[Alternative]:
    """Leave out `every_n_layers` with more than 4, of which there are too many for a table."""
    many = [option for option in options if option.name.startswith("every_n_layers")]
    few = {f"every_n_layers: {every}" for every in (2, 3, 4)}
    return [option for option in options if option not in many or option.name in few]
