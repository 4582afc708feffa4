"""Blocks that work in place: gradients equal those without checkpointing, or an error names the block."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from helpers import unknown
from helpers.steps import assert_same, enable, step, without_cache
from helpers.toys import SAVES, WEIGHT, each_family, hooked, plain_and_ours, same_steps, same_toys, toy
from helpers.unknown import steps_of, working
from torch import nn
from torch.nn import functional

import hf_ckpt
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.offload import Mover, OffloadRegion
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.errors import InPlaceError, RebuildError
from hf_ckpt.models.tiny import tiny_batch

unwatched = pytest.mark.usefixtures("unwatched")

HARMLESS = (unknown.scales_its_input, unknown.relu_in_place, unknown.masks_scores, unknown.adds_rows)
"""Changes that cause no error if results of linear layers and attention are kept."""
CHANGING_THEIR_INPUT = (
    *(unknown.adds_to_its_input, unknown.scales_its_input, unknown.drops_its_input, unknown.adds_its_norm),
    *(unknown.adds_to_what_it_has_read, unknown.adds_a_norm_to_its_input),
)
"""Changes of what a block would be recomputed from."""
OTHERS = (
    unknown.changes_an_operand,
    unknown.drops_in_place,
    unknown.changes_a_norm,
    unknown.clamps_what_is_saved,
    unknown.writes_to_parts,
)
BEHIND_ITS_BACK = (unknown.clamps_without_a_graph, unknown.writes_data, unknown.writes_data_of_a_norm)
"""Changes that autograd does not count for what it saves. No model of transformers makes them."""
IN_16_BITS = (unknown.adds_a_norm_to_its_input, unknown.adds_to_a_residual)
"""Changes that autograd itself refuses in float32."""
SEEN_BY_AUTOGRAD = [
    work for work in dict.fromkeys((*HARMLESS, *CHANGING_THEIR_INPUT, *OTHERS)) if work not in IN_16_BITS
]
each_work = functools.partial(pytest.mark.parametrize, "work", ids=lambda work: work.__name__)


def planned(work, spec, dtype=torch.float32):
    """A model of blocks that run `work`, with a plan enabled."""
    model = working(work, dtype)
    hf_ckpt.install(model, spec)
    enable(model)
    return model


@unwatched
@each_work((*SEEN_BY_AUTOGRAD, *BEHIND_ITS_BACK, *IN_16_BITS))
def test_full_trains_what_trains_without_checkpointing(work):
    """A block that changes its own input cannot be recomputed from it; an error says so."""
    dtype = torch.bfloat16 if work in IN_16_BITS else torch.float32
    expected, model = steps_of(working(work, dtype)), planned(work, {"policy": "full"}, dtype)
    if work in CHANGING_THEIR_INPUT:
        with pytest.raises(InPlaceError, match=r"block 'layers\.\d'.*was changed in place by .*`none`"):
            steps_of(model)
        return
    for before, after in zip(expected, steps_of(model), strict=True):
        assert_same(before, after)
    assert set(hf_ckpt.describe(model).recomputed.values()) == {3}


REGIONS = {
    **{"+".join(save): functools.partial(RebuildRegion, save=tuple(save)) for save in SAVES},
    "moved": lambda block: RebuildRegion(block, save=("linear",), mover=Mover()),
    "offload": lambda block: OffloadRegion(block, Mover()),
}


@unwatched
@pytest.mark.compat
@pytest.mark.parametrize("kind", REGIONS)
@each_work(SEEN_BY_AUTOGRAD)
def test_a_change_in_place_is_harmless_or_said(work, kind, lanes):
    """Changes that autograd accepts give the same gradients, or an error that names the block."""
    (block, *_) = working(work).layers
    hooked(block.norm)
    options = {"parameters": [*block.parameters()]}
    expected = toy(block.forward, **options)
    region = REGIONS[kind]("toy")
    try:
        found = toy(block.forward, region, **options)
    except InPlaceError as error:
        assert "block 'toy'" in str(error)  # noqa: PT017
        assert work not in HARMLESS or kind != "linear+attention"
    else:
        assert_same(expected, found)
        assert kind != "offload" or work not in CHANGING_THEIR_INPUT
    assert region.forwards == 1
    assert kind == "offload" or region.saved_tensors
    if lanes:
        gc.collect()
        assert region.mover.held_bytes == 0


def test_changes_behind_autograds_back_are_found_by_the_watch(caplog):
    """Under `selective` they give wrong gradients; the first check, in the third step, warns of it."""
    steps_of(planned(unknown.writes_data, "selective"), 2)
    assert "gradients of this step are wrong" not in caplog.text
    steps_of(planned(unknown.writes_data, "selective"), 3)
    assert "gradients of this step are wrong" in caplog.text


def test_hidden_states_changed_behind_a_block():
    """Changing a block's input after its forward is an error of torch: recomputations would use it."""
    hidden = torch.ones(4, requires_grad=True) * 1
    output = FullRegion("block")(torch.sin, hidden)
    hidden.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@each_work(SEEN_BY_AUTOGRAD)
