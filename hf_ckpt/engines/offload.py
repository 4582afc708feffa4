"""`offload`: as `full`, but the block's hidden states are in pinned host memory between its forward and its backward.

`host_memory` has the memory and the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from hf_ckpt import compat
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.host_memory import Mover
from hf_ckpt.engines.region import Region, Request


class OffloadRegion(FullRegion):
    """The checkpointing function of a block that is recomputed from hidden states in host memory.

    Args:
        block: name of the block.
        mover: has the host memory.
        options: keyword arguments for `torch.utils.checkpoint`.
    """

    def __init__(self, block: str, mover: Mover, **options: Any) -> None:
        super().__init__(block, **options)
        self.mover = mover

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward; `args[0]` are the hidden states, [batch, tokens, hidden size].

        Raises `InPlaceError` if the block changes hidden states during their copy, and `GraphCaptureError` if
        random state is preserved while a CUDA graph is captured.
        """
        if not torch.is_grad_enabled() or compat.torch.is_compiling():
            return super().__call__(fn, *args)
        fn, args = compat.transformers.block_call(fn, args)
        hidden = args[0] if args else None
        is_made = self.recomputes_input and self.run_before(args) is not None
        group = None if is_made else self.mover.group(self.block, hidden)
        if group is None:
            self.moved_bytes = 0
            return super().__call__(fn, *args)
        with saved_tensors_hooks(group.pack, group.unpack):  # these see only `args`, which torch's checkpoint saves
            output = super().__call__(fn, *args)
        group.leave_device()
        self.moved_bytes = group.moved_bytes
        return output


def make(request: Request) -> Region:
    """The engine of `offload`. The last block of a stack gets `full`, because its backward comes first."""
    if request.mover is None:
        return FullRegion(request.block, **request.options)
    return OffloadRegion(request.block, request.mover, **request.options)
