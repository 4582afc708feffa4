"""Costs of a model from a trace of its next step on fake tensors, if the step cannot be measured: blocks are compiled,
or the device does not report peaks."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.costs.costs import Costs
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.devices import this_device
from hf_ckpt.planner.options import cost_options, ways_to_run
from hf_ckpt.prediction.batches import batch_for, loss_for
from hf_ckpt.prediction.optimizers import bytes_of
from hf_ckpt.prediction.skeleton import skeleton_of
from hf_ckpt.prediction.trace import Step, actions_for, trace_costs
from hf_ckpt.spec.spec import Spec
from hf_ckpt.training.batches import Batch


def traced_costs(base: nn.Module, spec: Spec, batch: Batch) -> tuple[Costs, ...]:
    """Return the costs to plan a batch of text with. The loss is the model's own.

    Args:
        base: the model. No plan is enabled on it.
        spec: the installed spec.
        batch: the batch to plan for.

    Raises `HfCkptError` if the model cannot be traced, or parameters are split over ranks.
    """
    autocast = compat.autocast_dtype(next(base.parameters()).device.type)  # thread-local
    return _in_clean_thread(lambda: _traced(base, spec, batch, autocast))


def _traced(base: nn.Module, spec: Spec, batch: Batch, autocast: torch.dtype | None) -> tuple[Costs, ...]:
    skeleton, device, optimizers = (
        skeleton_of(base),
        this_device(compat.devices_of_model(base)),
        compat.optimizers_of(base),
    )
    if compat.is_sharded(base):
        raise HfCkptError("steps cannot be traced where FSDP or ZeRO-3 splits parameters over ranks.")
    texts = [forward.text for forward in batch.forwards]
    sizes: dict[str, Any] = {stack.name: texts[min(n, len(texts) - 1)] for n, stack in enumerate(skeleton.stacks)}
    if not all(tokens for _, tokens in sizes.values()):
        raise HfCkptError("the batch has no text whose length could be told.")
    step = Step(
        batch=batch_for(base, sizes),
        padded=any(forward.padded for forward in batch.forwards),
        autocast=autocast,
        accumulation=2 if batch.resident else 1,
        optimizer_bytes=bytes_of(optimizers) if optimizers else None,
        loss=loss_for(base),
    )
    actions = actions_for(compiled=spec.compile is not None)
    ways = [trace_costs(skeleton, step, device, actions=actions, mlp=mlp) for mlp in ways_to_run(spec.mlp)]
    if compat.is_distributed():  # DistributedDataParallel keeps a second copy of all gradients, in its buckets
        static = ways[0].static
        static = dataclasses.replace(static, buffers=static.buffers + static.gradients)
        ways = [dataclasses.replace(costs, static=static) for costs in ways]
    stay = compat.parameters_stay(base)
    return cost_options(ways, skeleton, step, device, head=spec.head, host_limit=spec.host_budget, segments=stay)


def _in_clean_thread(work: Callable[[], tuple[Costs, ...]]) -> tuple[Costs, ...]:
    """Run `work` in its own thread, without the training's autocast, saved-tensor hooks and dispatch modes, and restore
    the random state."""

    def run() -> tuple[Costs, ...]:
        with compat.RandomState(compat.all_devices()).kept(), torch.enable_grad():
            return work()

    with concurrent.futures.ThreadPoolExecutor(1, "hf_ckpt planning") as thread:
        return thread.submit(run).result()
