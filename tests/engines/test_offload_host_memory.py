"""Host memory for offloading and its budget, and the order of copies on a device's stream."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.lanes import Delayed, DeviceBytes, Eager, lanes_of
from helpers.offloading import OFFLOAD, SAVED, moved, mover, ours, said
from helpers.steps import CACHED_BYTES, assert_same, step, without_cache

from hf_ckpt.compat import devices
from hf_ckpt.engines import offload
from hf_ckpt.engines.offload import Group, Mover, OffloadRegion
from hf_ckpt.logs import forget_warnings
from hf_ckpt.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("unwatched")


@pytest.mark.compat
@pytest.mark.parametrize(("tokens", "buffer"), [(16, 4096), (17, 8192), (32, 8192)])
def test_a_host_budget_counts_powers_of_two(tokens, buffer, lanes, caplog):
    batch = tiny_batch("llama", tokens=tokens)
    for limit, count in ((3 * buffer, 3), (3 * buffer - 1, 2), (buffer, 1), (buffer - 1, 0)):
        model = ours(spec={**OFFLOAD, "host_budget": f"{limit}B"})
        caplog.clear()
        forget_warnings()
        for _ in range(2):
            assert_same(step(tiny_model("llama"), batch), step(model, batch))
            assert list(moved(model).values()) == [2 * tokens * 32 * 4] * count
            assert mover(model).held_bytes == count * buffer
        assert len(said(caplog)) == (count < 3)
        assert all("`host_budget`" in message for message in said(caplog))


def test_longer_batches_get_buffers_of_their_own(lanes):
    """Longer batches can use a budget that shorter ones have filled, and the other way round."""
    model = ours(spec={**OFFLOAD, "host_budget": "24KiB"})
    counts = []
    for tokens in (8, 16, 32, 16, 8, 32):
        step(model, tiny_batch("llama", tokens=tokens))
        counts.append(len(moved(model)))
        assert mover(model).held_bytes <= 3 * 8192
    step(model, tiny_batch("llama", tokens=256))
    assert moved(model) == {}
    assert counts[0] == counts[1] == counts[4] == 3
    assert min(counts[2:]) >= 1


def test_pools_of_a_mover():
    lane, other = Delayed(), Delayed()
    pool = Mover(limit_bytes=64)
    assert [pool.take(lane, size).numel() for size in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]
    assert pool.held_bytes == 55
    assert pool.take(lane, 10) is None
    small = pool.take(lane, 8)
    pool.give(lane, small)
    assert pool.take(lane, 7) is small
    pool.give(lane, small)
    assert pool.take(other, 8) is not small  # copies of the first lane may still read it
    assert pool.held_bytes == 63
    pool = Mover(limit_bytes=64)
    buffers = [pool.take(lane, 16) for _ in range(4)]
    for buffer in buffers[:3]:
        pool.give(lane, buffer)
    assert pool.take(lane, 3).numel() == 16
    assert pool.held_bytes == 64
    assert pool.take(lane, 32).numel() == 32  # the two free ones give way
    assert pool.held_bytes == 64
    assert pool.take(lane, 1) is None


def test_what_comes_back_has_the_bits_it_left_with():
    """Tensors of every dtype come back bit-equal, although they share one buffer."""
    lane, pool = Delayed(), Mover()
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32):
        tensor = torch.randn(1024 // dtype.itemsize, generator=generator, dtype=torch.float64).to(dtype)
        expected = tensor.clone()
        group = Group(pool, "block", lane, tensor)
        slot = group.send(tensor)
        group.leave_device()
        tensor.fill_(torch.nan)  # its memory may be reused now
        found = slot.fetch()
        assert found.dtype is dtype
        assert torch.equal(found, expected)
        del slot, group
    assert pool.held_bytes == 1024  # one buffer for all


@pytest.mark.compat
def test_memory_that_cannot_be_pinned_and_is_rounded_up(lanes, monkeypatch, caplog):
    """Unpinned memory is used if pinning fails; buffers are rounded up, so 17 tokens need as much memory as 32."""
    empty, refused = torch.empty, []

    def refusing(*args, **keys):
        if keys.get("pin_memory"):
            refused.append(args[0])
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **keys)

    monkeypatch.setattr(torch, "empty", refusing)
    monkeypatch.setattr(offload.compat.devices, "accelerator_type", lambda: "cuda")
    batch = tiny_batch("llama", tokens=17)
    hidden = 2 * 17 * 32 * 4
    for limit, count in ((3 * 8192, 3), (3 * 8192 - 1, 2), (3 * hidden, 1)):
        model = ours(spec={**OFFLOAD, "host_budget": f"{limit}B"})
        for _ in range(2):
            assert_same(step(tiny_model("llama"), batch), step(model, batch))
            assert list(moved(model).values()) == [hidden] * count
        assert mover(model).held_bytes == count * 8192
    assert refused == [8192] * 3  # once per pool
    (message,) = [text for text in said(caplog) if "cannot be pinned" in text]
    assert "CUDA error: out of memory" in message
    assert "unpinned memory is used" in message


def test_buffers_are_of_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        assert Mover().take(Delayed(), 5).device.type == "cpu"


def test_a_copy_that_fails_gives_its_buffer_back(lanes):
    def fail(*_):
        raise RuntimeError("no device")

    pool = Mover()
    region = OffloadRegion("block", pool)
    x = torch.ones(4, requires_grad=True) * 1
    region(torch.sin, x).sum().backward()
    lanes[0].out = fail
    with pytest.raises(RuntimeError, match="no device"):
        region(torch.sin, x)
    gc.collect()
    assert pool.free_bytes == pool.held_bytes
    assert pool.held_bytes == 16


def test_a_lane_serves_one_thread_at_a_time():
    """Threads that run blocks at the same time share a lane: no other thread can call it during a call."""
    calls = {}

    class Asked(Delayed):
        def __getattribute__(self, name):
            if name in ("out", "back", "wait", "drop"):
                calls.setdefault(name, set()).add(others.submit(other_thread_gets_in).result())
            return super().__getattribute__(name)

    def other_thread_gets_in():
        gets_in = pool.lock.acquire(blocking=False)
        if gets_in:
            pool.lock.release()
        return gets_in

    with ThreadPoolExecutor(1) as others, lanes_of(Asked):
        pool = Mover()
        first, second = OffloadRegion("0", pool), OffloadRegion("1", pool)
        one = first(torch.sin, torch.ones(4, requires_grad=True) * 1)
        two = second(torch.sin, one)
        torch.autograd.grad(two.sum(), one)  # the first block's hidden states come back, and nobody waits for them
        del one, two
    assert calls == {name: {False} for name in ("out", "wait", "back", "drop")}


@pytest.mark.parametrize("how", ["no room", "too small"])
def test_what_finds_no_room_in_host_memory_is_freed(how, monkeypatch):
    """Tensors that do not fit host memory are freed after a forward without a backward, as in evaluation."""
    least_bytes = offload.LEAST_BYTES
    with lanes_of(Eager):
        if how == "too small":
            monkeypatch.setattr(offload, "LEAST_BYTES", least_bytes)
        model = ours(spec={**SAVED, **({"host_budget": "2KiB"} if how == "no room" else {})}, layers=2)
        batch = without_cache(model, tiny_batch("llama"))
        step(model, batch)
        model.zero_grad(set_to_none=True)
        gc.collect()
        with DeviceBytes(model, batch) as live:
            for _ in range(3):
                model(**batch)
            gc.collect()
            left = live.current_bytes - live.start_bytes
    assert left <= CACHED_BYTES


def test_devices_without_streams_have_no_lane(monkeypatch):
    """Nor has `mps`, which has streams but uses the host's memory."""
    for device_type in ("cpu", "mps", "xla"):
        monkeypatch.setattr(devices, "accelerator_type", lambda device_type=device_type: device_type)
        assert offload.lane_of(torch.device(device_type, 0)) is None, device_type
