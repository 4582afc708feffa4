"""Finds the row of the device table for the machine that this process runs on."""

from __future__ import annotations

import dataclasses
import logging

from hf_ckpt import compat
from hf_ckpt.measure.machine import device_memory, device_name
from hf_ckpt.prediction.devices import DEVICES, Device, device_like
from hf_ckpt.units import GIB

log = logging.getLogger(__name__)


def this_device() -> Device:
    """The row of this machine's accelerator, with the memory that its driver reports, or the row of the CPU.

    An unknown accelerator gets the row of an 80 GB A100, with a warning.
    """
    if compat.accelerator_type() is None:
        return DEVICES["cpu"]
    found = device_like(device_name())
    if found is None:
        log.warning("hf_ckpt has no figures for %s and predicts times with those of an A100.", device_name())
        found = DEVICES["a100-80"]
    return dataclasses.replace(found, memory_gib=device_memory(0).total_bytes / GIB)
