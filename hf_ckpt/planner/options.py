"""Makes the candidates that a plan chooses from: traced costs, with offloading and with the head in chunks."""

from __future__ import annotations

from collections.abc import Sequence

from hf_ckpt import compat
from hf_ckpt.attach.attach import own_trial
from hf_ckpt.models.blocks import vocabulary_head
from hf_ckpt.prediction.costs import Costs
from hf_ckpt.prediction.devices import Device
from hf_ckpt.prediction.offload import with_offloading
from hf_ckpt.prediction.skeleton import Skeleton
from hf_ckpt.prediction.trace import Step, chunked_head, trace_costs
from hf_ckpt.spec.actions import FULL, KEEP


def cost_options(
    costs: Costs,
    skeleton: Skeleton,
    step: Step,
    device: Device,
    *,
    head: int | str,
    host_limit: int | None = None,
) -> tuple[Costs, ...]:
    """The candidates for a plan; those whose head runs as a whole come first.

    Args:
        costs: traced of `skeleton` and `step`.
        skeleton: of the model.
        step: the micro-step that was traced.
        device: whose row says how long operations and copies take.
        head: `full` allows no chunks, `auto` allows them, a number demands chunks of so many tokens.
        host_limit: bytes of host memory for offloading; None for no offloading.
    """
    heads = [costs] if isinstance(head, str) else []
    if head != "full" and vocabulary_head(skeleton.base) is not None:
        heads.append(chunked_head(costs, skeleton, step, device, head))
    return with_host_memory(heads or [costs], device, host_limit)


def transformers_costs(costs: Costs, skeleton: Skeleton, step: Step, device: Device) -> Costs:
    """What transformers' own checkpointing costs: `costs`, unless its switch does more than run blocks again.

    Then it is traced by itself, on the blocks that a plan gives an action.

    Args:
        costs: traced of `skeleton` and `step` under hf_ckpt.
        skeleton: of the model.
        step: the micro-step that was traced.
        device: whose row says how long operations take.
    """
    kinds = (kind.module for stack in skeleton.stacks for kind in stack.kinds)
    if not any(compat.checkpoints_beside_blocks(module) for module in kinds):
        return costs
    return trace_costs(skeleton, step, device, actions=(KEEP, FULL), put_on=own_trial)


def with_host_memory(heads: Sequence[Costs], device: Device, host_limit: int | None) -> tuple[Costs, ...]:
    """Each of `heads` with the actions that offload; as they are without a `host_limit`, or on a CPU."""
    if host_limit is None or device.name == "cpu":
        return tuple(heads)
    return tuple(
        found
        for costs in heads
        for found in with_offloading(costs, device.host_bandwidth, device.launch_nanoseconds, host_limit)
    )
