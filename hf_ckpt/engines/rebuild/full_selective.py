"""`full+selective`: recompute the block as `full` does, and rebuild cheap results while its recomputation runs.

`full` lowers what is kept between forward and backward. During a block's backward, the peak is what its recomputation
saves. With this engine, the recomputation saves only the tensors that `selective` keeps. torch's checkpoint gets a
tensor without memory in place of each dropped one, of the same shape and type, which carries what rebuilds it.
"""

from __future__ import annotations

import dataclasses
import functools
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
from hf_ckpt.engines.runs import Runs
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

    useless = (
        "`full+selective` with save %s found nothing in blocks like %s that can be rebuilt, so their recomputation "
        "saves every activation. Use `full` for such blocks."
    )
    """See `RebuildRegion.run`."""

    def __init__(self, block: str, *, save: tuple[str, ...], **options: Any) -> None:
        super().__init__(block, **options)
        self.rebuilding = RebuildRegion(block, save=save)

    @property
    def dropped_bytes(self) -> int:
        """Bytes of what the last recomputation has dropped of all that autograd would save."""
        return sum(self.rebuilding.dropped_sizes.values())

    def inner(self, runs: Runs) -> Runs:
        """Return the block's own forward: it first runs as it is, and then under `selective`."""
        return rebuilding(runs, self.rebuilding, useless=self.useless)


def rebuilding(runs: Runs, region: RebuildRegion, *, as_selective: bool = False, useless: str = "") -> Runs:
    """Return a block's forward inside of torch's checkpoint: it first runs as it is, and then under `selective`.

    torch's checkpoint matches the tensors that the forward saves with those of a recomputation, by their order. So the
    forward runs under the pack hook of the checkpoint, and each recomputation calls that hook for each tensor, too.

    Args:
        runs: the block's own forward.
        region: the function of the block under `selective`.
        as_selective: whether what a node needs is held until it has run, as autograd holds it without a checkpoint.
        useless: see `RebuildRegion.run`.
    """
    return Runs(
        functools.partial(_run, runs.first, as_selective),
        functools.partial(_run_under_selective, runs.again, region, useless),
    )


def _run(fn: Callable[..., Any], as_selective: bool, *args: Any) -> Any:
    """Run a block's forward for the first time."""
    hooks = _hooks_of_checkpoint()
    if hooks is None:
        return fn(*args)
    pack_of_checkpoint, unpack_of_checkpoint = hooks
    loaded = _Loaded(unpack_of_checkpoint, as_selective)
    with torch.autograd.graph.saved_tensors_hooks(pack_of_checkpoint, loaded.unpack):
        return fn(*args)


def _run_under_selective(fn: Callable[..., Any], region: RebuildRegion, useless: str, *args: Any) -> Any:
    """Run a block's forward again."""
    hooks = _hooks_of_checkpoint()
    if hooks is None:
        return fn(*args)
    pack_of_checkpoint, _ = hooks
    sizes = region.dropped_sizes = {}
    region.forwards += 1
    return region.run(
        fn, args, hooks=lambda tape: (_Recomputed(tape, pack_of_checkpoint, sizes).pack, unpack), useless=useless
    )


def _hooks_of_checkpoint() -> compat.autograd.SavedTensorHooks | None:
    """Return the saved-tensor hooks of the checkpoint around the block; None if it runs for what it returns."""
    hooks = None if compat.torch.is_compiling() else compat.autograd.top_saved_tensor_hooks()
    return hooks if hooks is not None and compat.checkpoint.are_of_a_checkpoint(hooks) else None


@dataclasses.dataclass(eq=False)
class _Recomputed:
    """What a recomputation saves: in place of each dropped tensor, the checkpoint gets one without memory.

    Args:
        tape: that of the recomputation.
        pack_of_checkpoint: the checkpoint's hook for the recomputation.
        sizes: see `RebuildRegion.dropped_sizes`.
    """

    tape: Tape
    pack_of_checkpoint: Callable[[torch.Tensor], Any]
    sizes: dict[int, int]

    @compat.torch.untraced
    def pack(self, tensor: torch.Tensor) -> Value | Inside:
        """Saved-tensor hook of the recomputation, whose own graph gets the value, and is dropped."""
        value = self.tape.pack(tensor)
        if type(value) is not Kept:
            shared = value.root if type(value) is View else value
            self.sizes[id(shared or value)] = tensor.untyped_storage().nbytes()
            # An expanded number: no memory, but the shape and type that torch's checkpoint compares.
            tensor = tensor.new_empty(()).expand(tensor.shape)
            vars(tensor)[_VALUE] = value
        self.pack_of_checkpoint(tensor)
        return value


@dataclasses.dataclass(eq=False)
class _Loaded:
    """What backward gets for each tensor that the forward saved: the one that the recomputation has packed.

    Args:
        unpack_of_checkpoint: the checkpoint's hook, which runs the recomputation first.
        as_selective: see `rebuilding`.
    """

    unpack_of_checkpoint: Callable[[Any], torch.Tensor]
    as_selective: bool
    node: int | None = None
    """The number of the node of autograd that runs. The graph holds this object, which must not hold the graph."""
    held: list[Value] = dataclasses.field(default_factory=list)
    """What its saved tensors are rebuilt from."""

    @compat.torch.untraced
    def unpack(self, packed: Any) -> torch.Tensor:
        """Saved-tensor hook of the forward."""
        tensor = self.unpack_of_checkpoint(packed)
        value = vars(tensor).get(_VALUE)
        if value is None:
            return tensor
        if self.as_selective:
            self._hold(value)
        return unpack(value)

    def _hold(self, value: Value) -> None:
        """Hold a value until the node of autograd that needs it has run, as the graph does without a checkpoint.

        torch's checkpoint lets go of each tensor as it returns it, so a trial would show less than `selective` needs.
        """
        node = compat.autograd.running_node()._sequence_nr()
        if node != self.node:
            self.node = node
            self.held = []
        self.held.append(value)


def make(request: Request) -> Region:
    """The engine of `full+selective`."""
    return FullSelectiveRegion(request.block, save=request.action.save, **request.options)
