"""`offload`: move what a block keeps to pinned host memory between its forward and its backward.

Copies run on their own stream: to the host while blocks compute, and back one block ahead of the backward. Hidden
states exist when a block begins. So at the end of the block's forward the computing stream waits for their copy, and
their memory is free when the next block begins. Results that `selective` keeps are computed until the end of a block,
so the computing stream waits for their copies one block later. Copies of at most two blocks run at any time.

`OffloadRegion` moves the hidden states that `full` keeps. The saved-tensor hooks of `moved.Group` move the tensors that
`selective` keeps. A `Mover` has the host memory and the streams of both. Without an accelerator nothing is moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_ckpt import compat
from hf_ckpt.engines.full import FullRegion, needs_gradient
from hf_ckpt.engines.host import Mover
from hf_ckpt.engines.moved import Group, Slot, can_move
from hf_ckpt.engines.region import Region, Request
from hf_ckpt.engines.state import ForwardState


class EndOfStack:
    """Forward hook of a module that runs a stack: wait for the copies of its last block, as no block follows."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Wait for those copies."""
        if not compat.is_compiling():
            self.mover.end_of_block(None)


class OffloadRegion(FullRegion):
    """The checkpointing function of a block that is recomputed from hidden states in host memory."""

    def __init__(self, block: str, mover: Mover, *, known: bool = True, **options: Any) -> None:
        super().__init__(block, **options)
        self.mover = mover
        self.known = known
        """Whether the block's in-place changes are known. If not, its first forward moves nothing."""
        self.moved_bytes = 0
        self._is_frozen = False
        """Whether the last output required no gradient, so that there was nothing to keep or move."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward; `args[0]` are the hidden states, [batch, tokens, hidden size].

        Raises `InPlaceError` if the block changes hidden states during their copy, and `GraphCaptureError` if
        random state is preserved while a CUDA graph is captured.
        """
        if not torch.is_grad_enabled() or compat.is_compiling():
            return super().__call__(fn, *args)
        fn, args = compat.block_call(fn, args)
        group = self._open_group(args)
        self.moved_bytes = 0
        try:
            output = self._run(group, fn, args)
        except BaseException:
            if group is not None:
                group.abandon()
            raise
        self._is_frozen = not needs_gradient(output)
        if group is not None and self._is_frozen:
            group.abandon()
        elif group is not None:
            group.close()
            self.moved_bytes = group.moved_bytes
        return output

    def state_for(self, fn: Callable[..., Any]) -> ForwardState:
        """Record the state of the block, as `full` does."""
        return super().state_for(fn.fn if isinstance(fn, _WithMoved) else fn)

    def _open_group(self, args: tuple[Any, ...]) -> Group | None:
        """Make a group for the hidden states; None if they are not moved."""
        hidden = args[0] if args else None
        if self.changes_input or not (self.known or self.changes_input is False):
            return None
        if not can_move(hidden) or (self._is_frozen and not hidden.requires_grad):
            return None
        lane = self.mover.lane(hidden)
        return None if lane is None else Group(self.mover, self.block, lane, hidden)

    def _run(self, group: Group | None, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        slot = None if group is None else group.send(args[0].detach())
        if slot is None:
            return super().__call__(fn, *args)
        # An empty tensor stands in for the hidden states: torch preserves the random state of its device.
        return super().__call__(_WithMoved(fn, args[0], slot), args[0].new_empty(0), *args[1:])


def make(request: Request) -> Region:
    """The engine of `offload`. The last block of a stack gets `full`, because its backward comes first."""
    if request.mover is None:
        return FullRegion(request.block, **request.options)
    return OffloadRegion(request.block, request.mover, known=request.known, **request.options)


class _WithMoved:
    """A block's forward, which fetches its hidden states from host memory when it is recomputed."""

    def __init__(self, fn: Callable[..., Any], hidden: torch.Tensor, slot: Slot) -> None:
        self.fn, self.slot = fn, slot
        self.requires_grad = hidden.requires_grad
        self.hidden: torch.Tensor | None = hidden

    def __call__(self, _: torch.Tensor, *args: Any) -> Any:
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            hidden = self.slot.fetch().detach().requires_grad_(self.requires_grad)
        return self.fn(hidden, *args)
