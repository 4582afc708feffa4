"""Costs of a step: by hand, and with tensors in host memory."""

import dataclasses

import pytest
import torch
from helpers.lanes import DeviceBytes, Eager, lanes_of
from helpers.made_up import blocks_of, ends_of, made_up, some_costs
from hypothesis import given, settings

import hf_ckpt
from hf_ckpt.attach.for_a_while import temporarily
from hf_ckpt.costs.costs import ON_DEVICE, CallCosts, Cost, Costs, Static, step_nanoseconds, timeline, with_offloading
from hf_ckpt.costs.steps import Part
from hf_ckpt.forecast.forecast import Forecaster
from hf_ckpt.forecast.question import Question
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.planner.choose import fastest_choice
from hf_ckpt.planner.planner import Planner, Selection
from hf_ckpt.spec.actions import FULL, KEEP, OFFLOAD, SELECTIVE

KEPT = Cost(Part(12, 9, 20), Part(7, 1, 40), shared_bytes=5)
DROPPED = Cost(Part(11, 7, 21), Part(30, -4, 60), forward_only_bytes=3, shared_bytes=3)
BY_HAND = Costs(
    family="llama",
    model="SomeModel",
    actions=(KEEP, FULL),
    calls=tuple(CallCosts(block, 10, {KEEP: KEPT, FULL: DROPPED}) for block in blocks_of("decoder", 2)),
    before=Part(8, 4, 10),
    at_backward_bytes=1,
    head=(Part(30, 16, 30), Part(31, 0, 50)),
    static=Static(parameters=100, buffers=8, optimizer=40, gradients=26, step_bytes=7),
    tokens=64,
    optimizer_nanoseconds=1000,
)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_costs_of_a_step_equal_those_computed_by_hand(accumulation):
    """With `full`, then `keep`. Gradients grow during the backward, or are there from the beginning."""
    resident = 26 * (accumulation > 1)
    costs = dataclasses.replace(BY_HAND, accumulation=accumulation)
    course = timeline(costs, (FULL, KEEP))
    assert [(m.label, m.start_bytes - resident, m.gradient_bytes - resident, m.kept_bytes) for m in course.moments] == [
        ("embedding", 148, 0, 0),
        ("forward of decoder 0", 152, 0, 4),
        ("forward of decoder 1", 159, 0, 11),
        ("head and loss", 165, 0, 17),  # at the end of the stack, 3 bytes were freed, which no call keeps
        ("head and loss, backward", 178, 0, 14),  # 3 bytes of the forward only are freed, and 16 are the head's own
        ("backward of decoder 1", 163, 0, 15),
        ("backward of decoder 0", 164, 10, 6),  # after its forward 156, at the backward 1, gradients 10
        ("optimizer step", 174 - resident, 26 - resident, 0),
    ]
    assert [m.peak_bytes - m.start_bytes for m in course.moments] == [8, 11, 12, 30, 31, 7, 30, 7]
    assert course.worst.label == "head and loss, backward"
    assert course.kept_bytes == {"decoder": (7 - 3) + 9 - 3}
    assert "): full 0; keep 1; 10 B kept for backward" in str(Selection(costs, (FULL, KEEP)).plan())
    assert step_nanoseconds(costs, (FULL, KEEP)) == accumulation * (10 + 21 + 60 + 20 + 40 + 30 + 50) + 1000
    assert course.worst.parts() == {
        "weights and optimizer state": 148,
        "gradients": resident,
        "kept for backward": 14,
        "temporary in head and loss, backward": 47,
    }


def test_one_action_for_all_spares_what_has_no_choice():
    assert made_up(1, [0, 1, 1, 1], frozen=1, actions=3).uniform(FULL) == (KEEP, FULL, FULL, FULL)


def equal_blocks(count, costs, *, input_bytes=4):
    """The step of equal blocks."""
    calls = tuple(CallCosts(block, 0, costs, input_bytes) for block in blocks_of("decoder", count))
    return dataclasses.replace(BY_HAND, calls=calls, actions=tuple(costs))


GIGA = 10**9  # bytes per second: one byte takes a nanosecond
SAVED = dataclasses.replace(SELECTIVE, moved=True)
MOVABLE = {SELECTIVE: Cost(Part(26, 14, 1), Part(16, -24, 2)), FULL: Cost(Part(29, 4, 1), Part(30, -24, 3))}
"""Blocks that keep 14 bytes under `selective`, and their inputs of 4 bytes under `full`."""


