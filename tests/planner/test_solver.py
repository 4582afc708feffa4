"""The fastest actions that fit: compared with trying every choice, at exact limits, and errors if none fit."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from helpers.made_up import LADDERS, blocks_of, ends_of, made_up, some_costs
from helpers.sparing import sparing
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ckpt.costs.costs import BlockCost, Costs, Phase, StackCosts, Static
from hf_ckpt.costs.timeline import step_nanoseconds, worst_timeline
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.planner import solver
from hf_ckpt.planner.alternatives import frontier, usual_options
from hf_ckpt.planner.budgets import plan_of, plan_of_least, plan_within
from hf_ckpt.planner.solver import fastest, lowest_peak, smallest
from hf_ckpt.spec.actions import KEEP
from hf_ckpt.units import format_bytes


def everything(costs):
    """Every choice -> its (time, peak)."""
    stacks = [itertools.product(*map(stack.choices_at, range(len(stack.kinds)))) for stack in costs.stacks]
    choices = itertools.product(*(list(stack) for stack in stacks))
    return {choice: (step_nanoseconds(costs, choice), worst_timeline(costs, choice).peak_bytes) for choice in choices}


def range_of(costs):
    low, high = ends_of(costs)
    return range(low, high + 1)


def limits_of(tried, data, count=4):
    """Some real peaks, and a byte more and less, to reveal wrong comparisons."""
    peaks = sorted({peak for _, peak in tried.values()})
    found = data.draw(st.lists(st.sampled_from(peaks), min_size=1, max_size=count))
    return [peak + more for peak in {peaks[0], *found} for more in (-1, 0, 1)]


def shuffled(costs, seed):
    """Equal costs with reordered dictionaries."""
    rng = random.Random(seed)

    def again(given):
        return dict(rng.sample(list(given.items()), len(given)))

    def stack_again(stack):
        return dataclasses.replace(stack, first=again(stack.first), inner=again(stack.inner), last=again(stack.last))

    return dataclasses.replace(costs, stacks=tuple(map(stack_again, costs.stacks)))


# --- against trying everything --------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(costs=some_costs(), data=st.data(), width=st.sampled_from([1, 3, 256]))
def test_the_fastest_is_the_fastest_of_all_that_fit(costs, data, width):
    """The result is the fastest choice that fits, however few choices the search starts with."""
    tried = everything(costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "_WIDTH", width)
        for limit in limits_of(tried, data):
            best = min((time for time, peak in tried.values() if peak <= limit), default=None)
            choice = fastest(costs, limit)
            if best is None:
                assert choice is None
            else:
                time, peak = tried[choice]  # only actions that each kind may have
                assert time == best
                assert peak <= limit


@settings(max_examples=200)
@given(costs=some_costs())
def test_the_smallest_has_the_lowest_peak_of_all(costs):
    tried = everything(costs)
    time, peak = tried[smallest(costs)]
    assert peak == lowest_peak(costs) == min(peak for _, peak in tried.values())
    assert time == min(other for other, size in tried.values() if size == peak)


@given(costs=some_costs())
def test_without_a_limit_nothing_is_faster(costs):
    """Any int is a valid limit, however large."""
    best = min(time for time, _ in everything(costs).values())
    for limit in (10**6, 2**62, 2**63, 10**30):
        assert step_nanoseconds(costs, fastest(costs, limit)) == best
    assert fastest(costs, -1) is None
    assert fastest(costs, -(10**30)) is None


@given(costs=some_costs(), limits=st.lists(st.integers(0, 400), max_size=4), seed=st.integers(0, 9))
def test_planning_twice_gives_the_same_plan(costs, limits, seed):
    """Equal costs give the same plan, whatever order they were traced in."""
    again = shuffled(costs, seed)
    assert again == costs
    low, _ = ends_of(costs)
    assert smallest(costs) == smallest(costs) == smallest(again)
    for limit in (low, *limits):
        assert fastest(costs, limit) == fastest(costs, limit) == fastest(again, limit)


def test_a_single_block_is_the_last_one():
    high = BlockCost(Phase(((900, 0),)), Phase(((900, 0),)), 0)
    stack = StackCosts(
        name="decoder",
        blocks=blocks_of("decoder", 1),
        kinds=(0,),
        choices=((0, 1),),
        first={(0, 0): high, (0, 1): high},
        inner={},
        last={
            (0, 0): BlockCost(Phase(((50, 0), (50, 0)), 1), Phase(((7, 0),), 1), 0),
            (0, 1): BlockCost(Phase(((5, 0), (1, 0)), 9), Phase(((20, 0),), 1), 0),
        },
        gradients=(0,),
        before=Phase(),
        before_backward=Phase(),
        at_backward_bytes=0,
        shared_bytes=900,
        before_at_backward_bytes=0,
    )
    costs = Costs("llama", "SomeModel", LADDERS[2], (stack,), (Phase(), Phase()), Static(100, 0, 0, 0, 0), tokens=1)
    assert everything(costs) == {((0,),): (2, 157), ((1,),): (10, 121)}
    assert fastest(costs, 157) == ((0,),)
    assert fastest(costs, 156) == fastest(costs, 121) == smallest(costs) == ((1,),)
    assert fastest(costs, 120) is None


# --- what fits exactly ----------------------------------------------------------------------------------------------


@given(costs=some_costs())
def test_the_lowest_peak_fits_into_itself_and_not_into_a_byte_less(costs):
    floor, _ = ends_of(costs)
    plan = plan_within(costs, floor, "a100-80")
    assert plan.prediction.peak_bytes == floor
    assert plan.prediction.budget_bytes == floor
    assert plan.prediction.device == "a100-80"
    assert fastest(costs, floor - 1) is None
    with pytest.raises(InfeasibleError) as caught:
        plan_within(costs, floor - 1)
    error = caught.value
    assert isinstance(error, HfCkptError)
    assert (error.budget_bytes, error.floor_bytes) == (floor - 1, floor)
    assert sum(error.parts.values()) == floor
    assert error.hints
    lines = str(error).splitlines()
    assert f"no plan fits into {format_bytes(floor - 1)}: the lowest peak is {format_bytes(floor)} (" in lines[0]
    assert lines[1:] == [f"  - {hint}" for hint in error.hints]


@given(costs=some_costs(), more=st.integers(0, 60))
def test_a_plan_within_a_budget_says_what_it_costs(costs, more):
    budget = ends_of(costs)[0] + more
    plan = plan_within(costs, budget)
    choice = fastest(costs, budget)
    assert plan == plan_of(costs, choice)
    assert plan.prediction.peak_bytes == worst_timeline(costs, choice).peak_bytes <= budget
    assert plan.prediction.step_seconds == step_nanoseconds(costs, choice) / 1e9
    assert plan.prediction.budget_bytes == budget


# --- equal blocks ---------------------------------------------------------------------------------------------------

INPUT = 4
"""Bytes of each block's input."""
KEPT = {2: (60, 0), 3: (60, 25, 0), 4: (60, 25, 10, 0)}
"""Number of actions -> other bytes that a block keeps under each action."""


