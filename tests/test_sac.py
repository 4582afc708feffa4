"""`selective` by PyTorch's selective checkpointing: what is matched, when nothing is, and the gradients."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same, enable, step
from test_parity import skip_where_absent
from torch.nn import functional

import hf_ckpt
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.sac import OPERATIONS, SacRegion, operations
from hf_ckpt.errors import NothingSavedError
from hf_ckpt.install import installation
from hf_ckpt.tiny import FAMILIES, tiny_batch, tiny_model

SAC = {"policy": "selective", "engine": "sac"}
LAYERS = 2
each_save = pytest.mark.parametrize("save", [["linear", "attention"], ["attention"], ["linear"]], ids="+".join)


def by_sac(family, **options):
    spec = {**SAC, **options.pop("spec", {})}
    model = tiny_model(family, layers=LAYERS, **options)
    hf_ckpt.install(model, spec)
    enable(model)
    return model


def regions(model):
    return list(installation(model).regions.values())


@pytest.mark.compat
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["", "dropout"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_no_checkpointing(family, attention, dropout):
    """Every block runs once more, with the random state of its forward, and operations stay in each."""
    skip_where_absent(family, attention)
    options = {"attention": attention, "dropout": dropout}
    expected = step(tiny_model(family, layers=LAYERS, **options), tiny_batch(family))
    for save in (["linear", "attention"], ["attention"], ["linear"]):
        model = by_sac(family, spec={"save": save}, **options)
        assert_same(expected, step(model, tiny_batch(family)), str(save))
        assert [region.recomputed for region in regions(model)] == [1] * len(regions(model))
        assert all(region.matched > 0 for region in regions(model)), save


@pytest.mark.compat
def test_what_is_matched_is_counted_by_hand():
    """LLaMA: seven linear layers; eager attention is two batched products and a softmax, sdpa one operation."""
    for attention, save, wanted in [
        ("eager", ["linear"], 7),
        ("eager", ["attention"], 3),
        ("sdpa", ["attention"], 1),
        ("sdpa", ["linear", "attention"], 8),
    ]:
        model = by_sac("llama", spec={"save": save}, attention=attention)
        for steps in (1, 2):
            step(model, tiny_batch("llama"))
            assert [region.matched for region in regions(model)] == [wanted * steps] * LAYERS, (attention, save)
            assert [region.recomputed for region in regions(model)] == [steps] * LAYERS


def test_what_stays_is_not_run_again():
    """The matched operations run once; the same block under `full` runs them twice."""

    def block(x):
        return functional.silu(torch.mm(functional.silu(x), x.t())).mm(x)

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    products = {}
    for region in (SacRegion("toy", save=("linear",)), FullRegion("toy")):
        out = region(block, torch.randn(4, 4).requires_grad_() * 1)
        with Count() as backward:
            out.sum().backward()
        products[type(region)] = backward.products
        assert region.recomputed == 1
    assert products[FullRegion] == products[SacRegion] + 1  # the last product's result is needed by nobody


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


@pytest.mark.parametrize("preserve", [True, False])
def test_dropout_is_drawn_once_where_random_state_is_preserved(preserve):
    expected = step(tiny_model("llama", layers=LAYERS, dropout=0.1, attention="eager"), tiny_batch("llama"))
    model = by_sac("llama", spec={"preserve_rng_state": preserve}, dropout=0.1, attention="eager")
    got = step(model, tiny_batch("llama"))
    assert [region.recomputed for region in regions(model)] == [1] * LAYERS
    if preserve:
        assert_same(expected, got)
    else:  # the user's own wish; and it shows that the comparison can fail
        with pytest.raises(AssertionError, match="differs"):
            assert_same(expected, got)


@pytest.mark.parametrize("family", FAMILIES)
def test_under_autocast(family):
    found = []
    for model in (tiny_model(family, layers=LAYERS, dropout=0.1), by_sac(family, dropout=0.1)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(step(model, tiny_batch(family)))
    assert_same(*found)
    assert all(region.matched for region in regions(model))


def test_operations_are_looked_up_in_this_build():
    """Names that this build of torch does not have are left out, and no name is misspelt beyond recognition."""
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