def test_full_selective_trains_the_same_or_says_why_not(work):
    expected, model = steps_of(working(work)), planned(work, {"policy": "full+selective"})
    try:
        found = steps_of(model)
    except InPlaceError as error:
        assert "block 'layers." in str(error)  # noqa: PT017
        assert work not in HARMLESS or work in CHANGING_THEIR_INPUT
        return
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)
    assert all(hf_ckpt.describe(model).recomputed.values())


def test_a_change_in_place_of_what_is_kept_is_found():
    """Changing a kept tensor in place is found, although autograd does not check tensors held by hooks."""

    def block(x):
        middle = torch.cumprod(x, -1)  # cannot be rebuilt
        known = functional.silu(middle)  # saves `middle`
        out = known * known
        with torch.no_grad():
            middle.mul_(2)
        return out

    with pytest.raises(InPlaceError, match=r"block 'toy'.*changed in place"):
        toy(block, RebuildRegion("toy", save=()))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_norm_whose_parameter_is_changed_before_backward_is_said(name):
    """Changing a norm's weight or bias before backward is an error; autograd checks only the weight."""
    norm = hooked(nn.LayerNorm(16))

    def block(x):
        out = functional.silu(norm(x) @ WEIGHT)
        if changes:
            with torch.no_grad():
                getattr(norm, name).add_(1.0)
        return out

    changes = False
    same_toys(block, parameters=(norm.weight, norm.bias))
    changes = True
    with pytest.raises(InPlaceError, match=r"block 'toy'.*changed in place"):
        toy(block, RebuildRegion("toy", save=("linear", "attention")))


def written_to(module, args, output):
    with torch.no_grad():
        output[:, :3] = 0.1
    return output


def noisy(module, args, output):  # as in NEFTune
    return output + torch.rand_like(output)


@unwatched
@pytest.mark.parametrize("hook", [written_to, noisy])
@each_family
def test_embeddings_changed_by_a_hook(family, hook):
    def run(model):
        model.get_input_embeddings().register_forward_hook(hook)
        return step(model, tiny_batch(family))

    same_steps(run, family)


@unwatched
def test_an_output_changed_before_the_next_block_gets_it():
    """If a hook changes the result of a block's last norm without a graph, the next block does not undo that."""

    def run(model):
        for block in model.bert.encoder.layer:
            block.output.register_forward_hook(written_to)
        return step(model, tiny_batch("bert"))

    for save in SAVES:
        same_steps(run, "bert", save, layers=4)


@unwatched
def test_a_module_that_does_something_else_when_it_runs_again_is_said():
    _, model = plain_and_ours()
    loss = model(**without_cache(model, tiny_batch("llama"))).loss
    model.model.layers[0].input_layernorm.forward = torch.sin
    with pytest.raises(RebuildError, match="LlamaRMSNorm saved"):
        loss.backward()
