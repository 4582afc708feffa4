"""A block that is changed between its forward and its backward gives the gradients and buffers of no checkpointing."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.changed import (
    ENGINES,
    LAYERS,
    PowerNorm,
    check_counts,
    each_engine,
    loss_of,
    outcome,
    plain_model,
    two_adapters,
    with_modules,
)
from helpers.lanes import Delayed
from helpers.steps import assert_same, enable, without_cache
from torch import nn

import hf_ckpt
from hf_ckpt.engines import offload
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.models.tiny import FAMILIES, tiny_batch

# --- changes between forward and backward ---------------------------------------------------------------------------


def functional_call(model, family="llama"):
    """The step of a meta-learner: parameters that were computed, and backward outside of the call."""
    fast = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
    batch = without_cache(model, tiny_batch(family))
    return outcome(model, torch.func.functional_call(model, fast, (), batch).loss)


def switched_adapters(model, family="llama"):
    """Actor and critic on one base: both forwards before the one backward."""
    model.set_adapter("default")
    actor = loss_of(model, family)
    model.set_adapter("critic")
    critic = loss_of(model, family)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(True)
    return outcome(model, actor, critic)


def evaluated(model, family="llama"):
    loss = loss_of(model, family)
    model.eval()
    found = outcome(model, loss)
    assert not any(module.training for module in model.modules())
    return found


def disabled_adapters(model, family="llama"):
    """The reference of a preference loss, with gradients."""
    with model.disable_adapter():
        reference = loss_of(model, family)
    return outcome(model, reference, loss_of(model, family))


def two_forwards(model, family="llama"):
    """Two steps, and two forwards before one backward: statistics move four times."""
    loss_of(model, family, seed=1).backward()
    loss_of(model, family, seed=2).backward()
    return outcome(model, loss_of(model, family, seed=3), loss_of(model, family, seed=4))


def other_dropout(model, family="llama"):
    loss = loss_of(model, family)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    return outcome(model, loss)


def removed_hooks(model, family="llama"):
    handles = [block.mlp.up_proj.register_forward_hook(lambda *found: found[2] * 2) for block in model.model.layers]
    loss = loss_of(model, family)
    for handle in handles:
        handle.remove()
    found = outcome(model, loss)
    assert not any(module._forward_hooks for block in model.model.layers for module in block.mlp.modules())
    return found


def added_hooks(model, family="llama"):
    loss = loss_of(model, family)
    for block in model.model.layers:
        block.mlp.up_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    found = outcome(model, loss)
    assert all(block.mlp.up_proj._forward_pre_hooks for block in model.model.layers)
    return found


def other_attention(model, family="llama"):
    loss = loss_of(model, family)
    model.set_attn_implementation("eager")
    found = outcome(model, loss)
    assert model.config._attn_implementation == "eager"
    return found


def replaced_module(model, family="llama"):
    loss = loss_of(model, family)
    for block in model.model.layers:
        block.mlp.act_fn = nn.Tanh()
    return outcome(model, loss)


def other_scaling(model, family="llama"):
    loss = loss_of(model, family)
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(3.0)
    return outcome(model, loss)


def frozen(model, family="llama"):
    loss = loss_of(model, family)
    for block in model.model.layers:
        block.requires_grad_(False)
    return outcome(model, loss)


ISSUE = {
    "functional_call": (plain_model, functional_call),
    "two adapters": (two_adapters, switched_adapters),
    "eval": (functools.partial(plain_model, attention_dropout=0.2), evaluated),
    "batch norm": (functools.partial(with_modules, functools.partial(nn.BatchNorm1d, 16)), two_forwards),
    "disable_adapter": (two_adapters, disabled_adapters),
}
"""What the changes are called -> how the model is made, and the step in which it is changed."""
MORE = {
    "a buffer that counts": (functools.partial(with_modules, PowerNorm), two_forwards),
    "dropout": (functools.partial(plain_model, "gpt2", dropout=0.1), functools.partial(other_dropout, family="gpt2")),
    "hooks removed": (plain_model, removed_hooks),
    "hooks added": (plain_model, added_hooks),
    "attention": (functools.partial(plain_model, attention="sdpa", attention_dropout=0.2), other_attention),
    "a module replaced": (plain_model, replaced_module),
    "scaling": (two_adapters, other_scaling),
    "frozen": (plain_model, frozen),
}
CHANGES = ISSUE | MORE
FORWARDS = {"two adapters": 2, "disable_adapter": 2, "batch norm": 4, "a buffer that counts": 4}


@functools.cache
def expected(change):
    return step_of(change, None)[0]


def step_of(change, spec):
    """What a step with a change in the middle leaves on the model, and the model."""
    make, run = CHANGES[change]
    model = make()
    if spec is not None:
        hf_ckpt.install(model, spec)
        enable(model)
    torch.manual_seed(3)
    return run(model), model


@pytest.mark.parametrize("change", [*(pytest.param(name, marks=pytest.mark.compat) for name in ISSUE), *MORE])
@each_engine
def test_a_block_runs_again_as_it_ran_forward(change, engine, monkeypatch):
    monkeypatch.setattr(offload, "lane_of", Delayed)
    want = expected(change)
    got, model = step_of(change, ENGINES[engine])
    assert_same(want, got, f"{change}, {engine}")
    check_counts(model, FORWARDS.get(change, 1))
    if engine == "offload":
        assert len(hf_ckpt.describe(model).moved) == LAYERS - 1


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_would_show(change, monkeypatch):
    """Without the state of the forward there is an error, or something differs."""
    monkeypatch.setattr(FullRegion, "state_for", lambda region, fn: None)
    try:
        got, _ = step_of(change, ENGINES["full"])
    except (RuntimeError, AssertionError):
        return
    with pytest.raises(AssertionError, match="differs"):
        assert_same(expected(change), got)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("run", [functional_call, evaluated], ids=lambda run: run.__name__)
@pytest.mark.parametrize("engine", ["full", "selective"])
def test_families(family, run, engine):
    options = {} if run is functional_call else {"dropout": 0.1}
    plain, ours = plain_model(family, **options), plain_model(family, **options)
    hf_ckpt.install(ours, ENGINES[engine])
    enable(ours)
    found = []
    for model in (plain, ours):
        torch.manual_seed(3)
        found.append(run(model, family))
    assert_same(*found)
    check_counts(ours, 1)
