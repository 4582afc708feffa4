"""The device that models train on: its name, and its memory in total and to spare."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import torch

from hf_ckpt import compat


def device_name() -> str:
    """Return the name of the CUDA device, the type of another accelerator (`xpu`, `mps`), or `cpu` without one."""
    device_type = compat.accelerator_type()
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    return device_type or "cpu"


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of the device that models train on, in bytes.

    Without CUDA it is that of the machine, or what the container that the process runs in may use.
    """

    total_bytes: int
    """All memory of the device."""
    available_bytes: int
    """The most that this process may come to hold in tensors, with those that it holds now."""
    outside_bytes: int | None
    """What the process holds beside its tensors, to be subtracted where its resident size is compared with them. None
    on CUDA, whose allocator counts tensors only."""


def device_memory(held_bytes: int) -> DeviceMemory:
    """Read the memory of the current device. `held_bytes` are the bytes of the tensors that are known to be there."""
    if compat.accelerator_type() == "cuda":
        free, total = torch.cuda.mem_get_info()
        return DeviceMemory(total, free + torch.cuda.memory_reserved(), None)
    import psutil

    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    allowed = _container_memory()
    if allowed is not None and allowed[0] < total:
        total, available = allowed[0], min(available, allowed[0] - allowed[1])
    resident = int(psutil.Process().memory_info().rss)
    return DeviceMemory(total, available + held_bytes, max(0, resident - held_bytes))


def _container_memory() -> tuple[int, int] | None:
    """Return (limit, use without droppable caches) of the container, in bytes; None without a limit.

    Version 2 of control groups is looked at first, then version 1. https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    for folder, limit, use in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            most, used = int((folder / limit).read_text()), int((folder / use).read_text())
            cached = 0
            for line in (folder / "memory.stat").read_text().splitlines():
                if line.startswith(("inactive_file ", "total_inactive_file ")):
                    cached = int(line.split()[1])
            return most, max(0, used - cached)
    return None
