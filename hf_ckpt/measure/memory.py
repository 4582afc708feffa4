"""Meters of peak memory: the accelerator's allocator (exact) or, on a CPU, the kernel's counter of the process's peak
resident size (Linux). `PeakMeter.source` says which one it is."""

from __future__ import annotations

import ctypes
import sys
import weakref
from pathlib import Path
from typing import Any, Protocol

from hf_ckpt import compat

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


def peak_meter() -> PeakMeter:
    """Make the best meter for this machine."""
    device_type = compat.accelerator_type()
    if device_type is not None:
        module = compat.memory_module(device_type)
        return AllocatorMeter(device_type, module) if module is not None else NoMeter(device_type)
    return ResidentMeter() if _STATUS.exists() else NoMeter(sys.platform)


_allocator_meters: weakref.WeakSet[AllocatorMeter] = weakref.WeakSet()


_highest_bytes = 0
"""The highest peak that a meter has seen on the current device."""


def forgotten_peak_bytes(module: Any) -> int:
    """Return by how much the allocator's peak was higher before a meter reset it.

    Args:
        module: see `compat.memory_module`.
    """
    return max(0, _highest_bytes - int(module.max_memory_allocated()))


def keep_peaks() -> None:
    """Save the allocator's peak in all its meters, before it is reset for another purpose."""
    for meter in list(_allocator_meters):
        meter.keep_peak()


def take_levels(device_type: str, index: int) -> tuple[int, int]:
    """Return (bytes alive, most bytes alive since the last call) of a device, and start a new peak.

    If the allocator reports them, these are `active` bytes, which fall once no stream uses the memory. Allocated bytes
    fall earlier if several streams use a tensor.
    https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html
    """
    module = compat.memory_module(device_type)
    assert module is not None, "the caller knows that the allocator tells its levels"
    keep_peaks()
    nested = getattr(module, "memory_stats_as_nested_dict", None)
    active = nested(index).get("active_bytes", {}).get("all") if nested is not None else None
    if active is None:
        found = int(module.memory_allocated(index)), int(module.max_memory_allocated(index))
    else:
        found = int(active["current"]), int(active["peak"])
    module.reset_peak_memory_stats(index)
    return found


class AllocatorMeter:
    """A `PeakMeter` of the accelerator's caching allocator, for the current device. Reading it does not wait.

    All readers share the allocator's one peak. Call `keep_peaks` before resetting it.
    """

    exact = True

    def __init__(self, device_type: str, module: Any) -> None:
        self.source = f"{device_type} allocator"
        self._module = module
        self._earlier = 0
        """The peak of this window before others last reset the allocator's peak."""
        _allocator_meters.add(self)

    def keep_peak(self) -> None:
        """Remember the peak of this window so far."""
        global _highest_bytes
        self._earlier = max(self._earlier, int(self._module.max_memory_allocated()))
        _highest_bytes = max(_highest_bytes, self._earlier)

    def reset(self) -> None:
        keep_peaks()
        self._module.reset_peak_memory_stats()
        self._earlier = 0

    def peak_bytes(self) -> int | None:
        return max(self._earlier, int(self._module.max_memory_allocated()))

    def reserved_bytes(self) -> int | None:
        return int(self._module.max_memory_reserved())


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


def release_freed_memory() -> None:
    """Return freed memory to the system, so that the resident size afterwards is the memory in use.

    glibc keeps freed blocks for reuse (`man 3 malloc_trim`); other C libraries are left alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
