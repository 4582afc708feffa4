"""Plans for models that are unlike a stack of text blocks: made for the batch that comes, on the blocks as they are."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from helpers.sparing import sparing
from helpers.sweeping import EQUAL, NOTHING, step_of, trained, tried

from hf_ckpt import compat
from hf_ckpt.compat.private import private

ODD = {
    "mamba": "its config computes `layer_types`",
    "jamba": "its config computes `layer_types`, which differ",
    "recurrent_gemma": "its config has them under another name, and computes them",
    "gemma3": "they are in the config of a part",
    "llava": "no text reaches the blocks for images",
    "mixtral": "its experts are multiplied by groups, in float32",
    "vit": "its batch is no text, and PEFT calls it past its hooks",
    "git": "images beside text, and labels for the text alone",
    "mllama": "looks up by number which block attends to what",
    "bridgetower": "two stacks in turns",
    "granitemoe_swa": "only its config says that there is a cache",
    "prophetnet": "its config computes `num_hidden_layers`, which cannot be set",
    "uvdoc_backbone": "what blocks keep is free before the peak",
}


@pytest.mark.long
@sparing("model_type", ODD, "vit")
def test_it_is_planned_for(model_type):
    """A budget half way between the peaks of `full` and of no checkpointing holds, with the same gradients."""
    model, batch, _ = trained(model_type)
    verdict, words = tried(model, batch, step_of(model, batch), "budget")
    assert verdict == EQUAL, words


@pytest.mark.slow
def test_planning_draws_no_random_numbers():
    """wav2vec2 masks its inputs by numpy's."""
    model, batch, _ = trained("wav2vec2")
    verdict, words = tried(model, batch, step_of(model, batch), "budget")
    assert verdict in (EQUAL, NOTHING), words


def test_random_state_is_put_back():
    before = random.getstate(), numpy.random.get_state()[1].copy(), torch.get_rng_state()
    with compat.RandomState(compat.all_devices()).kept():
        _ = random.random(), numpy.random.rand(3), torch.rand(3)
    assert random.getstate() == before[0]
    assert (numpy.random.get_state()[1] == before[1]).all()
    assert torch.equal(torch.get_rng_state(), before[2])


# --- experts on tensors without values ------------------------------------------------------------------------------


def products(dtype, size=24):
    """The shapes of products by groups of every kind."""
    made = {}
    offsets = torch.tensor([10, 16], dtype=torch.int32)
    for name, one, other, given in (
        ("rows", (16, 8), (2, 8, size), offsets),
        ("both", (8, 16), (16, size), offsets),
        ("columns", (2, 8, 16), (16, 16), offsets),
        ("batches", (2, 8, 16), (2, 16, size), None),
    ):
        one, other = torch.ones(one, dtype=dtype), torch.ones(other, dtype=dtype)
        made[name] = tuple(torch.ops.aten._grouped_mm(one, other, given).shape)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_groups_have_the_shapes_of_real_ones(dtype):
    known = private("torch._subclasses.fake_impls.op_implementations_dict")
    expected, before = products(torch.bfloat16), dict(known)
    with compat.FakeTensorMode(), compat.any_type_in_grouped_products():
        assert products(dtype) == expected
    assert known == before
