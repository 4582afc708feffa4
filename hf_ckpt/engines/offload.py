"""`offload`: what a block keeps lies in pinned host memory between its forward and its backward.

Copies run on a stream of their own: out while blocks compute, and back one block ahead of the backward. Hidden states
are there from the beginning of a block, so its forward ends by making the computing stream wait for their copy, and
their memory is free when the next block begins. Results that `selective` keeps are made up to the end of a block, so
those are waited for one block later. At no time more than two blocks' copies are under way.

`OffloadRegion` moves the hidden states that `full` keeps; `Group.pack` and `Group.unpack` are the saved-tensor hooks
that move what `selective` keeps. Without an accelerator nothing is moved.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch

from hf_ckpt import compat
from hf_ckpt.engines.full import FullRegion, needs_gradient
from hf_ckpt.engines.values import Kept
from hf_ckpt.errors import InPlaceError
from hf_ckpt.units import format_bytes

log = logging.getLogger(__name__)

LEAST_BYTES = 2**18
"""Smaller results of `selective` stay: a copy has a price of its own."""


class Lane(Protocol):
    """Copies between one device and the host, one after another, beside what the device computes."""

    def out(self, tensor: torch.Tensor, host: torch.Tensor) -> Any:
        """Start copying to the host; returns what `wait` takes. `tensor` is held until then."""

    def back(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Start copying to the device; returns the copy, to be used after `wait`."""

    def wait(self, copy: Any) -> None:
        """What is computed from here on comes after that copy."""

    def drop(self, copy: Any) -> None:
        """What was being copied to the device is let go, and may never have been waited for."""


class _Copy(NamedTuple):
    """A copy under way."""

    event: Any
    stream: Any
    """The stream that computed when it was begun: what it writes to was allocated there."""
    made: torch.Tensor | None
    """What it writes to, on the device."""


class StreamLane:
    """A stream of the accelerator.

    Memory is told to the allocator by no `record_stream`, as far as possible: what that guards is given back only once
    the device has come so far, and Python, which is ahead of the device, would take new memory for every block. Instead
    the stream that the memory belongs to waits for the copy before the memory is let go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def out(self, tensor: torch.Tensor, host: torch.Tensor) -> Any:
        return self._begin(tensor, host, None)

    def back(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        made = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self._device)
        return made, self._begin(host, made, made)  # after what the computing stream still does in that memory

    def _begin(self, source: torch.Tensor, target: torch.Tensor, made: torch.Tensor | None) -> _Copy:
        computing = self._module.current_stream(self._device)
        self._stream.wait_stream(computing)
        with torch.no_grad(), self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return _Copy(self._stream.record_event(), computing, made)

    def wait(self, copy: _Copy) -> None:
        computing = self._module.current_stream(self._device)
        computing.wait_event(copy.event)
        if copy.made is not None and computing != copy.stream:
            copy.made.record_stream(computing)

    def drop(self, copy: _Copy) -> None:
        copy.stream.wait_event(copy.event)


class Mover:
    """Host memory and lanes of one installation.

    Args:
        limit_bytes: of host memory; None for no limit.
        make_lane: device -> lane; None for a device that nothing is moved from.
    """

    def __init__(
        self, limit_bytes: int | None = None, make_lane: Callable[[torch.device], Lane | None] | None = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self.least_bytes = LEAST_BYTES
        self.held_bytes = 0
        """Host memory taken, as the allocator rounds it."""
        self.lock = threading.RLock()  # buffers come back whenever a graph is let go, also in the middle of `take`
        self._make_lane = make_lane or lane_of
        self._lanes: dict[torch.device, Lane | None] = {}
        self._free: dict[tuple[Lane, int], list[torch.Tensor]] = {}
        """By lane, because only copies of one lane come one after another: a buffer may still be read from."""
        self._in_use = 0
        """How many buffers are."""
        self._can_pin = True
        self._last = _LastGroup()

    def lane(self, tensor: torch.Tensor) -> Lane | None:
        """The lane of a tensor's device; None where nothing is moved, which is said once."""
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

    def open(self, block: str, lane: Lane, hidden: torch.Tensor) -> Group:
        """A place for what one forward of a block moves; `hidden` are its hidden states."""
        return Group(self, block, lane, hidden)

    def follow(self, group: Group) -> weakref.ref[Group] | None:
        """`group` begins to move something; returns what this thread moved before."""
        before, self._last.group = self._last.group, weakref.ref(group)
        return before

    def end_of_block(self, group: Group | None) -> None:
        """Let go of what the block before it has moved; what `group` moves may still be under way."""
        before, self._last.open = self._last.open, group
        if before is not None:
            before.close()

    def take(self, lane: Lane, size: int) -> torch.Tensor | None:
        """A buffer of `size` bytes or more; None where that is above the limit, which is said once."""
        rounded = 1 << max(0, size - 1).bit_length()  # torch's pinned allocator rounds up to powers of two
        with self.lock:
            free = self._free.setdefault((lane, rounded), [])  # here, so that no `give` adds a key while others look
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
        """A buffer is not needed any more."""
        with self.lock:
            self._in_use -= 1
            self._free[lane, buffer.numel()].append(buffer)

    def _new(self, size: int) -> torch.Tensor | None:
        """Another buffer, if there may be one."""
        if self.limit_bytes is not None and self.held_bytes + size > self.limit_bytes:
            return None
        buffer = self._pinned(size)
        self.held_bytes += size
        return buffer

    def _larger(self, lane: Lane, size: int) -> torch.Tensor | None:
        """The smallest that is free and large enough."""
        sizes = [free for (of, free), buffers in self._free.items() if of is lane and free > size and buffers]
        return self._free[lane, min(sizes)].pop() if sizes else None

    def _anew(self, size: int) -> torch.Tensor | None:
        """The first buffer of other sizes than before: batches have become larger."""
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
    """Of this thread."""

    group: weakref.ref[Group] | None = None
    """That began to move something last."""
    open: Group | None = None
    """Whose block has ended, and whose copies have not been waited for."""


