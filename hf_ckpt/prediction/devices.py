"""A table of devices: the figures of their data sheets, and the share of them that training reaches. Does not import
torch."""

from __future__ import annotations

import dataclasses
import difflib
import re

from hf_ckpt.errors import HfCkptError, shown
from hf_ckpt.units import UnitError, parse_bytes

_GIB = 2**30
_TERA = 10**12


@dataclasses.dataclass(frozen=True)
class Device:
    """Figures of one device. Rates are peaks; the efficiencies are the shares of them that a training step reaches."""

    name: str
    """The name that `hf-ckpt plan --device` accepts."""
    memory_gib: float | None
    """Memory available to a process, in GiB: `total_memory` of torch's device properties. The data sheet and
    `nvidia-smi` say more, because the driver reserves some. None for a CPU, where it depends on the machine."""
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
    flops_efficiency: float = 0.6
    """Share of `flops16` or `flops32` that a training step reaches."""
    bandwidth_efficiency: float = 0.75
    """Share of `bandwidth` that a training step reaches."""
    source: str = ""
    """The device whose data sheet gives the rates, by its name in texts."""
    reported: str = ""
    """The memory that the vendor's tool prints. `memory_gib` is from torch's out-of-memory errors in the public reports
    that docs/devices.md lists; drivers differ by about 0.1 GiB."""
    words: tuple[str, ...] = ()
    """Words that must all occur in the name that the device reports; if empty, those of `name`."""
    bfloat16: bool = True
    """Whether it computes in bfloat16, as NVIDIA's cards do since Ampere. Others train in float16."""

    @property
    def memory_bytes(self) -> int | None:
        """Memory available to a process, in bytes; None for a CPU, where it depends on the machine."""
        return None if self.memory_gib is None else round(self.memory_gib * _GIB)

    @property
    def title(self) -> str:
        """The device in a sentence: `RTX 4090`, or `this CPU`."""
        return self.source.removeprefix("NVIDIA ").removeprefix("AMD ") if self.memory_gib is not None else "this CPU"

    def nanoseconds(self, flops: int, moved_bytes: int, element_bytes: int) -> int:
        """Predicted time of one operation: that of its computing or of its memory traffic, whichever is longer.

        Args:
            flops: floating-point operations.
            moved_bytes: bytes read and written.
            element_bytes: size of an element, which distinguishes 16-bit from 32-bit computing.
        """
        rate = self.flops16 if element_bytes <= 2 else self.flops32
        computing = flops / (rate * self.flops_efficiency)
        moving = moved_bytes / (self.bandwidth * self.bandwidth_efficiency)
        return max(self.launch_nanoseconds, round(max(computing, moving) * 1e9))


def _row(
    name: str,
    source: str,
    memory: tuple[float, str],
    rates: tuple[float, float, float, float],
    launch: int,
    words: str = "",
    *,
    bfloat16: bool = True,
) -> Device:
    """A row of an accelerator.

    Args:
        name: the name that `--device` accepts.
        source: the device whose data sheet gives the rates.
        memory: GiB that torch reports, and what the vendor's tool prints.
        rates: 10^12 operations per second in 16 bits (with float32 accumulation) and in float32, 10^12 bytes per second
            of the device's memory, and 10^9 bytes per second of its link to the host.
        launch: least nanoseconds of an operation.
        words: words that must all occur in the name that the device reports, if they differ from `name`.
        bfloat16: whether it computes in bfloat16.
    """
    flops16, flops32, bandwidth, host = rates
    return Device(
        name,
        memory[0],
        flops16 * _TERA,
        flops32 * _TERA,
        bandwidth * _TERA,
        host * 1e9,
        launch,
        source=source,
        reported=memory[1],
        words=tuple(words.split()),
        bfloat16=bfloat16,
    )


