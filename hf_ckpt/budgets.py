"""The fastest plan that fits into a budget, and what there is beside it: pure functions, free of torch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from hf_ckpt.errors import InfeasibleError
from hf_ckpt.moves import FULL, MOVES, SELECTIVE, with_moves
from hf_ckpt.plan import Action, Plan, Prediction
from hf_ckpt.solver import fastest, smallest
from hf_ckpt.timeline import BlockCost, Choice, Costs, Phase, segmented_peak, step_nanoseconds, worst_timeline
from hf_ckpt.units import format_bytes

GAIN = 0.01
"""A way further down the list has to be faster by this share: those before it have bit-equal gradients."""


def plan_within(ways: Costs | Sequence[Costs], budget_bytes: int, device: str = "", hints: Sequence[str] = ()) -> Plan:
    """The fastest plan whose predicted peak is at most `budget_bytes`.

    Args:
        ways: the costs to plan with, or several to choose from, the most welcome first.
        budget_bytes: the peak that is allowed.
        device: whose speed was assumed.
        hints: what else would lower the peak.

    Raises `InfeasibleError`, with what fills the lowest peak there is, and what would lower it.
    """
    plan, least = None, 0.0
    for costs in (several := _several(ways)):
        choice = fastest(costs, budget_bytes)
        nanoseconds = step_nanoseconds(costs, choice) if choice is not None else 0
        if choice is not None and (plan is None or nanoseconds < least * (1 - GAIN)):
            plan, least = plan_of(costs, choice, budget_bytes, device), nanoseconds
    if plan is None:
        raise _infeasible(_lowest(several)[0], budget_bytes, hints)
    return plan


def plan_of_least(ways: Costs | Sequence[Costs], budget_bytes: int | None = None, device: str = "") -> Plan:
    """The plan with the lowest peak there is."""
    costs, choice = _lowest(_several(ways))
    return plan_of(costs, choice, budget_bytes, device)


def peak_of_least(ways: Costs | Sequence[Costs]) -> int:
    """The lowest peak there is, in bytes."""
    return worst_timeline(*_lowest(_several(ways))).peak_bytes


def _several(ways: Costs | Sequence[Costs]) -> Sequence[Costs]:
    return (ways,) if isinstance(ways, Costs) else ways


def _lowest(several: Sequence[Costs]) -> tuple[Costs, Choice]:
    found = [(costs, smallest(costs)) for costs in several]
    return min(found, key=lambda pair: worst_timeline(*pair).peak_bytes)


def costs_behind(ways: Sequence[Costs], plan: Plan) -> tuple[Costs, Choice]:
    """The costs that a plan was made from, and its actions as they number them."""
    for costs in ways:
        numbers = {action: number for number, action in enumerate(costs.actions)}
        if costs.head_tokens == plan.head and all(action in numbers for _, action in plan.actions):
            return costs, tuple(tuple(numbers[action] for _, action in pairs) for pairs in plan.stacks().values())
    raise ValueError("the plan was made from none of these costs")


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
    return Plan(costs.family, costs.model, tuple(pairs), prediction, costs.head_tokens)


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to run a step, with what it is predicted to cost."""

    name: str
    plan: Plan | None
    """None for what only transformers itself can do."""
    peak_bytes: int
    step_seconds: float


def usual_options(costs: Costs, host_bandwidth: float, own: Costs | None = None) -> list[Option]:
    """What transformers itself offers: nothing, every n-th block (one counter for all stacks), `full`, and `offload`.

    Of the n above 8 that come to the same number of blocks, the smallest stands for all.

    `host_bandwidth` is that of copies to host memory, in bytes a second; `own` are the costs of transformers' own
    checkpointing, where they are others than those of `full`.
    """
    found = [_option("none", costs, costs.uniform(0))]
    costs = own or costs
    full = next((number for number, action in enumerate(costs.actions) if action == Action("full")), None)
    if full is None:
        raise ValueError("the costs have no action `full` to compare with")
    blocks = sum(len(stack.blocks) for stack in costs.stacks)
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
    return [*found, Option("offload (transformers)", None, worst.peak_bytes, worst.nanoseconds / 1e9)]


def frontier(ways: Costs | Sequence[Costs], points: int = 24) -> list[Option]:
    """The fastest plan for budgets from the lowest peak there is to that of no checkpointing, in even steps."""
    several = _several(ways)
    low = worst_timeline(*_lowest(several)).peak_bytes
    high = max(low, worst_timeline(several[0], several[0].uniform(0)).peak_bytes)
    found: list[Option] = []
    for number in range(points):
        limit = low + (high - low) * number // max(points - 1, 1)
        option = _of_plan("planned", plan_within(several, limit))
        if not found or option.step_seconds < found[-1].step_seconds:
            found.append(option)
    return found


def further_options(costs: Costs, chunked: Costs | None, host_bandwidth: float, launch: int) -> list[Option]:
    """What hf_ckpt has beyond the blocks: `full` and `selective` with what they keep in host memory, and the head in
    chunks with `full`, alone and with that.

    Args:
        costs: traced.
        chunked: the same with the head in chunks; None where there is no such head.
        host_bandwidth: of copies to pinned memory, in bytes a second; 0 where there is no host beside the device.
        launch: nanoseconds to start an operation.
    """

    def moving(found: Costs) -> Costs:
        return with_moves(found, host_bandwidth, launch)[0] if host_bandwidth else found

    wanted = [("offload", MOVES[FULL], costs), ("selective, saved in host memory", MOVES[SELECTIVE], costs)]
    if chunked is not None:
        wanted += [("full, head in chunks", FULL, chunked), ("offload, head in chunks", MOVES[FULL], chunked)]
    ways = [(name, action, moving(found)) for name, action, found in wanted]
    return [
        _option(name, found, found.uniform(found.actions.index(action)))
        for name, action, found in ways
        if action in found.actions
    ]


def _option(name: str, costs: Costs, choice: Choice) -> Option:
    return _of_plan(name, plan_of(costs, choice))


def _of_plan(name: str, plan: Plan) -> Option:
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
        weights = costs.static.parameters + costs.static.gathered
        found.append(
            f"weights {format_bytes(weights)}, optimizer state {format_bytes(costs.static.optimizer)} "
            f"and gradients {format_bytes(costs.static.gradients)} alone need more: use LoRA, an optimizer with a "
            "smaller state, or shard them over more devices"
        )
    else:
        found.append("a smaller batch with as many more accumulated steps, or shorter sequences")
    if worst.is_heads:
        chunks = 'the head in chunks ("head": "auto"), or ' if costs.head_tokens == "full" else ""
        size = format_bytes(parts[f"work of {worst.worst.label}"])
        found.append(f"the head and its loss are the peak, with {size}: {chunks}fewer tokens a micro-step")
    kept = parts["kept for backward"]
    if kept and not any(stack.instead for stack in costs.stacks):
        found.append(f"what blocks keep is {format_bytes(kept)} of it: a `host_budget`, for host memory to hold that")
    elif kept and any(room < len(stack.blocks) - 1 for stack in costs.stacks for room in stack.movable.values()):
        found.append(f"what blocks keep is {format_bytes(kept)} of it: a larger `host_budget`")
    return InfeasibleError(
        budget_bytes,
        worst.peak_bytes,
        parts,
        found,
        f"no plan fits into {format_bytes(budget_bytes)}: the lowest peak is {format_bytes(worst.peak_bytes)} "
        f"({shown}), {format_bytes(worst.peak_bytes - budget_bytes)} too much. What would lower it:",
    )
