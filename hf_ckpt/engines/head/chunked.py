"""Runs a head in chunks: whether it can be, and how many tokens a chunk has."""

from __future__ import annotations

import math

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.head import rules  # noqa: F401 (its rules are what keeps losses in chunks)
from hf_ckpt.engines.head.chunks import RowOperation, Source, autocast
from hf_ckpt.engines.head.logits import Alias, lazily
from hf_ckpt.engines.rerun import Report

AUTO_PIECES, AUTO_LEAST = 8, 256
AUTO_MOST_FROZEN, AUTO_MOST = 1024, 4096
"""Chunks of `auto`, in tokens: an eighth of the batch, but enough to keep a device busy, and not more than that takes.
Each chunk of a trained head reads and writes the whole gradient of its weight, so those chunks may be larger."""


def tokens_per_chunk(asked: int | str, tokens: int, *, trained: bool) -> int:
    """Return how many tokens the head takes at a time.

    Args:
        asked: that number, or `auto`.
        tokens: number of tokens that need logits.
        trained: whether the head has trained parameters.
    """
    if isinstance(asked, int):
        return asked
    piece = -(-tokens // AUTO_PIECES)
    return max(AUTO_LEAST, min(-(-piece // 128) * 128, AUTO_MOST if trained else AUTO_MOST_FROZEN))


def has_dropout(module: nn.Module) -> bool:
    """Whether a head has active dropout, which would draw other random numbers in chunks."""
    return any(isinstance(inner, nn.Dropout) and inner.p and inner.training for inner in module.modules())


def has_computed_weights(module: nn.Module) -> bool:
    """Whether weights of a head are computed from others, as the hooks of `weight_norm` do.

    Their graph could not be gone through again for each chunk.
    """
    values = (value for inner in module.modules() for value in vars(inner).values())
    return any(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in values)


def chunked(
    module: nn.Module, run: RowOperation, hidden: torch.Tensor, asked: int | str, report: Report | None = None
) -> torch.Tensor:
    """Run a head in chunks: return `Logits`, or plain ones if there is only one chunk.

    Args:
        module: the head.
        run: its own forward.
        hidden: its input, [..., hidden size].
        asked: tokens a chunk, or `auto`.
        report: told of the gradient of some tokens, if the watch checks this call.
    """
    trained = any(parameter.requires_grad for parameter in module.parameters())
    count = math.prod(hidden.shape[:-1])
    tokens = tokens_per_chunk(asked, count, trained=trained)
    if count <= tokens or has_computed_weights(module):
        return run(hidden)
    with torch.no_grad(), autocast(hidden.device.type, compat.autocast_dtype(hidden.device.type)):
        like = run(hidden.reshape(-1, hidden.shape[-1])[:0])
    source = Source(module, run, tokens, like)
    source.report = report
    return lazily(source, hidden, (), like, Alias())
