"""Plans for compiled blocks: bytes of every share without compiling, and budgets that hold."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from helpers.adapters import with_lora
from helpers.sparing import sparing
from helpers.steps import assert_near, enable
from machine import CpuAllocations

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.attach import trial
from hf_ckpt.attach.record import installation
from hf_ckpt.cli.main import main
from hf_ckpt.costs.timeline import timeline
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.forecast.devices import device_named
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.prediction.optimizers import state_bytes
from hf_ckpt.prediction.skeleton import skeleton_of
from hf_ckpt.prediction.trace import Step, actions_for, trace_costs
from hf_ckpt.spec.plan import Plan

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.skipif(not compat.HOOKS_STAY_OUTSIDE, reason="no plans for compiled blocks"),
]
SIZES = {"hidden": 128, "attention": "sdpa"}
BATCH = {"batch": 4, "tokens": 64}


@pytest.fixture
def no_compiler(monkeypatch):
    """Fail if anything is compiled."""

    def compile_graph(graph, inputs):
        raise AssertionError("nothing has to be compiled to plan")

    monkeypatch.setattr(compat, "compile_graph", compile_graph)


def model_of(family, kind="", **options):
    draws = {"attention_dropout": 0.1} if family == "llama" else {"dropout": 0.1}
    model = tiny_model(family, layers=3, **{**SIZES, **options}, **(draws if "dropout" in kind else {}))
    model = model.to(torch.bfloat16) if "bf16" in kind else model
    return with_lora(model, family, lora_dropout=0.0) if "lora" in kind else model


def costs_of(model, batch, **step):
    skeleton = skeleton_of(model)
    given, device = Step(batch, **step), device_named("cpu")
    return trace_costs(skeleton, given, device, actions=actions_for(compiled=True))


def real_peak(model, batch, actions):
    """Allocator peak of a forward and backward in bytes, after compilation."""
    found = find_blocks(model)
    with trial(model, Plan(found.family, found.model, tuple(zip(found.blocks, actions, strict=True)))):
        for _ in range(2):
            model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
        with CpuAllocations() as seen:
            model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)
    return seen.peak_bytes


CASES = [(family, kind) for family in FAMILIES for kind in ("", "lora", "bf16", "dropout", "lora, bf16")]
TOO_LOW = {("llama", "dropout"): 0.07}
"""Share of the peak that is missed: LLaMA has dropout only on attention weights, which are wide for short sequences."""


@pytest.mark.slow
@sparing(("family", "kind"), CASES, ("llama", ""))
def test_peaks_are_those_that_are_reached(family, kind):
    """Peaks are predicted for uniform shares and a mixture; as in a budget, they include weights."""
    model, batch = model_of(family, kind), tiny_batch(family, **BATCH)
    costs = costs_of(model, batch, optimizer="sgd")
    ways = [costs.uniform(number) for number in range(len(costs.actions))]
    ways.append(tuple(tuple(place % len(costs.actions) for place, _ in enumerate(each)) for each in ways[0]))
    for choice in ways:
        actions = [costs.actions[number] for stack in choice for number in stack]
        predicted = timeline(costs, choice).peak_bytes
        real = costs.static.always + real_peak(model, batch, actions)
        # A first block may not save its input, although it would under other shares; costs do not distinguish that.
        above = len(costs.stacks) * BATCH["batch"] * BATCH["tokens"] * SIZES["hidden"] * 4
        assert (1 - TOO_LOW.get((family, kind), 0.02)) * real <= predicted <= 1.02 * real + above, choice


@pytest.mark.slow
@sparing("family", FAMILIES, "gpt2")
def test_kept_bytes_are_exact(family):
    """Kept bytes of one more block per stack are exact."""
    batch = tiny_batch(family, **BATCH)
    costs = costs_of(model_of(family), batch)
    for number, action in enumerate(costs.actions):
        left = []
        for layers in (3, 4):
            model = tiny_model(family, layers=layers, **SIZES)
            found = find_blocks(model)
            plan = Plan(found.family, found.model, tuple((block, action) for block in found.blocks))
            with trial(model, plan):
                model(**batch).loss.backward()
                model.zero_grad(set_to_none=True)
                with CpuAllocations() as seen:
                    loss = model(**batch).loss
                left.append(seen.left_bytes)
                del loss
        more = {each.name: each.inner[each.kinds[-1], number].forward.net for each in costs.stacks}
        assert left[1] - left[0] == sum(more.values()), action


@pytest.mark.slow
def test_less_memory_is_more_blocks_with_lower_shares(no_compiler):
    model = model_of("llama")
    most = hf_ckpt.predict(model, 4, tokens=64, compiled=True)
    assert most.plan.graphs() == [("decoder", "LlamaDecoderLayer", 1.0)]
    assert next(option.name for option in most.usual) == "none"  # eager, for comparison
    least = most.costs.uniform(len(most.costs.actions) - 1)
    low = timeline(most.costs, least).peak_bytes
    half = hf_ckpt.predict(model, 4, tokens=64, compiled=True, budget=(low + most.peak_bytes) // 2)
    shares = [action.share for _, action in half.plan.actions]
    assert sum(shares) < sum(action.share for _, action in most.plan.actions)
    assert low <= half.peak_bytes <= (low + most.peak_bytes) // 2
    assert half.step_seconds > most.step_seconds
    with pytest.raises(InfeasibleError, match="lowest peak"):
        hf_ckpt.predict(model, 4, tokens=64, compiled=True, budget=low - 1)


def budgeted(model, budget):
    hf_ckpt.install(model, {"compile": "blocks", "budget": budget})
    enable(model)
    return model


@pytest.mark.long
@sparing("family", FAMILIES, "llama")
def test_a_budget_is_kept_with_the_same_gradients(family):
    batch = tiny_batch(family, **BATCH)
    costs = costs_of(model_of(family), batch)
    high, low = (timeline(costs, costs.uniform(number)).peak_bytes for number in (0, len(costs.actions) - 1))
    reference = model_of(family)
    hf_ckpt.install(reference, {"compile": "blocks", "policy": "none"})
    enable(reference)
    reference(**batch).loss.backward()
    for part in (0.25, 0.75):
        budget = round(low + part * (high - low))
        model = budgeted(model_of(family), budget)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        planned = installation(model).planned
        with CpuAllocations() as seen:
            model(**batch).loss.backward()
        assert sum(action.share for _, action in planned.plan.actions) < len(planned.plan.actions)
        assert len(hf_ckpt.describe(model).in_graphs) == len(find_blocks(model).blocks)
        held = sum(value.nbytes for value in (*model.parameters(), *model.buffers())) + state_bytes(optimizer, {"cpu"})
        assert held + seen.peak_bytes <= 1.01 * budget
        assert_near(
            {name: found.grad for name, found in reference.named_parameters()},
            {name: found.grad for name, found in model.named_parameters()},
        )


@pytest.mark.slow
def test_versions_that_cannot_be_traced_are_named(monkeypatch):
    monkeypatch.setattr(compat, "HOOKS_STAY_OUTSIDE", False)
    with pytest.raises(HfCkptError, match="use transformers 5"):
        hf_ckpt.predict(model_of("llama"), 1, tokens=8, compiled=True)


@pytest.mark.slow
def test_the_command_says_what_is_compiled(no_compiler, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    found = main(["plan", "gpt2", "--batch", "2", "--seq", "128", "--compile", "--budget", "3GiB", "--out", str(plan)])
    assert found == 0
    assert "compiles 1 graphs with their backward: GPT2Block of decoder at share 1" in capsys.readouterr().out
    assert {action.kind for _, action in Plan.load(plan).actions} == {"compiled"}
