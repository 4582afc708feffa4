"""SAC never recomputes what `selective` saves, and matches the right operations."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.steps import assert_same, enable, outcome, step, without_cache
from helpers.toys import each_save
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.sac import OPERATIONS, SacRegion, operations
from hf_ckpt.errors import NothingSavedError
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

SAC = {"policy": "selective", "engine": "sac"}
LAYERS = 2


def by_sac(spec, **options):
    model = tiny_model("llama", layers=LAYERS, **options)
    hf_ckpt.install(model, {**SAC, **spec})
    enable(model)
    return model


def regions(model):
    return list(installation(model).regions.values())


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
    assert count >= (4 if family == "t5" else 2)  # shows that the count works


@pytest.mark.compat
def test_what_is_matched_is_counted_by_hand():
    """LLaMA has seven linear layers per block; eager attention is two products and a softmax, sdpa one operation.

    In torch 2.8, the CPU's fused kernel does not support grouped queries, so sdpa is three operations there, too.
    """
    fused = 1 if torch.__version__ >= "2.9" else 3
    for attention, save, wanted in [
        ("eager", ["linear"], 7),
        ("eager", ["attention"], 3),
        ("sdpa", ["attention"], fused),
        ("sdpa", ["linear", "attention"], 7 + fused),
    ]:
        model = by_sac({"save": save}, attention=attention)
        for steps in (1, 2):
            step(model, tiny_batch("llama"))
            assert [region.matched for region in regions(model)] == [wanted * steps] * LAYERS, (attention, save)
            assert [region.recomputed for region in regions(model)] == [steps] * LAYERS


def test_hooks_around_the_model_see_what_stays():
    """Hooks around the model see saved tensors from torch 2.14 on, not before; neither case warns."""
    counts = {}
    for policy, spec in {"full": {"engine": "auto"}, "selective": {"save": ["linear"]}}.items():
        model = by_sac({"policy": policy, **spec})
        seen = []
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            with torch.autograd.graph.saved_tensors_hooks(lambda found, seen=seen: seen.append(found) or found, _as_is):
                loss = model(**tiny_batch("llama"), use_cache=False).loss
        loss.backward()
        counts[policy] = len(seen)
    assert counts["selective"] - counts["full"] == (7 * LAYERS if compat.SEEN_BY_HOOKS else 0)


def _as_is(tensor):
    return tensor


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


@pytest.mark.compat
@each_save
def test_no_match_is_an_error_that_says_what_to_do(save):
    sac = SacRegion("toy", save=save)
    with pytest.raises(NothingSavedError, match=r"block 'toy'.*no such operation.*\"engine\": \"rebuild\"") as raised:
        sac(lambda x: functional.silu(x) * x, torch.randn(4, 4).requires_grad_())
    assert raised.value.save == tuple(save)
    assert sac.matched == 0


def test_a_block_without_attention_is_an_error_only_where_attention_is_to_stay():
    def block(x):
        return functional.silu(torch.mm(x, x))

    x = torch.randn(4, 4).requires_grad_()
    with pytest.raises(NothingSavedError, match="'attention'"):
        SacRegion("toy", save=("attention",))(block, x)
    for save in (("linear",), ("linear", "attention")):
        region = SacRegion("toy", save=save)
        region(block, x).sum().backward()
        assert (region.matched, region.recomputed) == (1, 1)


def test_without_gradients_nothing_is_asked():
    sac = SacRegion("toy", save=("attention",))
    with torch.no_grad():
        sac(lambda x: functional.silu(x), torch.randn(4, 4))
    assert (sac.matched, sac.forwards) == (0, 0)


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


def test_engine_auto_holds_sac_for_the_compiler():
    model = tiny_model("llama", layers=LAYERS)
    for engine, has in (("auto", True), ("rebuild", False)):
        hf_ckpt.install(model, {"policy": "selective", "engine": engine, "save": ["attention"]})
        for region in regions(model):
            assert (region.compiled is not None) == has
            assert region.compiled is None or region.compiled.save == ("attention",)
