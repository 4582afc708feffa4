"""What several test files share: one training step as a dict, an exact comparison, and a check of what tests leave."""

from __future__ import annotations

import gc
import logging
import os

import pytest
import torch
import torch._dynamo
from hypothesis import settings
from transformers.utils import logging as transformers_logging

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.families import base_model
from hf_ckpt.measure import LiveBytes

if "PYTEST_XDIST_WORKER" in os.environ:  # several of them share the cores
    torch.set_num_threads(1)
# The same examples on every run; a new one is worth a named test.
settings.register_profile("hf_ckpt", deadline=None, derandomize=True)
settings.load_profile("hf_ckpt")


@pytest.fixture(autouse=True)
def nothing_left_on_the_process():
    """`hf_ckpt.install()` changes a class; a test that forgets to undo it would change every later test."""
    names = (*compat.ENABLE_NAMES, *compat.DISABLE_NAMES)
    before = {name: vars(compat.PreTrainedModel)[name] for name in names}
    yield
    after = {name: vars(compat.PreTrainedModel)[name] for name in names}
    hf_ckpt.uninstall()
    assert after == before


@pytest.fixture
def everywhere():
    """`install()` for the process, undone after the test."""
    yield hf_ckpt.install
    hf_ckpt.uninstall()


@pytest.fixture
def transformers_log():
    """Records of transformers' own logger, which does not propagate to where `caplog` listens."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = transformers_logging.get_logger("transformers")
    transformers_logging.get_logger("transformers.any").warning_once.__func__.cache_clear()
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def step(model, batch, seed=7):
    """Forward and backward from a fixed seed: the loss, and the gradient of every trainable parameter, or None."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(**without_cache(model, batch)).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def without_cache(model, batch):
    """The batch with `use_cache=False`, where the forward takes it.

    A cache lays keys and values out in another order, which rounds differently with or without checkpointing.
    """
    return {**batch, "use_cache": False} if compat.wants_use_cache(base_model(model)) else batch


def gradients(model):
    """Name -> gradient of every trainable parameter; None where backward left none."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def assert_same(expected, got, what=""):
    """Bit-equal, with something to compare: a gradient missing on one side fails, and so do all-zero gradients."""
    assert expected.keys() == got.keys(), what
    assert any(value is not None and bool(value.any()) for name, value in expected.items() if name != "loss"), (
        f"{what}: no trainable parameter has a gradient other than 0"
    )
    for name, value in expected.items():
        assert (value is None) == (got[name] is None), f"{what}: only one side has a gradient of {name}"
        assert value is None or torch.equal(value, got[name]), f"{what}: the gradient of {name} differs"


def enable(model, kwargs=None):
    """Enable by the newest name this transformers has; the old one warns of its own deprecation there."""
    getattr(base_model(model), compat.ENABLE_NAMES[-1])(kwargs)


def recomputed(model):
    """Names of the blocks that were recomputed, each as often as it was."""
    return [name for name, times in hf_ckpt.describe(model).recomputed.items() for _ in range(times)]


def input_gradient_hooks(model):
    """How many hooks make embedding outputs require gradients, those included that lost their handle."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    return sum("input_require_grads" in getattr(hook, "__qualname__", "") for hook in hooks)


def assert_frees_everything(model, batch):
    """A forward without a backward leaves nothing, with the garbage collector off: no cycle holds activations."""
    batch = without_cache(model, batch)
    step(model, batch)
    gc.collect()
    gc.disable()
    try:
        with LiveBytes(model) as live:
            loss = model(**batch).loss
            held = live.current_bytes - live.start_bytes
            del loss
            assert live.current_bytes - live.start_bytes <= 1024 < held  # what transformers caches
    finally:
        gc.enable()


def checkpoints_compiled(counts, compiler="aot_eager"):
    """A compiler backend that appends to `counts` how many checkpointed regions each graph holds."""

    def backend(graph, inputs):
        counts.append(sum("checkpoint" in str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)

    return backend