def test_costs_of_offloading_equal_those_computed_by_hand():
    """A call's tensors move out in its forward and back in its backward, with those of the call before.

    The first call's input is held elsewhere, too; its costs count its copy back as one that is waited for.
    """
    inputs, saved = with_offloading(equal_blocks(3, MOVABLE), GIGA, 1, 10**9)
    assert (inputs.actions, saved.actions) == ((SELECTIVE, FULL, OFFLOAD), (SELECTIVE, FULL, SAVED))
    assert [call.costs.get(OFFLOAD) for call in inputs.calls] == [
        Cost(Part(29, 4, 4 + 2), Part(30 + 4, -24, 4 + 2 + 4)),
        Cost(Part(29, 4 - 4, 4 + 2), Part(30 + 4 + 4, -24 + 4, 4 + 2)),
        None,  # the backward of the last call follows at once
    ]
    assert [call.costs.get(SAVED) for call in saved.calls] == [
        Cost(Part(26, 14 - 10, 14 + 2), Part(16 + 14, -24 + 10, 14 + 2 + 14)),
        Cost(Part(26 + 14, 14 - 14, 14 + 2), Part(16 + 14 + 14, -24 + 14, 14 + 2)),
        None,
    ]


def test_each_stack_moves_its_own_bytes_but_for_its_last_block():
    """And frozen blocks that come first take no host memory from those that are trained."""
    sizes = {"vision": 2, "decoder": 8}
    blocks = [(block, size) for name, size in sizes.items() for block in blocks_of(name, 4)]
    calls = [CallCosts(block, 0, MOVABLE, size) for block, size in blocks]
    calls[0] = dataclasses.replace(calls[0], costs={KEEP: Cost(Part(), Part())})
    costs = dataclasses.replace(BY_HAND, calls=tuple(calls), actions=(KEEP, *MOVABLE))
    for limit, count in ((0, 0), (3 * 8, 3), (999, 5)):
        inputs = with_offloading(costs, GIGA, 1, limit)[0]
        moving = [place for place, call in enumerate(inputs.calls) if OFFLOAD in call.costs]
        assert moving == [1, 2, 4, 5, 6][:count]
        kept = [inputs.calls[place].costs[OFFLOAD].kept_bytes for place in moving]
        assert kept == [4 - 2, 4 - 2, 4, 4 - 8, 4 - 8][:count]  # the input of a stack may be held elsewhere, too
    back = [inputs.calls[place].costs[OFFLOAD].backward.peak - 30 for place in moving]
    assert back == [2, 2 + 2, 8, 8 + 8, 8 + 8]  # its own, and that of the call before, if that one moves


@settings(max_examples=60)
@given(costs=some_costs(most=5))
def test_a_plan_moves_only_what_it_has_to(costs):
    """With host memory, no plan is slower; and those that move something exceed the budget if it stays."""
    ways = [costs, *with_offloading(costs, GIGA, 1, 10**9)]
    low = Planner(ways).lowest_peak
    assert low <= Planner([costs]).lowest_peak
    for budget in range(low, ends_of(costs)[1] + 1):
        chosen, choice = Planner(ways).within(budget)
        alone = fastest_choice(costs, budget)
        assert alone is None or step_nanoseconds(chosen, choice) <= step_nanoseconds(costs, alone)
        stayed = tuple(ON_DEVICE.get(action, action) for action in choice)
        faster = step_nanoseconds(chosen, stayed) <= step_nanoseconds(chosen, choice)
        assert stayed == choice or not faster or timeline(chosen, stayed).peak_bytes > budget


def test_as_many_calls_move_as_fit():
    """A buffer for an input is a power of two; one for several tensors takes twice their size. Each may use all."""
    costs, alone = (equal_blocks(count, MOVABLE, input_bytes=7) for count in (5, 1))
    for limit, inputs, saved in ((7, 0, 0), (8, 1, 0), (28, 3, 1), (83, 4, 2), (999, 4, 4)):
        moved, kept = with_offloading(costs, GIGA, 1, limit)
        assert [OFFLOAD in call.costs for call in moved.calls] == [place < inputs for place in range(5)]
        assert [SAVED in call.costs for call in kept.calls] == [place < saved for place in range(5)]
        assert with_offloading(alone, GIGA, 1, limit) == [alone]


@pytest.mark.parametrize(("action", "too_high"), [(OFFLOAD, 0.03), (SAVED, 0.2)], ids=str)
def test_peaks_with_host_memory_are_those_that_are_reached(action, too_high):
    """Predictions for saved tensors in host memory are too high, because tensors are freed earlier."""
    model = tiny_model("llama", layers=6, hidden=64, attention="sdpa").to(torch.bfloat16)
    batch = tiny_batch("llama", batch=4, tokens=128)
    asked = Question("tiny", 4, 128, optimizer="sgd", device="h100")
    costs = Forecaster(asked, config=model.config).estimator.costs_of(asked)
    (moving,) = (ways for ways in with_offloading(costs, GIGA, 1, 2**40) if action in ways.actions)
    choice = moving.uniform(action)
    with lanes_of(Eager), temporarily(model, Selection(moving, choice).plan()), DeviceBytes(model, batch) as live:
        model(**batch).loss.backward()
        moved = hf_ckpt.describe(model).moved
    assert len(moved) == choice.count(action) == 5
    error = timeline(moving, choice).peak_bytes / live.peak_bytes - 1
    assert -0.03 <= error <= too_high
