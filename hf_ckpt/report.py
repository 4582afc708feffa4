"""Plans, measurements and verifications as tables and pictures. Free of torch."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.errors import HfCkptError, MissingDependencyError
from hf_ckpt.plan import Plan
from hf_ckpt.units import GIB, format_bytes, format_percent, format_ratio, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from hf_ckpt.bench import EngineBench
    from hf_ckpt.budgets import Option
    from hf_ckpt.demo import DemoResult
    from hf_ckpt.doctor import Finding
    from hf_ckpt.foresight import Foresight
    from hf_ckpt.headbench import HeadBench
    from hf_ckpt.planbench import PlanBench

TUNING_NAMES = {"full": "full fine-tuning", "lora": "LoRA"}


def print_training_summary(summary: Mapping[str, float | None], memory_source: str, plan: Plan | None) -> None:
    """The table at the end of a training run."""
    from rich.table import Table

    table = Table(title="hf_ckpt: this training run", show_header=False, title_justify="left")
    peak = summary.get("memory/peak_gib")
    table.add_row("peak memory", f"{_gib(peak)} ({memory_source})")
    if summary.get("memory/predicted_gib") is not None:
        error = format_percent(summary.get("memory/prediction_error"))
        table.add_row("predicted", f"{_gib(summary['memory/predicted_gib'])} (measured against it: {error})")
    if summary.get("memory/reserved_gib") is not None:
        table.add_row("reserved", _gib(summary["memory/reserved_gib"]))
    if summary.get("memory/head_gib") is not None:
        share = summary.get("memory/head_share")
        part = f" ({format_percent(share)} of the peak, at least)" if share is not None else ""
        table.add_row("head output", _gib(summary["memory/head_gib"]) + part)
    table.add_row("step time, median", format_seconds(summary.get("time/step_s")))
    for key, name in (("time/tokens_per_s", "tokens/s"), ("time/samples_per_s", "samples/s")):
        value = summary.get(key)
        if value is not None:
            table.add_row(f"{name}, median", f"{value:,.1f}")
    if summary.get("time/recompute_share") is not None:
        table.add_row("spent recomputing", format_percent(summary["time/recompute_share"]))
    blocks = "none (no plan enabled)" if plan is None else f"{len(plan.active())} of {len(plan.actions)} blocks"
    table.add_row("planned", blocks)
    make_console(stderr=True).print(table)


def print_checks(rows: Sequence[tuple[str, str, Any]], console: Console | None = None) -> None:
    """One row a verification: (model, spec, `Verification`)."""
    from rich.table import Table

    table = Table(title="same seed, without and with the plan", title_justify="left")
    for column in ("model", "spec", "loss", "gradients", "recomputed", "result"):
        table.add_column(column, justify="right" if column in ("gradients", "recomputed") else "left", overflow="fold")
    for model, spec, check in rows:
        equal = f"{check.parameters - check.different}/{check.parameters} bit-equal"
        loss = "equal" if not check.loss_difference else f"off by {check.loss_difference:.2g}"
        recomputed = f"{sum(check.recomputed.values())} of {len(check.plan.active())}"
        table.add_row(model, spec, loss, equal, recomputed, "ok" if check else "[bold red]FAILED")
    console = console or make_console()
    console.print(table)
    for model, spec, check in rows:
        if not check:
            console.print(f"{model}, {spec}:\n{check}", markup=False, highlight=False)


def print_findings(findings: Sequence[Finding], versions: Mapping[str, str], console: Console | None = None) -> None:
    """What doctor found, the worst first, and the versions it saw."""
    from rich.table import Table
    from rich.text import Text

    console = console or make_console()
    installed = ", ".join(f"{name} {version}" for name, version in versions.items())
    console.print(f"installed: {installed or 'nothing that hf_ckpt works with'}", highlight=False, markup=False)
    if not findings:
        console.print("nothing found that would go wrong", highlight=False)
        return
    styles = {"error": "bold red", "warning": "yellow"}
    table = Table(title_justify="left", show_lines=True)
    for name in ("", "where", "what, and what to do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        severity = Text(finding.severity, styles.get(finding.severity, ""))
        # Not markup: keys and values may hold brackets.
        table.add_row(severity, Text(finding.where), Text(f"{finding.what}\n-> {finding.fix}"))
    console.print(table)


def print_demo(result: DemoResult, console: Console | None = None) -> None:
    """The demo's table: memory and time of each policy, the first row being what the others are compared with."""
    from rich.table import Table

    console = console or make_console()
    console.print(
        f"{result.model}, LoRA r={result.lora_rank}, batch {result.batch} x {result.tokens} tokens of {result.text}, "
        f"{result.steps} timed steps each, interleaved",
        highlight=False,
    )
    table = Table(title_justify="left")
    resident = "resident" in result.memory_source
    names = (
        "policy",
        "live peak",
        "",
        "resident" if resident else "allocator",
        "step",
        "",
        "tok/s",
        "loss",
        "gradients",
        "recomp.",
    )
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place in (0, 8) else "right", no_wrap=place not in (0, 8))
    first = result.runs[0]
    for run in result.runs:
        table.add_row(
            run.name,
            format_bytes(run.live_peak_bytes),
            format_ratio(run.live_peak_bytes / first.live_peak_bytes),
            format_bytes(run.resident_peak_bytes),
            format_seconds(run.step_seconds),
            format_ratio(run.step_seconds / first.step_seconds),
            f"{run.tokens_per_second:.0f}",
            f"{run.losses[-1]:.4f}",
            "reference" if run is first else ("bit-equal" if run.equal else f"DIFFER: {run.first_difference}"),
            str(run.recomputed),
        )
    console.print(table)
    console.print(
        "live peak: bytes of all tensors alive at the worst moment of one untimed step, counted from outside;\n"
        f"           {format_bytes(first.start_bytes)} of it are weights and optimizer state.\n"
        + (
            f"resident:  peak of the same step ({result.memory_source}); the C allocator hoards what was freed.\n"
            if resident
            else f"allocator: peak of the same step ({result.memory_source}).\n"
        )
        + "step:      median of the timed steps; recomp.: blocks (`selective`: operations) run again in a backward.",
        highlight=False,
    )


