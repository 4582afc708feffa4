"""`hf-ckpt plan`: what a training would need and take, before it exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hf_ckpt.autoplan import this_device
from hf_ckpt.budgets import Option, frontier, plan_within, segmented_options, usual_options
from hf_ckpt.cost import trace_costs
from hf_ckpt.devices import Device, device_named
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.install import trial
from hf_ckpt.measure import device_memory
from hf_ckpt.plan import Plan
from hf_ckpt.setups import Setup, blueprint_of_setup, learned_positions, step_of_setup
from hf_ckpt.solver import smallest
from hf_ckpt.timeline import Costs, Timeline, worst_timeline
from hf_ckpt.timings import measured, of_setup
from hf_ckpt.units import parse_bytes, parse_fraction

Progress = Callable[[str], None]
DEFAULT_SHARE = 0.9
"""Of the device, where no budget is given: the rest is for what no tensor shows."""
_UNITS = {"batch": "sequences", "tokens": "tokens"}
MOST = 2**20
"""Sequences or tokens beyond which nobody asks."""


@dataclasses.dataclass(frozen=True)
class Questions:
    """What is wanted beside a plan."""

    device: str | None = None
    """A row of the table; None is this machine's."""
    budget: str | None = None
    """Bytes, or a share of the device."""
    frontier: bool = False
    max_batch: bool = False
    max_tokens: bool = False
    measure: bool = False
    """Time the actions on this machine."""


@dataclasses.dataclass(frozen=True)
class Foresight:
    """The answers."""

    setup: Setup
    device: Device
    budget_bytes: int
    costs: Costs
    plan: Plan
    timeline: Timeline
    """The step under the plan, the micro-step with the larger peak."""
    usual: tuple[Option, ...]
    """What transformers itself offers, and `segments`."""
    frontier: tuple[Option, ...] = ()
    max_batch: int | None = None
    max_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "setup": dataclasses.asdict(self.setup),
            "device": dataclasses.asdict(self.device),
            "budget_bytes": self.budget_bytes,
            "static_bytes": dataclasses.asdict(self.costs.static),
            "plan": self.plan.to_dict(),
            "tokens_per_second": self.plan.prediction.tokens_per_second if self.plan.prediction else None,
            "usual": [_row(option) for option in self.usual],
            "frontier": [_row(option) for option in self.frontier],
            "max_batch": self.max_batch,
            "max_seq": self.max_tokens,
        }


def _row(option: Option) -> dict[str, Any]:
    return {"name": option.name, "peak_bytes": option.peak_bytes, "step_seconds": option.step_seconds}


def foresee(setup: Setup, asked: Questions, *, on_progress: Progress | None = None) -> Foresight:
    """Plan for a setup, and answer what else is asked.

    Raises `InfeasibleError` when nothing fits into the budget (with the largest batch and the longest sequences that
    do, where those are what is asked for), and `HfCkptError` for a model or device that cannot be found.
    """
    tell = on_progress or (lambda text: None)
    device = device_named(asked.device) if asked.device else this_device()
    budget = _budget_bytes(asked.budget, device)
    tell("reading the model")
    blueprint = blueprint_of_setup(setup)

    def costs_of(changed: Setup, what: str) -> Costs:
        tell(what)
        return trace_costs(blueprint, step_of_setup(changed, blueprint), device, trial)

    costs = costs_of(setup, "tracing")
    if asked.measure:
        costs = measured(costs, of_setup(setup), tell)

    def peak_with(name: str, number: int) -> int:
        changes: dict[str, Any] = {name: number}
        return _floor(costs_of(dataclasses.replace(setup, **changes), f"trying {number} {_UNITS[name]}"))

    max_batch = max_tokens = None
    if asked.max_batch:
        max_batch = largest(lambda number: peak_with("batch", number), budget, setup.batch)
    if asked.max_tokens:
        most = learned_positions(blueprint.base.config) or MOST
        max_tokens = largest(lambda number: peak_with("tokens", number), budget, setup.tokens, most)
    found = (("--batch", max_batch), ("--seq", max_tokens))
    hints = [f"{name} {number} fits" for name, number in found if number]
    try:
        plan = plan_within(costs, budget, device.name, hints)
    except InfeasibleError:
        if not (hints or setup.batch == 1):
            fitting = largest(lambda number: peak_with("batch", number), budget, 1, setup.batch - 1)
            steps = -(-setup.batch * setup.accumulation // max(fitting, 1))
            hints = [f"--batch {fitting} --accum {steps} fits"] if fitting else []
        plan = plan_within(costs, budget, device.name, hints)
    numbers = {action: number for number, action in enumerate(costs.actions)}
    chosen = tuple(tuple(numbers[action] for _, action in pairs) for pairs in plan.stacks().values())
    tell("comparing")
    return Foresight(
        setup=setup,
        device=device,
        budget_bytes=budget,
        costs=costs,
        plan=plan,
        timeline=worst_timeline(costs, chosen),
        usual=(*usual_options(costs, device.host_bandwidth), *segmented_options(costs)),
        frontier=tuple(frontier(costs)) if asked.frontier else (),
        max_batch=max_batch,
        max_tokens=max_tokens,
    )


def _budget_bytes(text: str | None, device: Device) -> int:
    if text is not None and not text.strip().endswith("%"):
        return parse_bytes(text)
    share = DEFAULT_SHARE if text is None else parse_fraction(text)
    memory = device.memory_bytes
    if memory is None:  # a CPU
        memory = device_memory(0).total_bytes
    return int(share * memory)


def _floor(costs: Costs) -> int:
    return worst_timeline(costs, smallest(costs)).peak_bytes


def largest(peak_of: Callable[[int], int], budget: int, start: int, most: int = MOST) -> int:
    """The largest number whose peak is within the budget, 0 if that of 1 is not.

    Peaks grow with the number, nearly in proportion, so that the next guess lies on the line through the last two.
    """
    low, low_peak = 0, 0
    high = min(start, most)
    while (high_peak := peak_of(high)) <= budget:
        low, low_peak = high, high_peak
        if high == most:
            return most
        high = min(2 * high, most)
    while high - low > 1:
        share = (budget - low_peak) / max(1, high_peak - low_peak) if low else 0.5
        middle = min(max(low + 1, low + int((high - low) * share)), high - 1)
        found = peak_of(middle)
        if found <= budget:
            low, low_peak = middle, found
        else:
            high, high_peak = middle, found
    return low
