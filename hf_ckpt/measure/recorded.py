"""The memory of steps with compiled blocks on a CPU, from the profiler's record of the allocator.

A dispatch mode cannot count tensors there: torch.compile compiles nothing while one is active, and it would not see
inside graphs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.measure.clocks import Meter
from hf_ckpt.measure.live import Holder, LiveBytes, tensors_of

_MARK = "hf_ckpt "


class RecordedLevels(Meter):
    """The `Meter` that records the CPU's allocations between `start` and `stop`, in the thread of the step.

    The record has three limits. It does not show when memory is released that is older than its start, such as old
    gradients; these are counted as live tensors. It sees one thread. And it needs the profiler, of which torch allows
    only one: a step in which the user's is active is not recorded, and its readings stay unknown.

    Args:
        holders: what holds tensors that are already alive; see `LiveBytes`.
    """

    counts = True

    def __init__(self, *holders: Holder) -> None:
        self._older = LiveBytes(*holders, device="cpu")
        """Tensors that are older than the record. Weak references notice when they are freed."""
        kinds = nn.Module, torch.optim.Optimizer
        self._holders: list[weakref.ref[Any]] = [weakref.ref(holder) for holder in holders if isinstance(holder, kinds)]
        self._thread: int | None = None
        """The thread that is recorded now."""
        self._is_complete = True
        """Whether the whole step was recorded so far."""
        self._sizes: dict[int, int] = {}
        """Address -> bytes of what was allocated in the record and is alive."""
        self._bytes = self._peak_bytes = 0
        """The sum of `_sizes`, and the most that it was since the last reading or the last `stop`."""
        self._base = self._highest = 0
        """Bytes older than the record at the last reading or `stop`, and the most bytes alive between these two."""
        self._older_bytes: list[int] = []
        """Bytes older than the record, at each reading."""
        self._readings: dict[int, tuple[int, int]] = {}
        """Number of a reading -> its result, once that is known."""

    def read(self) -> Callable[[], tuple[int, int] | None]:
        number = len(self._older_bytes)
        self._older_bytes.append(self._older.current_bytes)
        if self._thread is not None:
            compat.profiler.mark_in_record(f"{_MARK}{number}")
        elif self._is_complete:
            self._sizes, self._bytes = {}, 0  # what was recorded may have been released since
            self._settle(number)
        return lambda: self._readings.get(number)

    def start(self) -> None:
        if self._thread is None:
            self._is_complete &= not compat.profiler.profiler_is_active()
            if self._is_complete:
                self._thread = threading.get_ident()
                compat.profiler.start_allocation_record()

    def stop(self) -> None:
        # A backward runs with a copy of the thread's state, in which the profiler cannot be stopped for good.
        if self._thread != threading.get_ident() or compat.torch.is_in_backward():
            return
        self._thread = None
        for event in compat.profiler.stop_allocation_record():
            if event.name.startswith(_MARK):
                self._settle(int(event.name.removeprefix(_MARK)))
            elif not event.name:
                self._count(event.address, event.size)
        self._highest = max(self._highest, max(self._base, self._older.current_bytes) + self._peak_bytes)
        for holder in filter(None, (reference() for reference in self._holders)):
            for tensor in tensors_of(holder):  # such as gradients, whose release is not recorded from now on
                storage = tensor.untyped_storage()
                self._count(storage.data_ptr(), -storage.nbytes())
                self._older.count_storage(storage)
        self._base, self._peak_bytes = self._older.current_bytes, self._bytes

    def _settle(self, number: int) -> None:
        """Complete a reading with the record up to this moment."""
        older = self._older_bytes[number]
        self._readings[number] = older + self._bytes, max(self._highest, max(self._base, older) + self._peak_bytes)
        self._base, self._highest, self._peak_bytes = older, 0, self._bytes

    def _count(self, address: int, size: int) -> None:
        """Count an allocation, or a release of something that was allocated in the record."""
        before = self._sizes.pop(address, 0)
        if size > 0:
            self._sizes[address] = size
        self._bytes += max(0, size) - before
        self._peak_bytes = max(self._peak_bytes, self._bytes)
