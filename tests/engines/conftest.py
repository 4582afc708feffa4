"""Fixtures of the engines' tests."""

import builtins
import types

import pytest
import torch
from helpers.lanes import Delayed, lanes_of
from torch.nn import functional

from hf_ckpt.engines.head.logits import Logits


@pytest.fixture
def lanes():
    """Stand-ins for an accelerator's lanes, as they are created; even the smallest tensors are moved."""
    with lanes_of(Delayed) as created:
        yield created


@pytest.fixture
def whole(monkeypatch):
    """Chunked logits that were computed as a whole."""
    computed, values = [], Logits.values
    monkeypatch.setattr(Logits, "values", lambda logits: computed.append(logits) or values(logits))
    return computed


@pytest.fixture
def fused_dropout(monkeypatch):
    """Dropout as on an accelerator: one operation, which saves a mask of truth values, and none of attention's weights.

    Fused kernels drop those without a mask. Here they are not dropped at all.
    """

    def dropout(tensor, p, training):
        if training and 0 < p < 1:
            return torch.native_dropout(tensor, p, training)[0]
        return torch.dropout(tensor, p, training)

    # hf_ckpt looks for the caller of the operation, and does not take its own functions for that.
    names = {"torch": torch, "__name__": "hf_ckpt.tests", "__builtins__": builtins}
    attention = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda *qkv, dropout_p=0.0, **options: attention(*qkv, **options)
    )
    monkeypatch.setattr(torch._VF, "dropout", types.FunctionType(dropout.__code__, names))
