"""Memory at the boundaries of a training step: the bytes alive, the peak since the last boundary, and the time.

On an accelerator the allocator reports both figures, and times come from events, so that nothing waits for the device
while the step runs. On a CPU hf_ckpt counts live tensors, which slows the step down (by a tenth, or more for tiny
models). So a step on a CPU is either counted or timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Protocol

import torch

from hf_ckpt import compat
from hf_ckpt.costs.steps import Level
from hf_ckpt.measure.clocks import DeviceClock
from hf_ckpt.measure.live import Holder, LiveBytes
from hf_ckpt.measure.memory import AllocatorMeter, keeps_statistics


class Meter(Protocol):
    """Reads the memory of a device."""

    counts: bool
    """Whether it reads memory."""

    def read(self) -> tuple[int, int]:
        """Return (bytes alive, most bytes alive since the last call)."""

    def stamp(self) -> Any:
        """Return a time stamp, without waiting for the device."""

    def between(self, first: Any, last: Any) -> int:
        """Return the nanoseconds between two stamps. Waits for the device."""

    def start(self) -> None:
        """Begin to measure, or go on after `stop`."""

    def stop(self) -> None:
        """Stop measuring."""


class Timed(DeviceClock):
    """The `Meter` that reads only the time."""

    counts = False

    def read(self) -> tuple[int, int]:
        return 0, 0

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


class AllocatorLevels(Timed):
    """The `Meter` of the allocators of accelerators.

    Each boundary costs one read of the statistics, one reset of the peak and one event per device.

    Args:
        devices: the accelerators.
    """

    counts = True

    def __init__(self, devices: Collection[torch.device]) -> None:
        super().__init__(devices)
        self._allocators = AllocatorMeter(devices)

    def read(self) -> tuple[int, int]:
        return self._allocators.take()


class CountedLevels(LiveBytes):  # type: ignore[no-untyped-call]
    """The `Meter` that counts live tensors on a CPU, between `start` and `stop`. It slows the step down.

    It starts and stops in hooks, because there is no place for a `with` block around the step. Tensors that are freed
    count as freed at any time; tensors that are made count only while it runs. Other modes that see every operation,
    such as torch's counter of operations, are not affected.

    Args:
        holders: what holds tensors that are already alive; see `LiveBytes`.
    """

    counts = True
    supports_higher_order_operators = True

    def __init__(self, *holders: Holder) -> None:
        super().__init__(*holders, device="cpu")
        self._stopped = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled code stays compiled under this mode. Only its outputs are counted."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `super()` would double torch's own overhead around this method, and keep a timeline.
        if types and compat.is_any_wrapper(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if not self._stopped:  # stopped during an operation, when the mode cannot be left
            self._count_all(result)
        return result

    def read(self) -> tuple[int, int]:
        current, peak = self.current_bytes, self.peak_bytes
        self.peak_bytes = current
        return current, peak

    def stamp(self) -> Any:
        return 0

    def between(self, first: Any, last: Any) -> int:
        return 0

    def start(self) -> None:
        if self._stopped:
            self._stopped = False
            compat.enter_dispatch_mode_below(self)
            compat.watch_resizes(self._count_storage)

    def stop(self) -> None:
        self._stopped = True
        compat.unwatch_resizes(self._count_storage)
        compat.leave_dispatch_mode(self)


def can_be_measured(device: torch.device) -> bool:
    """Whether the memory of a step can be read on this device: on a CPU, or if its allocator reports peaks."""
    return device.type == "cpu" or keeps_statistics(device)


class Levels:
    """The boundaries of one step, in order.

    Args:
        meter: reads memory and time.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._found: list[tuple[Level, Any]] = []

    def mark(self, what: str, block: str = "", has_graph: bool = True) -> None:
        """Record a boundary; see `Level`. Backward threads of several devices take turns."""
        current, peak = self.meter.read()
        self._found.append((Level(what, block, has_graph, current, peak), self.meter.stamp()))

    @property
    def last(self) -> str:
        """What the last boundary is; empty before the first."""
        return self._found[-1][0].what if self._found else ""

    def outside(self) -> tuple[int, int]:
        """Return (bytes alive, most bytes alive since the last boundary)."""
        return self.meter.read()

    def levels(self) -> tuple[Level, ...]:
        """Return all boundaries, with the times between them. Waits for an accelerator."""
        found = [self._found[0][0]] if self._found else []
        for (_, before), (level, stamp) in zip(self._found, self._found[1:], strict=False):
            found.append(dataclasses.replace(level, nanoseconds=self.meter.between(before, stamp)))
        return tuple(found)


def meter_for(devices: Collection[torch.device], *holders: Holder, timed_only: bool = False) -> Meter:
    """Make the meter for a model on these devices.

    Args:
        devices: the devices of the model. Accelerators among them are measured, or else the CPU.
        holders: what holds tensors that are already alive, for a count on a CPU.
        timed_only: whether only times are needed.
    """
    there = compat.accelerators(devices)
    if there:
        return AllocatorLevels(there)
    return Timed() if timed_only else CountedLevels(*holders)
