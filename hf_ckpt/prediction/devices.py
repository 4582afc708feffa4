"""A table of devices, a row each: what data sheets say, and the share of it that training reaches. Free of torch."""

from __future__ import annotations

import dataclasses

from hf_ckpt.errors import HfCkptError

_GB = 10**9
_TERA = 10**12


@dataclasses.dataclass(frozen=True)
class Device:
    """Figures of one device. Rates are peaks; the efficiencies say what share of them a training step reaches."""

    name: str
    """As `hf-ckpt plan --device` takes it."""
    memory_bytes: int | None
    """Bytes of memory; None for a CPU, where the machine decides."""
    flops16: float
    """Operations a second with dense matrices in bfloat16, or in float16 where there is no bfloat16."""
    flops32: float
    """Operations a second in float32, without TF32."""
    bandwidth: float
    """Bytes a second from and to the device's memory."""
    host_bandwidth: float
    """Bytes a second from and to pinned host memory."""
    launch_nanoseconds: int
    """Least time of an operation: what the host takes to start it."""
    flops_efficiency: float = 0.6
    """Share of `flops16` or `flops32` that a training step reaches."""
    bandwidth_efficiency: float = 0.75
    """Share of `bandwidth` that a training step reaches."""
    source: str = ""
    """Whose data sheet the figures are from."""

    def nanoseconds(self, flops: int, moved_bytes: int, element_bytes: int) -> int:
        """Predicted time of one operation: as long as its computing or its memory traffic takes, whichever is longer.

        Args:
            flops: floating-point operations.
            moved_bytes: bytes read and written.
            element_bytes: size of an element, which tells 16-bit from 32-bit computing.
        """
        rate = self.flops16 if element_bytes <= 2 else self.flops32
        computing = flops / (rate * self.flops_efficiency)
        moving = moved_bytes / (self.bandwidth * self.bandwidth_efficiency)
        return max(self.launch_nanoseconds, round(max(computing, moving) * 1e9))


DEVICES = {
    device.name: device
    for device in (
        Device("h200", 141 * _GB, 989 * _TERA, 67 * _TERA, 4.8 * _TERA, 55e9, 5000, source="NVIDIA H200 SXM"),
        Device("h100", 80 * _GB, 989 * _TERA, 67 * _TERA, 3.35 * _TERA, 55e9, 5000, source="NVIDIA H100 SXM"),
        Device("a100-80", 80 * _GB, 312 * _TERA, 19.5 * _TERA, 2.039 * _TERA, 25e9, 6000, source="NVIDIA A100 80GB"),
        Device("a100-40", 40 * _GB, 312 * _TERA, 19.5 * _TERA, 1.555 * _TERA, 25e9, 6000, source="NVIDIA A100 40GB"),
        Device("l40s", 48 * _GB, 362 * _TERA, 91.6 * _TERA, 0.864 * _TERA, 25e9, 6000, source="NVIDIA L40S"),
        Device("l4", 24 * _GB, 121 * _TERA, 30.3 * _TERA, 0.3 * _TERA, 25e9, 7000, source="NVIDIA L4"),
        Device("a10", 24 * _GB, 125 * _TERA, 31.2 * _TERA, 0.6 * _TERA, 25e9, 7000, source="NVIDIA A10"),
        Device("t4", 16 * _GB, 65 * _TERA, 8.1 * _TERA, 0.32 * _TERA, 12e9, 8000, source="NVIDIA T4"),
        Device("4090", 24 * _GB, 165 * _TERA, 82.6 * _TERA, 1.008 * _TERA, 25e9, 5000, source="NVIDIA RTX 4090"),
        # A few cores of a server: only a guess, which measuring replaces.
        Device("cpu", None, 0.2 * _TERA, 0.15 * _TERA, 20e9, 20e9, 5000, source="a guess at two server cores"),
    )
}


def device_named(name: str) -> Device:
    """The row of a device, by its name in the table. Raises `HfCkptError` where there is no such row."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise HfCkptError(f"device must be one of {', '.join(DEVICES)}, but is {name!r} instead.")
    return found


def device_like(description: str) -> Device | None:
    """The row that fits what a device calls itself, as "NVIDIA A100-SXM4-80GB"; None where no row fits."""
    words = description.lower().replace("-", " ").split()
    for name in DEVICES:
        model, _, size = name.partition("-")
        if model in words and (not size or f"{size}gb" in words):
            return DEVICES[name]
    return None
