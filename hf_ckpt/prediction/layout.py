"""Reads from a live model how many bytes it holds on this rank, and how FSDP2 splits its parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn

from hf_ckpt import compat
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.prediction.fsdp2 import Gathered, Layout
from hf_ckpt.prediction.optimizers import OptimizerBytes, bytes_of, optimizer_bytes, state_bytes
from hf_ckpt.prediction.skeleton import Skeleton, Weights


def held_bytes(model: nn.Module) -> int:
    """Bytes that a model holds on this rank now: parameters, gradients, buffers, and the state of its optimizers."""
    shards = (shard.parameter for unit in compat.shard_units(model) for shard in unit.shards)
    total = sum(buffer.nbytes for buffer in model.buffers())
    for parameter in {id(parameter): parameter for parameter in (*model.parameters(), *shards)}.values():
        total += compat.local(parameter).nbytes
        total += 0 if parameter.grad is None else compat.local(parameter.grad).nbytes
    return total + sum(state_bytes(optimizer) for optimizer in compat.optimizers_of(model))


def layout_of(model: nn.Module, held_back: bool = False) -> Layout | None:
    """How FSDP2 splits a model; None for a model without `fully_shard`.

    Args:
        model: plain or wrapped.
        held_back: whether gradients stay whole from one micro-step to the next.
    """
    units = compat.shard_units(model)
    if not units:
        return None
    blocks: dict[str, Gathered] = {}
    owners = {id(inner): name for name, module in find_blocks(model).modules.items() for inner in module.modules()}
    outside = Gathered()
    shards = [shard for unit in units for shard in unit.shards]
    for unit in units:
        names = {owners.get(id(module)) for module in unit.modules}
        name = names.pop() if len(names) == 1 and unit.let_go else None
        found = sum((_gathered(shard) for shard in unit.shards), start=Gathered())
        if name is None:
            outside += found
        else:
            blocks[name] = blocks.get(name, Gathered()) + found
    mine = {id(shard.parameter) for shard in shards} | {id(shard.gathered) for shard in shards}
    others = [parameter for parameter in model.parameters() if id(parameter) not in mine]
    here = [shard for shard in shards if shard.on_device]
    kept = sum(parameter.nbytes * (2 if parameter.requires_grad else 1) for parameter in others)
    return Layout(
        parameters=kept + sum(shard.numel * shard.parameter.element_size() for shard in here),
        optimizer=_optimizer_bytes(model, [*(shard.parameter for shard in here), *others]),
        blocks=blocks,
        outside=outside,
        held_back=held_back,
        widened=max((-(-shard.reduce.itemsize // shard.compute.itemsize) for shard in shards), default=1),
    )


def layout_for(skeleton: Skeleton, ranks: int, own: int, optimizer: OptimizerBytes, parameters: int) -> Layout:
    """How FSDP2 will split a model that does not exist yet, with a `fully_shard` for every block and for the rest.

    Args:
        skeleton: of the whole model, in the type that it computes in.
        ranks: that it is split over.
        own: bytes of an element of the parts, which stay in the type of the weights.
        optimizer: what the optimizer needs for all parts together.
        parameters: how many elements all parameters have.
    """

    def gathered(weights: Weights) -> Gathered:
        found = Gathered()
        for shape, size, trained in weights.tensors:
            part = -(-math.prod(shape) // ranks)
            whole = part * ranks * size
            found += Gathered(
                whole=whole,
                cast=part * size if size != own else 0,
                sent=whole if trained else 0,
                kept=part * own if trained else 0,
                summed=part * size if trained and size != own else 0,
            )
        return found

    blocks = {
        block.name: gathered(stack.kinds[kind].weights)
        for stack in skeleton.stacks
        for block, kind in zip(stack.blocks, stack.row, strict=True)
    }
    return Layout(
        parameters=-(-parameters // ranks) * own,
        optimizer=-(-optimizer.state // ranks),
        blocks=blocks,
        outside=gathered(skeleton.outside),
    )


def _gathered(shard: compat.Shard) -> Gathered:
    """Bytes of one parameter that FSDP2 splits."""
    size, trained = shard.numel * shard.ranks, shard.parameter.requires_grad
    own = shard.parameter.dtype
    return Gathered(
        whole=size * shard.compute.itemsize,
        cast=shard.numel * shard.compute.itemsize if shard.copied else 0,
        sent=size * shard.reduce.itemsize if trained else 0,
        converted=size * shard.reduce.itemsize if trained and shard.reduce != shard.compute else 0,
        kept=shard.numel * own.itemsize if trained and shard.on_device else 0,
        summed=shard.numel * shard.reduce.itemsize if trained and shard.reduce != own else 0,
    )


def _optimizer_bytes(model: nn.Module, parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the state of a model's optimizers on this rank; that of AdamW for `parameters` where there are none."""
    optimizers = compat.optimizers_of(model)
    if optimizers:
        return bytes_of(optimizers).state
    local = ((compat.local(parameter), parameter.requires_grad) for parameter in parameters)
    mine = tuple((tuple(part.shape), part.element_size(), trainable) for part, trainable in local)
    return optimizer_bytes(Weights(mine), "adamw").state
