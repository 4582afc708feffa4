"""Dropout masks are stored as bits: which tensors, how many, their size, and equal gradients."""

from unittest import mock

import pytest
import torch
from helpers.toys import SCALE, same_toys
from torch import nn
from torch.nn import functional

from hf_ckpt.engines.rebuild import masks


@pytest.fixture
def counts(monkeypatch):
    """Number of masks packed and unpacked."""
    for name in ("to_bits", "from_bits"):
        monkeypatch.setattr(masks, name, mock.Mock(wraps=getattr(masks, name)))
    return lambda: (masks.to_bits.call_count, masks.from_bits.call_count)


@pytest.mark.compat
def test_a_mask_comes_back_from_its_bits():
    """All patterns of eight elements, and every number of elements up to three bytes."""
    torch.manual_seed(0)
    patterns = ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1).bool()
    for mask in (patterns, patterns.t(), *(torch.rand(1, count) < 0.8 for count in range(1, 25))):
        bits = masks.to_bits(mask)
        assert bits.nbytes == -(-mask.numel() // 8)
        unpacked = masks.from_bits(bits, size=mask.size(), stride=mask.stride())
        assert torch.equal(unpacked, mask)
        assert unpacked.stride() == mask.stride()


def _attention(x, drop):
    """What torch's own attention runs on an accelerator without a fused kernel."""
    q = (functional.silu(x) * 0.5).view(2, 8, 4, 4).transpose(1, 2)
    return functional.silu(drop(torch._safe_softmax(q @ q.transpose(-1, -2), -1)))


def _drawn(like):
    """Truth values of a block's own."""
    return torch.rand_like(like, dtype=torch.float32) > 0.3


def _dropped_before_a_change(x):
    """A sum has no value of its own, so a rebuilt dropout would start from its input, which is another by then."""
    total = torch.cumsum(x, -1)
    dropped = functional.dropout(total, 0.3)
    total.mul_(2.0)
    return dropped * dropped + total


DROPOUT = nn.Dropout(0.3)
# What a block does -> masks that are kept as bits.
DROPOUTS = {
    "function": (lambda x: functional.dropout(x * x, 0.3), 1),
    "module": (lambda x: DROPOUT(x * x), 1),
    "of another layout": (lambda x: functional.dropout((x * x).transpose(0, 2), 0.3).transpose(0, 2), 1),
    "inside attention": (lambda x: _attention(x, lambda y: torch.native_dropout(y, 0.4, True)[0]), 1),
    "input changed afterwards": (lambda x: functional.silu(_dropped_before_a_change(x * x)), 1),
    "in place": (lambda x: functional.dropout(x * x, 0.3, inplace=True) + functional.silu(x), 0),  # noise everywhere
    "noise behind a softmax": (lambda x: _attention(x, lambda y: y * torch.empty_like(y).uniform_(0.5, 1).mul_(2)), 0),
    "p 0": (lambda x: functional.dropout(x * x, 0.0), 0),
    "p 1": (lambda x: functional.dropout(x * x, 1.0) + x, 0),
    "eval": (lambda x: functional.dropout(x * x, 0.3, training=False), 0),
    "of channels": (lambda x: functional.dropout2d((x * x).view(2, 2, 8, 8), 0.3).view(2, 8, 16), 0),
    "truth values of a block's own": (lambda x: functional.silu(torch.where(_drawn(x), x * x, x)), 0),
}


@pytest.mark.trap(50)
@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", DROPOUTS)
def test_masks_and_nothing_else_are_bits(name, dtype, counts, fused_dropout):
    """One mask serves the product that saves it and rebuilds the dropout's result; it is unpacked once for both."""
    block, expected = DROPOUTS[name]
    same_toys(lambda x: block(x) * SCALE, dtype=dtype)
    assert counts() == (expected, expected)


def test_noise_of_a_cpu_is_kept(counts):
    same_toys(lambda x: functional.dropout(x * x, 0.3) * SCALE)
    assert counts() == (0, 0)
