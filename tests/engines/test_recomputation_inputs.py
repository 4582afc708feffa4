"""What a block reads beside tensors: containers that it changes, and context variables."""

from __future__ import annotations

import contextvars

import pytest
import torch
from helpers.museum import LAYERS, exhibit_model, work
from helpers.steps import assert_same, enable, outcome

import hf_ckpt

RUN_AGAIN = {
    "full": {"policy": "full"},
    "full+selective": {"policy": "full+selective"},
    "segments": {"segments": 2},
    "offload": {"policy": "offload"},
}
"""Specs under which blocks run a second time."""
SPECS = {**RUN_AGAIN, "selective": {"policy": "selective"}}
each_engine = pytest.mark.parametrize("engine", SPECS)


def pops_a_list(block, hidden, given):
    return work(block, hidden, given.pop(0))


def pops_a_dict_in_a_tuple(block, hidden, given):
    return work(block, hidden, given[0].popitem()[1])


def adds_its_result(block, hidden, given):
    given.append(work(block, hidden, given[-1].mean(1, keepdim=True)))
    return given[-1]


def shifts():
    return [torch.linspace(-1, number, 16).expand(2, 1, 16) for number in range(LAYERS)]


GIVEN = {
    pops_a_list: shifts,
    pops_a_dict_in_a_tuple: lambda: (dict(enumerate(shifts())),),
    adds_its_result: lambda: shifts()[:1],
}
"""What a block does -> what it is given."""


def trained(run, given, spec=None):
    """Two steps. Returns gradients, what the model has left of the container, and the model."""
    model = exhibit_model()
    for layer in model.layers:
        layer.work = run
    if spec is not None:
        hf_ckpt.install(model, spec)
        enable(model)
    left = []
    for number in range(2):
        container = given()
        hidden = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(number))
        loss = model(hidden, container).square().mean()
        if isinstance(container, list):
            loss = loss + sum(value.square().mean() for value in container)
        loss.backward(retain_graph=True)
        loss.backward()  # recomputes once more
        left.append(str(container))
    return outcome(model, loss), left, model


def check_recomputed(model):
    assert all(hf_ckpt.describe(model).recomputed.values())
    assert len(hf_ckpt.describe(model).recomputed) == LAYERS


@each_engine
@pytest.mark.parametrize("run", GIVEN, ids=lambda run: run.__name__)
def test_a_container_is_changed_once(run, engine):
    """A recomputation gets containers as they were given, and the caller's are changed by the forward alone."""
    expected, left, _ = trained(run, GIVEN[run])
    got, left_by_ours, model = trained(run, GIVEN[run], SPECS[engine])
    assert_same(expected, got)
    assert left_by_ours == left
    check_recomputed(model)


SHIFT = contextvars.ContextVar("shift")


@each_engine
def test_a_context_variable_has_its_value_of_the_forward(engine):
    def reads_the_variable(block, hidden, given):
        return work(block, hidden, SHIFT.get())

    class Resets:
        """Resets the variable when the forward has ended."""

        def __init__(self, model):
            model.register_forward_pre_hook(self.begin)
            model.register_forward_hook(self.end)

        def begin(self, *args):
            self.token = SHIFT.set(shifts()[1])

        def end(self, *args):
            SHIFT.reset(self.token)

    def run(spec):
        model = exhibit_model()
        Resets(model)
        for layer in model.layers:
            layer.work = reads_the_variable
        if spec is not None:
            hf_ckpt.install(model, spec)
            enable(model)
        loss = model(torch.ones(2, 8, 16), None).square().mean()
        loss.backward()
        return outcome(model, loss), model

    got, model = run(SPECS[engine])
    assert_same(run(None)[0], got)
    check_recomputed(model)
