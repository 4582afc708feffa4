"""Runs an LM head in chunks of tokens, where that needs less memory than the plain head."""

from __future__ import annotations

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.head.chunks import HeadCall, RowOperation
from hf_ckpt.engines.head.logits import Logits
from hf_ckpt.engines.head.rules import RULES

# The rules make logits themselves, so these cannot import them.
Logits.rules = RULES
AUTO_PIECES = 8
"""The number of chunks of `auto`."""
AUTO_LEAST = 256
"""The fewest tokens in such a chunk: fewer would not keep a device busy."""
AUTO_MOST = 4096
"""The most tokens in one. Each chunk of a trained head reads and writes the whole gradient of its weight."""
AUTO_MOST_FROZEN = 1024
"""The same for a frozen head, which has no such gradient."""


def tokens_per_chunk(chunk: int | str, tokens: int, head: nn.Module) -> int:
    """Return the number of tokens in a chunk: `chunk`, or for `auto` what suits this many `tokens` that need logits."""
    if isinstance(chunk, int):
        return chunk
    trained = any(parameter.requires_grad for parameter in head.parameters())
    most = AUTO_MOST if trained else AUTO_MOST_FROZEN
    piece = -(-tokens // AUTO_PIECES)
    piece = -(-piece // 128) * 128  # whole tiles of 128 rows, as most matrix kernels have
    return max(AUTO_LEAST, min(piece, most))


def chunks_help(logits: torch.Tensor, head: nn.Module, tokens: int, chunk: int) -> bool:
    """Whether a head and its loss need less memory in chunks of `chunk` tokens than on all `tokens` at once.

    Of `logits`, only the size of the vocabulary and the type count.

    At the peak of a plain head, its loss holds the logits, and copies in float32: the cast, log-probabilities and their
    gradient. Chunks hold these for one chunk, but also the sum of all gradients of the head's parameters in float32,
    and cast it to the parameters' type in the end.
    """
    of_a_token = logits.shape[-1] * (logits.element_size() + 3 * 4)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    summed = 4 * sum(parameter.numel() for parameter in trained)
    cast = sum(parameter.nbytes for parameter in trained if parameter.element_size() < 4)
    return tokens * of_a_token > summed + max(chunk * of_a_token, cast)


def auto_helps(head: nn.Module, logits: torch.Tensor) -> bool:
    """Whether a training forward of a head that returned these logits would need less memory under `head: auto`."""
    tokens = logits.shape[:-1].numel()
    chunk = tokens_per_chunk("auto", tokens, head)
    return why_head_stays_whole(head) is None and chunks_help(logits, head, tokens, chunk)


def why_head_stays_whole(head: nn.Module) -> str | None:
    """Return why a head cannot run in chunks now; None if it can."""
    modules = list(head.modules())
    if any(isinstance(module, nn.Dropout) and module.p and module.training for module in modules):
        return "it has an active dropout, whose draws would be others"
    values = (value for module in modules for value in vars(module).values())
    if any(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in values):
        return "its weights are computed (by `weight_norm`?), and backward runs through their graph only once"
    if compat.modes.transforms():
        return "a transform of torch.func or forward-mode AD is active"
    return None


def chunked(module: nn.Module, run: RowOperation, hidden: torch.Tensor, chunk: int | str) -> torch.Tensor:
    """Run a head in chunks: return `Logits`, or plain logits if chunks would not need less.

    Args:
        module: the head.
        run: its own forward.
        hidden: its input, [..., hidden size].
        chunk: tokens per chunk, or `auto`.
    """
    all_tokens = hidden.shape[:-1].numel()
    tokens = tokens_per_chunk(chunk, all_tokens, module)
    if all_tokens <= tokens:
        return run(hidden)
    call = HeadCall(module, run, hidden, tokens)
    if chunk == "auto" and not chunks_help(call.like, module, all_tokens, tokens):
        return run(hidden)
    return Logits.make(call, hidden, (), call.like, graph=True)
