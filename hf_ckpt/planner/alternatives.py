"""Predicts the options that a plan is compared with: those of transformers, and other budgets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hf_ckpt.costs.costs import CallCosts, Costs, timeline
from hf_ckpt.costs.steps import Part
from hf_ckpt.planner.budgets import peak_of_least, plan_of, plan_within
from hf_ckpt.spec.actions import FULL, KEEP
from hf_ckpt.spec.plan import Plan


def usual_options(costs: Costs, host_bandwidth: float) -> dict[str, Plan]:
    """The options of transformers itself, with their predictions: no checkpointing, every n-th block (n of 4, 3, 2; one
    counter for all stacks), `full`, and `offload`, whose plan is that of `full`.

    Args:
        costs: with the action `full`.
        host_bandwidth: bytes per second of copies to host memory.
    """
    options = {"none": plan_of(costs, costs.uniform(KEEP))}
    for every in range(min(4, len(costs.calls) - 1), 1, -1):
        pairs = zip(costs.uniform(FULL), costs.uniform(KEEP), strict=True)
        choice = tuple(full if place % every == 0 else keep for place, (full, keep) in enumerate(pairs))
        options[f"every_n_layers: {every}"] = plan_of(costs, choice)
    options["full"] = plan_of(costs, costs.uniform(FULL))
    copying = round(costs.input_bytes / host_bandwidth * 1e9)
    moved = dataclasses.replace(costs, calls=tuple(_moved(call, costs.input_bytes, copying) for call in costs.calls))
    options["offload (transformers)"] = plan_of(moved, moved.uniform(FULL))
    return options


def _moved(call: CallCosts, size: int, copying: int) -> CallCosts:
    """A call under transformers' own offloading, which copies blocks' inputs to host memory and back on the compute
    stream, so nothing else runs meanwhile."""
    if FULL not in call.costs:
        return call
    cost = call.costs[FULL]
    forward, backward = cost.forward, cost.backward
    cost = dataclasses.replace(
        cost,
        forward=Part(forward.peak, forward.net - size, forward.nanoseconds + copying),
        backward=Part(backward.peak + size, backward.net + size, backward.nanoseconds + copying),
    )
    return dataclasses.replace(call, costs={**call.costs, FULL: cost})


def frontier(ways: Sequence[Costs], points: int = 24) -> dict[int, Plan]:
    """Peak in bytes -> the fastest plan for it, for budgets from the lowest peak to that of no checkpointing, in even
    steps.

    Args:
        ways: the candidates to plan with.
        points: how many budgets; plans that are not faster than the previous one are left out.
    """
    low = peak_of_least(ways)
    high = max(low, timeline(ways[0], ways[0].uniform(KEEP)).peak_bytes)
    plans: dict[int, Plan] = {}
    seconds = math.inf
    for number in range(points):
        plan = plan_within(ways, low + (high - low) * number // max(points - 1, 1))
        assert plan.prediction is not None
        if plan.prediction.step_seconds < seconds:
            seconds = plan.prediction.step_seconds
            plans[plan.prediction.peak_bytes] = plan
    return plans
