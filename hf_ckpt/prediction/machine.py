"""Finds the row of the device table for the machine that this process runs on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection

import torch

from hf_ckpt.logs import warn_once
from hf_ckpt.measure.machine import device_memory, device_name
from hf_ckpt.prediction.devices import DEVICES, Device, device_like
from hf_ckpt.units import GIB

log = logging.getLogger(__name__)


def this_device(devices: Collection[torch.device] | None = None) -> Device:
    """The row of an accelerator, with the memory that its driver reports, or the row of the CPU.

    An unknown accelerator gets the row of an 80 GB A100, with a warning.

    Args:
        devices: the devices of a model; None asks for the machine's accelerator.
    """
    name = device_name(devices)
    if name == "cpu":
        return DEVICES["cpu"]
    found = device_like(name)
    if found is None:
        warn_once(log, "hf_ckpt has no figures for %s and predicts times with those of an A100.", name)
        found = DEVICES["a100-80"]
    return dataclasses.replace(found, memory_gib=device_memory(0, devices).total_bytes / GIB)
