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
    assert [record.name for record in ACTIONS.values()] == list(ACTIONS)
    named = (KEEP, SELECTIVE, FULL, FULL_SELECTIVE, OFFLOAD, COMPILED)
    assert tuple(action.kind for action in named) == tuple(ACTIONS)
    assert set(reading.POLICIES) == {"none", "budget", "auto"} | ACTIONS.keys() - {"keep", "compiled"}


@each_record
def test_a_record_is_complete(record):
    """Its engine creates a block's function, and its forms have only its own options."""
    forms = [*record.candidates, *record.offloads]
    forms += [COMPILED] if record.name == COMPILED.kind else []
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
    """Candidates that keep most come first."""
    attention = Action("selective", ("attention",))
    assert candidates() == (KEEP, SELECTIVE, attention, FULL, FULL_SELECTIVE)
    moved = dataclasses.replace(SELECTIVE, moved=True)
    assert list(offloads().items()) == [(FULL, OFFLOAD), (SELECTIVE, moved)]  # those that keep least come first


def plan_with(**row):
    """A saved plan of one block."""
    rows = [{"block": "model.layers.0", "kind": "LlamaDecoderLayer", **row}]
    return {"hf_ckpt_plan": 1, "family": "llama", "model": "LlamaForCausalLM", "stacks": {"decoder": rows}}


@each_record
@pytest.mark.parametrize("option", WRITTEN)
def test_a_plan_file_has_the_options_of_the_record(record, option):
    needed = {"share": 0.5} if record.name == COMPILED.kind else {}
    given = plan_with(action=record.name, **{**needed, option: WRITTEN[option]})
    if option in record.options:
        plan = Plan.from_dict(given)
        ((_, action),) = plan.actions
        assert getattr(action, option) == (("linear",) if option == "save" else WRITTEN[option])
        assert plan.to_dict() == given
    else:
        with pytest.raises(PlanMismatchError, match=f"`{option}`"):
            Plan.from_dict(given)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        *(({"action": "compiled", "share": share}, "from 0 to 1") for share in (None, -0.1, 1.5, "half", True)),
        *(({"action": name}, "must be one of") for name in ("none", "budget", "Full", "", None, ["full"])),
    ],
)
def test_a_plan_file_with_another_action_or_share_is_refused(row, said):
    with pytest.raises(PlanMismatchError, match=said):
        Plan.from_dict(plan_with(**row))
