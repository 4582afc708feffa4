"""torch.func and forward-mode AD on a model with an enabled plan: the same values, or an error that names a way out."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.utils import _pytree as pytree

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import TransformError
from hf_ckpt.models.tiny import tiny_batch, tiny_model

BATCH = tiny_batch("llama", tokens=8)
FULL, SELECTIVE, HEAD = {"policy": "full"}, {"policy": "selective"}, {"policy": "none", "head": 4}


def parameters(model):
    return {name: value.detach() for name, value in model.named_parameters()}


def loss_of(model, found, **inputs):
    return functional_call(model, found, kwargs=inputs or BATCH).loss


def one_loss(model, found, ids, labels):
    return loss_of(model, found, input_ids=ids[None], labels=labels[None])


def gradients(model):
    return grad(lambda found: loss_of(model, found))(parameters(model))


def of_each_sequence(model):
    return vmap(lambda *one: one_loss(model, parameters(model), *one))(BATCH["input_ids"], BATCH["labels"])


def gradients_of_each_sequence(model):
    over = vmap(grad(lambda *one: one_loss(model, *one)), in_dims=(None, 0, 0))
    return over(parameters(model), BATCH["input_ids"], BATCH["labels"])


def tangent(model):
    found = parameters(model)
    along = {name: torch.ones_like(value) for name, value in found.items()}
    return jvp(lambda given: loss_of(model, given), (found,), (along,))


def forward_mode(model):
    embedded = model.get_input_embeddings()(BATCH["input_ids"]).detach()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(embedded, torch.ones_like(embedded))
        return forward_ad.unpack_dual(model(inputs_embeds=dual, labels=BATCH["labels"]).loss).tangent.detach()


def same(one, other):
    return all(map(torch.equal, pytree.tree_leaves(one), pytree.tree_leaves(other)))


def planned(spec):
    """A small model, and the same one with an enabled plan."""
    plain, model = (tiny_model("llama", layers=2, attention="eager") for _ in range(2))
    hf_ckpt.install(model, spec)
    model.gradient_checkpointing_enable()
    return plain, model


@pytest.mark.compat
@pytest.mark.parametrize(
    ("transform", "spec", "named"),
    [
        (gradients, FULL, "grad"),
        (gradients_of_each_sequence, SELECTIVE, "grad and vmap"),
        (of_each_sequence, SELECTIVE, "vmap"),
        (tangent, SELECTIVE, "jvp"),
        (forward_mode, SELECTIVE, "jvp"),
    ],
)
def test_what_cannot_be_done_names_the_way_out(transform, spec, named):
    plain, model = planned(spec)
    with pytest.raises(TransformError, match=f"under {named} of torch.func .* `with hf_ckpt.paused") as caught:
        transform(model)
    assert caught.value.block == "model.layers.0"
    with hf_ckpt.paused(model):
        assert same(transform(model), transform(plain))
    assert not forward_ad._current_level >= 0
    with torch.no_grad():
        assert same(of_each_sequence(model), of_each_sequence(plain))  # nothing is recomputed there


@pytest.mark.parametrize("transform", [of_each_sequence, tangent, forward_mode])
@pytest.mark.parametrize("spec", [FULL, HEAD], ids=str)
def test_what_works_gives_the_same(transform, spec, caplog):
    plain, model = planned(spec)
    assert same(transform(model), transform(plain))
    assert [region.forwards for region in installation(model).regions.values()] == [1] * (0 if spec is HEAD else 2)
    told = "the head of LlamaForCausalLM is not run in chunks, because a transform of torch.func"
    assert (told in caplog.text) == (spec is HEAD)
