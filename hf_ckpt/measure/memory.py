"""Peaks of memory: each accelerator's allocator, which has one peak for all readers, and a meter of a model's peak."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch

from hf_ckpt import compat
from hf_ckpt.logs import warn_once

log = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


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
        self._peaks: weakref.WeakKeyDictionary[PeakMeter, int] = weakref.WeakKeyDictionary()
        """For each meter, the peak of its window before the allocator's peak was last reset."""

    def read(self) -> compat.devices.AllocatorBytes:
        """Read the statistics. Raises RuntimeError if the allocator keeps none."""
        found = compat.devices.allocator_bytes(self.device)
        self.highest_bytes = max(self.highest_bytes, found.peak)
        return found

    def highest_peak(self) -> int:
        """Return the highest peak so far, whoever has reset it since. Raises RuntimeError without statistics."""
        self.read()
        return self.highest_bytes

    def peak_of(self, meter: PeakMeter) -> int:
        """Return the peak of a meter's window."""
        return max(self._peaks.get(meter, 0), self.read().peak)

    def restart(self, meter: PeakMeter | None = None) -> tuple[int, int]:
        """Return (bytes in use, peak of a meter's window), and start a new window of this meter.

        Raises RuntimeError if the allocator keeps no statistics.
        """
        found = self.read()
        compat.devices.reset_peak(self.device)
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


class PeakMeter:
    """The largest memory use of some devices since the last `reset`. Unknown figures are None, never 0.

    The allocators of accelerators tell the bytes of tensors; reading them does not wait, and several are added up. On a
    CPU under Linux, the figure is the kernel's own peak of the process's resident size: `VmHWM` in /proc/self/status.
    Writing 5 to /proc/self/clear_refs resets it (`man 5 proc_pid_clear_refs`). If the kernel does not allow that, as in
    some containers, the peak is that since the process began.

    Args:
        devices: the devices of a model.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        there = compat.devices.accelerators(devices)
        self._allocators = [allocator_of(device) for device in there] if all(map(keeps_statistics, there)) else []
        self._is_resident = not there and _STATUS.exists()
        self.exact = bool(self._allocators)
        """Whether the figures count bytes of tensors and nothing else."""
        place = there[0].type if there else sys.platform
        self.source = f"{place} allocator" if self.exact else f"unknown ({place} reports no peak)"
        """Where the figures come from, in words."""
        if not self.reset():
            self.source = "process resident size, kernel peak since the process began"
        elif self._is_resident:
            self.source = "process resident size, kernel peak"

    def reset(self) -> bool:
        """Start a new window: forget the peak so far. Returns False if the kernel does not allow that."""
        self.take()
        try:
            return not self._is_resident or _CLEAR_REFS.write_text("5") > 0
        except OSError:
            return False

    def take(self) -> tuple[int, int]:
        """Return (bytes in use, peak of this window) of the accelerators, and start a new window."""
        read = [allocator.restart(self) for allocator in self._allocators]
        return sum(current for current, _ in read), sum(peak for _, peak in read)

    def peak_bytes(self) -> int | None:
        """Return the peak of this window, in bytes."""
        if self._is_resident:
            lines = (line.split() for line in _STATUS.read_text().splitlines())
            return next((int(words[1]) * 1024 for words in lines if words[:1] == ["VmHWM:"]), None)
        return sum(allocator.peak_of(self) for allocator in self._allocators) if self.exact else None

    def reserved_bytes(self) -> int | None:
        """Return the peak of the allocators' reserved memory, in bytes; None without an allocator."""
        return sum(allocator.read().reserved_peak for allocator in self._allocators) if self.exact else None
