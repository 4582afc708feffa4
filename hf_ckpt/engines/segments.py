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
from hf_ckpt.engines.arguments import copied
from hf_ckpt.engines.full import Counted, FullRegion, is_plain
from hf_ckpt.engines.rebuild.values import Kept
from hf_ckpt.engines.region import Hook, Region, Request
from hf_ckpt.engines.routers import enter_router, leave_router
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import FoundBlocks, routers


class SegmentRegion(FullRegion):
    """The checkpointing function of a block whose input is made again from that of its segment.

    A block that does not get the output of the previous block begins a new segment.

    Args:
        block: name of the block.
        segment: names of the blocks in its segment.
        options: keyword arguments for `torch.utils.checkpoint`.
    """

    def __init__(self, block: str, segment: tuple[str, ...], **options: Any) -> None:
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

    def checkpointed(self, fn: Callable[..., Any], *args: Any) -> Any:
        if not isinstance(fn, Counted) or not is_plain(args):
            return super().checkpointed(fn, *args)
        before = _last.call() if args[0]._version == _last.version and args[0] is _last.output() else None
        call = _Call(self, fn, args, before if before is not None and before.region.segment == self.segment else None)
        with saved_tensors_hooks(call.pack, call.unpack):  # of all tensors, these see only `args`
            output = super().checkpointed(fn, *args)
        hidden = compat.torch.tree_leaves(output)[0]
        # Below the first trainable parameter nothing is saved, so there is nothing to recompute.
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            _last.call, _last.output, _last.version = weakref.ref(call), weakref.ref(hidden), hidden._version
        return output


def make(request: Request) -> Region:
    """The engine of `full`, for a block by itself or, if its action names a segment, for a block of the segment."""
    if not request.segment:
        return FullRegion(request.block, **request.options)
    return SegmentRegion(request.block, request.segment, **request.options)


def hooks(regions: Collection[Region], found: FoundBlocks, owners: Sequence[nn.Module]) -> Iterator[Hook]:
    """Yield hooks on the routers of all blocks that are recomputed as a whole."""
    choosing = dict.fromkeys(region.block for region in regions if region.keeps_choices)
    for router in (router for name in choosing for router in routers(found.modules[name])):
        yield Hook(router, enter_router, "before")
        yield Hook(router, leave_router, "after")


class _Call:
    """One call of a block. It replaces the block's input among the tensors that torch's checkpoint saves.

    It refers to the call before it in its segment, and to no graph: that of a later block's arguments may lead to it.
    """

    def __init__(self, region: SegmentRegion, counted: Counted, args: tuple[Any, ...], before: _Call | None) -> None:
        fn, hidden = counted.fn, args[0]
        if isinstance(fn, functools.partial):  # the block's keyword arguments
            fn = functools.partial(fn.func, *fn.args, **copied(fn.keywords, {}, _detached, objects=True))
        self.fn = fn
        self.args = copied(args[1:], {}, _detached, objects=True)
        self.region, self.state = region, counted.state
        self.source = Kept(_detached(hidden), region.block) if before is None else before
        """The input of a segment's first call; the call before a later one."""
        self.made: torch.Tensor | None = None
        """The input of a later call, from when backward makes it until it uses it."""
        self.address: tuple[Any, ...] | None = (hidden.data_ptr(), hidden.stride())
        """Where the input is until it is saved; then None."""
        device = hidden.device.type
        dtype = compat.devices.autocast_dtype(device)
        caches = torch.is_autocast_cache_enabled()
        self.autocast = functools.partial(compat.devices.autocast_to, device, dtype, caches=caches)

    @compat.torch.untraced
    def pack(self, tensor: torch.Tensor) -> _Call | Kept:
        """Saved-tensor hook: store this object in place of the input; others stay as they are."""
        if (tensor.data_ptr(), tensor.stride()) != self.address:
            return Kept(tensor, self.region.block)
        self.address = None
        return self

    @staticmethod
    @compat.torch.untraced
    def unpack(packed: _Call | Kept) -> torch.Tensor:
        """Saved-tensor hook: return the tensor that `pack` got, or one with the same values."""
        if isinstance(packed, Kept):
            return packed.value()
        hidden, packed.made = packed.input(), None
        return hidden

    def input(self) -> torch.Tensor:
        """Return the input in backward. The inputs of earlier calls that are made for it stay until they are used."""
        if isinstance(self.source, Kept):
            return self.source.value()
        if self.made is None:
            self.made = self.source.again()
        return self.made

    def again(self) -> torch.Tensor:
        """Run the block as in its forward, and return the input of the next one."""
        hidden = self.input()
        self.region.recomputed += 1
        self.state.refuse_overwritten_inputs()
        # Without gradients, torch may choose other kernels, which round differently. So drop what autograd saves.
        with self.autocast(), torch.enable_grad(), saved_tensors_hooks(lambda tensor: None, self._refuse_backward):
            output = self.state.recompute(self.fn, (hidden, *self.args))
        made: torch.Tensor = _detached(compat.torch.tree_leaves(output)[0])
        return made

    def _refuse_backward(self, packed: None) -> torch.Tensor:
        """Raise `HfCkptError`: the block itself calls a backward, and what autograd saved was dropped."""
        raise HfCkptError(
            f"block {self.region.block!r} calls torch.autograd.grad or backward in its forward, which `segments` do "
            'not support. Use "policy": "full" without `segments`.'
        )


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


class _Last(threading.local):
    """The last call of this thread, and the hidden states that it returned. The graph of its block holds it."""

    call: Callable[[], _Call | None] = staticmethod(lambda: None)
    output: Callable[[], torch.Tensor | None] = staticmethod(lambda: None)
    version = 0


_last = _Last()
