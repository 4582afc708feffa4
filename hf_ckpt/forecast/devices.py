"""The devices that can be planned for: the rows of `devices.csv`, from data sheets. Importing it does not import torch.

docs/devices.md explains the columns. Sites of the documentation show the file as a table.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from hf_ckpt.errors import HfCkptError, shown
from hf_ckpt.logs import warn_once
from hf_ckpt.units import GIB

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
FLOPS_SHARE, BANDWIDTH_SHARE = 0.6, 0.75
"""Shares of the rates of data sheets that a training step reaches."""


@dataclasses.dataclass(frozen=True)
class Device:
    """Figures of one device. Rates are those of its data sheet."""

    name: str
    """The name that `hf-ckpt plan --device` accepts."""
    source: str
    """The device whose data sheet gives the rates, by its name in texts."""
    memory_gib: float | None
    """Memory available to a process (`total_memory` of torch's device properties); None for a CPU, which may vary."""
    flops16: float
    """Operations per second with dense matrices in bfloat16, or in float16 on devices without bfloat16."""
    flops32: float
    """Operations per second in float32, without TF32."""
    bandwidth: float
    """Bytes per second from and to the device's memory."""
    host_bandwidth: float
    """Bytes per second from and to pinned host memory."""
    launch_nanoseconds: int
    """Least time of an operation: the time that the host needs to launch it."""
    words: tuple[str, ...]
    """Words that all occur in the name that the device reports."""
    bfloat16: bool
    """Whether it computes in bfloat16. Others train in float16."""

    @property
    def memory_bytes(self) -> int | None:
        """Memory available to a process, in bytes; None for a CPU."""
        return None if self.memory_gib is None else round(self.memory_gib * GIB)

    @property
    def title(self) -> str:
        """The device in a sentence: `RTX 4090`, or `this CPU`."""
        return self.source.removeprefix("NVIDIA ").removeprefix("AMD ") if self.memory_gib is not None else "this CPU"

    @property
    def offloading(self) -> tuple[float, int]:
        """(bytes per second of copies to host memory, 0 for a CPU; nanoseconds to start an operation)."""
        return self.host_bandwidth if self.memory_gib is not None else 0.0, self.launch_nanoseconds

    def nanoseconds(self, flops: int, moved_bytes: int, element_bytes: int) -> int:
        """Predicted time of one operation: that of its computing or of its memory traffic, whichever is longer.

        It reads and writes `moved_bytes`. `element_bytes` distinguishes 16-bit from 32-bit computing.
        """
        rate = self.flops16 if element_bytes <= 2 else self.flops32
        computing, moving = flops / (rate * FLOPS_SHARE), moved_bytes / (self.bandwidth * BANDWIDTH_SHARE)
        return max(self.launch_nanoseconds, round(max(computing, moving) * 1e9))


def _device(row: dict[str, str]) -> Device:
    flops16, flops32, bandwidth = (float(row[column]) * 1e12 for column in ("16 bits", "float32", "TB/s"))
    memory, host, launch = float(row["GiB"] or 0), float(row["host GB/s"]) * 1e9, int(row["launch ns"])
    words = (row["reported words"] or row["--device"].replace("-", " ")).split()
    names, bfloat16 = (row["--device"], row["device"]), row["bfloat16"] == "yes"
    return Device(*names, memory or None, flops16, flops32, bandwidth, host, launch, tuple(words), bfloat16)


with Path(__file__).with_suffix(".csv").open(encoding="utf-8") as _file:
    DEVICES = {device.name: device for device in map(_device, csv.DictReader(_file))}
"""Name -> row. The last, `cpu`, is a guess at a few cores of a server."""


def device_named(name: str) -> Device:
    """The row of a device, by its name in the table or in common spelling: `RTX 4090`, `a100-80gb`, `nvidia-t4`.

    Raises `HfCkptError` for unknown names, with near matches.
    """
    plain, rows = _plain(name), {_plain(known): device for known, device in DEVICES.items()}
    if plain in rows:
        return rows[plain]
    near = [row for row in rows if len(plain) > 1 and plain in row]
    near = near or difflib.get_close_matches(plain, rows, n=3, cutoff=0.6)
    meant = (
        f"did you mean {' or '.join(rows[row].name for row in near)}?" if near else f"known are {', '.join(DEVICES)}."
    )
    raise HfCkptError(f"{shown(name)} is not a known device; {meant} Or give its memory by --budget, such as 24GiB.")


def _plain(name: str) -> str:
    """The name of a device without its maker, the words before its number, spaces and punctuation."""
    spaced = re.sub(r"nvidia|geforce|tesla|amd|instinct|rtx|[\W_]", "", name.lower())
    return re.sub(r"(?<=\d)gb$", "", spaced)


def device_like(description: str) -> Device | None:
    """The row that matches the name a device reports, such as "NVIDIA A100-SXM4-80GB"; None if no row matches.

    If several match, the one with the most words wins: an "NVIDIA H100 PCIe" is not an "h100".
    """
    reported = set(description.lower().replace("-", " ").split())
    matching = [device for device in DEVICES.values() if reported.issuperset(device.words)]
    return max(matching, key=lambda device: len(device.words), default=None)


def this_device(devices: Collection[torch.device] | None = None) -> Device:
    """The row of an accelerator, with the memory that its driver reports, or the row of the CPU.

    An unknown accelerator gets the row of an 80 GB A100, with a warning. `devices` are those of a model; None asks for
    the machine's accelerator.
    """
    from hf_ckpt.measure.machine import device_memory, device_name

    name = device_name(devices)
    if name == "cpu":
        return DEVICES["cpu"]
    device = device_like(name)
    if device is None:
        warn_once(log, "hf_ckpt has no figures for %s and predicts times with those of an A100.", name)
        device = DEVICES["a100-80"]
    return dataclasses.replace(device, memory_gib=device_memory(0, devices).total_bytes / GIB)
