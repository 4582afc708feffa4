"""Each action is one record: its engine, its options in plan files, and what a budget chooses from."""

from __future__ import annotations

import dataclasses
import pkgutil

import pytest

from hf_ckpt.engines.region import Region, Request, make
from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.spec import reading
from hf_ckpt.spec.actions import (
    ACTIONS,
    COMPILED,
    FULL,
    FULL_SELECTIVE,
    KEEP,
    OFFLOAD,
    SELECTIVE,
    Action,
    candidates,
    offloads,
)
from hf_ckpt.spec.plan import Plan

# A value for each option of an action, as in a plan file.
WRITTEN = {"save": ["linear"], "moved": True, "segment": 0, "share": 0.25}
each_record = pytest.mark.parametrize("record", ACTIONS.values(), ids=ACTIONS)


def test_the_records():
    named = (KEEP, SELECTIVE, FULL, FULL_SELECTIVE, OFFLOAD, COMPILED)
    assert [record.name for record in ACTIONS.values()] == list(ACTIONS) == [action.kind for action in named]
    assert set(reading.POLICIES) == {"none", "budget", "auto"} | ACTIONS.keys() - {"keep", "compiled"}


@each_record
def test_a_record_is_complete(record):
    """Its engine creates a block's function, and its forms have only its own options."""
    forms = [*record.candidates, *record.offloads]
    assert forms
    assert bool(record.engine) == (record.name != "keep")
    assert not record.hooks or callable(pkgutil.resolve_name(record.hooks))
    defaults = {field.name: field.default for field in dataclasses.fields(Action) if field.name in record.options}
    assert defaults.keys() == set(record.options)
    for form in forms:
        assert dataclasses.replace(form, **defaults) == Action(record.name)
        if record.engine:
            assert isinstance(make(Request("block", form)), Region)


def test_what_a_budget_chooses_from():
    """Candidates that keep most come first, and of those with tensors in host memory, those that keep least."""
    attention = Action("selective", ("attention",))
    assert candidates() == (KEEP, SELECTIVE, attention, FULL, FULL_SELECTIVE)
    assert list(offloads().items()) == [(FULL, OFFLOAD), (SELECTIVE, dataclasses.replace(SELECTIVE, moved=True))]


@each_record
@pytest.mark.parametrize("option", WRITTEN)
def test_a_plan_file_has_the_options_of_the_record(record, option):
    row = {"block": "model.layers.0", "kind": "LlamaDecoderLayer", "action": record.name, option: WRITTEN[option]}
    row |= {"share": 0.25} if record.name == COMPILED.kind else {}
    given = {"hf_ckpt_plan": 1, "family": "llama", "model": "LlamaForCausalLM", "stacks": {"decoder": [row]}}
    if option in record.options:
        plan = Plan.from_dict(given)
        ((_, action),) = plan.actions
        assert getattr(action, option) == (("linear",) if option == "save" else WRITTEN[option])
        assert plan.to_dict() == given
    else:
        with pytest.raises(PlanMismatchError, match=f"`{option}`"):
            Plan.from_dict(given)
