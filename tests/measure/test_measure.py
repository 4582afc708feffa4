"""Meters, clocks and live-byte counts, compared with real allocations and times."""

from __future__ import annotations

import functools
import mmap
import sys
import time

import pytest
import torch

from hf_ckpt import compat
from hf_ckpt.compat import devices
from hf_ckpt.forecast.devices import this_device
from hf_ckpt.logs import forget_warnings
from hf_ckpt.measure import clocks, levels, memory
from hf_ckpt.measure.live import LiveBytes

MIB = 2**20
ON_CPU, FIRST, SECOND = {torch.device("cpu")}, torch.device("cuda", 0), torch.device("cuda", 1)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def test_live_bytes_of_a_chain_worked_out_by_hand():
    """x is kept by the first product, its square by the second, then come the result and a gradient."""
    x = torch.ones(1000, requires_grad=True)  # 4000 bytes each
    with LiveBytes() as live:
        y = x * x
        assert live.current_bytes == 4000
        z = y * y
        assert live.current_bytes == 8000
        del y  # z's graph still holds it
        assert live.current_bytes == 8000
        z.detach_()
        assert live.current_bytes == 4000
        del z
    assert live.current_bytes == 0
    assert live.peak_bytes == 8000


@on_linux
def test_resident_peak_follows_a_large_block_and_forgets_it():
    meter = memory.PeakMeter(ON_CPU)
    meter.reset()
    before = meter.peak_bytes()
    # Pages from the kernel: freed tensors may stay with the C allocator.
    with mmap.mmap(-1, 100 * MIB) as big:
        for place in range(0, len(big), mmap.PAGESIZE):
            big[place] = 1
    grown = meter.peak_bytes() - before
    meter.reset()
    assert 90 * MIB < grown < 200 * MIB
    if "since the process began" not in meter.source:  # the kernel lets a process reset its peak
        assert meter.peak_bytes() - before < 50 * MIB
    assert meter.reserved_bytes() is None
    assert "resident size" in meter.source


# --- accelerators, without one ----------------------------------------------------------------------------------------


class Cuda:
    """Replaces what `torch.cuda` tells of two devices."""

    def __init__(self, monkeypatch):
        self.active = {FIRST: 7, SECOND: 700}
        self.peaks, self.errors = dict(self.active), set()
        names = ("memory_stats_as_nested_dict", "reset_peak_memory_stats", "mem_get_info", "get_device_name")
        for name in names:
            monkeypatch.setattr(torch.cuda, name, functools.partial(self._tell, name, getattr(self, name)))
        monkeypatch.setattr(memory, "allocator_of", functools.cache(memory.Allocator))
        forget_warnings()

    def _tell(self, name, function, device):
        if name in self.errors:
            raise RuntimeError(f"no {name}, as with CUDAPluggableAllocator")
        return function(device)

    def memory_stats_as_nested_dict(self, device):
        reserved = {"all": {"current": 1000, "peak": 1100}}
        active = {"all": {"current": self.active[device], "peak": self.peaks[device]}}
        return {"active_bytes": active, "reserved_bytes": reserved}

    def reset_peak_memory_stats(self, device):
        self.peaks[device] = self.active[device]

    def mem_get_info(self, device):
        return 5000, 9000

    def get_device_name(self, device):
        return f"Card {device.index}"

    def use(self, device, size):
        self.active[device] += size
        self.peaks[device] = max(self.peaks[device], self.active[device])


