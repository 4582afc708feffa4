"""`offload`: hold what autograd saves in pinned host memory between a block's forward and its backward.

Saved-tensor hooks around a block see the tensors that autograd saves there: under `full` the block's inputs, under
`selective` the results that it keeps. Hidden states, and what the block itself has computed, move. Masks, parameters
and whatever several blocks share stay. Copies run on their own stream: to the host while blocks compute, and back one
block ahead of the backward.

Hidden states exist when a block begins. So at its end the computing stream waits for their copy, and their memory is
free when the next block begins. Results are computed until the end of a block, so the computing stream waits for their
copies one block later. Copies of at most two blocks run at any time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from hf_ckpt import compat
from hf_ckpt.engines.full import FullRegion, needs_gradient
from hf_ckpt.engines.rebuild.values import Kept
from hf_ckpt.engines.region import Region, Request
from hf_ckpt.errors import InPlaceError
from hf_ckpt.logs import warn_once
from hf_ckpt.units import format_bytes

log = logging.getLogger(__name__)

LEAST_BYTES = 2**18
"""The smallest result that `selective` moves, in bytes: every copy also has a fixed cost."""


# --- copies -----------------------------------------------------------------------------------------------------------


class Copy(NamedTuple):
    """A copy that was started."""

    event: Any
    """Recorded on the copying stream at the end of the copy."""
    stream: Any
    """The computing stream when the copy was started. The target was allocated on it."""
    made: torch.Tensor | None
    """The target of a copy to the device; None for a copy to the host."""


class Lane:
    """Copies between an accelerator and the host, one after another, on a stream that nothing else uses.

    Threads that run blocks on the same device share its lane. `Mover.lock` is held in every call.

    It avoids `record_stream` where possible. The allocator reuses recorded memory only once the device has reached that
    point, and Python, which runs ahead of the device, would allocate new memory for every block. Instead the stream
    that the memory belongs to waits for the copy before the memory is freed.
    """

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._device, self._stream = device, stream

    def out(self, tensor: torch.Tensor, host: torch.Tensor) -> Any:
        """Start copying `tensor` into `host`. Returns the copy, for `wait`. The caller holds `tensor` until then."""
        return self._begin(tensor, host, None)

    def back(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start copying `host` to the device. Returns (tensor, copy). Use the tensor only after `wait(copy)`."""
        made = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self._device)
        return made, self._begin(host, made, made)  # waits until the computing stream is done with that memory

    def _begin(self, source: torch.Tensor, target: torch.Tensor, made: torch.Tensor | None) -> Copy:
        computing = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.no_grad(), compat.devices.on_stream(self._stream):
            target.copy_(source, non_blocking=True)
        return Copy(self._stream.record_event(), computing, made)

    def wait(self, copy: Copy) -> None:
        """Make all later computation wait for the copy."""
        computing = torch.accelerator.current_stream(self._device)
        computing.wait_event(copy.event)
        if copy.made is not None and computing != copy.stream:
            copy.made.record_stream(computing)

    def drop(self, copy: Copy) -> None:
        """Called before a tensor of `back` is freed, because nobody may have waited for its copy."""
        copy.stream.wait_event(copy.event)


def lane_of(device: torch.device) -> Lane | None:
    """Make the lane of a device; None for a device without streams: the CPU, or `mps`, which shares host memory."""
    stream = compat.devices.new_stream(device)
    return None if stream is None else Lane(device, stream)


# --- host memory ------------------------------------------------------------------------------------------------------


class _OfThread(threading.local):
    """The blocks that a thread has run last."""

    last: weakref.ref[Group] | None = None
    """The last one that moved anything."""
    open: Group | None = None
    """The one that has ended, but whose copies nobody has waited for."""


