"""The fastest actions that fit: compared with trying every choice, with a wider table, and errors if none fit."""

import dataclasses
import itertools

import pytest
from helpers.made_up import LADDERS, blocks_of, ends_of, made_up, some_costs
from helpers.tables import table
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ckpt.costs.costs import CallCosts, Cost, Costs, Static, step_nanoseconds, timeline
from hf_ckpt.costs.steps import Part
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.planner import choose
from hf_ckpt.planner.choose import fastest_choice, lowest_peak
from hf_ckpt.planner.planner import Planner, Selection, in_segments_of
from hf_ckpt.units import format_bytes


def everything(costs):
    """Every choice -> (its time, the sum of its actions' positions, its peak)."""
    places = {action: place for place, action in enumerate(costs.actions)}
    return {
        choice: (step_nanoseconds(costs, choice), sum(map(places.get, choice)), timeline(costs, choice).peak_bytes)
        for choice in itertools.product(*(call.costs for call in costs.calls))
    }


@settings(max_examples=150)
@given(costs=some_costs(freed=20, rebuilt=20), width=st.sampled_from([30, 1000]))
def test_a_choice_is_as_fast_as_the_best_that_fits(costs, width):
    """A choice fits wherever some choice fits, and is as fast as the best. Narrow tables may miss it by 6 %.

    Of equally fast choices, that with earlier actions is taken, which keep most. What a call keeps may depend on the
    call before, and on all calls of its stack.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "WIDTH", width)
        tried = everything(costs)
        peaks = sorted({peak for *_, peak in tried.values()})
        assert lowest_peak(costs) == peaks[0]
        assert [fastest_choice(costs, limit) for limit in (peaks[0] - 1, -1, -(10**30))] == [None] * 3
        before = None
        for limit in [*(limit for peak in peaks for limit in (peak, peak + 1)), 2**62, 2**63, 10**30]:
            best = min(found[:2] for found in tried.values() if found[2] <= limit)
            time, places, peak = tried[fastest_choice(costs, limit)]  # only actions that each call may have
            assert peak <= limit
            assert (time, places) == best if width == 1000 else best[0] <= time <= 1.06 * best[0]
            assert before is None or time <= before  # a larger budget never costs time
            before = time


def test_steps_of_months_are_planned_like_short_ones():
    """Their nanoseconds exceed 64 bits when they are added up."""
    costs = alike(8)
    slow = {}
    for action, cost in costs.calls[0].costs.items():
        forward, backward = (
            dataclasses.replace(part, nanoseconds=part.nanoseconds * 10**16) for part in (cost.forward, cost.backward)
        )
        slow[action] = dataclasses.replace(cost, forward=forward, backward=backward)
    months = dataclasses.replace(costs, calls=tuple(dataclasses.replace(call, costs=slow) for call in costs.calls))
    low, high = ends_of(costs)
    chosen = [fastest_choice(costs, limit) for limit in range(low, high, 7)]
    assert [fastest_choice(months, limit) for limit in range(low, high, 7)] == chosen
    assert len(set(chosen)) > 3


@pytest.mark.parametrize("changes", [{}, {"accumulation": 2}, {"lent": 10**8}], ids=str)
def test_a_deep_model_is_planned_as_with_a_wide_table(changes, monkeypatch):
    """80 blocks with 4 actions: within 0.1 % of a table in which eight times as many ways are followed."""
    costs, twin = (made_up(3, [0, 1] * 40, actions=4, largest=10**9, **changes) for _ in range(2))
    low, high = ends_of(costs)
    limits = [low + (high - low) * part // 8 for part in range(9)]
    times = [step_nanoseconds(costs, fastest_choice(costs, limit)) for limit in limits]
    monkeypatch.setattr(choose, "WIDTH", 8_000)
    best = [step_nanoseconds(twin, fastest_choice(twin, limit)) for limit in limits]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) > 6
    assert all(1 <= time / least <= 1.001 for time, least in zip(times, best, strict=True))


INPUT = 4
"""Bytes of each block's input."""


