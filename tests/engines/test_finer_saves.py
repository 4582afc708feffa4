"""What `save` can name beside linear layers and attention: widths of linear layers, norms, and all other results."""

from __future__ import annotations

import pytest
import torch
from helpers.adapters import with_lora
from helpers.sparing import sparing
from helpers.steps import assert_same, enable, step
from helpers.toys import SCALE, SELECTIVE, Norm, each_family, plain_and_ours, rebuilt, same_toys, toy
from torch import nn
from torch.nn import functional

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.rebuild.masks import _rows as rows_of_bytes
from hf_ckpt.engines.rebuild.ops import MASK
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.engines.rebuild.values import MASKS
from hf_ckpt.engines.sac import SacRegion
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.spec.actions import finer

EVERYTHING = ["linear", "attention", "norm", "elementwise"]
FINER = [list(action.save) for action in finer()]
PARAMETERS = [nn.Parameter(torch.linspace(-1, 1, 16 * n).view(16, n)) for n in (8, 16, 32)]
BACK = [nn.Parameter(torch.linspace(-1, 1, 16 * n).view(n, 16)) for n in (8, 16, 32)]


def kept(model):
    return sum(hf_ckpt.describe(model).kept.values())


# --- every step of the ladder -----------------------------------------------------------------------------------------


@sparing(
    ("family", "save"),
    [(family, "+".join(save)) for family in FAMILIES for save in FINER],
    *[("llama", "+".join(save)) for save in FINER],
    ("gpt2", "+".join(EVERYTHING)),
    ("bert", "narrow+square"),
    ("t5", "linear+attention+norm"),
)
def test_gradients_and_what_is_kept(family, save):
    """In bfloat16 with dropout, with eager attention: beside the default, more or fewer classes keep more or less."""
    options = {"dropout": 0.1, "attention": "eager", "dtype": torch.bfloat16}
    plain, ours = plain_and_ours(family, save.split("+"), **options)
    batch = tiny_batch(family)
    expected = step(plain, batch)
    assert_same(expected, step(ours, batch))
    assert rebuilt(ours) > 0
    _, default = plain_and_ours(family, ["linear", "attention"], **options)
    step(default, batch)
    if "norm" in save:
        assert kept(ours) > kept(default)
    else:
        assert kept(ours) < kept(default)
        assert rebuilt(ours) > rebuilt(default)


@sparing("save", ["+".join(save) for save in FINER], "linear+attention+norm", "narrow+square+attention")
def test_gradients_of_adapters(save):
    """Frozen linear layers save nothing of what they are given, and their results can be made again all the same."""
    plain, ours = (with_lora(tiny_model("llama", dtype=torch.bfloat16), "llama", lora_dropout=0.1) for _ in range(2))
    hf_ckpt.install(ours, {**SELECTIVE, "save": save.split("+")})
    enable(ours)
    assert_same(step(plain, tiny_batch("llama")), step(ours, tiny_batch("llama")))
    assert rebuilt(ours) > 0
    assert MASKS in hf_ckpt.describe(ours).kept


# --- widths of linear layers ------------------------------------------------------------------------------------------


def layers(x):
    """Three linear layers, of a narrower, an equal and a wider result, each of which its activation saves."""
    x = x.view(-1, 16)
    return sum(functional.silu(x @ there) @ back for there, back in zip(PARAMETERS, BACK, strict=True))


@pytest.mark.parametrize(
    ("save", "sizes"),
    [
        (["narrow"], [8]),
        (["square"], [16]),
        (["wide"], [32]),
        (["narrow", "square"], [8, 16]),
        (["linear"], [8, 16, 32]),
        (["attention"], []),
    ],
    ids=str,
)
def test_results_of_these_widths_stay(save, sizes):
    region = same_toys(layers, save=save, parameters=(*PARAMETERS, *BACK))
    inputs = region.kept["MulBackward0"]
    assert region.kept.get("MmBackward0", 0) == sum(16 * size * 4 for size in sizes)
    assert inputs == 16 * 16 * 4
    assert region.dropped.get("linear", 0) == sum(16 * size * 4 for size in (8, 16, 32) if size not in sizes)
    assert region.recomputed == 3 + 3 - len(sizes)  # the activations, and the products that do not stay


@pytest.mark.parametrize(("save", "matched"), [(["narrow"], 1), (["wide"], 1), (["square"], 1), (["linear"], 3)])
def test_sac_saves_the_same_widths(save, matched):
    def block(x):
        x = x.view(-1, 16)
        return sum((x @ there).sin().sum() for there in PARAMETERS)

    region = SacRegion("toy", save=tuple(save))
    assert_same(toy(block, parameters=PARAMETERS), toy(block, region, parameters=PARAMETERS))
    assert (region.matched, region.recomputed) == (matched, 1)


