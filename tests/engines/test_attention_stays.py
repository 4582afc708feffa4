"""`selective` that is really full: attention must not run again where its results are to stay."""

from __future__ import annotations

import pytest
import torch
from helpers.steps import assert_same, enable, outcome, without_cache
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

SCORES = ("_softmax", "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu")


class Counting(TorchDispatchMode):
    """How often attention is computed, forward."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name.removeprefix("aten::") in SCORES
        return func(*args, **(kwargs or {}))


def attention_in_backward(model, batch):
    """The step's gradients, and how often attention was computed in its backward."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = model(**without_cache(model, batch)).loss
    with Counting() as counting:
        loss.backward()
    return outcome(model, loss), counting.count


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_not_run_again(family, attention, dropout):
    """`selective` finds no attention to save (on the CPU, eager, with dropout) and silently recomputes everything."""
    model = tiny_model(family, layers=2, attention=attention, dropout=dropout)
    batch = tiny_batch(family)
    expected, count = attention_in_backward(model, batch)
    assert count == 0
    hf_ckpt.install(model)
    for engine in ("rebuild", "sac"):
        for save in (["linear", "attention"], ["attention"]):
            enable(model, {"policy": "selective", "save": save, "engine": engine})
            got, count = attention_in_backward(model, batch)
            assert_same(expected, got, f"{engine} {save}")
            assert count == 0, (engine, save)
            done = hf_ckpt.describe(model)
            if engine == "sac":
                least = 2 if save == ["attention"] and attention == "eager" else 1
                assert all(region.matched >= least for region in installation(model).regions.values())
                assert set(done.recomputed.values()) == {1}
            else:
                assert "attention" not in done.dropped
                assert {"attention", "softmax"} & done.kept.keys()
                assert done.dropped
    enable(model, {"policy": "full"})
    got, count = attention_in_backward(model, batch)
    assert_same(expected, got)
    assert count >= (4 if family == "t5" else 2)  # so that one would have been seen
