"""Each action is one record: all other code finds actions there, so a new record is a new action."""

from __future__ import annotations

import dataclasses
import pkgutil

import pytest
from helpers.steps import assert_same, enable, step

import hf_ckpt
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.region import Hook, Region, Request, make
from hf_ckpt.errors import PlanMismatchError, SpecError
from hf_ckpt.models.tiny import tiny_batch, tiny_model
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
    ActionKind,
    candidates,
    offloads,
)
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec
from hf_ckpt.training.guard import tighter_plan

# A value for each option of an action, as in a plan file.
WRITTEN = {"save": ["linear"], "moved": True, "segment": 0, "share": 0.25}
each_record = pytest.mark.parametrize("record", ACTIONS.values(), ids=ACTIONS)


# --- the records ----------------------------------------------------------------------------------------------------


def test_the_records():
    assert list(ACTIONS) == ["keep", "selective", "full", "full+selective", "offload", "compiled"]
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
    assert (record.next is None) == (not record.next_in_words)
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


# --- plan files -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("share", [None, -0.1, 1.5, "half", True])
def test_a_plan_file_with_another_share_is_refused(share):
    with pytest.raises(PlanMismatchError, match="from 0 to 1"):
        Plan.from_dict(plan_with(action="compiled", share=share))


@pytest.mark.parametrize("name", ["none", "budget", "Full", "", "twice", None, ["full"]])
def test_a_plan_file_with_another_action_is_refused(name):
    with pytest.raises(PlanMismatchError):
        Plan.from_dict(plan_with(action=name))


# --- a new record ---------------------------------------------------------------------------------------------------

TWICE = Action("twice")


class Twice(FullRegion):
    """Recomputes the block like `full`, and counts its hook's calls."""

    hooked = 0


def make_twice(request):
    return Twice(request.block, **request.options)


def hooks_of_twice(regions, found, owners):
    def count(module, args):
        for region in regions:
            region.hooked += 1

    return [Hook(owner, count, "before") for owner in owners]


@pytest.fixture
def twice(monkeypatch):
    """Add a fifth action, as if its record had existed when hf_ckpt was imported."""
    record = ActionKind(
        "twice",
        engine=f"{__name__}:make_twice",
        hooks=f"{__name__}:hooks_of_twice",
        options=("moved",),
        candidates=(TWICE,),
        offloads={dataclasses.replace(TWICE, moved=True): TWICE},
        next=FULL,
        next_in_words="`full` for blocks that ran twice",
    )
    with pytest.raises(SpecError, match="'twice'"):
        Spec.parse({"policy": "twice"})
    monkeypatch.setitem(ACTIONS, "twice", record)
    # These are derived from the records' names on import.
    for readers in (reading.READERS, reading.RULE_READERS):
        monkeypatch.setitem(readers, "policy", reading.one_of(*reading.POLICIES, "twice"))
    return record


def test_a_new_record_is_carried_out(twice, tmp_path):
    """A new record works from spec to plan file to model, and in descriptions."""
    expected = step(tiny_model("llama"), tiny_batch("llama"))
    model = tiny_model("llama")
    plan = hf_ckpt.install(model, {"rules": [{"layers": "1-2", "policy": "twice"}]}).plan
    assert [action for _, action in plan.actions] == [KEEP, TWICE, TWICE, KEEP]
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    hf_ckpt.install(model, {"plan": str(tmp_path / "plan.json")})
    enable(model)
    assert_same(expected, step(model, tiny_batch("llama")))
    found = hf_ckpt.describe(model)
    assert found.forwards == found.recomputed == {"model.layers.1": 1, "model.layers.2": 1}
    assert "keep 0, 3; twice 1-2" in str(found)
    regions = [vars(layer)["_gradient_checkpointing_func"] for layer in model.model.layers[1:3]]
    assert [(type(region), region.hooked) for region in regions] == [(Twice, 1), (Twice, 1)]
    hf_ckpt.uninstall(model)
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_a_new_record_is_found_by_the_planner(twice):
    assert candidates()[-1] == TWICE
    assert offloads()[TWICE] == dataclasses.replace(TWICE, moved=True)
    plan = Plan.from_dict(plan_with(action="twice", moved=True))
    assert plan.actions[0][1] == dataclasses.replace(TWICE, moved=True)
    with pytest.raises(PlanMismatchError, match="goes with `selective`"):
        Plan.from_dict(plan_with(action="twice", save=["linear"]))
    tighter, words = tighter_plan(Plan.from_dict(plan_with(action="twice")), chunks=False)
    assert [action for _, action in tighter.actions] == [FULL]
    assert words == "`full` for blocks that ran twice"
    with pytest.raises(
        SpecError, match=r"`save` goes with `policy: selective` or `policy: full\+selective`, but policy is 'twice'"
    ):
        Spec.parse({"policy": "twice", "save": ["linear"]})
