"""Predictions for accelerators: their dropout, and attention with dropout, save other tensors than a CPU's."""

from __future__ import annotations

import random
import threading

import numpy
import pytest
import torch
from helpers.adapters import with_lora
from torch import nn
from torch.nn import functional

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.attach import trial
from hf_ckpt.compat.private import private
from hf_ckpt.engines.rebuild import masks
from hf_ckpt.forecast.devices import device_named
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.prediction.skeleton import skeleton_of
from hf_ckpt.prediction.trace import Step, trace_costs
from hf_ckpt.spec.actions import KEEP, SELECTIVE, Action
from hf_ckpt.spec.plan import Plan

ACTIONS = (KEEP, SELECTIVE, Action("selective", ("attention",)))


def adapted(layers):
    model = tiny_model("llama", layers=layers, attention="sdpa").to(torch.bfloat16)
    return with_lora(model, "llama", lora_dropout=0.1)


def predicted(model, batch, device):
    """Action -> bytes that one more block keeps at the end of the forward."""
    costs = trace_costs(skeleton_of(model), Step(batch), device_named(device), actions=ACTIONS)
    (stack,) = costs.stacks
    found = {}
    for number, action in enumerate(costs.actions):
        found[action] = stack.inner[0, number].forward.net
    return found


def counted(layers, batch, action):
    model = adapted(layers)
    found = find_blocks(model)
    with (
        trial(model, Plan(found.family, found.model, tuple((block, action) for block in found.blocks))),
        compat.accelerator_kernels(),
        LiveBytes(model, batch) as live,
    ):
        loss = model(**batch, use_cache=False).loss
        held = live.current_bytes - live.start_bytes
        dropped = hf_ckpt.describe(model).dropped
        loss.backward()
    assert bool(dropped.get("dropout")) == (action != KEEP)
    return held


@pytest.mark.long
def test_masks_are_bytes_and_then_bits():
    """Predicted bytes per block match a count of an accelerator's operations; a CPU's bfloat16 noise takes more."""
    batch = tiny_batch("llama", tokens=64)
    masks._rows(torch.device("cpu"))  # creates them once
    found = predicted(adapted(4), batch, "h100")
    for action in ACTIONS:
        assert counted(4, batch, action) - counted(3, batch, action) == found[action], action
    noise = predicted(adapted(4), batch, "cpu")
    assert noise[KEEP] > found[KEEP]
    assert 0 <= noise[SELECTIVE] - found[SELECTIVE] <= 16  # the noise's nonzero value


@pytest.mark.parametrize("padded", [False, True])
def test_attention_with_dropout_keeps_no_weights(padded):
    """With accelerator kernels, attention with dropout saves no weights: bytes grow linearly except for added masks."""
    skeleton = skeleton_of(tiny_model("gpt2", layers=4, dropout=0.1, attention="sdpa"))

    def bend(device):
        found = []
        for tokens in (32, 64, 96):
            step = Step(tiny_batch("gpt2", tokens=tokens), padded=padded)
            (stack,) = trace_costs(skeleton, step, device_named(device), actions=(KEEP,)).stacks
            found.append(stack.inner[0, 0].forward.net)
        less, middle, most = found
        return most - 2 * middle + less

    mask = 2 * 32**2 * 2 * 4 if padded else 0  # float32, two sequences
    assert bend("h100") == mask
    assert bend("cpu") > 4 * mask
    assert bend("cpu") > 0


def test_nothing_stays_and_other_threads_go_on():
    before = functional.scaled_dot_product_attention
    ones = torch.ones(1000, dtype=torch.bfloat16, requires_grad=True)
    seen = []

    def saves():
        seen.append(functional.dropout(ones, 0.5).grad_fn.name())

    with compat.accelerator_kernels():
        saves()
        other = threading.Thread(target=saves)
        other.start()
        other.join()
        assert functional.dropout(ones, 0.5, training=False) is ones
        assert nn.Dropout(0.0)(ones) is ones
    saves()
    assert seen == ["NativeDropoutBackward0", "MulBackward0", "MulBackward0"]
    assert functional.scaled_dot_product_attention is before
    assert "dropout" not in vars(torch._VF)


# --- operations without values ---


def test_random_state_is_put_back():
    before = random.getstate(), numpy.random.get_state()[1].copy(), torch.get_rng_state()
    with compat.RandomState(compat.all_devices()).kept():
        _ = random.random(), numpy.random.rand(3), torch.rand(3)
    assert random.getstate() == before[0]
    assert (numpy.random.get_state()[1] == before[1]).all()
    assert torch.equal(torch.get_rng_state(), before[2])


def products(dtype, size=24):
    """Shapes of all kinds of grouped matrix products."""
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
