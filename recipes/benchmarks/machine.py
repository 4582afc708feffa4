"""The machine that a benchmark runs on: its name and versions, and what its CPU's allocator hands out and keeps."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from hf_ckpt.measure.machine import device_name

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # glibc's malloc.h


def circumstances(device: str) -> dict[str, Any]:
    """What figures depend on beside the code that is measured: when, on what machine, with which versions."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name() if device == "cuda" else f"{device} ({_processor()})",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "peft", "trl")},
        **({"cuda": torch.version.cuda, "driver": _driver()} if device == "cuda" else {}),
    }


class CpuAllocations:
    """What the CPU's allocator hands out and takes back, as torch's profiler sees it: also inside compiled graphs, and
    scratch memory within one operation.

        with CpuAllocations() as found:
            step()
        found.peak_bytes  # most that was alive at any moment of what was allocated since the beginning
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.left_bytes = 0
        """What was allocated since the beginning and is alive at the end, less what was alive before and is not."""
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> CpuAllocations:
        self._profile.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._profile.__exit__(*raised)
        current = 0
        for size in _cpu_allocations(self._profile):
            current += size
            self.peak_bytes = max(self.peak_bytes, current)
        self.left_bytes = current


def _cpu_allocations(profile: Any) -> list[int]:
    """Bytes of every allocation (negative: release) of the CPU's allocator under a finished profile, in their order."""
    # Private names, because the public events add allocations up by operation and lose their order.
    from torch._C._profiler import _EventType

    found: list[tuple[int, int]] = []
    left = list(profile.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left.extend(event.children)
        if event.typed[0] == _EventType.Allocation and event.typed[1].device.type == "cpu":
            found.append((event.start_time_ns, event.typed[1].alloc_size))
    return [size for _, size in sorted(found, key=lambda pair: pair[0])]


def keep_freed_memory() -> None:
    """From here on this process keeps the memory that it frees for its next tensors, as accelerators' allocators do.

    glibc gives large blocks back at once (`man 3 mallopt`), so that every step pays for fresh pages: on a CPU that, and
    not what is computed, would decide which way to save memory is the fastest. Other C libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, value in ((_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 * 2**20), (_M_MMAP_MAX, 0)):
            mallopt(parameter, value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """What the kernel says of NVIDIA's driver; None where it says nothing."""
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
