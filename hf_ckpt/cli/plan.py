"""`hf-ckpt plan` answers: what is the fastest plan for this training within a memory budget, and what will it cost?"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.arguments import (
    attention,
    importing,
    memory_budget,
    memory_size,
    positive,
    progress,
    quiet_libraries,
)
from hf_ckpt.cli.page import OPTIONS
from hf_ckpt.cli.pictures import PICTURES, import_pyplot
from hf_ckpt.cli.report_html import SUFFIXES as REPORTS
from hf_ckpt.cli.report_html import import_plotly, save_report
from hf_ckpt.console import make_console
from hf_ckpt.errors import HfCkptError, InfeasibleError, shown
from hf_ckpt.prediction.choices import DTYPE_NAMES, GENERATORS, PARALLEL, REFERENCES, TRAINERS
from hf_ckpt.prediction.devices import DEVICES
from hf_ckpt.prediction.optimizer_names import NAMES
from hf_ckpt.prediction.presets import refuse_missing_model
from hf_ckpt.spec.files import refuse_unwritable
from hf_ckpt.spec.plan import SUFFIXES
from hf_ckpt.units import format_bytes, format_ratio, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from hf_ckpt.planner.alternatives import Alternative
    from hf_ckpt.planner.answers import Setting
    from hf_ckpt.planner.forecast import Forecast, Request
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
    parser.add_argument("--lora", type=positive, metavar="R", help="rank of adapters, which alone are trained")
    add_choice(parser, "--dtype", DTYPE_NAMES, "of the weights", default="bfloat16")
    add_choice(parser, "--autocast", (*DTYPE_NAMES, "none"), "type that autocast computes in")
    add_choice(parser, "--optimizer", optimizers, "", default="adamw")
    parser.add_argument("--accum", type=positive, default=1, help="micro-steps a step (default 1)")
    parser.add_argument("--attention", type=attention, default="sdpa", help="attention implementation (default sdpa)")
    parser.add_argument("--padded", action="store_true", help="sequences are padded, so attention gets a mask")
    parser.add_argument("--architecture", help="class of the model, in place of its config's")


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how people train: bits, adapters, trainers, packing, ranks, files that tell these."""
    parser.add_argument("--load-in-4bit", action="store_true", help="base in 4 bits (nf4) by bitsandbytes, as QLoRA")
    parser.add_argument("--load-in-8bit", action="store_true", help="base in 8 bits by bitsandbytes")
    parser.add_argument(
        "--no-double-quant", dest="double_quant", action="store_false", help="scales of 4 bits stay in float32"
    )
    parser.add_argument(
        "--lora-targets",
        type=_targets,
        default="all-linear",
        metavar="NAMES",
        help="layers with adapters, as q_proj,v_proj (default all-linear)",
    )
    parser.add_argument("--lora-dropout", type=float, default=0.0, metavar="P", help="dropout of adapters (default 0)")
    add_choice(parser, "--trainer", TRAINERS, "of TRL, in place of transformers' own")
    add_choice(parser, "--reference", REFERENCES, "of dpo (default adapters-off, or model without adapters)")
    add_choice(parser, "--generation", GENERATORS, "what writes the completions of grpo (default transformers)")
    parser.add_argument("--packing", action="store_true", help="a micro-step is one row of packed sequences")
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="tokens of each sequence, one number a line")
    parser.add_argument("--ranks", type=positive, default=1, help="processes, with a device each (default 1)")
    add_choice(parser, "--parallel", PARALLEL, "how ranks share the work", default="ddp")
    parser.add_argument("--config", type=Path, metavar="FILE", help="training arguments, YAML or JSON; options win")


