"""`Forecast`: the answer to one question, which the console and the page show.

Importing it does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hf_ckpt.costs.costs import Timeline

HEADS = ("way to train it", "options to set", "peak", "step", "tokens/s", "fits")
"""Columns of the table of rows."""


@dataclasses.dataclass(frozen=True)
class ForecastRow:
    """One way to train, with its predicted cost."""

    name: str
    """What it is, in words."""
    options: str
    """Options with which `hf-ckpt plan` plans for it, if they differ from the question's; empty if none do."""
    peak_bytes: int
    """Most bytes of tensors alive at any moment of a step."""
    step_seconds: float
    """Seconds of one optimizer step with all its micro-steps."""
    tokens_per_second: float | None
    """Tokens that one rank trains on in a second; None if they are not counted."""
    fits: bool
    """Whether the peak is within the budget and the device."""
    spec: Mapping[str, Any] | None
    """The checkpointing kwargs of a plan; None for ways of transformers."""

    def cells(self) -> tuple[str, ...]:
        """It as texts, in the columns of `HEADS`."""
        speed = f"{self.tokens_per_second:,.0f}" if self.tokens_per_second else "-"
        fits = "yes" if self.fits else "no"
        return self.name, self.options, format_bytes(self.peak_bytes), format_seconds(self.step_seconds), speed, fits


@dataclasses.dataclass(frozen=True)
class Forecast(ForecastRow):
    """The fastest plan within a budget, with its predicted memory and time. `hf_ckpt.predict` returns it.

    forecast = hf_ckpt.predict("llama-3.1-8b", 4, tokens=4096, lora=16, device="h100", budget="60GiB")
    print(forecast.verdict)  # Fits: 59.9 of 79.1 GiB on an H100 SXM, 8,000 tokens per second.
    forecast.plan.save("plan.json")
    forecast.within("50GiB").step_seconds  # another budget; takes milliseconds

    If no plan fits (`predict` then raises an error), the figures are those of the plan with the lowest peak.
    """

    verdict: str
    """Whether it fits, in words."""
    assumed: str
    """What was assumed about the training, in one line."""
    budget_bytes: int
    """The peak that is allowed."""
    floor_bytes: int
    """The lowest peak of any plan."""
    parts: Mapping[str, int]
    """What fills the peak: name -> bytes. They add up to `peak_bytes`."""
    allocator_bytes: tuple[int, int]
    """What to leave for the allocator beside the peak: the least and the most of published runs. No part of what fits;
    zeros on a CPU."""
    left: tuple[str, ...]
    """What the peak leaves of the device, and what of it is for the allocator, in lines; none if it does not fit."""
    notes: tuple[str, ...]
    """What else to know."""
    others: tuple[ForecastRow, ...]
    """Other ways to train; if no plan fits, what fits with a change."""
    frontier: tuple[ForecastRow, ...]
    """The fastest plans for other budgets; the lowest peak comes first."""
    write: Mapping[str, str]
    """What to copy: where it goes -> its lines; empty if no plan fits."""
    plan: Plan | None
    """The plan; None if no plan fits."""
    timeline: Timeline = dataclasses.field(repr=False, compare=False)
    """Memory over one step under the plan. `to_dict` leaves this and `within` out."""
    within: Callable[[float | str], Forecast] = dataclasses.field(repr=False, compare=False)
    """Returns the forecast for another budget: bytes, a text such as "20GiB", or a share of the device ("80%" or 0.8).
    Raises `InfeasibleError` if no plan fits, and `UnitError` for an invalid budget."""

    @property
    def row(self) -> ForecastRow:
        """The plan as one way to train."""
        return ForecastRow(*(getattr(self, field.name) for field in dataclasses.fields(ForecastRow)))

    @property
    def rows(self) -> tuple[ForecastRow, ...]:
        """The plan and other ways to train; if no plan fits, what fits with a change."""
        return self.others if self.plan is None else (self.row, *self.others)

    @property
    def usual(self) -> tuple[ForecastRow, ...]:
        """The ways of transformers; `none` comes first."""
        return tuple(row for row in self.others if row.spec is None)

    @property
    def answer(self) -> str:
        """The same as `verdict`."""
        return self.verdict

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that can be written as JSON."""
        return {
            **dataclasses.asdict(self.row),
            "answer": self.verdict,
            "assumed": self.assumed,
            "budget_bytes": self.budget_bytes,
            "floor_bytes": self.floor_bytes,
            "parts": dict(self.parts),
            "allocator_bytes": list(self.allocator_bytes),
            "left": list(self.left),
            "notes": list(self.notes),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "frontier": [dataclasses.asdict(row) for row in self.frontier],
            "write": dict(self.write),
            "plan": None if self.plan is None else self.plan.to_dict(),
        }

    def table(self) -> list[tuple[str, ...]]:
        """The rows as texts, in the columns of `HEADS`."""
        return [row.cells() for row in self.rows]