def alike(
    count, *, head=30, actions=3, kept=None, times=None, lent=0, static=None, gradient=0, accumulation=1, frozen=0
):
    """Costs of a stack of equal blocks, which recompute what they drop, as real ones do.

    The first `frozen` blocks keep nothing and have no choice. `kept` and `times`: bytes, and nanoseconds of the
    backward, under each action. `lent`: bytes that last until the forward ends, under all actions but the first.
    """
    costs = {}
    kept = kept or KEPT[actions]
    for number, size in enumerate(kept):
        lends = lent if number else 0
        forward = Phase(((max(kept) + 10, 0), (size + INPUT + lends, 0)), 100)
        again = max(kept) - size
        backward = Phase(((again + 12, 0), (-size - INPUT, gradient)), times[number] if times else 200 + again)
        costs[1 if frozen else 0, number] = BlockCost(forward, backward, INPUT, lends)
    if frozen:
        costs[0, 0] = BlockCost(Phase(((70, 0), (0, 0)), 100), Phase(), 0)
    choices = tuple(range(actions))
    row = (0,) * frozen + (1 if frozen else 0,) * (count - frozen)
    stack = StackCosts(
        name="decoder",
        blocks=blocks_of("decoder", count),
        kinds=row,
        choices=((0,), choices) if frozen else (choices,),
        first=costs,
        inner=costs,
        last=costs,
        gradients=(0, gradient) if frozen else (gradient,),
        before=Phase(((INPUT, 0),), 10),
        before_backward=Phase(((1, 0), (-INPUT, 0)), 20),
        at_backward_bytes=INPUT,
        shared_bytes=0,
        before_at_backward_bytes=0,
    )
    behind = Phase(((head, 0), (head // 2, 0)), 50), Phase(((head, 0), (-head // 2, 0)), 100)
    return Costs(
        family="llama",
        model="SomeModel",
        actions=LADDERS.get(actions, (KEEP,) * actions),
        stacks=(stack,),
        head=behind,
        static=static or Static(parameters=100, buffers=0, optimizer=0, gradients=gradient * (count - frozen), batch=0),
        tokens=8,
        accumulation=accumulation,
    )


LADDERS_OF_BYTES = [(60, 0), (60, 25, 0), (60, 0, 25), (60, 25, 10, 0), (60, 0, 10, 25)]


@sparing("kept", [(kept,) for kept in LADDERS_OF_BYTES], ((60, 25, 0),), ((60, 0, 25),), ids=map(str, LADDERS_OF_BYTES))
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"gradient": 30}, {"head": 400}], ids=str)
def test_of_blocks_alike_those_come_first_that_leave_least(kept, accumulation, changes):
    """Among equal blocks, those that keep least come first, whatever the order of actions."""
    costs = alike(5, actions=len(kept), kept=kept, accumulation=accumulation, **changes)
    seen = set()
    for limit in range_of(costs):
        (chosen,) = fastest(costs, limit)
        sizes = [kept[action] for action in chosen]
        assert sizes == sorted(sizes), limit
        seen.add(chosen)
    assert (0,) * 5 in seen
    assert len(seen) > 3


