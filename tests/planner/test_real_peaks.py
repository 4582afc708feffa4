"""Budgets compared with real peaks, for adapters, logits, experts and offloading."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers import tracing
from helpers.adapters import with_lora
from helpers.experts import ONE_BY_ONE, experts
from helpers.planned import budgeted, live_peak, without_state
from helpers.sparing import sparing
from helpers.steps import assert_same, enable, step
from helpers.tracing import model_of

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.cli.main import main
from hf_ckpt.costs.offload import OFFLOADED, with_offloading
from hf_ckpt.costs.timeline import worst_timeline
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.planner.budgets import peak_of_least, plan_of_least, plan_within
from hf_ckpt.prediction.skeleton import skeleton_of
from hf_ckpt.prediction.trace import Step, trace_costs
from hf_ckpt.spec.actions import FULL, FULL_SELECTIVE, KEEP, SELECTIVE
from hf_ckpt.units import format_bytes

SIZES = {"batch": 4, "tokens": 64}


def peak_under(model, plan, batch):
    """Peak of a step under a plan in live bytes; the model's optimizer has no state."""
    hf_ckpt.install(model, plan)
    enable(model)
    step(model, batch)
    return live_peak(model, batch)


# --- a budget is on the peak ------------------------------------------------------------------------------------------


@functools.cache
def planned_costs(family):
    """A model, a batch, and the costs of the most common actions."""
    model, batch = model_of(family, layers=4, hidden=64), tiny_batch(family, **SIZES)
    at_work = Step(batch, optimizer="sgd")
    return model, batch, trace_costs(skeleton_of(model), at_work, DEVICES["cpu"], actions=(KEEP, *OFFLOADED))


@pytest.mark.compat
@sparing("family", ["llama", "t5"], "llama")
def test_a_budget_is_on_the_peak(family):
    """Budgets limit the peak, not saved bytes: plans stay within them, and larger budgets are faster."""
    model, batch, costs = planned_costs(family)
    low, high = plan_of_least(costs).prediction.peak_bytes, plan_within(costs, 2**30).prediction.peak_bytes
    plans, seconds, peaks = [], [], []
    for place in range(6):
        budget = low + (high - low) * place // 5
        plan = plan_within(costs, budget)
        peak = peak_under(model, plan, batch)
        assert peak <= budget, (place, peak, budget)
        plans.append(plan)
        seconds.append(plan.prediction.step_seconds)
        peaks.append(peak)
    assert seconds == sorted(seconds, reverse=True)
    assert len({plan.actions for plan in plans}) >= 4
    assert peaks[0] < 0.7 * peaks[-1]
    assert plans[0].active()
    assert not plans[-1].active()


def test_a_plan_offloads_only_where_that_lowers_the_peak():
    """A plan offloads only if the same plan without offloading exceeds the budget."""
    _, _, traced = planned_costs("llama")
    (costs,) = with_offloading(traced, host_bandwidth=1e9, launch_nanoseconds=1)
    low, high = plan_of_least(costs).prediction.peak_bytes, plan_within(traced, 2**30).prediction.peak_bytes
    assert low < plan_of_least(traced).prediction.peak_bytes
    numbers = {action: number for number, action in enumerate(costs.actions)}
    on_device = {costs.actions[moving]: costs.actions[base] for moving, base in costs.stacks[0].on_device.items()}
    moving = 0
    for place in range(12):
        budget = low + (high - low) * place // 11
        actions = [action for _, action in plan_within(costs, budget).actions]
        if any(action in on_device for action in actions):
            moving += 1
            stayed = (tuple(numbers[on_device.get(action, action)] for action in actions),)
            assert worst_timeline(costs, stayed).peak_bytes > budget
    assert moving > 0
    assert not any(action in on_device for action in actions)  # at the largest budget


