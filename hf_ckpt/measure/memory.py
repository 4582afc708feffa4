"""Memory of the devices of a model: how much there is, and the peaks that allocators report.

An accelerator's allocator has one peak for all readers, so `Allocator` keeps a window of it for each `PeakMeter`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch

from hf_ckpt import compat
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.live import Reader

log = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CONTAINER = Path("/sys/fs/cgroup")


# --- how much there is ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of the device that a model trains on, in bytes.

    On a CPU, and for `mps`, it is the memory of the machine, or the limit of the process's container. The same applies,
    with a warning, to other accelerators whose memory torch does not report.
    """

    total_bytes: int
    """All memory of the device."""
    available_bytes: int
    """The most that this process can hold in tensors, including those that it holds now."""


def device_memory(held_bytes: int, devices: Iterable[torch.device] | None = None) -> DeviceMemory:
    """Read the memory of the device that a model is on; of several accelerators, that of the first.

    Args:
        held_bytes: bytes of tensors that are known to be in memory.
        devices: the devices of the model; None asks for the machine's accelerator.
    """
    there = compat.devices.accelerators(devices)
    found = _memory_of(there[0], held_bytes) if there else None
    if found is not None:
        return found
    if there and not compat.devices.shares_host_memory(there[0].type):
        warn_once(
            log,
            "hf_ckpt: torch does not tell the memory of %s, so the memory of the machine is taken in its place. Give "
            "the budget in bytes, as 20GiB: shares and `auto` would be of the wrong memory.",
            there[0].type,
        )
    import psutil

    memory = psutil.virtual_memory()
    limit, used = _container_memory()
    available = min(memory.available, limit - used)
    return DeviceMemory(min(memory.total, limit), available + held_bytes)


def spare_bytes(devices: Iterable[torch.device]) -> int | None:
    """Return how many bytes beyond its highest peak a model on these devices may use for something optional.

    On accelerators that is all that the peak leaves on the fullest one, or None if torch does not report it. On a CPU
    it is half of the memory that is available now.
    """
    there = compat.devices.accelerators(devices)
    if all(compat.devices.shares_host_memory(device.type) for device in there):
        return device_memory(0, there).available_bytes // 2
    memories = {device: _memory_of(device, 0) for device in there}
    if None in memories.values() or not all(map(keeps_statistics, there)):
        return None
    return min(memory.available_bytes - allocator_of(of).highest_bytes for of, memory in memories.items() if memory)


def _memory_of(device: torch.device, held_bytes: int) -> DeviceMemory | None:
    """Return the memory of an accelerator; None if it is the machine's memory, or if it is not reported."""
    if compat.devices.shares_host_memory(device.type):
        return None
    try:
        free, total = compat.devices.memory_info(device)
    except RuntimeError:  # torch has the function, but not for this device
        return None
    with contextlib.suppress(RuntimeError):  # an allocator without statistics
        held_bytes = compat.devices.allocator_bytes(device).reserved
    return DeviceMemory(total, free + held_bytes)


def _container_memory() -> tuple[int, int]:
    """Return (limit, use without droppable caches) of the container, in bytes. Without a limit, that is a large number.

    Read from control groups, version 2. https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((_CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        rows = (line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
        return limit, max(0, used - next(int(size) for name, size in rows if name == "inactive_file"))
    return sys.maxsize, 0


# --- peaks ------------------------------------------------------------------------------------------------------------


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
        """The highest peak that was read so far."""
        self._peaks: weakref.WeakKeyDictionary[PeakMeter, int] = weakref.WeakKeyDictionary()
        """For each meter, the peak of its window before the allocator's peak was last reset."""

    def read(self) -> compat.devices.AllocatorBytes:
        """Read the statistics. Raises RuntimeError if the allocator keeps none."""
        found = compat.devices.allocator_bytes(self.device)
        self.highest_bytes = max(self.highest_bytes, found.peak)
        return found

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


class PeakMeter(Reader):
    """The `Reader` of the allocators of accelerators; and the largest memory use of some devices since `reset`.

    Unknown figures are None, never 0. Reading allocators does not wait; each boundary of a step costs one read of the
    statistics and one reset of the peak per device. Several devices are added up. On a CPU under Linux,
    `peak_bytes` is the kernel's own peak of the process's resident size: `VmHWM` in /proc/self/status. Writing 5 to
    /proc/self/clear_refs resets it (`man 5 proc_pid_clear_refs`). If the kernel does not allow that, as in some
    containers, the peak is that since the process began.

    Args:
        devices: the devices of a model.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        there = compat.devices.accelerators(devices)
        self._allocators = [allocator_of(device) for device in there] if all(map(keeps_statistics, there)) else []
        self._is_resident = not there and _STATUS.exists()
        place = there[0].type if there else sys.platform
        self.source = f"{place} allocator" if self._allocators else f"unknown ({place} reports no peak)"
        """Where the figures come from, in words."""
        if not self.reset():
            self.source = "process resident size, kernel peak since the process began"
        elif self._is_resident:
            self.source = "process resident size, kernel peak"

    def reset(self) -> bool:
        """Start a new window: forget the peak so far. Returns False if the kernel does not allow that."""
        self.read()
        try:
            return not self._is_resident or _CLEAR_REFS.write_text("5") > 0
        except OSError:
            return False

    def read(self) -> tuple[int, int]:
        """Return (bytes in use, peak of this window) of the accelerators, and start a new window."""
        read = [allocator.restart(self) for allocator in self._allocators]
        return sum(current for current, _ in read), sum(peak for _, peak in read)

    def peak_bytes(self) -> int | None:
        """Return the peak of this window, in bytes."""
        if self._is_resident:
            lines = (line.split() for line in _STATUS.read_text().splitlines())
            return next((int(words[1]) * 1024 for words in lines if words[:1] == ["VmHWM:"]), None)
        return sum(allocator.peak_of(self) for allocator in self._allocators) if self._allocators else None

    def reserved_bytes(self) -> int | None:
        """Return the peak of the allocators' reserved memory, in bytes; None without an allocator."""
        return sum(allocator.read().reserved_peak for allocator in self._allocators) if self._allocators else None
