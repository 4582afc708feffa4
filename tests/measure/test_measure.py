"""Meters and clocks, on the CPU and on simulated accelerators."""

import collections
import functools
import sys
import types

import pytest
import torch

from hf_ckpt.compat import devices
from hf_ckpt.forecast.devices import this_device
from hf_ckpt.measure import levels, memory
from hf_ckpt.measure.live import LiveBytes

MIB = 2**20
ON_CPU, FIRST, SECOND = {torch.device("cpu")}, torch.device("cuda", 0), torch.device("cuda", 1)


def test_the_peak_on_a_cpu_is_the_largest_resident_size_so_far(tmp_path, monkeypatch):
    """Linux has it in a file, and other systems have no such file."""
    meter = memory.PeakMeter(ON_CPU)
    if sys.platform == "linux":
        assert meter.read_peak() > 50 * MIB  # torch alone is larger
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    assert meter.read_peak() is None
    (tmp_path / "status").write_text("Name:\tpython\nVmPeak:\t 900 kB\nVmHWM:\t     300 kB\nVmRSS:\t 200 kB\n")
    assert meter.read_peak() == 300 * 1024
    assert meter.reserved_bytes() is None


@pytest.fixture
def cuda(monkeypatch):
    """A machine with two devices of CUDA, of which the first one is the current one: their peaks, and what fails."""
    active = {FIRST: 7, SECOND: 700}
    cards = types.SimpleNamespace(peaks=dict(active), missing="")

    def statistics(device):
        sizes = {"active_bytes": (active[device], cards.peaks[device]), "reserved_bytes": (1000, 1100)}
        return {kind: {"all": {"current": current, "peak": peak}} for kind, (current, peak) in sizes.items()}

    def report(name, function, device):
        if name == cards.missing:
            raise RuntimeError(f"no {name}, as with CUDAPluggableAllocator")
        return function(device)

    for name, function in {
        "memory_stats_as_nested_dict": statistics,
        "reset_peak_memory_stats": lambda device: cards.peaks.update({device: active[device]}),
        "mem_get_info": lambda device: (5000, 9000),
        "get_device_name": lambda device: f"Card {device.index}",
    }.items():
        monkeypatch.setattr(torch.cuda, name, functools.partial(report, name, function))
    monkeypatch.setattr(memory, "highest", collections.Counter())
    monkeypatch.setattr(devices, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    return cards


def test_everything_is_asked_of_the_devices_of_the_model(cuda):
    """Not of the machine: a model trains on the second device, on both, or on the CPU beside them."""
    meters = [memory.PeakMeter(there) for there in ({SECOND}, {FIRST, SECOND}, ON_CPU)]
    cuda.peaks |= {FIRST: 17, SECOND: 1700}
    assert [meter.reserved_bytes() for meter in meters] == [1100, 2200, None]
    assert [meter.read_peak() for meter in meters[:2]] == [1700, 1717]
    assert memory.device_memory(1, {SECOND}) == memory.DeviceMemory(9000, 6000)
    assert memory.device_memory(1) == memory.DeviceMemory(9000, 6000)
    assert memory.device_memory(0, ON_CPU).total_bytes > 10**8
    assert [devices.device_name(there) for there in (None, {SECOND}, ON_CPU)] == ["Card 0", "Card 1", "cpu"]
    assert this_device(ON_CPU).name == "cpu"
    assert memory.spare_bytes({SECOND}) == memory.spare_bytes({FIRST, SECOND}) == 6000 - 1700
    assert memory.spare_bytes(ON_CPU) > 10**6
    model = torch.nn.Linear(10, 10)
    counted = levels.reader_for(ON_CPU, model)
    counted.stop()
    assert counted.read() == (440, 440)


def test_a_peak_counts_after_a_meter_has_reset_it(cuda):
    """All readers share the allocator's one peak: the callback resets it just before a check asks for spare memory."""
    meters = [memory.PeakMeter({SECOND}) for _ in range(2)]
    for meter in meters:
        cuda.peaks[SECOND] = 1700
        meter.read()
        assert memory.spare_bytes({SECOND}) == 6000 - 1700
    assert meters[0].read() == (700, 1700)
    assert [meter.read_peak() for meter in meters] == [700, 700]


@pytest.mark.parametrize(("missing", "held"), [("memory_stats_as_nested_dict", 1), ("reset_peak_memory_stats", 1000)])
def test_an_allocator_without_statistics_ends_nothing(missing, held, cuda, caplog):
    """Where it does not tell what it holds, the one byte that is known to be held counts."""
    cuda.missing, both = missing, {FIRST, SECOND}
    assert memory.device_memory(1, {SECOND}) == memory.DeviceMemory(9000, 5000 + held)
    assert memory.spare_bytes(both) is None
    for _ in range(2):
        assert memory.PeakMeter(both).read_peak() is None
        assert type(levels.reader_for(both)) is LiveBytes
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"no peaks (no {missing}" in said


def test_a_device_that_does_not_tell_its_memory_has_that_of_the_machine(cuda, caplog):
    cuda.missing, both = "mem_get_info", {FIRST, SECOND}
    for _ in range(2):
        assert memory.device_memory(1, both).total_bytes > 10**8
        assert memory.spare_bytes(both) is None  # not those of the host
    assert memory.PeakMeter(both).read_peak() == 707
    (said,) = [record.getMessage() for record in caplog.records]
    assert "does not report the memory" in said


def test_an_accelerator_that_tells_nothing_is_unknown():
    meter = memory.PeakMeter({torch.device("mps", 0)})
    assert meter.read_peak() is None
    assert type(levels.reader_for({torch.device("mps", 0)})) is LiveBytes


def test_statistics_without_a_module_of_their_own(monkeypatch):
    """`torch.accelerator` has them for every type of device, flat, and none before the first allocation."""
    names = [f"{kind}.all.{which}" for kind in ("active_bytes", "reserved_bytes") for which in ("current", "peak")]
    found = dict(zip(names, (1, 2, 3, 4), strict=True))
    monkeypatch.setattr(devices, "accelerator_type", lambda: "xla")
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: found if device.index else {}, raising=False)
    assert devices.allocator_bytes(torch.device("xla", 3)) == (1, 2, 3, 4)
    assert devices.allocator_bytes(torch.device("xla", 0)) == (0, 0, 0, 0)
    found |= {"active_bytes.all.current": 0, "active_bytes.all.peak": 0}
    found |= {"allocated_bytes.all.current": 1, "allocated_bytes.all.peak": 2}
    with pytest.raises(RuntimeError, match="counts allocated bytes, but no active ones"):
        devices.allocator_bytes(torch.device("xla", 3))
    del found["active_bytes.all.peak"]
    with pytest.raises(RuntimeError, match="keeps no active_bytes"):
        devices.allocator_bytes(torch.device("xla", 3))


def test_the_device_that_worked_longest_counts(monkeypatch):
    """Events belong to the devices of the model, whichever is the current one."""
    done = {FIRST: 0.0, SECOND: 0.0}

    class Event:
        def __init__(self, device):
            self.time = done[device]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.time - self.time

    monkeypatch.setattr(devices, "has_timed_events", lambda device: True)
    monkeypatch.setattr(devices, "timed_event", Event)
    clock = levels.DeviceClock({SECOND, FIRST})
    first = clock.stamp()
    done.update({FIRST: 3.0, SECOND: 8.0})
    assert clock.between(first, clock.stamp()) == 8_000_000
