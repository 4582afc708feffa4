"""Inputs of blocks that a norm returned, in the block before or behind the embeddings, and how to recompute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hf_ckpt.engines.rebuild.values import Replay


class _NormOutput(NamedTuple):
    version: int
    """How often the tensor had been changed in place when it was remembered."""
    replay: Callable[[], Replay | None]
    """Returns the call of the norm; None once the graph that holds what it needs is gone."""


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Outputs of norms that the next block can recompute -> `_NormOutput`."""


def remember(output: torch.Tensor, replay: Callable[[], Replay | None]) -> None:
    """Let the next block recompute its input `output`: `replay` returns the call of the norm that returned it."""
    _known[output] = _NormOutput(output._version, replay)


def forget(block_input: torch.Tensor) -> Replay | None:
    """Forget an input of a block and return the call of the norm that returned it.

    None where the input is not an output of a norm, or was changed in place since.
    """
    known: _NormOutput | None = _known.pop(block_input, None) if _known.data else None  # type: ignore[no-untyped-call]
    return known.replay() if known is not None and known.version == block_input._version else None
