"""Predicts the options that a plan is compared with: those of transformers, other policies, and other budgets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from hf_ckpt.costs.costs import BlockCost, Choice, Costs, Key, Phase
from hf_ckpt.costs.offload import OFFLOADED, with_offloading
from hf_ckpt.costs.timeline import worst_timeline
from hf_ckpt.planner.budgets import lowest_of, plan_of, plan_within, several_of
from hf_ckpt.spec.actions import FULL, SELECTIVE
from hf_ckpt.spec.plan import Plan


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Another way to run a step, with its predicted cost."""

    name: str
    """Its name in tables: a policy, or a description."""
    plan: Plan | None
    """Its plan; None for transformers' own offloading, and for segments."""
    peak_bytes: int
    """Most bytes of tensors alive at any moment of a step."""
    step_seconds: float
    """Seconds of one optimizer step with all its micro-steps."""
    budget_bytes: int | None = None
    """The budget that a plan was made for; None for an option that was not planned."""


def usual_options(costs: Costs, host_bandwidth: float, own: Costs | None = None) -> list[Alternative]:
    """The options of transformers itself: no checkpointing, every n-th block (n of 4, 3, 2; one counter for all
    stacks), `full`, and `offload`.

    Args:
        costs: traced with the action `full`.
        host_bandwidth: bytes per second of copies to host memory.
        own: the costs under transformers' own switch, if it changes more than which blocks are recomputed.

    Raises `ValueError` for costs without the action `full`.
    """
    found = [_option("none", costs, costs.uniform(0))]
    costs = own or costs
    full = next((number for number, action in enumerate(costs.actions) if action == FULL), None)
    if full is None:
        raise ValueError("the costs have no action `full` to compare with")
    blocks = sum(len(stack.blocks) for stack in costs.stacks)
    for every in range(min(4, blocks - 1), 1, -1):
        counter = itertools.count()
        choice = tuple(
            tuple(full if next(counter) % every == 0 and full in stack.choices[kind] else 0 for kind in stack.kinds)
            for stack in costs.stacks
        )
        found.append(_option(f"every_n_layers: {every}", costs, choice))
    found.append(_option("full", costs, costs.uniform(full)))
    moved = _offloaded(costs, full, host_bandwidth)
    worst = worst_timeline(moved, costs.uniform(full))
    return [*found, Alternative("offload (transformers)", None, worst.peak_bytes, worst.nanoseconds / 1e9)]


def frontier(ways: Costs | Sequence[Costs], points: int = 24) -> list[Alternative]:
    """The fastest plans for budgets from the lowest peak to that of no checkpointing, in even steps.

    Args:
        ways: the costs to plan with, or several candidates.
        points: how many budgets; plans that are not faster than the previous one are left out.
    """
    candidates = several_of(ways)
    low = worst_timeline(*lowest_of(candidates)).peak_bytes
    high = max(low, worst_timeline(candidates[0], candidates[0].uniform(0)).peak_bytes)
    found: list[Alternative] = []
    for number in range(points):
        limit = low + (high - low) * number // max(points - 1, 1)
        option = dataclasses.replace(_of_plan("planned", plan_within(candidates, limit)), budget_bytes=limit)
        if not found or option.step_seconds < found[-1].step_seconds:
            found.append(option)
    return found


def further_options(costs: Costs, chunked: Costs | None, host_bandwidth: float, launch: int) -> list[Alternative]:
    """Further options of hf_ckpt: `full` and `selective` with their saved tensors in host memory, and the head in
    chunks with `full` or `offload`.

    Args:
        costs: traced.
        chunked: `costs` with the head in chunks; None if it cannot run in chunks.
        host_bandwidth: bytes per second of copies to pinned host memory; 0 if the device is the host.
        launch: nanoseconds to start an operation.
    """

    def offloading(costs: Costs) -> Costs:
        return with_offloading(costs, host_bandwidth, launch)[0] if host_bandwidth else costs

    wanted = [("offload", OFFLOADED[FULL], costs), ("selective, saved in host memory", OFFLOADED[SELECTIVE], costs)]
    if chunked is not None:
        wanted += [("full, head in chunks", FULL, chunked), ("offload, head in chunks", OFFLOADED[FULL], chunked)]
    priced = [(name, action, offloading(found)) for name, action, found in wanted]
    return [
        _option(name, found, found.uniform(found.actions.index(action)))
        for name, action, found in priced
        if action in found.actions
    ]


def _option(name: str, costs: Costs, choice: Choice) -> Alternative:
    return _of_plan(name, plan_of(costs, choice))


def _of_plan(name: str, plan: Plan) -> Alternative:
    assert plan.prediction is not None
    return Alternative(name, plan, plan.prediction.peak_bytes, plan.prediction.step_seconds)


def _offloaded(costs: Costs, full: int, host_bandwidth: float) -> Costs:
    """`costs` with `full` replaced by transformers' own offloading, which copies blocks' inputs to host memory and back
    on the compute stream, so nothing else runs meanwhile."""

    def back(phase: Phase, size: int) -> Phase:
        points = tuple((other + size, done) for other, done in phase.points)
        return dataclasses.replace(
            phase, points=points, nanoseconds=phase.nanoseconds + round(size / host_bandwidth * 1e9)
        )

    def moved(cost: BlockCost) -> BlockCost:
        size, forward = cost.output_bytes, cost.forward
        gone = (*forward.points, (forward.net - size, forward.gradients))
        nanoseconds = forward.nanoseconds + round(size / host_bandwidth * 1e9)
        forward = dataclasses.replace(forward, points=gone, nanoseconds=nanoseconds)
        return dataclasses.replace(cost, forward=forward, backward=back(cost.backward, size))

    def all_moved(found: Mapping[Key, BlockCost]) -> dict[Key, BlockCost]:
        return {key: moved(cost) if key[1] == full else cost for key, cost in found.items()}

    stacks = tuple(
        dataclasses.replace(
            stack, first=all_moved(stack.first), inner=all_moved(stack.inner), last=all_moved(stack.last)
        )
        for stack in costs.stacks
    )
    return dataclasses.replace(costs, stacks=stacks)


def segmented_options(costs: Costs) -> list[Alternative]:
    """`full` with segments: pairs of blocks, and as many segments as the square root of a stack's blocks.

    They are computed from the costs of `keep` and `full`. Source: https://arxiv.org/abs/1604.06174.
    """
    depths = [len(stack.blocks) for stack in costs.stacks]
    ways = {
        "segments of 2": tuple(-(-depth // 2) for depth in depths),
        "segments: sqrt": tuple(round(depth**0.5) for depth in depths),
    }
    choice = costs.uniform(costs.actions.index(FULL))
    found = []
    for name, segments in ways.items():
        worst = worst_timeline(dataclasses.replace(costs, segments=segments), choice)
        found.append(Alternative(name, None, worst.peak_bytes, worst.nanoseconds / 1e9))
    return found
