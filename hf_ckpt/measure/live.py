"""Exact counts of the bytes of all live tensors through one step, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat

Holder = nn.Module | torch.optim.Optimizer | Mapping[str, Any]
"""What holds tensors that are alive before the counting begins: a model, an optimizer, or a batch (a mapping)."""


class LiveBytes(compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all live tensor storages, each once, after every operation of forward and backward.

        with LiveBytes(model) as live:
            model(**batch).loss.backward()
        live.peak_bytes, live.timeline

    This is exact for what PyTorch holds, on any device, and much slower than the step itself. It does not see scratch
    memory that a kernel takes and frees within one operation, and does not notice when a storage is resized, as those
    of FSDP2 are.

    Args:
        holders: what holds tensors that are alive already, such as the model, its optimizer and the batch.
        device: type of a device, such as `cuda`: only tensors there are counted. None for all devices.
    """

    def __init__(self, *holders: Holder, device: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.current_bytes = 0
        self.peak_bytes = 0
        self.timeline: list[int] = []
        """Bytes alive after each operation, in the order in which they ran."""
        self._live: set[int] = set()
        for holder in holders:
            for tensor in _tensors_of(holder):
                self._count(tensor)
        self.start_bytes = self.current_bytes
        """Bytes alive at the beginning: parameters, gradients, buffers and optimizer state of `holders`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in compat.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value)
        self.timeline.append(self.current_bytes)
        return result

    def _count(self, tensor: torch.Tensor) -> bool:
        """Count the storage of a tensor; returns whether it was not counted before."""
        if self._device is not None and tensor.device.type != self._device:
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return False
        size = storage.nbytes()
        self._live.add(key)
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        weakref.finalize(storage, self._freed, key, size).atexit = False
        return True

    def _freed(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.current_bytes -= size


class BlockBytes(LiveBytes):
    """Counts, beside all live bytes, those of storages that were allocated while one of `blocks` ran.

        with BlockBytes(blocks, model, batch) as live:
            outputs = model(**batch)
            live.block_bytes  # what the blocks' forwards leave: saved tensors and their outputs

    `block_bytes` leaves out parameters, the batch, and what the model allocates outside its blocks.
    """

    def __init__(self, blocks: Iterable[nn.Module], *holders: Holder) -> None:
        self.block_bytes = 0
        self._blocks = tuple(blocks)
        self._depth = 0
        self._made_inside: set[int] = set()
        self._handles: list[Any] = []
        super().__init__(*holders)

    def __enter__(self) -> BlockBytes:
        for block in self._blocks:
            self._handles.append(block.register_forward_pre_hook(self._enter_block))
            self._handles.append(block.register_forward_hook(self._leave_block, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter_block(self, *_: Any) -> None:
        self._depth += 1

    def _leave_block(self, *_: Any) -> None:
        self._depth -= 1

    def _count(self, tensor: torch.Tensor) -> bool:
        new = super()._count(tensor)
        if new and self._depth:
            storage = tensor.untyped_storage()
            self._made_inside.add(storage._cdata)
            self.block_bytes += storage.nbytes()
        return new

    def _freed(self, key: int, size: int) -> None:
        super()._freed(key, size)
        if key in self._made_inside:
            self._made_inside.discard(key)
            self.block_bytes -= size


def _tensors_of(holder: Holder) -> Iterator[torch.Tensor]:
    """Parameters, gradients and buffers of a module; the state of an optimizer; the values of a batch."""
    if isinstance(holder, nn.Module):
        yield from holder.buffers()
        for parameter in holder.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    else:
        held = list((holder.state if isinstance(holder, torch.optim.Optimizer) else holder).values())
        yield from (value for value in compat.tree_leaves(held) if isinstance(value, torch.Tensor))
