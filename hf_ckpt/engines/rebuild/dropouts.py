"""The dropouts of a block: masks that are kept as bits, and inputs from which a dropout's result can be rebuilt."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from hf_ckpt import compat
from hf_ckpt.engines.rebuild import masks
from hf_ckpt.engines.rebuild.keeping import Keep
from hf_ckpt.engines.rebuild.values import Rebuilt, Value, Work

Edge = tuple[Any, int]
"""An autograd node, and the number of one of its outputs."""


class Dropouts:
    """The dropouts that run in one forward of a block.

    Args:
        work: counts what is rebuilt.
        keep: keeps a tensor.
        values: the values of `Graph`.
    """

    def __init__(self, work: Work, keep: Keep, values: dict[Edge, Value | None]) -> None:
        self.work = work
        self.keep = keep
        self.values = values
        self.softmax: torch.Size | None = None
        """Shape of the last saved tensor, if it is the softmax inside torch's attention."""
        self.offered: dict[Edge, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Inputs of dropouts, with their in-place versions: they can be kept as long as they are alive."""

    def mask(self, tensor: torch.Tensor) -> Rebuilt | None:
        """If a tensor without a graph is a dropout mask, keep its bits and return its value. Else return None.

        A mask is recognised by the call that produced it: `functional.dropout`, which saves nothing else, or torch's
        own attention, which saves its softmax just before.
        """
        is_noise = tensor.dtype is not torch.bool
        # Noise is drawn and then divided, in place: two changes. A mask of truth values is the result of an operation.
        if tensor._version != (2 if is_noise else 0) or not masks.can_pack(tensor):
            return None
        dropout_input = compat.frames.input_of_dropout()
        if dropout_input is not None:
            self._offer(dropout_input)
        elif tensor.shape != self.softmax:
            return None
        if is_noise:  # of a CPU
            return None
        with torch.no_grad():
            bits = self.keep(masks.to_bits(tensor))
        from_bits = functools.partial(masks.from_bits, size=tensor.size(), stride=tensor.stride())
        return Rebuilt(self.work, from_bits, [bits])

    def _offer(self, tensor: torch.Tensor) -> None:
        """Record the input of a dropout, if it has no value, so that the dropout's result can be rebuilt from it.

        An example is the adapter of a frozen linear layer: of the layer's input, autograd saves only the adapter's
        float32 copy after dropout.
        """
        edge = tensor.grad_fn, tensor.output_nr
        if tensor.grad_fn is not None and self.values.get(edge) is None:
            self.values.pop(edge, None)  # it was found to have none, and `Graph.resolve` would not look again
            # Weakly: nobody may need it, and then the tape would hold what no checkpointing would free.
            self.offered[edge] = weakref.ref(tensor), tensor._version

    def take(self, edge: Edge) -> torch.Tensor | None:
        """Return the recorded input of an edge, which is asked for once; None if it is gone, or was changed."""
        reference, version = self.offered.pop(edge)
        tensor = reference()
        return None if tensor is None or tensor._version != version else tensor
