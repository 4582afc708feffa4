"""torch.func and forward-mode AD on a model with an enabled plan: the same values, or an error that names a way out."""

import pytest
import torch
from helpers.custom import custom_model, steps_of
from helpers.steps import planned
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

import hf_ckpt
from hf_ckpt.errors import TransformError
from hf_ckpt.models.tiny import tiny_batch, tiny_model

IDS = tiny_batch("llama", tokens=8)["input_ids"]


def parameters(model):
    return {name: value.detach() for name, value in model.named_parameters()}


def loss_of(model, values, ids):
    return functional_call(model, values, kwargs={"input_ids": ids, "labels": ids}).loss


def gradients(model):
    return grad(lambda values: loss_of(model, values, IDS))(parameters(model))


def of_each_sequence(model):
    return vmap(lambda ids: loss_of(model, parameters(model), ids[None]))(IDS)


def gradients_of_each_sequence(model):
    return vmap(grad(lambda values, ids: loss_of(model, values, ids[None])), in_dims=(None, 0))(parameters(model), IDS)


def forward_mode(model):
    embedded = model.get_input_embeddings()(IDS).detach()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(embedded, torch.ones_like(embedded))
        return forward_ad.unpack_dual(model(inputs_embeds=dual, labels=IDS).loss).tangent.detach()


def models(spec):
    """A small model, and the same one with an enabled plan."""
    plain, model = (tiny_model("llama", layers=2, attention="eager") for _ in range(2))
    return plain, planned(model, spec)


def is_same(transform, model, plain):
    return all(map(torch.equal, *(pytree.tree_leaves(transform(each)) for each in (model, plain))))


NAMES = {gradients: "grad", gradients_of_each_sequence: "grad and vmap", of_each_sequence: "vmap", forward_mode: "jvp"}


@pytest.mark.compat
@pytest.mark.parametrize("transform", NAMES)
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_unsupported_transforms_of_torch_func_are_refused(transform, policy):
    plain, model = models({"policy": policy})
    with pytest.raises(
        TransformError, match=f"under {NAMES[transform]} of torch.func .* `with hf_ckpt.paused"
    ) as caught:
        transform(model)
    assert caught.value.block == "model.layers.0"
    with hf_ckpt.paused(model):
        assert is_same(transform, model, plain)
    assert not forward_ad._current_level >= 0
    with torch.no_grad():
        assert is_same(of_each_sequence, model, plain)  # nothing is recomputed there


@pytest.mark.parametrize("transform", [of_each_sequence, forward_mode])
def test_a_head_in_chunks_runs_as_a_whole_under_a_transform(transform, caplog):
    plain, model = models({"policy": "none", "head": 4})
    assert is_same(transform, model, plain)
    assert "the head of LlamaForCausalLM is not run in chunks, because a transform of torch.func" in caplog.text


@pytest.mark.parametrize("policy", ["selective", "full", "full+selective", "offload"])
def test_a_block_that_calls_a_transform_is_refused(policy):
    """torch allows no hooks on saved tensors around `torch.func.grad`."""

    def work(block, hidden, shift):
        return hidden + block.one(torch.func.grad(lambda x: x.pow(3).sum())(hidden))

    spec = {"policy": policy, "rules": [{"layers": "0-1", "policy": "none"}]}
    model = planned(custom_model(work), spec)
    with pytest.raises(TransformError, match=r"block 'layers\.2': it calls `torch\.func\.grad`"):
        steps_of(model)
    planned(model, {**spec, "rules": [{"layers": "0-2", "policy": "none"}]})
    assert steps_of(model)
