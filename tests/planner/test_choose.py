"""The fastest actions that fit: compared with trying every choice, with a slower twin, and errors if none fit."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from helpers.made_up import LADDERS, blocks_of, ends_of, made_up, some_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ckpt.costs.costs import BlockCost, Costs, Phase, StackCosts, Static
from hf_ckpt.costs.timeline import step_nanoseconds, worst_timeline
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.planner import choose
from hf_ckpt.planner.alternatives import frontier, usual_options
from hf_ckpt.planner.budgets import fits, peak_of_least, plan_of, plan_of_least, plan_within
from hf_ckpt.planner.choose import fastest, lowest_peak, smallest
from hf_ckpt.spec.actions import KEEP
from hf_ckpt.units import format_bytes


def everything(costs):
    """Every choice -> its (time, peak)."""
    stacks = [itertools.product(*map(stack.choices_at, range(len(stack.kinds)))) for stack in costs.stacks]
    choices = itertools.product(*(list(stack) for stack in stacks))
    return {choice: (step_nanoseconds(costs, choice), worst_timeline(costs, choice).peak_bytes) for choice in choices}


# --- against trying everything --------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(costs=some_costs(), width=st.sampled_from([12, 1000]))
def test_a_choice_is_as_fast_as_the_best_that_fits(costs, width):
    """A choice fits wherever some choice fits, and is as fast as the best. Narrow tables may miss it by 6 %."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "WIDTH", width)
        tried = everything(costs)
        peaks = sorted({peak for _, peak in tried.values()})
        assert lowest_peak(costs) == peaks[0]
        assert smallest(costs) == fastest(costs, peaks[0])
        assert fastest(costs, peaks[0] - 1) is None
        before = None
        for limit in (limit for peak in peaks for limit in (peak, peak + 1)):
            best = min(time for time, peak in tried.values() if peak <= limit)
            time, peak = tried[fastest(costs, limit)]  # only actions that each block may have
            assert peak <= limit
            assert best <= time <= best * (1 if width == 1000 else 1.06)
            assert before is None or time <= before  # a larger budget never costs time
            before = time


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**20), kinds=st.integers(1, 2), accumulation=st.integers(1, 2))
def test_twelve_blocks_are_within_a_percent_of_the_best(seed, kinds, accumulation):
    """Twelve blocks with times and bytes that have no common divisor, of one stack or of two."""
    costs = made_up(seed, [[0] * 6, [kinds - 1, 0] * 3], actions=2, accumulation=accumulation, largest=10**9)
    tried = everything(costs)
    low, high = ends_of(costs)
    for limit in range(low, high + 1, max(1, (high - low) // 20)):
        best = min(time for time, peak in tried.values() if peak <= limit)
        time, peak = tried[fastest(costs, limit)]
        assert time <= 1.01 * best
        assert peak <= limit


LLAMA_70B = {
    "kept": (313708544, 170115072, 170000384, 161726464, 161726465, 16777216, 16777215, 0),
    "times": (7736009, 8141548, 8183605, 8156024, 8155024, 11361453, 11367453, 11381453),
    "lent": 5177344,
}
"""Bytes and nanoseconds of a block under eight actions, roughly those of Llama 3.1 70B in 4 bits with adapters."""


@pytest.mark.parametrize("changes", [{}, {"gradient": 40_000_000, "accumulation": 2}, {"head": 4_000_000_000}], ids=str)
def test_a_deep_model_is_planned_as_with_a_wide_table(changes, monkeypatch):
    """80 blocks with 8 actions: within 0.1 % of a table in which eight times as many ways are followed."""
    costs, twin = (alike(80, actions=8, **LLAMA_70B, **changes) for _ in range(2))
    low, high = ends_of(costs)
    limits = [low + (high - low) * part // 8 for part in range(9)]
    times = [step_nanoseconds(costs, fastest(costs, limit)) for limit in limits]
    monkeypatch.setattr(choose, "WIDTH", 8_000)
    best = [step_nanoseconds(twin, fastest(twin, limit)) for limit in limits]
    assert times == sorted(set(times), reverse=True)
    assert all(1 <= time / least <= 1.001 for time, least in zip(times, best, strict=True))


@given(costs=some_costs())
def test_any_integer_is_a_limit(costs):
    best = min(time for time, _ in everything(costs).values())
    for limit in (10**6, 2**62, 2**63, 10**30):
        assert step_nanoseconds(costs, fastest(costs, limit)) == best
    assert fastest(costs, -1) is None
    assert fastest(costs, -(10**30)) is None


# --- plans ------------------------------------------------------------------------------------------------------------


@given(costs=some_costs(), more=st.integers(0, 60))
def test_a_plan_is_within_its_budget_or_an_error_says_why(costs, more):
    floor, _ = ends_of(costs)
    plan = plan_within(costs, floor + more, "a100-80")
    choice = fastest(costs, floor + more)
    assert plan == plan_of(costs, choice)
    assert plan.prediction.peak_bytes == worst_timeline(costs, choice).peak_bytes <= floor + more
    assert plan.prediction.step_seconds == step_nanoseconds(costs, choice) / 1e9
    assert (plan.prediction.budget_bytes, plan.prediction.device) == (floor + more, "a100-80")
    assert fits(costs, floor)
    assert not fits(costs, floor - 1)
    with pytest.raises(InfeasibleError) as caught:
        plan_within(costs, floor - 1)
    error = caught.value
    assert isinstance(error, HfCkptError)
    assert (error.budget_bytes, error.floor_bytes) == (floor - 1, floor)
    assert sum(error.parts.values()) == floor
    lines = str(error).splitlines()
    assert f"no plan fits into {format_bytes(floor - 1)}: the lowest peak is {format_bytes(floor)} (" in lines[0]
    assert lines[1:] == [f"  - {hint}" for hint in error.hints]
    assert error.hints


@given(costs=some_costs())
def test_the_plan_of_least_is_the_fastest_with_the_lowest_peak(costs):
    """If the optimizer's step is the peak, no block is recomputed in vain, whatever the order of candidates."""
    static = dataclasses.replace(costs.static, step_bytes=2**40)
    costs = dataclasses.replace(costs, static=static)
    slower = dataclasses.replace(costs, head_tokens="auto", optimizer_nanoseconds=10**12)
    for ways in (costs, [slower, costs]):
        plan = plan_of_least(ways)
        assert plan.prediction.peak_bytes == static.beside == peak_of_least(ways)
        assert round(plan.prediction.step_seconds * 1e9) == min(time for time, _ in everything(costs).values())
        assert plan.head == "full"


INPUT = 4
"""Bytes of each block's input."""


def alike(count, *, head=30, actions=3, kept=(60, 25, 0), times=None, lent=0, static=None, gradient=0, accumulation=1):
    """Costs of a stack of equal blocks, which recompute what they drop, as real ones do.

    `kept` and `times`: bytes, and nanoseconds of the backward, under each action. `lent`: bytes that last until the
    forward ends, under all actions but the first.
    """
    costs = {}
    for number, size in enumerate(kept):
        lends = lent if number else 0
        forward = Phase(((max(kept) + 10, 0), (size + INPUT + lends, 0)), 100)
        again = max(kept) - size
        backward = Phase(((again + 12, 0), (-size - INPUT, gradient)), times[number] if times else 200 + again)
        costs[0, number] = BlockCost(forward, backward, INPUT, lends)
    stack = StackCosts(
        name="decoder",
        blocks=blocks_of("decoder", count),
        kinds=(0,) * count,
        choices=(tuple(range(actions)),),
        first=costs,
        inner=costs,
        last=costs,
        gradients=(gradient,),
        before=Phase(((INPUT, 0),), 10),
        before_backward=Phase(((1, 0), (-INPUT, 0)), 20),
        at_backward_bytes=INPUT,
        shared_bytes=0,
        before_at_backward_bytes=0,
    )
    return Costs(
        family="llama",
        model="SomeModel",
        actions=LADDERS.get(actions, (KEEP,) * actions),
        stacks=(stack,),
        head=(Phase(((head, 0), (head // 2, 0)), 50), Phase(((head, 0), (-head // 2, 0)), 100)),
        static=static or Static(parameters=100, buffers=0, optimizer=0, gradients=gradient * count, batch=0),
        tokens=8,
        accumulation=accumulation,
    )


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"gradient": 30}, {"head": 400}, {"kept": (60, 0, 25)}], ids=str)
def test_of_blocks_alike_those_come_first_that_keep_least(accumulation, changes):
    """The last blocks keep most, whatever the order of the actions: their backwards free it before gradients come."""
    costs = alike(5, accumulation=accumulation, **changes)
    kept = changes.get("kept", (60, 25, 0))
    low, high = ends_of(costs)
    chosen = [fastest(costs, limit)[0] for limit in range(low, high + 1)]
    assert all(sorted(row, key=kept.__getitem__) == list(row) for row in chosen)
    assert (0,) * 5 in chosen
    assert len(set(chosen)) > 3


@pytest.mark.parametrize(
    ("changes", "budget", "said", "unsaid"),
    [
        pytest.param(
            {"head": 100_000},
            100_000,
            ["the head and its loss are the peak, with", "chunks", "a smaller batch"],
            ["LoRA", "what blocks keep"],
            id="logits",
        ),
        pytest.param(
            {"static": Static(parameters=2**20, buffers=0, optimizer=2 * 2**20, gradients=2**20, batch=0)},
            3 * 2**20,
            ["weights 1.00 MiB, optimizer state 2.00 MiB and gradients 1.00 MiB alone need more", "use LoRA"],
            ["a smaller batch", "head"],
            id="state",
        ),
        pytest.param(
            {"static": Static(2**20, buffers=0, optimizer=2 * 2**20, gradients=2**20, batch=0, step_bytes=2**20)},
            5 * 2**20 - 1,
            ["the optimizer's step is the peak, whatever blocks do"],
            ["a smaller batch"],
            id="step",
        ),
        pytest.param(
            {"count": 40, "head": 2},
            200,
            ["a smaller batch with as many more accumulated steps, or shorter sequences", "what blocks keep is"],
            ["the head and its loss", "LoRA"],
            id="blocks",
        ),
    ],
)
def test_an_error_names_what_fills_the_lowest_peak_and_what_would_lower_it(changes, budget, said, unsaid):
    with pytest.raises(InfeasibleError) as caught:
        plan_within(alike(**{"count": 4, **changes}), budget)
    error = caught.value
    assert sum(error.parts.values()) == error.floor_bytes > budget
    assert [text for text in said if text not in str(error)] == []
    assert [text for text in unsaid if text in "".join(error.hints)] == []


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
        assert option.step_seconds == plan_within(costs, option.peak_bytes).prediction.step_seconds
    assert points == 1 or seconds[-1] == step_nanoseconds(costs, fastest(costs, high)) / 1e9


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
    """Blocks' inputs are away between forward and backward; that of a single block is back for its backward."""
    none, *_, full, offload = usual_options(alike(8, head=2, actions=2, kept=(60, 0)), host_bandwidth=1e9)
    assert none.peak_bytes > full.peak_bytes > offload.peak_bytes
    assert offload.step_seconds == pytest.approx(full.step_seconds + 8 * 2 * INPUT / 1e9, abs=1e-12)
    *_, full, offload = usual_options(alike(1, head=2, actions=2, kept=(60, 0)), host_bandwidth=1e9)
    assert full.peak_bytes == offload.peak_bytes == 100 + INPUT + 60 + 12 + INPUT
