"""A clock: times at the boundaries of steps, on the devices of a model."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from hf_ckpt import compat


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
