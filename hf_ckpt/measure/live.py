"""Exact counts of the bytes of all live tensors through one step, on any device."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat

Holder = nn.Module | torch.optim.Optimizer | Mapping[str, Any]
"""What holds tensors that are alive before counting begins: a model, an optimizer, or a batch (a mapping)."""


_NO_WRAPPERS = (torch.Tensor, nn.Parameter)
"""Types of tensors that do not wrap others. Nearly all tensors are of these, and one look at the type is fast."""


class MemoryReader(abc.ABC):
    """Reads memory at the boundaries of a step."""

    is_over: Callable[[], bool] = bool
    """Returns whether a KeyboardInterrupt has ended the step, which calls no hook then: False by default. A reader that
    counts asks it at every operation. Once it is True, the reader stops, and does not start again."""

    @abc.abstractmethod
    def read(self) -> tuple[int, int]:
        """Return (bytes alive, most bytes alive since the last call)."""

    def start(self) -> None:  # noqa: B027
        """Begin to read, or go on after `stop`. An allocator always counts, so there is nothing to do."""

    def sees_this_thread(self) -> bool:
        """Whether it counts what this thread allocates, as an allocator does."""
        return True

    def stop(self) -> None:  # noqa: B027
        """Stop reading. An allocator always counts, so there is nothing to do."""


class _Alive(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a counted storage, with its address and the bytes that were counted for it."""

    __slots__ = ("key", "size")
    key: int
    size: int


class LiveBytes(compat.modes.TorchDispatchMode, MemoryReader):  # type: ignore[no-untyped-call]
    """Counts the bytes of all live tensor storages, each once, after every operation of forward and backward.

        with LiveBytes(model) as live:
            model(**batch).loss.backward()
        live.peak_bytes

    This is exact for what PyTorch holds, on any device, but makes the step much slower. If storages are freed and
    allocated again by resizing, as by FSDP, their current size counts. A tensor subclass that wraps other tensors, such
    as a DTensor, counts as these. Scratch memory that a kernel allocates and frees within one operation does not count.

    Where there is no place for a `with` block around the step, hooks call `start` and `stop`. Tensors that are freed
    count as freed at any time; tensors that are made count only while it runs.

    Args:
        holders: what holds tensors that are already alive, such as the model, its optimizer and the batch.
        device: device type, such as `cuda`, whose storages are counted; those of fake tensors are on `meta`. None for
            all devices.
    """

    supports_higher_order_operators = True

    def __init__(self, *holders: Holder, device: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.current_bytes = 0
        self.peak_bytes = 0
        self._running = False
        self._live: dict[int, _Alive] = {}
        for holder in holders:
            for tensor in tensors_of(holder):
                self._count_all(tensor)
        self.start_bytes = self.current_bytes
        """Bytes alive at the beginning: parameters, gradients, buffers and optimizer state of `holders`."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled code stays compiled under this mode. Only its outputs are counted."""
        return True

    def __enter__(self) -> Any:
        # On top of all modes, unlike `start`. When both began alike, counted peaks of FSDP2 were 1 % off.
        self._running = True
        compat.torch.watch_resizes(self.count_storage)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        self._running = False
        compat.torch.unwatch_resizes(self.count_storage)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Begin to count, below other modes that see every operation: a counter of operations is not affected."""
        if not self._running and not self.is_over():
            self._running = True
            _started.add(self)
            compat.torch.watch_resizes(self.count_storage)
            compat.modes.enter_dispatch_mode_below(self)

    def stop(self) -> None:
        """Stop counting what is made."""
        self._running = False
        _started.discard(self)
        compat.torch.unwatch_resizes(self.count_storage)
        compat.modes.leave_dispatch_mode(self)

    def sees_this_thread(self) -> bool:
        """Whether it counts what this thread allocates: a backward may run in another one than the forward."""
        return not self._running or compat.modes.is_dispatch_mode_on(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and compat.torch.is_any_wrapper(types):
            return NotImplemented  # the wrapper's implementation runs, and its operations on wrapped tensors come here
        try:
            if self.is_over():
                self.stop()
            result = func(*args, **(kwargs or {}))
            if self._running:  # it may stop during an operation, when the mode cannot be left
                self._count_all(result)
            return result
        except BaseException as error:  # most interrupts come here: while it counts, most Python code is this
            if not isinstance(error, Exception) and self in _started:
                self._interrupt()
            raise
        finally:
            if not self._running:
                compat.modes.leave_after_operation(self)

    def _interrupt(self) -> None:
        self.is_over = lambda: True
        self.stop()

    def read(self) -> tuple[int, int]:
        """Return (bytes alive, most bytes alive since the last call)."""
        peak_bytes = self.peak_bytes
        self.peak_bytes = self.current_bytes
        return self.current_bytes, peak_bytes

    def _count_all(self, result: Any) -> None:
        """Count the storages of the tensors that an operation returned."""
        for tensor in tensors_in(result):
            if type(tensor) in _NO_WRAPPERS and tensor.layout is torch.strided:
                self.count(tensor)
            else:
                for part in compat.torch.parts_with_storage(tensor):
                    self.count(part)

    def count(self, tensor: torch.Tensor) -> bool:
        """Count the storage of a tensor. Returns whether it was not counted before."""
        return self.count_storage(tensor.untyped_storage())

    def count_storage(self, storage: torch.UntypedStorage) -> bool:
        """Count a storage with its current size. Returns whether it was not counted before."""
        key = storage._cdata  # the same for all Python objects of a storage, unlike `id`
        size = storage.nbytes()
        alive = self._live.get(key)
        is_new = alive is None
        if alive is None:
            if self._device is not None and storage.device.type != self._device:
                return False
            alive = self._live[key] = _Alive(storage, self._died)
            alive.key = key
            alive.size = 0
        if size != alive.size:
            self.current_bytes += size - alive.size
            alive.size = size
            if self.current_bytes > self.peak_bytes:
                self.peak_bytes = self.current_bytes
        return is_new

    def _died(self, alive: _Alive) -> None:
        # torch 2.8 also calls this for a storage that is alive, when garbage that referred to it is collected, such as
        # that of `torch.save`. It counts again when the next operation returns it.
        del self._live[alive.key]
        self.current_bytes -= alive.size


_started: weakref.WeakSet[LiveBytes] = weakref.WeakSet()


def stop_counts() -> None:
    """Stop each count that hooks have started: a KeyboardInterrupt ends its step, and torch calls no hook then.

    In a backward, this lasts until torch restores the modes of its caller.
    """
    for count in tuple(_started):
        count._interrupt()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments or results of an operation, which nest them in tuples and lists only."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)


def tensors_of(holder: Holder) -> Iterator[torch.Tensor]:
    """Yield the parameters, gradients and buffers of a module; the state of an optimizer; or the values of a batch."""
    if isinstance(holder, nn.Module):
        yield from holder.buffers()
        for parameter in (*holder.parameters(), *compat.distributed.flat_parameters(holder)):
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    else:
        held = list((holder.state if isinstance(holder, torch.optim.Optimizer) else holder).values())
        yield from (value for value in compat.torch.tree_leaves(held) if isinstance(value, torch.Tensor))


def held_bytes(devices: Collection[torch.device], *holders: Holder) -> int:
    """Bytes that these hold on this rank, on these types of device: see `tensors_of`.

    State that FSDP2 keeps in host memory is not part of an accelerator's peak.
    """
    return sum(LiveBytes(*holders, device=kind).start_bytes for kind in {device.type for device in devices})
