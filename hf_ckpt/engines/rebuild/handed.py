"""Inputs of blocks that a norm has made, in the block before or behind the embeddings, and how to make them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hf_ckpt.engines.rebuild.values import Replay


class _Handed(NamedTuple):
    version: int
    """How often the input had been changed in place when it was handed over."""
    replay: Callable[[], Replay | None]
    """Returns the call of the norm; None once the graph that holds what it needs is gone."""


_handed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Outputs of norms that the next block can rebuild -> `_Handed`."""


def hand(output: torch.Tensor, replay: Callable[[], Replay | None]) -> None:
    """Let the next block rebuild its input: `replay` returns the call of the norm that made it."""
    _handed[output] = _Handed(output._version, replay)


def taken(given: torch.Tensor) -> Replay | None:
    """The call of the norm that made what a block is given; None where it is not known, or was changed in place."""
    found: _Handed | None = _handed.pop(given, None) if _handed.data else None  # type: ignore[no-untyped-call]
    return found.replay() if found is not None and found.version == given._version else None
