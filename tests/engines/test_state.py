"""What a forward saw: what a recomputation restores, what it cannot restore, what is ignored, and what it leaves.

`parity/test_matrix.py` compares gradients after most changes between forward and backward.
"""

from __future__ import annotations

import contextlib
import contextvars

import pytest
import torch
from helpers.adapters import two_adapters
from helpers.custom import LAYERS, custom_loss, custom_model, work
from helpers.steps import assert_same, outcome, planned, step, without_cache
from torch import nn

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.errors import ChangedBlockError, InPlaceError
from hf_ckpt.models.blocks import base_model
from hf_ckpt.models.tiny import tiny_batch, tiny_model

ENGINES = {
    "full": {"policy": "full"},
    "full+selective": {"policy": "full+selective", "save": ["attention"]},
    "segments": {"segments": 2},
    "offload": {"policy": "offload"},
    "selective": {"policy": "selective"},
    "save attention": {"policy": "selective", "save": ["attention"]},
}
each_engine = pytest.mark.parametrize("engine", ENGINES)


def enabled(model, engine):
    return planned(model, ENGINES[engine])


def loss_of(model):
    return model(**without_cache(model, tiny_batch("llama"))).loss


# --- arguments and context variables ----------------------------------------------------------------------------------


def shifts():
    return [torch.linspace(-1, number, 16).expand(2, 1, 16) for number in range(LAYERS)]


def pops_a_list(block, hidden, shift):
    return work(block, hidden, shift.pop(0))


def pops_a_dict_in_a_tuple(block, hidden, shift):
    return work(block, hidden, shift[0].popitem()[1])


def adds_its_result(block, hidden, shift):
    shift.append(work(block, hidden, shift[-1].mean(1, keepdim=True)))
    return shift[-1]


GIVEN = {
    pops_a_list: shifts,
    pops_a_dict_in_a_tuple: lambda: (dict(enumerate(shifts())),),
    adds_its_result: lambda: shifts()[:1],
}
"""What a block does -> what it is given."""


@each_engine
@pytest.mark.parametrize("run", GIVEN)
def test_a_container_is_changed_once(run, engine):
    """A recomputation gets containers as they were given, and the caller's are changed by the forward alone."""
    found = []
    for model in (custom_model(run), enabled(custom_model(run), engine)):
        container = GIVEN[run]()
        loss = model(torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)), container).square().mean()
        if isinstance(container, list):
            loss = loss + sum(value.square().mean() for value in container)
        for _ in range(2):  # recomputes twice
            loss.backward(retain_graph=True)
        found.append((outcome(model, loss), str(container)))
    (expected, left), (got, left_by_ours) = found
    assert_same(expected, got)
    assert left_by_ours == left
    assert all(hf_ckpt.describe(model).recomputed.values())


SHIFT = contextvars.ContextVar("shift")


@each_engine
def test_a_context_variable_has_its_value_of_the_forward(engine):
    """The variable is reset when the forward has ended."""
    found = []
    for plan in (lambda model: model, lambda model: enabled(model, engine)):
        model, tokens = custom_model(lambda block, hidden, shift: work(block, hidden, SHIFT.get())), []
        model.register_forward_pre_hook(lambda *args, tokens=tokens: tokens.append(SHIFT.set(shifts()[1])))
        model.register_forward_hook(lambda *args, tokens=tokens: SHIFT.reset(tokens.pop()))
        loss = custom_loss(plan(model))
        loss.backward()
        found.append(outcome(model, loss))
    assert_same(*found)
    assert all(hf_ckpt.describe(model).recomputed.values())


# --- values that are gone, or change nothing --------------------------------------------------------------------------


def given_other_values(model):
    for parameter in model.model.layers[1].parameters():
        parameter.data = parameter.data * 2


def stepped(model):
    with torch.no_grad():
        for parameter in model.model.layers[1].parameters():
            parameter.mul_(2)


@each_engine
@pytest.mark.parametrize("change", [given_other_values, stepped])
def test_overwritten_values_are_an_error_that_names_them(change, engine):
    model = enabled(tiny_model("llama"), engine)
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
    model = enabled(two_adapters(tiny_model("llama")), engine)
    loss = loss_of(model)
    model.merge_adapter()
    with pytest.raises(ChangedBlockError, match="merged into its weights"):
        loss.backward()


@pytest.mark.parametrize("engine", ["full", "selective", "save attention"])
def test_parameters_that_are_not_used_may_change(engine):
    """An optimizer may step one adapter before the backward of the other."""
    found = []
    for model in (two_adapters(tiny_model("llama")), enabled(two_adapters(tiny_model("llama")), engine)):
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


@pytest.mark.trap(36)
def test_the_model_stays_as_the_change_left_it():
    """A recomputation leaves the model as it was after the change, even if it raises an error."""
    model = enabled(two_adapters(tiny_model("llama")), "full")
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
    model = enabled(tiny_model("llama"), "full")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            vars(module)["_hf_hook"] = None  # accelerate's mark on modules that it moves
    loss = loss_of(model)
    given_other_values(model)
    with contextlib.suppress(RuntimeError):
        loss.backward()
    assert set(hf_ckpt.describe(model).recomputed.values()) == {1}


def test_counts_of_deepspeed_go_on():
    """DeepSpeed's counters on modules also count recomputations; they are neither compared nor restored."""
    model = enabled(tiny_model("llama"), "full")
    inner = model.model.layers[0].self_attn
    inner.applied_pre_backward_ref_cnt = 0

    def count(module, args, output):
        module.applied_pre_backward_ref_cnt += 1

    inner.register_forward_hook(count)
    loss = loss_of(model)
    model.eval()  # so that some state is restored
    loss.backward()
    assert inner.applied_pre_backward_ref_cnt == 2


@pytest.mark.skipif(not compat.transformers.HOOKS_STAY_OUTSIDE, reason="a block runs together with its hooks")
def test_a_hook_on_the_block_itself_is_no_setting_of_it():
    """Such as those of a measured step: nothing is walked over anew. A hook inside the block is a setting."""
    model, batch = tiny_model("llama"), tiny_batch("llama")
    planned(model, "full")
    step(model, batch)
    block = model.model.layers[1]
    region = installation(model).regions["model.layers.1"]
    seen = [region.settings]
    for module in (block, block.mlp):
        module.register_forward_hook(lambda *_: None)
        step(model, batch)
        seen.append(region.settings)
    assert seen[1] is seen[0]
    assert seen[2] is not seen[1]