def save_demo_picture(result: DemoResult, path: Path) -> None:
    """Two panels: live memory through one step of each policy, and peak memory against step time.

    Raises `MissingDependencyError` without matplotlib.
    """
    pyplot = import_pyplot()
    figure, (through, against) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2), layout="constrained")
    for run in result.runs:
        progress = [100 * place / max(len(run.timeline) - 1, 1) for place in range(len(run.timeline))]
        (line,) = through.plot(progress, [size / GIB for size in run.timeline], label=run.name, linewidth=1.4)
        against.scatter(run.step_seconds, run.live_peak_bytes / GIB, color=line.get_color(), s=60, zorder=3)
        against.annotate(
            run.name,
            (run.step_seconds, run.live_peak_bytes / GIB),
            textcoords="offset points",
            xytext=(8, 6),
            fontsize=9,
        )
    through.axhline(result.runs[0].start_bytes / GIB, color="0.6", linestyle=":", linewidth=1)
    through.annotate(
        "weights", (0, result.runs[0].start_bytes / GIB), xytext=(2, -12), textcoords="offset points", color="0.4"
    )
    through.set(
        xlabel="operations of one training step (%)", ylabel="live tensors (GiB)", ylim=(0, None), xlim=(0, 100)
    )
    through.legend(frameon=False)
    against.set(xlabel="step time, median (s)", ylabel="peak of live tensors (GiB)", ylim=(0, None))
    against.margins(x=0.25)
    against.set_xlim(left=0)
    for axes in (through, against):
        axes.grid(alpha=0.25)
    figure.suptitle(f"{result.model}: LoRA, batch {result.batch} x {result.tokens} tokens", fontsize=11)
    save_figure(figure, path)


def print_foresight(found: Foresight, console: Console | None = None) -> None:
    """The plan, what fills its peak, and how it compares with what transformers offers."""
    from rich.table import Table

    console = console or make_console()
    setup, plan, static = found.setup, found.plan, found.costs.static
    prediction = plan.prediction
    assert prediction is not None
    tuning = "every weight" if setup.lora is None else f"LoRA r={setup.lora} on every linear layer"
    accumulated = f" x {setup.accumulation} micro-steps" if setup.accumulation > 1 else ""
    computing = f", autocast {setup.autocast}" if setup.autocast else ""
    console.print(
        f"{setup.model}: {tuning}, {setup.dtype}{computing}, {setup.optimizer}, batch {setup.batch} x {setup.tokens} "
        f"tokens{accumulated}, {setup.attention}; {found.device.name}, budget {format_bytes(found.budget_bytes)}",
        highlight=False,
    )
    console.print(str(plan), highlight=False)
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
    for asked, answer, unit in (("batch", found.max_batch, "sequences"), ("seq", found.max_tokens, "tokens")):
        if answer is not None:
            console.print(f"largest --{asked} within the budget: {answer} {unit}", highlight=False)
    for note in found.costs.notes:
        console.print(f"note: {note}", highlight=False)


