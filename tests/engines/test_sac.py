"""SAC never recomputes what `selective` saves, and matches the right operations."""

from __future__ import annotations

import pytest
import torch
from helpers.steps import assert_same, enable, outcome, without_cache
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.sac import OPERATIONS, SacRegion, operations
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

SCORES = ("_softmax", "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu")


class Counting(TorchDispatchMode):
    """Counts runs of operations."""

    def __init__(self, *names):
        super().__init__()
        self.names = names
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name.removeprefix("aten::") in self.names
        return func(*args, **(kwargs or {}))


def attention_in_backward(model, batch):
    """The step's gradients, and how often its backward computed attention."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = model(**without_cache(model, batch)).loss
    with Counting(*SCORES) as counting:
        loss.backward()
    return outcome(model, loss), counting.count


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_not_run_again(family, attention, dropout):
    """Attention is saved in every form (on the CPU, eager, with dropout), so `selective` does not recompute it."""
    model = tiny_model(family, layers=2, attention=attention, dropout=dropout)
    batch = tiny_batch(family)
    expected, count = attention_in_backward(model, batch)
    assert count == 0
    hf_ckpt.install(model)
    for save in (["linear", "attention"], ["attention"]):
        enable(model, {"policy": "selective", "save": save})
        got, count = attention_in_backward(model, batch)
        assert_same(expected, got, save)
        assert count == 0, save
        done = hf_ckpt.describe(model)
        assert "attention" not in done.dropped
        assert {"attention", "softmax"} & done.kept.keys()
        assert done.dropped
        for block, region in installation(model).regions.items():  # in graphs of torch.compile
            vars(model.get_submodule(block))["_gradient_checkpointing_func"] = region.compiled
        got, count = attention_in_backward(model, batch)
        assert_same(expected, got, save)
        assert count == 0, save
        assert all(region.compiled.recomputed == 1 for region in installation(model).regions.values())
        assert all(region.compiled.save == tuple(save) for region in installation(model).regions.values())
    enable(model, {"policy": "full"})
    got, count = attention_in_backward(model, batch)
    assert_same(expected, got)
    assert count >= (4 if family == "t5" else 2)  # shows that the count works


def test_what_stays_is_not_run_again():
    """Matched operations run once; under `full` they run twice."""

    def block(x):
        return functional.silu(torch.mm(functional.silu(x), x.t())).mm(x)

    products = {}
    for region in (SacRegion("toy", save=("linear",)), FullRegion("toy")):
        out = region(block, torch.randn(4, 4).requires_grad_() * 1)
        with Counting("mm") as backward:
            out.sum().backward()
        products[type(region)] = backward.count
        assert region.recomputed == 1
    assert products[FullRegion] == products[SacRegion] + 1  # nothing needs the last product's result


def test_operations_are_looked_up_in_this_build():
    """Operations missing in this build of torch are left out, and at most a few names are missing."""
    assert operations(("linear",)) >= {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    assert operations(("attention",)) >= {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._softmax.default,
    }
    assert operations(("linear", "attention")) == operations(("linear",)) | operations(("attention",))
    aten = [name for names in OPERATIONS.values() for name in names if name.startswith("aten.")]
    found = {str(operation) for operation in operations(("linear", "attention"))}
    assert len(set(aten) - found) <= 4, "names of operations that do not exist here"
