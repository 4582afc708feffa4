"""The parameters that operations of a block are rebuilt from."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hf_ckpt.engines.seen import Kept
from hf_ckpt.logs import warn_once

log = logging.getLogger(__name__)


class Parameters:
    """The parameters of a block during one forward.

    Args:
        block: name of the block.
        versions: id of a parameter -> its in-place version at the beginning; None if nobody looked.
        stay: whether they stay on their device, unsharded, throughout a step, and so keep their addresses.
    """

    def __init__(self, block: str, versions: dict[int, int] | None, *, stay: bool) -> None:
        self.block = block
        self.versions = versions
        self.stay = stay
        self.are_read = False
        """Whether an operation would be rebuilt from one of them."""
        self.biases: dict[int, torch.Tensor] = {}
        """Autograd's sequence number, as in `Graph.packed_at` -> bias of the linear layer that ran then. Autograd holds
        no frozen bias."""

    def value(self, leaf: torch.Tensor) -> Kept | None:
        """Return the value of a parameter; None if the block has written to it, perhaps after an operation used it."""
        self.are_read = True
        if self.versions is None:
            return None
        value = Kept(leaf, self.block, address=self.stay)
        return value if value.version == self.versions.get(id(leaf), value.version) else None

    def bias_of(self, node: Any) -> Kept | None:
        """Return the value of the bias of the linear layer that made a node; None if unknown."""
        bias = self.biases.get(node._sequence_nr() + 1)
        return None if bias is None else self.value(bias)


class Parts:
    """The weights of parts of a block that are sharded by themselves, as far as these have run.

    FSDP2 frees the weights of such a part after its forward, and gathers them again only for the backward of that part:
    when a later one runs backward, nothing can be rebuilt from them.
    """

    def __init__(self) -> None:
        self.gathered: list[torch.UntypedStorage] = []
        """The memory of the weights, as far as it was not free yet."""

    def add(self, *weights: torch.Tensor | None) -> None:
        """Record weights that a part runs with."""
        self.gathered += [weight.untyped_storage() for weight in weights if weight is not None]

    def have_freed(self) -> bool:
        """Whether a part has freed weights since the last call."""
        if 0 not in map(torch.UntypedStorage.nbytes, self.gathered):
            return False
        self.gathered = [storage for storage in self.gathered if storage.nbytes()]
        warn_once(
            log,
            "hf_ckpt: parts of blocks are sharded one by one (FSDP), so `selective` keeps what a part returns. Shard "
            "whole blocks if that needs too much memory.",
        )
        return True
