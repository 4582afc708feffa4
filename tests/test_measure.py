from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import time

import pytest
import torch

from hf_ckpt import compat, measure
from hf_ckpt.install import trial
from hf_ckpt.measure import CpuAllocations, KernelMeter, LiveBytes, RecomputeClock, SampledMeter, TrainingClock
from hf_ckpt.tiny import tiny_batch, tiny_model

MIB = 2**20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def test_live_bytes_of_a_chain_worked_out_by_hand():
    """x (kept by the first product), its square (kept by the second), the result, then a gradient."""
    x = torch.ones(1000, requires_grad=True)  # 4000 bytes each
    with LiveBytes() as live:
        y = x * x
        assert live.current_bytes == 4000
        z = y * y
        assert live.current_bytes == 8000
        del y  # the graph of z still holds it
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
    """After a step: parameters and gradients, to the byte; and less is saved the more is recomputed."""
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


@on_linux
@pytest.mark.parametrize("meter_class", [KernelMeter, SampledMeter])
def test_resident_peak_follows_a_large_block_and_forgets_it(meter_class):
    if meter_class is KernelMeter and not KernelMeter.works():
        pytest.skip("this kernel does not let a process reset its own peak")
    meter = meter_class()
    meter.reset()
    before = meter.peak_bytes()
    # Pages of the kernel's own: what a tensor gives back may stay with the C allocator.
    with mmap.mmap(-1, 100 * MIB) as big:
        for place in range(0, len(big), mmap.PAGESIZE):
            big[place] = 1
        time.sleep(5 * measure.SAMPLE_SECONDS)
    grown = meter.peak_bytes() - before
    meter.reset()
    assert 90 * MIB < grown < 200 * MIB
    assert meter.peak_bytes() - before < 50 * MIB
    assert meter.reserved_bytes() is None
    assert "resident size" in meter.source


@on_linux
def test_sampled_where_the_kernel_refuses(monkeypatch, tmp_path):
    monkeypatch.setattr(compat, "accelerator_type", lambda: None)
    monkeypatch.setattr(measure, "_CLEAR_REFS", tmp_path / "no" / "such" / "file")
    meter = measure.peak_meter()
    assert isinstance(meter, SampledMeter)
    assert meter.peak_bytes() > 0
    assert "sampled" in meter.source


def test_sampling_thread_ends_with_its_meter():
    meter = SampledMeter()
    thread = meter.thread
    assert thread.is_alive()
    del meter
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_an_accelerator_that_tells_nothing_is_unknown(monkeypatch):
    monkeypatch.setattr(compat, "accelerator_type", lambda: "mps")
    monkeypatch.setattr(compat, "memory_module", lambda device_type: None)
    meter = measure.peak_meter()
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
    meter = measure.peak_meter()
    assert (meter.peak_bytes(), meter.reserved_bytes(), meter.source) == (7, 9, "xpu allocator")
    meter.reset()
    assert meter.peak_bytes() == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_allocator_peak():
    meter = measure.peak_meter()
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
            raise KeyError  # torch stops a recomputation by an exception of its own

    with pytest.raises(KeyError):
        stopped()
    assert clock.take() == 3.0
    assert clock.take() == 0.0


def test_over_ranks_without_a_process_group():
    assert measure.over_ranks({"a": 1.0, "b": None}) == [{"a": 1.0, "b": None}]


def test_live_bytes_of_one_device():
    with LiveBytes(device="meta") as there, LiveBytes(device="cpu") as here:
        kept = [torch.ones(1000), torch.ones(500, device="meta")]
    assert (here.peak_bytes, there.peak_bytes) == (4000, 2000)
    del kept


def test_allocations_of_the_cpu_by_hand():
    """Two of 40,000 bytes at once, and one of them freed before a third comes; what was there before is not counted."""
    before = torch.ones(10_000)
    with CpuAllocations() as found:
        one, two = torch.empty(10_000), torch.empty(10_000)
        del one
        three = torch.empty(5_000)
    assert found.peak_bytes == 80_000
    del before, two, three


def test_allocations_within_an_operation_are_seen():
    """The CPU's attention kernel takes room for a block of scores, which is nobody's tensor."""
    query = torch.rand(1, 8, 256, 64)
    with LiveBytes({"query": query}) as live:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    with CpuAllocations() as found:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert found.peak_bytes > 1.1 * (live.peak_bytes - live.start_bytes) >= query.nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept():
    """128 MiB in pieces, a large one among them, that glibc would give back at once."""
    code = """if True:
        import sys, psutil, torch
        from hf_ckpt.measure import keep_freed_memory
        if sys.argv[1] == "keep":
            keep_freed_memory()
        held = [torch.ones(2**20) for _ in range(16)] + [torch.ones(2**24)]
        before = psutil.Process().memory_info().rss
        del held
        print(before - psutil.Process().memory_info().rss)
    """
    given_back = [
        int(subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "leave")
    ]
    assert given_back[0] < 8 * 2**20 < 100 * 2**20 < given_back[1]
