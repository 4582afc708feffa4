"""Pinned host memory, and the streams that copy to and from it. A `Mover` has both, for one installed plan."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from hf_ckpt import compat
from hf_ckpt.logs import warn_once
from hf_ckpt.units import format_bytes

log = logging.getLogger("hf_ckpt.engines.offload")  # all warnings of the engine come from one logger

LEAST_BYTES = 2**18
"""The smallest tensor that `selective` moves, in bytes: every copy also has a fixed cost."""


class Lane(Protocol):
    """Copies between one device and the host, one after another, while the device computes.

    Threads that run blocks on the same device share its lane. `Mover.lock` is held in every call, so a lane need not be
    thread-safe.
    """

    def out(self, tensor: torch.Tensor, host: torch.Tensor) -> Any:
        """Start copying `tensor` into `host`. Returns the copy, for `wait`. The caller holds `tensor` until then."""

    def back(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start copying `host` to the device. Returns (tensor, copy). Use the tensor only after `wait(copy)`."""

    def wait(self, copy: Any) -> None:
        """Make all later computation wait for the copy."""

    def drop(self, copy: Any) -> None:
        """Called before a tensor of `back` is freed, because nobody may have waited for its copy."""


class _Copy(NamedTuple):
    """A copy that was started."""

    event: Any
    """Recorded on the copying stream at the end of the copy."""
    stream: Any
    """The computing stream when the copy was started. The target was allocated on it."""
    made: torch.Tensor | None
    """The target of a copy to the device; None for a copy to the host."""


class StreamLane:
    """A `Lane` that copies on a stream of the accelerator.

    Args:
        device: the accelerator.
        stream: a stream of it, which nothing else uses.

    It avoids `record_stream` where possible. The allocator reuses recorded memory only once the device has reached that
    point, and Python, which runs ahead of the device, would allocate new memory for every block. Instead the stream
    that the memory belongs to waits for the copy before the memory is freed.
    """

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._device, self._stream = device, stream

    def out(self, tensor: torch.Tensor, host: torch.Tensor) -> Any:
        return self._begin(tensor, host, None)

    def back(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        made = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self._device)
        return made, self._begin(host, made, made)  # waits until the computing stream is done with that memory

    def _begin(self, source: torch.Tensor, target: torch.Tensor, made: torch.Tensor | None) -> _Copy:
        computing = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.no_grad(), compat.on_stream(self._stream):
            target.copy_(source, non_blocking=True)
        return _Copy(self._stream.record_event(), computing, made)

    def wait(self, copy: _Copy) -> None:
        computing = torch.accelerator.current_stream(self._device)
        computing.wait_event(copy.event)
        if copy.made is not None and computing != copy.stream:
            copy.made.record_stream(computing)

    def drop(self, copy: _Copy) -> None:
        copy.stream.wait_event(copy.event)


def lane_of(device: torch.device) -> Lane | None:
    """Make the lane of a device; None for a device without streams: the CPU, or `mps`, which shares host memory."""
    stream = compat.new_stream(device)
    return None if stream is None else StreamLane(device, stream)


