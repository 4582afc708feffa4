"""Turns forecasts into words and tables: whether a training fits, which settings it needs, and what it costs.

`text` prints an `Answer` on a console, and `html` writes it into a page, so both say the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hf_ckpt.errors import InfeasibleError
from hf_ckpt.forecast.devices import Device
from hf_ckpt.forecast.words import arguments_of, assumed, headline, model_lines, task_of, yaml_lines
from hf_ckpt.prediction.question import Workload
from hf_ckpt.units import format_bytes, format_ratio, format_seconds

if TYPE_CHECKING:
    from hf_ckpt.forecast.nearest import Setting
    from hf_ckpt.forecast.record import Forecast


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a question, in sentences and tables."""

    fits: bool
    headline: str
    """Whether it fits, in a sentence."""
    assumed: str
    """The assumptions about the training, and the budget, in one line."""
    tables: tuple[Table, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    """What to copy: (where it goes, its lines)."""
    remarks: tuple[str, ...] = ()
    """Notes; if nothing fits, also what fills the memory."""


def answer_of(forecast: Forecast, *, frontier: bool = False) -> Answer:
    """The answer of a forecast.

    Args:
        forecast: the forecast.
        frontier: whether to list plans for other budgets, if the forecast has them.
    """
    return Answer(
        forecast.fits,
        forecast.answer,
        f"{assumed(forecast.workload, forecast.device)}, budget {format_bytes(forecast.budget_bytes)}",
        (_peak_table(forecast), comparison_table(forecast, forecast.budget_bytes, frontier=frontier)),
        copies_of(forecast),
        (*_remarks(forecast), *_notes(forecast.costs.notes)),
    )


def misfit_of(error: InfeasibleError, workload: Workload, device: Device) -> Answer:
    """The answer if nothing fits, before other settings are tried."""
    parts = [f"{format_bytes(size)} {name}" for name, size in error.parts.items() if size]
    return Answer(
        False,
        headline(error.floor_bytes, error.budget_bytes, device, None, task_of(error.model)),
        f"{assumed(workload, device)}, budget {format_bytes(error.budget_bytes)}",
        remarks=(*parts, *_notes(error.notes)),
    )


def misfit_in_numbers(
    error: InfeasibleError, workload: Workload, device: Device, nearest: Iterable[Setting]
) -> dict[str, Any]:
    """The answer if nothing fits, as a dict for JSON."""
    return {
        "fits": False,
        "answer": misfit_of(error, workload, device).headline,
        "assumed": assumed(workload, device),
        "notes": error.notes,
        "peak_bytes": error.floor_bytes,
        "budget_bytes": error.budget_bytes,
        "parts": error.parts,
        "nearest": [dataclasses.asdict(setting) for setting in nearest],
    }


def nearest_table(settings: Sequence[Setting], budget_bytes: int) -> Table:
    """The settings that fit although the one asked for does not."""
    return Table(
        f"What fits, with one change or two. Each is the fastest plan that fits into {format_bytes(budget_bytes)}",
        ("change", "options to add", "peak of the plan", "tokens/s"),
        tuple(
            (setting.name, setting.options, format_bytes(setting.peak_bytes), _speed(setting.tokens_per_second))
            for setting in settings
        ),
    )


def comparison_table(forecast: Forecast, budget_bytes: int, *, plan: bool = True, frontier: bool = False) -> Table:
    """Compare the plan and other ways to train, with each peak and step time relative to no checkpointing.

    Args:
        forecast: the forecast.
        budget_bytes: the peak that is allowed.
        plan: whether there is a plan for this budget.
        frontier: whether to list plans for other budgets, if the forecast has them.
    """
    base = forecast.usual[0]
    rows = [("this plan", forecast.peak_bytes, forecast.step_seconds)] if plan else []
    rows += [(way.name, way.peak_bytes, way.step_seconds) for way in (*forecast.usual, *forecast.further)]
    if frontier:
        rows += [
            (f"planned for {format_bytes(way.budget_bytes)}", way.peak_bytes, way.step_seconds)
            for way in forecast.frontier
        ]
    prediction = forecast.plan.prediction
    tokens = prediction.tokens if prediction is not None else None
    return Table(
        "ways to train it, compared with no checkpointing (none); all figures are predicted",
        ("option", "peak", "of none", "step", "of none", "tokens/s", "fits"),
        tuple(
            (
                name,
                format_bytes(peak),
                format_ratio(peak / base.peak_bytes),
                format_seconds(seconds),
                format_ratio(seconds / base.step_seconds),
                _speed(tokens / seconds if tokens else None),
                "yes" if peak <= budget_bytes else "no",
            )
            for name, peak, seconds in rows
        ),
    )


def copies_of(forecast: Forecast) -> tuple[tuple[str, str], ...]:
    """What to copy into a training script or its YAML."""
    return (
        ("Training arguments (YAML)", "\n".join(yaml_lines(arguments_of(forecast.workload, forecast.spec)))),
        ("With the model (Python)", "\n".join(model_lines(forecast.workload, forecast.spec))),
    )


def _peak_table(forecast: Forecast) -> Table:
    """What fills the peak of the plan."""
    static, worst, prediction = forecast.costs.static, forecast.timeline.worst, forecast.plan.prediction
    assert prediction is not None
    parts = {
        "weights": static.parameters,
        "optimizer state": static.optimizer,
        "buffers and batch": static.buffers + static.batch,
        **dict(list(prediction.parts)[1:]),
    }
    rows = tuple((name, format_bytes(size)) for name, size in parts.items())
    return Table(f"peak: {format_bytes(forecast.peak_bytes)}, in {worst.label}", ("part", "bytes"), rows)


def _remarks(forecast: Forecast) -> Iterator[str]:
    """Further remarks on a plan."""
    plan, parts = forecast.plan, forecast.timeline.parts()
    of_head = list(parts.values())[-1]
    if forecast.timeline.is_heads and plan.head == "full" and of_head > parts["kept for backward"]:
        yield (
            f"the head and its loss are the peak, with {format_bytes(of_head)} that no policy on blocks saves: "
            '--head auto ("head": "auto") takes them in chunks'
        )
    for asked, most, unit in (("batch", forecast.max_batch, "sequences"), ("seq", forecast.max_tokens, "tokens")):
        if most is not None:
            yield f"largest --{asked} within the budget: {most} {unit}"


def _notes(notes: Iterable[str]) -> Iterator[str]:
    return (f"note: {note}" for note in notes)


def _speed(tokens_per_second: float | None) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second else "-"
