"""`budget` and `auto` during training: what is measured, when the plan comes, and how changes are handled."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle

import pytest
import torch
from helpers.planned import budgeted, live_peak, model_of
from helpers.snapshots import snapshot
from helpers.steps import assert_same, enable, gradients, without_cache
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE
from hf_ckpt.training.guard import tighten

pytestmark = pytest.mark.usefixtures("steady_times")
BATCH = tiny_batch("llama", batch=4, tokens=64)
PLANNED = 10
"""Steps after which every plan is made and checked."""


def forward_and_backward(model, batch):
    model(**without_cache(model, batch)).loss.backward()


def run(model, batches, optimizer=None):
    """Run training steps; returns each step's actions, block by block."""
    seen = []
    for batch in batches:
        forward_and_backward(model, batch)
        seen.append([action for _, action in hf_ckpt.describe(model).plan.actions])
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    return seen


@functools.cache
def half(share=0.5, layers=6):
    """A budget half-way between the peaks of `full` and of no checkpointing, without an optimizer."""
    peaks = []
    for policy in ("full", "none"):
        model = model_of("llama", layers=layers)
        hf_ckpt.install(model)
        enable(model, {"policy": policy})
        peaks.append(live_peak(model, BATCH))
    return int(peaks[0] + share * (peaks[1] - peaks[0]))


def planned_model(budget=None):
    """A model under a budget, and its session."""
    model = model_of("llama")
    budgeted(model, budget or half())
    run(model, [BATCH] * PLANNED)
    return model, installation(model).session


def test_a_run_is_measured_and_planned_for(caplog):
    """A run measures a step under `full`, trials of single blocks and timed steps, and then plans.

    Gradients are those of no checkpointing in each step. Afterwards nothing is measured, and no hook is left.
    """
    caplog.set_level("INFO", logger="hf_ckpt")
    plain, model = model_of("llama"), model_of("llama")
    forward_and_backward(plain, BATCH)
    expected, budget = gradients(plain), half()
    hf_ckpt.install(model, {"policy": "budget", "budget": budget})
    assert "not the plan of the run yet: `budget` measures the first training steps" in str(hf_ckpt.describe(model))
    enable(model)
    plans = []
    for _ in range(12):
        forward_and_backward(model, BATCH)
        assert_same(expected, gradients(model))
        model.zero_grad(set_to_none=True)
        planned, described = installation(model).planned, hf_ckpt.describe(model)
        plans.append([action for _, action in described.plan.actions])
        assert described.measuring == (f"measuring ({planned.phase})" if planned.measures else None)
    assert set(plans[0]) == {FULL}
    assert all(plan.count(FULL) >= 3 for plan in plans[:4])
    assert plans[-4:] == [plans[-1]] * 4
    assert plans[-1] != plans[0]
    session = installation(model).session
    assert session.measured_steps == 8
    assert session.recorder is None
    hooks = (hook for module in model.modules() for hook in module._forward_hooks.values())
    assert not any(isinstance(hook, functools.partial) for hook in hooks)
    assert not _get_current_dispatch_mode_stack()
    assert sum(described.recomputed.values()) > 0
    real = live_peak(model, BATCH)
    assert 0.97 <= planned.plan.prediction.peak_bytes / real <= 1.03
    assert real <= 1.01 * budget
    assert abs(planned.measured_bytes / real - 1) <= 0.01
    said = [record.message for record in caplog.records]
    assert sum("measuring the first steps, under `full`" in text for text in said) == 1
    assert sum("planned for 4 x 64 tokens" in text for text in said) == 1
    assert "  measured: peak " in str(described)
    resumed = pickle.loads(pickle.dumps(model))
    assert "measures the first training steps" in hf_ckpt.describe(resumed).measuring


def test_nothing_is_measured_while_the_plan_is_off():
    """Disabling, pausing or uninstalling during measurement leaves no hook and no dispatch mode."""
    model = model_of("llama")
    before = snapshot(model)
    budgeted(model, half())
    run(model, [BATCH])
    output = model(**without_cache(model, BATCH))
    assert _get_current_dispatch_mode_stack()
    with hf_ckpt.paused(model):
        assert not _get_current_dispatch_mode_stack()
        run(model, [BATCH])
    del output
    run(model, [BATCH])
    getattr(model, compat.transformers.DISABLE_NAMES[-1])()
    assert not _get_current_dispatch_mode_stack()
    enable(model, {"policy": "budget", "budget": half()})
    run(model, [BATCH])
    hf_ckpt.uninstall(model)
    assert not _get_current_dispatch_mode_stack()
    assert snapshot(model) == before


def test_steps_followed_by_a_pause_count():
    """TRL disables checkpointing between steps to generate completions."""
    model = model_of("llama")
    budgeted(model, half())
    for _ in range(PLANNED):
        run(model, [BATCH])
        with hf_ckpt.paused(model), torch.no_grad():
            model(**without_cache(model, BATCH))
    assert not installation(model).planned.measures


