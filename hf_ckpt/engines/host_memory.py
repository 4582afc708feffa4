"""Pinned host memory for what autograd saves in a block, and the copies to and from it.

| class | is |
|---|---|
| `Mover` | the host memory of one plan, and the lanes of its devices |
| `Lane` | the copies of one device, on a stream of their own |
| `Group` | the saved-tensor hooks of one forward of a block |
| `Slot` | one tensor on its way to the host, there, or on its way back |

Hidden states, and what the block itself has computed, move. Masks, parameters and whatever several blocks share stay.
Copies run to the host while blocks compute, and back one block ahead of the backward.

At the end of a block the computing stream waits for its copies, so their memory is free when the next block begins.
The lane is busy meanwhile: hidden states are copied from the beginning of a block, and the copies of its results take
longer than their computation on most devices.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from hf_ckpt import compat
from hf_ckpt.engines.seen import Kept, Seen
from hf_ckpt.errors import HfCkptError, InPlaceError, reason_of
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.memory import locked_memory_limit, memory_mappings
from hf_ckpt.units import format_bytes

log = logging.getLogger(__name__)

LEAST_BYTES = 2**18
"""The smallest result that `selective` moves, in bytes: every copy also has a fixed cost."""
LARGEST_PINNED = 8 * 2**30
"""Bytes of the largest buffer that every driver pins."""
MAPPINGS_LEFT = 100
"""If a process may add only so many mappings of memory, the next buffer may fail for want of them."""


# --- copies -----------------------------------------------------------------------------------------------------------


class Copy(NamedTuple):
    """A copy that was started."""

    event: Any
    """Recorded on the copying stream at the end of the copy."""
    stream: Any
    """The computing stream when the copy was started. The target was allocated on it."""
    target: torch.Tensor | None
    """The target of a copy to the device; None for a copy to the host."""


class Lane:
    """Copies between an accelerator and the host, one after another, on a stream that nothing else uses.

    Threads that run blocks on the same device share its lane. `Mover.lock` is held in every call.

    It avoids `record_stream` where possible. The allocator reuses recorded memory only once the device has reached that
    point, and Python, which runs ahead of the device, would allocate new memory for every block. Instead the stream
    that the memory belongs to waits for the copy before the memory is freed.
    """

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._device = device
        self._stream = stream

    def out(self, tensor: torch.Tensor, host: torch.Tensor) -> Any:
        """Start copying `tensor` into `host`. Returns the copy, for `wait`. The caller holds `tensor` until then."""
        return self._begin(tensor, host, None)

    def back(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start copying `host` to the device. Returns (tensor, copy). Use the tensor only after `wait(copy)`."""
        target = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self._device)
        return target, self._begin(host, target, target)

    def _begin(self, source: torch.Tensor, target: torch.Tensor, on_device: torch.Tensor | None) -> Copy:
        computing = torch.accelerator.current_stream(self._device)
        # To the host: until the computing stream has written the source. Back: until it is done with what had the
        # memory of the target before, which the allocator hands out as soon as Python has freed it.
        self._stream.wait_stream(computing)
        # Copies of memory that is not pinned make the host wait: its allocator knows no streams, and would hand out a
        # freed buffer while the copy still runs.
        is_pinned = (source if on_device is not None else target).is_pinned()
        with torch.no_grad(), compat.devices.on_stream(self._stream):
            target.copy_(source, non_blocking=is_pinned)
        return Copy(self._stream.record_event(), computing, on_device)

    def wait(self, copy: Copy) -> None:
        """Make all later computation wait for the copy."""
        computing = torch.accelerator.current_stream(self._device)
        computing.wait_event(copy.event)
        # Memory belongs to the stream on which it was allocated. Another one that uses it has to say so, or the
        # allocator would reuse the memory while this stream still reads it.
        if copy.target is not None and computing != copy.stream:
            copy.target.record_stream(computing)

    def drop(self, copy: Copy) -> None:
        """Let a tensor of `back` be freed: the stream that has its memory waits for the copy, which nobody may have."""
        copy.stream.wait_event(copy.event)