def _targets(text: str) -> str | tuple[str, ...]:
    """Read `all-linear`, or names with commas between them, for argparse."""
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    if not names:
        raise argparse.ArgumentTypeError("must be names of layers, as q_proj,v_proj, or all-linear")
    return "all-linear" if names == ("all-linear",) else names


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
        epilog="example: hf-ckpt plan llama-3.1-8b --seq 8192 --lora 16 --load-in-4bit --head auto --device 4090",
    )
    plan.add_argument("model", nargs="?", help=f"{MODEL_HELP}; or as in the file of --config")
    add_workload_options(plan, batch=1, tokens=512, optimizers=NAMES)
    add_training_options(plan)
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
        "--head", type=_tokens, default="full", help="auto: the plan may take the head in chunks; or tokens a chunk"
    )
    plan.add_argument(
        "--mlp", type=_tokens, default="full", help="auto: the plan may take feed-forwards in chunks; or tokens a chunk"
    )
    plan.add_argument("--compile", action="store_true", help="blocks are compiled, one by one; the plan gives shares")
    plan.add_argument("--frontier", action="store_true", help="also show the fastest plan for every budget")
    plan.add_argument("--max-batch", action="store_true", help="the largest batch that fits into the budget")
    plan.add_argument("--max-seq", action="store_true", help="the longest sequences that fit into the budget")
    plan.add_argument("--measure", action="store_true", help="time blocks on this machine instead of using a table")
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")
    plan.add_argument("--out", type=Path, help='file for the plan (.yaml or .json), for {"plan": FILE}')
    plan.add_argument("--png", type=Path, help="file for a picture of memory through the step, and of the frontier")
    plan.add_argument("--html", type=Path, help="file for a report with a slider for the budget (.html)")
    plan.set_defaults(run=run, defaults=lambda name: plan.get_default(name))


def _tokens(text: str) -> int | str:
    """Read `auto`, `full` or a number of tokens, for argparse."""
    return text if text in ("auto", "full") else positive(text)


def run(arguments: argparse.Namespace) -> int:
    """Print whether the training fits, what to write, the plan and its costs; save and draw it where that is asked.

    Returns 0, or 2 where nothing fits.
    """
    if arguments.out is not None:
        refuse_unwritable(arguments.out, SUFFIXES)
    if arguments.png is not None:
        refuse_unwritable(arguments.png, PICTURES)
        import_pyplot()
    if arguments.html is not None:
        refuse_unwritable(arguments.html, REPORTS)
        import_plotly("a report in HTML")
    quiet_libraries()
    lengths = () if arguments.lengths is None else _read_lengths(arguments.lengths)
    if lengths:
        arguments.seq = max(lengths)
    if arguments.config is not None:
        _read_config(arguments)
    if arguments.model is None:
        raise HfCkptError("a model is needed: a preset, a folder, a hub id, or a --config with `model_name_or_path`.")
    refuse_missing_model(arguments.model)
    console = make_console(stderr=arguments.json)
    with progress(f"{arguments.model}: loading torch and transformers") as tell:
        with importing():
            from hf_ckpt.cli.plan_picture import save_forecast_picture
            from hf_ckpt.planner.forecast import Request, forecast
        workload = workload_of(arguments, arguments.model)
        asked = Request(
            device=arguments.device,
            budget=arguments.budget,
            frontier=arguments.frontier or arguments.png is not None or arguments.html is not None,
            max_batch=arguments.max_batch,
            max_tokens=arguments.max_seq,
            measure=arguments.measure,
            head=arguments.head,
            mlp=arguments.mlp,
            compiled=arguments.compile,
            host_budget=arguments.host_budget,
            nearest=not (arguments.max_batch or arguments.max_seq),
            lengths=lengths,
        )
        found, misfit = None, None
        try:
            found = forecast(workload, asked, on_progress=tell)
        except InfeasibleError as error:
            if not asked.nearest:
                raise
            misfit = error
    if found is None:
        assert misfit is not None
        _print_misfit(misfit, asked, console, as_json=arguments.json)
        return 2
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print_forecast(found, console, frontier=arguments.frontier)
    if arguments.out is not None:
        found.plan.save(arguments.out)
        _say_written(console, "the plan", arguments.out, how_to_train_with(arguments.out))
    if arguments.png is not None:
        save_forecast_picture(found, arguments.png)
        _say_written(console, "a picture of memory through the step, and of time against peak", arguments.png)
    if arguments.html is not None:
        save_report(found, arguments.html, asked)
        _say_written(console, "a report with a slider for the budget", arguments.html)
    return 0


