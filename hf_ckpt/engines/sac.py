"""`selective` by PyTorch's selective activation checkpointing (SAC), which keeps the results of named operations.

A dispatch mode sees every operation of the block in the forward, and another one in backward, which costs host time.
torch.compile supports SAC, so `selective` uses it in models that are compiled.
https://docs.pytorch.org/docs/stable/checkpoint.html#torch.utils.checkpoint.create_selective_checkpoint_contexts
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from hf_ckpt import compat
from hf_ckpt.engines.full import FullRegion

OPERATIONS: dict[str, tuple[str, ...]] = {
    "linear": (
        "aten.mm.default",
        "aten.addmm.default",
        "aten.linear.default",
        "aten._scaled_mm.default",
        "aten._grouped_mm.default",
        "aten._scaled_grouped_mm.default",
    ),
    "attention": (
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_fused_attention_overrideable.default",
        "aten._scaled_dot_product_attention_math.default",
        "aten.bmm.default",
        "aten._softmax.default",
        "aten._safe_softmax.default",
        "flash_attn._flash_attn_forward.default",
        "flash_attn._flash_attn_varlen_forward.default",
    ),
}
"""Names of the operations of each class that SAC saves. torch's build decides which of them exist, so they are looked
up when first needed."""


@functools.cache
def operations(save: tuple[str, ...]) -> frozenset[Any]:
    """Return the operations of the classes in `save` that this build of torch has."""
    names = (name for op_class in save for name in OPERATIONS.get(op_class, ()))
    return frozenset(operation for name in names if (operation := _lookup(name)) is not None)


def _lookup(name: str) -> Any | None:
    namespace, operation, overload = name.split(".")
    packet = getattr(getattr(torch.ops, namespace), operation, None)
    return getattr(packet, overload, None)


class SacRegion(FullRegion):
    """The checkpointing function of a block that is recomputed, except for the results of the operations in `save`."""

    may_copy = False  # the copy would be an operation in backward that the dispatch modes did not see in the forward
    keeps_choices = False  # the replacement of `topk` would be another such operation

    def __init__(self, block: str, *, save: Sequence[str], **options: Any) -> None:
        super().__init__(block, **options)
        self.save = tuple(save)

    def _checkpoint(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run the block under SAC."""
        hooks = {} if compat.torch.is_compiling() else compat.torch.SEEN_BY_HOOKS
        return self._checkpointed(fn, *args, context_fn=functools.partial(_contexts, self.save), **hooks)


def _contexts(save: tuple[str, ...]) -> Any:
    """Return the two contexts of SAC. torch calls this where Dynamo does not trace the look-up of the operations."""
    contexts: Callable[..., Any] = create_selective_checkpoint_contexts
    return contexts(list(operations(save)))
