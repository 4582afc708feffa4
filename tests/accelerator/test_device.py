"""The simulated device itself: what tests on it rely on."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

import pytest
import torch
from helpers.steps import assert_near, assert_same, step

from accelerator import device
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

SIZE = 1 << 16


def full(value, where="sim:0"):
    return torch.full((SIZE,), float(value), device=where)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_as_on_the_cpu(family):
    """Its kernels are the CPU's, apart from attention and dropout."""
    model, batch = tiny_model(family), tiny_batch(family)
    expected = step(model, batch)
    model, batch = device.moved_to(model, "sim"), {name: value.to("sim") for name, value in batch.items()}
    got = step(model, batch)
    assert all(value.device == torch.device("sim:0") for value in got.values())
    assert_near(expected, {name: value.cpu() for name, value in got.items()})
    assert_same(got, step(model, batch))


def test_the_host_cannot_read_its_memory():
    tensor = full(1)
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # pytest's would report it
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


# --- streams ----------------------------------------------------------------------------------------------------------
# `test_copies.py` shows that a missing wait gives wrong values.


def test_events_have_a_device_and_times():
    start, end, other = (torch.Event("sim", enable_timing=True) for _ in range(3))
    start.record()
    assert not torch.equal(full(1), full(2))
    end.record()
    other.record(torch.accelerator.current_stream("sim:1"))
    torch.accelerator.synchronize("sim:0")
    torch.accelerator.synchronize("sim:1")
    assert start.elapsed_time(end) > 0
    with pytest.raises(RuntimeError, match="different devices"):
        start.elapsed_time(other)
    with pytest.raises(RuntimeError, match="cannot be recorded on a stream of device 1"):
        start.record(torch.accelerator.current_stream("sim:1"))
    with device.no_event_times(), pytest.raises(RuntimeError, match="elapsedTime"):
        start.elapsed_time(end)


def test_what_a_kernel_raises_comes_when_the_host_waits():
    with device.pace(computing="late"):
        table = full(0)
        read = table[torch.tensor([SIZE], device="sim:0")]
        assert read.shape == (1,)
        with pytest.raises(RuntimeError, match=r"out of (range|bounds)"):
            torch.accelerator.synchronize()


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [None, "sim: no more memory on this device"])
def test_out_of_memory(words):
    """The cache is emptied before memory runs out."""
    torch.accelerator.empty_cache()
    free = 8 * 4 * SIZE
    with device.memory_of(device.counted()["reserved_bytes"] + free, words=words):
        del_me = [full(1) for _ in range(6)]
        del del_me
        whole = torch.empty(free // 4, device="sim:0")
        with pytest.raises(RuntimeError, match=words or "sim out of memory") as raised:
            full(1)
        assert isinstance(raised.value, torch.OutOfMemoryError) is (words is None)
        del whole
        assert full(1).sum().item() == SIZE


# --- random numbers, autocast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["sim:0", "sim:1"])
def test_each_device_draws_from_its_own_generator(where):
    module = torch.get_device_module("sim")
    torch.manual_seed(3)
    host, other = torch.get_rng_state(), module.get_rng_state("sim:1" if where == "sim:0" else "sim:0")
    state = module.get_rng_state(where)
    first, second = (torch.nn.functional.dropout(full(1, where), 0.5) for _ in range(2))
    module.set_rng_state(state, where)
    assert not torch.equal(first, second)
    assert torch.equal(first, torch.nn.functional.dropout(full(1, where), 0.5))
    assert torch.equal(host, torch.get_rng_state())
    assert torch.equal(other, module.get_rng_state("sim:1" if where == "sim:0" else "sim:0"))


def test_autocast():
    values = torch.randn(4, 4, device="sim:0")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert (values @ values).dtype is torch.bfloat16
        assert (values @ values).softmax(-1).dtype is torch.float32
    assert (values @ values).dtype is torch.float32
