"""The profiler's record of the allocator reads what a count of live tensors reads, also across `stop` and `start`."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from hf_ckpt import compat
from hf_ckpt.measure.levels import Levels, meter_for
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.measure.recorded import RecordedLevels
from hf_ckpt.models.tiny import tiny_batch, tiny_model

CPU = [torch.device("cpu")]
SCRATCH = 0.02
"""Share of a peak that kernels need within one operation, which only the record shows."""


def levels_of(meter_class):
    """Levels of the second step of a training, in which the optimizer has its state."""
    model, batch = tiny_model("llama", layers=2, hidden=64), tiny_batch("llama", batch=4, tokens=64)
    optimizer = torch.optim.AdamW(model.parameters())
    for again in (False, True):
        levels = Levels(meter_class(model, optimizer, {"batch": batch}))
        if again:
            levels.meter.start()
        levels.mark("begin")
        loss = model(**batch).loss
        levels.mark("forward")
        loss.backward()
        levels.mark("end")
        del loss
        levels.meter.stop()
        levels.meter.start() if again else None
        optimizer.step()
        levels.meter.stop()
        optimizer.zero_grad()
    outside = levels.outside()
    return [(level.bytes, level.peak_bytes) for level in levels.levels()] + [outside]


def test_the_record_reads_what_a_count_reads():
    counted, recorded = levels_of(LiveBytes), levels_of(RecordedLevels)
    for (alive, peak), (alive_too, peak_too) in zip(counted, recorded, strict=True):
        assert alive_too == pytest.approx(alive, rel=0.001)
        assert peak * 0.999 <= peak_too <= peak * (1 + SCRATCH)
    assert recorded[1][0] > 1.5 * recorded[0][0]  # the forward keeps something


def test_what_is_older_than_the_record_is_seen_when_it_is_freed():
    held = {"old": torch.zeros(1000), "older": torch.zeros(500)}
    levels = Levels(RecordedLevels(held))
    levels.meter.start()
    levels.mark("begin")
    del held["old"]
    new = torch.ones(2000)
    levels.mark("forward")
    levels.meter.stop()
    assert [level.bytes for level in levels.levels()] == [6000, 10_000]
    assert new.nbytes == 8000


def test_a_step_under_the_users_profiler_is_not_recorded():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        levels = Levels(meter_for(CPU, compiled=True))
        levels.meter.start()
        levels.mark("begin")
        levels.meter.stop()
    levels.mark("end")
    assert [event.key for event in profile.key_averages()].count("hf_ckpt 0") == 0
    assert levels.levels() == ()


def test_the_profiler_cannot_be_left_in_a_backward():
    """A backward has a copy of the thread's state: `stop` inside of it waits for the next one."""
    meter, weight = RecordedLevels(), torch.ones(10, requires_grad=True)
    meter.start()
    (weight * 2).register_hook(lambda gradient: meter.stop())
    doubled = weight * 2
    doubled.register_hook(lambda gradient: meter.stop())
    doubled.sum().backward()
    assert compat.profiler.profiler_is_active()
    meter.stop()
    assert not compat.profiler.profiler_is_active()


def test_a_meter_does_not_hold_the_model():
    model = tiny_model("llama", layers=1)
    meter, gone = RecordedLevels(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    meter.stop()
