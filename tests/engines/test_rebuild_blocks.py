"""Contents of blocks: modules, custom functions, adapters, frozen and compiled parts; and kinds of backward."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers.adapters import with_lora
from helpers.others import OTHERS, other_model
from helpers.steps import assert_same, enable, gradients, outcome, step, without_cache
from helpers.toys import (
    SAVES,
    SCALE,
    SELECTIVE,
    Norm,
    each_family,
    each_save,
    plain_and_ours,
    rebuilt,
    same_steps,
    same_toys,
)
from torch import nn
from torch.nn import functional

import hf_ckpt
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model

REBUILT = {"gpt2": 53, "bert": 97}
"""Operations and modules that one step runs again; fewer if layers with a frozen bias are kept."""


@pytest.mark.parametrize("family", REBUILT)
def test_linear_layers_with_a_frozen_bias_run_again(family):
    """Linear layers with a frozen bias are rebuilt under adapters, although autograd does not hold the bias.

    FSDP2 runs a block on gathered parameters, which differ from those between steps, so the test replaces them.
    """
    plain, model = (with_lora(tiny_model(family, attention="sdpa"), family, lora_dropout=0.0) for _ in range(2))
    hf_ckpt.install(model, {**SELECTIVE, "save": ["attention"]})
    enable(model)
    expected, before = step(plain, tiny_batch(family)), 0
    for _ in range(2):
        assert_same(expected, step(model, tiny_batch(family)))
        runs = rebuilt(model)
        assert runs - before == REBUILT[family]
        before = runs
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.requires_grad:
                    setattr(module, name, nn.Parameter(parameter.clone(), requires_grad=False))


class FusedNorm(torch.autograd.Function):
    """Like Liger's norms, saves its own statistics."""

    @staticmethod
    def forward(ctx, x, weight):
        rstd = x.pow(2).mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, rstd, weight)
        return x * rstd * weight

    @staticmethod
    def backward(ctx, gradient):
        x, rstd, weight = ctx.saved_tensors
        scaled = gradient * weight
        by_x = rstd * (scaled - x * rstd.pow(2) * (scaled * x).mean(-1, keepdim=True))
        return by_x, (gradient * x * rstd).sum((0, 1))


class Quantised4(nn.Parameter):
    """A parameter subclass, as in bitsandbytes."""


NORM = Norm()


def under_no_grad(x):  # as in a router or target
    with torch.no_grad():
        seen = NORM(x)
    return x * seen * SCALE


def norm_three_times(x):
    x = x + NORM(functional.silu(x))
    return functional.silu(NORM(x)) * NORM(x)


def norm_that_fails(x):  # a failed attempt, then another
    with contextlib.suppress(RuntimeError):
        NORM(x[..., :3])
    return functional.silu(NORM(x)) * NORM(x)


def custom(x):
    y = FusedNorm.apply(functional.silu(x) * x, NORM.weight)
    return functional.silu(y) * y


