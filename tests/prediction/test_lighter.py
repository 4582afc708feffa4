"""The costs of `full+selective`, which follow from those of `full` and one traced backward."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.planned import without_state
from helpers.sparing import sparing
from helpers.steps import enable
from helpers.tracing import (
    CPU,
    PEAK,
    TUNINGS,
    assert_near,
    chosen,
    deviations,
    model_of,
    real_peaks,
)

import hf_ckpt
from hf_ckpt.models.tiny import FAMILIES, tiny_batch
from hf_ckpt.planner import live
from hf_ckpt.planner.budgets import peak_of_least, plan_within
from hf_ckpt.planner.options import cost_options
from hf_ckpt.planner.shapes import BatchShape
from hf_ckpt.prediction import lighter as room
from hf_ckpt.prediction.lighter import LIGHTER, with_lighter
from hf_ckpt.prediction.offload import with_offloading
from hf_ckpt.prediction.scaling import between, without_lighter
from hf_ckpt.prediction.skeleton import skeleton_of
from hf_ckpt.prediction.timeline import worst_timeline
from hf_ckpt.prediction.trace import Step, trace_costs
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE

BATCH = {"batch": 4, "tokens": 128}
EVERY = [(family, tuning) for family in FAMILIES for tuning in TUNINGS]
ACTIONS = (KEEP, SELECTIVE, FULL)


def made(family, tuning="everything", *, optimizer="sgd", actions=ACTIONS, **options):
    """(model, batch, skeleton, step, traced costs) of a model whose blocks are most of the peak."""
    model = model_of(family, tuning, **{**PEAK, **options})
    batch = tiny_batch(family, **BATCH)
    step, skeleton = Step(batch, accumulation=2, optimizer=optimizer), skeleton_of(model)
    return model, batch, skeleton, step, trace_costs(skeleton, step, CPU, actions=actions)


@sparing(("family", "tuning"), EVERY, ("llama", "everything"), ("bert", "lora"))
def test_peaks_are_those_of_real_steps(family, tuning):
    model, batch, skeleton, step, costs = made(family, tuning)
    (found,) = with_lighter([costs], skeleton, step, CPU)
    assert found.actions == (*ACTIONS, *LIGHTER)
    choices = {str(action): found.uniform(found.actions.index(action)) for action in LIGHTER}
    peaks = {name: real_peaks(model, chosen(found, choice), batch) for name, choice in choices.items()}
    assert_near({name: deviations(found, choice, peaks[name]) for name, choice in choices.items()})
    least = worst_timeline(costs, costs.uniform(ACTIONS.index(FULL))).peak_bytes
    assert all(max(found) < least for found in peaks.values())


def test_as_if_traced_like_any_other_action():
    """Behind every action, and before every action."""
    _, _, skeleton, step, costs = made("llama")
    (derived,) = with_lighter([costs], skeleton, step, CPU)
    whole = trace_costs(skeleton, step, CPU, actions=derived.actions)
    for number in range(len(ACTIONS), len(derived.actions)):
        for other in range(len(derived.actions)):
            for row in ((number, other, number, number, other, 0), (other, number, 0, other, number, 2)):
                ours, theirs = (worst_timeline(found, (row,)) for found in (derived, whole))
                assert ours.peak_bytes == pytest.approx(theirs.peak_bytes, rel=0.002)
                assert ours.nanoseconds == pytest.approx(theirs.nanoseconds, rel=0.01)


def test_a_plan_below_what_full_needs_takes_it_and_keeps_its_budget():
    model, batch, skeleton, step, costs = made("llama")
    candidates = cost_options(costs, skeleton, step, CPU, head="full", segments=False)
    floor = peak_of_least(costs)
    least = peak_of_least(candidates)
    assert least < 0.97 * floor
    plan = plan_within(candidates, (floor + least) // 2)
    actions = [action for _, action in plan.actions]
    assert {action for action in actions if action in LIGHTER}
    assert max(real_peaks(model, actions, batch)) <= (floor + least) // 2


def test_a_roomy_budget_does_without():
    _, _, skeleton, step, costs = made("llama")
    candidates = cost_options(costs, skeleton, step, CPU, head="full", segments=False)
    limit = worst_timeline(costs, costs.uniform(0)).peak_bytes
    assert {action for _, action in plan_within(candidates, limit).actions} == {KEEP}


def test_nothing_is_traced_where_it_lowers_no_peak(monkeypatch):
    """As where the optimizer's state, or the head, is the peak."""
    _, _, skeleton, step, costs = made("gpt2", vocab_size=30_000)
    worst = worst_timeline(costs, costs.uniform(ACTIONS.index(FULL))).worst
    assert worst.block is None
    monkeypatch.setattr(room, "trace_walks", pytest.fail)
    assert with_lighter([costs], skeleton, step, CPU) == [costs]


def test_of_two_heads_only_the_one_below_the_blocks_gets_it():
    """The way whose peak lies elsewhere stays as it was."""
    _, _, skeleton, step, costs = made("llama")
    high = {
        key: (dataclasses.replace(forward, points=((2**40, 0), *forward.points)), backward)
        for key, (forward, backward) in costs.head.items()
    }
    elsewhere = dataclasses.replace(costs, head=high)
    first, second = with_lighter([elsewhere, costs], skeleton, step, CPU)
    assert first is elsewhere
    assert second.actions == (*ACTIONS, *LIGHTER)


@pytest.mark.long
def test_without_them_costs_are_as_they_were():
    """Also with actions behind them that offload."""
    _, _, skeleton, step, costs = made("t5")
    (found,) = with_lighter([costs], skeleton, step, CPU)
    assert found.actions != costs.actions
    assert without_lighter(found) == costs == without_lighter(costs)
    bandwidth, launch = 20e9, 5000
    (plain,), (moved,) = (with_offloading(each, bandwidth, launch) for each in (costs, found))
    assert without_lighter(moved) == plain


def test_between_a_shape_that_has_them_and_one_that_has_none():
    """They are left out, so that no further shape has to be traced for it."""
    _, _, skeleton, step, costs = made("llama")
    (found,) = with_lighter([costs], skeleton, step, CPU)
    assert between([costs], [found], 0, 1) == (costs,)
    assert between([found], [costs], 1, 1) == (costs,)
    assert between([found], [found], 1, 1) == (found,)


def test_a_live_model_under_it_is_predicted():
    """As the guard does before it tightens a plan: from a trace of the very actions that the plan has."""
    model, batch = without_state(model_of("llama", **PEAK)), tiny_batch("llama", **BATCH)
    hf_ckpt.install(model, {"policy": "full+selective"})
    enable(model)
    plan = hf_ckpt.describe(model).plan
    with hf_ckpt.paused(model):
        prediction = live.prediction_of(model, plan, BatchShape({"decoder": (4, 128)}))
    peak, _ = real_peaks(model_of("llama", **PEAK), [action for _, action in plan.actions], batch)
    assert {action for _, action in plan.actions} == set(LIGHTER)
    assert prediction.peak_bytes - peak == pytest.approx(0, abs=0.03 * peak)
