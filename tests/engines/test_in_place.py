"""Blocks that work in place: gradients equal those without checkpointing, or an error names the block.

`selective` trusts the blocks of known models. For others it tries in a first forward to rebuild what it would drop,
and recomputes the whole block if that fails.
"""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from helpers import unknown
from helpers.offloading import regions
from helpers.steps import assert_same, enable, step, without_cache
from helpers.toys import SAVES, WEIGHT, each_family, hooked, plain_and_ours, same_steps, same_toys, toy
from helpers.unknown import steps_of, working
from torch import nn
from torch.nn import functional

import hf_ckpt
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.offload import Mover, OffloadRegion
from hf_ckpt.engines.rebuild import values
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.errors import InPlaceError, RebuildError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch

pytestmark = pytest.mark.usefixtures("unwatched")


def planned(work, spec, dtype=torch.float32):
    """A model of blocks that run `work`, with a plan enabled."""
    model = working(work, dtype)
    hf_ckpt.install(model, spec)
    enable(model)
    return model


# --- unknown code -----------------------------------------------------------------------------------------------------

# What a block does -> whether `selective` falls back to recomputing it, in (float32, bfloat16); None if autograd
# refuses it.
WORKING_IN_PLACE = {
    unknown.adds_to_its_input: (False, False),
    unknown.scales_its_input: (False, False),
    unknown.adds_a_norm_to_its_input: (None, True),
    unknown.adds_to_a_residual: (None, False),
    unknown.relu_in_place: (False, False),
    unknown.masks_scores: (False, False),
    unknown.changes_an_operand: (False, False),
    unknown.clamps_without_a_graph: (True, True),
    unknown.writes_data: (True, True),
    unknown.writes_data_of_a_norm: (True, True),
    unknown.drops_in_place: (False, False),
    unknown.changes_a_norm: (False, False),
    unknown.clamps_what_is_saved: (False, False),
    unknown.adds_its_norm: (True, True),
    unknown.adds_to_what_it_has_read: (True, True),
    unknown.drops_its_input: (False, False),
    unknown.writes_to_parts: (False, False),
    unknown.adds_rows: (False, False),
}
CHANGES_ITS_INPUT = {
    *(unknown.adds_to_its_input, unknown.scales_its_input, unknown.drops_its_input),
    *(unknown.adds_a_norm_to_its_input, unknown.adds_its_norm, unknown.adds_to_what_it_has_read),
}
"""What a block cannot be recomputed from, so `full` refuses it."""
CASES = [
    pytest.param(work, dtype, falls_back, id=f"{work.__name__}-{name}")
    for work, found in WORKING_IN_PLACE.items()
    for (name, dtype), falls_back in zip((("fp32", torch.float32), ("bf16", torch.bfloat16)), found, strict=True)
]


@pytest.mark.parametrize(("work", "dtype", "falls_back"), CASES)
def test_what_trains_without_checkpointing_trains_with_it(work, dtype, falls_back, caplog):
    """Blocks that work in place train as without checkpointing, and do not get silently different gradients."""
    if falls_back is None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            steps_of(working(work, dtype))
        return
    expected = steps_of(working(work, dtype))
    for spec in ({"policy": "full"}, *({"policy": "selective", "save": save} for save in SAVES)):
        model = planned(work, spec, dtype)
        caplog.clear()
        if work in CHANGES_ITS_INPUT and (falls_back or spec["policy"] == "full"):
            with pytest.raises(InPlaceError, match=r"block 'layers\.\d'.*was changed in place by .*`none`"):
                steps_of(model)
            continue
        for before, after in zip(expected, steps_of(model), strict=True):
            assert_same(before, after, f"{work.__name__} {spec} {dtype}")
        said = [record.getMessage() for record in caplog.records if "cannot recompute" in record.getMessage()]
        if spec["policy"] == "full":
            assert set(hf_ckpt.describe(model).recomputed.values()) == {3}
            assert not said
        elif falls_back:
            assert [region.recomputed for region in regions(model)] == [2] * 3  # as a whole, from the second step on
            assert [message.split("'")[1] for message in said] == ["layers.0", "layers.1", "layers.2"]
            assert hf_ckpt.describe(model).dropped_bytes == 0
        else:
            assert not said
            assert not any(region.failed or region.trial for region in regions(model))
            assert all(region.kept or region.dropped for region in regions(model))
            assert all(region.forwards == 3 for region in regions(model))


def test_the_warning_names_block_and_operation(caplog):
    model = planned(unknown.writes_data, {"policy": "selective"})
    steps_of(model, 1)
    assert "block 'layers.1' cannot recompute what " in caplog.text
    assert "works in place. All is kept there in this step" in caplog.text
    assert hf_ckpt.describe(model).kept_bytes > 0
    steps_of(model, 1)
    assert hf_ckpt.describe(model).kept_bytes == 0