def alike(count, *, head=30, kept=(60, 25, 0), static=None, gradient=0, accumulation=1, **fields):
    """Costs of a stack of equal blocks, which recompute what they drop, as real ones do.

    `kept`: bytes under each of three actions.
    """
    costs = {}
    for action, size in zip(LADDERS[3], kept, strict=True):
        again = max(kept) - size
        backward = Part(again + 12, gradient - size - INPUT, 200 + again)
        costs[action] = Cost(Part(max(kept) + 10, size + INPUT, 100), backward)
    return Costs(
        actions=LADDERS[3],
        calls=tuple(CallCosts(block, gradient, costs, INPUT) for block in blocks_of("decoder", count)),
        before=Part(INPUT, INPUT, 30),
        at_backward_bytes=0,
        head=(Part(head, head // 2, 50), Part(head, -head // 2, 100)),
        static=static or Static(100, gradients=gradient * count),
        accumulation=accumulation,
        **fields,
    )


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"gradient": 30}, {"head": 400}, {"kept": (60, 0, 25)}], ids=str)
def test_of_blocks_alike_those_come_first_that_keep_least(accumulation, changes):
    """The last blocks keep most, whatever the order of the actions: their backwards free it before gradients come."""
    costs = alike(5, accumulation=accumulation, **changes)
    low, high = ends_of(costs)
    chosen = [fastest_choice(costs, limit) for limit in range(low, high + 1)]
    kept = [[call.costs[action].kept_bytes for call, action in zip(costs.calls, row, strict=True)] for row in chosen]
    assert all(row == sorted(row) for row in kept)
    assert [60 + INPUT] * 5 in kept
    assert len(set(chosen)) > 3


@given(costs=some_costs(freed=9, rebuilt=9), more=st.integers(0, 60))
def test_a_plan_is_within_its_budget_or_an_error_says_why(costs, more):
    """Also where the end of a stack frees what no call keeps, so that choices are not independent."""
    floor, _ = ends_of(costs)
    planner = Planner([costs])
    plan = planner.within(floor + more).plan(floor + more, "a100-80")
    choice = fastest_choice(costs, floor + more)
    predicted, sizes = plan.prediction, dict(plan.prediction.parts).values()
    assert plan == Selection(costs, choice).plan()
    assert predicted.peak_bytes == timeline(costs, choice).peak_bytes == sum(sizes) <= floor + more
    assert predicted.step_seconds == step_nanoseconds(costs, choice) / 1e9
    assert (predicted.budget_bytes, predicted.device) == (floor + more, "a100-80")
    assert planner.within(floor + more + 1).nanoseconds <= step_nanoseconds(costs, choice)
    with pytest.raises(InfeasibleError) as caught:
        planner.within(floor - 1)
    error = caught.value
    assert (error.budget_bytes, error.floor_bytes, sum(error.parts.values())) == (floor - 1, floor, floor)
    assert min(*sizes, *error.parts.values()) >= 0
    first, *lines = str(error).splitlines()
    assert f"no plan fits into {format_bytes(floor - 1)}: the lowest peak is {format_bytes(floor)} (" in first
    assert lines == [f"  - {hint}" for hint in error.hints] != []


@given(costs=some_costs())
def test_if_the_optimizers_step_is_the_peak_no_block_is_recomputed_in_vain(costs):
    costs = dataclasses.replace(costs, static=dataclasses.replace(costs.static, step_bytes=2**40))
    slower = dataclasses.replace(costs, head_tokens="auto", optimizer_nanoseconds=10**12)
    planner = Planner([slower, costs])
    floor = planner.lowest_peak  # of several costs, whatever their order
    plan = planner.lowest().plan()
    assert plan.prediction.peak_bytes == costs.static.optimizer_peak_bytes == floor
    assert round(plan.prediction.step_seconds * 1e9) == min(time for time, *_ in everything(costs).values())
    assert plan.head == "whole"


