"""Run a head in chunks: whether that is possible, and how many tokens a chunk has."""

from __future__ import annotations

import math

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.check import Report
from hf_ckpt.engines.head import rules  # noqa: F401 (its rules keep losses in chunks)
from hf_ckpt.engines.head.chunks import RowOperation, Source, autocast
from hf_ckpt.engines.head.logits import Alias, lazily

AUTO_PIECES, AUTO_LEAST = 8, 256
AUTO_MOST_FROZEN, AUTO_MOST = 1024, 4096
"""Chunks of `auto`, in tokens: an eighth of the batch, with a minimum that keeps a device busy and a maximum. Each
chunk of a trained head reads and writes the whole gradient of its weight, so those chunks may be larger."""


def tokens_per_chunk(asked: int | str, tokens: int, *, trained: bool) -> int:
    """Return the number of tokens in a chunk of the head.

    Args:
        asked: the number that the user set, or `auto`.
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
    """Whether weights of a head are computed from others, for example by the hooks of `weight_norm`.

    Backward could not run through their graph again for each chunk.
    """
    values = (value for inner in module.modules() for value in vars(inner).values())
    return any(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in values)


def chunked(
    module: nn.Module, run: RowOperation, hidden: torch.Tensor, asked: int | str, report: Report | None = None
) -> torch.Tensor:
    """Run a head in chunks: return `Logits`, or plain logits if there is only one chunk.

    Args:
        module: the head.
        run: its own forward.
        hidden: its input, [..., hidden size].
        asked: tokens per chunk, or `auto`.
        report: called with the gradient of some tokens, if the watch checks this call.
    """
    trained = any(parameter.requires_grad for parameter in module.parameters())
    count = math.prod(hidden.shape[:-1])
    tokens = tokens_per_chunk(asked, count, trained=trained)
    if count <= tokens or has_computed_weights(module):
        return run(hidden)
    one = 0 if type(module) is nn.Linear else 1  # some adapters cannot reshape a tensor without tokens
    with torch.no_grad(), autocast(hidden.device.type, compat.devices.autocast_dtype(hidden.device.type)):
        like = run(hidden.reshape(-1, hidden.shape[-1])[:one])
    like = like.new_empty(0, like.shape[-1])
    source = Source(module, run, tokens, like)
    source.report = report
    return lazily(source, hidden, (), like, Alias())
