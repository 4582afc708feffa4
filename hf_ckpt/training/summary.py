"""The table that `MemoryTimeCallback` prints at the end of a training run."""

from __future__ import annotations

from collections.abc import Mapping

from hf_ckpt.console import make_console
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import GIB, format_bytes, format_percent, format_seconds


def print_training_summary(summary: Mapping[str, float | None], memory_source: str, plan: Plan | None) -> None:
    """Print the figures of a training run as a table, to stderr.

    Args:
        summary: figures by the keys of `MemoryTimeCallback`.
        memory_source: where the memory figures come from, in words.
        plan: the plan that was enabled, or None.
    """
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


def _gib(value: float | None) -> str:
    return format_bytes(None if value is None else value * GIB)
