"""Plans for models that are unlike a stack of text blocks: made for the batch that comes, on the blocks as they are."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from helpers.shrinking import batches, small_config, small_model
from helpers.sparing import sparing
from helpers.steps import enable
from helpers.sweeping import EQUAL, NOTHING, REFUSED, step_of, trained, tried

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.compat.private import private
from hf_ckpt.prediction.batches import has_room_for, inputs_of, with_room_for

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
    """The plan of the lowest peak recomputes, and gives the same gradients."""
    model, batch, _ = trained(model_type)
    verdict, words = tried(model, batch, step_of(model, batch), "budget")
    assert verdict == EQUAL, words


@pytest.mark.slow
def test_a_block_outside_of_lists_is_a_typed_error():
    model, batch, _ = trained("vjepa2")
    verdict, words = tried(model, batch, step_of(model, batch), "budget")
    assert verdict == REFUSED
    assert "'pooler.cross_attention_layer' stands in no list of blocks" in words


@pytest.mark.slow
def test_a_larger_batch_of_images_is_planned_for_again():
    model = small_model("ViTForImageClassification", small_config("vit", 8))
    batch = next(batches(model))
    hf_ckpt.install(model, {"policy": "budget", "budget": "1GiB"})
    enable(model)
    shapes = []
    for times in (1, 2, 1):
        larger = {name: torch.cat([value] * times) for name, value in batch.items()}
        step_of(model, larger, plain=False)
        shapes.append(installation(model).planned.shape.inputs)
    assert [{name: shape[0] for name, shape, _ in found}["pixel_values"] for found in shapes] == [2, 4, 2]
    assert "pixel_values of 4 x 3 x 64 x 64" in " ".join(hf_ckpt.describe(model).plans)


@pytest.mark.slow
def test_planning_draws_no_random_numbers():
    """wav2vec2 masks its inputs by numpy's."""
    model, batch, _ = trained("wav2vec2")
    verdict, words = tried(model, batch, step_of(model, batch), "budget")
    assert verdict in (EQUAL, NOTHING), words


def test_random_state_is_put_back():
    before = random.getstate(), numpy.random.get_state()[1].copy(), torch.get_rng_state()
    with compat.forked_random_state():
        _ = random.random(), numpy.random.rand(3), torch.rand(3)
    assert random.getstate() == before[0]
    assert (numpy.random.get_state()[1] == before[1]).all()
    assert torch.equal(torch.get_rng_state(), before[2])


# --- what a batch holds ---------------------------------------------------------------------------------------------


def test_what_text_alone_does_not_tell():
    model = small_model("ViTForImageClassification", small_config("vit", 8))
    ids, images = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 3, 64, 64)
    assert inputs_of(model, (), {"input_ids": ids, "attention_mask": ids, "labels": ids}) == ()
    assert inputs_of(model, (), {"input_ids": ids, "use_cache": False, "num_items_in_batch": torch.tensor(3)}) == ()
    found = (("pixel_values", (2, 3, 64, 64), torch.float32),)
    assert inputs_of(model, (images,), {}) == inputs_of(model, (), {"pixel_values": images}) == found
    assert len(inputs_of(model, (), {"input_ids": ids, "pixel_values": images})) == 2
    assert len(inputs_of(model, (), {"input_ids": ids, "decoder_input_ids": ids})) == 2


def test_room_for_another_batch():
    small, large = ((("a", (2, size), torch.float32),) for size in (3, 5))
    other = (("b", (2, 3), torch.float32),)
    assert has_room_for(large, small)
    assert has_room_for(large, ())
    assert not has_room_for(small, large)
    assert not has_room_for(small, other)
    assert with_room_for((("a", (4, 3), torch.float32),), large) == (("a", (4, 5), torch.float32),)
    assert with_room_for(small, other) == other
    assert with_room_for(small, ()) == small


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
