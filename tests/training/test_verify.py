"""`hf_ckpt.verify` requires equal gradients and real recomputation, and reports what fails."""

import re

import pytest
import torch
from helpers.custom import model_of_averages, without_forward_state
from helpers.planned import budgeted, model_of, without_state
from helpers.steps import enable, step, without_cache
from torch import nn

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.compat.transformers import is_cache
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.errors import HfCkptError, SpecError
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model
from hf_ckpt.spec.actions import FULL

BATCH = tiny_batch("llama")
REDRAWN = {"policy": "full", "preserve_rng_state": False}
"""A spec whose recomputation draws dropout again: the loss is the same, and gradients differ."""


@pytest.mark.compat
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_verify_finds_equal_gradients_and_counts_recomputations(family):
    result = hf_ckpt.verify(tiny_model(family, dropout=0.1), tiny_batch(family), {"every_n_layers": 2})
    assert result, result
    assert result.loss == "equal"
    assert int(result.gradients.partition(" of ")[0]) > 30
    blocks = 4 if family == "t5" else 2
    assert list(result.recomputed.values()) == [1] * blocks
    assert f"; {blocks} recomputations of {blocks} blocks" in str(result)
    nothing = hf_ckpt.verify(tiny_model(family), tiny_batch(family), "none")
    assert nothing, nothing
    assert nothing.recomputed == {}


def test_verify_restores_the_model_and_the_random_state():
    model, batch = tiny_model("gpt2", dropout=0.1), tiny_batch("gpt2")
    step(model, batch)
    there = {name: parameter.grad for name, parameter in model.named_parameters()}
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    random_state = torch.get_rng_state()
    assert hf_ckpt.verify(model, batch)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is there[name] for name, parameter in model.named_parameters())
    assert {name: vars(module) for name, module in model.named_modules()} == before


def test_buffers_that_a_forward_replaces_are_compared_and_restored():
    model = model_of_averages()
    there = dict(model.named_buffers())
    batch = {"hidden_states": torch.ones(2, 8, 16), "shift": torch.ones(16)}
    result = hf_ckpt.verify(model, batch, "full", loss_fn=torch.sum)
    assert result, result
    assert list(result.recomputed.values()) == [1] * 3
    assert all(buffer is there[name] and float(buffer) == 1 for name, buffer in model.named_buffers())


def test_an_installed_plan_is_checked_and_kept():
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "1,2"})
    result = hf_ckpt.verify(model, BATCH)
    assert set(result.recomputed) == {"model.layers.1", "model.layers.2"}
    assert not installation(model).enabled
    enable(model)
    assert hf_ckpt.verify(model, BATCH, "full")
    described = hf_ckpt.describe(model)
    assert described.enabled
    assert set(described.plan.active()) == {"model.layers.1", "model.layers.2"}
    assert not sum(described.recomputed.values())  # a verification keeps its own counts


BUDGET = 21 << 19
"""Bytes in which some of the six blocks can do without `full`, in a step of 4 x 64 tokens."""


def of_the_run(model):
    """What a verification must leave as it is: the same objects, and equal counts."""
    record = installation(model)
    session = record.session
    objects = record, session, session.planned, record.watch, record.functions, record.heads
    return [
        *map(id, objects),
        record.plan,
        session.planning.measured_steps,
        dict(session.planning.plans),
        hf_ckpt.describe(model),
    ]


def test_the_plan_of_a_budget_is_verified_and_its_run_goes_on():
    model = without_state(model_of())
    batch = without_cache(model, tiny_batch("llama", batch=4, tokens=64))
    budgeted(model, BUDGET, check_every=4, head=50)
    for steps in (2, 20):
        for _ in range(steps):
            step(model, batch)
            model.zero_grad()
        before, result = of_the_run(model), hf_ckpt.verify(model, batch)
        assert result, result
        assert result.plan == installation(model).plan
        assert of_the_run(model) == before
    plan, measured_steps = result.plan, installation(model).session.planning.measured_steps
    assert {action for _, action in plan.actions} != {FULL}
    assert set(result.recomputed) == set(plan.active())
    assert "allowed 1e-05" in result.gradients
    step(model, batch)
    assert (installation(model).plan, installation(model).session.planning.measured_steps) == (plan, measured_steps)


@pytest.mark.parametrize(
    ("method", "fault", "problem"),
    [
        (
            "checkpointed",
            lambda self, fn, *args: fn(*args),
            "planned but not recomputed: model.layers.0, model.layers.1, ",
        ),
        ("state_for", without_forward_state, "buffer model.layers.0.mlp.act_fn.1.running_mean differs by "),
    ],
    ids=["no checkpointing", "statistics are updated twice"],
)
def test_a_fault_that_leaves_gradients_equal_is_named(method, fault, problem, monkeypatch):
    model = tiny_model("llama")
    for block in model.model.layers:
        block.mlp.act_fn = nn.Sequential(block.mlp.act_fn, nn.BatchNorm1d(16))  # over 16 tokens
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    result = hf_ckpt.verify(model, BATCH)
    assert result, result
    monkeypatch.setattr(FullRegion, method, fault)
    result = hf_ckpt.verify(model, BATCH)
    assert not result
    assert result.gradients == "47 of 47 bit-equal"
    assert [text.startswith(problem) for text in result.problems] == [True]
    assert result.problems[0] in str(result)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_the_first_gradient_that_differs_is_named():
    result = hf_ckpt.verify(tiny_model("llama", dropout=0.5), BATCH, REDRAWN)
    assert not result
    assert result.loss == "equal"
    (problem,) = result.problems
    assert problem.startswith("gradient of model.embed_tokens.weight differs by ")
    assert float(problem.split()[-4]) > 0.01


