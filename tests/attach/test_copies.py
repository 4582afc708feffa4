"""Models with a plan are freed like models without one."""

from __future__ import annotations

import gc
import weakref

import pytest
from helpers.steps import enable, step

import hf_ckpt
from hf_ckpt.models.tiny import tiny_batch, tiny_model

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
