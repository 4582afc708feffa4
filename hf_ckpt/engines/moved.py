"""The tensors that one forward of a block moves to host memory.

A `Slot` is one such tensor, and a `Group` holds the slots of one forward. Their buffers and their lane belong to a
`host.Mover`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch

from hf_ckpt import compat
from hf_ckpt.engines.host import Lane, Mover
from hf_ckpt.engines.rebuild.values import Kept
from hf_ckpt.errors import InPlaceError
from hf_ckpt.logs import warn_once

log = logging.getLogger("hf_ckpt.engines.offload")  # all warnings of the engine come from one logger


class Group:
    """The tensors that one forward of a block moves to host memory.

    When backward fetches the first of them, it also starts the copies of the previous group, one block ahead of their
    use. `pack` and `unpack` are the saved-tensor hooks that move what a block saves.

    Args:
        mover: has the host memory.
        block: name of the block, for errors.
        lane: copies between the device of the block and the host.
        hidden: the block's input hidden states.
    """

    def __init__(self, mover: Mover, block: str, lane: Lane, hidden: torch.Tensor) -> None:
        self.mover, self.block, self.lane = mover, block, lane
        self.slots: list[weakref.ref[Slot]] = []
        self.first = compat.next_autograd_sequence_number()
        """Autograd nodes of this block have this sequence number or a larger one."""
        self.moved_bytes = 0
        self._before: weakref.ref[Group] | None = None
        """The group that moved tensors before this one."""
        self._open: list[Slot] = []
        """Slots whose tensors are still on the device."""
        self._by_storage: dict[int, Slot] = {}
        self._input: torch.Tensor | None = hidden
        """The only input of the block that may be moved; None once the block has ended."""
        self._outer = compat.top_saved_tensor_hooks()
        """The user's saved-tensor hooks around the model, if any."""

    def send(self, tensor: torch.Tensor) -> Slot | None:
        """Start moving a tensor without gaps in memory; None if there is no host memory for it."""
        with self.mover.lock:
            buffer = self.mover.take(self.lane, tensor.nbytes)
            if buffer is None:
                return None
            slot = Slot(self, tensor, buffer)
        if not self.slots:
            self._before = self.mover.follow(self)
        self.slots.append(weakref.ref(slot))
        self._open.append(slot)
        self.moved_bytes += tensor.nbytes
        return slot

    def close(self) -> None:
        """End the forward of the block: from now on its tensors are only in host memory.

        Raises `InPlaceError` if one of them was changed during its copy.
        """
        self._raise_first([slot.leave_device() for slot in self._forget()])

    def close_late(self) -> None:
        """End the forward of the block. Its last copies have just begun, so wait for them at the end of the next block.

        Raises `InPlaceError` if one of the tensors was changed during its copy.
        """
        errors = [slot.changed() for slot in self._open]
        if any(errors):
            self.abandon()
        self._raise_first(errors)
        self._by_storage.clear()
        self._input = None
        self.mover.end_of_block(self)

    def _raise_first(self, errors: Sequence[InPlaceError | None]) -> None:
        for error in filter(None, errors):
            raise error

    def abandon(self) -> None:
        """Free the tensors of a block that raised an error, or that backward does not need."""
        for slot in self._forget():
            slot.leave_device()

    def _forget(self) -> list[Slot]:
        """Return the slots whose tensors are still on the device, and forget all tensors of the forward."""
        opened, self._open = self._open, []
        self._by_storage.clear()
        self._input = None
        return opened

    def send_back(self) -> None:
        """Start copying back all tensors that are still on the host, in the order in which backward needs them."""
        for found in reversed(self.slots):
            slot = found()
            if slot is not None:
                slot.send_back()

    def send_back_before(self) -> None:
        """Start copying back the tensors of the previous group."""
        before = self._before() if self._before is not None else None
        if before is not None and before.lane is self.lane:
            before.send_back()

    @compat.untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        """Saved-tensor hook: move a tensor that this block computed, or its hidden states.

        Everything else (masks, parameters, tensors that several blocks share) stays on the device. If the user has
        saved-tensor hooks around the model, they get the tensor instead, and nothing is moved.
        """
        if self._outer is not None:
            _tell_hooks()
            pack, restore = self._outer
            return _ByUser(pack(tensor), restore)
        base = tensor if tensor._base is None else tensor._base
        if not self._is_wanted(tensor, base):
            return self._staying(tensor)
        key = tensor.untyped_storage()._cdata
        slot = self._by_storage.get(key)
        if slot is None or slot.version != base._version:
            slot = self.send(base.detach())
            if slot is None:
                return self._staying(tensor)
            self._by_storage[key] = slot
        slot.uses += 1
        return _InSlot(slot, tensor.size(), tensor.stride(), tensor.storage_offset() - base.storage_offset())

    def _staying(self, tensor: torch.Tensor) -> Kept:
        """Keep a tensor without its graph. A node that holds its own result would not be freed without a backward."""
        return Kept(tensor, self.block)

    def _is_wanted(self, tensor: torch.Tensor, base: torch.Tensor) -> bool:
        """Whether to move the storage of `tensor`, which is `base` or a view of it."""
        size = tensor.untyped_storage().nbytes()
        return (
            size >= self.mover.least_bytes
            and (self._made_here(base) or (self._input is not None and _same_storage(base, self._input)))
            and size == base.nbytes
            and tensor.dtype is base.dtype
            and not tensor.is_neg()
            and can_move(base)
        )

    def _made_here(self, tensor: torch.Tensor) -> bool:
        """Whether this block computed the tensor. A cast parameter does not count: autocast shares it."""
        node = tensor.grad_fn
        if node is None or node._sequence_nr() < self.first:
            return False
        return not (node.name() == "ToCopyBackward0" and _is_leaf(node.next_functions[0][0]))

    @staticmethod
    @compat.untraced
    def unpack(packed: Any) -> torch.Tensor:
        """Saved-tensor hook: return the tensor that `pack` got. Raises `InPlaceError` if it was changed."""
        if isinstance(packed, Kept):
            return packed.value()
        if isinstance(packed, _ByUser):
            return packed.restore(packed.packed)
        slot, size, stride, offset = packed
        found: torch.Tensor = slot.fetch()
        if found.size() == size and found.stride() == stride:
            return found
        return found.as_strided(size, stride, found.storage_offset() + offset)