class Mover:
    """The pinned host memory of one installed plan, and the lanes that copy to and from it.

    Args:
        limit_bytes: the most host memory to allocate, in bytes; None for no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        """Bytes of allocated host memory, rounded up to powers of two."""
        self.lock = threading.RLock()  # freeing a graph returns buffers at any time, even in the middle of `take`
        """Held while buffers or lanes are in use."""
        self.of_thread = _OfThread()
        self._lanes: dict[torch.device, Lane | None] = {}
        self._free: dict[tuple[Lane, int], list[torch.Tensor]] = {}
        """Free buffers by lane and size. A free buffer may still be read, and only copies on its own lane are sure to
        come later."""
        self._can_pin = True
        """Whether pinning host memory has always worked so far."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Mover, (self.limit_bytes,)  # memory and streams belong to this process

    @contextlib.contextmanager
    def moving(self, block: str, hidden: Any, *, late: bool) -> Iterator[Group | None]:
        """Make a group for what the forward of a block saves, which runs inside this context.

        Yields None if nothing moves: on a device without a lane, or under saved-tensor hooks of the user, which say
        where tensors are kept. Raises `InPlaceError` if a tensor was changed during its copy.

        Args:
            block: name of the block.
            hidden: its hidden states.
            late: whether the computing stream waits for the copies at the end of the next block, not of this one.
        """
        lane = self.lane(hidden) if isinstance(hidden, torch.Tensor) else None
        if lane is not None and compat.torch.top_saved_tensor_hooks() is not None:
            warn_once(
                log,
                "hf_ckpt: nothing is moved to host memory, because there are saved-tensor hooks around the model "
                "(another checkpoint, `save_on_cpu`), which say where it is kept.",
            )
            lane = None
        if lane is None:
            yield None
            return
        group = Group(self, block, lane, hidden, LEAST_BYTES if late else 1)
        try:
            yield group
            group.check()
        except BaseException:
            group.leave_device()
            raise
        if late:
            self.end_of_block(group)
        else:
            group.leave_device()

    def lane(self, tensor: torch.Tensor) -> Lane | None:
        """Return the lane of a tensor's device; None, with one warning, if nothing is moved from there."""
        device = tensor.device
        if device not in self._lanes:
            if compat.torch.is_fake(tensor):
                return None
            with self.lock:
                if device not in self._lanes:
                    self._lanes[device] = lane_of(device)
            if self._lanes[device] is None:
                warn_once(
                    log,
                    "hf_ckpt: there is no host memory to offload to from %r, so blocks are recomputed from inputs that "
                    "stay there, as with `full`.",
                    device.type,
                )
        return self._lanes[device]

    def end_of_block(self, group: Group | None) -> None:
        """End the block of `group`, whose copies may still be running, and wait for those of the previous block."""
        before, self.of_thread.open = self.of_thread.open, group
        if before is not None:
            try:
                before.check()
            finally:
                before.leave_device()

    def take(self, lane: Lane, size: int) -> torch.Tensor | None:
        """Return a buffer of at least `size` bytes; None, with one warning, if that exceeds the limit.

        If the limit is reached, a larger free buffer will do. If there is none either, all free ones are given back to
        the system, because batches have become larger.
        """
        size = 1 << max(0, size - 1).bit_length()  # torch's pinned allocator rounds up to powers of two
        limit = math.inf if self.limit_bytes is None else self.limit_bytes
        with self.lock:
            self._free.setdefault((lane, size), [])  # `give` must not add keys while others iterate
            large = [free for (of, free), buffers in self._free.items() if of is lane and free >= size and buffers]
            if not large and self.held_bytes + size > limit >= self.held_bytes - self.free_bytes + size:
                for (_, free), buffers in self._free.items():
                    self.held_bytes -= free * len(buffers)
                    buffers.clear()
                compat.devices.empty_host_cache()
            if size not in large and self.held_bytes + size <= limit:
                buffer = self._pinned(size)
                self.held_bytes += size
            elif large:
                buffer = self._free[lane, min(large)].pop()
            else:
                warn_once(
                    log,
                    "hf_ckpt: `host_budget` (%s, in buffers of powers of two) is used up; what does not fit stays on "
                    "the device.",
                    format_bytes(self.limit_bytes or 0),
                )
                return None
        return buffer

    @property
    def free_bytes(self) -> int:
        """How many of `held_bytes` are free."""
        with self.lock:
            return sum(size * len(buffers) for (_, size), buffers in self._free.items())

    def give(self, lane: Lane, buffer: torch.Tensor) -> None:
        """Put back a buffer of `take` that is no longer needed."""
        with self.lock:
            self._free[lane, buffer.numel()].append(buffer)

    def _pinned(self, size: int) -> torch.Tensor:
        if self._can_pin:
            try:
                pin = compat.devices.accelerator_type() is not None
                return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
            except RuntimeError as error:
                self._can_pin = False
                warn_once(
                    log,
                    "hf_ckpt: host memory cannot be pinned (%s); unpinned memory is used, whose copies are slow.",
                    str(error).partition("\n")[0],
                )
        return torch.empty(size, dtype=torch.uint8, device="cpu")


# --- tensors ----------------------------------------------------------------------------------------------------------