class Mover:
    """The pinned host memory of one installed plan, and the lanes that copy to and from it.

    Args:
        limit_bytes: the most host memory to allocate, in bytes; None for no limit.
        make_lane: makes the lane of a device, or returns None to move nothing from it; `lane_of` by default.
    """

    def __init__(
        self, limit_bytes: int | None = None, make_lane: Callable[[torch.device], Lane | None] | None = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self.least_bytes = LEAST_BYTES
        self.held_bytes = 0
        """Bytes of allocated host memory, rounded up to powers of two."""
        self.lock = threading.RLock()  # freeing a graph returns buffers at any time, even in the middle of `take`
        """Held while buffers or lanes are in use."""
        self._make_lane = make_lane or lane_of
        self._lanes: dict[torch.device, Lane | None] = {}
        self._free: dict[tuple[Lane, int], list[torch.Tensor]] = {}
        """Free buffers by lane and size. A free buffer may still be read, and only copies on its own lane are sure to
        come later."""
        self._in_use = 0
        """Number of buffers that are not free."""
        self._can_pin = True
        """Whether pinning host memory has always worked so far."""
        self._last = _LastGroup()

    def lane(self, tensor: torch.Tensor) -> Lane | None:
        """Return the lane of a tensor's device; None, with one warning, if nothing is moved from there."""
        device = tensor.device
        if device not in self._lanes:
            if compat.is_fake(tensor):
                return None
            with self.lock:
                if device not in self._lanes:
                    self._lanes[device] = self._make_lane(device)
            if self._lanes[device] is None:
                _tell_no_lane(device.type)
        return self._lanes[device]

    def follow(self, group: Any) -> weakref.ref[Any] | None:
        """Record that a `moved.Group` moves its first tensor. Returns the previous such group of this thread."""
        before, self._last.group = self._last.group, weakref.ref(group)
        return before

    def end_of_block(self, group: Any) -> None:
        """End the block of `group`, whose copies may still be running, and wait for those of the previous block."""
        before, self._last.open = self._last.open, group
        if before is not None:
            before.close()

    def take(self, lane: Lane, size: int) -> torch.Tensor | None:
        """Return a buffer of at least `size` bytes; None, with one warning, if that exceeds the limit."""
        rounded = 1 << max(0, size - 1).bit_length()  # torch's pinned allocator rounds up to powers of two
        with self.lock:
            free = self._free.setdefault((lane, rounded), [])  # `give` must not add keys while others iterate
            buffer = free.pop() if free else self._new(rounded)
            if buffer is None:
                buffer = self._larger(lane, rounded)
            if buffer is None:
                buffer = self._anew(rounded)
            self._in_use += buffer is not None
        if buffer is None and self.limit_bytes is not None:
            _tell_limit(self.limit_bytes)
        return buffer

    def give(self, lane: Lane, buffer: torch.Tensor) -> None:
        """Put back a buffer of `take` that is no longer needed."""
        with self.lock:
            self._in_use -= 1
            self._free[lane, buffer.numel()].append(buffer)

    def _new(self, size: int) -> torch.Tensor | None:
        """Allocate another buffer; None if that would exceed the limit."""
        if self.limit_bytes is not None and self.held_bytes + size > self.limit_bytes:
            return None
        buffer = self._pinned(size)
        self.held_bytes += size
        return buffer

    def _larger(self, lane: Lane, size: int) -> torch.Tensor | None:
        """Return the smallest free buffer of this lane that is larger than `size`; None if there is none."""
        sizes = [free for (of, free), buffers in self._free.items() if of is lane and free > size and buffers]
        return self._free[lane, min(sizes)].pop() if sizes else None

    def _anew(self, size: int) -> torch.Tensor | None:
        """Free all buffers, if none is in use, and allocate one of a new size, because batches have become larger."""
        if self._in_use or self.limit_bytes is None or size > self.limit_bytes:
            return None
        for buffers in self._free.values():
            buffers.clear()
        self.held_bytes = 0
        compat.empty_host_cache()
        return self._new(size)

    def _pinned(self, size: int) -> torch.Tensor:
        if self._can_pin:
            try:
                pin = compat.accelerator_type() is not None
                return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pin)
            except RuntimeError as error:
                self._can_pin = False
                _tell_unpinned(str(error).partition("\n")[0])
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def __reduce__(self) -> tuple[Any, ...]:
        return Mover, (self.limit_bytes,)  # memory and streams belong to this process

    def __deepcopy__(self, memo: dict[int, Any]) -> Mover:
        made = memo[id(self)] = Mover(self.limit_bytes, self._make_lane)
        return made


class _LastGroup(threading.local):
    """The groups that a thread has used last."""

    group: weakref.ref[Any] | None = None
    """The last group that moved anything."""
    open: Any = None
    """The group whose block has ended but whose copies nobody has waited for."""


def _tell_no_lane(device_type: str) -> None:
    warn_once(
        log,
        "hf_ckpt: there is no host memory to offload to from %r, so blocks are recomputed from inputs that stay there, "
        "as with `full`.",
        device_type,
    )


def _tell_limit(limit_bytes: int) -> None:
    warn_once(
        log,
        "hf_ckpt: `host_budget` (%s, in buffers of powers of two) is used up; what does not fit stays on the device.",
        format_bytes(limit_bytes),
    )


def _tell_unpinned(reason: str) -> None:
    warn_once(
        log, "hf_ckpt: host memory cannot be pinned (%s); unpinned memory is used, whose copies are slow.", reason
    )
