"""The fastest plan that fits into a budget, and what there is beside it: pure functions, free of torch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from hf_ckpt.errors import InfeasibleError
from hf_ckpt.plan import Action, Plan, Prediction
from hf_ckpt.solver import fastest, smallest
from hf_ckpt.timeline import BlockCost, Choice, Costs, Phase, segmented_peak, step_nanoseconds, worst_timeline
from hf_ckpt.units import format_bytes


def plan_within(costs: Costs, budget_bytes: int, device: str = "", hints: Sequence[str] = ()) -> Plan:
    """The fastest plan whose predicted peak is at most `budget_bytes`.

    Raises `InfeasibleError`, with what fills the lowest peak there is, and what would lower it; `hints` are added.
    """
    choice = fastest(costs, budget_bytes)
    if choice is None:
        raise _infeasible(costs, budget_bytes, hints)
    return plan_of(costs, choice, budget_bytes, device)


def plan_of(costs: Costs, choice: Choice, budget_bytes: int | None = None, device: str = "") -> Plan:
    """The plan that gives every block the action chosen for it, with what it is predicted to cost."""
    worst = worst_timeline(costs, choice)
    prediction = Prediction(
        peak_bytes=worst.peak_bytes,
        step_seconds=worst.nanoseconds / 1e9,
        tokens=costs.tokens * costs.accumulation,
        parts=tuple(worst.parts().items()),
        budget_bytes=budget_bytes,
        device=device,
    )
    pairs = (
        (block, costs.actions[action])
        for stack, chosen in zip(costs.stacks, choice, strict=True)
        for block, action in zip(stack.blocks, chosen, strict=True)
    )
    return Plan(costs.family, costs.model, tuple(pairs), prediction)


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to run a step, with what it is predicted to cost."""

    name: str
    plan: Plan | None
    """None for what only transformers itself can do."""
    peak_bytes: int
    step_seconds: float


def usual_options(costs: Costs, host_bandwidth: float) -> list[Option]:
    """What transformers itself offers: nothing, every n-th block (one counter for all stacks), `full`, and `offload`.

    Of the n above 8 that come to the same number of blocks, the smallest stands for all.

    `host_bandwidth` is that of copies to host memory, in bytes a second.
    """
    full = next((number for number, action in enumerate(costs.actions) if action == Action("full")), None)
    if full is None:
        raise ValueError("the costs have no action `full` to compare with")
    blocks = sum(len(stack.blocks) for stack in costs.stacks)
    found = [_option("none", costs, costs.uniform(0))]
    by_count = {-(-blocks // every): every for every in range(blocks - 1, 8, -1)}
    for every in [*by_count.values(), *range(min(8, blocks - 1), 1, -1)]:
        counter = itertools.count()
        choice = tuple(
            tuple(full if next(counter) % every == 0 and full in stack.choices[kind] else 0 for kind in stack.kinds)
            for stack in costs.stacks
        )
        found.append(_option(f"every_n_layers: {every}", costs, choice))
    found.append(_option("full", costs, costs.uniform(full)))
    moved = _offloaded(costs, full, host_bandwidth)
    worst = worst_timeline(moved, costs.uniform(full))
    return [*found, Option("offload", None, worst.peak_bytes, worst.nanoseconds / 1e9)]


def frontier(costs: Costs, points: int = 24) -> list[Option]:
    """The fastest plan for budgets from the lowest peak there is to that of no checkpointing, in even steps."""
    low = worst_timeline(costs, smallest(costs)).peak_bytes
    high = max(low, worst_timeline(costs, costs.uniform(0)).peak_bytes)
    found: list[Option] = []
    for number in range(points):
        limit = low + (high - low) * number // max(points - 1, 1)
        choice = fastest(costs, limit)
        if choice is None:  # cannot be: the lowest peak fits into itself
            continue
        option = _option("planned", costs, choice)
        if not found or option.step_seconds < found[-1].step_seconds:
            found.append(option)
    return found


def _option(name: str, costs: Costs, choice: Choice) -> Option:
    plan = plan_of(costs, choice)
    assert plan.prediction is not None
    return Option(name, plan, plan.prediction.peak_bytes, plan.prediction.step_seconds)


def _offloaded(costs: Costs, full: int, host_bandwidth: float) -> Costs:
    """`full` with the inputs of blocks in host memory, copied there and back on the stream that computes."""

    def back(phase: Phase, size: int) -> Phase:
        points = tuple((other + size, done) for other, done in phase.points)
        return dataclasses.replace(
            phase, points=points, nanoseconds=phase.nanoseconds + round(size / host_bandwidth * 1e9)
        )

    def moved(cost: BlockCost) -> BlockCost:
        size, forward = cost.output_bytes, cost.forward
        gone = (*forward.points, (forward.net - size, forward.gradients))
        nanoseconds = forward.nanoseconds + round(size / host_bandwidth * 1e9)
        return BlockCost(
            dataclasses.replace(forward, points=gone, nanoseconds=nanoseconds), back(cost.backward, size), size
        )

    stacks = tuple(
        dataclasses.replace(
            stack,
            costs={ways: moved(cost) if ways[1][1] == full else cost for ways, cost in stack.costs.items()},
            last_backward={
                key: back(phase, max(cost.output_bytes for ways, cost in stack.costs.items() if ways[1] == key))
                if key[1] == full
                else phase
                for key, phase in stack.last_backward.items()
            },
        )
        for stack in costs.stacks
    )
    return dataclasses.replace(costs, stacks=stacks)


def segmented_options(costs: Costs) -> list[Option]:
    """`full` with neighbours recomputed as one region: pairs, and about the square root of a stack's blocks a region.

    Put together from the costs of `keep` and `full`; https://arxiv.org/abs/1604.06174.
    """
    full = next(number for number, action in enumerate(costs.actions) if action == Action("full"))
    found = []
    for name, length in (("segments of 2", 2), ("segments: sqrt", 0)):
        peak = max(segmented_peak(costs, full, length, mode) for mode in costs.modes)
        found.append(Option(name, None, peak, step_nanoseconds(costs, costs.uniform(full)) / 1e9))
    return found


def _infeasible(costs: Costs, budget_bytes: int, hints: Sequence[str]) -> InfeasibleError:
    worst = worst_timeline(costs, smallest(costs))
    parts = worst.parts()
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    found = [*hints]
    if costs.static.always + costs.static.gradients > budget_bytes:
        found.append(
            f"weights {format_bytes(costs.static.parameters)}, optimizer state {format_bytes(costs.static.optimizer)} "
            f"and gradients {format_bytes(costs.static.gradients)} alone need more: use LoRA, an optimizer with a "
            "smaller state, or shard them over more devices"
        )
    else:
        found.append("a smaller batch with as many more accumulated steps, or shorter sequences")
    if worst.worst.block is None and "head" in worst.worst.label:
        found.append("the head and its loss are the peak: fewer tokens a micro-step, or a loss in chunks (not yet)")
    kept = parts["kept for backward"]
    if kept:
        found.append(f"what blocks keep is {format_bytes(kept)} of it: their inputs in host memory (not available yet)")
    return InfeasibleError(
        budget_bytes,
        worst.peak_bytes,
        parts,
        found,
        f"no plan fits into {format_bytes(budget_bytes)}: the lowest peak is {format_bytes(worst.peak_bytes)} "
        f"({shown}), {format_bytes(worst.peak_bytes - budget_bytes)} too much. What would lower it:",
    )
