"""`full+selective`: recompute the block as `full` does, and rebuild cheap results while its recomputation runs.

`full` lowers what is kept between forward and backward. During a block's backward, the peak is what its recomputation
saves. With this engine, the recomputation saves only the tensors that `selective` keeps. torch's checkpoint gets a
tensor without memory in place of each dropped one, of the same shape and type, which carries what rebuilds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from hf_ckpt import compat
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.engines.rebuild.replay import Inside
from hf_ckpt.engines.rebuild.tape import Tape
from hf_ckpt.engines.rebuild.unpacking import unpack
from hf_ckpt.engines.rebuild.values import Value, View
from hf_ckpt.engines.region import Region, Request
from hf_ckpt.engines.seen import Kept

_VALUE = "hf_ckpt_value"
"""Attribute of a tensor without memory: the value in whose place torch's checkpoint holds it."""


class FullSelectiveRegion(FullRegion):
    """The checkpointing function of a block that is recomputed, and whose cheap results are then rebuilt.

    Args:
        block: name of the block.
        save: classes of operations whose results the recomputation keeps.
        options: keyword arguments for `torch.utils.checkpoint`.
    """

    def __init__(self, block: str, *, save: tuple[str, ...], **options: Any) -> None:
        super().__init__(block, **options)
        self.rebuilding = RebuildRegion(block, save=save)

    @property
    def dropped_bytes(self) -> int:
        """Bytes of what the last recomputation has dropped of all that autograd would save."""
        return sum(self.rebuilding.dropped_sizes.values())

    def inner(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the block's own forward `fn`: its first call runs as it is, and later ones run under `selective`."""
        return Rebuilding(fn, self.rebuilding)


@dataclasses.dataclass(eq=False)
class Rebuilding:
    """A block's forward inside of torch's checkpoint: its first call runs as it is, later ones under `selective`.

    Args:
        fn: the block's own forward.
        region: the function of the block under `selective`.
        as_selective: whether what a node needs is held until it has run, as autograd holds it without a checkpoint.
    """

    fn: Callable[..., Any]
    region: RebuildRegion
    as_selective: bool = False
    ran: bool = False
    node: int | None = None
    """The number of the node of autograd that runs. The graph holds this object, which must not hold the graph."""
    held: list[Value] = dataclasses.field(default_factory=list)
    """What its saved tensors are rebuilt from."""

    def __call__(self, *args: Any) -> Any:
        hooks = None if compat.torch.is_compiling() else compat.torch.top_saved_tensor_hooks()
        if hooks is None or not compat.checkpoint.are_of_a_checkpoint(hooks):  # it runs for what it returns
            return self.fn(*args)
        checkpoint_pack, checkpoint_unpack = hooks
        # torch's checkpoint matches the tensors that the forward saves with those of the recomputation, by their order.
        # So the forward runs under its hooks, and `load` gets, for each of them, what the recomputation has packed.
        if not self.ran:
            self.ran = True

            @compat.torch.untraced
            def load(held: Any) -> torch.Tensor:
                tensor = checkpoint_unpack(held)
                value = vars(tensor).get(_VALUE)
                if value is None:
                    return tensor
                if self.as_selective:
                    self._hold(value)
                return unpack(value)

            with torch.autograd.graph.saved_tensors_hooks(checkpoint_pack, load):
                return self.fn(*args)

        sizes = self.region.dropped_sizes = {}

        def rebuilding(tape: Tape) -> compat.torch.SavedTensorHooks:
            @compat.torch.untraced
            def pack(tensor: torch.Tensor) -> Value | Inside:
                value = tape.pack(tensor)
                if type(value) is not Kept:
                    shared = value.root if type(value) is View else value
                    sizes[id(shared or value)] = tensor.untyped_storage().nbytes()
                    # An expanded number: no memory, but the shape and type that torch's checkpoint compares.
                    tensor = tensor.new_empty(()).expand(tensor.shape)
                    vars(tensor)[_VALUE] = value
                checkpoint_pack(tensor)
                return value

            return pack, unpack

        self.region.forwards += 1
        return self.region.run(self.fn, args, hooks=rebuilding)

    def _hold(self, value: Value) -> None:
        """Hold a value until the node of autograd that needs it has run, as the graph does without a checkpoint.

        torch's checkpoint lets go of each tensor as it returns it, so a trial would show less than `selective` needs.
        """
        node = compat.torch.running_node()._sequence_nr()
        if node != self.node:
            self.node = node
            self.held = []
        self.held.append(value)


def make(request: Request) -> Region:
    """The engine of `full+selective`."""
    return FullSelectiveRegion(request.block, save=request.action.save, **request.options)