def test_an_order_that_is_slower_is_not_taken():
    """The usual order is not used if it is slower: `full` takes longer in the first block here."""
    costs = alike(2, actions=2, head=400)
    (stack,) = costs.stacks
    first = stack.first[0, 1]
    slow = dataclasses.replace(first, forward=dataclasses.replace(first.forward, nanoseconds=900))
    stack = dataclasses.replace(stack, first={**stack.first, (0, 1): slow})
    costs = dataclasses.replace(costs, stacks=(stack,))
    tried = everything(costs)
    assert tried[(0, 1),][0] < tried[(1, 0),][0]
    assert tried[(0, 1),][1] == tried[(1, 0),][1] < tried[(0, 0),][1]
    assert fastest(costs, tried[(0, 1),][1]) == ((0, 1),)


# --- an encoder and a decoder ---------------------------------------------------------------------------------------


# --- errors if nothing fits -----------------------------------------------------------------------------------------


def refused(costs, budget):
    with pytest.raises(InfeasibleError) as caught:
        plan_within(costs, budget)
    assert sum(caught.value.parts.values()) == caught.value.floor_bytes > budget
    return caught.value


def test_logits_that_do_not_fit_are_named():
    costs = alike(4, head=100_000)
    full = worst_timeline(costs, costs.uniform(2))
    assert full.worst.label.startswith("head and loss")
    assert fastest(costs, 100_000) is None
    error = refused(costs, 100_000)
    assert error.floor_bytes == full.peak_bytes  # even `full` needs that much
    assert [hint for hint in error.hints if "the head and its loss are the peak" in hint and "chunks" in hint]
    assert "a smaller batch" in str(error)
    assert "LoRA" not in str(error)


