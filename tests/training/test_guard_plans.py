"""The next plan that needs less memory, for a given plan or model."""

from __future__ import annotations

import pytest
from helpers.failing import FULL, HEAD, OFFLOAD, SELECTIVE

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.models.tiny import tiny_model
from hf_ckpt.spec.actions import COMPILED, Action
from hf_ckpt.spec.plan import Block, Plan
from hf_ckpt.training.guard import tighten, tighter_plan


def test_nothing_is_offloaded_where_there_is_no_host():
    model = tiny_model("llama")
    hf_ckpt.install(model, {"segments": 2})
    model.gradient_checkpointing_enable()
    assert tighten(model) == HEAD
    assert tighten(model) is None
    assert hf_ckpt.describe(model).plan.segments()


def test_where_the_first_plan_comes_from(host_memory):
    stock = tiny_model("llama")
    stock.gradient_checkpointing_enable({"use_reentrant": False})
    assert tighten(stock, exact=True) == OFFLOAD  # transformers' own checkpointing was `full` already
    waiting = tiny_model("llama")
    hf_ckpt.install(waiting, {"policy": "full", "layers": "0-1", "check_every": 7, "determinism_check": "none"})
    assert "full" in tighten(waiting)
    assert hf_ckpt.describe(waiting).enabled
    assert len(hf_ckpt.describe(waiting).forwards) == 2
    assert tighten(waiting) == SELECTIVE
    spec = installation(waiting).spec
    assert (spec.check_every, spec.determinism_check) == (7, "none")
    waiting.gradient_checkpointing_enable()  # a bare call keeps the tighter plan
    assert installation(waiting).spec == spec
    assert {action.kind for _, action in installation(waiting).plan.actions} == {"full", "selective"}


BOTH = ("linear", "attention")
MOVED = Action("selective", BOTH, moved=True)


@pytest.mark.compat
@pytest.mark.parametrize(
    ("actions", "chunks", "names", "last"),
    [
        ([Action("keep")] * 2, True, [SELECTIVE, FULL, HEAD, OFFLOAD], ["offload"] * 2),
        ([Action("keep"), Action("full")], False, [SELECTIVE, FULL, OFFLOAD], ["offload"] * 2),
        ([MOVED, Action("full")], False, [OFFLOAD, OFFLOAD], ["offload"] * 2),
        ([MOVED, Action("selective", BOTH)], False, ["offload and full", OFFLOAD], ["offload"] * 2),
        ([Action("full", segment=0)] * 3, False, [OFFLOAD], ["offload"] * 3),
        ([Action("offload")], True, [HEAD], ["offload"]),
        ([Action("offload")], False, [], ["offload"]),
        (
            [Action("compiled", share=1.0), COMPILED],
            True,
            ["compiled (share 0)", HEAD],
            ["compiled (share 0)"] * 2,
        ),
    ],
)
def test_tighter_plans(actions, chunks, names, last):
    pairs = ((Block(f"layers.{n}", "layers", n, "Layer"), action) for n, action in enumerate(actions))
    plan, found = Plan("llama", "Model", tuple(pairs)), []
    while (step := tighter_plan(plan, chunks=chunks)) is not None:
        assert step[0] != plan
        plan = step[0]
        found.append(step[1])
    assert found == names
    assert [str(action) for _, action in plan.actions] == last
    assert (plan.head == "auto") == (HEAD in names)
