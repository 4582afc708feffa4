"""What a forward saw: what cannot be restored, what is ignored, and what a recomputation leaves."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from helpers.changed import (
    LAYERS,
    PowerNorm,
    check_counts,
    each_engine,
    enabled,
    loss_of,
    outcome,
    plain_model,
    two_adapters,
    with_modules,
)
from helpers.steps import assert_same
from torch import nn

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.errors import ChangedBlockError, InPlaceError
from hf_ckpt.models.blocks import base_model, find_blocks

# --- what cannot be restored ----------------------------------------------------------------------------------------


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
    before = [module.training for module in model.modules()]
    change(model)
    rebuilds = isinstance(installation(model).regions["model.layers.1"], RebuildRegion)
    with pytest.raises((ChangedBlockError, InPlaceError), match=r"model\.layers\.1") as raised:
        loss.backward()
    assert type(raised.value) is (InPlaceError if rebuilds and change is stepped else ChangedBlockError)
    assert raised.value.block == "model.layers.1"
    if type(raised.value) is ChangedBlockError:
        assert "was overwritten between the forward and the backward" in str(raised.value)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("engine", ["full", "segments"])
def test_merging_adapters_is_a_named_error(engine):
    model = enabled(two_adapters(), engine)
    loss = loss_of(model)
    model.merge_adapter()
    with pytest.raises(ChangedBlockError, match="merged into its weights"):
        loss.backward()


@pytest.mark.parametrize("engine", ["full", "selective", "save attention"])
def test_parameters_that_are_not_used_may_change(engine):
    """Unused parameters may change: an optimizer may step one adapter before the backward of the other."""

    def run(model):
        model.set_adapter("default")
        actor = loss_of(model)
        model.set_adapter("critic")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "critic" in name:
                    parameter.add_(1.0)
        return outcome(model, actor)

    plain, ours = two_adapters(), enabled(two_adapters(), engine)
    found = []
    for model in (plain, ours):
        torch.manual_seed(3)
        found.append(run(model))
    assert_same(*found)
    check_counts(ours, 1)


# --- the model afterwards -------------------------------------------------------------------------------------------


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
    losses = [loss_of(model)]
    model.set_adapter("critic")
    model.eval()
    before = state_of(base_model(model).model.layers)
    losses[0].backward()
    assert state_of(base_model(model).model.layers) == before
    model.train()
    losses = [loss_of(model)]
    model.set_adapter("default")
    base_model(model).model.layers[0].mlp.down_proj.weight.data = torch.zeros(32, 64)
    before = state_of(base_model(model).model.layers)
    with pytest.raises(ChangedBlockError, match=r"down_proj\.weight"):
        losses[0].backward()
    assert state_of(base_model(model).model.layers) == before


def test_a_graph_that_is_kept_runs_again_from_the_same_buffers():
    def run(model):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        return outcome(model, loss)

    make = functools.partial(with_modules, PowerNorm)
    plain, ours = make(), enabled(make(), "full")
    assert_same(run(plain), run(ours))
    assert hf_ckpt.describe(ours).recomputed == dict.fromkeys(find_blocks(ours).modules, 2)


def test_a_buffer_that_begins_to_change():
    """If a buffer starts to change, that forward's backward is refused; later steps are correct."""
    make = functools.partial(with_modules, PowerNorm)
    plain, ours = make(), enabled(make(), "full")
    rate = [1.0]

    def figure(model):
        for module in model.modules():
            if isinstance(module, PowerNorm):
                module.forward = functools.partial(slow_figure, module, rate)

    for model in (plain, ours):
        figure(model)
        loss_of(model).backward()
    rate[0] = 0.5
    loss_of(plain)
    with pytest.raises(ChangedBlockError, match=r"mlp\.act_fn\.1\.figure"):
        loss_of(ours).backward()
    for model in (plain, ours):
        model.zero_grad(set_to_none=True)
    assert_same(outcome(plain, loss_of(plain)), outcome(ours, loss_of(ours)))


def slow_figure(module, rate, x):
    if rate[0] != 1.0:
        with torch.no_grad():
            module.figure.mul_(rate[0])
    return torch.sigmoid(x / module.figure.clone())


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