class Group:
    """The tensors that one forward of a block moves to host memory.

    When backward fetches the first of them, it also starts the copies of the previous group, one block ahead of their
    use. `pack` and `unpack` are the saved-tensor hooks.

    Args:
        mover: has the host memory.
        block: name of the block, for errors.
        lane: copies between the device of the block and the host.
        hidden: the block's input hidden states.
        least_bytes: the size of the smallest tensor to move.
    """

    def __init__(self, mover: Mover, block: str, lane: Lane, hidden: torch.Tensor, least_bytes: int = 1) -> None:
        self.mover, self.block, self.lane, self.least_bytes = mover, block, lane, least_bytes
        self.slots: list[weakref.ref[Slot]] = []
        self.first = compat.torch.next_autograd_sequence_number()
        """Autograd nodes of this block have this sequence number or a larger one."""
        self.moved_bytes = 0
        self._before: weakref.ref[Group] | None = None
        """The group that moved tensors before this one."""
        self.on_device: list[Slot] = []
        """Slots whose tensors are still on the device."""
        self._by_storage: dict[int, Slot] = {}
        self._input: int | None = hidden.untyped_storage()._cdata
        """The storage of the only input of the block that may be moved; None once the block has ended."""

    @compat.torch.untraced
    def pack(self, tensor: torch.Tensor) -> _InSlot | Kept:
        """Saved-tensor hook: move the storage of the tensor, if it is wanted there and there is host memory for it.

        What stays is kept without its graph: a node that holds its own result would not be freed without a backward.
        """
        base = tensor if tensor._base is None else tensor._base
        plain = type(tensor) is torch.Tensor and tensor.dtype is base.dtype and not tensor.is_neg()
        if not plain or not self._moves(base):
            return Kept(tensor, self.block)
        key = base.untyped_storage()._cdata
        slot = self._by_storage.get(key)
        if slot is None or slot.version != base._version:
            slot = self.send(base.detach())
            if slot is None:
                return Kept(tensor, self.block)
            self._by_storage[key] = slot
        slot.uses += 1
        return _InSlot(slot, tensor.size(), tensor.stride(), tensor.storage_offset() - base.storage_offset())

    def _moves(self, base: torch.Tensor) -> bool:
        """Whether moving a tensor frees memory and restores the same tensor. Leaves stay: autograd holds them anyway.

        Only the hidden states and what this block has computed move. A cast parameter does not: autocast shares it.
        """
        if type(base) is not torch.Tensor or not base.is_floating_point() or base.is_inference():
            return False
        storage, node = base.untyped_storage(), base.grad_fn
        if not (storage.nbytes() == base.nbytes >= self.least_bytes and _is_dense(base)):
            return False
        if storage._cdata == self._input:
            return not (base.is_leaf and base.requires_grad)
        if node is None or node._sequence_nr() < self.first:
            return False
        if node.name() != "ToCopyBackward0":
            return True
        source = node.next_functions[0][0]
        return source is None or source.name() != "torch::autograd::AccumulateGrad"

    def send(self, tensor: torch.Tensor) -> Slot | None:
        """Start moving a tensor without gaps in memory; None if there is no host memory for it."""
        with self.mover.lock:
            buffer = self.mover.take(self.lane, tensor.nbytes)
            if buffer is None:
                return None
            slot = Slot(self, tensor, buffer)
        if not self.slots:
            self._before, self.mover.of_thread.last = self.mover.of_thread.last, weakref.ref(self)
        self.slots.append(weakref.ref(slot))
        self.on_device.append(slot)
        self.moved_bytes += tensor.nbytes
        return slot

    def check(self) -> None:
        """Raise `InPlaceError` if a tensor that is still on the device was changed since its copy began."""
        self._by_storage.clear()
        self._input = None
        for slot in self.on_device:
            slot.check()

    def leave_device(self) -> None:
        """Wait for the copies; from now on the tensors are only in host memory."""
        self._by_storage.clear()
        while self.on_device:
            self.on_device.pop(0).leave_device()

    def send_back(self) -> None:
        """Start copying back all tensors that are only on the host, in the order in which backward needs them."""
        for reference in reversed(self.slots):
            slot = reference()
            if slot is not None and slot.tensor is None and slot.arriving is None:
                slot.arriving = self.lane.back(slot.host)

    def send_back_before(self) -> None:
        """Start copying back the tensors of the previous group."""
        before = self._before() if self._before is not None else None
        if before is not None and before.lane is self.lane:
            before.send_back()

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
        self.group, self.buffer = group, buffer
        self.version = tensor._version
        self.uses = 0
        """How often one backward fetches it, as counted by `Group.pack`; 0 if not counted, which means once."""
        self._left = 0
        """How often the current backward will still fetch it."""
        self.arriving: tuple[torch.Tensor, Any] | None = None
        """(tensor, copy) once the copy back has started; else None."""
        flat = buffer[: tensor.nbytes].view(tensor.dtype)
        self.host = flat.as_strided(tensor.size(), tensor.stride())
        self.tensor: torch.Tensor | None = tensor
        """The tensor on the device; None after the wait for its copy."""
        self._copy = group.lane.out(tensor, self.host)

    def check(self) -> None:
        """Raise `InPlaceError` if the tensor is still on the device and was changed since it was sent."""
        tensor = self.tensor
        if tensor is not None and tensor._version != self.version:
            raise InPlaceError(self.group.block, tensor, self.version)

    def leave_device(self) -> None:
        """Wait for the copy and free the tensor."""
        tensor, self.tensor = self.tensor, None
        if tensor is not None:
            with self.group.mover.lock:
                self.group.lane.wait(self._copy)

    def fetch(self) -> torch.Tensor:
        """Return the tensor on its device, and start copying back the previous group.

        Raises `InPlaceError` if the tensor is still on the device and was changed there.
        """
        self.check()
        tensor = self.tensor
        if tensor is not None:  # its block has only just run
            return tensor
        with self.group.mover.lock:  # two threads may run backward through one graph
            if self.arriving is None:
                self.group.send_back()
            assert self.arriving is not None
            made, copy = self.arriving
            self.group.lane.wait(copy)
            if not self._left:
                self._left = max(1, self.uses)
                self.group.send_back_before()
            self._left -= 1
            if not self._left:
                self.arriving = None
        return made

    def __del__(self) -> None:
        lane, mover = self.group.lane, self.group.mover
        with mover.lock:
            if self.arriving is not None:
                lane.drop(self.arriving[1])
            mover.give(lane, self.buffer)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor have no gaps in memory, in any order of its dimensions."""
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != length:
                return False
            length *= size
    return True


# --- the engine -------------------------------------------------------------------------------------------------------


class OffloadRegion(FullRegion):
    """The checkpointing function of a block that is recomputed from hidden states in host memory.

    Args:
        block: name of the block.
        mover: has the host memory.
        known: whether the block's in-place changes are known. If not, its first forward moves nothing.
        options: keyword arguments for `torch.utils.checkpoint`.
    """

    def __init__(self, block: str, mover: Mover, *, known: bool = True, **options: Any) -> None:
        super().__init__(block, **options)
        self.mover, self.known = mover, known
        self.moved_bytes = 0
        self._is_frozen = False
        """Whether the last output required no gradient, so that there was nothing to keep or move."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward; `args[0]` are the hidden states, [batch, tokens, hidden size].

        Raises `InPlaceError` if the block changes hidden states during their copy, and `GraphCaptureError` if
        random state is preserved while a CUDA graph is captured.
        """
        if not torch.is_grad_enabled() or compat.torch.is_compiling():
            return super().__call__(fn, *args)
        fn, args = compat.transformers.block_call(fn, args)
        hidden = args[0] if args else None
        if self.changes_input or not (self.known or self.changes_input is False):
            hidden = None  # it is recomputed from a copy, which `full` holds
        elif self._is_frozen and isinstance(hidden, torch.Tensor) and not hidden.requires_grad:
            hidden = None
        with contextlib.ExitStack() as around:
            group = around.enter_context(self.mover.moving(self.block, hidden, late=False))
            if group is not None:
                around.enter_context(saved_tensors_hooks(group.pack, group.unpack))  # these see only `args`
            output = super().__call__(fn, *args)
        self._is_frozen = not needs_gradient(output)
        self.moved_bytes = 0 if group is None or self._is_frozen else group.moved_bytes
        return output


def make(request: Request) -> Region:
    """The engine of `offload`. The last block of a stack gets `full`, because its backward comes first."""
    if request.mover is None:
        return FullRegion(request.block, **request.options)
    return OffloadRegion(request.block, request.mover, known=request.known, **request.options)


class EndOfStack:
    """Forward hook of a module that runs a stack: wait for the copies of its last block, as no block follows."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Wait for those copies."""
        if not compat.torch.is_compiling():
            self.mover.end_of_block(None)