@pytest.mark.parametrize(
    "spec", [{"policy": "full"}, {"policy": "selective"}, {"policy": "selective", "save": ["attention"]}], ids=str
)
@pytest.mark.parametrize(
    "work",
    [
        lambda block, hidden: functional.silu(block.one(hidden)) * block.two(functional.gelu(hidden)),
        unknown.drops_in_place,
    ],
    ids=["products", "dropout"],
)
def test_a_trial_leaves_nothing_behind(work, spec):
    """Once its block has ended, the trial in the first forward holds no more memory than later forwards."""
    model = planned(work, spec)
    inputs, held = torch.randn(2, 8, 16), []
    for _ in range(3):
        with LiveBytes(model) as live:
            loss = model(inputs).sum()
            held.append(live.current_bytes - live.start_bytes)
            loss.backward()
        model.zero_grad(set_to_none=True)
    assert held[0] == held[1] == held[2] > 0
    assert all(region.forwards == 3 for region in regions(model))


def test_hidden_states_changed_behind_a_block():
    """Changing a block's input after its forward is an error of torch: recomputations would use it."""
    hidden = torch.ones(4, requires_grad=True) * 1
    output = FullRegion("block")(torch.sin, hidden)
    hidden.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_under_full_selective_such_blocks_run_again_as_under_full():
    model = planned(unknown.relu_in_place, {"policy": "full+selective"})
    assert {type(region) for region in regions(model)} == {FullRegion}


def test_what_no_backward_needs_may_change_in_place():
    output = FullRegion("block")(lambda hidden, other: other.add_(hidden), torch.ones(2), torch.ones(2))
    assert output.tolist() == [2.0, 2.0]


@pytest.mark.compat
@pytest.mark.parametrize("work", [unknown.writes_data, unknown.clamps_without_a_graph])
def test_under_the_users_hooks_nothing_is_dropped(work):
    """Gradients of unknown blocks are right even if the user's hooks hide changes behind autograd's back."""
    models = (working(work), planned(work, "selective"))
    found = []
    for model in models:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
            found.append(steps_of(model))
    for expected, got in zip(*found, strict=True):
        assert_same(expected, got)
    assert not any(region.dropped or region.failed for region in regions(models[1]))


def test_memory_that_runs_out_in_a_trial_is_no_proof(monkeypatch):
    model = planned(unknown.writes_data_of_a_norm, "selective")

    def runs_out(value):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(values, "_hand_out", runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        steps_of(model, 1)
    assert not any(region.failed for region in regions(model))


# --- known code -------------------------------------------------------------------------------------------------------

UNSEEN = {unknown.clamps_without_a_graph, unknown.writes_data, unknown.writes_data_of_a_norm}
"""Changes behind autograd's back: no known model makes them, and only a trial finds them."""
KNOWN = [work for work, found in WORKING_IN_PLACE.items() if None not in found and work not in UNSEEN]
HARMLESS = {unknown.scales_its_input, unknown.relu_in_place, unknown.masks_scores, unknown.adds_rows}
"""Changes that cause no error if results of linear layers and attention are kept."""


REGIONS = {
    **{"+".join(save): functools.partial(RebuildRegion, save=tuple(save)) for save in SAVES},
    "moved": lambda block: RebuildRegion(block, save=("linear",), mover=Mover()),
    "offload": lambda block: OffloadRegion(block, Mover()),
}


@pytest.mark.compat
@pytest.mark.parametrize("kind", REGIONS)
@pytest.mark.parametrize("work", KNOWN, ids=lambda work: work.__name__)
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
        assert kind != "offload" or work not in CHANGES_ITS_INPUT
    assert region.forwards == 1
    assert kind == "offload" or region.kept or region.dropped
    if lanes:
        gc.collect()
        assert region.mover.held_bytes == 0


def test_a_change_in_place_of_what_stays_is_found():
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


@pytest.mark.parametrize("hook", [written_to, noisy])
@each_family
def test_embeddings_changed_by_a_hook(family, hook):
    """Changes that a hook makes to embeddings are kept: looking embeddings up again would undo them."""

    def run(model):
        model.get_input_embeddings().register_forward_hook(hook)
        return step(model, tiny_batch(family))

    same_steps(run, family)


def test_an_output_changed_before_it_is_handed_over():
    """If a hook changes the result of a block's last norm without a graph, the next block does not undo that."""

    def run(model):
        for block in model.bert.encoder.layer:
            block.output.register_forward_hook(written_to)
        return step(model, tiny_batch("bert"))

    for save in SAVES:
        same_steps(run, "bert", save, layers=4)


def test_a_module_that_does_something_else_when_it_runs_again_is_said():
    _, model = plain_and_ours()
    loss = model(**without_cache(model, tiny_batch("llama"))).loss
    model.model.layers[0].input_layernorm.forward = torch.sin
    with pytest.raises(RebuildError, match="LlamaRMSNorm saved"):
        loss.backward()