def _few(options: Sequence[Option]) -> list[Option]:
    """Of the many `every_n_layers`, 2 to 4."""
    many = [option for option in options if option.name.startswith("every_n_layers")]
    few = {f"every_n_layers: {every}" for every in (2, 3, 4)}
    return [option for option in options if option not in many or option.name in few]


def save_foresight_picture(found: Foresight, path: Path) -> None:
    """Memory through the step, stacked by kind, with the plan's blocks marked; and time against peak, if it was asked.

    Raises `MissingDependencyError` without matplotlib.
    """
    pyplot = import_pyplot()
    with_frontier = bool(found.frontier)
    shape = {"width_ratios": (3, 2)} if with_frontier else {}
    figure, axes = pyplot.subplots(
        1, 2 if with_frontier else 1, figsize=(13 if with_frontier else 9, 4.6), layout="constrained", **shape
    )
    _draw_timeline(axes[0] if with_frontier else axes, found)
    if with_frontier:
        _draw_frontier(axes[1], found)
    setup = found.setup
    tuning = "full fine-tuning" if setup.lora is None else f"LoRA r={setup.lora}"
    figure.suptitle(
        f"{setup.model}, {tuning}, batch {setup.batch} x {setup.tokens} tokens, {found.device.name} (predicted)",
        fontsize=11,
    )
    save_figure(figure, path)


_COLOURS = {
    "keep": "#4c72b0",
    "selective (save linear, attention)": "#55a868",
    "selective (save attention)": "#b5d99c",
    "selective (save linear)": "#8fbf9f",
    "full": "#dd8452",
    "offload": "#8172b3",
    "selective (save linear, attention in host memory)": "#da8bc3",
}


def _draw_timeline(axes: Any, found: Foresight) -> None:
    """x: time of the step as predicted; y: bytes alive, from what is always there up to the work of the moment."""
    actions = {block.name: action for block, action in found.plan.actions}
    xs: list[float] = []
    layers: dict[str, list[float]] = {"always there": [], "gradients": [], "kept for backward": [], "at work": []}
    now = 0.0
    marks: list[tuple[float, float, str]] = []
    for moment in found.timeline.moments:
        levels = list(moment.levels()) or [(moment.start_bytes, moment.gradient_bytes)]
        kept = moment.kept_bytes
        seconds = moment.phase.nanoseconds / 1e9
        for place, (level, gradients) in enumerate(levels):
            xs.append((now + seconds * (place + 1) / len(levels)) * 1e3)
            rest = level - moment.static_bytes - gradients
            stays = min(kept, max(rest, 0))
            for name, size in zip(layers, (moment.static_bytes, gradients, stays, rest - stays), strict=True):
                layers[name].append(max(size, 0) / GIB)
        if moment.block is not None:
            marks.append((now * 1e3, (now + seconds) * 1e3, str(actions[moment.block])))
        now += seconds
    shades = ("0.75", "#c44e52", "#937860", "#64b5cd")
    axes.stackplot(xs, *layers.values(), labels=list(layers), colors=shades, linewidth=0)
    top = found.timeline.peak_bytes / GIB
    for start, end, kind in marks:
        axes.fill_between([start, end], [top * 1.04] * 2, [top * 1.09] * 2, color=_COLOURS[kind], linewidth=0)
    for kind in dict.fromkeys(kind for _, _, kind in marks):
        axes.fill_between([], [], [], color=_COLOURS[kind], label=kind)
    axes.axhline(found.budget_bytes / GIB, color="black", linestyle="--", linewidth=1)
    axes.annotate(
        "budget", (now * 1e3, found.budget_bytes / GIB), xytext=(-4, 3), textcoords="offset points", ha="right"
    )
    axes.set(xlabel="predicted time of one micro-step and the optimizer (ms)", ylabel="bytes alive (GiB)")
    axes.set_xlim(0, now * 1e3)
    axes.set_ylim(0, max(top * 1.12, found.budget_bytes / GIB * 1.08 if found.budget_bytes / GIB < 2 * top else 0))
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)


