"""Steps beside those of the matrix: other parts that may be trained, and both names of the call."""

from __future__ import annotations

import pytest
import torch
from helpers.adapters import lora_config
from helpers.steps import assert_same, enable, recomputed, step
from peft import get_peft_model

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.models.tiny import tiny_batch, tiny_model

LAYERS = 4


def test_modules_to_save_train_beside_the_adapters():
    """PEFT keeps a trainable copy of the classifier behind a wrapper."""

    def make():
        model = tiny_model("bert", dropout=0.1)
        torch.manual_seed(1)
        return get_peft_model(model, lora_config("bert", ["query"], modules_to_save=["classifier"]))

    expected = step(make(), tiny_batch("bert"))
    assert any("classifier" in name and grad.any() for name, grad in expected.items() if grad is not None)
    model = make()
    hf_ckpt.install(model)
    enable(model)
    assert_same(expected, step(model, tiny_batch("bert")))
    assert len(recomputed(model)) == LAYERS


def test_gradients_of_input_embeddings():
    """Soft prompts and attributions ask for the gradient of `inputs_embeds`, with every weight frozen."""
    model = tiny_model("gpt2").requires_grad_(False)
    ids = tiny_batch("gpt2")["input_ids"]

    def gradient():
        embeds = model.transformer.wte(ids).requires_grad_(True)
        model(inputs_embeds=embeds, labels=ids, use_cache=False).loss.backward()
        return embeds.grad

    expected = gradient()
    hf_ckpt.install(model)
    enable(model)
    assert expected.any()
    assert torch.equal(expected, gradient())
    assert len(recomputed(model)) == LAYERS


@pytest.mark.parametrize("name", compat.ENABLE_NAMES)
def test_recompute_counts_do_not_depend_on_the_name_of_the_call(name):
    model = tiny_model("gpt2")
    hf_ckpt.install(model)
    getattr(model, name)({"every_n_layers": 2})
    step(model, tiny_batch("gpt2"))
    assert recomputed(model) == ["transformer.h.0", "transformer.h.2"]
