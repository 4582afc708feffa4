"""What a forward saw: what cannot be restored, what is ignored, and what a recomputation leaves."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers.changed import LAYERS, each_engine, enabled, loss_of, plain_model, two_adapters
from helpers.steps import assert_same, outcome
from torch import nn

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.errors import ChangedBlockError, InPlaceError
from hf_ckpt.models.blocks import base_model


def given_other_values(model):
    with torch.no_grad():
        for parameter in model.model.layers[1].parameters():
            parameter.data = parameter * 2


def stepped(model):
    with torch.no_grad():
        for parameter in model.model.layers[1].parameters():
            parameter.mul_(2)


@each_engine
@pytest.mark.parametrize("change", [given_other_values, stepped], ids=lambda change: change.__name__)
def test_values_that_are_gone_are_a_named_error(change, engine):
    model = enabled(plain_model(), engine)
    loss = loss_of(model)
    change(model)
    rebuilds = isinstance(installation(model).regions["model.layers.1"], RebuildRegion)
    error = InPlaceError if rebuilds and change is stepped else ChangedBlockError
    with pytest.raises(error, match=r"model\.layers\.1") as raised:
        loss.backward()
    assert raised.value.block == "model.layers.1"
    assert error is InPlaceError or "was overwritten between the forward and the backward" in str(raised.value)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("engine", ["full", "segments"])
def test_merging_adapters_is_a_named_error(engine):
    model = enabled(two_adapters(), engine)
    loss = loss_of(model)
    model.merge_adapter()
    with pytest.raises(ChangedBlockError, match="merged into its weights"):
        loss.backward()


@pytest.mark.parametrize("engine", ["full", "selective", "save attention"])
def test_parameters_that_are_not_used_may_change(engine):
    """An optimizer may step one adapter before the backward of the other."""
    found = []
    for model in (two_adapters(), enabled(two_adapters(), engine)):
        torch.manual_seed(3)
        model.set_adapter("default")
        loss = loss_of(model)
        model.set_adapter("critic")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "critic" in name:
                    parameter.add_(1.0)
        loss.backward()
        model.requires_grad_(True)
        found.append(outcome(model, loss))
    assert_same(*found)
    assert all(hf_ckpt.describe(model).recomputed.values())


def state_of(model):
    """Everything that a change may affect."""
    return [
        (
            {name: value for name, value in vars(module).items() if not isinstance(value, dict)},
            [list(value.items()) for value in vars(module).values() if isinstance(value, dict)],
            [parameter.requires_grad for parameter in module.parameters()],
        )
        for module in model.modules()
    ]


def test_the_model_stays_as_the_change_left_it():
    """A recomputation leaves the model as it was after the change, even if it raises an error."""
    model = enabled(two_adapters(), "full")
    layers = base_model(model).model.layers
    loss = loss_of(model)
    model.set_adapter("critic")
    model.eval()
    before = state_of(layers)
    loss.backward()
    assert state_of(layers) == before
    model.train()
    loss = loss_of(model)
    model.set_adapter("default")
    layers[0].mlp.down_proj.weight.data = torch.zeros(32, 64)
    before = state_of(layers)
    with pytest.raises(ChangedBlockError, match=r"down_proj\.weight"):
        loss.backward()
    assert state_of(layers) == before


def test_nothing_is_compared_where_parameters_come_and_go():
    model = enabled(plain_model(), "full")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            vars(module)["_hf_hook"] = None  # accelerate's mark on modules that it moves
    loss = loss_of(model)
    given_other_values(model)
    with contextlib.suppress(RuntimeError):
        loss.backward()
    assert sum(hf_ckpt.describe(model).recomputed.values()) == LAYERS


def test_counts_of_deepspeed_go_on():
    """DeepSpeed's counters on modules also count recomputations; they are neither compared nor restored."""
    model = enabled(plain_model(), "full")
    inner = model.model.layers[0].self_attn
    inner.applied_pre_backward_ref_cnt = 0

    def count(module, args, output):
        module.applied_pre_backward_ref_cnt += 1

    inner.register_forward_hook(count)
    loss = loss_of(model)
    model.eval()  # so that some state is restored
    loss.backward()
    assert inner.applied_pre_backward_ref_cnt == 2
