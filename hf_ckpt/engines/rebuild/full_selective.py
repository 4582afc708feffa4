"""`full+selective`: `full`, but the block that is run again in backward rebuilds its own cheap results.

While a block runs again, all that autograd saves of it is alive at once: often that is the peak. Here the block's
forward runs as `selective` within the checkpoint, both times. In the forward the checkpoint drops what `selective`
keeps of it, too; in backward it has these tensors again, and the others are rebuilt from them.

The two forwards have to give the checkpoint the same tensors in the same order, so nothing may depend on what comes
before the block.
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
        """Id of an input that needs a gradient and that no node has made -> its edge."""
        super().__init__(region, fn, args)

    def _take(self, arg: torch.Tensor) -> None:
        """Note an input of the block. In a recomputation, hidden states have no node: the checkpoint detaches them."""
        if arg.grad_fn is not None or not arg.requires_grad:
            super()._take(arg)
            return
        found = get_gradient_edge(arg)
        edge = self.leaves[id(arg)] = found.node, found.output_nr
        self.given[edge] = arg, arg._version

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor, as for every tape. One of `leaves` is kept like one that a node has made."""
        edge = self.leaves.get(id(tensor))
        return super().value_of(tensor) if edge is None else self.resolve(edge) or self._keep(edge, tensor)

    def close(self) -> None:
        """End the tape, as every tape, and forget the nodes of `leaves`."""
        super().close()
        self.leaves.clear()

    def is_here(self, node: Any) -> bool:
        """Whether a node may be run again: also where it casts a weight for all blocks that share it, for autocast.

        A recomputation casts such a weight anew.
        """
        return super().is_here(node) or is_cast_of_parameter(node)


class _RepeatableRegion(RebuildRegion):
    """Rebuilds what the block does not keep, in a forward that comes twice."""

    tape = _RepeatableTape


class FullSelectiveRegion(FullRegion):
    """The checkpointing function of a block that is recomputed, and whose cheap results are rebuilt after that.

    An observer is entered around the recomputation, but not around rebuilding: one may come within the other.

    Args:
        block: name of the block.
        save: classes of operations whose results the recomputation keeps.
        options: keyword arguments for `torch.utils.checkpoint`.
    """

    may_copy = False  # only blocks of known code get this region, and these leave their hidden states as they are
    transforms = frozenset()

    def __init__(self, block: str, *, save: tuple[str, ...], **options: Any) -> None:
        super().__init__(block, **options)
        self.rebuilding = _RepeatableRegion(block, save=save)

    def inner(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the block's own forward `fn` with values in the graph in the place of its cheap results."""
        return functools.partial(self.rebuilding, fn)


def make(request: Request) -> Region:
    """The engine of `full+selective`; a block of unknown code is recomputed as `full`."""
    if not request.known:
        return FullRegion(request.block, **request.options)
    return FullSelectiveRegion(request.block, save=request.action.save, **request.options)
