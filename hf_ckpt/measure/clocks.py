"""Clocks: wall time of training steps, and times at the boundaries of a step on the devices of a model."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from hf_ckpt import compat


class TrainingClock:
    """Wall time of training steps.

    It counts between `resume` and `pause`. The callback pauses it during evaluation and saving. Data loading counts.

    Args:
        devices: the devices of the model.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._devices = compat.devices.accelerators(devices)
        self.running_since: float | None = None
        """When `resume` was called; None while no time is counted."""
        self._seconds = 0.0
        self.steps = 0
        """Steps since the last `take`, which the caller counts."""

    def resume(self) -> None:
        """Start to count time. It must not be counted already."""
        self.running_since = time.perf_counter()

    def pause(self) -> None:
        """Stop counting time until `resume`. It must be counted now."""
        assert self.running_since is not None
        self._seconds += time.perf_counter() - self.running_since
        self.running_since = None

    def take(self) -> tuple[float, int]:
        """Return (seconds, steps) since the last `take`, and start again from zero. Waits for the devices."""
        compat.devices.synchronize(self._devices)
        if self.running_since is not None:
            self.pause()
            self.resume()
        taken = self._seconds, self.steps
        self._seconds, self.steps = 0.0, 0
        return taken


class DeviceClock:
    """Time stamps on the devices of a model.

    Accelerators record an event at each boundary, so that nothing waits for them while the step runs. If their events
    measure no time, each boundary waits for the devices.

    Args:
        devices: the devices of the model; without an accelerator among them, the clock is the host's.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._devices = compat.devices.accelerators(devices)
        self._by_events = bool(self._devices) and all(map(compat.devices.has_timed_events, self._devices))

    def stamp(self) -> Any:
        """Return a time stamp, without waiting for devices that have timed events."""
        if self._by_events:
            return [compat.devices.timed_event(device) for device in self._devices]
        compat.devices.synchronize(self._devices)
        return time.perf_counter_ns()

    def between(self, first: Any, last: Any) -> int:
        """Return the nanoseconds between two stamps, on the device that worked longest. Waits for the devices."""
        if not self._by_events:
            return int(last - first)
        for event in last:
            event.synchronize()
        return max(int(begin.elapsed_time(end) * 1e6) for begin, end in zip(first, last, strict=True))
