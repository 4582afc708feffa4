"""`hf-ckpt plan`: what a training would need and take, before it exists."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from hf_ckpt.autoplan import this_device
from hf_ckpt.blueprint import Blueprint
from hf_ckpt.budgets import (
    Option,
    costs_behind,
    frontier,
    further_options,
    peak_of_least,
    plan_within,
    segmented_options,
    usual_options,
)
from hf_ckpt.cost import Step, chunked_head, trace_costs
from hf_ckpt.devices import Device, device_named
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.families import vocabulary_head
from hf_ckpt.install import own_trial, trial
from hf_ckpt.measure import device_memory
from hf_ckpt.plan import Plan
from hf_ckpt.setups import Setup, blueprint_of_setup, learned_positions, step_of_setup
from hf_ckpt.timeline import Costs, Timeline, worst_timeline
from hf_ckpt.timings import ShallowModels, depths_of, measured
from hf_ckpt.units import parse_bytes, parse_fraction
from hf_ckpt.variants import all_variants, transformers_costs

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
    head: int | str = "full"
    """As `Spec.head`: `auto` lets the plan take the head in chunks."""
    host_budget: str | None = None
    """Host memory that offloading may use; None for no offloading."""


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
    further: tuple[Option, ...] = ()
    """What offloading and a head in chunks would buy."""
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
            "further": [_row(option) for option in self.further],
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

    host_limit = None if asked.host_budget is None else parse_bytes(asked.host_budget)

    def costs_of(changed: Setup, what: str) -> Costs:
        tell(what)
        return trace_costs(blueprint, step_of_setup(changed, blueprint), device, trial)

    def ways_of(costs: Costs, changed: Setup) -> tuple[Costs, ...]:
        step = step_of_setup(changed, blueprint)
        return all_variants(costs, blueprint, step, device, trial, head=asked.head, host_limit=host_limit)

    step = step_of_setup(setup, blueprint)
    costs = costs_of(setup, "tracing")
    own = transformers_costs(costs, blueprint, step, device, own_trial)
    if asked.measure:
        models = ShallowModels(setup)
        apart, depths = own is not costs, depths_of(costs)
        time = functools.partial(measured, depths=depths, optimizer_seconds=models.optimizer_seconds)
        costs = time(costs, models.step_seconds, tell)
        own = time(own, functools.partial(models.step_seconds, apply=own_trial), tell) if apart else costs
    ways = ways_of(costs, setup)

    def peak_with(name: str, number: int) -> int:
        changes: dict[str, Any] = {name: number}
        changed = dataclasses.replace(setup, **changes)
        return peak_of_least(ways_of(costs_of(changed, f"trying {number} {_UNITS[name]}"), changed))

    max_batch = max_tokens = None
    if asked.max_batch:
        max_batch = largest(lambda number: peak_with("batch", number), budget, setup.batch)
    if asked.max_tokens:
        most = learned_positions(blueprint.base.config) or MOST
        max_tokens = largest(lambda number: peak_with("tokens", number), budget, setup.tokens, most)
    found = (("--batch", max_batch), ("--seq", max_tokens))
    hints = [f"{name} {number} fits" for name, number in found if number]
    try:
        plan = plan_within(ways, budget, device.name, hints)
    except InfeasibleError:
        if not (hints or setup.batch == 1):
            fitting = largest(lambda number: peak_with("batch", number), budget, 1, setup.batch - 1)
            steps = -(-setup.batch * setup.accumulation // max(fitting, 1))
            hints = [f"--batch {fitting} --accum {steps} fits"] if fitting else []
        plan = plan_within(ways, budget, device.name, hints)
    tell("comparing")
    made_from, chosen = costs_behind(ways, plan)
    return Foresight(
        setup=setup,
        device=device,
        budget_bytes=budget,
        costs=made_from,
        plan=plan,
        timeline=worst_timeline(made_from, chosen),
        usual=(*usual_options(costs, device.host_bandwidth, own), *segmented_options(costs)),
        further=_further(costs, ways, blueprint, step, device),
        frontier=tuple(frontier(ways)) if asked.frontier else (),
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


def _further(
    costs: Costs, ways: Sequence[Costs], blueprint: Blueprint, step: Step, device: Device
) -> tuple[Option, ...]:
    """`costs` are those without offloading and chunks; `ways` may have some with chunks already."""
    in_chunks = next((found for found in ways if found.head_tokens != "full"), None)
    if in_chunks is None and vocabulary_head(blueprint.base) is not None:
        in_chunks = chunked_head(costs, blueprint, step, device, trial, "auto")
    chunked = None
    if in_chunks is not None:
        chunked = dataclasses.replace(costs, head=in_chunks.head, head_tokens=in_chunks.head_tokens)
    bandwidth = device.host_bandwidth if device.name != "cpu" else 0.0
    return tuple(further_options(costs, chunked, bandwidth, device.launch_nanoseconds))


def largest(peak_of: Callable[[int], int], budget: int, start: int, most: int = MOST) -> int:
    """The largest number whose peak is within the budget, 0 if that of 1 is not.

    Peaks grow with the number, nearly in proportion, so that the next guess lies on the line through the last two; but
    those of plans, which fill the budget whatever the number: behind a guess that left more than half, the next halves.
    """
    halved = True
    low, low_peak = 0, 0
    high = min(start, most)
    while (high_peak := peak_of(high)) <= budget:
        low, low_peak = high, high_peak
        if high == most:
            return most
        high = min(2 * high, most)
    while high - low > 1:
        width = high - low
        share = (budget - low_peak) / max(1, high_peak - low_peak) if low and halved else 0.5
        middle = min(max(low + 1, low + int((high - low) * share)), high - 1)
        found = peak_of(middle)
        if found <= budget:
            low, low_peak = middle, found
        else:
            high, high_peak = middle, found
        halved = 2 * (high - low) <= width
    return low
