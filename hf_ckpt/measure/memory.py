"""Memory of the devices of a model: how much there is, and the peaks that allocators report.

An accelerator's allocator has one peak for all readers. So whoever resets it tells all `PeakMeter`s what it was.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import re
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch

from hf_ckpt import compat
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.live import MemoryReader

log = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")
_MAPS = Path("/proc/self/maps")
_MOST_MAPS = Path("/proc/sys/vm/max_map_count")
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
    if there and not compat.devices.shares_host_memory(there[0].type):
        try:
            return _driver_memory(there[0], held_bytes)
        except RuntimeError:
            fact = "torch does not report the memory of %s, so hf_ckpt uses that of the machine."
            advice = "Give the budget in bytes, such as 20GiB: shares and `auto` would refer to the wrong memory."
            warn_once(log, f"hf_ckpt: {fact} {advice}", there[0].type)
    import psutil

    memory = psutil.virtual_memory()
    limit, used = _container_memory()
    available = min(memory.available, limit - used)
    return DeviceMemory(min(memory.total, limit), available + held_bytes)


def spare_bytes(devices: Iterable[torch.device]) -> int | None:
    """Return how many bytes beyond its highest peak a model on these devices may use for something optional.

    On accelerators that is all that the peak leaves on the fullest one, or None if torch does not report it. On a CPU
    it is half of the memory that is available now, because other processes need some of it, too.
    """
    there = compat.devices.accelerators(devices)
    if all(compat.devices.shares_host_memory(device.type) for device in there):
        return device_memory(0, there).available_bytes // 2
    try:
        left = []
        for device in there:
            _restart(device)  # so that `highest` has the peak until now
            left.append(_driver_memory(device).available_bytes - highest[device])
        return min(left)
    except RuntimeError:
        return None


def _driver_memory(device: torch.device, held_bytes: int = 0) -> DeviceMemory:
    """Read the memory of an accelerator. Raises RuntimeError if torch does not tell it for this device."""
    free, total = compat.devices.memory_info(device)
    # What the allocator has reserved is not free to the driver, but this process may use it.
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


def locked_memory_limit() -> int | None:
    """Return the bytes that the process may lock in memory (`ulimit -l`); None without a limit, or if it is unknown."""
    try:
        import resource  # Windows has none
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def memory_mappings() -> tuple[int, int | None]:
    """Return (mappings of memory that the process has, how many it may have); (0, None) where Linux does not tell."""
    try:
        with _MAPS.open() as lines:
            return sum(1 for _ in lines), int(_MOST_MAPS.read_text())
    except (OSError, ValueError):
        return 0, None


# --- peaks ------------------------------------------------------------------------------------------------------------

_meters: weakref.WeakSet[PeakMeter] = weakref.WeakSet()
highest: collections.Counter[torch.device] = collections.Counter()
"""Device -> the highest peak that its allocator had when it was reset."""


def keeps_statistics(device: torch.device) -> bool:
    """Whether the allocator of an accelerator reports its peaks. Warns once if it does not.

    torch does not tell in advance, so a peak is read and reset, as at any boundary.
    """
    try:
        _restart(device)
    except RuntimeError as error:
        fact = "the allocator of %s reports no peaks (%s)."
        effect = "So peaks are not logged, and the policies `budget` and `auto` count live tensors."
        warn_once(log, f"hf_ckpt: {fact} {effect}", device.type, str(error).partition("\n")[0])
        return False
    return True


def _restart(device: torch.device) -> int:
    """Begin a new peak of a device's allocator, and return the bytes in use. Only this resets allocators.

    Raises RuntimeError if the allocator keeps no statistics.
    """
    statistics = compat.devices.allocator_bytes(device)
    compat.devices.reset_peak(device)
    # Whoever reads next would not see this peak any more, so all others are given it.
    for peaks in (highest, *(meter.peaks for meter in _meters)):
        peaks[device] = max(peaks[device], statistics.peak)
    return statistics.current


class PeakMeter(MemoryReader):
    """The `MemoryReader` of the allocators of accelerators, and the peak of a process on a CPU.

    A window is the time between two reads.

    Unknown figures are None, never 0. Reading allocators does not wait; each boundary of a step costs one read of the
    statistics and one reset of the peak per device. Several devices are added up.

    Args:
        devices: the devices of a model.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        there = compat.devices.accelerators(devices)
        self._is_on_cpu = not there
        self._devices = there if all(map(keeps_statistics, there)) else []
        self.peaks: collections.Counter[torch.device] = collections.Counter()
        """Device -> the highest peak of this window at which its allocator was reset."""
        _meters.add(self)

    def read(self) -> tuple[int, int]:
        """Return (bytes in use, peak of this window) of the accelerators, and start a new window."""
        current = sum(map(_restart, self._devices))
        peak = sum(self.peaks[device] for device in self._devices)
        self.peaks.clear()
        return current, peak

    def look(self) -> tuple[int, int]:
        """Return the same as `read`, and go on with this window. The allocators' peaks are not reset."""
        now = [compat.devices.allocator_bytes(device) for device in self._devices]
        peaks = [max(self.peaks[device], each.peak) for device, each in zip(self._devices, now, strict=True)]
        return sum(each.current for each in now), sum(peaks)

    def read_peak(self) -> int | None:
        """Return the peak of this window, in bytes, and start a new window.

        On a CPU under Linux, it is the largest resident size since the process began: see `man 5 proc_pid_status`.
        """
        if not self._is_on_cpu:
            return self.read()[1] or None
        resident = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text()) if _STATUS.exists() else None
        return None if resident is None else 1024 * int(resident[1])

    def reserved_bytes(self) -> int | None:
        """Return the peak of the allocators' reserved memory, in bytes; None without an allocator."""
        return sum(compat.devices.allocator_bytes(device).reserved_peak for device in self._devices) or None