ERRORS = table(__file__, "infeasible.yaml")
SMALLER = "a smaller batch with more accumulated steps, or shorter sequences"


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_names_what_fills_the_lowest_peak_and_what_would_lower_it(name):
    row = ERRORS[name]
    changes = {"count": 4, **row["costs"]}
    if "static" in changes:
        changes["static"] = Static(**changes["static"])
    with pytest.raises(InfeasibleError) as caught:
        Planner([alike(**changes)]).within(row["budget"])
    error = caught.value
    assert sum(error.parts.values()) == error.floor_bytes > row["budget"]
    assert [text for text in row["said"] if text not in str(error)] == []
    assert [text for text in row["unsaid"] if text in "".join(error.hints)] == []


def test_a_plan_above_the_budget_is_the_fastest_near_the_lowest_peak():
    """Recomputing the last block would lower the peak by less than 2 %, for its forward."""
    costs = alike(8, static=Static(4000))
    planner = Planner([costs])
    floor = planner.lowest_peak
    selection, hints = planner.nearest(floor - 1)
    plan = selection.plan(floor - 1)
    assert SMALLER in hints
    assert floor < plan.prediction.peak_bytes <= 1.02 * floor
    assert plan.prediction.step_seconds < planner.lowest().plan().prediction.step_seconds
    assert "(no plan fits)" in str(plan.prediction)


def test_segments_are_advised_only_where_they_are_not_planned_already():
    costs = alike(40, head=2)
    divided = [costs, *in_segments_of(costs)]
    least = Planner(divided).lowest_peak
    assert least < 0.9 * Planner([costs]).lowest_peak
    elsewhere = [dataclasses.replace(costs, divides=False)]
    hints = [Planner(given).nearest(least - 1)[1] for given in ([costs], divided, elsewhere)]
    assert [any("segments" in hint for hint in of_plan) for of_plan in hints] == [True, False, False]


def test_blocks_that_are_called_twice_have_one_action_each_and_use_the_room():
    """As with two forwards before one backward."""
    once = alike(5)
    costs = dataclasses.replace(once, calls=once.calls * 2)
    uniform = {action: costs.uniform(action) for action in costs.actions}
    rows = [(timeline(costs, choice).peak_bytes, step_nanoseconds(costs, choice)) for choice in uniform.values()]
    mixed = 0
    for budget in range(min(rows)[0], max(rows)[0]):
        selection, hints = Planner([costs]).nearest(budget)
        plan = selection.plan(budget)
        actions = {block: {action for other, action in plan.actions if other == block} for block, _ in plan.actions}
        assert {len(found) for found in actions.values()} == {1}
        assert (hints, plan.prediction.peak_bytes <= budget) == ([], True)
        seconds, best = plan.prediction.step_seconds, min(time for peak, time in rows if peak <= budget)
        assert round(seconds * 1e9) <= best
        mixed += round(seconds * 1e9) < best
    assert mixed > 100
    assert Planner([costs]).nearest(1)[1] == [SMALLER]


@settings(max_examples=40)
@given(costs=some_costs(most=6), points=st.integers(1, 12))
def test_the_frontier_trades_time_for_bytes(costs, points):
    low, high = ends_of(costs)
    planner = Planner([costs])
    found = planner.frontier(points)
    peaks, seconds = [*found], [plan.prediction.step_seconds for plan in found.values()]
    assert peaks == sorted(plan.prediction.peak_bytes for plan in found.values())
    assert seconds == sorted(set(seconds), reverse=True)
    assert low == peaks[0] <= peaks[-1] <= high
    assert len(found) <= points
    assert [planner.within(peak).plan().prediction.step_seconds for peak in peaks] == seconds
    assert points == 1 or seconds[-1] == planner.within(high).nanoseconds / 1e9
