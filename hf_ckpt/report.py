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
    from hf_ckpt.demo import DemoResult

TUNING_NAMES = {"full": "full fine-tuning", "lora": "LoRA"}


def print_training_summary(summary: Mapping[str, float | None], memory_source: str, plan: Plan | None) -> None:
    """The table at the end of a training run."""
    from rich.table import Table

    table = Table(title="hf_ckpt: this training run", show_header=False, title_justify="left")
    peak = summary.get("memory/peak_gib")
    table.add_row("peak memory", f"{_gib(peak)} ({memory_source})")
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
    pyplot = _pyplot()
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
    _save(figure, path)


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
    pyplot = _pyplot()
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
    _save(figure, path)


def save_block_picture(result: EngineBench, path: Path, kinds: int = 9) -> None:
    """What one block of the first model keeps under each action, by what made it (the largest `kinds` by name).

    Raises `MissingDependencyError` without matplotlib, `HfCkptError` when the `rebuild` engine was not measured.
    """
    case = result.cases[0]
    rebuilt = {row.engine: row for row in case.rows if row.kept}
    if not {"rebuild", "rebuild, save attention"} <= rebuilt.keys():
        raise HfCkptError("this picture needs figures of `rebuild` and of `rebuild, save attention`.")
    pyplot = _pyplot()
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
    _save(figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "drawing a picture", "pip install 'hf-ckpt[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    _pyplot().close(figure)


def _gib(value: float | None) -> str:
    return format_bytes(None if value is None else value * GIB)


def make_console(stderr: bool = False) -> Console:
    """Where tables go: the terminal, or 120 columns where there is none."""
    from rich.console import Console

    console = Console(stderr=stderr)
    # Not a terminal (a log file, CI): rich would fold tables at 80 columns.
    return console if console.is_terminal else Console(stderr=stderr, width=max(console.width, 120))