def test_models_are_copied_and_pickled_while_a_step_is_measured():
    model = model_of("llama")
    budgeted(model, half())
    run(model, [BATCH])
    output = model(**without_cache(model, BATCH))
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    output.loss.backward()
    expected = gradients(model)
    for copied in copies:
        assert installation(copied).session is None
        copied.zero_grad(set_to_none=True)
        forward_and_backward(copied, BATCH)
        assert_same(expected, gradients(copied))
        hf_ckpt.uninstall(copied)


@pytest.mark.parametrize("change", ["freeze", "cast"])
def test_a_model_that_changes_is_measured_again(change):
    model, session = planned_model()
    assert len(session.plans) == 1
    first = next(iter(find_blocks(model).modules.values()))
    first.requires_grad_(False) if change == "freeze" else model.to(torch.bfloat16)
    plans = run(model, [BATCH] * PLANNED)
    assert set(plans[0]) == {FULL}
    assert plans[-1] == plans[-2]
    assert len(session.plans) == 1


def test_shorter_batches_take_the_plan_of_longer_ones_and_get_their_own():
    """A longer batch is measured, a much shorter one at its second occurrence; others need no step under `full`."""
    batches = {tokens: tiny_batch("llama", batch=4, tokens=tokens) for tokens in (16, 24, 40, 60)}
    model, session = planned_model()
    long, steps = installation(model).planned, session.measured_steps
    for tokens in (60, 60, 16):
        run(model, [batches[tokens]])
        assert installation(model).planned.shape == long.shape
    assert session.measured_steps == steps
    run(model, [batches[16]] * 2)
    assert session.measured_steps == steps + 2  # under `full`, and the first step of its plan
    short = installation(model).planned
    assert short.shape.forwards[0].text == (4, 16)
    assert 0 < short.plan.prediction.step_seconds <= long.plan.prediction.step_seconds
    run(model, [batches[40]] * 3 + [batches[24]])
    assert session.measured_steps == steps + 4  # 24 tokens share a plan that keeps everything
    assert len(session.known.full) == 3
    assert {"4 x 16 tokens", "4 x 40 tokens", "4 x 64 tokens"} <= hf_ckpt.describe(model).plans.keys()


