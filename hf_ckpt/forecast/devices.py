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


@dataclasses.dataclass(frozen=True)
class Device:
    """Figures of one device. Rates are those of its data sheet."""

    name: str
    """The name that `hf-ckpt plan --device` accepts."""
    title: str
    """Its name in texts: `RTX 4090`, or `this CPU`."""
    memory_bytes: int | None
    """Memory available to a process (`total_memory` of torch's device properties); None for a CPU, which may vary."""
    flops16: float
    """Operations per second with dense matrices in bfloat16, or in float16 on devices without bfloat16."""
    flops32: float
    """Operations per second in float32, without TF32."""
    bandwidth: float
    """Bytes per second from and to the device's memory."""
    host_bandwidth: float
    """Bytes per second from and to pinned host memory; 0 for a CPU."""
    launch_nanoseconds: int
    """Least time of an operation: the time that the host needs to launch it."""
    words: tuple[str, ...]
    """Words that all occur in the name that the device reports."""
    bfloat16: bool
    """Whether it computes in bfloat16. Others train in float16."""

    def nanoseconds(self, flops: int, moved_bytes: int, element_bytes: int) -> int:
        """Predicted time of one operation: that of its computing or of its memory traffic, whichever is longer.

        It reads and writes `moved_bytes`. `element_bytes` distinguishes 16-bit from 32-bit computing.
        """
        # A training step reaches about 60 % and 75 % of the rates of data sheets. An operation waits for the slower of
        # the two, and a small one for the host, which launches it.
        computing = flops / (0.6 * (self.flops16 if element_bytes <= 2 else self.flops32))
        moving = moved_bytes / (0.75 * self.bandwidth)
        return max(self.launch_nanoseconds, round(max(computing, moving) * 1e9))


def _row_of(row: dict[str, str]) -> Device:
    memory_bytes = round(float(row["GiB"]) * GIB) if row["GiB"] else None
    words = row["reported words"] or row["--device"].replace("-", " ")
    return Device(
        name=row["--device"],
        title=row["device"],
        memory_bytes=memory_bytes,
        flops16=float(row["16 bits"]) * 1e12,
        flops32=float(row["float32"]) * 1e12,
        bandwidth=float(row["TB/s"]) * 1e12,
        host_bandwidth=float(row["host GB/s"]) * 1e9,
        launch_nanoseconds=int(row["launch ns"]),
        words=tuple(words.split()),
        bfloat16=row["bfloat16"] == "yes",
    )


with Path(__file__).with_suffix(".csv").open(encoding="utf-8") as _file:
    DEVICES = {device.name: device for device in map(_row_of, csv.DictReader(_file))}
"""Name -> row. The last, `cpu`, is a guess at a few cores of a server."""


def device_named(name: str) -> Device:
    """The row of a device, by its name or title in the table, or in common spelling: `RTX 4090`, `nvidia-t4`.

    Raises `HfCkptError` for unknown names, with near matches.
    """

    def plain(name: str) -> str:
        """Without its maker, the words before its number, spaces and punctuation."""
        # People copy the name from `nvidia-smi`, from a shop, or from a cloud's list of machines.
        return re.sub(r"nvidia|geforce|tesla|amd|instinct|rtx|[\W_]|gb$", "", name.lower())

    rows = {plain(title): device for device in DEVICES.values() for title in (device.title, device.name)}
    if plain(name) in rows:
        return rows[plain(name)]
    near = [rows[row].name for row in difflib.get_close_matches(plain(name), rows)] or DEVICES
    raise HfCkptError(f"{shown(name)} is not a known device: use {', '.join(near)}, or its memory as --budget 24GiB.")


def this_device(devices: Collection[torch.device] | None = None) -> Device:
    """The row of an accelerator, with the memory that its driver reports, or the row of the CPU.

    It is the row whose words are all in the name that the accelerator reports, such as "NVIDIA A100-SXM4-80GB". If
    there are several, the one with the most words wins: an "NVIDIA H100 PCIe" is not an "h100". An unknown accelerator
    gets the row of an 80 GB A100, with a warning. `devices` are those of a model; None asks for the machine's.
    """
    from hf_ckpt.compat.devices import device_name
    from hf_ckpt.measure.memory import device_memory

    name = device_name(devices)
    if name == "cpu":
        return DEVICES["cpu"]
    reported = set(name.lower().replace("-", " ").split())
    matching = [device for device in DEVICES.values() if reported.issuperset(device.words)]
    if not matching:
        warn_once(log, "hf_ckpt has no figures for %s and predicts times with those of an A100.", name)
    # An "NVIDIA H100 PCIe" has the words of `h100`, too. The memory is the driver's, so that a wrong row costs only
    # the exactness of times, and no plan runs out of memory for it.
    device = max(matching, key=lambda device: len(device.words), default=DEVICES["a100-80"])
    return dataclasses.replace(device, memory_bytes=device_memory(0, devices).total_bytes)