class EndOfStack:
    """Forward hook of whatever runs a stack: no more blocks come to wait for what the last one has moved."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Wait for it."""
        if not compat.is_compiling():
            self.mover.end_of_block(None)


class Group:
    """What one forward of one block has moved. Fetching from it has what was moved before it sent back, too."""

    def __init__(self, mover: Mover, block: str, lane: Lane, hidden: torch.Tensor) -> None:
        self.mover, self.block, self.lane = mover, block, lane
        self.slots: list[weakref.ref[Slot]] = []
        self.first = compat.next_autograd_sequence_number()
        self.moved_bytes = 0
        self._before: weakref.ref[Group] | None = None
        self._open: list[Slot] = []
        """Those whose tensors are still on the device."""
        self._by_storage: dict[int, Slot] = {}
        self._input: torch.Tensor | None = hidden
        """The one thing given to the block that may be moved."""
        self._outer = compat.top_saved_tensor_hooks()
        """Those of the user, around the model."""

    def send(self, tensor: torch.Tensor) -> Slot | None:
        """Start moving a tensor that is contiguous in memory, in any order of its dimensions; None without room."""
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
        """The forward of the block has ended: from here on its tensors are in host memory only.

        Raises `InPlaceError` when one was changed while it was copied.
        """
        self._raise_first([slot.leave_device() for slot in self._forget()])

    def close_late(self) -> None:
        """As `close`, but once the next block has ended: some copies have only just begun."""
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
        """The block has raised an error, or nothing of it is needed in backward."""
        for slot in self._forget():
            slot.leave_device()

    def _forget(self) -> list[Slot]:
        opened, self._open = self._open, []
        self._by_storage.clear()
        self._input = None
        return opened

    def send_back(self) -> None:
        """Start copying back all that is not there, in the order in which a backward asks for it."""
        for found in reversed(self.slots):
            slot = found()
            if slot is not None:
                slot.send_back()

    def send_back_before(self) -> None:
        """Start copying back what was moved before this."""
        before = self._before() if self._before is not None else None
        if before is not None and before.lane is self.lane:
            before.send_back()

    # --- as saved-tensor hooks ---

    @compat.untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        """Move a tensor that this block made; everything else (masks, parameters, what others share) stays.

        Where the user has hooks, what stays is for those to say.
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
        """Without its graph: a node that held its own result would never be freed without a backward."""
        return Kept(tensor, self.block)

    def _is_wanted(self, tensor: torch.Tensor, base: torch.Tensor) -> bool:
        """Whether to move the storage of `tensor`, which is a view of all or of a part of `base`."""
        size = tensor.untyped_storage().nbytes()
        return (
            size >= self.mover.least_bytes
            and (self._made_here(base) or (self._input is not None and _same_storage(base, self._input)))
            and size == base.nbytes
            and tensor.dtype is base.dtype
            and not tensor.is_neg()
            and _movable(base)
        )

    def _made_here(self, tensor: torch.Tensor) -> bool:
        """Whether an operation of this block made it, a cast of a parameter apart, which autocast lends to all."""
        node = tensor.grad_fn
        if node is None or node._sequence_nr() < self.first:
            return False
        return not (node.name() == "ToCopyBackward0" and _is_leaf(node.next_functions[0][0]))

    @staticmethod
    @compat.untraced
    def unpack(packed: Any) -> torch.Tensor:
        """What `pack` was given."""
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
    """A view of what was moved, in place of a saved tensor."""

    slot: Slot
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class _ByUser(NamedTuple):
    """What the user's hooks made of a saved tensor."""

    packed: Any
    restore: Callable[[Any], torch.Tensor]