DEVICES = {
    device.name: device
    for device in (
        _row("h200", "NVIDIA H200", (139.80, "143771 MiB"), (989, 67, 4.8, 55), 5000),
        _row("h100", "NVIDIA H100 SXM", (79.11, "81559 MiB"), (989, 67, 3.35, 55), 5000),
        _row("h100-pcie", "NVIDIA H100 PCIe", (79.11, "81559 MiB"), (756, 51, 2.0, 55), 5000, "h100 pcie"),
        _row("h100-nvl", "NVIDIA H100 NVL", (93.00, "95830 MiB"), (835, 60, 3.9, 55), 5000, "h100 nvl"),
        _row("gh200", "NVIDIA GH200", (94.50, "97871 MiB"), (989, 67, 4.0, 400), 5000),
        _row("b200", "NVIDIA B200", (178.35, "183359 MiB"), (2250, 75, 7.67, 55), 5000),
        _row("a100-80", "NVIDIA A100 80GB", (79.15, "81920 MiB"), (312, 19.5, 2.039, 25), 6000, "a100 80gb"),
        _row("a100-40", "NVIDIA A100 40GB", (39.39, "40960 MiB"), (312, 19.5, 1.555, 25), 6000, "a100 40gb"),
        _row(
            "v100-32", "NVIDIA V100 32GB", (31.74, "32768 MiB"), (125, 15.7, 0.9, 12), 7000, "v100 32gb", bfloat16=False
        ),
        _row(
            "v100-16", "NVIDIA V100 16GB", (15.77, "16384 MiB"), (125, 15.7, 0.9, 12), 7000, "v100 16gb", bfloat16=False
        ),
        _row("a30", "NVIDIA A30", (23.53, "24576 MiB"), (165, 10.3, 0.933, 25), 6000),
        _row("a40", "NVIDIA A40", (44.40, "46068 MiB"), (149.7, 37.4, 0.696, 25), 6000),
        _row("l40s", "NVIDIA L40S", (44.40, "46068 MiB"), (362, 91.6, 0.864, 25), 6000),
        _row("l4", "NVIDIA L4", (22.05, "23034 MiB"), (121, 30.3, 0.3, 25), 7000),
        _row("a10", "NVIDIA A10", (22.06, "23028 MiB"), (125, 31.2, 0.6, 25), 7000),
        _row("a10g", "NVIDIA A10G", (22.06, "23028 MiB"), (70, 31.5, 0.6, 25), 7000),
        _row("t4", "NVIDIA T4", (14.56, "15360 MiB"), (65, 8.1, 0.32, 12), 8000, bfloat16=False),
        _row("a6000", "NVIDIA RTX A6000", (47.41, "49140 MiB"), (154.8, 38.7, 0.768, 25), 6000),
        _row("a5000", "NVIDIA RTX A5000", (23.56, "24564 MiB"), (111.1, 27.8, 0.768, 25), 6000),
        _row("a4000", "NVIDIA RTX A4000", (15.61, "16376 MiB"), (76.7, 19.2, 0.448, 25), 6000),
        _row("6000-ada", "NVIDIA RTX 6000 Ada", (47.37, "49140 MiB"), (364, 91.1, 0.96, 25), 5000, "rtx 6000 ada"),
        _row("rtx-pro-6000", "NVIDIA RTX PRO 6000", (94.97, "97887 MiB"), (503.8, 125, 1.792, 50), 5000),
        _row("5090", "NVIDIA RTX 5090", (31.36, "32607 MiB"), (209.5, 104.8, 1.792, 50), 5000),
        _row("5080", "NVIDIA RTX 5080", (15.46, "16303 MiB"), (112.6, 56.3, 0.96, 50), 5000),
        _row("5070-ti", "NVIDIA RTX 5070 Ti", (15.46, "16303 MiB"), (87.9, 43.9, 0.896, 50), 5000),
        _row("5070", "NVIDIA RTX 5070", (11.45, "12227 MiB"), (61.7, 30.9, 0.672, 50), 5000),
        _row("5060", "NVIDIA RTX 5060", (7.48, "8151 MiB"), (38.4, 19.2, 0.448, 25), 5000),
        _row("5060-ti-16", "NVIDIA RTX 5060 Ti 16GB", (15.45, "16311 MiB"), (47.4, 23.7, 0.448, 25), 5000, "5060 ti"),
        _row("4090", "NVIDIA RTX 4090", (23.52, "24564 MiB"), (165, 82.6, 1.008, 25), 5000),
        _row("4080", "NVIDIA RTX 4080", (15.57, "16376 MiB"), (97.5, 48.7, 0.717, 25), 5000),
        _row("4070-ti-super", "NVIDIA RTX 4070 Ti SUPER", (15.57, "16376 MiB"), (88.2, 44.1, 0.672, 25), 5000),
        _row("4070-ti", "NVIDIA RTX 4070 Ti", (11.60, "12282 MiB"), (80.2, 40.1, 0.504, 25), 5000),
        _row("4070-super", "NVIDIA RTX 4070 SUPER", (11.60, "12282 MiB"), (71, 35.5, 0.504, 25), 5000),
        _row("4070", "NVIDIA RTX 4070", (11.60, "12282 MiB"), (58.3, 29.1, 0.504, 25), 5000),
        _row("4060-ti-16", "NVIDIA RTX 4060 Ti 16GB", (15.57, "16380 MiB"), (44.1, 22.1, 0.288, 12), 5000, "4060 ti"),
        _row("4060-ti-8", "NVIDIA RTX 4060 Ti 8GB", (7.63, "8188 MiB"), (44.1, 22.1, 0.288, 12), 5000, "4060 ti 8gb"),
        _row("4060", "NVIDIA RTX 4060", (7.63, "8188 MiB"), (30.2, 15.1, 0.272, 12), 5000),
        _row("3090", "NVIDIA RTX 3090", (23.56, "24576 MiB"), (71, 35.6, 0.936, 25), 6000),
        _row("3080-ti", "NVIDIA RTX 3080 Ti", (11.63, "12288 MiB"), (68.2, 34.1, 0.912, 25), 6000),
        _row("3080", "NVIDIA RTX 3080 10GB", (9.65, "10240 MiB"), (59.5, 29.8, 0.76, 25), 6000),
        _row("3070", "NVIDIA RTX 3070", (7.66, "8192 MiB"), (40.6, 20.3, 0.448, 25), 6000),
        _row("3060-ti", "NVIDIA RTX 3060 Ti", (7.66, "8192 MiB"), (32.4, 16.2, 0.448, 25), 6000),
        _row("3060", "NVIDIA RTX 3060 12GB", (11.75, "12288 MiB"), (25.5, 12.7, 0.36, 25), 6000),
        _row("2080-ti", "NVIDIA RTX 2080 Ti", (10.75, "11264 MiB"), (56.9, 14.2, 0.616, 12), 7000, bfloat16=False),
        _row("mi300x", "AMD MI300X", (191.98, "206141652992 B"), (1307, 163.4, 5.3, 55), 6000),
        _row("mi250x", "AMD MI250X, one of its two dies", (63.98, "68702699520 B"), (191.5, 23.9, 1.638, 25), 7000),
        # A few cores of a server: only a guess, which measuring replaces.
        Device("cpu", None, 0.2 * _TERA, 0.15 * _TERA, 20e9, 20e9, 5000, source="a guess at two server cores"),
    )
}