def lane_of(device: torch.device) -> Lane | None:
    """Make the lane of a device; None for a device without streams: the CPU, or `mps`, which shares host memory."""
    stream = compat.devices.new_stream(device)
    return None if stream is None else Lane(device, stream)


# --- host memory ------------------------------------------------------------------------------------------------------


class Mover:
    """The pinned host memory of one installed plan, and the lanes that copy to and from it.

    torch caches freed pinned memory, in powers of two, and does not reuse it before copies from it have ended.

    Args:
        limit_bytes: the most host memory to use at any time, in bytes; None for no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.before: Mapping[str, str] = {}
        """Name of a block -> name of the block that runs before it."""
        self.held_bytes = 0
        """Bytes of host memory in use, rounded up to powers of two."""
        self.pins = True
        """Whether host memory is pinned: until that fails."""
        self.lock = threading.RLock()  # freeing a graph returns buffers at any time, even in the middle of `take`
        """Held while lanes are in use, or `held_bytes` changes."""
        self.of_thread = threading.local()
        """`last`: a weak reference to the last group of this thread."""
        self._lane = functools.cache(lambda device: lane_of(device))  # `lane_of` is looked up late: tests replace it

    def __reduce__(self) -> tuple[Any, ...]:
        return Mover, (self.limit_bytes,), {"before": self.before}  # memory and streams belong to this process

    def group(self, block: str, hidden: Any) -> Group | None:
        """Make a group for what the next forward of a block saves. Call its `leave_device` at the end of the forward.

        Returns None if nothing moves: on a device without a lane, or under saved-tensor hooks of the user, which say
        where tensors are kept.

        Args:
            block: name of the block.
            hidden: its hidden states.
        """
        if not isinstance(hidden, torch.Tensor) or compat.torch.is_fake(hidden):
            return None
        lane = self._lane(hidden.device)
        if lane is not None and compat.autograd.top_saved_tensor_hooks() is None:
            return Group(self, block, lane, hidden)
        why = "there are saved-tensor hooks around the model (another checkpoint, `save_on_cpu`)"
        if lane is None:
            why = f"there is no host memory to offload to from {hidden.device.type!r}"
        warn_once(log, "hf_ckpt: nothing is moved to host memory, because %s.", why)
        return None

    def take(self, size: int) -> torch.Tensor | None:
        """Return a buffer of at least `size` bytes; None, with one warning, if that exceeds the limit.

        If memory cannot be pinned, it is not pinned from now on, with one warning, and copies make the host wait. Call
        it under `lock`. With a limit, which the user has asked for, raises `HfCkptError` instead.
        """
        size = 1 << max(0, size - 1).bit_length()  # torch's pinned allocator rounds up to powers of two
        if self.limit_bytes is not None and self.held_bytes + size > self.limit_bytes:
            fact = "`host_budget` (%s, in buffers of powers of two) is used up"
            effect = "what does not fit stays on the device"
            warn_once(log, f"hf_ckpt: {fact}; {effect}.", format_bytes(self.limit_bytes))
            return None
        pin = self.pins and compat.devices.accelerator_type() is not None
        try:
            buffer = _buffer(size, pin=pin)
        except RuntimeError as error:
            why = f"{reason_of(error)}; {_why_not_pinned(size, self.held_bytes)}"
            if self.limit_bytes is not None:
                way_out = "leave `host_budget` out to offload to memory that is not pinned, or do not offload"
                raise HfCkptError(f"host memory cannot be pinned ({why}). Allow it, {way_out}.") from error
            self.pins = False
            text = "hf_ckpt: host memory cannot be pinned (%s). Offloading uses unpinned memory, which is slower."
            warn_once(log, text, why)
            buffer = _buffer(size, pin=False)
        self.held_bytes += size  # until the slot with this buffer is deleted
        return buffer


def _buffer(size: int, *, pin: bool) -> torch.Tensor:
    # `device="cpu"`: a default device, such as `with torch.device("meta")`, is not meant here.
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)


def _why_not_pinned(size: int, held_bytes: int) -> str:
    """Return in words why `size` more bytes of host memory probably cannot be pinned, beside those that are held."""
    causes = []
    limit = locked_memory_limit()
    if limit is not None and limit < held_bytes + size:
        causes.append(f"`ulimit -l` allows {format_bytes(limit)}")
    if size > LARGEST_PINNED:
        most_pinned = format_bytes(LARGEST_PINNED)
        causes.append(f"one buffer of {format_bytes(size)}, and some drivers pin at most {most_pinned}")
    mappings, most = memory_mappings()
    if most is not None and mappings >= most - MAPPINGS_LEFT:
        causes.append(f"`vm.max_map_count` allows {most:,} mappings, and the process has {mappings:,}")
    if not causes:
        return f"{format_bytes(held_bytes)} are pinned already; the host may have too little free memory"
    return f"the likely cause: {' and '.join(causes)}"


# --- tensors ----------------------------------------------------------------------------------------------------------


class Group:
    """The tensors that one forward of a block moves to host memory.

    When backward fetches the first of them, it also starts the copies of the previous block, one block ahead of their
    use. `pack` and `unpack` are the saved-tensor hooks.

    Args:
        mover: has the host memory.
        block: name of the block, for errors.
        lane: copies between the device of the block and the host.
        hidden: the block's input hidden states, the only input that may be moved.
    """

    def __init__(self, mover: Mover, block: str, lane: Lane, hidden: torch.Tensor) -> None:
        self.mover = mover
        self.block = block
        self.lane = lane
        # Weak values: a slot lives as long as the graph that holds it, so host memory is returned with the graph.
        self.slots: weakref.WeakValueDictionary[tuple[int, int], Slot] = weakref.WeakValueDictionary()
        """(storage, in-place version) -> what was moved, in this order, as long as the graph holds it."""
        self.first = compat.autograd.next_autograd_sequence_number()
        """Autograd nodes of this block have this sequence number or a larger one."""
        self.moved_bytes = 0
        self.before: Callable[[], Group | None] = getattr(mover.of_thread, "last", lambda: None)
        """Returns the group before this one, as long as its graph exists."""
        mover.of_thread.last = weakref.ref(self)
        self._input = hidden.untyped_storage()._cdata
        """The storage of `hidden`."""

    @compat.torch.untraced
    def pack(self, tensor: torch.Tensor) -> _InSlot | Kept:
        """Saved-tensor hook: move the storage of the tensor, if it is wanted there and there is host memory for it."""
        base = tensor if tensor._base is None else tensor._base
        plain = type(tensor) is torch.Tensor and tensor.dtype is base.dtype and not tensor.is_neg()
        if not plain or not self._moves(base):
            return Kept(tensor, self.block)
        # With the version: a storage that is written between two saves has other values, and needs another copy.
        key = (base.untyped_storage()._cdata, base._version)
        slot = self.slots.get(key)
        if slot is None:
            with self.mover.lock:
                buffer = self.mover.take(base.nbytes)
                if buffer is None:
                    return Kept(tensor, self.block)
                slot = self.slots[key] = Slot(self, base.detach(), buffer)
            self.moved_bytes += base.nbytes
        slot.uses += 1
        return _InSlot(slot, tensor.size(), tensor.stride(), tensor.storage_offset() - base.storage_offset())

    def _moves(self, base: torch.Tensor) -> bool:
        """Whether moving a tensor frees memory and restores the same tensor.

        Only the hidden states move, and what this block has computed.
        """
        if type(base) is not torch.Tensor or not base.is_floating_point() or base.is_inference():
            return False
        storage = base.untyped_storage()
        if not storage.nbytes() == base.nbytes > 0:  # it has gaps or overlaps
            return False
        if storage._cdata == self._input:
            return not (base.is_leaf and base.requires_grad)  # autograd holds such a leaf anyway
        node = base.grad_fn
        # A smaller sequence number: from before this block, such as a position bias that all blocks share.
        if node is None or node._sequence_nr() < self.first or base.nbytes < LEAST_BYTES:
            return False
        if node.name() != "ToCopyBackward0":
            return True
        # A cast of a parameter. Autocast caches it for all blocks that share the weight, so moving it frees nothing.
        source = node.next_functions[0][0]
        return source is None or source.name() != "torch::autograd::AccumulateGrad"

    def leave_device(self) -> None:
        """Wait for the copies; from now on the tensors are only in host memory.

        Raises `InPlaceError` if a tensor was changed since its copy began.
        """
        for slot in list(self.slots.values()):
            slot.leave_device()

    def send_back(self) -> None:
        """Start copying back all tensors that are only on the host, in the order in which backward needs them."""
        for slot in reversed(list(self.slots.values())):
            if slot.on_device is None and slot.arriving is None:
                slot.arriving = self.lane.back(slot.host)

    @staticmethod
    @compat.torch.untraced
    def unpack(packed: _InSlot | Kept) -> torch.Tensor:
        """Saved-tensor hook: return the tensor that `pack` got. Raises `InPlaceError` if it was changed."""
        if isinstance(packed, Kept):
            return packed.value()
        moved = packed.slot.fetch()
        if moved.size() == packed.size and moved.stride() == packed.stride:
            return moved
        return moved.as_strided(packed.size, packed.stride, moved.storage_offset() + packed.offset)


class _InSlot(NamedTuple):
    """Replaces a saved tensor: a view of the moved tensor in a slot."""

    slot: Slot
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any
    """Offset of the view in the moved tensor, in elements."""


class Slot:
    """One tensor on its way to host memory, there, or on its way back."""

    def __init__(self, group: Group, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        self.group = group
        self.buffer = buffer
        self.uses = 0
        """How often one backward fetches it, as counted by `Group.pack`."""
        self._left = 0
        """How often the current backward will still fetch it."""
        self.arriving: tuple[torch.Tensor, Any] | None = None
        """(tensor, copy) once the copy back has started; else None."""
        flat = buffer[: tensor.nbytes].view(tensor.dtype)
        self.host = flat.as_strided(tensor.size(), tensor.stride())
        self.on_device: Seen | None = Seen(tensor)
        """The tensor on the device; None after the wait for its copy."""
        self._copy = group.lane.out(tensor, self.host)

    def check(self) -> None:
        """Raise `InPlaceError` if the tensor is still on the device and was changed since it was sent."""
        if self.on_device is not None and self.on_device.is_overwritten:
            raise InPlaceError(self.group.block, self.on_device.tensor, self.on_device.version)

    def leave_device(self) -> None:
        """Wait for the copy and free the tensor. Raises `InPlaceError` as `check` does."""
        self.check()
        with self.group.mover.lock:
            self.group.lane.wait(self._copy)
        self.on_device = None

    def fetch(self) -> torch.Tensor:
        """Return the tensor on its device, and start copying back what the block before has moved.

        Raises `InPlaceError` if the tensor is still on the device and was changed there.
        """
        self.check()
        if self.on_device is not None:  # its block still runs
            return self.on_device.tensor
        group = self.group
        with group.mover.lock:  # two threads may run backward through one graph
            if self.arriving is None:
                group.send_back()
            assert self.arriving is not None
            tensor, copy = self.arriving
            group.lane.wait(copy)
            if not self._left:  # the first use in this backward
                self._left = self.uses
            # The last one. (The first use of a segment's first input is for the other blocks of the segment.) If the
            # block before moves tensors, too, it comes next, and its copies run while this one computes. Those of an
            # earlier block would lie on the device until its backward.
            if self._left == 1:
                before = group.before()
                is_next = before is not None and before.block == group.mover.before.get(group.block)
                if before is not None and is_next and before.lane is group.lane:
                    before.send_back()
            self._left -= 1
            # After the last use, only the backward holds the tensor. With `retain_graph`, another one copies again.
            if not self._left:
                self.arriving = None
        return tensor

    def __del__(self) -> None:
        mover = self.group.mover
        with mover.lock:
            if self.arriving is not None:
                self.group.lane.drop(self.arriving[1])
            mover.held_bytes -= self.buffer.nbytes
