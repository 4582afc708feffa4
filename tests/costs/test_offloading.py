"""Actions that keep tensors in host memory: by hand, within host memory, and chosen only where they help."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers.lanes import DeviceBytes, Eager, lanes_of
from helpers.made_up import ends_of, made_up, some_costs
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_ckpt
from hf_ckpt.attach.attach import trial
from hf_ckpt.costs.costs import OFFLOADED, ON_DEVICE, step_nanoseconds, timeline, with_offloading
from hf_ckpt.forecast.batches import MicroStep
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.forecast.model import model_of_workload
from hf_ckpt.forecast.question import Question
from hf_ckpt.forecast.run import costs_of_model
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.planner.budgets import choice_within, peak_of_least, plan_of, plan_of_least, plan_within
from hf_ckpt.planner.choose import fastest
from hf_ckpt.spec.actions import FULL, OFFLOAD, SELECTIVE

GIGA = 10**9  # bytes per second: one byte takes a nanosecond
SAVED = OFFLOADED[SELECTIVE]


@given(costs=some_costs(most=4), base=st.sampled_from([FULL, SELECTIVE]))
def test_what_offloading_changes(costs, base):
    """A call's tensors move out in its forward and back in its backward, with those of the call before.

    The first call's input is held elsewhere, too; its costs count its copy back as one that is waited for.
    """
    moving = next((ways for ways in with_offloading(costs, GIGA, 1, 10**9) if OFFLOADED[base] in ways.actions), None)
    moves = [base in call.costs for call in costs.calls[:-1]]
    assert (moving is not None) == any(moves)
    for place, call in enumerate(moving.calls if moving else ()):
        assert (OFFLOADED[base] in call.costs) == (place < len(moves) and moves[place])
        if OFFLOADED[base] not in call.costs:
            continue
        plain, cost = call.costs[base], call.costs[OFFLOADED[base]]
        size = costs.input_bytes if base == FULL else max(0, plain.kept_bytes)
        freed = size if place else max(0, size - costs.input_bytes)
        assert cost.forward.net == plain.forward.net - freed
        assert cost.backward.net == plain.backward.net + freed
        assert cost.backward.peak == plain.backward.peak + size * (2 if place else 1)
        assert cost.forward.peak == plain.forward.peak + (size if place and base != FULL else 0)
        assert cost.forward.nanoseconds == max(plain.forward.nanoseconds, size) + 2
        waits = 0 if place else size
        assert cost.backward.nanoseconds == max(plain.backward.nanoseconds, size) + 2 + waits


@settings(max_examples=60)
@given(costs=some_costs(most=5), limit=st.integers(0, 600))
def test_the_host_is_never_asked_for_more_than_it_has(costs, limit):
    """Plans stay within host memory; buffers are powers of two, and the last call moves nothing."""
    for ways in with_offloading(costs, GIGA, 1, limit):
        used = 0
        for call, action in zip(ways.calls, fastest(ways, ends_of(ways)[0]), strict=True):
            if action == OFFLOAD:
                used += 1 << max(0, costs.input_bytes - 1).bit_length()
            elif action in ON_DEVICE:
                used += max(0, call.costs[ON_DEVICE[action]].kept_bytes)
        assert used <= limit
        assert not {*ways.calls[-1].costs} & {*ON_DEVICE}
        assert len({*ways.actions} & {*ON_DEVICE}) <= 1  # each may use all host memory


@settings(max_examples=60)
@given(costs=some_costs(most=5))
def test_a_plan_moves_only_what_it_has_to(costs):
    """With host memory, no plan is slower; and those that move something exceed the budget if it stays."""
    ways = [costs, *with_offloading(costs, GIGA, 1, 10**9)]
    low = peak_of_least(ways)
    assert low <= peak_of_least(costs)
    for budget in range(low, ends_of(costs)[1] + 1):
        chosen, choice = choice_within(ways, budget)
        if budget >= peak_of_least(costs):
            alone = fastest(costs, budget)
            assert step_nanoseconds(chosen, choice) <= step_nanoseconds(costs, alone)
        stayed = tuple(ON_DEVICE.get(action, action) for action in choice)
        faster = step_nanoseconds(chosen, stayed) <= step_nanoseconds(chosen, choice)
        assert stayed == choice or not faster or timeline(chosen, stayed).peak_bytes > budget
    assert plan_of_least(ways) == plan_within(ways, low)


@pytest.mark.parametrize(("limit", "count"), [(0, 0), (8, 1), (15, 1), (16, 2), (1000, 4)])
def test_as_many_calls_move_as_fit(limit, count):
    """A buffer of 7 bytes takes 8 bytes of host memory. A single call moves nothing."""
    costs = dataclasses.replace(made_up(1, [0] * 5, actions=2), input_bytes=7)
    (moving,) = with_offloading(costs, GIGA, 1, limit)
    assert [OFFLOAD in call.costs for call in moving.calls] == [place < count for place in range(5)]
    alone = dataclasses.replace(costs, calls=costs.calls[:1])
    assert with_offloading(alone, GIGA, 1, limit) == [alone]


# --- real bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("action", "too_high"), [(OFFLOAD, 0.03), (SAVED, 0.2)], ids=str)
def test_peaks_are_those_that_are_reached(action, too_high):
    """Predictions for saved tensors in host memory are too high, because tensors are freed earlier."""
    model = tiny_model("llama", layers=6, hidden=64, attention="sdpa").to(torch.bfloat16)
    batch = tiny_batch("llama", batch=4, tokens=128)
    costs = costs_of_model(
        model_of_workload(Question("tiny"), live=model),
        MicroStep(Question("tiny", optimizer="sgd"), batch),
        DEVICES["h100"],
    )
    (moving,) = (ways for ways in with_offloading(costs, GIGA, 1, 2**40) if action in ways.actions)
    choice = moving.uniform(action)
    with lanes_of(Eager), trial(model, plan_of(moving, choice)), DeviceBytes(model, batch) as live:
        model(**batch).loss.backward()
        moved = hf_ckpt.describe(model).moved
    assert len(moved) == choice.count(action) == 5
    error = timeline(moving, choice).peak_bytes / live.peak_bytes - 1
    assert -0.03 <= error <= too_high