def test_sac_tells_widths_of_layers_with_a_bias():
    """`addmm` has its factors behind the bias."""
    found = {}
    for save in (("narrow",), ("square",), ("wide",)):
        model = tiny_model("bert", layers=1, dropout=0.0)
        hf_ckpt.install(model, {**SELECTIVE, "engine": "sac", "save": list(save)})
        enable(model)
        assert_same(
            step(tiny_model("bert", layers=1, dropout=0.0), tiny_batch("bert")), step(model, tiny_batch("bert"))
        )
        (region,) = installation(model).regions.values()
        found[save[0]] = region.matched
    assert found == {"narrow": 1, "square": 4, "wide": 1}  # output; query, key, value, attention's output; intermediate


# --- norms ------------------------------------------------------------------------------------------------------------


def test_results_of_norms_stay():
    """All but a product with the weight, which follows from what autograd saves inside of the norm."""
    norm = Norm()

    def block(x):
        return norm(x).sin() * SCALE

    region = same_toys(block, save=["linear", "attention", "norm"], parameters=(SCALE, norm.weight))
    assert "Norm" not in region.dropped
    default = same_toys(block, parameters=(SCALE, norm.weight))
    assert default.dropped["Norm"] > 0
    assert sum(region.kept.values()) > sum(default.kept.values())


def test_the_output_of_a_frozen_norm_stays():
    """Autograd saves only statistics inside of it, from which the output would take as long as the norm itself."""
    norm = Norm()
    norm.weight.requires_grad_(False)

    def block(x):
        return functional.silu(norm(x)) * SCALE

    region = same_toys(block, save=["linear", "attention", "norm"], parameters=(SCALE,))
    assert region.kept["MulBackward0"] == 2 * 2 * 8 * 16 * 4  # the block's input and the norm's output
    assert region.dropped.keys() == {"activation"}
    assert region.recomputed == 1


@each_family
def test_no_norm_runs_again(family):
    plain, ours = plain_and_ours(family, ["linear", "attention", "norm"])
    assert_same(step(plain, tiny_batch(family)), step(ours, tiny_batch(family)))
    _, default = plain_and_ours(family)
    step(default, tiny_batch(family))
    names = {name for name in hf_ckpt.describe(default).dropped if name.lower().endswith("norm")}
    assert names
    assert not names & hf_ckpt.describe(ours).dropped.keys()


# --- everything but masks ---------------------------------------------------------------------------------------------


@sparing("family", FAMILIES, "gpt2", "bert")
def test_only_masks_are_packed(family):
    """In float32, where there are no casts: nothing is computed again but what unpacks a mask, once for each."""
    options = {"dropout": 0.1, "attention": "eager"}
    plain, ours = plain_and_ours(family, EVERYTHING, **options)
    batch = tiny_batch(family)
    assert_same(step(plain, batch), step(ours, batch))
    told = hf_ckpt.describe(ours)
    assert told.dropped.keys() == {MASK}
    assert told.kept[MASKS] * 32 == told.dropped[MASK]  # a bit for each 32-bit number of noise
    masks = {"gpt2": 3, "bert": 3, "llama": 1, "t5": None}[family]
    assert masks is None or set(told.recomputed.values()) == {masks}


def test_without_masks_there_is_nothing_to_pack(caplog):
    plain, ours = plain_and_ours("gpt2", EVERYTHING, dropout=0.0)
    assert_same(step(plain, tiny_batch("gpt2")), step(ours, tiny_batch("gpt2")))
    assert rebuilt(ours) == 0
    assert "found nothing in a block that can be rebuilt" in caplog.text


def test_packing_a_mask_takes_a_few_operations():
    """What it costs to save everything but masks: four operations for each mask in the forward, and in the backward."""
    rows_of_bytes(torch.device("cpu"))  # are made once for a device

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += not func.is_view
            return func(*args, **(kwargs or {}))

    def block(x):
        return functional.dropout(x, 0.5) * SCALE

    counts = []
    for run in (block, RebuildRegion("toy", save=tuple(EVERYTHING))):
        torch.manual_seed(0)
        x = torch.randn(4, 8).requires_grad_() * 1
        with Count() as forward:
            out = block(x) if run is block else run(block, x)
        with Count() as backward:
            out.sum().backward()
        counts.append((forward.number, backward.number))
    (plain, plain_back), (ours, ours_back) = counts
    assert (ours - plain, ours_back - plain_back) == (4, 4)