def device_named(name: str) -> Device:
    """The row of a device, by its name in the table or in common spelling: `RTX 4090`, `a100-80gb`, `nvidia-t4`.

    Raises `HfCkptError` for unknown names, with near matches, and for a size in bytes, which is a budget.
    """
    plain = _plain(name)
    rows = {_plain(device.name): device for device in DEVICES.values()}
    if plain in rows:
        return rows[plain]
    try:
        size = parse_bytes(name)
    except UnitError:
        size = 0
    if size >= _GIB:
        near = [device.name for device in DEVICES.values() if 0.9 < (device.memory_bytes or 0) / size < 1.02]
        cards = f", or a card with about as much: {', '.join(near)}" if near else ""
        raise HfCkptError(f"{shown(name)} is a size and no device: give --budget {name.replace(' ', '')}{cards}.")
    found = [rows[row].name for row in rows if len(plain) > 1 and row.startswith(plain)]  # a100, v100, l40
    found += [rows[row].name for row in rows if len(plain) > 2 and plain in row[1:]]  # 6000
    found = found or [rows[row].name for row in difflib.get_close_matches(plain, rows, n=3, cutoff=0.6)]
    hint = f"did you mean {' or '.join(found)}?" if found else f"known are {', '.join(DEVICES)}."
    raise HfCkptError(f"{shown(name)} is not a known device; {hint} Or give its memory by --budget, such as 24GiB.")


def _plain(name: str) -> str:
    """The name of a device without its maker, the words before its number, spaces and punctuation."""
    spaced = re.sub(r"nvidia|geforce|tesla|amd|instinct|rtx|[\W_]", "", name.lower())
    return re.sub(r"(?<=\d)gb$", "", spaced)


def device_like(description: str) -> Device | None:
    """The row that matches the name a device reports, such as "NVIDIA A100-SXM4-80GB"; None if no row matches.

    If several match, the one with the most words wins: an "NVIDIA H100 PCIe" is not an "h100".
    """
    said = set(description.lower().replace("-", " ").split())
    fitting = [device for device in DEVICES.values() if said.issuperset(device.words or device.name.split("-"))]
    return max(fitting, key=lambda device: len(device.words or device.name.split("-")), default=None)
