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
    rows = {
        "policy": _policy(description),
        "plan": description.plan.summary() if description and description.enabled else "",
        "peak": _peak(description, figures),
        "step": format_seconds(figures.get("time/step_s")),
        "tokens": _tokens(figures),
        "recomputing": _recomputing(description),
    }
    lines = [f"  {name:<12}{text}" for name, text in rows.items() if text]
    return [f"hf_ckpt: {counted(steps, 'step')} of training", *lines]


def _policy(description: Description | None) -> str:
    if description is None:
        return "hf_ckpt is not installed on the model"
    options = {key: value for key, value in description.spec.items() if key in ("budget", "plan")}
    policy = str(description.spec.get("policy", "plan"))
    words = [policy, *(str(value) for value in options.values())]
    return " ".join(words) + ("" if description.enabled else ", not enabled")


def _peak(description: Description | None, figures: Mapping[str, float | None]) -> str:
    """The predicted peak, the measured one, and the predicted one without checkpointing, as far as they are known."""
    parts = []
    if description and description.plan.prediction and not description.measuring:
        parts.append(f"{format_bytes(description.plan.prediction.peak_bytes)} predicted")
    measured = figures.get("memory/step_peak_gib")
    is_of_process = measured is None and "memory/step_peak_gib" in figures
    measured = figures.get("memory/peak_gib") if measured is None else measured
    if measured is not None:
        whose = " (the whole process)" if is_of_process else ""
        parts.append(f"{format_bytes(measured * GIB)} measured{whose}")
    if description and description.without:
        parts.append(f"{format_bytes(description.without.peak_bytes)} predicted without checkpointing")
    return ", ".join(parts)


def _tokens(figures: Mapping[str, float | None]) -> str:
    rate = figures.get("tokens_per_second")
    if rate is None:
        return ""
    padding = figures.get("padding")
    share = "" if padding is None else f", {padding:.0%} of them padding"
    return f"{rate:,.0f} a second{share}"


def _recomputing(description: Description | None) -> str:
    """How much of a step recomputation takes: by how much a step is slower than without checkpointing."""
    prediction = description.plan.prediction if description else None
    without = description.without if description else None
    if prediction is None or without is None or not prediction.step_seconds or not without.step_seconds:
        return ""
    return (
        f"{max(0.0, 1 - without.step_seconds / prediction.step_seconds):.0%} of a step, as predicted from timed steps"
    )
