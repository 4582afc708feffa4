"""Models with a plan are freed, copied, pickled and saved like models without one; copies have their own plans."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from helpers.adapters import with_lora
from helpers.installed import ALL
from helpers.steps import assert_same, enable, recomputed, step

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

pytestmark = pytest.mark.compat


def freed_after(prepare):
    """Whether the model and its block are freed with the last name, without the garbage collector."""
    model = tiny_model("llama", layers=2)
    gone = weakref.ref(model)
    block = weakref.ref(model.model.layers[0])
    prepare(model)
    del model
    return gone() is None, block() is None


def trained(model):
    hf_ckpt.install(model)
    enable(model)
    step(model, tiny_batch("llama"))


def uninstalled(model):
    trained(model)
    hf_ckpt.uninstall(model)


def paused_once(model):
    trained(model)
    with hf_ckpt.paused(model):
        step(model, tiny_batch("llama"))


def graph_dropped(model):
    """Run a forward and drop its graph without a backward."""
    hf_ckpt.install(model)
    enable(model)
    model(**tiny_batch("llama"))


def enabled_by_the_process(model):
    hf_ckpt.install()
    enable(model)
    step(model, tiny_batch("llama"))


@pytest.mark.parametrize(
    "prepare", [hf_ckpt.install, trained, uninstalled, paused_once, graph_dropped, enabled_by_the_process]
)
def test_no_reference_cycles(prepare, everywhere):
    """hf_ckpt adds no reference cycles: its models are freed without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        stock = freed_after(lambda model: step(model, tiny_batch("llama")))
        ours = freed_after(prepare)
    finally:
        gc.enable()
    assert stock == (True, True)  # else transformers itself has cycles, and the test needs another model
    assert ours == stock


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def disable(model):
    getattr(model, compat.transformers.DISABLE_NAMES[-1])()


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
    again = through(twin)
    assert not hf_ckpt.describe(again).enabled
    enable(again)
    step(again, tiny_batch("llama"))
    assert recomputed(again) == [ALL[1], ALL[1]]
    hf_ckpt.uninstall(twin)
    assert_same(expected, step(twin, tiny_batch("llama")))


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dict_keys_stay_as_they_are(family, tmp_path):
    """Keys of the state dict do not change: a `_checkpoint_wrapped_module.` prefix would break loading."""
    model = tiny_model(family)
    before = model.state_dict()
    names = [name for name, _ in model.named_modules()]
    hf_ckpt.install(model)
    enable(model)
    step(model, tiny_batch(family))
    assert list(model.state_dict()) == list(before)
    assert [name for name, _ in model.named_modules()] == names
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert list(loaded) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in loaded.items())
    model.load_state_dict(before)
