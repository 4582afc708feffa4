"""The device table."""

from __future__ import annotations

import pytest

from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.devices import DEVICES, device_like, device_named


def test_devices_are_known_by_their_own_names():
    for names in (
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("h100-pcie", "NVIDIA H100 PCIe"),
        ("h100-nvl", "NVIDIA H100 NVL"),
        ("gh200", "NVIDIA GH200 480GB"),
        ("a100-80", "NVIDIA A100-SXM4-80GB"),
        ("a100-40", "NVIDIA A100-PCIE-40GB"),
        ("v100-32", "Tesla V100-SXM2-32GB"),
        ("l40s", "NVIDIA L40S"),
        ("a10g", "NVIDIA A10G"),
        ("a6000", "NVIDIA RTX A6000"),
        ("6000-ada", "NVIDIA RTX 6000 Ada Generation"),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("5060-ti-16", "NVIDIA GeForce RTX 5060 Ti"),
        ("4070-ti-super", "NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("4070-ti", "NVIDIA GeForce RTX 4070 Ti"),
        ("4070", "NVIDIA GeForce RTX 4070"),
        ("mi300x", "AMD Instinct MI300X"),
    ):
        assert device_like(names[1]) is DEVICES[names[0]], names
    for name, device in DEVICES.items():
        assert name == "cpu" or device_like(device.source.partition(",")[0]) is device, name
    assert device_like("NVIDIA A1000 Laptop GPU") is None
    with pytest.raises(HfCkptError, match="'b300' is not a known device; did you mean b200"):
        device_named("b300")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *(("rtx4090", "4090"), ("RTX 4090", "4090"), ("NVIDIA GeForce RTX 4090", "4090"), ("a100-80gb", "a100-80")),
        *(
            ("A100_80", "a100-80"),
            ("rtx-a6000", "a6000"),
            ("2080ti", "2080-ti"),
            ("Tesla T4", "t4"),
            ("V100 32GB", "v100-32"),
        ),
    ],
)
def test_devices_are_understood_as_people_write_them(name, row):
    assert device_named(name) is DEVICES[row]
