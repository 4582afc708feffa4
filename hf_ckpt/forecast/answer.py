"""`Forecast`: the answer to one question, which the console, the report and the page show. It imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_ckpt.forecast.question import Question
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from hf_ckpt.costs.costs import Costs, Timeline

Within = Callable[[float | str], "Forecast"]
HEADS = ("way to train it", "options to set", "peak", "step", "tokens/s", "fits")
"""Columns of the table of rows."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train, with its predicted cost."""

    name: str
    """What it is, in words."""
    options: str
    """Options with which `hf-ckpt plan` plans for it, if they differ from the question's; empty if none do."""
    peak_bytes: int
    """Most bytes of tensors alive at any moment of a step."""
    step_seconds: float | None
    """Seconds of one optimizer step with all its micro-steps; None if nothing was timed."""
    tokens_per_second: float | None
    """Tokens that one rank trains on in a second; None if they are not counted."""
    fits: bool
    """Whether the peak is within the budget."""
    spec: Mapping[str, Any] | None = None
    """The checkpointing kwargs of a plan; None for ways of transformers."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The fastest plan within a budget, with its predicted memory and time. `hf_ckpt.predict` returns it.

    forecast = hf_ckpt.predict("llama-3.1-8b", 4, tokens=4096, lora=16, device="h100", budget="60GiB")
    print(forecast.answer)  # Fits: 59.9 of 79.1 GiB on an H100 SXM, 8,000 tokens a second.
    forecast.plan.save("plan.json")
    forecast.within("50GiB").step_seconds  # another budget; takes milliseconds
    """

    fits: bool
    """Whether a plan fits into the budget and the device."""
    answer: str
    """That in words."""
    assumed: str
    """What was assumed about the training, in one line."""
    workload: Question
    """The training, without what concerns the plan. Types that the device cannot compute in are replaced."""
    device: str
    """Name of the device whose memory and speed are assumed."""
    budget_bytes: int
    """The peak that is allowed."""
    peak_bytes: int
    """Predicted peak of the plan: most bytes of tensors alive at any moment. Without a plan, `floor_bytes`."""
    floor_bytes: int
    """The lowest peak of any plan."""
    parts: Mapping[str, int]
    """What fills the peak: name -> bytes. They add up to `peak_bytes`."""
    step_seconds: float | None = None
    """Predicted seconds of one optimizer step with all its micro-steps; None without a plan."""
    tokens_per_second: float | None = None
    """Predicted tokens per second of one rank; None if tokens are not counted."""
    notes: tuple[str, ...] = ()
    """What else to know."""
    rows: tuple[Row, ...] = ()
    """The plan and other ways to train; without a plan, what fits with a change."""
    frontier: tuple[Row, ...] = ()
    """The fastest plans for other budgets, if they were asked for; the lowest peak comes first."""
    write: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What to copy: where it goes -> its lines; empty without a plan."""
    plan: Plan = None  # type: ignore[assignment]
    """The plan; None if nothing fits, where `predict` raises an error."""
    costs: Costs = dataclasses.field(default=None, repr=False, compare=False)  # type: ignore[assignment]
    """The costs from which the plan was made. `to_dict` leaves these three out."""
    timeline: Timeline = dataclasses.field(default=None, repr=False, compare=False)  # type: ignore[assignment]
    """Memory over one step under the plan."""
    within: Within = dataclasses.field(default=None, repr=False, compare=False)  # type: ignore[assignment]
    """Returns the forecast for another budget: bytes, a text such as "20GiB", or a share of the device ("80%" or 0.8).
    Raises `InfeasibleError` if no plan fits, and `UnitError` for an invalid budget."""

    @property
    def usual(self) -> tuple[Row, ...]:
        """The ways of transformers; `none` comes first."""
        return tuple(row for row in self.rows if row.spec is None and not row.options)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that can be written as JSON."""
        left_out = dict.fromkeys(("plan", "costs", "timeline", "within"))
        saved = dataclasses.asdict(dataclasses.replace(self, **left_out))  # type: ignore[arg-type]
        kept = {key: value for key, value in saved.items() if key not in left_out}
        return {**kept, "plan": self.plan and self.plan.to_dict()}

    def table(self) -> list[tuple[str, ...]]:
        """The rows as texts, in the columns of `HEADS`."""
        return [
            (
                *(row.name, row.options, format_bytes(row.peak_bytes), format_seconds(row.step_seconds)),
                *(f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "-", "yes" if row.fits else "no"),
            )
            for row in self.rows
        ]


def print_forecast(forecast: Forecast, console: Console) -> None:
    """Print whether it fits, what to copy, the plan, what fills its peak, and the rows. Long lines are not wrapped."""
    lines = [forecast.assumed, *(f"note: {note}" for note in forecast.notes)]
    for title, text in forecast.write.items():
        lines += ["", f"{title}:", *(f"  {line}" for line in text.splitlines())]
    lines += ["", str(forecast.plan)] if forecast.plan else []
    _say(console, [forecast.answer], style="bold")
    _say(console, lines)
    parts = [(name, format_bytes(size)) for name, size in forecast.parts.items() if size]
    lowest, title = "", "ways to train it; all figures are predicted"
    if not forecast.plan:
        lowest = "lowest "
        title = f"what fits into {format_bytes(forecast.budget_bytes)} with a change; each row is the fastest plan"
    _print_table(console, f"{lowest}peak: {format_bytes(forecast.peak_bytes)}", ("part", "bytes"), parts)
    if forecast.rows:
        _print_table(console, title, HEADS, forecast.table())
    if not forecast.plan:
        first = [f"gradient_checkpointing_kwargs for the first: {json.dumps(row.spec)}" for row in forecast.rows[:1]]
        _say(console, first or ["Nothing near it fits, either."])


def _say(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True, style=style)


def _print_table(console: Console, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    _say(console, ["", title])
    table = Table()
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if (number < 2 and len(heads) > 2) or not number else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
