"""The device table."""

from __future__ import annotations

import pytest

from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.devices import DEVICES, device_like, device_named


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("h100-nvl", "NVIDIA H100 NVL"),
        ("a100-80", "NVIDIA A100-SXM4-80GB"),
        ("a100-40", "NVIDIA A100-PCIE-40GB"),
        ("v100-32", "Tesla V100-SXM2-32GB"),
        ("6000-ada", "NVIDIA RTX 6000 Ada Generation"),
        ("5060-ti-16", "NVIDIA GeForce RTX 5060 Ti"),
        ("4070-ti-super", "NVIDIA GeForce RTX 4070 Ti SUPER"),
        *((name, device.source.partition(",")[0]) for name, device in DEVICES.items() if name != "cpu"),
    ],
)
def test_devices_are_known_by_the_names_that_they_report(name, reported):
    assert device_like(reported) is DEVICES[name]
    assert device_like("NVIDIA A1000 Laptop GPU") is None


@pytest.mark.parametrize(
    ("name", "row"),
    [("RTX 4090", "4090"), ("NVIDIA GeForce RTX 4090", "4090"), ("A100_80gb", "a100-80"), ("2080ti", "2080-ti")],
)
def test_devices_are_understood_as_people_write_them(name, row):
    assert device_named(name) is DEVICES[row]
    with pytest.raises(HfCkptError, match="'b300' is not a known device; did you mean b200"):
        device_named("b300")
