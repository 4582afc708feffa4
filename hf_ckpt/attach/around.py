"""What goes around a model for a while without a plan: notes of its forwards, and transformers' own checkpointing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.models.blocks import FoundBlocks, base_model, find_blocks
from hf_ckpt.spec.plan import Plan


def model_and_stacks(found: FoundBlocks) -> Iterator[tuple[nn.Module, str | None]]:
    """Yield the base model with None, and then every other module that runs a stack with the stack's name."""
    yield found.base, None
    stacks = dict.fromkeys(block.stack for block in found.blocks)
    for stack, owner in zip(stacks, found.owners, strict=True):
        if owner is not found.base:
            yield owner, stack


@contextlib.contextmanager
def watched_forwards(
    model: nn.Module, note: Callable[[nn.Module, str | None, tuple[Any, ...], Mapping[str, Any]], None]
) -> Iterator[None]:
    """Inside the `with` block, call `note(base, stack, args, kwargs)` before every forward that records gradients.

    Both the forwards of the base model and those of the modules that run its stacks are seen; `stack` is the stack's
    name, or None for the model's own forward. Calls inside a graph of torch.compile are not seen.
    """
    found = find_blocks(model)

    def told(stack: str | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not compat.is_compiling():
            note(found.base, stack, args, kwargs)

    handles = [
        module.register_forward_pre_hook(functools.partial(told, stack), with_kwargs=True)
        for module, stack in model_and_stacks(found)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def own_trial(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Inside the `with` block, let transformers itself checkpoint the blocks whose action in `plan` is not `keep`.

    This is for comparing costs, which differ from those of `full` where the switch of transformers does more than run
    blocks again. Nothing of hf_ckpt may be installed on the model.
    """
    modules = find_blocks(model).modules
    with compat.own_checkpointing(base_model(model), only={modules[name] for name in plan.active()}):
        yield
