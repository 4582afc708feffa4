"""Plans with chunked feed-forwards: predicted within 2 % of counts, and used only if they help."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from helpers.adapters import with_lora
from helpers.planned import budgeted, live_peak, without_state
from helpers.sparing import sparing
from helpers.steps import assert_near, assert_same, enable, step, without_cache

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.costs.timeline import worst_timeline
from hf_ckpt.engines.tiles import standing_for
from hf_ckpt.errors import SpecError
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.forecast.forecast import forecast
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.planner.budgets import choice_within, plan_of_least, plan_within
from hf_ckpt.planner.options import cost_options, ways_to_run
from hf_ckpt.prediction.question import Question
from hf_ckpt.prediction.skeleton import skeleton_of
from hf_ckpt.prediction.trace import Step, chunked_head, trace_costs
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE
from hf_ckpt.spec.plan import Plan
from hf_ckpt.training.install import trial

H100 = DEVICES["h100"]
SHAPE = {"batch": 1, "tokens": 512}
ACTIONS = (KEEP, FULL, SELECTIVE)
WIDE = {
    "llama": {"intermediate_size": 512},
    "gpt2": {"n_inner": 512, "n_positions": 512},
    "bert": {"intermediate_size": 512},
    "t5": {"d_ff": 512},
}
TARGETS = {"bert": ["query", "intermediate.dense"], "t5": ["q", "wi_0", "wo"]}


def model_of(family="llama", *, lora=False, layers=2, **keys):
    """A small model whose wide feed-forward is most of a block."""
    hidden = 64 if family != "llama" else 32
    model = tiny_model(family, layers=layers, hidden=hidden, attention="sdpa", **{**WIDE[family], **keys})
    model = with_lora(model, family, lora_dropout=0.0, targets=TARGETS.get(family)) if lora else model
    return without_state(model)


def step_on(model, **options):
    return skeleton_of(model), Step(tiny_batch("llama", **SHAPE), optimizer="sgd", **options)


@sparing(
    ("family", "lora", "autocast"),
    [(f, lora, cast) for f in FAMILIES for lora in (False, True) for cast in (False, True)],
    ("llama", True, False),
)
def test_peaks_are_predicted_as_they_are_counted(family, lora, autocast):
    """Peaks are within 2 % of the prediction under every policy, and lower than without chunks."""
    cast = torch.bfloat16 if autocast else None
    model, batch = model_of(family, lora=lora), tiny_batch(family, **SHAPE)
    inputs = without_cache(model, batch)
    skeleton, micro = skeleton_of(model), Step(inputs, optimizer="sgd", autocast=cast)
    costs = trace_costs(skeleton, micro, DEVICES["cpu"], actions=ACTIONS, mlp=100)
    blocks = [block for stack in costs.stacks for block in stack.blocks]
    for number, action in enumerate(ACTIONS):
        measured = {}
        for mlp in ("full", 100):
            plan = Plan(costs.family, costs.model, tuple((block, action) for block in blocks), mlp=mlp)
            with trial(model, plan), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                step(model, inputs)
                measured[mlp] = live_peak(model, inputs)
                assert (hf_ckpt.describe(model).chunked_mlps > 0) == (mlp == 100)
        predicted = worst_timeline(costs, costs.uniform(number)).peak_bytes
        assert measured[100] == pytest.approx(predicted, rel=0.02), action
        assert measured[100] < measured["full"], action


def test_one_chunk_stands_for_many_in_a_trace(monkeypatch):
    """A trace with few chunks gives the same peaks, bytes and times as one with all."""
    skeleton, step_of = step_on(model_of(lora=True))
    short = trace_costs(skeleton, step_of, H100, mlp=64, actions=(KEEP,))
    monkeypatch.setattr("hf_ckpt.prediction.trace.standing_for", _Unset())
    skeleton.runs.clear()
    long = trace_costs(skeleton, step_of, H100, mlp=64, actions=(KEEP,))

    def figures(costs):
        phases = [phase for found in blocks_of(costs) for phase in (found.forward, found.backward)]
        return [(p.peak(False), p.net, p.gradients, p.nanoseconds) for p in phases]

    def blocks_of(costs):
        (stack,) = costs.stacks
        return [*stack.first.values(), *stack.inner.values(), *stack.last.values()]

    assert figures(short) == figures(long)
    points = [sum(len(found.backward.points) for found in blocks_of(costs)) for costs in (short, long)]
    assert points[0] < 0.7 * points[1]  # runs 3 of 8 chunks


class _Unset:
    """Replaces `standing_for` and sets nothing, so that all chunks run."""

    def set(self, value):
        return standing_for.set(None)

    def reset(self, token):
        standing_for.reset(token)


def test_times_count_what_runs_again():
    """With chunks, blocks that keep everything run the feed-forward once more, recomputed ones only its last product.

    Without chunks, torch ends the recomputation of a block before that product.
    """
    skeleton, step_of = step_on(model_of())
    flops = {}
    rates = {"flops16": 1e9 / 0.6, "flops32": 1e9 / 0.6, "bandwidth": 1e30, "launch_nanoseconds": 0}
    device = dataclasses.replace(H100, **rates)  # a floating-point operation takes a nanosecond, all else nothing
    for mlp in ("full", 100):
        costs = trace_costs(skeleton, step_of, device, mlp=mlp, actions=(KEEP, FULL))
        found = [costs.stacks[0].inner[0, number] for number in (0, 1)]
        flops[mlp] = [cost.forward.nanoseconds + cost.backward.nanoseconds for cost in found]
    feed_forward = 2 * 3 * 32 * 512 * 512
    assert flops[100][0] == flops["full"][0] + feed_forward
    assert flops[100][1] == flops["full"][1] + feed_forward // 3


def test_it_is_a_candidate_where_it_is_allowed():
    skeleton, step_of = step_on(model_of(layers=4))
    options = functools.partial(cost_options, skeleton=skeleton, step=step_of, device=H100, segments=False)
    assert [ways_to_run(mlp) for mlp in ("full", "auto", 64)] == [("full",), ("full", "auto"), (64,)]
    plain, tiled = (trace_costs(skeleton, step_of, H100, mlp=mlp, actions=(KEEP, FULL)) for mlp in ("full", 64))
    ways = options([plain, tiled], head="auto")
    asked = [("full", "full"), ("auto", "full"), ("full", 64), ("auto", 64)]
    assert [(found.head_tokens, found.mlp_tokens) for found in ways] == asked
    floor = plan_of_least(ways[0]).prediction.peak_bytes
    assert plan_within(ways[::2], floor).mlp == "full"
    tight = plan_within(ways[::2], floor - 1)
    assert (tight.mlp, tight.head) == (64, "full")
    assert "feed-forward: in chunks (64 tokens)" in str(tight)
    assert choice_within(ways[::2], floor - 1)[0] is ways[2]
    assert plan_of_least(ways[::2]).prediction.peak_bytes < 0.8 * floor
    assert chunked_head(tiled, skeleton, step_of, H100, "auto").mlp_tokens == 64


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


@pytest.mark.thorough
def test_longer_sequences_fit():
    """`hf-ckpt plan --max-seq` finds more tokens for the same budget."""
    found = {}
    for mlp in ("full", "auto"):
        sizes = {"batch": 1, "tokens": 2048, "lora": 8, "device": "h100", "budget": "1GiB", "max_tokens": True}
        asked = Question("mini-llama", **sizes, head="auto", mlp=mlp)
        rows = forecast(asked).rows
        found[mlp] = next(int(row.options.split()[1]) for row in rows if row.name.startswith("longest sequences"))
    assert found["auto"] > 1.1 * found["full"]


def test_what_cannot_be_asked_together_is_refused():
    for spec in ({"compile": "blocks"}, {"policy": "selective", "engine": "sac"}):
        with pytest.raises(SpecError, match="`mlp` "):
            hf_ckpt.install(model_of(), {**spec, "mlp": 64})


def test_a_plan_keeps_its_chunks(tmp_path):
    """A plan keeps its chunks in a file, in an enable call with other options, and after `step_down`."""
    from hf_ckpt.training.escalate import step_down

    model = model_of()
    hf_ckpt.install(model, {"policy": "selective", "mlp": 64})
    path = str(tmp_path / "plan.json")
    hf_ckpt.describe(model).save(path)
    hf_ckpt.install(model, {"plan": path})
    enable(model, {"use_reentrant": False})
    assert hf_ckpt.describe(model).plan.mlp == 64
    assert step_down(model) is not None
    assert hf_ckpt.describe(model).plan.mlp == 64
    enable(model, {"mlp": "auto"})
    assert hf_ckpt.describe(model).plan.mlp == "auto"
    hf_ckpt.install(model, {"plan": path, "mlp": 32})
    assert hf_ckpt.describe(model).plan == dataclasses.replace(Plan.load(path), mlp=32)
