"""One training step as a dict of tensors, and comparisons between two steps."""

import contextlib
import gc

import torch

import hf_ckpt
from helpers.tables import table
from hf_ckpt import compat
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import base_model

_SPECS = table(__file__, "specs.yaml")
RUN_AGAIN = _SPECS["run again"]
"""Name -> spec of an engine that runs a block again."""
ENGINES = RUN_AGAIN | _SPECS["rebuild"]
"""Name -> spec of an engine."""
CACHED_BYTES = 1024
"""What transformers itself may keep of a forward, for models as small as in these tests."""
ROUNDING = 2e-6
"""Allowed relative norm of the difference if float32 sums change order: 4e-7 to 9e-7 were seen."""
ROUNDING_16 = 5e-2
"""The same for all gradients together, with 16-bit dtypes."""


def step(model, batch, seed=7):
    """Forward and backward from a fixed seed: the loss, and the gradient of every trainable parameter, or None."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(**without_cache(model, batch)).loss
    loss.backward()
    return outcome(model, loss)


def outcome(model, loss):
    """The loss and the model's gradients."""
    return {"loss": loss.detach(), **gradients(model)}


def without_cache(model, batch):
    """The batch with `use_cache=False` if the forward accepts it.

    A cache changes the memory layout of keys and values, which rounds differently with or without checkpointing.
    """
    takes_cache = "use_cache" in compat.transformers.forward_parameters(base_model(model))
    return {**batch, "use_cache": False} if takes_cache else batch


def cache_argument(model):
    """The name of the forward's cache argument."""
    taken = compat.transformers.forward_parameters(model)
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in taken)


def gradients(model):
    """Name -> gradient of every trainable parameter; None if backward left none."""
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def assert_same(expected, got, what=""):
    """Check bit-equality. A gradient missing on one side fails, and so do gradients that are all zero."""
    assert expected.keys() == got.keys(), what
    assert any(value is not None and bool(value.any()) for name, value in expected.items() if name != "loss"), (
        f"{what}: no trainable parameter has a gradient other than 0"
    )
    for name, value in expected.items():
        assert (value is None) == (got[name] is None), f"{what}: only one side has a gradient of {name}"
        assert value is None or torch.equal(value, got[name]), f"{what}: the gradient of {name} differs"


def assert_near(expected, got, most=ROUNDING, *, together=False):
    """Check that the relative norm of the difference is at most `most`, for each gradient or for all `together`.

    The norm of a nearly zero gradient is replaced by a hundredth of the largest one.
    """
    assert expected.keys() == got.keys()
    assert [name for name in expected if expected[name] is None] == [name for name in got if got[name] is None]
    there = {name: value.double() for name, value in expected.items() if value is not None}
    gaps = {name: float((value - got[name].double()).norm()) for name, value in there.items()}
    norms = {name: float(value.norm()) for name, value in there.items()}
    if "loss" in gaps:
        assert gaps.pop("loss") <= most * max(norms.pop("loss"), 1e-2), "the loss"
    scale = max(norms.values())
    assert scale > 0, "no trainable parameter has a gradient other than 0"
    if together:
        assert sum(gap**2 for gap in gaps.values()) ** 0.5 <= most * sum(norm**2 for norm in norms.values()) ** 0.5
        return
    for name, gap in gaps.items():
        assert gap <= most * max(norms[name], 1e-2 * scale), (name, gap, norms[name])


def enable(model, kwargs=None):
    """Enable by the newest method name; where it exists, the old one warns that it is deprecated."""
    getattr(base_model(model), compat.transformers.ENABLE_NAMES[-1])(kwargs)


def planned(model, spec=None):
    """The model with a plan enabled."""
    hf_ckpt.install(model, spec)
    enable(model)
    return model


def recomputed(model):
    """Names of the blocks that were recomputed, repeated for each recomputation."""
    return [name for name, times in hf_ckpt.describe(model).recomputed.items() for _ in range(times)]


def input_gradient_hooks(model):
    """Number of hooks that make embedding outputs require gradients, including hooks that lost their handle."""
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    return sum("input_require_grads" in getattr(hook, "__qualname__", "") for hook in hooks)


@contextlib.contextmanager
def without_collector():
    """Turn the garbage collector off, so that a reference cycle would hold what is in it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def assert_frees_everything(model, batch, meter=LiveBytes):
    """Check that a forward without a backward leaves nothing, with the garbage collector off: no reference cycles."""
    batch = without_cache(model, batch)
    step(model, batch)
    with without_collector(), meter(model) as live:
        loss = model(**batch).loss
        held = live.current_bytes - live.start_bytes
        del loss
        assert live.current_bytes - live.start_bytes <= CACHED_BYTES < held