def how_to_train_with(plan: Path) -> str:
    """Return how a training takes a saved plan, in two lines that can be copied."""
    spec = json.dumps({"plan": str(plan)})
    return (
        f"  in Python:           hf_ckpt.install(model, {spec})\n"
        "  without a change:    python -m hf_ckpt train.py --activation_checkpointing "
        f"--activation_checkpointing_kwargs {shlex.quote(spec)}"
    )


def _say_written(console: Console, what: str, path: Path, then: str = "") -> None:
    """Print that a file was written, and what to do with it."""
    text = f"wrote {what} to {path}" + (f"; train with it by either of\n{then}" if then else "")
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _read_lengths(path: Path) -> tuple[int, ...]:
    """The lengths in a file, one a line. Raises `HfCkptError` where a line is no number above 0."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
        found = tuple(map(int, lines))
    except (OSError, ValueError) as error:
        raise HfCkptError(f"cannot read lengths from {shown(str(path))}: {error}. Give one number a line.") from error
    if not found or min(found) < 1:
        raise HfCkptError(f"{shown(str(path))} must have one number above 0 a line, one for each sequence.")
    return found


def _read_config(arguments: argparse.Namespace) -> None:
    """Set the options that were not given to what the file of `--config` says."""
    from hf_ckpt.doctor.facts import gather
    from hf_ckpt.doctor.trainings import workload_fields

    for field, value in workload_fields(gather([arguments.config])).items():
        name = OPTIONS.get(field, field)
        if getattr(arguments, name) == arguments.defaults(name):
            vars(arguments)[name] = value


def workload_of(arguments: argparse.Namespace, model: str) -> Workload:
    """Return the training that the options describe, for a model; `add_training_options` may be left out."""
    from hf_ckpt.prediction.workload import Workload

    further = ("load_in_4bit", "load_in_8bit", "double_quant", "lora_targets", "lora_dropout", "trainer", "reference")
    names = (*further, "generation", "packing", "ranks", "parallel")
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
        **{name: getattr(arguments, name) for name in names if hasattr(arguments, name)},
    )


def _print_misfit(error: InfeasibleError, asked: Request, console: Console, *, as_json: bool) -> None:
    """Print that nothing fits, what fills the memory, and the nearest settings that do fit."""
    from hf_ckpt.planner.answers import headline
    from hf_ckpt.planner.forecast import device_of

    answer = headline(error.floor_bytes, error.budget_bytes, device_of(asked), None)
    if as_json:
        nearest = [setting.to_dict() for setting in error.nearest]
        told = {"fits": False, "answer": answer, "peak_bytes": error.floor_bytes, "budget_bytes": error.budget_bytes}
        print(json.dumps({**told, "parts": error.parts, "nearest": nearest}, indent=1))
        return
    console.print(answer, highlight=False, style="bold")
    for name, size in error.parts.items():
        if size:
            console.print(f"  {format_bytes(size)} {name}", highlight=False)
    if not error.nearest:
        console.print("Nothing near it fits, either:", highlight=False)
        for hint in error.hints:
            console.print(f"  - {hint}", highlight=False, markup=False)
        return
    console.print("\nWhat fits, with one change or two:", highlight=False)
    _print_nearest(error.nearest, console)


def _print_nearest(settings: Sequence[Setting], console: Console) -> None:
    """Print a table of settings that fit."""
    from rich.table import Table

    table = Table()
    for name in ("change", "options to add", "peak", "tokens/s"):
        table.add_column(name, justify="right" if name in ("peak", "tokens/s") else "left")
    for setting in settings:
        speed = f"{setting.tokens_per_second:,.0f}" if setting.tokens_per_second else "-"
        table.add_row(setting.name, setting.options, format_bytes(setting.peak_bytes), speed)
    console.print(table)
    first = settings[0]
    console.print(
        f"activation_checkpointing_kwargs for the first: {json.dumps(dict(first.spec))}", highlight=False, markup=False
    )


def print_forecast(found: Forecast, console: Console | None = None, *, frontier: bool = True) -> None:
    """Print whether it fits, what to write, the plan, what fills its peak, and what transformers offers.

    Args:
        found: to be printed.
        console: to print on.
        frontier: whether to print plans for other budgets, where they were found.
    """
    console = console or make_console()
    console.print(found.answer, highlight=False, style="bold")
    _print_workload(found, console)
    _print_lines(found, console)
    console.print(str(found.plan), highlight=False)
    graphs = found.plan.graphs()
    if graphs:
        each = ", ".join(f"{kind} of {stack} at share {share:g}" for stack, kind, share in graphs)
        console.print(f"compiles {len(graphs)} graphs with their backward: {each}", highlight=False)
    _print_peak(found, console)
    _print_buckets(found, console)
    _print_comparison(found, console, frontier=frontier)
    for asked, answer, unit in (("batch", found.max_batch, "sequences"), ("seq", found.max_tokens, "tokens")):
        if answer is not None:
            console.print(f"largest --{asked} within the budget: {answer} {unit}", highlight=False)
    for note in found.costs.notes:
        console.print(f"note: {note}", highlight=False)


def _print_lines(found: Forecast, console: Console) -> None:
    """Print the lines to copy into a training script or its YAML."""
    from hf_ckpt.planner.answers import arguments_of, model_lines, yaml_lines

    def lines(title: str, found: Sequence[str]) -> None:
        console.print(f"\n{title}", highlight=False)
        for line in found:
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)

    lines("Training arguments to write (YAML):", yaml_lines(arguments_of(found.workload, found.spec)))
    lines("With the model:", model_lines(found.workload, found.spec))
    console.print("")


def _print_buckets(found: Forecast, console: Console) -> None:
    """Print the plans for the lengths of the data."""
    from rich.table import Table

    if not found.buckets:
        return
    table = Table(title="batches of the data, by their longest sequence", title_justify="left")
    for name in ("tokens", "batches", "blocks not kept", "peak", "step"):
        table.add_column(name, justify="right")
    for bucket in found.buckets:
        size, seconds = format_bytes(bucket.peak_bytes), format_seconds(bucket.step_seconds)
        table.add_row(str(bucket.tokens), str(bucket.batches), str(bucket.recomputed), size, seconds)
    console.print(table)
    total = sum(bucket.batches * bucket.step_seconds for bucket in found.buckets) / found.workload.accumulation
    console.print(f"one pass over the data: {format_seconds(total)} (predicted)", highlight=False)


def _print_workload(found: Forecast, console: Console) -> None:
    """Print what was asked about: the model, the training, the device and the budget."""
    workload = found.workload
    layers = workload.lora_targets
    where = "every linear layer" if layers == "all-linear" else layers if isinstance(layers, str) else ", ".join(layers)
    tuning = "every weight" if workload.lora is None else f"LoRA r={workload.lora} on {where}"
    tuning += f", base in {workload.bits} bits" if workload.bits else ""
    trainer = f", {workload.trainer} of TRL" if workload.trainer else ""
    trainer += ", packed" if workload.packing else ""
    trainer += f", {workload.ranks} ranks ({workload.parallel})" if workload.ranks > 1 else ""
    accumulated = f" x {workload.accumulation} micro-steps" if workload.accumulation > 1 else ""
    computing = f", autocast {workload.autocast_name}" if workload.autocast_name else ""
    console.print(
        f"{workload.model}: {tuning}, {workload.dtype}{computing}, {workload.optimizer}, "
        f"batch {workload.batch} x {workload.tokens} tokens{accumulated}, {workload.attention}{trainer}; "
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
        console.print(
            f"the head and its loss are the peak, with {format_bytes(of_head)} that no policy on blocks saves: "
            '--head auto ("head": "auto") takes them in chunks',
            highlight=False,
            markup=False,
        )


def _print_comparison(found: Forecast, console: Console, *, frontier: bool) -> None:
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
    table = Table(title="other ways to train it", title_justify="left")
    for place, name in enumerate(("option", "peak", "peak/plan", "step", "step/plan", "fits")):
        table.add_column(name, justify="left" if place == 0 else "right")
    rows = [("this plan", prediction.peak_bytes, prediction.step_seconds)]
    listed = [*_few(found.usual), *found.further]
    rows += [(option.name, option.peak_bytes, option.step_seconds) for option in listed]
    if frontier:
        rows += [
            (f"planned for {format_bytes(option.budget_bytes)}", option.peak_bytes, option.step_seconds)
            for option in found.frontier
        ]
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
