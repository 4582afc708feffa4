"""Everything that a plan may be made of: the traced costs, with offloading where there is a host with room for it, and
with the head in chunks where that is allowed."""

from __future__ import annotations

from collections.abc import Sequence

from hf_ckpt import compat
from hf_ckpt.blueprint import Blueprint
from hf_ckpt.cost import Apply, Step, chunked_head, trace_costs
from hf_ckpt.devices import Device
from hf_ckpt.families import vocabulary_head
from hf_ckpt.moves import with_moves
from hf_ckpt.plan import KEEP, Action
from hf_ckpt.timeline import Costs


def all_variants(
    costs: Costs,
    blueprint: Blueprint,
    step: Step,
    device: Device,
    apply: Apply,
    *,
    head: int | str,
    host_limit: int | None = None,
) -> tuple[Costs, ...]:
    """`costs` and what may stand in their place; those that leave the head as it is come first.

    Args:
        costs: traced of `blueprint` and `step`.
        head: `full` allows no chunks, `auto` allows them, a number demands chunks of so many tokens.
        host_limit: bytes of host memory for offloading; None for no offloading.
    """
    heads = [costs] if isinstance(head, str) else []
    if head != "full" and vocabulary_head(blueprint.base) is not None:
        heads.append(chunked_head(costs, blueprint, step, device, apply, head))
    return with_offloading(heads or [costs], device, host_limit)


def transformers_costs(costs: Costs, blueprint: Blueprint, step: Step, device: Device, apply: Apply) -> Costs:
    """What transformers' own checkpointing costs: `costs`, unless its switch does more than run blocks again.

    `apply` puts transformers' own on the blocks that a plan gives an action.
    """
    kinds = (kind.module for stack in blueprint.stacks for kind in stack.kinds)
    if not any(compat.checkpoints_beside_blocks(module) for module in kinds):
        return costs
    return trace_costs(blueprint, step, device, apply, actions=(KEEP, Action("full")))


def with_offloading(heads: Sequence[Costs], device: Device, host_limit: int | None) -> tuple[Costs, ...]:
    """Each of them with what offloading adds; the CPU has no host beside itself."""
    if host_limit is None or device.name == "cpu":
        return tuple(heads)
    return tuple(
        found
        for costs in heads
        for found in with_moves(costs, device.host_bandwidth, device.launch_nanoseconds, host_limit)
    )
