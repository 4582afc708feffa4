"""`full+selective`: `full`, but the recomputation in backward runs under `selective`.

When `full` recomputes a block, everything that autograd saves in it is alive at once: often that is the peak. Here the
block runs under `selective` inside the checkpoint, in the forward and in the recomputation. The forward saves only the
block's inputs, as under `full`. In backward the checkpoint recomputes the tensors that `selective` keeps, and the
others are rebuilt from them.

Both runs must save the same tensors in the same order, so nothing may depend on what comes before the block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.rebuild.ops import is_cast_of_parameter
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.engines.rebuild.tape import Tape
from hf_ckpt.engines.rebuild.values import Value
from hf_ckpt.engines.region import Region, Request


class _RepeatableTape(Tape):
    """Finds the same values in a recomputation as in the forward, in the same order."""

    def __init__(self, region: RebuildRegion, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.leaves: dict[int, Any] = {}
        """Id of an input that requires gradients but has no node -> its edge."""
        super().__init__(region, fn, args)

    def _take(self, arg: torch.Tensor) -> None:
        """Note an input of the block. In a recomputation hidden states have no node: the checkpoint detaches them."""
        if arg.grad_fn is not None or not arg.requires_grad:
            super()._take(arg)
            return
        found = get_gradient_edge(arg)
        edge = self.leaves[id(arg)] = found.node, found.output_nr
        self.given[edge] = arg, arg._version

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor. One of `leaves` is kept like a tensor that has a node."""
        edge = self.leaves.get(id(tensor))
        return super().value_of(tensor) if edge is None else self.resolve(edge) or self._keep(edge, tensor)

    def close(self) -> None:
        """End the tape, and forget the nodes of `leaves`."""
        super().close()
        self.leaves.clear()

    def is_here(self, node: Any) -> bool:
        """Whether a node may be run again. A cast of a weight that autocast shares between blocks may be.

        A recomputation casts such a weight again.
        """
        return super().is_here(node) or is_cast_of_parameter(node)


class _RepeatableRegion(RebuildRegion):
    """Rebuilds what the block does not keep, for a forward that runs twice."""

    tape = _RepeatableTape


class FullSelectiveRegion(FullRegion):
    """The checkpointing function of a block that is recomputed, and whose cheap results are then rebuilt.

    Args:
        block: name of the block.
        save: classes of operations whose results the recomputation keeps.
        options: keyword arguments for `torch.utils.checkpoint`.
    """

    may_copy = False  # only blocks of known code get this region, and these do not change their hidden states
    transforms = frozenset()

    def __init__(self, block: str, *, save: tuple[str, ...], **options: Any) -> None:
        super().__init__(block, **options)
        self.rebuilding = _RepeatableRegion(block, save=save)

    def inner(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the block's own forward `fn`, run under `selective`."""
        return functools.partial(self.rebuilding, fn)


def make(request: Request) -> Region:
    """The engine of `full+selective`; a block of unknown code is recomputed as `full`."""
    if not request.known:
        return FullRegion(request.block, **request.options)
    return FullSelectiveRegion(request.block, save=request.action.save, **request.options)
