"""`budget` and `auto` during training: what is measured, when the plan comes, and how changes are handled."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle

import pytest
import torch
from helpers.planned import budgeted, model_of
from helpers.snapshots import snapshot
from helpers.steps import assert_same, enable, gradients, without_cache
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.measure import levels, memory
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE
from hf_ckpt.training.guard import tighten
from hf_ckpt.training.measurements import _Look
from hf_ckpt.units import format_bytes

pytestmark = pytest.mark.usefixtures("steady_times")
SHAPE = {"batch": 4, "tokens": 64}


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


def peak_under(spec, batch, **more):
    model = model_of("llama", **more)
    hf_ckpt.install(model)
    enable(model, spec)
    forward_and_backward(model, batch)
    model.zero_grad(set_to_none=True)
    with LiveBytes(model, batch) as live:
        forward_and_backward(model, batch)
    return live.peak_bytes


def half(batch, share=0.5, **more):
    """A budget half-way between the peaks of `full` and of no checkpointing, without an optimizer."""
    least, most = (peak_under(policy, batch, **more) for policy in ({"policy": "full"}, {"policy": "none"}))
    return int(least + share * (most - least))


def session_of(model):
    return installation(model).session


def hooks_on(model):
    modules = list(model.modules())
    return [hook for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks) for hook in hooks.values()]


def test_a_run_is_measured_and_planned_for(caplog):
    """A run measures a step under `full`, trials of single blocks and timed steps, and then plans.

    Gradients are those of no checkpointing in each step. Afterwards nothing is measured, and no hook is left.
    """
    caplog.set_level("INFO", logger="hf_ckpt")
    batch = tiny_batch("llama", **SHAPE)
    plain, model = model_of("llama"), model_of("llama")
    forward_and_backward(plain, batch)
    expected, budget = gradients(plain), half(batch)
    budgeted(model, budget)
    plans = []
    for _ in range(12):
        forward_and_backward(model, batch)
        assert_same(expected, gradients(model))
        model.zero_grad(set_to_none=True)
        plans.append([action for _, action in hf_ckpt.describe(model).plan.actions])
    assert set(plans[0]) == {FULL}
    assert all(plan.count(FULL) >= 3 for plan in plans[:4])
    assert plans[-4:] == [plans[-1]] * 4
    assert plans[-1] != plans[0]
    session = session_of(model)
    assert session.measured_steps <= 8
    assert session._recorder is None
    assert not any(isinstance(hook, functools.partial) for hook in hooks_on(model))
    assert not _get_current_dispatch_mode_stack()
    assert sum(hf_ckpt.describe(model).recomputed.values()) > 0
    planned = installation(model).planned
    with LiveBytes(model, batch) as live:
        forward_and_backward(model, batch)
    assert 0.97 <= planned.plan.prediction.peak_bytes / live.peak_bytes <= 1.03
    assert live.peak_bytes <= 1.01 * budget
    said = [record.message for record in caplog.records]
    assert sum("measuring: up to 7 steps run under `full`" in text for text in said) == 1
    assert sum("planned for 4 x 64 tokens" in text for text in said) == 1
    shown = str(hf_ckpt.describe(model))
    assert "measured here, for one block" in shown
    assert "    keep: " in shown
    assert "  measured: peak " in shown
    assert abs(planned.measured_bytes / live.peak_bytes - 1) <= 0.01


@pytest.mark.parametrize(("where", "error"), [("forward", KeyboardInterrupt), ("backward", RuntimeError)])
def test_an_error_in_a_measured_step_comes_to_nothing(error, where):
    """An interrupted step teaches nothing, and the next step starts afresh."""
    batch = tiny_batch("llama", **SHAPE)
    model = model_of("llama")
    budgeted(model, half(batch))
    run(model, [batch])

    def fail(*_):
        raise error

    block = list(find_blocks(model).modules.values())[3]
    if where == "forward":
        handle = block.mlp.register_forward_hook(fail)
        with pytest.raises(error):
            forward_and_backward(model, batch)
        handle.remove()
    else:
        output = model(**without_cache(model, batch))
        output.logits.register_hook(fail)
        with pytest.raises(error):
            output.loss.backward()
        del output
    model.zero_grad(set_to_none=True)
    full = dict(session_of(model).known.full)
    run(model, [batch])
    assert dict(session_of(model).known.full) == full
    plans = run(model, [batch] * 9)
    assert plans[-1] == plans[-2]
    assert installation(model).planned.plan.prediction is not None


def test_it_is_measured_no_longer_once_it_is_off():
    """Disabling, pausing or uninstalling during measurement leaves no hook and no dispatch mode."""
    batch = tiny_batch("llama", **SHAPE)
    model = model_of("llama")
    before = snapshot(model)
    budgeted(model, half(batch))
    run(model, [batch])
    output = model(**without_cache(model, batch))
    assert _get_current_dispatch_mode_stack()
    with hf_ckpt.paused(model):
        assert not _get_current_dispatch_mode_stack()
        forward_and_backward(model, batch)
        model.zero_grad(set_to_none=True)
    del output
    run(model, [batch])
    getattr(model, compat.transformers.DISABLE_NAMES[-1])()
    assert not _get_current_dispatch_mode_stack()
    enable(model, {"policy": "budget", "budget": half(batch)})
    run(model, [batch])
    hf_ckpt.uninstall(model)
    assert not _get_current_dispatch_mode_stack()
    assert snapshot(model) == before


def test_models_are_copied_and_pickled_while_a_step_is_measured():
    batch = tiny_batch("llama", **SHAPE)
    model = model_of("llama")
    budgeted(model, half(batch))
    run(model, [batch])
    output = model(**without_cache(model, batch))
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    output.loss.backward()
    expected = gradients(model)
    for copied in copies:
        assert installation(copied).session is None
        copied.zero_grad(set_to_none=True)
        forward_and_backward(copied, batch)
        assert_same(expected, gradients(copied))
        hf_ckpt.uninstall(copied)


@pytest.mark.parametrize("change", ["freeze", "cast"])
def test_a_model_that_changes_is_measured_again(change):
    batch = tiny_batch("llama", **SHAPE)
    model = model_of("llama")
    budgeted(model, half(batch))
    run(model, [batch] * 10)
    session = session_of(model)
    assert len(session.plans) == 1
    if change == "freeze":
        for parameter in next(iter(find_blocks(model).modules.values())).parameters():
            parameter.requires_grad_(False)
    else:
        model.to(torch.bfloat16)
    assert set(run(model, [batch])[0]) == {FULL}
    plans = run(model, [batch] * 9)
    assert plans[-1] == plans[-2]
    assert len(session.plans) == 1


def test_shorter_batches_take_the_plan_of_longer_ones_and_get_their_own():
    """A longer batch is measured, a much shorter one at its second occurrence; others need no step under `full`."""
    model = model_of("llama")
    batches = {tokens: tiny_batch("llama", batch=4, tokens=tokens) for tokens in (16, 24, 40, 60, 64)}
    budgeted(model, half(batches[64]))
    run(model, [batches[64]] * 9)
    session = session_of(model)
    long, steps = installation(model).planned, session.measured_steps
    run(model, [batches[60]] * 2)
    assert installation(model).planned.shape == long.shape
    run(model, [batches[16]])
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


@pytest.mark.parametrize("by_hand", [False, True])
def test_micro_steps_are_planned_for_with_gradients(by_hand, monkeypatch):
    """With accumulation, plans are for micro-steps that already hold gradients, whoever resets these."""
    batch = tiny_batch("llama", **SHAPE)
    model = model_of("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    monkeypatch.setattr("gc.get_objects", None)  # walking all objects breaks other threads
    budgeted(model, 2 * half(batch))
    for number in range(24):
        forward_and_backward(model, batch)
        assert installation(model).planned.measures or number >= 12
        if number % 12 == 11:
            if not by_hand:
                optimizer.step()
            optimizer.zero_grad()
    planned = installation(model).planned
    assert not planned.measures
    assert {shape.resident for shape in session_of(model).plans} == {True}
    assert planned.plan.prediction is not None
    state = sum(value.nbytes for found in optimizer.state.values() for value in found.values())
    assert dict(planned.plan.prediction.parts)["weights and optimizer state"] >= state


def test_a_longer_first_micro_step_is_not_measured():
    """A longer first micro-step is not measured: without gradients it needs less memory than later ones."""
    batch, longer = (tiny_batch("llama", batch=4, tokens=tokens) for tokens in (32, 64))
    model = model_of("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    budgeted(model, 2 * half(longer))
    for number in range(24):
        forward_and_backward(model, batch)
        if number % 12 == 11:
            optimizer.step()
            optimizer.zero_grad()
    session = session_of(model)
    steps = session.measured_steps
    for measured in (0, 1):  # measured once gradients exist
        forward_and_backward(model, longer)
        assert {action for _, action in hf_ckpt.describe(model).plan.actions} == {FULL}
        assert session.measured_steps == steps + measured


def test_with_another_optimizer_the_step_under_full_is_measured_again():
    batch, model = tiny_batch("llama", **SHAPE), model_of("llama")
    budgeted(model, 2 * half(batch))
    assert {FULL} != set(run(model, [batch] * 9, torch.optim.SGD(model.parameters(), lr=0.0))[-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    run(model, [batch], optimizer)
    assert set(run(model, [batch], optimizer)[0]) == {FULL}


def test_the_state_of_the_optimizer_counts_from_the_second_step_on():
    """Optimizer state appears after the first step; later trials must leave room for it."""
    batch, model = tiny_batch("llama", **SHAPE), model_of("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    budgeted(model, 2 * half(batch))
    run(model, [batch], optimizer)
    model(**without_cache(model, batch))
    state = sum(value.nbytes for found in optimizer.state.values() for value in found.values())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    (full,) = session_of(model).known.full.values()
    assert full.start_bytes >= weights + state


def test_what_an_evaluation_needs_between_two_steps_is_no_part_of_them():
    batch, model = tiny_batch("llama", **SHAPE), model_of("llama")
    budgeted(model, half(batch))
    run(model, [batch])
    with torch.no_grad(), LiveBytes(model) as live:
        model.eval()(**without_cache(model, tiny_batch("llama", batch=64, tokens=64)))
    model.train()
    run(model, [batch])
    (full,) = session_of(model).known.full.values()
    assert full.outside_peak_bytes < live.peak_bytes


def test_steps_that_cannot_be_measured_are_given_up(monkeypatch, caplog):
    monkeypatch.setattr("hf_ckpt.training.session.step_of", lambda *_: None)
    batch, model = tiny_batch("llama", **SHAPE), model_of("llama")
    budgeted(model, half(batch))
    assert {action for actions in run(model, [batch] * 12) for action in actions} == {FULL}
    assert session_of(model).measured_steps == 8
    assert caplog.text.count("cannot be measured") == 1


def test_a_second_forward_in_a_step_that_tries_something_runs_under_full():
    """A second forward in the same step, as in DPO, runs under `full`: a trial has room beside one forward only."""
    batch, model = tiny_batch("llama", **SHAPE), model_of("llama")
    budgeted(model, half(batch))
    run(model, [batch])
    first = model(**without_cache(model, batch)).loss
    assert {action for _, action in hf_ckpt.describe(model).plan.actions} != {FULL}
    second = model(**without_cache(model, batch)).loss
    assert {action for _, action in hf_ckpt.describe(model).plan.actions} == {FULL}
    (first + second).backward()


def test_blocks_that_need_more_memory_are_of_another_kind():
    """Equal blocks that need different memory, such as for longer sequences, are planned separately."""
    look = _Look("Block", (1000, 1000), exactly="parameters", needs=(100_000, 400_000))
    assert look.is_of_kind(dataclasses.replace(look, needs=(100_100, 400_900)))
    assert not look.is_of_kind(dataclasses.replace(look, needs=(100_000, 430_000)))
    assert not look.is_of_kind(dataclasses.replace(look, needs=(110_000, 400_000)))


def test_a_block_that_never_ran_is_planned_for_as_full():
    batch, model = tiny_batch("llama", **SHAPE), model_of("llama")
    model.config.num_hidden_layers -= 1
    budgeted(model, 2 * half(batch))
    plan = run(model, [batch] * 9)[-1]
    assert plan[-1] == FULL
    assert FULL not in plan[:-1]


def test_steps_count_that_are_followed_by_a_pause():
    """Steps followed by a pause still count: TRL disables checkpointing between steps to generate completions."""
    batch, model = tiny_batch("llama", **SHAPE), model_of("llama")
    budgeted(model, half(batch))
    for _ in range(10):
        run(model, [batch])
        with hf_ckpt.paused(model), torch.no_grad():
            model(**without_cache(model, batch))
    assert not installation(model).planned.measures


def test_every_action_is_timed_although_few_blocks_can_keep_much():
    """Every action is timed even if few blocks can use it: plans never choose untimed actions."""
    batch = tiny_batch("llama", **SHAPE)
    model = model_of("llama", layers=8)
    budgeted(model, half(batch, share=0.05, layers=8))
    run(model, [batch] * 8)
    known = session_of(model).known
    timed = {action for _, action in known.ratios}
    assert timed == set(known.actions)


def test_a_plan_that_changes_nothing_tells_what_it_costs(monkeypatch):
    """If there is no room to try anything, `full` becomes the plan and has a prediction."""
    monkeypatch.setattr("hf_ckpt.training.measurements.Measurements.to_try", lambda *_: {})
    batch, model = tiny_batch("llama", **SHAPE), model_of("llama")
    budgeted(model, half(batch))
    run(model, [batch] * 3)
    described = hf_ckpt.describe(model)
    assert {action for _, action in described.plan.actions} == {FULL}
    assert described.plan.prediction is not None


def test_the_guard_gets_a_plan_for_less():
    batch = tiny_batch("llama", **SHAPE)
    model = model_of("llama")
    budgeted(model, half(batch))
    run(model, [batch] * 9)
    before = installation(model).planned.plan.prediction.peak_bytes
    assert tighten(model).startswith("a plan for ")
    less = installation(model).planned
    assert less.plan.prediction.peak_bytes <= 0.9 * before
    run(model, [batch])
    assert installation(model).planned.plan == less.plan
    for _ in range(10):  # tighter plans, then tighter actions
        taken = tighten(model)
        if taken is None or not taken.startswith(("a plan", "the plan")):
            break
    assert taken is None or "blocks" in taken


def test_nothing_more_is_tried_once_a_step_has_run_out_of_memory():
    batch, model = tiny_batch("llama", **SHAPE), model_of("llama")
    budgeted(model, half(batch))
    run(model, [batch] * 2)
    session_of(model).lower(installation(model))
    tried = {action for actions in run(model, [batch] * 3) for action in actions}
    assert not any(action.kind == "selective" for action in tried)


def test_a_plan_that_needs_more_than_predicted_lowers_the_limit_for_good(caplog):
    """If a plan's first step exceeds its prediction, the limit is lowered for all later plans.

    The test makes the fastest plan seem to fit by halving the measured changes of the actions.
    """
    caplog.set_level("INFO", logger="hf_ckpt")
    batch, model = tiny_batch("llama", **SHAPE), model_of("llama")
    budget = half(batch)
    budgeted(model, budget)
    run(model, [batch] * 5)  # all changes are measured by now
    session = session_of(model)
    known = session.known
    for pair, change in known.changes.items():
        known.changes[pair] = dataclasses.replace(change, forward_net=change.forward_net // 2)
    run(model, [batch] * 8)
    with LiveBytes(model, batch) as live:
        forward_and_backward(model, batch)
    assert session.bias_bytes > 0
    assert live.peak_bytes <= budget
    assert installation(model).planned.bias_bytes == session.bias_bytes
    assert sum("more than was predicted" in record.message for record in caplog.records) >= 1


def test_a_plan_with_host_memory_that_needs_more_leaves_other_plans_their_room():
    """Copies may take longer than predicted, and hold memory on the device until then."""
    batch, model = tiny_batch("llama", **SHAPE), model_of("llama")
    budgeted(model, half(batch))
    run(model, [batch] * 9)
    session, planned = session_of(model), installation(model).planned
    actions = tuple((block, dataclasses.replace(SELECTIVE, moved=True)) for block, _ in planned.plan.actions)
    moving = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, actions=actions))
    (full,) = session.known.full.values()
    session._check(moving, dataclasses.replace(full, peak_bytes=3 * session.limit_bytes))
    assert not session.plans
    run(model, [batch])
    assert installation(model).planned.plan == planned.plan


def test_ranks_that_recompute_together_take_the_plan_of_the_largest_batch(monkeypatch):
    """Ranks that recompute together, as under ZeRO-3, use the plan of the largest batch and then measure nothing."""
    batch, model = tiny_batch("llama", **SHAPE), model_of("llama")
    budgeted(model, half(batch))
    monkeypatch.setattr(compat.distributed, "is_distributed", lambda: True)
    monkeypatch.setattr(compat.distributed, "ranks_recompute_together", lambda base: True)
    mine = hf_ckpt.describe(model).plan
    theirs = dataclasses.replace(mine, actions=tuple((block, SELECTIVE) for block, _ in mine.actions))
    larger = []
    monkeypatch.setattr(
        compat.distributed,
        "of_all_ranks",
        lambda mine: [mine, (mine[0] + 1, theirs.to_dict())] if larger else [mine, mine],
    )
    run(model, [batch] * 3)
    assert session_of(model).measured_steps == 1  # the third step is the first measured one
    larger.append(True)
    (actions,) = run(model, [batch])
    assert actions == [SELECTIVE] * 6
    assert session_of(model).measured_steps == 1


def test_a_budget_below_the_weights_is_refused_at_once():
    model = model_of("llama")
    budgeted(model, "100KiB")
    with pytest.raises(InfeasibleError, match=r"no plan fits into 100\.00 KiB: the model holds .* by itself"):
        forward_and_backward(model, tiny_batch("llama", **SHAPE))


def test_where_no_plan_fits_the_run_goes_on_with_the_least(caplog):
    batch = tiny_batch("llama", **SHAPE)
    model = model_of("llama")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    budgeted(model, 2 * weights + 1000)
    run(model, [batch] * 9)
    assert installation(model).planned.over
    assert sum("no plan fits 4 x 64 tokens" in record.message for record in caplog.records) == 1


# --- reads of an accelerator's statistics -----------------------------------------------------------------------------


class Allocator:
    """Replaces the statistics of a device, and records calls."""

    def __init__(self, monkeypatch):
        self.asked, self.current, self.peak, self.now = [], 0, 0, 0
        monkeypatch.setattr(compat.devices, "allocator_bytes", self.read)
        monkeypatch.setattr(compat.devices, "reset_peak", self.reset)
        monkeypatch.setattr(compat.devices, "has_timed_events", lambda device: True)
        monkeypatch.setattr(compat.devices, "timed_event", self.event)
        monkeypatch.setattr(memory, "allocator_of", functools.cache(memory.Allocator))

    def read(self, device):
        self.asked.append("stats")
        return compat.devices.AllocatorBytes(self.current, self.peak)

    def reset(self, device):
        self.asked.append("reset")
        self.peak = self.current

    def take(self, size):
        self.current += size
        self.peak = max(self.peak, self.current)

    def event(self, device):
        self.now += 1
        return Event(self, self.now)


class Event:
    def __init__(self, allocator, at):
        self.allocator, self.at = allocator, at

    def synchronize(self):
        self.allocator.asked.append("wait")

    def elapsed_time(self, other):
        return float(other.at - self.at)


@pytest.mark.compat
def test_an_accelerator_is_read_once_a_boundary(monkeypatch):
    """Each boundary reads statistics and resets the peak once, without waiting for the device.

    A callback still reads the peak of the whole step although boundaries reset it.
    """
    allocator, there = Allocator(monkeypatch), {torch.device("cuda", 0)}
    meter = memory.PeakMeter(there)
    allocator.take(100)
    meter.reset()
    found = levels.Levels(levels.meter_for(there))
    model, batch = model_of("llama"), tiny_batch("llama", **SHAPE)
    hf_ckpt.install(model, "full")
    enable(model)  # recomputed blocks are not boundaries
    boundaries = Boundaries(find_blocks(model).modules, found.mark)
    allocator.asked.clear()
    found.mark("begin")
    allocator.take(400)
    allocator.take(-300)
    forward_and_backward(model, batch)
    boundaries.remove()
    marks = 1 + 3 * 6 + 1
    assert allocator.asked == ["stats", "reset"] * marks
    read = found.levels()
    assert [level.what for level in read] == ["begin", *["forward", "forwarded"] * 6, *["backward"] * 6, "end"]
    assert (read[1].bytes, read[1].peak_bytes) == (200, 500)
    assert read[2].nanoseconds == 1_000_000
    assert meter.peak_bytes() == 500
    meter.reset()
    assert meter.peak_bytes() == 200


def test_where_the_optimizer_is_the_peak_nothing_is_recomputed_in_vain(caplog):
    """A budget below the optimizer's own peak gets the fastest plan, and says what would lower the peak."""
    batch = tiny_batch("llama", batch=1, tokens=4)
    model = model_of("llama")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    budgeted(model, 4 * weights)  # weights, gradients and two moments; the step needs temporary bytes, too
    actions = run(model, [batch] * 12, torch.optim.AdamW(model.parameters(), lr=1e-4))
    assert installation(model).planned.over
    assert actions[-1] == [KEEP] * 6
    (said,) = [record.message for record in caplog.records if "no plan fits" in record.message]
    assert "the optimizer's step is the peak" in said
    assert "smaller batches" not in said
    told = str(hf_ckpt.describe(model))
    assert f" above {format_bytes(4 * weights)} (no plan needs less)" in told


def test_a_plan_of_the_measuring_phase_is_not_called_the_plan():
    """Before enabling, while measuring, and after a resume, `describe` says how many steps are left at most."""
    batch, model = tiny_batch("llama", **SHAPE), model_of("llama")
    hf_ckpt.install(model, {"policy": "budget", "budget": half(batch)})
    assert "not the plan of the run yet: `budget` measures the first training steps" in str(hf_ckpt.describe(model))
    enable(model)
    left = []
    for _ in range(12):
        run(model, [batch])
        told, planned = hf_ckpt.describe(model), installation(model).planned
        left.append(planned.steps_left)
        assert (told.measuring is None) == (not planned.measures)
        if planned.measures:
            assert f"measuring ({planned.phase}), at most {planned.steps_left} steps" in str(told)
    assert left[0] > 2
    assert left[-1] == 0
    assert 0 < sum(number > 0 for number in left) <= left[0]
    resumed = pickle.loads(pickle.dumps(model))
    assert "measures the first training steps" in hf_ckpt.describe(resumed).measuring