def _draw_frontier(axes: Any, found: Foresight) -> None:
    prediction = found.plan.prediction
    assert prediction is not None
    ours = found.frontier
    axes.step(
        [option.peak_bytes / GIB for option in ours],
        [option.step_seconds for option in ours],
        where="post",
        marker=".",
        label="hf_ckpt, by budget",
    )
    rows = ("every_n_layers", "x", "every_n_layers (transformers)"), ("segments", "+", "segments: 2 blocks, sqrt")
    for start, marker, label in rows:
        options = [option for option in found.usual if option.name.startswith(start)]
        places = [option.peak_bytes / GIB for option in options], [option.step_seconds for option in options]
        axes.scatter(*places, marker=marker, color="0.5", label=label)
    others = (*found.usual, *found.further)
    single = [option for option in others if not option.name.startswith(tuple(start for start, _, _ in rows))]
    for marker, option in zip("os^vDPh", single, strict=False):
        place = option.peak_bytes / GIB, option.step_seconds
        axes.scatter(*place, marker=marker, color="0.2", s=24, zorder=3, label=option.name)
    axes.scatter(prediction.peak_bytes / GIB, prediction.step_seconds, marker="*", s=140, zorder=4, label="this plan")
    axes.axvline(found.budget_bytes / GIB, color="black", linestyle="--", linewidth=1)
    peaks = [option.peak_bytes / GIB for option in (*ours, *others)]
    axes.set_xlim(min(peaks) * 0.97, max(peaks) * 1.03)
    axes.set(xlabel="peak (GiB)", ylabel="step (s)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)


def print_engines(result: EngineBench, console: Console | None = None) -> None:
    """One table a model: what every engine keeps and costs, the first row being what the others are compared with."""
    from rich.table import Table

    console = console or make_console()
    for case in result.cases:
        table = Table(
            title=f"{case.family}, {TUNING_NAMES[case.tuning]}, {case.blocks} blocks",
            title_justify="left",
            pad_edge=False,
        )
        names = ("engine", "kept", "", "step", "", "spread", "gradients", "recomp.", "host", "of sac")
        for place, name in enumerate(names):
            table.add_column(name, justify="left" if place in (0, 6) else "right", no_wrap=place != 6)
        for row in case.rows:
            ratios = row.time_ratios
            table.add_row(
                row.engine,
                format_bytes(row.block_bytes),
                format_ratio(row.bytes_ratio),
                format_seconds(statistics.median(row.step_seconds) if row.step_seconds else None),
                format_ratio(statistics.median(ratios) if ratios else None),
                f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "-",
                "[bold red]FAILED" if row.problem else "bit-equal" if row.equal else "[yellow]differ",
                str(row.recomputed),
                format_seconds(row.host_seconds),
                format_percent(row.host_share_of_sac),
            )
        console.print(table)
        for row in case.rows:
            told = row.problem or row.difference
            if told:
                console.print(f"{row.engine}: {told}", style="red", markup=False, highlight=False, soft_wrap=True)
    settings, found = result.settings, result.circumstances
    console.print(
        f"{settings.layers} layers, hidden {settings.hidden}, batch {settings.batch} x {settings.tokens} tokens, "
        f"{settings.dtype}, dropout {settings.dropout:g}, sdpa; {found['device']}, {found['threads']} threads of "
        f"{found['cpus']} CPUs;\ntorch {found['torch']}, transformers {found['transformers']}, peft {found['peft']}, "
        f"Python {found['python']}, {found['date']}\n"
        "kept:       live bytes at the end of the forward that were made inside the blocks, counted from outside.\n"
        f"step:       forward and backward, median of {settings.repeats} interleaved repeats; ratios within a repeat.\n"
        "recomp.:    operations, modules or blocks run again in the backward of one step.\n"
        "host:       a block's part of the time of a step beyond `none`, on a model too small to compute anything.",
        highlight=False,
    )


def save_engines_picture(result: EngineBench, path: Path) -> None:
    """Two panels: kept bytes and step time of every engine over those of the first, model by model.

    Raises `MissingDependencyError` without matplotlib.
    """
    pyplot = import_pyplot()
    figure, panels = pyplot.subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    engines = [row.engine for row in result.cases[0].rows]
    width = 0.8 / len(engines)
    for axes, label in zip(panels, ("kept bytes / none", "step time / none"), strict=True):
        for number, engine in enumerate(engines):
            rows = [case.rows[number] for case in result.cases]
            times = [statistics.median(row.time_ratios) if row.time_ratios else None for row in rows]
            values = times if axes is panels[1] else [row.bytes_ratio for row in rows]
            places = [place + (number - (len(engines) - 1) / 2) * width for place in range(len(rows))]
            axes.bar(places, [value or 0 for value in values], width, label=engine)
        axes.axhline(1, color="0.6", linestyle=":", linewidth=1)
        axes.set(ylabel=label)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    names = [f"{case.family}\n{TUNING_NAMES[case.tuning]}" for case in result.cases]
    panels[1].set_xticks(range(len(names)), names)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    save_figure(figure, path)


def save_block_picture(result: EngineBench, path: Path, kinds: int = 9) -> None:
    """What one block of the first model keeps under each action, by what made it (the largest `kinds` by name).

    Raises `MissingDependencyError` without matplotlib, `HfCkptError` when the `rebuild` engine was not measured.
    """
    case = result.cases[0]
    rebuilt = {row.engine: row for row in case.rows if row.kept}
    if not {"rebuild", "rebuild, save attention"} <= rebuilt.keys():
        raise HfCkptError("this picture needs figures of `rebuild` and of `rebuild, save attention`.")
    pyplot = import_pyplot()
    default, attention = rebuilt["rebuild"], rebuilt["rebuild, save attention"]
    everything = collections.Counter(default.kept)
    everything.update(default.dropped)
    everything.subtract(default.kept_to_rebuild)
    bars = {
        "keep": dict(everything),
        "selective": default.kept,
        'selective\n"save": ["attention"]': attention.kept,
        "full": {"block input": case.blocks * case.block_input_bytes},
    }
    total: collections.Counter[str] = collections.Counter()
    for parts in bars.values():
        total.update(parts)
    named = [name for name, _ in total.most_common(kinds)]
    figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    heights = [0.0] * len(bars)
    for name in [*named, "other"]:
        sizes = [
            sum(size for kind, size in parts.items() if (kind if kind in named else "other") == name)
            / case.blocks
            / 2**20
            for parts in bars.values()
        ]
        axes.bar(list(bars), sizes, 0.6, bottom=heights, label=name.removesuffix("0").removesuffix("Backward"))
        heights = [height + size for height, size in zip(heights, sizes, strict=True)]
    axes.set(ylabel="kept by one block (MiB)")
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    settings = result.settings
    figure.suptitle(
        f"{case.family}, {TUNING_NAMES[case.tuning]}: hidden {settings.hidden}, "
        f"batch {settings.batch} x {settings.tokens} tokens, {settings.dtype}",
        fontsize=11,
    )
    save_figure(figure, path)


def print_plans(result: PlanBench, console: Console | None = None) -> None:
    """One table a model: what transformers offers, and what is planned within the same peaks."""
    from rich.table import Table

    console = console or make_console()
    for case in result.cases:
        table = Table(
            title=f"{case.family}, {TUNING_NAMES[case.tuning]}, {case.blocks} blocks",
            title_justify="left",
            pad_edge=False,
        )
        names = ("option", "peak", "predicted", "error", "step", "predicted", "of none", "of its rival", "gradients")
        for place, name in enumerate(names):
            table.add_column(name, justify="left" if place in (0, 8) else "right", no_wrap=place != 8)
        for row in case.rows:
            found = row.measured
            table.add_row(
                row.name,
                format_bytes(found.peak_bytes),
                format_bytes(row.predicted_peak_bytes),
                format_percent(row.peak_error),
                format_seconds(statistics.median(found.step_seconds) if found.step_seconds else None),
                format_seconds(row.predicted_seconds),
                format_ratio(statistics.median(found.time_ratios) if found.time_ratios else None),
                format_ratio(row.ratio_to_rival),
                "[bold red]FAILED" if found.problem else "bit-equal" if found.equal else "[yellow]differ",
            )
        console.print(table)
        for row in case.rows:
            if row.measured.problem:
                console.print(f"{row.name}: {row.measured.problem}", style="red", markup=False, soft_wrap=True)
    settings, found_at = result.settings, result.circumstances
    console.print(
        f"{settings.layers} layers, hidden {settings.hidden}, batch {settings.batch} x {settings.tokens} tokens, "
        f"{settings.dtype}, dropout {settings.dropout:g}, sdpa; {found_at['device']}, {found_at['threads']} threads;\n"
        f"torch {found_at['torch']}, transformers {found_at['transformers']}, {found_at['date']}\n"
        "peak:         most live bytes of a step, weights and gradients included, counted exactly; no optimizer.\n"
        f"step:         forward and backward, median of {settings.repeats} interleaved repeats; ratios within one.\n"
        "of its rival: over the option of transformers whose predicted peak was the budget.",
        highlight=False,
    )


def print_head(result: HeadBench, console: Console | None = None) -> None:
    """One row for each way to run each head."""
    from rich.table import Table

    console = console or make_console()
    table = Table(title="the head and its loss", title_justify="left", pad_edge=False)
    names = ("hidden", "type", "weight", "chunks", "peak", "of it its gradient", "smaller", "step", "of whole", "error")
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place in (1, 2, 3) else "right")
    for row in result.rows:
        table.add_row(
            str(row.hidden),
            row.dtype,
            row.tuning,
            "none" if row.head == "full" else str(row.head),
            format_bytes(row.peak_bytes),
            format_bytes(row.weight_gradient_bytes),
            format_ratio(row.bytes_ratio),
            format_seconds(statistics.median(row.step_seconds)),
            format_ratio(row.time_ratio),
            f"{row.error:.1e}",
        )
    console.print(table)
    settings, found_at = result.settings, result.circumstances
    console.print(
        f"vocabulary {settings.vocabulary}, {settings.tokens} tokens; {found_at['device']}, {found_at['threads']} "
        f"threads;\ntorch {found_at['torch']}, transformers {found_at['transformers']}, {found_at['date']}\n"
        "peak:  most live bytes above hidden states, weight and labels, the gradient of the weight among them.\n"
        f"step:  forward and backward, median of {settings.repeats} interleaved repeats; ratios within one.\n"
        "error: of gradients, against float64: norm of the difference over norm.",
        highlight=False,
    )


