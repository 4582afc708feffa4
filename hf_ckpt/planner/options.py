"""Lists the candidates that a plan is chosen from: traced costs, with offloading, and with the head in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from hf_ckpt.costs.costs import Costs
from hf_ckpt.costs.offload import with_offloading
from hf_ckpt.spec.actions import FULL, KEEP


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


def with_host_memory(
    heads: Sequence[Costs], bandwidth: float, launch: int, host_limit: int | None
) -> tuple[Costs, ...]:
    """Add the actions that offload to each of `heads`.

    Args:
        heads: without them.
        bandwidth: bytes per second of copies to host memory; 0 if the device is the host.
        launch: nanoseconds to start an operation.
        host_limit: bytes of host memory; None for no offloading.
    """
    if host_limit is None or not bandwidth:
        return tuple(heads)
    return tuple(found for costs in heads for found in with_offloading(costs, bandwidth, launch, host_limit))
