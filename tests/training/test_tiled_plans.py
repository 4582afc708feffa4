"""Plans with chunked feed-forwards."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.planned import budgeted, live_peak, without_state
from helpers.steps import assert_near, assert_same, enable, step

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.costs.costs import step_nanoseconds
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.forecast.model import model_of_workload
from hf_ckpt.forecast.question import Question
from hf_ckpt.forecast.run import costs_of_model
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.actions import FULL, KEEP
from hf_ckpt.spec.plan import Plan
from hf_ckpt.training.guard import tighten

H100 = DEVICES["h100"]
SHAPE = {"batch": 1, "tokens": 512}


def model_of():
    """A small model whose wide feed-forward is most of a block."""
    return without_state(tiny_model("llama", layers=2, hidden=32, attention="sdpa", intermediate_size=512))


def test_times_count_what_runs_again():
    """With chunks, blocks that keep everything run the feed-forward once more, recomputed ones only its last product.

    Without chunks, torch ends the recomputation of a block before that product.
    """
    flops = {}
    rates = {"flops16": 1e9 / 0.6, "flops32": 1e9 / 0.6, "bandwidth": 1e30, "launch_nanoseconds": 0}
    device = dataclasses.replace(H100, **rates)  # a floating-point operation takes a nanosecond, all else nothing
    for mlp in ("full", 100):
        costs = costs_of_model(
            model_of_workload(Question("tiny"), live=model_of()),
            Question("tiny", **SHAPE, optimizer="sgd"),
            device,
            mlp=mlp,
        )
        flops[mlp] = [step_nanoseconds(costs, costs.uniform(action)) for action in (KEEP, FULL)]
    feed_forward = 2 * 3 * 32 * 512 * 512
    assert flops[100][0] == flops["full"][0] + 2 * feed_forward
    assert flops[100][1] == flops["full"][1] + 2 * feed_forward // 3


@pytest.mark.long
def test_chunks_fit_a_budget_that_is_too_small_without_them():
    model, batch = model_of(), tiny_batch("llama", batch=1, tokens=2048)
    expected = step(model, batch)
    hf_ckpt.install(model, "full")
    enable(model)
    step(model, batch)
    budget = int(live_peak(model, batch) * 0.98)
    hf_ckpt.uninstall(model)
    for mlp in ("full", "auto"):
        budgeted(model, budget, mlp=mlp)
        for _ in range(16):
            step(model, batch)
        planned, before = installation(model).planned, hf_ckpt.describe(model).chunked_mlps
        assert planned.plan.mlp == mlp
        assert planned.over == (mlp == "full")
        (assert_same if mlp == "full" else assert_near)(expected, step(model, batch))
        assert (hf_ckpt.describe(model).chunked_mlps > before) == (mlp == "auto")
        peak = live_peak(model, batch)
        assert (peak <= budget) == (mlp == "auto")
        assert peak == pytest.approx(planned.plan.prediction.peak_bytes, rel=0.02)
        hf_ckpt.uninstall(model)


def test_a_plan_keeps_its_chunks(tmp_path):
    """A plan keeps its chunks in a file, in an enable call with other options, and after `step_down`."""
    model = model_of()
    hf_ckpt.install(model, {"policy": "selective", "mlp": 64})
    path = str(tmp_path / "plan.json")
    hf_ckpt.describe(model).save(path)
    hf_ckpt.install(model, {"plan": path})
    enable(model, {"use_reentrant": False})
    assert hf_ckpt.describe(model).plan.mlp == 64
    assert tighten(model) is not None
    assert hf_ckpt.describe(model).plan.mlp == 64
    enable(model, {"mlp": "auto"})
    assert hf_ckpt.describe(model).plan.mlp == "auto"
    hf_ckpt.install(model, {"plan": path, "mlp": 32})
    assert hf_ckpt.describe(model).plan == dataclasses.replace(Plan.load(path), mlp=32)
