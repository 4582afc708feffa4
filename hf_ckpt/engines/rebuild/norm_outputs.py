"""Block inputs that a norm computed, in the block before or after the embeddings, and how to recompute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hf_ckpt.engines.rebuild.values import Replay


class _NormOutput(NamedTuple):
    version: int
    """The in-place version of the tensor when it was remembered."""
    replay: Callable[[], Replay | None]
    """Returns the call of the norm; None once the graph that holds its input is gone."""


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Outputs of norms that the next block can recompute -> `_NormOutput`."""


def remember(output: torch.Tensor, replay: Callable[[], Replay | None]) -> None:
    """Let the next block recompute its input `output` by the call of the norm that `replay` returns."""
    _known[output] = _NormOutput(output._version, replay)


def forget(block_input: torch.Tensor) -> Replay | None:
    """Forget an input of a block and return the call of the norm that produced it.

    None if the input is not the output of a norm, or has been changed in place since.
    """
    known: _NormOutput | None = _known.pop(block_input, None) if _known.data else None  # type: ignore[no-untyped-call]
    return known.replay() if known is not None and known.version == block_input._version else None