def save_plans_picture(result: PlanBench, path: Path) -> None:
    """One panel a model: measured step time against measured peak.

    Raises `MissingDependencyError` without matplotlib.
    """
    pyplot = import_pyplot()
    count = len(result.cases)
    figure, panels = pyplot.subplots(1, count, figsize=(4.2 * count, 4), layout="constrained", squeeze=False)
    for axes, case in zip(panels[0], result.cases, strict=True):
        for ours in (False, True):
            rows = [row for row in case.rows if row.name.startswith("planned") is ours and row.measured.step_seconds]
            rows.sort(key=lambda row: row.measured.peak_bytes or 0)
            axes.plot(
                [(row.measured.peak_bytes or 0) / 2**20 for row in rows],
                [statistics.median(row.measured.time_ratios) for row in rows],
                marker="o" if ours else "x",
                label="hf_ckpt, planned" if ours else "transformers",
            )
            for row in () if ours else rows:
                place = (row.measured.peak_bytes or 0) / 2**20, statistics.median(row.measured.time_ratios)
                axes.annotate(row.name, place, textcoords="offset points", xytext=(4, 4), fontsize=8)
        axes.set(xlabel="peak (MiB)", ylabel="step time / none", title=f"{case.family}, {TUNING_NAMES[case.tuning]}")
        axes.grid(alpha=0.25)
        axes.margins(x=0.2)
    panels[0][0].legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def import_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "drawing a picture", "pip install 'hf-ckpt[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    import_pyplot().close(figure)


def _gib(value: float | None) -> str:
    return format_bytes(None if value is None else value * GIB)


def make_console(stderr: bool = False) -> Console:
    """Where tables go: the terminal, or 120 columns where there is none."""
    from rich.console import Console

    console = Console(stderr=stderr)
    # Not a terminal (a log file, CI): rich would fold tables at 80 columns.
    return console if console.is_terminal else Console(stderr=stderr, width=max(console.width, 120))
