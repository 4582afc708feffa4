"""The next plan that needs less memory, for a given plan or model."""

from __future__ import annotations

import pytest
from helpers.failing import FULL, HEAD, OFFLOAD, SELECTIVE

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.models.tiny import tiny_model
from hf_ckpt.spec.actions import COMPILED, Action
from hf_ckpt.spec.plan import Block, Plan
from hf_ckpt.training import guard
from hf_ckpt.training.guard import tighten, tighter_plan


def test_nothing_is_offloaded_where_there_is_no_host():
    """On a CPU, stepping down skips offloading, which would leave more there than `segments`."""
    model = tiny_model("llama")
    hf_ckpt.install(model, {"segments": 2})
    model.gradient_checkpointing_enable()
    assert tighten(model) == HEAD
    assert tighten(model) is None
    assert hf_ckpt.describe(model).plan.segments()


def test_where_the_first_plan_comes_from(monkeypatch):
    monkeypatch.setattr(guard, "lane_of", lambda device: device)  # as if the device had host memory beside it
    stock = tiny_model("llama")
    stock.gradient_checkpointing_enable({"use_reentrant": False})
    assert tighten(stock, exact=True) == OFFLOAD  # transformers' own checkpointing was `full` already
    waiting = tiny_model("llama")
    hf_ckpt.install(waiting, {"policy": "full", "layers": "0-1"})
    assert "full" in tighten(waiting)
    assert hf_ckpt.describe(waiting).enabled
    assert len(hf_ckpt.describe(waiting).forwards) == 2
    assert tighten(waiting) == SELECTIVE
    spec = installation(waiting).spec
    waiting.gradient_checkpointing_enable()  # a bare call keeps the tighter plan
    assert installation(waiting).spec == spec
    assert {action.kind for _, action in installation(waiting).plan.actions} == {"full", "selective"}


def test_options_of_the_spec_stay():
    model = tiny_model("llama")
    hf_ckpt.install(model, {"policy": "selective", "check_every": 7, "determinism_check": "none"})
    model.gradient_checkpointing_enable()
    assert tighten(model) == FULL
    spec = installation(model).spec
    assert (spec.check_every, spec.determinism_check) == (7, "none")


# --- the next plan --------------------------------------------------------------------------------------------------


def plan_of(*actions, head="full"):
    pairs = ((Block(f"layers.{n}", "layers", n, "Layer"), action) for n, action in enumerate(actions))
    return Plan("llama", "Model", tuple(pairs), head=head)


BOTH = ("linear", "attention")
SHARE = "share 0 for compiled blocks"


@pytest.mark.compat
@pytest.mark.parametrize(
    ("actions", "options", "names", "last"),
    [
        ([Action("keep")] * 2, {"chunks": True}, [SELECTIVE, FULL, OFFLOAD, HEAD], "offload"),
        ([Action("keep")] * 2, {"chunks": True, "head_first": True}, [SELECTIVE, FULL, HEAD, OFFLOAD], "offload"),
        ([Action("keep"), Action("full")], {"chunks": False}, [SELECTIVE, FULL, OFFLOAD], "offload"),
        ([Action("selective", BOTH, moved=True), Action("full")], {"chunks": False}, [OFFLOAD, OFFLOAD], "offload"),
        ([Action("full", segment=0)] * 3, {"chunks": False}, [OFFLOAD], "offload"),
        ([Action("offload")], {"chunks": True}, [HEAD], "offload"),
        ([Action("offload")], {"chunks": False}, [], "offload"),
        ([Action("compiled", share=1.0), COMPILED], {"chunks": True}, [SHARE, HEAD], "compiled (share 0)"),
    ],
)
def test_tighter_plans(actions, options, names, last):
    plan, found = plan_of(*actions), []
    while (step := tighter_plan(plan, **options)) is not None:
        assert step[0] != plan
        plan = step[0]
        found.append(step[1])
    assert found == names
    assert {str(action) for _, action in plan.actions} == {last}
    assert (plan.head == "auto") == (HEAD in names)


@pytest.mark.compat
def test_what_lies_in_host_memory_already_does_not_come_back():
    plan, _ = tighter_plan(plan_of(Action("selective", BOTH, moved=True), Action("selective", BOTH)), chunks=False)
    assert [str(action) for _, action in plan.actions] == ["offload", "full"]
