"""Meters of the peak of memory use.

There are three sources, tried in this order: the accelerator's allocator (exact), the kernel's counter of the process's
peak resident size (Linux), and samples of the resident size. `PeakMeter.source` says which one it is.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Protocol

from hf_ckpt import compat

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
SAMPLE_SECONDS = 0.01
"""Seconds between two samples of the resident size."""


class PeakMeter(Protocol):
    """A meter of the largest memory use since the last `reset`. What is unknown is None, never 0."""

    source: str
    """Where the figures come from, in words."""
    exact: bool
    """Whether the figures count bytes of tensors and nothing else."""

    def reset(self) -> None:
        """Start a new window: forget the peak so far."""

    def peak_bytes(self) -> int | None:
        """Return the peak of this window, in bytes."""

    def reserved_bytes(self) -> int | None:
        """Return the peak of what a caching allocator took from the device, in bytes; None where there is none."""


def peak_meter() -> PeakMeter:
    """Make the best meter that this machine has."""
    device_type = compat.accelerator_type()
    if device_type is not None:
        module = compat.memory_module(device_type)
        return AllocatorMeter(device_type, module) if module is not None else NoMeter(device_type)
    if KernelMeter.works():
        return KernelMeter()
    return SampledMeter()


class AllocatorMeter:
    """A `PeakMeter` of the accelerator's caching allocator, for the current device. Reading it waits for nothing."""

    exact = True

    def __init__(self, device_type: str, module: Any) -> None:
        self.source = f"{device_type} allocator"
        self._module = module

    def reset(self) -> None:
        self._module.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        return int(self._module.max_memory_allocated())

    def reserved_bytes(self) -> int | None:
        return int(self._module.max_memory_reserved())


class KernelMeter:
    """A `PeakMeter` of the resident size, by the kernel's own peak: `VmHWM` in /proc/self/status.

    It is reset by writing 5 to /proc/self/clear_refs (`man 5 proc_pid_clear_refs`).
    """

    source = "process resident size, kernel peak"
    exact = False

    @classmethod
    def works(cls) -> bool:
        """Whether this kernel has the counter and lets the process reset it."""
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            return False
        return cls().peak_bytes() is not None

    def reset(self) -> None:
        _CLEAR_REFS.write_text("5")

    def peak_bytes(self) -> int | None:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None

    def reserved_bytes(self) -> int | None:
        return None


class SampledMeter:
    """A `PeakMeter` of the resident size, which a thread reads every `SAMPLE_SECONDS`: a shorter peak can be missed."""

    source = "process resident size, sampled"
    exact = False

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._peak = 0
        self._stop = threading.Event()
        self.reset()
        self.thread = threading.Thread(target=_sample, args=(weakref.ref(self), self._stop), daemon=True)
        weakref.finalize(self, self._stop.set)
        self.thread.start()

    def _take(self) -> int:
        return int(self._process.memory_info().rss)

    def sample(self) -> None:
        """Read the resident size once."""
        self._peak = max(self._peak, self._take())

    def reset(self) -> None:
        self._peak = self._take()

    def peak_bytes(self) -> int | None:
        self.sample()
        return self._peak

    def reserved_bytes(self) -> int | None:
        return None


def _sample(meter: weakref.ref[SampledMeter], stop: threading.Event) -> None:
    """Sample until the meter is gone, which the thread must not keep alive."""
    while not stop.wait(SAMPLE_SECONDS):
        alive = meter()
        if alive is None:
            return
        alive.sample()
        del alive


class NoMeter:
    """The `PeakMeter` of an accelerator whose allocator reports no peak: all its figures are None."""

    exact = False

    def __init__(self, device_type: str) -> None:
        self.source = f"unknown ({device_type} reports no peak)"

    def reset(self) -> None:
        pass

    def peak_bytes(self) -> int | None:
        return None

    def reserved_bytes(self) -> int | None:
        return None


def release_freed_memory() -> None:
    """Give freed memory back to the system, so that the resident size afterwards is that of what is in use.

    glibc keeps freed blocks for reuse (`man 3 malloc_trim`); other C libraries are left alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