# What a block does -> (tensors that autograd saves, those of them that are dropped).
BLOCKS = {
    under_no_grad: (3, 1),
    norm_three_times: (22, 21),
    norm_that_fails: (21, 21),
    custom: (9, 3),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_what_blocks_are_made_of(block):
    """Modules that run several times or without gradients are rebuilt; tensors that custom functions save are kept."""
    region = same_toys(block, parameters=(SCALE, NORM.weight))
    assert (region.saved_tensors, region.dropped_tensors) == BLOCKS[block]


@pytest.mark.parametrize("kind", [nn.Parameter, Quantised4, None], ids=["parameter", "subclass", "leaf"])
def test_views_of_leaves(kind):
    leaf = torch.linspace(-1, 1, 256).view(16, 16).clone()
    leaf = leaf.requires_grad_() if kind is None else kind(leaf)
    with torch.no_grad():
        leaf.mul_(2.0)  # as most parameters are initialised

    def block(x):
        return functional.silu((x @ leaf.t()) * leaf[3]) @ leaf.view(4, 4, 16).transpose(0, 1).reshape(16, 16)

    for save in SAVES:
        same_toys(block, save=save, parameters=(leaf,))


def test_an_inference_tensor_goes_through():
    with torch.inference_mode():
        features = torch.randn(2, 4)
    assert torch.equal(RebuildRegion("toy", save=())(lambda x: x * 2, features), features * 2)


# --- adapters and frozen parts ----------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@each_family
def test_adapters_merged_and_unmerged(family, dtype):
    """Gradients are right before merging, while merged with trained norms, and after unmerging."""

    def run(model):
        model = with_lora(model, family)
        found = step(model, tiny_batch(family))
        model.merge_adapter()
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or "ln_" in name:
                parameter.requires_grad_(True)
        found |= {f"{name}, merged": value for name, value in step(model, tiny_batch(family)).items()}
        model.unmerge_adapter()
        return found | {f"{name}, after": value for name, value in step(model, tiny_batch(family)).items()}

    for save in SAVES:
        same_steps(run, family, save, dtype=dtype, dropout=0.1)


FREEZING = {
    "only norms": lambda place, name: "norm" in name.lower() or "ln_" in name,
    "no norms": lambda place, name: not ("norm" in name.lower() or "ln_" in name),
    "every other": lambda place, name: place % 2 == 1,
    "every third": lambda place, name: place % 3 == 0,
}


@pytest.mark.parametrize("which", FREEZING)
@each_family
def test_parts_that_are_frozen(family, which):
    """Operands without gradients are read from nodes; if a node does not hold them, the result is kept."""

    def run(model):
        for place, (name, parameter) in enumerate(model.named_parameters()):
            parameter.requires_grad_(FREEZING[which](place, name))
        return step(model, tiny_batch(family))

    for save in SAVES:
        same_steps(run, family, save)


# --- other models -----------------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name):
    if name.startswith("ViT"):
        batch = {"pixel_values": torch.linspace(-1, 1, 1536).view(2, 3, 16, 16).sin(), "labels": torch.tensor([0, 1])}
    else:
        ids = tiny_batch("llama")["input_ids"]
        batch = {"input_ids": ids, "labels": ids}
    expected = step(other_model(name), batch)
    for save in SAVES:
        model = other_model(name)
        hf_ckpt.install(model, {**SELECTIVE, "save": save})
        enable(model)
        assert_same(expected, step(model, batch), f"{name} {save}")
        found = hf_ckpt.describe(model)
        assert all(found.recomputed.values()), save
        assert found.dropped_tensors > 0


# --- kinds of backward ------------------------------------------------------------------------------------------------


@each_save
@each_family
def test_a_graph_that_is_kept_gives_the_same_twice_and_grows_no_more(family, save):
    def run(model):
        model.zero_grad()
        with LiveBytes(model) as live:
            loss = model(**without_cache(model, tiny_batch(family))).loss
            before = live.current_bytes
            for _ in range(2):
                loss.backward(retain_graph=True)
            grown = torch.tensor(live.current_bytes - before)  # by gradients only
        return {"grown": grown, **outcome(model, loss)}

    same_steps(run, family, save)


@each_save
def test_parts_of_a_graph_one_after_another(save):
    """Gradients can be requested one parameter at a time, in either order."""

    def run(model):
        loss = model(**without_cache(model, tiny_batch("llama"))).loss
        named = dict(model.named_parameters())
        found = {"loss": loss.detach()}
        for turn, names in enumerate((list(named), list(named)[::-1])):
            for name in names:
                found[f"{name} {turn}"] = torch.autograd.grad(loss, named[name], retain_graph=True)[0]
        return found

    same_steps(run, save=save, layers=1)


@pytest.mark.compat
@each_save
@pytest.mark.parametrize("leaf", [False, True], ids=["computed", "leaf"])
def test_nothing_from_before_the_block_runs_again(save, leaf):
    """Embeddings that the user computed, or passes as leaves (soft prompts), are kept."""
    found, activations = [], []
    for model in plain_and_ours(save=save):
        torch.manual_seed(0)
        inputs = torch.randn(2, 8, 32).requires_grad_()
        # The model does not use mish, which has a row.
        embeds = inputs if leaf else functional.mish(functional.mish(inputs))
        loss = model(inputs_embeds=embeds, labels=torch.ones(2, 8, dtype=torch.long), use_cache=False).loss
        with torch.autograd.profiler.profile() as seen:
            loss.backward()
        activations.append(sum(event.name == "aten::mish" for event in seen.function_events))
        found.append({"loss": loss.detach(), "inputs": inputs.grad, **gradients(model)})
    assert_same(*found)
    assert activations == [0, 0]
    assert rebuilt(model) > 0


# --- compiled parts ---------------------------------------------------------------------------------------------------


PARTS = [("llama", "mlp"), ("llama", "input_layernorm"), ("bert", "output")]
"""Parts of every block: one without a small module that hf_ckpt rebuilds, one by itself, one with such modules."""


@pytest.mark.parametrize(("family", "part"), PARTS)
def test_a_compiled_part_of_a_block_is_kept(family, part, dynamo):
    """What the compiler saves in a compiled part is kept; the rest of the block is rebuilt."""

    def run(model):
        torch._dynamo.reset()
        for block in find_blocks(model).modules.values():
            block.get_submodule(part).compile(backend="aot_eager")
        return step(model, tiny_batch(family))

    for save in SAVES[:2]:
        same_steps(run, family, save)
    assert sum(dynamo["graph_break"].values()) == 0
