"""The machine of a benchmark: its name and versions, and the allocations of its CPU."""

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

from hf_ckpt import compat
from hf_ckpt.measure.machine import device_name

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # glibc's malloc.h


def circumstances() -> dict[str, Any]:
    """What figures depend on besides the measured code: the date, the machine, and versions."""
    name = device_name()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": f"cpu ({_processor()})" if name == "cpu" else name,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "transformers", "peft", "trl")},
        **({"cuda": torch.version.cuda} if compat.accelerator_type() == "cuda" else {}),
    }


class CpuAllocations:
    """Records allocations and frees on the CPU with torch's profiler, including compiled graphs and scratch memory
    within one operation.

        with CpuAllocations() as found:
            step()
        found.peak_bytes  # the most bytes alive at any moment, above those at the beginning
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.left_bytes = 0
        """Bytes alive at the end, minus those at the beginning."""
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> CpuAllocations:
        self._profile.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        # Private names, because public events sum allocations by operation and lose their order.
        from torch._C._profiler import _EventType

        self._profile.__exit__(*raised)
        found: list[tuple[int, int]] = []
        events = list(self._profile.profiler.kineto_results.experimental_event_tree())
        while events:
            event = events.pop()
            events.extend(event.children)
            if event.typed[0] == _EventType.Allocation and event.typed[1].device.type == "cpu":
                found.append((event.start_time_ns, event.typed[1].alloc_size))  # negative: released
        for _, size in sorted(found, key=lambda pair: pair[0]):
            self.left_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.left_bytes)


def keep_freed_memory() -> None:
    """Make this process keep freed memory for its next tensors, like accelerators' allocators.

    glibc returns large blocks to the system at once (`man 3 mallopt`), so every step pays for new pages. On a CPU, that
    rather than computation would decide which way to save memory is the fastest. Other C libraries are not changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, value in ((_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 * 2**20), (_M_MMAP_MAX, 0)):
            mallopt(parameter, value)


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