def test_what_the_head_keeps_is_not_said_of_blocks():
    """Hints do not blame blocks for bytes that the head keeps: here, 50,000 of the head and 20 of blocks."""
    costs = alike(4, head=100_000)
    worst = worst_timeline(costs, costs.uniform(2)).worst
    assert worst.label == "head and loss, backward"
    assert worst.start_bytes - worst.static_bytes == 50_020
    for hint in refused(costs, 100_000).hints:
        assert not ("blocks" in hint and format_bytes(50_020) in hint)


def test_an_optimizer_that_does_not_fit_is_named():
    static = Static(parameters=2**20, buffers=0, optimizer=2 * 2**20, gradients=2**20, batch=0)
    error = refused(alike(4, static=static), 3 * 2**20)
    assert "weights 1.00 MiB, optimizer state 2.00 MiB and gradients 1.00 MiB alone need more" in str(error)
    assert "use LoRA" in str(error)
    assert "optimizer with a smaller state" in str(error)
    assert "a smaller batch" not in str(error)
    assert "head" not in str(error)
    assert error.parts["weights and optimizer state"] == 3 * 2**20


def test_blocks_that_do_not_fit_are_named():
    """With many inputs and a small head, hints name the blocks' kept bytes, which offloading can move."""
    costs = alike(40, head=2)
    error = refused(costs, 200)
    assert "a smaller batch with as many more accumulated steps, or shorter sequences" in str(error)
    assert [hint for hint in error.hints if "blocks" in hint and format_bytes(error.parts["kept for backward"]) in hint]
    assert "the head and its loss" not in str(error)
    assert "LoRA" not in str(error)


# --- options to compare with ----------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(costs=some_costs(most=6), points=st.integers(1, 12))
def test_the_frontier_trades_time_for_bytes(costs, points):
    low, high = ends_of(costs)
    options = frontier(costs, points)
    peaks = [option.peak_bytes for option in options]
    seconds = [option.step_seconds for option in options]
    assert seconds == sorted(seconds, reverse=True)
    assert peaks == sorted(peaks)
    assert peaks[0] == low
    assert peaks[-1] <= high
    assert len(options) <= points
    for option in options:
        assert (option.plan.prediction.peak_bytes, option.name) == (option.peak_bytes, "planned")
        best = step_nanoseconds(costs, fastest(costs, option.peak_bytes)) / 1e9
        assert best == option.step_seconds
    if points > 1:
        assert seconds[-1] == step_nanoseconds(costs, fastest(costs, high)) / 1e9


@settings(max_examples=40)
@given(costs=some_costs(most=6))
def test_nothing_usual_is_faster_than_the_plan_for_its_peak(costs):
    options = usual_options(costs, host_bandwidth=1e9)
    assert [options[0].name, *(option.name for option in options[-2:])] == ["none", "full", "offload (transformers)"]
    for option in options[:-1]:
        choice = fastest(costs, option.peak_bytes)
        assert step_nanoseconds(costs, choice) / 1e9 <= option.step_seconds
        assert worst_timeline(costs, choice).peak_bytes <= option.peak_bytes
    assert options[-1].plan is None


def test_usual_options_by_hand():
    """As in transformers, one counter covers both stacks; blocks without a choice are kept."""
    costs = made_up(2, [[0, 1, 1], [0, 0]], frozen=((0,), ()), actions=2)
    kinds = {
        option.name: [action.kind for _, action in option.plan.actions]
        for option in usual_options(costs, 1e9)
        if option.plan is not None
    }
    assert kinds == {
        "none": ["keep"] * 5,
        "every_n_layers: 4": ["keep", "keep", "keep", "keep", "full"],
        "every_n_layers: 3": ["keep", "keep", "keep", "full", "keep"],
        "every_n_layers: 2": ["keep", "keep", "full", "keep", "full"],
        "full": ["keep", "full", "full", "full", "full"],
    }


def test_offload_takes_the_inputs_away_and_time_for_it():
    costs = alike(8, head=2, actions=2)
    none, *_, full, offload = usual_options(costs, host_bandwidth=1e9)
    assert none.peak_bytes > full.peak_bytes > offload.peak_bytes
    assert offload.step_seconds == pytest.approx(full.step_seconds + 8 * 2 * INPUT / 1e9, abs=1e-12)