def test_a_loss_that_is_no_number_is_a_difference():
    for plain in (1.0, float("nan")):
        by = iter([plain, float("nan")])
        assert not hf_ckpt.verify(tiny_model("llama"), BATCH, loss_fn=lambda found, by=by: found.loss * next(by))


def test_below_the_first_trained_parameter_nothing_has_to_be_recomputed():
    model = tiny_model("llama").requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    result = hf_ckpt.verify(model, BATCH)
    assert result
    assert result.gradients == "1 of 1 bit-equal"
    assert not sum(result.recomputed.values())


@pytest.mark.compat
def test_no_cache_is_built_in_either_run():
    """Neither run builds a cache, because kernels may round differently with one; here a layer makes it visible."""
    model = tiny_model("llama")

    def with_cache(module, args, kwargs, output):
        return output[0] * (1.5 if any(map(is_cache, kwargs.values())) else 1.0), *output[1:]

    model.model.layers[0].self_attn.register_forward_hook(with_cache, with_kwargs=True)
    assert hf_ckpt.verify(model, BATCH)
    assert not hf_ckpt.verify(model, {**BATCH, "use_cache": True})


class Scorer(nn.Module):
    """A module of the user's around a model: its forward takes what it names only, and returns a dict."""

    def __init__(self):
        super().__init__()
        self.model = tiny_model("llama")

    def forward(self, input_ids):
        return {"loss": self.model(input_ids=input_ids).logits.square().mean()}


def test_a_module_around_the_model_is_verified():
    """It does not take `use_cache`, and yet the model builds no cache."""
    scorer, caches = Scorer(), []
    attention = scorer.model.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: caches.extend(filter(is_cache, kwargs.values())), with_kwargs=True
    )
    result = hf_ckpt.verify(scorer, {"input_ids": BATCH["input_ids"]}, "full")
    assert result, result
    assert list(result.recomputed.values()) == [1] * 4
    assert not caches
    scorer(BATCH["input_ids"])
    assert caches  # the config is as before


@pytest.mark.compat
@pytest.mark.parametrize(("rows", "options", "equal"), [(2, {}, False), (2, {"use_cache": False}, True), (1, {}, True)])
def test_packed_rows_are_compared_with_the_call_of_the_user(rows, options, equal, caplog):
    """transformers keeps them apart only without a cache, which no plan builds; a call without options builds one."""
    batch = tiny_batch("llama", batch=1, tokens=16)
    positions = torch.arange(16 // rows).repeat(rows)[None]
    batch = {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": positions, **options}
    result = hf_ckpt.verify(tiny_model("llama", attention="sdpa"), batch, "full")
    assert bool(result) == equal, result
    assert ("packed rows (whose `position_ids` restart) do not attend to each other" in caplog.text) == (not equal)


def test_what_cannot_be_verified_is_refused():
    model, unlabelled = tiny_model("llama"), {"input_ids": BATCH["input_ids"]}
    for batch, spec, error in (
        (unlabelled, None, "no loss"),
        (BATCH, {"policy": "budget", "budget": BUDGET}, r"`budget` has no plan before a run\. Install it"),
        (BATCH, {"layers": "9"}, "blocks 0 to 3"),
    ):
        with pytest.raises((HfCkptError, SpecError), match=error):
            hf_ckpt.verify(model, batch, spec)
    with pytest.raises(HfCkptError, match="eval mode"):
        hf_ckpt.verify(model.eval(), BATCH)
    with pytest.raises(HfCkptError, match="depends on no trainable parameter"):
        hf_ckpt.verify(model.train().requires_grad_(False), BATCH)
    model.requires_grad_(True)
    assert installation(model) is None
    assert hf_ckpt.verify(model.train(), unlabelled, loss_fn=lambda outputs: outputs.logits.square().mean())


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, "1e-05"), (torch.bfloat16, "0.05")])
def test_a_head_in_chunks_may_differ_by_rounding_and_has_to_run(dtype, allowed):
    model, batch = tiny_model("gpt2", dtype=dtype), tiny_batch("gpt2", batch=4, tokens=64)
    result = hf_ckpt.verify(model, batch, {"policy": "full", "head": 50})
    assert result, result
    largest = re.search(r"the others up to (\S+) of their norm \(allowed (\S+)\)", result.gradients)
    assert 0 < float(largest[1]) <= float(largest[2]) == float(allowed)
    one_chunk = hf_ckpt.verify(model, batch, {"policy": "full", "head": 4096})
    assert "the head did not run in chunks; last call: as a whole" in str(one_chunk)
    of_auto = hf_ckpt.verify(
        model, {name: value[:1, :16] for name, value in batch.items()}, {"policy": "full", "head": "auto"}
    )
    assert of_auto, of_auto
    assert "head: as a whole, because with so few tokens, chunks would save nothing" in str(of_auto)
    wrong = hf_ckpt.verify(tiny_model("llama", dropout=0.5), BATCH, {**REDRAWN, "head": 8})
    assert ["differs by" in problem for problem in wrong.problems] == [True]
