"""Plans, measurements and verifications as tables and pictures. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.errors import MissingDependencyError
from hf_ckpt.plan import Plan
from hf_ckpt.units import GIB, format_bytes, format_percent, format_ratio, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from hf_ckpt.demo import DemoResult


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
        + "step:      median of the timed steps; recomp.: blocks run again in the backward of one step.",
        highlight=False,
    )


def save_demo_picture(result: DemoResult, path: Path) -> None:
    """Two panels: live memory through one step of each policy, and peak memory against step time.

    Raises `MissingDependencyError` without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "drawing a picture", "pip install 'hf-ckpt[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

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
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result.model}: LoRA, batch {result.batch} x {result.tokens} tokens", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _gib(value: float | None) -> str:
    return format_bytes(None if value is None else value * GIB)


def make_console(stderr: bool = False) -> Console:
    """Where tables go: the terminal, or 120 columns where there is none."""
    from rich.console import Console

    console = Console(stderr=stderr)
    # Not a terminal (a log file, CI): rich would fold tables at 80 columns.
    return console if console.is_terminal else Console(stderr=stderr, width=max(console.width, 120))
