"""A step assembled from parts: by hand, parts of its peak, its time, plans as files, runs of blocks."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.made_up import blocks_of, made_up, some_costs
from hypothesis import given
from hypothesis import strategies as st

from hf_ckpt.costs.costs import BlockCost, Costs, Phase, StackCosts, Static
from hf_ckpt.costs.timeline import step_nanoseconds, timeline, worst_timeline
from hf_ckpt.planner.alternatives import segmented_options
from hf_ckpt.planner.budgets import plan_of
from hf_ckpt.planner.policies import make_plan
from hf_ckpt.spec.actions import FULL, KEEP
from hf_ckpt.spec.plan import Plan, run_lengths
from hf_ckpt.spec.spec import Spec

# --- by hand --------------------------------------------------------------------------------------------------------

KEPT, DROPPED = (0, 0), (0, 1)
"""Keys of the only kind under `keep` and under `full`."""
BY_HAND = Costs(
    family="llama",
    model="SomeModel",
    actions=(KEEP, FULL),
    stacks=(
        StackCosts(
            name="decoder",
            blocks=blocks_of("decoder", 2),
            kinds=(0, 0),
            choices=((0, 1),),
            first={
                KEPT: BlockCost(Phase(((12, 0), (9, 0)), 20), Phase(((7, 0), (1, 10)), 40), 4),
                DROPPED: BlockCost(Phase(((12, 0), (4, 0)), 21), Phase(((9, 0), (15, 3), (2, 10)), 60), 4),
            },
            inner={
                KEPT: BlockCost(Phase(((13, 0), (12, 0)), 22), Phase(((6, 0), (0, 10)), 41), 4),
                DROPPED: BlockCost(Phase(((13, 0), (7, 0)), 23), Phase(((8, 0), (0, 10)), 61), 5),
            },
            last={
                KEPT: BlockCost(Phase(((11, 0), (10, 0)), 24), Phase(((8, 0), (2, 10)), 42), 4),
                DROPPED: BlockCost(Phase(((11, 0), (5, 0)), 25), Phase(((10, 0), (3, 10)), 62), 5),
            },
            gradients=(10,),
            before=Phase(((8, 0), (4, 0)), 10),
            before_backward=Phase(((5, 0), (3, 4)), 11),
            at_backward_bytes=5,
            shared_bytes=2,
            before_at_backward_bytes=3,
        ),
    ),
    head=(Phase(((30, 0), (16, 0)), 30), Phase(((14, 0), (9, 6)), 50)),
    static=Static(parameters=100, buffers=5, optimizer=40, gradients=30, batch=3, step_bytes=7),
    tokens=64,
    accumulation=2,
    optimizer_nanoseconds=1000,
)


def rows_of(found):
    """A row per moment: label, bytes at its beginning, gradients among them, and its `levels`."""
    return [(m.label, m.start_bytes, m.gradient_bytes, list(m.levels())) for m in found.moments]


def test_a_first_micro_step_by_hand():
    """With `full`, then `keep`, gradients grow during backward."""
    assert rows_of(timeline(BY_HAND, ((1, 0),))) == [
        ("embedding", 148, 0, [(156, 0), (152, 0)]),
        ("forward of decoder 0", 152, 0, [(164, 0), (156, 0)]),
        ("forward of decoder 1", 156, 0, [(167, 0), (166, 0)]),
        ("head and loss", 166, 0, [(196, 0), (182, 0)]),
        ("head and loss, backward", 182, 0, [(196, 0), (197, 6)]),
        # After its forward 166, turnaround 5, minus its output 4, gradients 6; shared bytes start in the last block.
        ("backward of decoder 1", 173, 6, [(181, 6), (185, 16)]),
        # 156 + 5 - 4, 2 shared, gradients 16.
        ("backward of decoder 0", 175, 16, [(184, 16), (193, 19), (187, 26)]),
        ("embedding, backward", 181, 26, [(186, 26), (188, 30)]),  # 152 + 3 + 26
        ("optimizer step", 178, 30, [(185, 30), (178, 30)]),
    ]
    found = timeline(BY_HAND, ((1, 0),))
    micro_step = 10 + 11 + 21 + 60 + 24 + 42 + 30 + 50
    assert found.nanoseconds == 2 * micro_step + 1000
    assert found.peak_bytes == 197
    assert found.worst.label == "head and loss, backward"
    assert found.parts() == {
        "weights and optimizer state": 148,
        "gradients": 6,
        "kept for backward": 18,  # of embedding and blocks; the head's own 16 are its work
        "temporary in head and loss, backward": 25,
    }


def test_an_encoder_and_a_decoder_by_hand():
    """Gradients finish from the last block to the first."""
    (decoder,) = BY_HAND.stacks
    between = {"before": Phase(((6, 0), (3, 0))), "before_backward": Phase(((5, 0), (3, 1)), 11)}
    second = dataclasses.replace(decoder, **between, before_at_backward_bytes=9)
    first = dataclasses.replace(
        decoder, name="encoder", blocks=blocks_of("encoder", 2), at_backward_bytes=1, shared_bytes=0
    )
    static = dataclasses.replace(BY_HAND.static, gradients=51)
    costs = dataclasses.replace(BY_HAND, stacks=(first, second), static=static)
    rows = [(label, start, gradients) for label, start, gradients, _ in rows_of(timeline(costs, ((1, 0), (1, 0))))]
    assert rows == [
        ("embedding", 148, 0),
        ("forward of encoder 0", 152, 0),
        ("forward of encoder 1", 156, 0),
        ("between encoder and decoder", 166, 0),
        ("forward of decoder 0", 169, 0),  # `full`, first in its stack
        ("forward of decoder 1", 173, 0),
        ("head and loss", 183, 0),
        ("head and loss, backward", 199, 0),
        ("backward of decoder 1", 190, 6),  # 183 + 5 - 4 + 6
        ("backward of decoder 0", 192, 16),  # 173 + 5 - 4 + 2 + 16
        ("between encoder and decoder, backward", 204, 26),  # 169 + 9 + 26
        ("backward of encoder 1", 190, 27),  # 166 + 1 - 4 + 27
        ("backward of encoder 0", 190, 37),  # 156 + 1 - 4 + 37
        ("embedding, backward", 202, 47),  # 152 + 3 + 47
        ("optimizer step", 199, 51),
    ]


def test_one_action_for_all_spares_what_has_no_choice():
    costs = made_up(1, [[0, 1, 1], [1]], frozen=((0,), ()), actions=3)
    assert costs.uniform(2) == ((0, 2, 2), (2,))
    assert costs.uniform(0) == ((0, 0, 0), (0,))


# --- random costs ---------------------------------------------------------------------------------------------------


def any_choice(data, costs):
    return tuple(
        tuple(data.draw(st.sampled_from(stack.choices[kind])) for kind in stack.kinds) for stack in costs.stacks
    )


@given(costs=some_costs(most=6), data=st.data(), accumulated=st.booleans())
def test_the_peak_is_the_highest_level_and_its_parts_are_all_of_it(costs, data, accumulated):
    choice = any_choice(data, costs)
    found = timeline(costs, choice, accumulated)
    assert found.peak_bytes == max(moment.peak_bytes for moment in found.moments)
    levels = [level for moment in found.moments for level, _ in moment.levels()]
    assert found.peak_bytes == max(*levels, *(moment.start_bytes for moment in found.moments))
    for moment in found.moments:
        assert all(level <= moment.peak_bytes for level, _ in moment.levels())
        assert moment.start_bytes <= moment.peak_bytes
    assert sum(found.parts().values()) == found.peak_bytes
    assert min(found.parts().values()) >= 0
    assert found.parts()["weights and optimizer state"] == costs.static.always


@given(costs=some_costs(most=6), data=st.data())
def test_gradients_are_complete_at_the_end(costs, data):
    """Finished gradients never shrink, start with the backward, and are complete at the end."""
    choice = any_choice(data, costs)
    first, later = timeline(costs, choice), timeline(costs, choice, accumulated=True)
    gradients = [moment.gradient_bytes for moment in first.moments]
    assert gradients == sorted(gradients)
    assert gradients[-1] == costs.static.gradients
    *_, (_, last) = first.moments[-2].levels()
    assert last == costs.static.gradients
    assert all(moment.gradient_bytes == costs.static.gradients for moment in later.moments)
    for moment, again in zip(first.moments[:-1], later.moments[:-1], strict=True):
        assert moment.start_bytes - moment.gradient_bytes == again.start_bytes - again.gradient_bytes


# --- plans with predictions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan.json", "plan.yaml"])
@pytest.mark.parametrize("nanoseconds", [20_000 - 2 * 248, 123_456_789_012_345])
def test_a_saved_plan_keeps_its_prediction(tmp_path, name, nanoseconds):
    """A saved plan keeps its prediction, even 20 us: JSON writes `2e-05`, which YAML reads as text."""
    costs = dataclasses.replace(BY_HAND, optimizer_nanoseconds=nanoseconds)
    plan = plan_of(costs, ((1, 0),), budget_bytes=300, device="a100-80")
    plan.save(tmp_path / name)
    loaded = Plan.load(tmp_path / name)
    assert loaded == plan
    assert [action for _, action in loaded.actions] == [FULL, KEEP]
    assert loaded.prediction.peak_bytes == 226
    assert loaded.prediction.budget_bytes == 300
    assert loaded.prediction.device == "a100-80"
    assert loaded.prediction.step_seconds == (2 * 248 + nanoseconds) / 1e9
    assert sum(size for _, size in loaded.prediction.parts) == 226


# --- runs of blocks, recomputed as one ------------------------------------------------------------------------------

OUTPUT, OWN, TRANSIENT = 4, 20, 9
"""Output of each block of `runs_of`, other bytes that it keeps, and the peak of its forward."""


def runs_of(*stacks, gradient=0, shared=0, head=1, between=1, accumulation=1):
    """Costs of stacks of equal blocks; `stacks` has the lengths of the runs that count as one block.

    With all lengths 1, these are single blocks. A run under `full` behaves like a block: it keeps its input, and its
    backward recomputes all its blocks under `keep`, then goes back through them.
    """
    keep_forward = ((TRANSIENT, 0), (OWN + OUTPUT, 0))
    # From the gradient of its output to that of its input; frees its input and what it keeps.
    keep_backward = ((6, 0), (8, gradient // 2), (-OWN - OUTPUT, gradient))

    def forward(length):
        points = [(TRANSIENT, 0), (OUTPUT, 0)]
        for _ in range(length - 1):  # a block's output is freed after use
            points += [(OUTPUT + TRANSIENT, 0), (2 * OUTPUT, 0), (OUTPUT, 0)]
        return Phase(tuple(points))

    def backward(length, begins=0):
        points = [(number * (OWN + OUTPUT) + other, 0) for number in range(length) for other, _ in keep_forward]
        for number in range(length):
            level = (length - number) * (OWN + OUTPUT) + begins
            points += [(level + other, number * gradient + done) for other, done in keep_backward]
        return Phase(tuple(points))

    made = []
    for number, lengths in enumerate(stacks):
        kinds = sorted(set(lengths))
        costs, last = {}, {}
        for kind, length in enumerate(kinds):
            costs[kind, 0] = BlockCost(Phase(keep_forward), Phase(keep_backward), OUTPUT)
            costs[kind, 1] = BlockCost(forward(length), backward(length), OUTPUT)
            shares = Phase(tuple((other + shared, done) for other, done in keep_backward))
            last[kind, 0] = dataclasses.replace(costs[kind, 0], backward=shares)
            last[kind, 1] = dataclasses.replace(costs[kind, 1], backward=backward(length, begins=shared))
        name = ("encoder", "decoder")[number]
        made.append(
            StackCosts(
                name=name,
                blocks=blocks_of(name, len(lengths)),
                kinds=tuple(kinds.index(length) for length in lengths),
                choices=((0, 1),) * len(kinds),
                first=costs,
                inner=costs,
                last=last,
                gradients=tuple(length * gradient for length in kinds),
                before=Phase(((between, 0), (OUTPUT, 0))),
                before_backward=Phase(((between, 0), (-OUTPUT, 2))),
                at_backward_bytes=OUTPUT,
                shared_bytes=shared,
                before_at_backward_bytes=0,
            )
        )
    gradients = sum(sum(lengths) * gradient + 2 for lengths in stacks) + 3
    return Costs(
        family="llama",
        model="SomeModel",
        actions=(KEEP, FULL),
        stacks=tuple(made),
        head=(Phase(((head, 0), (2, 0))), Phase(((head, 0), (-1, 3)))),
        static=Static(parameters=1000, buffers=0, optimizer=0, gradients=gradients, batch=0),
        tokens=8,
        accumulation=accumulation,
    )


def segmented_peak(costs, length, accumulated):
    """The peak with `length` blocks per segment, or one fewer."""
    segments = tuple(-(-len(stack.blocks) // length) for stack in costs.stacks)
    full = costs.uniform(len(costs.actions) - 1)
    return timeline(dataclasses.replace(costs, segments=segments), full, accumulated).peak_bytes


def ones(*sizes):
    return [[1] * size for size in sizes]


@pytest.mark.parametrize("accumulated", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        pytest.param((8,), {}, id="blocks"),
        pytest.param((7,), {}, id="a short run at the end"),
        pytest.param((3,), {"gradient": 1}, id="few blocks"),
        pytest.param((4, 5), {}, id="two stacks"),
        pytest.param((8,), {"gradient": 12}, id="gradients"),
        pytest.param((4, 4), {"gradient": 12}, id="gradients of two stacks"),
        pytest.param((8,), {"shared": 5}, id="shared"),
        pytest.param((8,), {"head": 200}, id="head"),
        pytest.param((4, 5), {"head": 200}, id="head behind two stacks"),
        pytest.param((4, 5), {"between": 200}, id="between two stacks"),
    ],
)
def test_runs_are_what_blocks_as_large_would_be(sizes, changes, length, accumulated):
    """A run of blocks costs as much as one larger block under `full`."""
    small = runs_of(*ones(*sizes), **changes)
    large = runs_of(*(run_lengths(size, -(-size // length)) for size in sizes), **changes)
    assert segmented_peak(small, length, accumulated) == timeline(large, large.uniform(1), accumulated).peak_bytes


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_runs_of_the_root_are_those_that_segments_makes(size, accumulation):
    """The prediction for `segments: "sqrt"` uses the runs that it installs."""
    small = runs_of([1] * size, accumulation=accumulation)
    plan = make_plan(Spec.parse({"segments": "sqrt"}), small.stacks[0].blocks, "llama", "SomeModel")
    large = runs_of([len(names) for _, names in plan.segments()], accumulation=accumulation)
    option = segmented_options(small)[1]
    assert option.peak_bytes == worst_timeline(large, large.uniform(1)).peak_bytes
    assert option.step_seconds == step_nanoseconds(small, small.uniform(1)) / 1e9