class Slot:
    """One tensor, on its way or in host memory."""

    def __init__(self, group: Group, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        self.group, self.buffer = group, buffer
        self.version = tensor._version
        self.uses = 0
        """Places that will fetch it in one backward; 0 where one does."""
        self._left = 0
        self._arriving: tuple[torch.Tensor, Any] | None = None
        flat = buffer[: tensor.nbytes].view(tensor.dtype)
        self.host = flat.as_strided(tensor.size(), tensor.stride())
        self._tensor: torch.Tensor | None = tensor
        self._copy = group.lane.out(tensor, self.host)

    def leave_device(self) -> InPlaceError | None:
        """Wait for the copy, and let the tensor go. Returns an error when it was changed while it was copied."""
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            return None
        self.group.lane.wait(self._copy)
        return self._compared(tensor)

    def changed(self) -> InPlaceError | None:
        """What to raise if the tensor, while it is still on the device, was changed since it was sent."""
        return None if self._tensor is None else self._compared(self._tensor)

    def _compared(self, tensor: torch.Tensor) -> InPlaceError | None:
        if tensor._version == self.version:
            return None
        return InPlaceError(self.group.block, tuple(tensor.shape), self.version, tensor._version)

    def send_back(self) -> None:
        """Start copying it back, unless it is there or under way. The caller has the lock."""
        if self._tensor is None and self._arriving is None:
            self._arriving = self.group.lane.back(self.host)

    def fetch(self) -> torch.Tensor:
        """The tensor, on its device; what was moved before its group is sent back meanwhile.

        Raises `InPlaceError` when it has not left the device yet, and was changed there.
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
        if self._arriving is not None:
            lane.drop(self._arriving[1])
        mover.give(lane, self.buffer)


class OffloadRegion(FullRegion):
    """The checkpointing function of one block: `full`, with its hidden states in host memory."""

    def __init__(self, block: str, mover: Mover, *, known: bool = True, **options: Any) -> None:
        super().__init__(block, **options)
        self.mover = mover
        self.known = known
        """Whether it is known that the block does not work in place; else the first forward moves nothing."""
        self.moved_bytes = 0
        """Moved by the last forward."""
        self._is_frozen = False
        """Whether its last output needed no gradient: then nothing was kept, and there is nothing to move."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward; `args[0]` are the hidden states.

        Raises `InPlaceError` when the block changes them, and `GraphCaptureError` as `full`.
        """
        if not torch.is_grad_enabled() or compat.is_compiling():
            return super().__call__(fn, *args)
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

    def _open_group(self, args: tuple[Any, ...]) -> Group | None:
        hidden = args[0] if args else None
        if self.changes_input or not (self.known or self.changes_input is False):
            return None
        if not _movable(hidden) or (self._is_frozen and not hidden.requires_grad):
            return None
        lane = self.mover.lane(hidden)
        return None if lane is None else self.mover.open(self.block, lane, hidden)

    def _run(self, group: Group | None, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        slot = None if group is None else group.send(args[0].detach())
        if slot is None:
            return super().__call__(fn, *args)
        # The hidden states' place is taken by nothing on the same device, whose random state is to be kept.
        return super().__call__(_WithMoved(fn, args[0], slot), args[0].new_empty(0), *args[1:])


class _WithMoved:
    """A block's forward that takes its hidden states from where they are."""

    def __init__(self, fn: Callable[..., Any], hidden: torch.Tensor, slot: Slot) -> None:
        self.fn, self.slot = fn, slot
        self.requires_grad = hidden.requires_grad
        self.hidden: torch.Tensor | None = hidden

    def __call__(self, _: torch.Tensor, *args: Any) -> Any:
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            hidden = self.slot.fetch().detach().requires_grad_(self.requires_grad)
        return self.fn(hidden, *args)


def lane_of(device: torch.device) -> Lane | None:
    """A stream of an accelerator; None for what has none, as the CPU, or no memory apart from it, as `mps`."""
    if device.type in ("cpu", "meta") or not hasattr(torch.get_device_module(device), "Stream"):
        return None
    return StreamLane(device)


def _movable(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether moving a tensor frees memory, and what comes back is the same. A leaf is held by its gradient's node."""
    if type(value) is not torch.Tensor or not value.is_floating_point() or value.is_neg() or value.is_inference():
        return False
    base = value if value._base is None else value._base
    return value.numel() > 0 and not (base.is_leaf and base.requires_grad) and _is_dense(value)


def _is_leaf(node: Any) -> bool:
    return node is not None and bool(node.name() == "torch::autograd::AccumulateGrad")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values lie one beside another, in whatever order of dimensions."""
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


@functools.lru_cache(maxsize=4)  # once
def _tell_no_lane(device_type: str) -> None:
    log.warning(
        "hf_ckpt: there is no host memory to offload to from %r, so blocks are recomputed from inputs that stay there, "
        "as with `full`.",
        device_type,
    )


@functools.lru_cache(maxsize=8)  # once a limit
def _tell_limit(limit_bytes: int) -> None:
    log.warning(
        "hf_ckpt: `host_budget` (%s, in buffers of powers of two) is used up; what does not fit stays on the device.",
        format_bytes(limit_bytes),
    )


@functools.lru_cache(maxsize=8)  # once a reason
def _tell_unpinned(reason: str) -> None:
    log.warning("hf_ckpt: host memory cannot be pinned (%s); unpinned memory is used, whose copies are slow.", reason)


@functools.lru_cache(maxsize=1)  # once
def _tell_hooks() -> None:
    log.warning(
        "hf_ckpt: what `selective` keeps is not moved to host memory, because there are saved-tensor hooks around the "
        "model (another checkpoint, `save_on_cpu`), which say where it is kept."
    )
