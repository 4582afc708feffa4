"""Models with a plan copy, pickle and save like models without one, and copies have their own plans."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from helpers.adapters import with_lora
from helpers.installed import ALL
from helpers.steps import assert_same, enable, recomputed, step

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def disable(model):
    getattr(model, compat.transformers.DISABLE_NAMES[-1])()


@pytest.mark.compat
@pytest.mark.parametrize("through", [copy.deepcopy, through_pickle, through_torch])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "peft"])
def test_an_enabled_model_copies_and_pickles(through, wrapped):
    """An enabled model can be copied and pickled, and its copy drives its own blocks."""
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "0,2"})
    enable(model)
    if wrapped:
        model = with_lora(model, "llama", lora_dropout=0.0)
    expected = step(model, tiny_batch("llama"))
    model.zero_grad()
    twin = through(model)
    assert_same(expected, step(twin, tiny_batch("llama")))
    assert recomputed(twin) == [ALL[0], ALL[0], ALL[2], ALL[2]]  # counts are copied
    assert recomputed(model) == [ALL[0], ALL[2]]  # the original's stay
    enable(twin, {"layers": "1"})
    hf_ckpt.uninstall(model)
    step(twin, tiny_batch("llama"))
    assert recomputed(twin) == [ALL[1]]
    disable(twin)
    hf_ckpt.uninstall(twin)
    assert_same(expected, step(twin, tiny_batch("llama")))


def test_a_disabled_model_pickles_too():
    """A disabled model, which has only its record, can be pickled."""
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "1"})
    enable(model)
    disable(model)
    twin = through_pickle(model)
    assert not hf_ckpt.describe(twin).enabled
    enable(twin)
    step(twin, tiny_batch("llama"))
    assert recomputed(twin) == [ALL[1]]


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dict_keys_stay_as_they_are(family, tmp_path):
    """Keys of the state dict do not change: a `_checkpoint_wrapped_module.` prefix would break loading."""
    model = tiny_model(family)
    before = model.state_dict()
    names = [name for name, _ in model.named_modules()]
    hf_ckpt.install(model)
    enable(model)
    step(model, tiny_batch(family))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [name for name, _ in model.named_modules()] == names
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert list(loaded.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())
    model.load_state_dict(before)