def test_micro_steps_are_planned_for_with_gradients(monkeypatch):
    """Later micro-steps hold gradients. Once the optimizer has stepped, plans count its state."""
    monkeypatch.setattr("gc.get_objects", None)  # walking all objects breaks other threads
    model = model_of("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    budgeted(model, 2 * half())
    for number in range(24):
        forward_and_backward(model, BATCH)
        if number % 12 == 11:
            optimizer.step()
            optimizer.zero_grad()
    planned = installation(model).planned
    assert not planned.measures
    assert planned.shape.resident
    state = sum(value.nbytes for found in optimizer.state.values() for value in found.values())
    assert dict(planned.plan.prediction.parts)["weights and optimizer state"] >= state


def test_when_an_optimizer_gets_a_state_the_step_under_full_is_measured_again():
    model = model_of("llama")
    budgeted(model, 2 * half())
    run(model, [BATCH] * PLANNED, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(3):  # without a state, as in loops that make an optimizer for each step
        assert set(run(model, [BATCH], torch.optim.SGD(model.parameters(), lr=0.0))[0]) != {FULL}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    run(model, [BATCH], optimizer)
    plans = run(model, [BATCH] * 4, optimizer)
    assert set(plans[0]) == {FULL} != set(plans[-1])
    (full,) = installation(model).session.known.full.values()
    assert full.start_bytes > 3 * sum(parameter.nbytes for parameter in model.parameters())


def test_memory_of_an_evaluation_between_two_steps_is_no_part_of_them(monkeypatch):
    """An accelerator's peak since the end of a step includes the evaluation that followed."""
    read = LiveBytes.read
    monkeypatch.setattr(LiveBytes, "read", lambda meter: read(meter) if meter._running else (0, 10**12))
    for evaluates in (False, True):
        model = model_of("llama")
        budgeted(model, "1GiB")
        run(model, [BATCH])
        if evaluates:
            with torch.no_grad():
                model.eval()(**without_cache(model, BATCH))
            model.train()
        run(model, [BATCH])
        (full,) = installation(model).session.known.full.values()
        assert (full.outside_peak_bytes == 10**12) == (not evaluates)


def test_steps_that_cannot_be_measured_are_given_up(monkeypatch, caplog):
    monkeypatch.setattr("hf_ckpt.training.session.step_of", lambda *_: None)
    model, session = planned_model()
    assert {action for actions in run(model, [BATCH] * 2) for action in actions} == {FULL}
    assert session.measured_steps == 8
    assert caplog.text.count("cannot be measured") == 1


def test_a_second_forward_in_a_step_that_tries_something_runs_under_full():
    """As in DPO: a trial has room beside one forward only."""
    model = model_of("llama")
    budgeted(model, half())
    run(model, [BATCH])
    first = model(**without_cache(model, BATCH)).loss
    assert {action for _, action in hf_ckpt.describe(model).plan.actions} != {FULL}
    second = model(**without_cache(model, BATCH)).loss
    assert {action for _, action in hf_ckpt.describe(model).plan.actions} == {FULL}
    (first + second).backward()


def test_a_block_that_never_ran_is_planned_for_as_full():
    model = model_of("llama")
    model.config.num_hidden_layers -= 1
    budgeted(model, 2 * half())
    plan = run(model, [BATCH] * PLANNED)[-1]
    assert plan[-1] == FULL
    assert FULL not in plan[:-1]


def test_every_action_is_timed_although_few_blocks_can_keep_much():
    """Plans never choose actions without a time."""
    model = model_of("llama", layers=8)
    budgeted(model, half(share=0.05, layers=8))
    run(model, [BATCH] * PLANNED)
    known = installation(model).session.known
    assert {action for _, action in known.ratios} == set(known.actions)


def test_after_a_step_ran_out_of_memory_nothing_more_is_tried():
    model = model_of("llama")
    budgeted(model, half())
    run(model, [BATCH] * 2)
    assert str(tighten(model)).startswith("a plan for ")
    tried = {action for actions in run(model, [BATCH] * 3) for action in actions}
    assert not any(action.kind == "selective" for action in tried)


def test_a_plan_that_needs_more_than_predicted_lowers_the_limit_for_good(caplog):
    """The fastest plan seems to fit, because the measured changes of the actions are halved."""
    caplog.set_level("INFO", logger="hf_ckpt")
    budget = half()
    model = model_of("llama")
    budgeted(model, budget)
    run(model, [BATCH] * 5)  # all changes are measured by now
    session = installation(model).session
    for pair, change in session.known.changes.items():
        session.known.changes[pair] = dataclasses.replace(change, forward_net=change.forward_net // 2)
    run(model, [BATCH] * 8)
    assert session.limit_bytes < session.budget_bytes == budget
    assert live_peak(model, BATCH) <= budget
    assert installation(model).planned.limit_bytes == session.limit_bytes
    assert "more than was predicted" in caplog.text


def test_ranks_that_recompute_together_take_the_plan_of_the_largest_batch(monkeypatch):
    """As under ZeRO-3. A rank with another plan than its own measures nothing."""
    model = model_of("llama")
    budgeted(model, half())
    monkeypatch.setattr(compat.distributed, "is_distributed", lambda: True)
    monkeypatch.setattr(compat.distributed, "ranks_recompute_together", lambda base: True)
    mine = hf_ckpt.describe(model).plan
    theirs = dataclasses.replace(mine, actions=tuple((block, SELECTIVE) for block, _ in mine.actions)).to_dict()
    others = []
    monkeypatch.setattr(
        compat.distributed, "of_all_ranks", lambda mine: [mine, *((mine[0] + 1, plan) for plan in others)]
    )
    run(model, [BATCH] * 3)
    assert installation(model).session.measured_steps == 1  # the third step is the first measured one
    others.append(theirs)
    assert run(model, [BATCH]) == [[SELECTIVE] * 6]
    assert installation(model).session.measured_steps == 1


def test_a_budget_below_the_weights_is_refused_at_once():
    model = model_of("llama")
    budgeted(model, "100KiB")
    with pytest.raises(InfeasibleError, match=r"no plan fits into 100\.00 KiB: the model holds .* by itself"):
        forward_and_backward(model, BATCH)


@pytest.mark.parametrize("peak", ["blocks", "optimizer"])
def test_where_no_plan_fits_the_run_goes_on_with_the_least(peak, caplog):
    """If the optimizer's step is the peak, nothing is recomputed in vain. What would lower the peak is said."""
    model = model_of("llama")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if peak == "blocks":
        budgeted(model, 2 * weights + 1000)
        actions = run(model, [BATCH] * PLANNED)
    else:  # weights, gradients and two moments; the step needs temporary bytes, too
        budgeted(model, 4 * weights)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        actions = run(model, [tiny_batch("llama", batch=1, tokens=4)] * 13, optimizer)
        assert actions[-1] == [KEEP] * 6
        assert "(no plan needs less)" in str(hf_ckpt.describe(model))
    assert installation(model).planned.over
    (said,) = [record.message for record in caplog.records if "no plan fits" in record.message]
    assert ("the optimizer's step is the peak" in said) == (peak == "optimizer")
    assert ("a smaller batch" in said) == (peak == "blocks")