@pytest.fixture
def cuda(monkeypatch):
    """A machine with two devices of CUDA, of which the first one is the current one."""
    monkeypatch.setattr(devices, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    return Cuda(monkeypatch)


def test_everything_is_asked_of_the_devices_of_the_model(cuda):
    """Not of the machine: a model trains on the second device, on both, or on the CPU beside them."""
    meters = [memory.PeakMeter(there) for there in ({SECOND}, {FIRST, SECOND}, ON_CPU)]
    cuda.use(FIRST, 10)
    cuda.use(SECOND, 1000)
    cuda.use(SECOND, -1000)
    assert [meter.peak_bytes() for meter in meters[:2]] == [1700, 1717]
    assert [meter.reserved_bytes() for meter in meters] == [1100, 2200, None]
    assert [meter.source.partition(",")[0] for meter in meters] == ["cuda allocator"] * 2 + ["process resident size"]
    assert memory.device_memory(1, {SECOND}) == memory.DeviceMemory(9000, 6000)
    assert memory.device_memory(1, {FIRST, SECOND}) == memory.DeviceMemory(18000, 12000)
    assert memory.device_memory(1) == memory.DeviceMemory(9000, 6000)
    assert memory.device_memory(0, ON_CPU).total_bytes > 10**8
    assert [devices.device_name(there) for there in (None, {SECOND}, ON_CPU)] == ["Card 0", "Card 1", "cpu"]
    assert this_device(ON_CPU).name == "cpu"
    assert memory.spare_bytes({SECOND}) == 6000 - 1700
    assert memory.spare_bytes(ON_CPU) > 10**6
    model = torch.nn.Linear(10, 10)
    counted = levels.meter_for(ON_CPU, model)
    counted.stop()
    assert counted.read() == (440, 440)
    assert type(levels.meter_for(ON_CPU, timed_only=True)) is clocks.DeviceClock


def test_a_peak_counts_after_a_meter_has_reset_it(cuda):
    """All readers share the allocator's one peak: the callback resets it just before a check asks for spare memory."""
    meters = [memory.PeakMeter({SECOND}) for _ in range(2)]
    for meter in meters:
        cuda.use(SECOND, 1000)
        cuda.use(SECOND, -1000)
        meter.reset()
        assert memory.spare_bytes({SECOND}) == 6000 - 1700
    assert [meter.peak_bytes() for meter in meters] == [1700, 700]
    meters[0].reset()
    assert [meter.peak_bytes() for meter in meters] == [700, 700]


@pytest.mark.parametrize(
    ("missing", "memory_of_both", "spare"),
    [
        ("memory_stats_as_nested_dict", (18000, 10001), 0),  # 1 byte of it is known to be held
        ("mem_get_info", None, 0),  # not 0 bytes of the host's memory
        ("reset_peak_memory_stats", (18000, 12000), 0),
    ],
)
def test_an_allocator_without_statistics_ends_nothing(missing, memory_of_both, spare, cuda, caplog):
    cuda.errors.add(missing)
    both = {FIRST, SECOND}
    found = memory.device_memory(1, both)
    assert (found.total_bytes, found.available_bytes) == memory_of_both if memory_of_both else found.total_bytes > 10**8
    assert memory.spare_bytes(both) == spare
    for _ in range(2):
        meter = memory.PeakMeter(both)
        counted = LiveBytes if missing != "mem_get_info" else memory.PeakMeter
        assert type(levels.meter_for(both)) is counted
    assert (meter.peak_bytes() is None) is (missing != "mem_get_info")
    (said,) = [record.getMessage() for record in caplog.records]
    assert "does not tell the memory" in said if missing == "mem_get_info" else f"no peaks (no {missing}" in said


@pytest.mark.parametrize("device_type", ["mps", "xla"])
def test_an_accelerator_that_tells_nothing_is_unknown(device_type):
    device = torch.device(device_type, 0)
    meter = memory.PeakMeter({device})
    assert meter.peak_bytes() is None
    assert meter.source == f"unknown ({device_type} reports no peak)"
    assert type(levels.meter_for({device})) is LiveBytes


def test_statistics_without_a_module_of_their_own(monkeypatch):
    """`torch.accelerator` has them for every type of device, flat, and none before the first allocation."""
    device = torch.device("xla", 3)
    found = {"active_bytes.all.current": 1, "active_bytes.all.peak": 2}
    found |= {"reserved_bytes.all.current": 3, "reserved_bytes.all.peak": 4}
    monkeypatch.setattr(devices, "accelerator_type", lambda: "xla")
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: found if device.index else {}, raising=False)
    assert compat.devices.allocator_bytes(device) == (1, 2, 3, 4)
    assert compat.devices.allocator_bytes(torch.device("xla", 0)) == (0, 0, 0, 0)
    del found["active_bytes.all.peak"]
    with pytest.raises(RuntimeError, match="keeps no active_bytes"):
        compat.devices.allocator_bytes(device)


@pytest.mark.parametrize("timed", [True, False])
def test_a_clock_of_several_devices(timed, monkeypatch):
    """The device that worked longest counts. Events belong to the devices of the model, whichever is the current one;
    if they measure no time, every point waits for the devices."""
    done, waited, now = {FIRST: 0.0, SECOND: 0.0}, [], iter(range(5, 100, 5))

    class Event:
        def __init__(self, device):
            self.time = done[device]

        def synchronize(self):
            waited.append(self)

        def elapsed_time(self, end):
            if not timed:
                raise RuntimeError("event was not created with timing")
            return end.time - self.time

    monkeypatch.setattr(compat.devices, "has_timed_events", lambda device: timed)
    monkeypatch.setattr(compat.devices, "timed_event", Event)
    monkeypatch.setattr(compat.devices, "synchronize", waited.extend)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(now))
    clock = clocks.DeviceClock({SECOND, FIRST})
    first = clock.stamp()
    done.update({FIRST: 3.0, SECOND: 8.0})
    last = clock.stamp()
    assert len(waited) == (0 if timed else 4)
    assert clock.between(first, last) == (8_000_000 if timed else 5)
