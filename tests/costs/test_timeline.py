"""A step assembled from parts: by hand, parts of its peak, its time, and blocks in segments."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.made_up import blocks_of, made_up, some_costs
from hypothesis import given
from hypothesis import strategies as st

from hf_ckpt.costs.costs import CallCosts, Cost, Costs, Static, step_nanoseconds, timeline
from hf_ckpt.costs.steps import Part
from hf_ckpt.planner.budgets import plan_of
from hf_ckpt.planner.policies import make_plan
from hf_ckpt.planner.segments import in_segments
from hf_ckpt.spec.actions import FULL, KEEP
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec

KEPT = Cost(Part(12, 9, 20), Part(7, 1, 40))
DROPPED = Cost(Part(11, 7, 21), Part(30, -4, 60), lent_bytes=3)
BY_HAND = Costs(
    family="llama",
    model="SomeModel",
    actions=(KEEP, FULL),
    calls=tuple(CallCosts((block,), 10, {KEEP: KEPT, FULL: DROPPED}) for block in blocks_of("decoder", 2)),
    before=Part(8, 4, 10),
    at_backward_bytes=1,
    head=(Part(30, 16, 30), Part(31, 0, 50)),
    input_bytes=4,
    static=Static(parameters=100, buffers=5, optimizer=40, gradients=26, batch=3, step_bytes=7),
    tokens=64,
    optimizer_nanoseconds=1000,
)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_by_hand(accumulation):
    """With `full`, then `keep`. Gradients grow during the backward, or are there from the beginning."""
    resident = 26 * (accumulation > 1)
    costs = dataclasses.replace(BY_HAND, accumulation=accumulation)
    course = timeline(costs, (FULL, KEEP))
    assert [(m.label, m.start_bytes - resident, m.gradient_bytes - resident, m.kept_bytes) for m in course.moments] == [
        ("embedding", 148, 0, 0),
        ("forward of decoder 0", 152, 0, 4),
        ("forward of decoder 1", 159, 0, 11),
        ("head and loss", 168, 0, 20),
        ("head and loss, backward", 181, 0, 17),  # 3 lent bytes are freed, and 16 are the head's own
        ("backward of decoder 1", 166, 0, 18),
        ("backward of decoder 0", 167, 10, 9),  # after its forward 156, at the backward 1, gradients 10
        ("optimizer step", 174 - resident, 26 - resident, 0),
    ]
    assert [m.peak_bytes - m.start_bytes for m in course.moments] == [8, 11, 12, 30, 31, 7, 30, 7]
    assert course.worst.label == "head and loss, backward"
    assert step_nanoseconds(costs, (FULL, KEEP)) == accumulation * (10 + 21 + 60 + 20 + 40 + 30 + 50) + 1000
    assert course.parts() == {
        "weights and optimizer state": 148,
        "gradients": resident,
        "kept for backward": 17,
        "temporary in head and loss, backward": 47,
    }


@given(costs=some_costs(most=6), data=st.data())
def test_the_parts_of_a_peak_add_up_to_it(costs, data):
    choice = tuple(data.draw(st.sampled_from([*call.costs])) for call in costs.calls)
    course = timeline(costs, choice)
    assert course.peak_bytes == max(moment.peak_bytes for moment in course.moments)
    assert sum(course.parts().values()) == course.peak_bytes
    assert min(course.parts().values()) >= 0
    assert course.parts()["weights and optimizer state"] == costs.static.always
    assert len(course.moments) == 2 * len(costs.calls) + 4


def test_one_action_for_all_spares_what_has_no_choice():
    assert made_up(1, [0, 1, 1, 1], frozen=1, actions=3).uniform(FULL) == (KEEP, FULL, FULL, FULL)


@pytest.mark.parametrize("name", ["plan.json", "plan.yaml"])
@pytest.mark.parametrize("nanoseconds", [20_000 - 231, 123_456_789_012_345])
def test_a_saved_plan_keeps_its_prediction(tmp_path, name, nanoseconds):
    """A saved plan keeps its prediction, even 20 us: JSON writes `2e-05`, which YAML reads as text."""
    costs = dataclasses.replace(BY_HAND, optimizer_nanoseconds=nanoseconds)
    plan = plan_of(costs, (FULL, KEEP), budget_bytes=300, device="a100-80")
    plan.save(tmp_path / name)
    loaded = Plan.load(tmp_path / name)
    assert loaded == plan
    assert [action for _, action in loaded.actions] == [FULL, KEEP]
    assert loaded.prediction.step_seconds == (231 + nanoseconds) / 1e9
    assert sum(size for _, size in loaded.prediction.parts) == loaded.prediction.peak_bytes == 212


# --- segments ---------------------------------------------------------------------------------------------------------


def deep(count):
    """Equal blocks that keep 24 bytes under `keep`, of which 4 are the output, and 4 under `full`."""
    costs = {KEEP: Cost(Part(26, 24, 1), Part(6, -24, 2)), FULL: Cost(Part(29, 4, 1), Part(30, -24, 3))}
    calls = tuple(CallCosts((block,), 0, costs) for block in blocks_of("decoder", count))
    return dataclasses.replace(BY_HAND, calls=calls, before=Part(4, 4, 0), static=Static(0), head=(Part(), Part()))


def test_a_segment_keeps_its_first_input_and_runs_again_under_keep():
    costs = next(costs for costs in in_segments(deep(7)) if len(costs.calls) == 3)
    assert [[block.index for block in call.blocks] for call in costs.calls] == [[0, 1, 2], [3, 4], [5, 6]]
    course = timeline(costs, costs.uniform(FULL))
    starts = {moment.label: moment.start_bytes for moment in course.moments}
    assert starts["forward of decoder 5"] == 4 + 2 * 4  # the embeddings, and an output of each segment so far
    assert [starts[f"backward of decoder {last}"] for last in (6, 4, 2)] == [4 + 1 + 4 * count for count in (3, 2, 1)]
    assert course.peak_bytes == 4 + 1 + 4 + 3 * 24 + 6  # in the first segment, which has three blocks under `keep`
    assert step_nanoseconds(costs, costs.uniform(FULL)) == 7 * 4 + 1000
    plan = plan_of(costs, costs.uniform(FULL))
    assert plan.segments() == make_plan(Spec.parse({"segments": 3}), blocks_of("decoder", 7), "", "").segments()


def test_segments_are_offered_in_every_number_that_can_be_best():
    assert [len(costs.calls) for costs in in_segments(deep(12))] == [6, 4, 3, 2, 1]
    two_stacks = made_up(3, [0] * 12, decoder=4, actions=2)
    assert [len(costs.calls) for costs in in_segments(two_stacks)] == [4 + 4, 3 + 3, 2 + 2, 1 + 1]
    without = made_up(3, [0] * 12, frozen=1, actions=2), dataclasses.replace(deep(2), calls=(deep(2).calls[0],) * 2)
    assert [list(in_segments(costs)) for costs in without] == [[], []]
