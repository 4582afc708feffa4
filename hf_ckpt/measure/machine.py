"""The device that models train on: its name, and its total and available memory."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection
from pathlib import Path

import torch

from hf_ckpt import compat
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.memory import forgotten_peak_bytes

log = logging.getLogger(__name__)


def device_name() -> str:
    """Return the name of the CUDA device, the type of another accelerator (`xpu`, `mps`), or `cpu` without one."""
    device_type = compat.accelerator_type()
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    return device_type or "cpu"


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of the device that models train on, in bytes.

    On a CPU, and for `mps`, it is the memory of the machine, or the limit of the process's container. The same applies,
    with a warning, to other accelerators whose memory torch does not report.
    """

    total_bytes: int
    """All memory of the device."""
    available_bytes: int
    """The most that this process can hold in tensors, including those that it holds now."""


def device_memory(held_bytes: int, devices: Collection[torch.device] = ()) -> DeviceMemory:
    """Read the memory of the devices that a model is on.

    Args:
        held_bytes: bytes of tensors that are known to be in memory.
        devices: the accelerators that the model is spread over, whose memory is added up; by default the current one.
    """
    found = _accelerator_memory(devices)
    if found is not None:
        return found
    import psutil

    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    allowed = _container_memory()
    if allowed is not None and allowed[0] < total:
        total, available = allowed[0], min(available, allowed[0] - allowed[1])
    return DeviceMemory(total, available + held_bytes)


def spare_bytes(devices: Collection[torch.device] = ()) -> int:
    """Return how many bytes beyond its highest peak the process may use for something optional.

    On accelerators that is all that the peak leaves, or 0 if torch does not report it. On a CPU it is half of the
    memory that is available now.
    """
    device_type = compat.accelerator_type()
    module = None if device_type is None else compat.memory_module(device_type)
    if device_type is None or compat.shares_host_memory(device_type):
        return device_memory(0).available_bytes // 2
    if module is None or compat.memory_readers(device_type) is None:
        return 0
    mine: list[torch.device | None] = [device for device in devices if device.type == device_type]
    peak = sum(int(module.max_memory_allocated(device)) for device in mine or [None])
    return device_memory(0, devices).available_bytes - peak - forgotten_peak_bytes(module)


def _accelerator_memory(devices: Collection[torch.device]) -> DeviceMemory | None:
    """Return the memory of accelerators; None without one, if it is the machine's memory, or if it is not reported.

    Raises torch's error if an accelerator that reports its memory fails to: any other figure would be wrong.
    """
    device_type = compat.accelerator_type()
    if device_type is None or compat.shares_host_memory(device_type):
        return None
    mine: list[torch.device | None] = [device for device in devices if device.type == device_type]
    readers = compat.memory_readers(device_type)
    try:
        if readers is not None:
            found = [(*readers[0](device), readers[1](device)) for device in mine or [None]]
            return DeviceMemory(sum(whole for _, whole, _ in found), sum(free + held for free, _, held in found))
    except NotImplementedError:  # torch has the function, but not for this type of device
        pass
    warn_once(
        log,
        "hf_ckpt: torch does not tell the memory of %s, so the memory of the machine is taken in its place. Give the "
        "budget in bytes, as 20GiB: shares and `auto` would be of the wrong memory.",
        device_type,
    )
    return None


def _container_memory() -> tuple[int, int] | None:
    """Return (limit, use without droppable caches) of the container, in bytes; None without a limit.

    It reads control groups version 2 first, then version 1. https://docs.kernel.org/admin-guide/cgroup-v2.html
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