class _InSlot(NamedTuple):
    """Replaces a saved tensor: a view of the moved tensor in a slot."""

    slot: Slot
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any
    """Offset of the view in the moved tensor, in elements."""


class _ByUser(NamedTuple):
    """Replaces a saved tensor that the user's hooks packed."""

    packed: Any
    restore: Callable[[Any], torch.Tensor]


class Slot:
    """One tensor on its way to host memory, there, or on its way back."""

    def __init__(self, group: Group, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        self.group, self.buffer = group, buffer
        self.version = tensor._version
        self.uses = 0
        """How often one backward fetches it, as counted by `Group.pack`; 0 if not counted, which means once."""
        self._left = 0
        """How often the current backward will still fetch it."""
        self._arriving: tuple[torch.Tensor, Any] | None = None
        """(tensor, copy) once the copy back has started; else None."""
        flat = buffer[: tensor.nbytes].view(tensor.dtype)
        self.host = flat.as_strided(tensor.size(), tensor.stride())
        self._tensor: torch.Tensor | None = tensor
        """The tensor on the device; None after the wait for its copy."""
        self._copy = group.lane.out(tensor, self.host)

    def leave_device(self) -> InPlaceError | None:
        """Wait for the copy and free the tensor. Returns the error to raise if it was changed during the copy."""
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            return None
        with self.group.mover.lock:
            self.group.lane.wait(self._copy)
        return self._compared(tensor)

    def changed(self) -> InPlaceError | None:
        """Return the error to raise if the tensor is still on the device and was changed since it was sent."""
        return None if self._tensor is None else self._compared(self._tensor)

    def _compared(self, tensor: torch.Tensor) -> InPlaceError | None:
        if tensor._version == self.version:
            return None
        return InPlaceError(self.group.block, tuple(tensor.shape), self.version, tensor._version)

    def send_back(self) -> None:
        """Start copying the tensor back, unless it is back or on its way. The caller holds the mover's lock."""
        if self._tensor is None and self._arriving is None:
            self._arriving = self.group.lane.back(self.host)

    def fetch(self) -> torch.Tensor:
        """Return the tensor on its device, and start copying back the previous group.

        Raises `InPlaceError` if the tensor is still on the device and was changed there.
        """
        tensor = self._tensor
        if tensor is not None:  # its block has only just run
            error = self._compared(tensor)
            if error is not None:
                raise error
            return tensor
        with self.group.mover.lock:  # two threads may run backward through one graph
            if self._arriving is None:
                self.group.send_back()
            assert self._arriving is not None
            made, copy = self._arriving
            self.group.lane.wait(copy)
            if not self._left:
                self._left = max(1, self.uses)
                self.group.send_back_before()
            self._left -= 1
            if not self._left:
                self._arriving = None
        return made

    def __del__(self) -> None:
        lane, mover = self.group.lane, self.group.mover
        with mover.lock:
            if self._arriving is not None:
                lane.drop(self._arriving[1])
            mover.give(lane, self.buffer)


def can_move(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether moving a value frees memory and restores the same tensor. Leaves stay: autograd holds them anyway."""
    if type(value) is not torch.Tensor or not value.is_floating_point() or value.is_neg() or value.is_inference():
        return False
    base = value if value._base is None else value._base
    return value.numel() > 0 and not (base.is_leaf and base.requires_grad) and _is_dense(value)


def _is_leaf(node: Any) -> bool:
    """Whether an autograd node accumulates the gradient of a leaf, such as a parameter."""
    return node is not None and bool(node.name() == "torch::autograd::AccumulateGrad")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor have no gaps in memory, in any order of its dimensions."""
    if tensor.is_contiguous():
        return True
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != length:
                return False
            length *= size
    return True


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _tell_hooks() -> None:
    warn_once(
        log,
        "hf_ckpt: what `selective` keeps is not moved to host memory, because there are saved-tensor hooks around the "
        "model (another checkpoint, `save_on_cpu`), which say where it is kept.",
    )
