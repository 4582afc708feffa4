"""The device that models train on: its name, and its total and available memory."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from hf_ckpt import compat
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.memory import allocator_of

log = logging.getLogger(__name__)


def device_name(devices: Iterable[torch.device] | None = None) -> str:
    """Return the name of an accelerator's model, its type if torch does not tell the name, or `cpu` without one.

    Args:
        devices: the devices of a model; None asks for the machine's accelerator.
    """
    there = _accelerators(devices)
    return compat.devices.device_name(there[0]) if there else "cpu"


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of the devices that a model trains on, in bytes.

    On a CPU, and for `mps`, it is the memory of the machine, or the limit of the process's container. The same applies,
    with a warning, to other accelerators whose memory torch does not report.
    """

    total_bytes: int
    """All memory of the devices."""
    available_bytes: int
    """The most that this process can hold in tensors, including those that it holds now."""


def device_memory(held_bytes: int, devices: Iterable[torch.device] | None = None) -> DeviceMemory:
    """Read the memory of the devices that a model is on; that of several accelerators is added up.

    Args:
        held_bytes: bytes of tensors that are known to be in memory.
        devices: the devices of the model; None asks for the machine's accelerator.
    """
    there = _accelerators(devices)
    found = _memory_of(there, held_bytes)
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
    total, available = int(memory.total), int(memory.available)
    allowed = _container_memory()
    if allowed is not None and allowed[0] < total:
        total, available = allowed[0], min(available, allowed[0] - allowed[1])
    return DeviceMemory(total, available + held_bytes)


def spare_bytes(devices: Iterable[torch.device]) -> int:
    """Return how many bytes beyond its highest peak a model on these devices may use for something optional.

    On accelerators that is all that the peak leaves, or 0 if torch does not report it. On a CPU it is half of the
    memory that is available now.
    """
    there = compat.devices.accelerators(devices)
    if all(compat.devices.shares_host_memory(device.type) for device in there):
        return device_memory(0, there).available_bytes // 2
    memory = _memory_of(there, 0)
    try:
        peaks = [allocator_of(device).highest_peak() for device in there]
    except RuntimeError:  # an allocator without statistics
        return 0
    return 0 if memory is None else memory.available_bytes - sum(peaks)


def _accelerators(devices: Iterable[torch.device] | None) -> list[torch.device]:
    """Return the accelerators among a model's devices, or for None the current one of the machine, if any."""
    current = compat.devices.current_accelerator()
    return compat.devices.accelerators(devices if devices is not None else [current] if current is not None else [])


def _memory_of(devices: Collection[torch.device], held_bytes: int) -> DeviceMemory | None:
    """Return the memory of accelerators; None without one, if it is the machine's memory, or if it is not reported."""
    if not devices or any(compat.devices.shares_host_memory(device.type) for device in devices):
        return None
    try:
        told = [compat.devices.memory_info(device) for device in devices]
    except RuntimeError:  # torch has the function, but not for this device
        return None
    try:
        held = sum(compat.devices.allocator_bytes(device).reserved for device in devices)
    except RuntimeError:  # an allocator without statistics
        held = held_bytes
    return DeviceMemory(sum(total for _, total in told), sum(free for free, _ in told) + held)


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