def test_an_input_that_was_taken_away_is_back_for_the_backward():
    """Offloading does not lower the peak of a single block: its input is back for its backward."""
    *_, full, offload = usual_options(alike(1, head=2, actions=2), host_bandwidth=1e9)
    assert full.peak_bytes == offload.peak_bytes == 100 + INPUT + 60 + 12 + INPUT


def test_options_need_full_to_compare_with():
    costs = dataclasses.replace(alike(2, actions=2), actions=(KEEP, KEEP))
    with pytest.raises(ValueError, match="no action `full`"):
        usual_options(costs, 1e9)


# --- depth ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [9, 10**9])
@pytest.mark.parametrize("rows", [[[0] * 200], [[0, 1] * 100], [[0] * 100, [1, 0] * 50]], ids=["one", "two", "stacks"])
def test_two_hundred_blocks_are_solved(rows, largest):
    costs = made_up(3, rows, actions=4, accumulation=2, largest=largest)
    low, high = ends_of(costs)
    assert fastest(costs, low - 1) is None
    choices = [fastest(costs, limit) for limit in (low, (low + high) // 2, high)]
    assert [len(chosen) for chosen in choices[1]] == [len(row) for row in rows]
    times = [step_nanoseconds(costs, choice) for choice in choices]
    assert times == sorted(times, reverse=True)
    assert worst_timeline(costs, choices[0]).peak_bytes == low
    assert worst_timeline(costs, choices[1]).peak_bytes <= (low + high) // 2


LLAMA_70B = {
    "kept": (313708544, 170115072, 170000384, 161726464, 161726465, 16777216, 16777215, 0),
    "times": (7736009, 8141548, 8183605, 8156024, 8155024, 11361453, 11367453, 11381453),
    "lent": 5177344,
}
"""Bytes and nanoseconds of a block under eight actions, roughly those of Llama 3.1 70B in 4 bits with adapters."""
MOST_FOLLOWED = 1_000
"""Limit of followed choices per block."""


@pytest.mark.parametrize("changes", [{}, {"gradient": 40_000_000, "accumulation": 2}, {"head": 4_000_000_000}], ids=str)
def test_few_choices_are_followed_through_eighty_blocks(changes, monkeypatch):
    """The search follows few choices per block; following all useful mixtures took a minute."""
    followed = []

    def counted(place, *rest):
        followed.append(len(place))
        return undominated(place, *rest)

    undominated = solver._undominated
    monkeypatch.setattr(solver, "_undominated", counted)
    costs = alike(80, actions=8, **LLAMA_70B, **changes)
    low, high = ends_of(costs)
    limits = [low + (high - low) * part // 5 for part in range(1, 5)]
    times = [step_nanoseconds(costs, fastest(costs, limit)) for limit in limits]
    assert times == sorted(set(times), reverse=True)
    assert 0 < sum(followed) / len(limits) < 80 * MOST_FOLLOWED


@given(costs=some_costs())
def test_the_plan_of_least_is_the_fastest_with_the_lowest_peak(costs):
    """If the optimizer's step is the peak, no block is recomputed in vain."""
    static = dataclasses.replace(costs.static, step_bytes=2**40)
    costs = dataclasses.replace(costs, static=static)
    chunked = dataclasses.replace(costs, head_tokens="auto", optimizer_nanoseconds=10**12)
    for ways in (costs, [chunked, costs]):
        plan = plan_of_least(ways)
        assert plan.prediction.peak_bytes == static.beside
        assert round(plan.prediction.step_seconds * 1e9) == min(time for time, _ in everything(costs).values())
        assert plan.head == "full"


def test_an_optimizer_step_that_does_not_fit_is_named():
    static = Static(parameters=2**20, buffers=0, optimizer=2 * 2**20, gradients=2**20, batch=0, step_bytes=2**20)
    error = refused(alike(4, static=static), 5 * 2**20 - 1)
    assert "the optimizer's step is the peak, whatever blocks do" in str(error)
    assert "a smaller batch" not in str(error)
