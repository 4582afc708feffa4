"""Lists the candidates that a plan is chosen from: traced costs, with offloading, and with the head in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from hf_ckpt.costs.costs import Costs
from hf_ckpt.costs.offload import with_offloading
from hf_ckpt.forecast.devices import Device
from hf_ckpt.models.blocks import vocabulary_head
from hf_ckpt.planner.budgets import several_of
from hf_ckpt.prediction.skeleton import Skeleton
from hf_ckpt.prediction.trace import Step, chunked_head
from hf_ckpt.spec.actions import FULL, KEEP


def cost_options(
    ways: Costs | Sequence[Costs],
    skeleton: Skeleton,
    step: Step,
    device: Device,
    *,
    head: int | str,
    host_limit: int | None = None,
    segments: bool = True,
) -> tuple[Costs, ...]:
    """The candidates for a plan. For each of `ways`, those with a whole head come first; segments come last.

    Args:
        ways: traced from `skeleton` and `step`; several if feed-forwards may run in chunks, see `ways_to_run`.
        skeleton: of the model.
        step: the micro-step that was traced.
        device: its row gives the time of operations and copies.
        head: `full` allows no chunks, `auto` allows them, a number demands chunks of so many tokens.
        host_limit: bytes of host memory for offloading; None for no offloading.
        segments: whether blocks may be recomputed in segments, which need parameters that stay on the device.
    """
    heads: list[Costs] = []
    in_chunks = head != "full" and vocabulary_head(skeleton.base) is not None
    for costs in several_of(ways):
        heads += [costs] if isinstance(head, str) or not in_chunks else []
        heads += [chunked_head(costs, skeleton, step, device, head)] if in_chunks else []
    apart = with_host_memory(heads, device, host_limit)
    return (*apart, *(found for costs in heads for found in in_segments(costs))) if segments else apart


def ways_to_run(mlp: int | str) -> tuple[int | str, ...]:
    """The values of `Plan.mlp` that a plan may have if `Spec.mlp` is `mlp`."""
    return ("full", "auto") if mlp == "auto" else (mlp,)


def in_segments(costs: Costs) -> Iterator[Costs]:
    """`costs` with the blocks in segments, for every number of segments that can be best.

    Of all numbers for which the longest segment has the same length, the smallest keeps least. Yields nothing if some
    block may not have the actions `full` and `keep`, as long as `keep` is not measured, or holds tensors until the
    backward ends.
    """
    held = any(size for stack in costs.stacks for size in stack.held)
    if FULL not in costs.actions or costs.actions[0] != KEEP or held:
        return
    needed = {0, costs.actions.index(FULL)}  # a segment runs again under `keep`
    if any(needed - {*stack.choices[kind]} for stack in costs.stacks for kind in stack.kinds):
        return
    most = max(len(stack.blocks) for stack in costs.stacks)
    for number in sorted({-(-most // length) for length in range(2, most + 1)}, reverse=True):
        counts = tuple(min(number, len(stack.blocks)) for stack in costs.stacks)
        yield dataclasses.replace(costs, segments=counts)


def with_host_memory(heads: Sequence[Costs], device: Device, host_limit: int | None) -> tuple[Costs, ...]:
    """Add the actions that offload to each of `heads`; nothing without a `host_limit`, or on a CPU."""
    if host_limit is None or device.name == "cpu":
        return tuple(heads)
    return tuple(
        found
        for costs in heads
        for found in with_offloading(costs, device.host_bandwidth, device.launch_nanoseconds, host_limit)
    )
