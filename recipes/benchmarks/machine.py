"""The machine of a benchmark: its device and versions, seconds of a step, and the bytes that it allocates."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_ckpt.compat.devices import device_name

DEVICE = accelerator.type if (accelerator := torch.accelerator.current_accelerator(True)) is not None else "cpu"
"""Type of the device to train on."""


def circumstances() -> dict[str, Any]:
    """What figures depend on besides the measured code: the date, the machine, and versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    versions = {found.name.lower(): found.version for found in importlib.metadata.distributions()}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": f"{device_name(None)} ({processor})",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{package: versions.get(package) for package in ("torch", "transformers", "peft")},
    }


def seconds_of(step: Callable[[], object], is_complete: bool = True) -> float:
    """Seconds of a step, including the accelerator; if it need not be complete, of the host alone."""
    wait = torch.accelerator.synchronize if DEVICE != "cpu" else lambda: None
    wait()
    start = time.perf_counter()
    step()
    if is_complete:
        wait()
    return time.perf_counter() - start


class Allocations:
    """Bytes that the allocator of `DEVICE` hands out in a `with` block, also in compiled graphs and inside operations.

    On a CPU, torch's profiler records each allocation; `held` are the tensors that are alive before, whose storages
    count once each. An accelerator's allocator knows them.
    """

    def __init__(self, *held: Any) -> None:
        storages = [value.untyped_storage() for value in held if isinstance(value, torch.Tensor)]
        self.start_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        self.peak_bytes = self.start_bytes
        """The most bytes alive at any moment."""
        self.reserved_bytes: int | None = None  # the most that an accelerator's allocator held, in use or not
        self.left_bytes = 0
        """Bytes alive at the end, minus those at the beginning."""

    def __enter__(self) -> Allocations:
        if DEVICE == "cpu":
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
            self._profile.__enter__()
        else:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()
            self.start_bytes = torch.accelerator.memory_allocated()
        return self

    def __exit__(self, *raised: Any) -> None:
        if DEVICE != "cpu":
            self.peak_bytes = torch.accelerator.max_memory_allocated()
            self.reserved_bytes = torch.accelerator.max_memory_reserved()
            self.left_bytes = torch.accelerator.memory_allocated() - self.start_bytes
            return
        # Private names, because public events sum allocations by operation and lose their order.
        from torch._C._profiler import _EventType

        self._profile.__exit__(*raised)
        sizes: list[tuple[int, int]] = []
        events = list(self._profile.profiler.kineto_results.experimental_event_tree())
        while events:
            event = events.pop()
            events.extend(event.children)
            if event.typed[0] == _EventType.Allocation and event.typed[1].device.type == "cpu":
                sizes.append((event.start_time_ns, event.typed[1].alloc_size))  # negative: released
        for _, size in sorted(sizes, key=lambda pair: pair[0]):
            self.left_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.start_bytes + self.left_bytes)
