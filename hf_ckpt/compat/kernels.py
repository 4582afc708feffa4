"""Runs torch's accelerator kernels on fake tensors that claim to be on the CPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from hf_ckpt.compat.private import private

_lock = threading.RLock()


@contextlib.contextmanager
def accelerator_kernels() -> Iterator[None]:
    """Make dropout, and attention with dropout, save what they save on an accelerator, in this thread and context.

    On an accelerator, dropout's mask has one byte per element; on the CPU it is noise in the input's type
    (aten/src/ATen/native/Dropout.cpp). Accelerators have fused kernels for attention with dropout, which save neither
    its weights nor a mask; the CPU runs single operations (aten/src/ATen/native/transformers/attention.cpp).
    Without dropout, both have fused kernels, which save the same.

    The functions that call these kernels are replaced meanwhile; other threads still get the originals. A torch
    function mode would not work: autograd turns it off, so blocks would run differently when recomputed.
    Only one thread is inside at a time.
    """
    with (
        _lock,
        _exchanged(private("torch._VF"), "dropout", _dropout),
        _exchanged(functional, "scaled_dot_product_attention", _attention),
    ):
        yield


def _exchanged(place: Any, name: str, ours: Callable[..., Any]) -> Any:
    """Make a context in which this thread calls `ours`, with the original function as its first argument."""
    thread, given = threading.get_ident(), getattr(place, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(given, *args, **kwargs) if threading.get_ident() == thread else given(*args, **kwargs)

    return mock.patch.object(place, name, call)


def _dropout(given: Callable[..., Any], tensor: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    if not training or not 0 < p < 1 or not tensor.numel():
        unchanged: torch.Tensor = given(tensor, p, training)
        return unchanged
    return torch.native_dropout(tensor, p, training)[0]


def _attention(
    given: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention; with dropout, by the memory-efficient kernel."""
    if not dropout_p:
        plain: torch.Tensor = given(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        return plain
    if enable_gqa:
        key, value = (tensor.repeat_interleave(query.size(-3) // tensor.size(-3), -3) for tensor in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2))
    kept = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    result: torch.Tensor = efficient(query, key, value, attn_mask, kept, dropout_p, is_causal, scale=scale)[0]
    return result
