"""A model with a plan copies, and is freed as one without."""

from __future__ import annotations

import gc
import weakref

import pytest
from helpers.steps import enable, step

import hf_ckpt
from hf_ckpt.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.compat


def freed_after(prepare):
    """Whether a model is gone as soon as its last name is, without the garbage collector's help."""
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
    """A forward whose graph is thrown away without backward."""
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
    """A model that hf_ckpt was on is freed exactly when one that it never saw is."""
    gc.collect()
    gc.disable()
    try:
        stock = freed_after(lambda model: step(model, tiny_batch("llama")))
        ours = freed_after(prepare)
    finally:
        gc.enable()
    assert stock == (True, True)  # else this transformers has cycles of its own, and the test needs another model
    assert ours == stock
