"""Dropout masks are stored as bits: which tensors, how many, their size, and equal gradients."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from helpers.steps import assert_same, step
from helpers.toys import SCALE, each_family, plain_and_ours, same_toys
from torch import nn
from torch.nn import functional

from hf_ckpt import compat
from hf_ckpt.engines.rebuild import masks
from hf_ckpt.models.tiny import tiny_batch

DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.fixture
def counts(monkeypatch):
    """Number of masks packed and unpacked."""
    for name in ("pack", "unpack"):
        monkeypatch.setattr(masks, name, mock.Mock(wraps=getattr(masks, name)))
    return lambda: (masks.pack.call_count, masks.unpack.call_count)


@pytest.mark.compat
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_comes_back_from_its_bits(dtype):
    """All patterns of eight elements, every number of elements up to three bytes, and unusual scales.

    1 / (1 - p) can overflow float16, and a mask can drop everything.
    """
    torch.manual_seed(0)
    patterns = ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1).bool()
    for scale in (1 / 0.9, float("inf"), 0.0):
        for kept in (patterns, patterns.t(), *(torch.rand(1, count) < 0.8 for count in range(1, 25))):
            mask = kept if dtype is torch.bool else torch.where(kept, torch.tensor(scale, dtype=dtype), 0)
            bits = masks.pack(mask)
            assert bits.nbytes == -(-mask.numel() // 8)
            found = masks.unpack(
                bits, size=mask.size(), stride=mask.stride(), scale=None if dtype is torch.bool else mask.max()
            )
            assert found.dtype is dtype
            assert torch.equal(found, mask)
            assert found.stride() == mask.stride()


def _attention(x, **options):
    q, k, v = ((functional.silu(x) * factor).view(2, 8, 4, 4).transpose(1, 2) for factor in (1.0, 0.5, 2.0))
    return functional.scaled_dot_product_attention(q, k, v, **options) * SCALE


def _noise_behind_a_softmax(x):
    """The block's own noise, with the shape of a softmax, and changed in place as often as a mask."""
    q = (functional.silu(x) * 0.5).view(2, 8, 4, 4).transpose(1, 2)
    noise = torch.empty(2, 4, 8, 8).uniform_(0.5, 1.0).mul_(2.0)
    return functional.silu(torch._safe_softmax(q @ q.transpose(-1, -2), -1) * noise)


DROPOUT = nn.Dropout(0.3)
# What a block does -> masks that are kept as bits.
DROPOUTS = {
    "function": (lambda x: functional.dropout(x * x, 0.3), 1),
    "module": (lambda x: DROPOUT(x * x), 1),
    "in place": (lambda x: functional.dropout(x * x, 0.3, inplace=True), 1),
    "of another layout": (lambda x: functional.dropout((x * x).transpose(0, 2), 0.3).transpose(0, 2), 1),
    "inside attention": (lambda x: _attention(x, dropout_p=0.4), 1),  # on the CPU, operations in float32
    "noise behind a softmax": (_noise_behind_a_softmax, 0),
    "p 0": (lambda x: functional.dropout(x * x, 0.0), 0),
    "p 1": (lambda x: functional.dropout(x * x, 1.0) + x, 0),
    "eval": (lambda x: functional.dropout(x * x, 0.3, training=False), 0),
    "of channels": (lambda x: functional.dropout2d((x * x).view(2, 2, 8, 8), 0.3).view(2, 8, 16), 0),
    "noise of a block's own": (lambda x: x * x * torch.empty_like(x).bernoulli_(0.7).div_(0.7), 0),
    "truth values": (lambda x: functional.silu(torch.where(x.detach() > 0, x * x, x)), 0),
}


@pytest.mark.trap(50)
@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", DROPOUTS)
def test_masks_and_nothing_else_are_bits(name, dtype, counts):
    """One mask serves the product that saves it and rebuilds the dropout's result; it is unpacked once for both."""
    block, expected = DROPOUTS[name]
    same_toys(lambda x: block(x) * SCALE, dtype=dtype)
    assert counts() == (expected, expected)


@pytest.mark.parametrize("p", [0.25, 1.0])
def test_masks_of_truth_values_are_bits(p, counts, monkeypatch):
    """On CUDA, dropout is one operation with a boolean mask; here the test calls that operation directly."""
    monkeypatch.setattr(compat.frames, "input_of_dropout", lambda: torch.empty(0))
    same_toys(lambda x: (torch.native_dropout(x * x, p, True)[0] + x) * SCALE, dtype=torch.bfloat16)
    assert counts() == (1, 1)


# Dropouts per block; T5's decoder blocks have a second attention.
IN_MODEL = {"llama": 2, "gpt2": 2 * 3, "bert": 2 * 3, "t5": 2 * 4 + 2 * 6}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@each_family
def test_models_keep_their_masks_as_bits(family, attention, counts):
    plain, ours = plain_and_ours(family, dtype=torch.bfloat16, dropout=0.1, attention=attention)
    assert_same(step(plain, tiny_batch(family)), step(ours, tiny_batch(family)))
    assert counts() == (IN_MODEL[family], IN_MODEL[family])
