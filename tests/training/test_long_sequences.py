"""Budgets into which `full` does not fit, but feed-forwards in tiles do.

All live tensors are counted in every step. The steps that are measured may need no more than the budget, either.
"""

import copy
import dataclasses

import pytest
import transformers
from helpers.adapters import with_lora
from helpers.planned import budgeted, live_peak, model_of
from helpers.sparing import sparing
from helpers.steps import assert_near, assert_same, gradients, planned, without_cache
from torch import autocast, bfloat16, randint
from torch.autograd.graph import saved_tensors_hooks

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.forecast.devices import this_device
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.actions import FULL, OFFLOAD
from hf_ckpt.training.phases import Phase

TILES = {"mlp": 64, "head": "auto", "check_every": 0}
TOKENS = 1024


def wide_model(lora=False):
    """A model whose blocks need much more for their feed-forwards than for all else."""
    sizes = {"hidden_size": 32, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(vocab_size=256, num_hidden_layers=4, **sizes)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").train()
    return with_lora(model, "llama", lora_dropout=0.0) if lora else model


def long_batch():
    ids = randint(0, 256, (1, TOKENS))
    return {"input_ids": ids, "labels": ids}


def steps_until_planned(model, batch):
    """Train until a step has its plan. Returns the phase and the peak of each step."""
    steps = []
    while not steps or steps[-1][0] is not Phase.PLAN:
        model.zero_grad(set_to_none=True)
        with LiveBytes(model, batch) as live:
            model(**without_cache(model, batch)).loss.backward()
        steps.append((installation(model).session.planned.phase, live.peak_bytes))
    return steps


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("room", [1.02, pytest.param(1.5, marks=pytest.mark.long)])
def test_a_budget_below_the_peak_of_full_is_held_in_every_step(lora, room):
    """`full` needs at least 1.5 times the budget. Gradients are those of no checkpointing up to rounding."""
    plain = wide_model(lora)
    full, tiled, model = (copy.deepcopy(plain) for _ in range(3))
    batch = long_batch()
    planned(full, {"policy": "full", "head": "auto", "check_every": 0})
    planned(tiled, {"policy": "full", **TILES})
    budget = round(room * live_peak(tiled, batch))
    assert live_peak(full, batch) > 1.5 * budget
    budgeted(model, budget, **TILES)
    phases, peaks = zip(*steps_until_planned(model, batch), strict=True)
    assert phases[0] is Phase.MEASURE
    assert max(peaks) <= budget
    plan = hf_ckpt.describe(model).plan
    assert {action.kind for _, action in plan.actions} == {"full+tiles"}
    assert peaks[-1] == pytest.approx(plan.prediction.peak_bytes, rel=0.001)
    plain(**without_cache(plain, batch)).loss.backward()
    assert_near(gradients(plain), gradients(model))
    assert min(hf_ckpt.describe(model).recomputed.values()) >= len(phases) - 1


@pytest.mark.long
def test_where_full_fits_other_actions_are_tried_as_well():
    """Within the budget. The predicted peak of `full` is that of a model under `full`."""
    plain = wide_model()
    full, model = (copy.deepcopy(plain) for _ in range(2))
    batch = long_batch()
    planned(full, {"policy": "full", "head": "auto", "check_every": 0})
    needed = live_peak(full, batch)
    budget = round(1.4 * needed)
    budgeted(model, budget, **TILES)
    phases, peaks = zip(*steps_until_planned(model, batch), strict=True)
    assert phases[:2] == (Phase.MEASURE, Phase.MEASURE)
    assert max(peaks) <= budget
    assert {action.kind for _, action in hf_ckpt.describe(model).plan.actions} - {"full", "full+tiles"}
    session = installation(model).session
    costs = session.planning.measurements.costs(session.planned.batch)
    assert costs.peak(dict.fromkeys(session.planning.measurements.blocks, FULL)) == pytest.approx(needed, rel=0.001)


def test_a_budget_in_which_no_other_plan_fits_is_held_in_segments():
    """Gradients are those of no checkpointing, bit for bit. The steps before the plan need what `full` needs."""
    batch = tiny_batch("llama", batch=4, tokens=128)
    plain, full, divided, model = (tiny_model("llama", layers=16, hidden=32, attention="sdpa") for _ in range(4))
    for other in (full, divided, model):
        other.load_state_dict(plain.state_dict())
    planned(full, {"policy": "full+selective", "check_every": 0})
    planned(divided, {"policy": "full+selective", "segments": "sqrt", "check_every": 0})
    budget = round(1.01 * live_peak(divided, batch))
    assert budget < 0.9 * live_peak(full, batch)
    budgeted(model, budget, check_every=0)
    _, peaks = zip(*steps_until_planned(model, batch), strict=True)
    plan = hf_ckpt.describe(model).plan
    assert sum(action.made for _, action in plan.actions) > 8
    assert peaks[-1] <= budget
    assert peaks[-1] == pytest.approx(plan.prediction.peak_bytes, rel=0.005)
    plain(**without_cache(plain, batch)).loss.backward()
    assert_same(gradients(plain), gradients(model))
    before = hf_ckpt.describe(model).recomputed
    live_peak(model, batch)
    made = [action.made for _, action in plan.actions]
    recomputed = [count - before[name] for name, count in hf_ckpt.describe(model).recomputed.items()]
    assert recomputed == [1 + after for after in (*made[1:], False)]


@sparing("name", ["llama", "bert", "t5", "rule", "lora", "tiles"], "bert")
def test_a_budget_with_segments_is_held_in_every_step(name):
    """Also in those that are measured. They show what `full` needs, to the byte."""
    more = {"check_every": 0, **({"mlp": 64} if name == "tiles" else {})}
    rules = {"rules": [{"stack": "decoder", "policy": "full"}]} if name == "rule" else {}
    segments = {"encoder": "sqrt"} if name == "rule" else "sqrt"
    family = {"bert": "bert", "t5": "t5", "rule": "t5"}.get(name, "llama")

    def new_model():
        attention = "eager" if family == "t5" else "sdpa"
        model = tiny_model(family, layers=16, hidden=32, attention=attention)
        return with_lora(model, "llama", lora_dropout=0.0) if name == "lora" else model

    batch = tiny_batch(family, batch=4, tokens=128)
    plain, full, divided, model = (new_model() for _ in range(4))
    for other in (full, divided, model):
        other.load_state_dict(plain.state_dict())
    planned(full, {"policy": "full", **more})
    planned(divided, {"policy": "full", "segments": segments, **more})
    needed = live_peak(full, batch)
    budget = round(1.005 * live_peak(divided, batch))
    assert needed > budget
    budgeted(model, budget, segments=segments, **rules, **more)
    phases, peaks = zip(*steps_until_planned(model, batch), strict=True)
    plain(**without_cache(plain, batch)).loss.backward()
    assert phases[0] is Phase.MEASURE
    assert max(peaks) <= budget
    session = installation(model).session
    costs = session.planning.measurements.costs(session.planned.batch)
    least = session.planning.measurements.least
    assert costs.peak(dict.fromkeys(session.planning.measurements.blocks, least)) == pytest.approx(needed, rel=0.0005)
    assert session.planning.maker.peak_of_least(session.planned.batch) == pytest.approx(peaks[0], rel=0.0005)
    compare = assert_near if name == "tiles" else assert_same
    compare(gradients(plain), gradients(model))
    made = [action.made for _, action in hf_ckpt.describe(model).plan.actions]
    assert sum(made) > 8


@sparing("more", [{"segments": "sqrt"}, {}], {}, ids=["asked for", "where nothing else fits"])
def test_a_budget_plans_no_segments_inside_other_saved_tensor_hooks(more):
    """These decide where tensors are held, so that each block holds its input, and predictions count it."""
    batch = tiny_batch("llama", batch=4, tokens=128)
    full, model = (tiny_model("llama", layers=16, hidden=32, attention="sdpa") for _ in range(2))
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        planned(full, {"policy": "full", "check_every": 0})
        needed = live_peak(full, batch)
        budgeted(model, round(0.95 * needed), check_every=0, **more)
        _, peaks = zip(*steps_until_planned(model, batch), strict=True)
    planned_here = installation(model).session.planned
    assert planned_here.is_over
    assert not any(action.made for _, action in planned_here.plan.actions)
    assert planned_here.plan.prediction.peak_bytes == pytest.approx(peaks[-1], rel=0.001)


def test_blocks_that_are_called_several_times_have_no_plan_in_segments_and_that_is_said(caplog):
    batch = tiny_batch("llama", batch=2, tokens=32)
    model = tiny_model("llama", layers=2, hidden=32, attention="sdpa")
    model.model.layers.extend([*model.model.layers])
    model.config.num_hidden_layers = 4
    budgeted(model, "1GiB", segments="sqrt", check_every=0)
    steps_until_planned(model, batch)
    assert caplog.text.count("the plan has no `segments`, because each step calls `model.layers.0` several times") == 1
    assert not any(action.made for _, action in hf_ckpt.describe(model).plan.actions)


def test_segments_race_with_a_plan_that_offloads(monkeypatch):
    """Where only these two fit."""
    with_host = dataclasses.replace(this_device(), host_bandwidth=1e12)
    monkeypatch.setattr("hf_ckpt.training.plans.this_device", lambda devices: with_host)
    batch = tiny_batch("llama", batch=4, tokens=128)
    divided, model = (tiny_model("llama", layers=16, hidden=32, attention="sdpa") for _ in range(2))
    planned(divided, {"policy": "full+selective", "segments": "sqrt", "check_every": 0})
    budgeted(model, round(1.02 * live_peak(divided, batch)), host_budget="1GiB", check_every=0)
    session = None
    while session is None or session.planned.phase is not Phase.RACE:
        model(**without_cache(model, batch)).loss.backward()
        model.zero_grad(set_to_none=True)
        session = installation(model).session
    plans = [[action for _, action in entrant.plan.actions] for entrant in session.planning.entered.entrants[:2]]
    assert [(OFFLOAD in actions, any(action.made for action in actions)) for actions in plans] == [
        (True, False),
        (False, True),
    ]


@sparing("name", ["llama", "gpt2", "bert", "t5", "lora", "autocast", "whole"], "t5", "autocast")
def test_trials_need_no_more_than_the_bound_by_which_they_are_tried(name):
    """The bound is what tiles and the rest of the block have shown, see `Call.whole_bytes`; `whole` has one tile."""
    family = name if name in ("gpt2", "bert", "t5") else "llama"
    model = model_of(family, lora=name == "lora", layers=4, dropout=0.1)
    batch = tiny_batch(family, batch=4, tokens=64)
    budgeted(model, 1 << 40, **TILES | {"mlp": 256 if name == "whole" else 64})
    for _ in range(3):  # the third stores what the second has shown
        with autocast("cpu", bfloat16, enabled=name == "autocast"):
            loss = model(**without_cache(model, batch)).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
    measurements = installation(model).session.planning.measurements
    (step,) = measurements.references.values()
    (tried,) = measurements.with_backwards.values()
    seen = 0
    for call, with_trials in zip(step.calls, tried.calls, strict=True):
        for trial in with_trials.needs.values():
            if trial.backward_peak is not None:
                seen += 1
                needed = max(trial.arrival + trial.forward_peak, trial.kept + trial.kept_casts + trial.backward_peak)
                assert needed <= call.backward.peak + call.whole_bytes
    assert seen >= 3
