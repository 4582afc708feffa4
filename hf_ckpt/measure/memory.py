"""Meters of peak memory, for the devices of a model: the allocators of accelerators (exact) or, on a CPU, the kernel's
counter of the process's peak resident size (Linux). `PeakMeter.source` says which one it is."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from hf_ckpt import compat
from hf_ckpt.logs import warn_once

log = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMeter(Protocol):
    """A meter of the largest memory use since the last `reset`. Unknown figures are None, never 0."""

    source: str
    """Where the figures come from, in words."""
    exact: bool
    """Whether the figures count bytes of tensors and nothing else."""

    def reset(self) -> None:
        """Start a new window: forget the peak so far."""

    def peak_bytes(self) -> int | None:
        """Return the peak of this window, in bytes."""

    def reserved_bytes(self) -> int | None:
        """Return the peak of a caching allocator's reserved memory, in bytes; None if there is no such allocator."""


def peak_meter(devices: Iterable[torch.device]) -> PeakMeter:
    """Make the best meter for a model on these devices."""
    there = compat.accelerators(devices)
    if not there:
        return ResidentMeter() if _STATUS.exists() else NoMeter(sys.platform)
    if not all(map(keeps_statistics, there)):
        return NoMeter(there[0].type)
    return AllocatorMeter(there)


def keeps_statistics(device: torch.device) -> bool:
    """Whether the allocator of an accelerator reports its peaks. Warns once if it does not."""
    try:
        allocator_of(device).restart()
    except RuntimeError as error:  # torch does not tell in advance
        warn_once(
            log,
            "hf_ckpt: the allocator of %s reports no peaks (%s). So peaks are not logged, and the policies `budget` "
            "and `auto` count live tensors.",
            device.type,
            str(error).partition("\n")[0],
        )
        return False
    return True


class Allocator:
    """The allocator of one device, which has one peak for all readers. Only this class resets it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.highest_bytes = 0
        """The highest peak so far."""
        self._peaks: weakref.WeakKeyDictionary[AllocatorMeter, int] = weakref.WeakKeyDictionary()
        """For each meter, the peak of its window before the allocator's peak was last reset."""

    def read(self) -> compat.AllocatorBytes:
        """Read the statistics. Raises RuntimeError if the allocator keeps none."""
        found = compat.allocator_bytes(self.device)
        self.highest_bytes = max(self.highest_bytes, found.peak)
        return found

    def highest_peak(self) -> int:
        """Return the highest peak so far, whoever has reset it since. Raises RuntimeError without statistics."""
        self.read()
        return self.highest_bytes

    def peak_of(self, meter: AllocatorMeter) -> int:
        """Return the peak of a meter's window."""
        return max(self._peaks.get(meter, 0), self.read().peak)

    def restart(self, meter: AllocatorMeter | None = None) -> tuple[int, int]:
        """Return (bytes in use, peak of a meter's window), and start a new window of this meter.

        Raises RuntimeError if the allocator keeps no statistics.
        """
        found = self.read()
        compat.reset_peak(self.device)
        for other, peak in list(self._peaks.items()):
            self._peaks[other] = max(peak, found.peak)
        if meter is None:
            return found.current, found.peak
        peak, self._peaks[meter] = max(found.peak, self._peaks.get(meter, 0)), 0
        return found.current, peak


@functools.cache
def allocator_of(device: torch.device) -> Allocator:
    """Return the allocator of a device."""
    return Allocator(device)


class AllocatorMeter:
    """A `PeakMeter` of the allocators of some accelerators. Their figures are added up. Reading them does not wait."""

    exact = True

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._allocators = [allocator_of(device) for device in devices]
        self.source = f"{self._allocators[0].device.type} allocator"
        self.reset()

    def take(self) -> tuple[int, int]:
        """Return (bytes in use, peak of this window), and start a new window."""
        read = [allocator.restart(self) for allocator in self._allocators]
        return sum(current for current, _ in read), sum(peak for _, peak in read)

    def reset(self) -> None:
        self.take()

    def peak_bytes(self) -> int | None:
        return sum(allocator.peak_of(self) for allocator in self._allocators)

    def reserved_bytes(self) -> int | None:
        return sum(allocator.read().reserved_peak for allocator in self._allocators)


class ResidentMeter:
    """A `PeakMeter` of the process's resident size. It reads the kernel's own peak: `VmHWM` in /proc/self/status.

    Writing 5 to /proc/self/clear_refs resets it (`man 5 proc_pid_clear_refs`). If the kernel does not allow that, as in
    some containers, the peak is that since the process began.
    """

    exact = False

    def __init__(self) -> None:
        resets = self._reset()
        self.source = "process resident size, kernel peak" + ("" if resets else " since the process began")

    def _reset(self) -> bool:
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            return False
        return True

    def reset(self) -> None:
        self._reset()

    def peak_bytes(self) -> int | None:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None

    def reserved_bytes(self) -> int | None:
        return None


class NoMeter:
    """The `PeakMeter` of a device whose allocator reports no peak: all its figures are None."""

    exact = False

    def __init__(self, device: str) -> None:
        self.source = f"unknown ({device} reports no peak)"

    def reset(self) -> None:
        pass

    def peak_bytes(self) -> int | None:
        return None

    def reserved_bytes(self) -> int | None:
        return None
