"""Whole trainings on the simulated device: budgets, and devices that are another one, or lack something."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from helpers.steps import assert_same, enable, step, without_cache

import hf_ckpt
from accelerator import device
from hf_ckpt.engines.rebuild import ops
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

LAYERS = 4
STEPS = 12
SLACK = 1.01


def new_model(family, where):
    return device.moved_to(tiny_model(family, layers=LAYERS, hidden=64, dropout=0.1), where)


def number_of(where):
    return torch.device(where).index or 0


def train(family, spec, where=device.FIRST, steps=STEPS):
    """Train for some steps. Returns the model, its losses and weights, and the device's peak in each step."""
    model = new_model(family, where)
    if spec is not None:
        hf_ckpt.install(model, spec)
        enable(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(3)
    losses, peaks = [], []
    for seed in range(steps):
        device.reset_peak(number_of(where))
        batch = tiny_batch(family, batch=4, tokens=32, seed=seed)
        loss = model(**without_cache(model, {name: value.to(where) for name, value in batch.items()})).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
        peaks.append(device.counted(number_of(where))["peak_bytes"])
        del loss, batch
    weights = {name: value.detach().cpu() for name, value in model.named_parameters()}
    return model, {"losses": torch.stack(losses), **weights}, peaks


@functools.cache
def reference(family, where=device.FIRST):
    """Losses and weights without a plan; and the peaks without one, and under `full`."""
    _, outcome, peaks = train(family, None, where, steps=STEPS)
    full = train(family, {"policy": "full"}, where, steps=3)[2]
    return outcome, max(peaks), max(full)


def actions(model):
    return {str(action) for _, action in hf_ckpt.describe(model).plan.actions}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_holds(family):
    """The plan uses the budget, no step needs more by the device's own count, and the plan's peak is that count."""
    expected, none, full = reference(family)
    budget = (full + none) // 2
    model, got, peaks = train(family, {"policy": "budget", "budget": f"{budget}B", "check_every": 0})
    assert_same(expected, got)
    assert actions(model) != {"full"}
    assert max(peaks) <= SLACK * budget
    assert hf_ckpt.describe(model).measured_bytes == peaks[-1]


def test_auto_uses_the_memory_of_the_device():
    expected, none, full = reference("llama")
    model, got, _ = train("llama", {"policy": "auto", "check_every": 0})
    assert_same(expected, got)
    assert actions(model) == {"keep"}
    del model
    torch.accelerator.empty_cache()
    size = (full + none) // 2 + device.counted()["reserved_bytes"]
    with device.memory_of(size):
        model, got, peaks = train("llama", {"policy": "auto", "check_every": 0})
    assert_same(expected, got)
    assert actions(model) not in ({"keep"}, {"full"})
    assert max(peaks) <= size


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_watch_sees_a_wrong_rule(is_wrong, monkeypatch, caplog):
    """A rule of dropout that this device does not round by is noticed."""
    monkeypatch.setattr(ops, "_rule_of_dropout", lambda *args: ops._dropped_on_cuda)
    with device.other_rounding() if is_wrong else contextlib.nullcontext():
        model = new_model("llama", device.FIRST).bfloat16()
        hf_ckpt.install(model, {"policy": "selective", "check_every": 1})
        enable(model)
        for seed in range(4):
            step(model, {name: value.to(device.FIRST) for name, value in tiny_batch("llama", seed=seed).items()})
    watched = hf_ckpt.describe(model).watched
    assert watched.checks > 0
    assert bool(watched.differences) is is_wrong
