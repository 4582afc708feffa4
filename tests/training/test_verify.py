"""`hf_ckpt.verify` requires equal gradients and real recomputation, and reports what fails."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.custom import without_forward_state
from helpers.planned import budgeted, model_of, without_state
from helpers.steps import without_cache
from torch import nn

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.compat.transformers import is_cache
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.errors import HfCkptError, SpecError
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.spec.actions import FULL


@pytest.mark.compat
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_and_counted(family):
    result = hf_ckpt.verify(tiny_model(family, dropout=0.1), tiny_batch(family), {"every_n_layers": 2})
    assert result, result
    assert result
    assert result.loss == "equal"
    assert int(result.gradients.partition(" of ")[0]) > 30
    assert list(result.recomputed.values()) == [1] * (4 if family == "t5" else 2)
    nothing = hf_ckpt.verify(tiny_model(family), tiny_batch(family), "none")
    assert nothing, nothing
    assert nothing.recomputed == {}


def test_everything_is_as_before():
    model = tiny_model("gpt2", dropout=0.1)
    batch = tiny_batch("gpt2")
    model(**batch).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    random_state = torch.get_rng_state()
    assert hf_ckpt.verify(model, batch)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())
    assert {name: vars(module) for name, module in model.named_modules()} == before


def test_an_installed_plan_is_checked_and_kept():
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "1,2"})
    result = hf_ckpt.verify(model, tiny_batch("llama"))
    assert set(result.recomputed) == {"model.layers.1", "model.layers.2"}
    assert not installation(model).enabled
    model.gradient_checkpointing_enable()
    assert hf_ckpt.verify(model, tiny_batch("llama"), "full")
    description = hf_ckpt.describe(model)
    assert description.enabled
    assert set(description.plan.active()) == {"model.layers.1", "model.layers.2"}
    assert not sum(description.recomputed.values())  # a verification keeps its own counts


BUDGET = 21 << 19
"""Bytes in which some of the six blocks can do without `full`, in a step of 4 x 64 tokens."""


def train(model, batch, steps):
    for _ in range(steps):
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)


def of_the_run(model):
    """What a verification must leave as it is: the same objects, and equal counts."""
    record = installation(model)
    objects = record, record.session, record.planned, record.watch, record.functions, record.heads
    session = record.session
    return [*map(id, objects), record.plan, session.measured_steps, dict(session.plans), hf_ckpt.describe(model)]


@pytest.mark.usefixtures("steady_times")
def test_the_plan_of_a_budget_is_verified_and_its_run_goes_on():
    model = without_state(model_of())
    batch = without_cache(model, tiny_batch("llama", batch=4, tokens=64))
    budgeted(model, BUDGET, check_every=4, head=50)
    train(model, batch, 2)
    before, early = of_the_run(model), hf_ckpt.verify(model, batch)
    assert early.plan == installation(model).plan
    assert of_the_run(model) == before
    train(model, batch, 10)
    before, result = of_the_run(model), hf_ckpt.verify(model, batch)
    plan = installation(model).plan
    assert result, result
    assert result.plan is plan
    assert {action for _, action in plan.actions} != {FULL}
    assert set(result.recomputed) == set(plan.active())
    assert "allowed 1e-05" in result.gradients
    assert of_the_run(model) == before
    session, measured_steps = installation(model).session, installation(model).session.measured_steps
    train(model, batch, 1)
    assert (installation(model).session, session.measured_steps) == (session, measured_steps)
    assert installation(model).plan is plan


@pytest.mark.parametrize(
    ("method", "fault", "problem"),
    [
        (
            "_checkpoint",
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
    result = hf_ckpt.verify(model, tiny_batch("llama"))
    assert result, result
    monkeypatch.setattr(FullRegion, method, fault)
    result = hf_ckpt.verify(model, tiny_batch("llama"))
    assert not result
    assert result.gradients == "47 of 47 bit-equal"
    assert [text.startswith(problem) for text in result.problems] == [True]
    assert result.problems[0] in str(result)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_fails_and_names_the_first_parameter_that_differs():
    """Redrawn dropout gives the same loss but other gradients; the error names the first parameter that differs."""
    result = hf_ckpt.verify(
        tiny_model("llama", dropout=0.5), tiny_batch("llama"), {"policy": "full", "preserve_rng_state": False}
    )
    assert not result
    assert result.loss == "equal"
    (problem,) = result.problems
    assert problem.startswith("gradient of model.embed_tokens.weight differs by ")
    assert float(problem.split()[-4]) > 0.01


def test_below_the_first_trained_parameter_nothing_has_to_be_recomputed():
    model = tiny_model("llama").requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    result = hf_ckpt.verify(model, tiny_batch("llama"))
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
    assert hf_ckpt.verify(model, tiny_batch("llama"))
    assert not hf_ckpt.verify(model, {**tiny_batch("llama"), "use_cache": True})


def test_refusals():
    model = tiny_model("llama")
    with pytest.raises(HfCkptError, match="eval mode"):
        hf_ckpt.verify(model.eval(), tiny_batch("llama"))
    batch = tiny_batch("llama")
    del batch["labels"]
    with pytest.raises(HfCkptError, match="no loss"):
        hf_ckpt.verify(model.train(), batch)
    assert installation(model) is None
    assert hf_ckpt.verify(model, batch, loss_fn=lambda outputs: outputs.logits.square().mean())
    with pytest.raises(HfCkptError, match=r"`budget` has no plan before a run\. Install it"):
        hf_ckpt.verify(model, tiny_batch("llama"), {"policy": "budget", "budget": BUDGET})
    with pytest.raises(SpecError, match="blocks 0 to 3"):
        hf_ckpt.verify(model, tiny_batch("llama"), {"layers": "9"})
    assert installation(model) is None


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, "1e-05"), (torch.bfloat16, "0.05")])
def test_a_head_in_chunks_may_differ_by_rounding_and_has_to_run(dtype, allowed):
    model, batch = tiny_model("gpt2", dtype=dtype), tiny_batch("gpt2", batch=4, tokens=64)
    result = hf_ckpt.verify(model, batch, {"policy": "full", "head": 50})
    assert result, result
    largest = re.search(r"the others up to (\S+) of their norm \(allowed (\S+)\)", result.gradients)
    assert largest is not None
    assert 0 < float(largest[1]) <= float(allowed)
    assert largest[2] == allowed
    one_chunk = hf_ckpt.verify(model, batch, {"policy": "full", "head": 4096})
    assert "the head did not run in chunks; last call: as a whole" in str(one_chunk)
    redrawn = {"head": 8, "preserve_rng_state": False}
    wrong = hf_ckpt.verify(tiny_model("llama", dropout=0.5), tiny_batch("llama"), redrawn)
    assert ["differs by" in problem for problem in wrong.problems] == [True]


def test_a_loss_that_is_no_number_is_a_difference():
    model = tiny_model("llama")
    result = hf_ckpt.verify(model, tiny_batch("llama"), loss_fn=lambda outputs: outputs.loss * float("nan"))
    assert not result
