"""`full` over several neighbouring blocks: of the inputs of these blocks, only the first one is kept.

The blocks of a segment are checkpointed one by one, as under `full`, but save no inputs of their own. When backward
reaches a segment, it first runs its blocks once and saves their inputs only. Then it recomputes each block, the last
one first, and frees its input. So a step has one more forward, and at any time it holds one input for each segment, and
those of one segment. Chen et al., 2016, https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hf_ckpt import compat
from hf_ckpt.engines.full import Counted, FullRegion, is_plain, needs_gradient
from hf_ckpt.engines.rebuild.values import Kept
from hf_ckpt.engines.region import Hook, Region, Request, Segment
from hf_ckpt.engines.routers import enter_router, leave_router
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import FoundBlocks, routers


class SegmentRegion(FullRegion):
    """The checkpointing function of a block whose input is made again from that of its segment.

    A block that does not get the output of the previous block begins a new segment.
    """

    may_copy = False  # the blocks before it would have to be recomputed from copies, too

    def __init__(self, block: str, segment: Segment, **options: Any) -> None:
        super().__init__(block, **options)
        self.segment = segment

    def told_of_parameters(self, stay: bool, owner: str) -> None:
        """Raise `HfCkptError` unless parameters stay on their device, unsharded, throughout a step (`stay`)."""
        if not stay:
            raise HfCkptError(
                f"`segments` run several blocks of {owner} at once in backward, but its parameters are sharded or "
                "moved block by block (FSDP, ZeRO-3, device maps), so those of the others are away then. Use "
                "`policy: full` without `segments`."
            )
        super().told_of_parameters(stay, owner)

    def _checkpoint(self, fn: Callable[..., Any], *args: Any) -> Any:
        if not isinstance(fn, Counted) or not is_plain(args):
            return super()._checkpoint(fn, *args)
        run = _open.run() if _open.run is not None else None
        if run is None or not run.continues(self.segment, args[0]):
            run = _Run(self.segment, self.block, args[0])
        saved = _Input(run, self.block, args[0])
        with saved_tensors_hooks(saved.pack, saved.unpack):  # of all tensors, these see only `args`
            output = super()._checkpoint(fn, *args)
        run.add(_Call(fn, args[1:]), output)
        # Below the first trainable parameter nothing is saved, so there is nothing to recompute.
        goes_on = self.block != self.segment.blocks[-1] and needs_gradient(output)
        _open.run = weakref.ref(run) if goes_on else None
        return output


def make(request: Request) -> Region:
    """The engine of `full`, for a block by itself or, if its action names a segment, for a block of the segment."""
    if request.segment is None:
        return FullRegion(request.block, **request.options)
    return SegmentRegion(request.block, request.segment, **request.options)


def hooks(regions: Collection[Region], found: FoundBlocks, owners: Sequence[nn.Module]) -> Iterator[Hook]:
    """Yield hooks on the routers of all blocks that are recomputed as a whole."""
    choosing = dict.fromkeys(region.block for region in regions if region.keeps_choices)
    for router in (router for name in choosing for router in routers(found.modules[name])):
        yield Hook(router, enter_router, "before")
        yield Hook(router, leave_router, "always")


class _Call:
    """One call of a block. It holds no graph: that of a later block's arguments may lead to this segment."""

    def __init__(self, counted: Counted, args: tuple[Any, ...]) -> None:
        fn, self.counted = counted.fn, counted
        if isinstance(fn, functools.partial):  # the block's keyword arguments
            fn = functools.partial(fn.func, *fn.args, **compat.torch.tree_map(_detached, fn.keywords))
        self.fn, self.args = fn, compat.torch.tree_map(_detached, args)
        self.place = 0
        """Which leaf of the block's output is the input of the next block."""

    def again(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the block as in its forward, and return the input of the next block."""
        self.counted.region.recomputed += 1
        # Without gradients, torch may choose other kernels, which round differently. So drop what autograd saves.
        with torch.enable_grad(), saved_tensors_hooks(lambda tensor: None, lambda packed: packed):
            output = self.counted.state.recompute(self.fn, (hidden, *self.args))
        made: torch.Tensor = _detached(compat.torch.tree_leaves(output)[self.place])
        return made


class _Run:
    """One forward through the blocks of a segment."""

    def __init__(self, segment: Segment, block: str, hidden: torch.Tensor) -> None:
        self.segment = segment
        self.first, self.requires_grad = Kept(hidden, block), hidden.requires_grad
        """The input of the segment, and whether it requires gradients."""
        self.calls: list[_Call] = []
        self.outputs: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Number of a leaf of the last block's output -> the tensor, and its in-place version."""
        self.inputs: dict[int, torch.Tensor] = {}
        """Number of a call -> its input, from when backward makes it until it uses it."""
        self.device_type = hidden.device.type
        self.autocast_dtype = compat.devices.autocast_dtype(self.device_type)

    def continues(self, segment: Segment, hidden: torch.Tensor) -> bool:
        """Whether a block of `segment` with this input continues the run: the last block returned that input."""
        for place, (output, version) in self.outputs.items():
            if segment is self.segment and output() is hidden and version == hidden._version:
                self.calls[-1].place = place
                return True
        return False

    def add(self, call: _Call, output: Any) -> None:
        """Add a call that has ended."""
        self.calls.append(call)
        leaves = enumerate(compat.torch.tree_leaves(output))
        tensors = {place: leaf for place, leaf in leaves if isinstance(leaf, torch.Tensor)}
        self.outputs = {place: (weakref.ref(tensor), tensor._version) for place, tensor in tensors.items()}

    def input_of(self, number: int) -> torch.Tensor:
        """Return the input of a call in backward. The first call of this makes the inputs of all earlier calls, too."""
        hidden = self.inputs.pop(number, None)
        if hidden is not None:
            return hidden
        hidden = self.first.value().detach().requires_grad_(self.requires_grad)
        with compat.devices.autocast_to(self.device_type, self.autocast_dtype, caches=False):
            for place, call in enumerate(self.calls[:number], start=1):
                hidden = self.inputs[place] = call.again(hidden)
        return self.inputs.pop(number, hidden)


class _Input:
    """Stands for the input of a block among the tensors that torch's checkpoint saves."""

    def __init__(self, run: _Run, block: str, hidden: torch.Tensor) -> None:
        self.run, self.block, self.number = run, block, len(run.calls)
        self.hidden: torch.Tensor | None = hidden
        """The input until it is saved; then None."""

    @compat.torch.untraced
    def pack(self, tensor: torch.Tensor) -> _Input | Kept:
        """Saved-tensor hook: store this object in place of the input; others stay as they are."""
        hidden = self.hidden
        if hidden is None or (tensor.data_ptr(), tensor.stride()) != (hidden.data_ptr(), hidden.stride()):
            return Kept(tensor, self.block)
        self.hidden = None
        return self

    @staticmethod
    @compat.torch.untraced
    def unpack(packed: _Input | Kept) -> torch.Tensor:
        """Saved-tensor hook: return the tensor that `pack` got, or one with the same values."""
        return packed.run.input_of(packed.number) if isinstance(packed, _Input) else packed.value()


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


class _Open(threading.local):
    """The segment that this thread is running. Its blocks' graphs hold it."""

    run: weakref.ref[_Run] | None = None


_open = _Open()
