"""The table that `MemoryTimeCallback` logs at the end of training."""

from __future__ import annotations

from collections.abc import Mapping

from hf_ckpt.spec.description import Description
from hf_ckpt.units import GIB, counted, format_bytes, format_seconds


def summary(description: Description | None, figures: Mapping[str, float | None], steps: int) -> list[str]:
    """Return the table of a run, line by line.

    Args:
        description: of the plan at the end; None if hf_ckpt is not installed on the model.
        figures: those of the whole run, as from `Figures.of_run`.
        steps: optimizer steps of the run.
    """
    prediction = description.plan.prediction if description and not description.measuring else None
    without = description.without if description else None
    rows = {
        **_asked(description),
        "plan": _plan(description),
        "without": f"{format_bytes(without.peak_bytes)}, predicted without checkpointing" if without else "",
        "with": f"{format_bytes(prediction.peak_bytes)}, predicted under the plan" if prediction else "",
        "measured": _measured(description, figures),
        "time": ", ".join(filter(None, (_step(figures), _tokens(figures), _recomputing(description)))),
    }
    lines = [f"  {name:<12}{text}" for name, text in rows.items() if text]
    return [f"hf_ckpt: {counted(steps, 'step')} of training", *lines]


def _asked(description: Description | None) -> dict[str, str]:
    """The row of the budget, or of another policy."""
    if description is None:
        return {"policy": "hf_ckpt is not installed on the model"}
    off = "" if description.enabled else ", not enabled"
    policy = str(description.spec.get("policy", "plan"))
    if policy == "budget":
        return {"budget": f"{description.spec['budget']}{off}"}
    return {"policy": f"{description.spec.get(policy, policy)}{off}"}  # of a saved plan, its path


def _plan(description: Description | None) -> str:
    """The plan at the end, and whether the run was still measuring."""
    if description is None or not description.enabled:
        return ""
    reason = f"; not yet the plan of the run: {description.measuring}" if description.measuring else ""
    return f"{description.plan.summary()}{reason}"


def _measured(description: Description | None, figures: Mapping[str, float | None]) -> str:
    """The measured peak: of a step under the plan, or else under others of the run, or else the largest of the run."""
    of_step = figures.get("memory/step_peak_gib")
    if of_step is not None:
        if description and description.measured_bytes:
            return f"{format_bytes(description.measured_bytes)}, in a step under the plan"
        # Each batch has a plan of its own, and not all of them are measured.
        return f"{format_bytes(of_step * GIB)}, in a step under another plan of the run"
    peak = figures.get("memory/peak_gib")
    if peak is None:
        return ""
    is_of_process = "memory/step_peak_gib" in figures
    return f"{format_bytes(peak * GIB)}{', by the whole process' if is_of_process else ''}"


def _step(figures: Mapping[str, float | None]) -> str:
    seconds = figures.get("time/step_s")
    return "" if seconds is None else f"{format_seconds(seconds)} per step"


def _tokens(figures: Mapping[str, float | None]) -> str:
    rate = figures.get("tokens_per_second")
    if rate is None:
        return ""
    padding = figures.get("padding")
    share = "" if padding is None else f", {padding:.0%} of them padding"
    return f"{rate:,.0f} tokens per second{share}"


def _recomputing(description: Description | None) -> str:
    """How much of a step recomputation takes: by how much a step is slower than without checkpointing."""
    prediction = description.plan.prediction if description else None
    without = description.without if description else None
    if prediction is None or without is None or not prediction.step_seconds or not without.step_seconds:
        return ""
    share = 1 - without.step_seconds / prediction.step_seconds
    # Times of a few steps vary; a plan that recomputes cannot be faster than without.
    return f"{share:.0%} of it recomputing" if share >= 0.005 else ""