@pytest.mark.long
def test_a_plan_in_segments_where_no_other_needs_as_little():
    """Segments are planned for budgets below the peak of `full`; here, segments need 9 % less."""
    model = tiny_model("llama", layers=48, hidden=32, attention="sdpa", intermediate_size=32)
    model = without_state(with_lora(model, "llama", lora_dropout=0.0))
    batch = tiny_batch("llama", batch=4, tokens=64)
    expected = step(model, batch)
    budget = round(0.97 * peak_under(model, "full", batch))
    hf_ckpt.uninstall(model)
    budgeted(model, budget)
    for _ in range(6):
        assert_same(expected, step(model, batch))
    planned = installation(model).planned
    assert not planned.over
    assert 1 < len(planned.plan.segments()) < 48
    before = sum(hf_ckpt.describe(model).recomputed.values())
    peak = live_peak(model, batch)
    assert sum(hf_ckpt.describe(model).recomputed.values()) - before == 48
    assert 0.95 * planned.plan.prediction.peak_bytes <= peak <= budget


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.compat
def test_a_budget_that_the_logits_break_says_so():
    """If logits are the peak, no plan for blocks helps; the error says so."""
    model = tiny_model("llama", layers=2, hidden=64, attention="sdpa", vocab_size=4000)
    with pytest.raises(InfeasibleError, match="no plan fits") as refused:
        hf_ckpt.predict(model, tiny_batch("llama", batch=4, tokens=256), budget="1MiB", optimizer="sgd")
    (work,) = (size for name, size in refused.value.parts.items() if name.startswith("temporary in head and loss"))
    assert work >= 2 * 4 * 256 * 4000 * 4  # logits, and their gradients in the loss
    (hint,) = (hint for hint in refused.value.hints if "the head and its loss are the peak" in hint)
    assert format_bytes(work) in hint
    assert '("head": "auto")' in hint


@pytest.mark.long
@sparing(("vocabulary", "said"), [(4000, True), (64, False)], (4000, True))
def test_the_plan_of_a_config_says_that_the_logits_are_the_peak(vocabulary, said, tmp_path, capsys):
    """`plan` says that logits are the peak, although a plan fits."""
    keys = {"layers": 2, "hidden": 64, "vocab_size": vocabulary}
    tiny_model("llama", **keys).config.to_json_file(tmp_path / "config.json", use_diff=False)
    words = ["plan", str(tmp_path), "--batch", "4", "--seq", "256", "--optimizer", "sgd", "--device", "h100"]
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("the head and its loss are the peak" in shown) == said


# --- mixtures of experts ----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(ONE_BY_ONE is None, reason="experts of transformers 4 are called one by one")
@sparing(
    ("name", "implementation", "dtype"),
    [("qwen2_moe", "batched_mm", torch.float32), ("mixtral", "grouped_mm", torch.bfloat16)],
    ("mixtral", "grouped_mm", torch.bfloat16),
    ids=["qwen2_moe", "mixtral"],
)
def test_a_mixture_of_experts_can_be_planned_for(name, implementation, dtype):
    """Predictions hold whatever experts are chosen, and include the auxiliary loss over all layers."""
    model = without_state(experts(name, dtype, implementation))
    batch = tiny_batch("llama", **SIZES)
    costs = hf_ckpt.predict(model, batch, optimizer="sgd").costs
    for plan in (plan_of_least(costs), plan_within(costs, 2**30)):
        assert abs(peak_under(model, plan, batch) / plan.prediction.peak_bytes - 1) <= 0.06


@pytest.mark.long
def test_hidden_states_that_a_config_asks_for_are_planned_for():
    """Planning includes the list of hidden states that transformers captures with hooks."""
    model = without_state(tiny_model("llama", layers=6, hidden=64))
    batch = tiny_batch("llama", **SIZES)
    model.config.output_hidden_states = True
    plan = plan_of_least(hf_ckpt.predict(model, batch, optimizer="sgd").costs)
    assert abs(peak_under(model, plan, batch) / plan.prediction.peak_bytes - 1) <= 0.03


@pytest.mark.long
def test_a_plan_below_what_full_needs_rebuilds_inside_of_it():
    model, batch = tracing.model_of("llama", "everything", **tracing.PEAK), tiny_batch("llama", batch=4, tokens=128)
    at_work, skeleton = Step(batch, accumulation=2, optimizer="sgd"), skeleton_of(model)
    floor = peak_of_least(trace_costs(skeleton, at_work, tracing.CPU, actions=(KEEP, SELECTIVE, FULL)))
    costs = trace_costs(skeleton, at_work, tracing.CPU)
    limit = (floor + peak_of_least(costs)) // 2
    assert limit < 0.985 * floor
    actions = [action for _, action in plan_within(costs, limit).actions]
    assert FULL_SELECTIVE in actions
    assert max(tracing.real_peaks(model, actions, batch)) <= limit
