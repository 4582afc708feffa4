"""What is kept of the tensors of a block, and where."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from hf_ckpt import compat
from hf_ckpt.engines.rebuild.values import Stored
from hf_ckpt.engines.seen import Kept, version_of

Keep = Callable[[torch.Tensor], Kept | Stored]
"""Returns the value of a tensor that is kept."""
_Name = tuple[int, int]
"""Id of a tensor, and its in-place version: while a `Stored` holds the tensor, no other one has the same."""


class Keeping:
    """Keeps tensors during one forward of a block.

    Args:
        block: name of the block.
        store: hooks that store kept tensors elsewhere, such as in host memory; None to keep them as they are.
    """

    def __init__(self, block: str, store: compat.autograd.SavedTensorHooks | None) -> None:
        self._stored: dict[_Name, Stored] = {}
        self.keep: Keep = functools.partial(Kept, block=block)
        if store is not None:
            # One `Stored` for all nodes that save the tensor, so that a user's hooks get it once. A `Kept` is cheap.
            self.keep = functools.partial(_once, self._stored, functools.partial(Stored, hooks=store, block=block))

    def close(self) -> None:
        """Let go of the tensors that are stored elsewhere: the forward has ended."""
        for stored in self._stored.values():
            stored.original = None
        self._stored.clear()


def _once(stored: dict[_Name, Stored], make: Callable[[torch.Tensor], Stored], tensor: torch.Tensor) -> Stored:
    """Return the value of a tensor that hooks store elsewhere: the same one, however often autograd saves it."""
    return stored.setdefault((id(tensor), version_of(tensor)), make(tensor))
