"""Meters, clocks and live-byte counts, compared with real allocations and times."""

from __future__ import annotations

import gc
import mmap
import sys
import time
import weakref

import pytest
import torch

from hf_ckpt import compat
from hf_ckpt.measure import clocks, machine, memory
from hf_ckpt.measure.clocks import RecomputeClock, TrainingClock
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.training.install import trial

MIB = 2**20
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
    assert live.timeline[:2] == [4000, 8000]


def test_live_bytes_counts_a_storage_once():
    with LiveBytes() as live:
        x = torch.zeros(100)
        views = [x[:50], x.view(10, 10), x.t()]
    assert live.current_bytes == 400
    del views


def test_live_bytes_returns_to_what_the_step_leaves_behind():
    """After a step, exactly parameters and gradients remain, and more recomputation means fewer saved bytes."""
    peaks = {}
    for spec in ("none", {"every_n_layers": 2}, "full"):
        model = tiny_model("llama", layers=6)
        batch = tiny_batch("llama", tokens=32)
        parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        with trial(model, spec):
            gc.collect()
            with LiveBytes(model) as live:
                loss = model(**batch).loss
                after_forward = live.current_bytes
                loss.backward()
                del loss
        buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
        assert live.start_bytes == parameter_bytes + buffer_bytes
        assert live.current_bytes == live.start_bytes + parameter_bytes
        peaks[str(spec)] = (after_forward, live.peak_bytes)
    saved = [after for after, _ in peaks.values()]
    assert saved == sorted(saved, reverse=True)
    assert len(set(saved)) == 3
    assert peaks["full"][1] < peaks["none"][1]


def test_live_bytes_knows_optimizer_state():
    layer = torch.nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    elements = sum(parameter.numel() for parameter in layer.parameters())
    steps = sum(state["step"].nbytes for state in optimizer.state.values())
    assert LiveBytes(layer, optimizer).start_bytes == 4 * 4 * elements + steps  # weights, gradients, two moments


def test_live_bytes_of_one_device():
    with LiveBytes(device="meta") as there, LiveBytes(device="cpu") as here:
        kept = [torch.ones(1000), torch.ones(500, device="meta")]
    assert (here.peak_bytes, there.peak_bytes) == (4000, 2000)
    del kept


@on_linux
def test_resident_peak_follows_a_large_block_and_forgets_it():
    meter = memory.ResidentMeter()
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


@on_linux
def test_where_the_kernel_does_not_reset_its_peak(monkeypatch, tmp_path):
    monkeypatch.setattr(compat, "accelerator_type", lambda: None)
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "no" / "such" / "file")
    meter = memory.peak_meter()
    meter.reset()
    assert meter.peak_bytes() > 0
    assert "since the process began" in meter.source


def test_an_accelerator_that_tells_nothing_is_unknown(monkeypatch):
    monkeypatch.setattr(compat, "accelerator_type", lambda: "mps")
    monkeypatch.setattr(compat, "memory_module", lambda device_type: None)
    meter = memory.peak_meter()
    assert meter.peak_bytes() is None
    assert "unknown" in meter.source


def test_allocator_meter_reads_and_resets_its_module(monkeypatch):
    class Allocator:
        peak = 7

        def max_memory_allocated(self):
            return self.peak

        def max_memory_reserved(self):
            return 9

        def reset_peak_memory_stats(self):
            self.peak = 1

    monkeypatch.setattr(compat, "accelerator_type", lambda: "xpu")
    monkeypatch.setattr(compat, "memory_module", lambda device_type: Allocator())
    meter = memory.peak_meter()
    assert (meter.peak_bytes(), meter.reserved_bytes(), meter.source) == (7, 9, "xpu allocator")
    meter.reset()
    assert meter.peak_bytes() == 1


def test_a_peak_counts_after_a_meter_has_reset_it(monkeypatch):
    """The peak that a meter resets still counts: the callback resets it just before a check asks for spare memory."""

    class Allocator:
        peak = 700

        def max_memory_allocated(self, device=None):
            return self.peak

        def reset_peak_memory_stats(self):
            self.peak = 100

    allocator = Allocator()
    monkeypatch.setattr(memory, "_highest_bytes", 0)
    monkeypatch.setattr(compat, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(compat, "memory_module", lambda device_type: allocator)
    monkeypatch.setattr(compat, "memory_readers", lambda device_type: object())
    monkeypatch.setattr(machine, "device_memory", lambda *_: machine.DeviceMemory(2000, 1000))
    assert machine.spare_bytes() == 300
    meter = memory.peak_meter()
    for _ in range(2):
        meter.reset()
        assert meter.peak_bytes() == 100
        assert machine.spare_bytes() == 300
    allocator.peak = 800
    assert machine.spare_bytes() == 200
    monkeypatch.setattr(compat, "memory_readers", lambda device_type: None)
    assert machine.spare_bytes() == 0, "the memory of the machine is not that of the device"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_allocator_peak():
    meter = memory.peak_meter()
    meter.reset()
    before = meter.peak_bytes()
    big = torch.ones(25 * MIB, device="cuda")
    del big
    assert meter.peak_bytes() - before == 100 * MIB
    assert meter.reserved_bytes() >= meter.peak_bytes()


def test_training_clock_leaves_pauses_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = TrainingClock()
    clock.resume()
    now[0] += 2
    clock.count_step()
    clock.pause()
    now[0] += 50  # evaluation
    clock.resume()
    now[0] += 1
    clock.count_step()
    assert clock.take() == (3.0, 2)
    assert clock.running
    now[0] += 4
    clock.count_step()
    assert clock.take() == (4.0, 1)


def test_recompute_clock_counts_also_when_a_recomputation_stops_early(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(compat, "accelerator_type", lambda: None)
    clock = RecomputeClock()

    def stopped() -> None:
        with clock():
            now[0] += 3
            raise KeyError  # torch ends a recomputation by an exception

    with pytest.raises(KeyError):
        stopped()
    assert clock.take() == 3.0
    assert clock.take() == 0.0


class Event:
    """An event of an accelerator that is `behind` events late; events are a second apart."""

    made: list = []

    def __init__(self) -> None:
        self.made.append(self)
        self.time = float(len(self.made))

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        return len(self.made) - self.time >= self.behind

    def synchronize(self) -> None:
        type(self).behind = 0

    def elapsed_time(self, end) -> float:
        return 1000 * (end.time - self.time)


@pytest.mark.parametrize("behind", [10, 10**6])
def test_recompute_clock_holds_few_events_where_nobody_takes_the_time(behind, monkeypatch):
    """The clock keeps few events if nobody reads it, as with `logging_strategy="no"`, and loses no time."""
    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(Event, "behind", behind, raising=False)
    monkeypatch.setattr(compat, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(compat, "timing_event", lambda device_type: Event())
    clock = RecomputeClock()
    for _ in range(10 * clocks.MOST_EVENTS):
        with clock():
            pass
    assert len(clock._events) <= 2 * clocks.MOST_EVENTS
    assert clock.take() == 10 * clocks.MOST_EVENTS


def test_an_observer_does_not_keep_its_clock(monkeypatch):
    clock = RecomputeClock()
    observer = clock.observer()
    with observer():
        pass
    assert clock.take() > 0
    gone = weakref.ref(clock)
    del clock
    assert gone() is None
    with observer():  # the observer no longer measures
        pass
