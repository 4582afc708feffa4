"""A plan for every bucket of batch shapes: which batch takes which, what is traced for them, and what is exchanged."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from helpers.planned import budgeted, live_peak, model_of, tracing_once, without_state
from helpers.sparing import sparing
from helpers.steps import assert_same, gradients, step, without_cache

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.models.tiny import FAMILIES, tiny_batch
from hf_ckpt.planner import live
from hf_ckpt.planner.budgets import peak_of_least, plan_within
from hf_ckpt.planner.shapes import BatchShape, rounded_up

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("few_actions")]
LONG = 128
ON_LINES = compat.HOOKS_STAY_OUTSIDE
"""Whether costs of two lengths give those between. With transformers 4.57, on torch 2.8, each bucket is traced."""


@pytest.fixture(autouse=True)
def measurements_end():
    """A measurement of a step ends with its model, which no test shall leave to the next one."""
    yield
    gc.collect()


@pytest.fixture
def traced(monkeypatch):
    """The shapes that were traced, in words. Models of these tests are alike, so that each shape is traced once."""
    found = []
    monkeypatch.setattr(live, "_traced", tracing_once(live._traced, found))
    return found


def small():
    return without_state(model_of(layers=3))


def batch_of(tokens, sequences=4, seed=0):
    return tiny_batch("llama", batch=sequences, tokens=tokens, seed=seed)


def budget_between(share, tokens=LONG, sequences=4):
    """A budget between the lowest peak of all plans for a batch and that of no checkpointing."""
    model = small()
    budgeted(model, "1GiB")
    step(model, batch_of(tokens, sequences))
    costs = installation(model).planned.costs
    low, high = peak_of_least(costs), plan_within(costs, 2**40).prediction.peak_bytes
    return round(low + (high - low) * share)


def rerun(model, batch):
    """Gradients of a step, and how often anything was recomputed in it."""
    before = sum(hf_ckpt.describe(model).recomputed.values())
    found = step(model, batch)
    return found, sum(hf_ckpt.describe(model).recomputed.values()) - before


# --- which plan -------------------------------------------------------------------------------------------------------


def test_lengths_are_rounded_up_by_a_quarter_at_most():
    assert [rounded_up(number, 3) for number in (1, 7, 8, 9, 11, 33, 64, 65, 81, 129)] == [
        *(1, 7, 8, 10, 12, 40, 64, 80, 96, 160)
    ]
    for number in range(1, 2000):
        assert number <= rounded_up(number, 5) <= rounded_up(number, 3) <= 1.25 * number + 1
    assert BatchShape({"encoder": (3, 65), "decoder": (3, 9)}).bucket().sizes == {
        "encoder": (3, 80),
        "decoder": (3, 10),
    }


@pytest.mark.long
def test_short_batches_recompute_nothing_and_long_ones_as_much_as_they_must(traced):
    model, plain, budget = small(), small(), budget_between(0.4)
    traced.clear()
    budgeted(model, budget)
    again, plans = {}, {}
    for tokens in (LONG, 24, 64, 100, LONG, 24, 64, 100, 104, 63):
        batch = batch_of(tokens)
        found, count = rerun(model, batch)
        assert_same(step(plain, batch), found, f"{tokens} tokens")
        assert live_peak(model, batch) <= budget
        again.setdefault(tokens, []).append(count)
        plans.setdefault(tokens, []).append(installation(model).planned)
    assert again[24] == again[64] == [0, 0]
    assert all(found[0] == found[1] > 0 for found in (again[LONG], again[100]))
    assert plans[LONG][0].plan.prediction.step_seconds > plans[100][0].plan.prediction.step_seconds
    assert all(found[0] is found[-1] for found in plans.values())
    assert plans[104][0] is plans[100][0]  # of one bucket
    assert plans[63][0] is plans[64][0]  # served by a longer one that keeps everything
    if ON_LINES:
        assert traced == ["4 x 128 tokens", "4 x 24 tokens"]  # all others lie on the line through these two


@pytest.mark.long
def test_one_token_more_is_no_reason_to_plan(traced):
    model, budget = small(), budget_between(0.4)
    traced.clear()
    budgeted(model, 2 * budget)
    plans = []
    for tokens in (64, 65, 66, 72, 80, 80, 64):
        step(model, batch_of(tokens))
        plans.append(installation(model).planned)
    assert len({id(planned) for planned in plans}) == 2
    assert all(planned is plans[1] for planned in plans[1:6])
    assert plans[1].shape == BatchShape({"decoder": (4, 80)})
    assert traced == ["4 x 64 tokens", "4 x 128 tokens"] if ON_LINES else len(traced) <= 3


@pytest.mark.slow
def test_shapes_are_a_set_and_no_product_of_maxima(traced):
    """16 short sequences and 2 long ones; nothing is planned, or traced, for 16 long ones."""
    model, plain = small(), small()
    budgeted(model, budget_between(0.5, 16, 16))
    traced.clear()
    seen = []
    for sequences, tokens in ((16, 16), (2, LONG), (16, 16), (2, LONG), (2, 16)):
        batch = batch_of(tokens, sequences)
        assert_same(step(plain, batch), step(model, batch))
        seen.append(installation(model).planned)
        assert not seen[-1].over
    assert seen[0] is seen[2]
    assert seen[1] is seen[3]
    assert "16 x 128 tokens" not in traced
    assert {str(planned.shape) for planned in seen[:2]} == {"16 x 16 tokens", "2 x 128 tokens"}


@pytest.mark.long
def test_a_few_sequences_less_take_the_bucket_of_more(traced):
    """The last batch of an epoch."""
    model = small()
    budgeted(model, budget_between(0.4))
    step(model, batch_of(LONG))
    planned = installation(model).planned
    traced.clear()
    step(model, batch_of(LONG - 1, 3))
    assert installation(model).planned is planned
    assert not traced


@pytest.mark.slow
def test_a_bucket_that_fits_in_part_is_planned_for_in_part(traced):
    """No plan fits the bucket of 80 tokens, but the batch of 66 has one."""
    model = small()
    step_costs = small()
    budgeted(step_costs, "1GiB")
    step(step_costs, batch_of(68))
    budgeted(model, peak_of_least(installation(step_costs).planned.costs))
    step(model, batch_of(64))
    step(model, batch_of(66))
    planned = installation(model).planned
    assert not planned.over
    assert str(planned.shape) == "4 x 68 tokens"
    step(model, batch_of(80))
    assert installation(model).planned.over


# --- never above the budget -------------------------------------------------------------------------------------------


@sparing(("family", "attention"), [(f, a) for f in FAMILIES for a in ("sdpa", "eager")], ("gpt2", "eager"))
@pytest.mark.slow
def test_no_member_of_a_bucket_needs_more_than_its_plan_says(family, attention):
    """With dropout, masks and attention weights, whose sizes grow with the square of the length."""
    model = without_state(model_of(family, layers=3, dropout=0.1))
    model.config._attn_implementation = attention if family != "t5" else model.config._attn_implementation
    batches = {tokens: tiny_batch(family, batch=4, tokens=tokens) for tokens in (LONG, 40, 64, 72, 88, 96, 100)}
    for batch in batches.values():
        batch["attention_mask"][0, -3:] = 0
    expected = {tokens: step(model, batch) for tokens, batch in batches.items()}
    none = live_peak(model, batches[LONG])
    budget = int(0.6 * none)
    budgeted(model, budget)
    counts = {}
    for tokens, batch in batches.items():
        found, counts[tokens] = rerun(model, batch)
        assert_same(expected[tokens], found, f"{tokens} tokens")
        peak = live_peak(model, batch)
        predicted = installation(model).planned.plan.prediction.peak_bytes
        assert peak <= 1.01 * predicted
        assert peak <= budget
    assert counts[LONG] > counts[40]


@pytest.mark.slow
def test_micro_batches_of_several_shapes_in_one_step(traced):
    """Gradients are those of no plan, and each micro-step is within the budget, with those of earlier ones there."""
    model, plain = small(), small()
    budget = budget_between(0.6)
    budgeted(model, budget)
    for micro_batches in ([LONG, 24, 64], [24, LONG, 64]):
        for one in (model, plain):
            one.zero_grad(set_to_none=True)
        for number, tokens in enumerate(micro_batches):
            batch = batch_of(tokens, seed=number)
            for one in (plain, model):
                loss = one(**without_cache(one, batch)).loss
                loss.backward()
        assert_same(gradients(plain), gradients(model))
    planned = installation(model).planned
    assert planned.shape.accumulation == 2
    assert len(planned.plans) >= 3
    assert sum(hf_ckpt.describe(model).recomputed.values()) > 0


@pytest.mark.slow
def test_every_bucket_knows_what_a_step_has_measured(traced):
    """Plans are made for the budget less the bias, also those that were there before it was known."""
    model = small()
    budget = budget_between(0.4)
    budgeted(model, budget)
    for tokens in (LONG, 24, 100):
        step(model, batch_of(tokens))
    planned = installation(model).planned
    bias = 200 * 1024
    planned.buckets.bias_bytes = bias
    planned.buckets.seen.clear()
    for tokens in (LONG, 24, 100, LONG, 112):
        step(model, batch_of(tokens))
        found = installation(model).planned
        assert found.bias_bytes == bias
        assert found.plan.prediction.peak_bytes <= budget - bias
    assert len(planned.plans) == 3


@pytest.mark.long
def test_a_measurement_of_each_plan(traced):
    """One step of each plan is measured, and no more: a count of live bytes is slow."""
    model = model_of(layers=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    budgeted(model, budget_between(0.4))
    opened = []
    for tokens in (LONG, 24, 24, LONG, 100, 100, 24, LONG):
        model(**without_cache(model, batch_of(tokens))).loss.backward()
        opened.append(installation(model).window is not None)
        optimizer.step()
        optimizer.zero_grad()
    assert opened == [True, True, False, False, True, False, False, False]


# --- how plans are exchanged ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_switch_changes_functions_and_no_hooks(traced):
    model = small()
    budgeted(model, budget_between(0.4))
    for tokens in (LONG, 24, 100):
        step(model, batch_of(tokens))
    record = installation(model)
    handles = list(record.handles)
    hooks = [dict(module._forward_pre_hooks) for module in model.modules()]
    regions, plans = [], []
    for tokens in (24, LONG, 100, LONG, 24):
        step(model, batch_of(tokens))
        regions.append(dict(record.regions))
        plans.append(record.plan)
    assert regions[0] == regions[4] == {}
    assert regions[1] == regions[3]
    assert plans[1] is plans[3]
    assert record.handles == handles
    assert [dict(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert sum(hf_ckpt.describe(model).forwards.values()) == 3 * len(regions[1]) + 2 * len(regions[2]) > 0
    hf_ckpt.uninstall(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.long
def test_evaluation_in_the_middle_changes_nothing(traced):
    model = small()
    budgeted(model, budget_between(0.4))
    step(model, batch_of(LONG))
    planned, count = installation(model).planned, len(traced)
    model.eval()
    with torch.no_grad():
        model(**batch_of(24))
    model(**batch_of(96))
    model.train()
    assert installation(model).planned is planned
    step(model, batch_of(LONG))
    assert installation(model).planned is planned
    assert len(traced) == count


@pytest.mark.slow
def test_copies_and_pickles_plan_for_themselves(traced):
    model = small()
    budgeted(model, budget_between(0.4))
    for tokens in (LONG, 24):
        step(model, batch_of(tokens))
    expected, again = rerun(model, batch_of(LONG))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        without_state(twin)
        assert installation(twin).planned is None
        for tokens in (LONG, 24, LONG):  # in the order of the model: the first batch decides what plans choose from
            found, count = rerun(twin, batch_of(tokens))
        assert_same(expected, found)
        assert count == again > 0
    assert rerun(model, batch_of(24))[1] == 0


@pytest.mark.long
def test_describe_shows_the_plan_of_every_bucket(traced):
    model = small()
    budgeted(model, budget_between(0.4))
    for tokens in (LONG, 24, 100):
        step(model, batch_of(tokens))
    done = hf_ckpt.describe(model)
    assert list(done.plans) == ["4 x 24 tokens", "4 x 112 tokens", "4 x 128 tokens"]
    assert done.plans["4 x 112 tokens"] == done.plan
    assert not done.plans["4 x 24 tokens"].active()
    shown = str(done)
    assert "plans for batches of 3 sizes" in shown
    assert "4 x 24 tokens: 3 x keep; peak" in shown
