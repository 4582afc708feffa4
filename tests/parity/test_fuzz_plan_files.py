"""Saved plans with something in them replaced: each is refused, or does what it says."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from helpers.fuzzing import examples, train, unchanged
from helpers.snapshots import snapshot
from helpers.specs import JSON
from helpers.steps import enable
from hypothesis import assume, given
from hypothesis import strategies as st

import hf_ckpt
from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.actions import ACTIONS
from hf_ckpt.spec.plan import Plan


@st.composite
def nearly_plans(draw):
    """A saved plan with something in it replaced."""
    saved = PLAN.to_dict()
    for _ in range(draw(st.integers(1, 2))):
        place, path = saved, []
        while isinstance(place, (dict, list)) and place and (not path or draw(st.integers(0, 3))):
            path.append((place, draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))))
            place = path[-1][0][path[-1][1]]
        holder, key = path[-1]
        holder[key] = draw(JSON | st.sampled_from([*ACTIONS, "attention", ["linear"], ["conv"], 0, 1, True, "auto"]))
    return saved


PLAN = hf_ckpt.install(tiny_model("llama", layers=3), {"policy": "selective", "layers": "0-1", "head": 7}).plan
PREDICTION = {"peak_bytes": 9, "step_seconds": 0.5, "tokens": 8, "parts": {"blocks": 4}, "budget_bytes": 10}


def check_plan(saved):
    """A damaged plan is refused by `PlanMismatchError`, before a model is touched; any other does what it says."""
    model = tiny_model("llama", layers=3)
    before = snapshot(model)
    try:
        plan = Plan.from_dict(saved)
        hf_ckpt.install(model, plan)
    except PlanMismatchError:
        assert unchanged(model, before)
        return
    assert {name for action in plan.active().values() for name in action.save} <= {"linear", "attention"}
    assert str(hf_ckpt.describe(model))
    if plan.prediction is not None:
        assert plan.prediction.tokens_per_second == 16
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    enable(model)
    train(model, tiny_batch("llama"))
    hf_ckpt.uninstall(model)
    assert unchanged(model, before)


def damaged(*path, value):
    """A saved plan with `value` at a place."""
    saved: Any = {**PLAN.to_dict(), "prediction": copy.deepcopy(PREDICTION)}
    place = saved
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return saved


ROW = ("stacks", "decoder", 0)


@pytest.mark.parametrize(
    "saved",
    [
        damaged(*ROW, "save", value="linear"),
        damaged(*ROW, "save", value=["conv"]),
        damaged(*ROW, "save", value=[1]),
        damaged(*ROW, "save", value=[["linear"]]),
        damaged("prediction", "parts", value={"blocks": float("inf")}),
        damaged("prediction", "step_seconds", value=10**400),
        damaged("prediction", "peak_bytes", value="many"),
        damaged("prediction", "tokens", value="many"),
    ],
    ids=["text", "unknown", "number", "list", "inf", "huge", "peak", "tokens"],
)
def test_damaged_plans(saved):
    check_plan(saved)


@examples(40, 0.05)
@given(nearly_plans())
def test_what_is_nearly_a_plan(saved):
    rows = [row for rows in saved["stacks"].values() for row in rows] if _has_rows(saved) else []
    known = (("linear", "attention"), ["linear", "attention"], ["linear"], ["attention"], [])
    assume(all(row.get("save", []) in known for row in rows))  # see `test_damaged_plans`
    check_plan(saved)


def _has_rows(saved):
    stacks = saved.get("stacks")
    lists = isinstance(stacks, dict) and all(isinstance(rows, list) for rows in stacks.values())
    return lists and all(isinstance(row, dict) for rows in stacks.values() for row in rows)
