"""What a block changes in place: the same gradients, or an error that names the block; never other gradients."""

from __future__ import annotations

import pytest
import torch
from helpers.steps import assert_same, outcome, step, without_cache
from helpers.toys import (
    SAVES,
    SCALE,
    WEIGHT,
    Norm,
    each_family,
    each_save,
    hooked,
    plain_and_ours,
    same_steps,
    same_toys,
    toy,
)
from torch import nn
from torch.nn import functional

from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.errors import InPlaceError, ReplayError
from hf_ckpt.models.tiny import tiny_batch


def _changed_without_a_graph(x):
    y = functional.silu(x)
    with torch.no_grad():
        y.clamp_(-0.1, 0.5)
    return functional.silu(y) * y


def _norm_changed_without_a_graph(x, norm=Norm()):  # noqa: B008
    y = norm(x)
    with torch.no_grad():
        y.mul_(2.0)
    return functional.silu(y) * y


def _input_scaled(x):
    x.mul_(2.0)
    return functional.silu(x) * x


def _input_added_to(x):
    y = torch.tanh(x)
    x.add_(1.0)
    return y * 2.0 + x


def _residual(x):
    x += (x.detach().clone().view(-1, 16) @ WEIGHT).view(2, 8, 16)
    return functional.silu(x) * x


def _residual_after_a_norm(x, norm=Norm()):  # noqa: B008
    hidden = norm(x.clone())
    x.add_(hidden)
    return functional.silu(x) * x


def _view_changed(x):
    y = functional.silu(x)
    y[:, :4].mul_(3.0)
    return functional.silu(y) * y


def _part_written(x):
    y = functional.silu(x) * 2.0
    y[:, 0] = 0.0
    return functional.silu(y) * y


IN_PLACE = {
    "relu_": lambda x: functional.relu_(functional.silu(x) * x) * SCALE,
    "dropout": lambda x: functional.silu(functional.dropout(functional.silu(x) * 2.0, 0.5, True, True)) * SCALE,
    "dropout of the input": lambda x: functional.silu(functional.dropout(x, 0.5, True, True)) * SCALE,
    "input scaled": _input_scaled,
    "input added to": _input_added_to,
    "residual": _residual,
    "residual after a norm": _residual_after_a_norm,
    "view": _view_changed,
    "part written": _part_written,
    "without a graph": _changed_without_a_graph,
    "norm, without a graph": _norm_changed_without_a_graph,
}


HARMLESS = ("relu_", "dropout", "view", "part written", "input scaled", "residual")
"""Changes that raise no error where the results of linear layers and of attention stay."""


@pytest.mark.compat
@each_save
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_change_in_place_is_harmless_or_said(name, save):
    """What autograd accepts gives the same gradients here, or an error that names the block; never other gradients."""
    block = IN_PLACE[name]
    expected = toy(block)
    region = RebuildRegion("toy", save=tuple(save))
    try:
        found = toy(block, region)
    except InPlaceError as error:
        assert "block 'toy'" in str(error)  # noqa: PT017
        assert name not in HARMLESS or save != SAVES[0]
    else:
        assert_same(expected, found)
    assert region.forwards == 1
    assert region.kept or region.dropped


def test_what_autograd_refuses_is_refused():
    """`silu` saves its input, which is then changed: autograd raises an error without hf_ckpt, too."""

    def block(x):
        y = functional.silu(x)
        x.add_(y)
        return functional.silu(x) * x

    with pytest.raises(RuntimeError, match="inplace operation"):
        toy(block)
    with pytest.raises(InPlaceError, match="changed in place"):
        toy(block, RebuildRegion("toy", save=("linear", "attention")))


@each_family
def test_embeddings_changed_by_a_hook(family):
    """A hook writes into the embeddings without a graph: looking them up again would undo it."""

    def write(module, args, output):
        with torch.no_grad():
            output[:, :3] = 0.1
        return output

    def run(model):
        model.get_input_embeddings().register_forward_hook(write)
        return step(model, tiny_batch(family))

    same_steps(run, family)


def test_noisy_embeddings():
    """NEFTune adds noise to what the embedding returns."""

    def run(model):
        model.get_input_embeddings().register_forward_hook(lambda module, args, out: out + torch.rand_like(out))
        return step(model, tiny_batch("llama"))

    same_steps(run)


def test_a_change_in_place_of_what_stays_is_found():
    """Autograd's own check does not see tensors that hooks hold."""

    def block(x):
        middle = torch.cumprod(x, -1)  # has no row
        known = functional.silu(middle)  # saves `middle`
        out = known * known
        with torch.no_grad():
            middle.mul_(2)
        return out

    with pytest.raises(InPlaceError, match=r"block 'toy'.*changed in place"):
        toy(block, RebuildRegion("toy", save=()))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_norm_whose_parameter_is_changed_before_backward_is_said(name):
    """An optimizer may step between forward and backward. Autograd itself refuses it for the weight only."""
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


def test_an_output_changed_before_it_is_handed_over():
    """A block that ends in a norm and changes its result without a graph: the next block must not undo that."""

    def run(model):
        for block in model.bert.encoder.layer:
            block.output.register_forward_hook(halve)
        return step(model, tiny_batch("bert"))

    def halve(module, args, output):
        with torch.no_grad():
            output.mul_(0.5)

    for save in SAVES:
        same_steps(run, "bert", save, layers=4)


def test_what_is_frozen_between_forward_and_backward_runs_again_as_it_was_trained():
    def run(model):
        loss = model(**without_cache(model, tiny_batch("llama"))).loss
        for parameter in model.model.layers[0].input_layernorm.parameters():
            parameter.requires_grad_(False)
        loss.backward()
        return outcome(model, loss)

    same_steps(run)


def test_a_module_that_does_something_else_when_it_runs_again_is_said():
    _, model = plain_and_ours()
    loss = model(**without_cache(model, tiny_batch("llama"))).loss
    model.model.layers[0].input_layernorm.forward = torch.sin
    with pytest.raises(ReplayError, match="LlamaRMSNorm saved"):
        loss.backward()
