"""Finds the fastest plan within a budget, or the one with the lowest peak. Pure functions that do not import torch.

Every moment of a step needs the bytes that the calls so far have left, plus bytes of its own. So the table of a batch
is made from the last call to the first: each way to run the calls from a place on has its time, and the bytes that it
needs above those alive before them. A way that is slower and needs more than another is dropped. At the first call, the
rest are the fastest plans for every limit there is; a limit only selects one of them, so a larger limit never costs
time. If a place has more than `WIDTH` ways, ways of about the same time are dropped, too.

A way needs bytes at two kinds of moments: before the model's forward ends, when casts of weights that the calls before
it use are alive, too, and after that. These casts depend on the actions before the way, which are not chosen yet. So
the two numbers of a way are compared for several shares of the most that they can be.

What a call keeps may depend on the actions of others. A call that can rebuild its hidden states from the call before
has an option for each number of bytes that the two may rebuild; ways that count on different numbers are not compared.
A stack frees what none of its calls keeps, so there is a table for each number of bytes that it may free.

Bytes are exact. Times are exact up to `WIDTH` ways, and good to a small share of what recomputation costs beyond.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import numpy.typing

from hf_ckpt.costs.costs import (
    RECOMPUTED,
    CallCosts,
    Choice,
    Cost,
    Costs,
    step_nanoseconds,
    timeline,
    with_segments,
)
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.planner import policies
from hf_ckpt.spec.actions import KEEP, Action
from hf_ckpt.spec.plan import Plan, Prediction
from hf_ckpt.spec.reading import Segments
from hf_ckpt.units import format_bytes

NEARLY = 1.02
"""If no plan fits, the plan may need this multiple of the lowest peak: the last percents of memory cost most time."""
WIDTH = 1000
"""Most ways to run the calls from a place on that are kept."""
LONG = 8
"""Blocks of a stack from which several numbers of segments are compared."""
SIZES = 4
"""Most numbers of bytes that the end of a stack is assumed to free."""
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the calls so far that are assumed to free memory when the forward ends, to compare ways."""
_NOTHING = -(2**61)
"""Bytes that nothing needs; far below all others, and above half of the smallest int64."""
Numbers = numpy.typing.NDArray[numpy.int64]


class _Option(NamedTuple):
    """One action of a call, or a part of the step without a choice."""

    forward: int
    """Most bytes of the forward, including those always alive, above those that the calls before have left."""
    backward: int
    """Most bytes of the backward, including all others alive then, above those that the calls before keep."""
    kept: int
    """Bytes kept until the backward."""
    forward_only: int = 0
    """Further bytes left until the model's forward ends."""
    time: int = 0
    """Nanoseconds, multiplied so that of equally fast actions the first in `Costs.actions` wins."""
    rebuilt: int = 0
    """Bytes that the next call need not keep if it rebuilds them, too."""
    needs: int = 0
    """The least `rebuilt` that this option counts on in the call before."""


def fastest(costs: Costs, limit: int) -> Choice | None:
    """The choice with the least predicted time whose peak is at most `limit` bytes; None if no choice fits.

    Of equally fast choices, that with earlier actions is taken, and of their orders, that in which the first calls keep
    least.
    """
    fitting = [
        (table.times[place], table, place) for table in _tables(costs) if (place := table.first(limit)) is not None
    ]
    if not fitting:
        return None
    _, table, place = min(fitting, key=lambda row: row[0])
    return table.choice(place)


def lowest_peak(costs: Costs) -> int:
    """The lowest peak of all choices, in bytes."""
    return min(table.peaks[-1] for table in _tables(costs))


@functools.lru_cache(maxsize=64)  # a planner asks for many limits of the same `Costs` object
def _tables(costs: Costs) -> list[_Table]:
    """A table for each number of bytes that the end of each stack may free.

    A stack frees what none of its calls keeps. So each table has only the actions that free at least as much as it
    counts on.
    """
    least: dict[str, list[int]] = {}
    for call in costs.calls:
        sizes = sorted({cost.shared_bytes for cost in call.costs.values()})
        sizes_so_far = least.setdefault(call.block.stack, sizes)
        most = min(sizes_so_far[-1], sizes[-1])
        least[call.block.stack] = sorted(size for size in {*sizes_so_far, *sizes} if size <= most)
    # Few in real models. If there are many, the smaller ones, which hold for all, and the largest stay.
    freed = [sizes if len(sizes) <= SIZES else [*sizes[: SIZES - 1], sizes[-1]] for sizes in least.values()]
    tables = []
    for combination in itertools.product(*freed):
        of_stack = dict(zip(least, combination, strict=True))
        calls = []
        for call in costs.calls:
            may = {a: cost for a, cost in call.costs.items() if cost.shared_bytes >= of_stack[call.block.stack]}
            calls.append(dataclasses.replace(call, costs=may))
        tables.append(_Table(dataclasses.replace(costs, calls=tuple(calls)), sum(combination)))
    return tables


class _Table:
    """The plans that are the fastest for some limit, the fastest plan first.

    Args:
        costs: of the step.
        freed: bytes that are freed with the stacks, whatever is chosen.
    """

    def __init__(self, costs: Costs, freed: int) -> None:
        self._ways: list[tuple[Numbers, Numbers]] = []
        """For each part of the step, from the last to the first, and each way to run it and what follows: the number of
        the option, and which of the ways of the part that follows."""
        stages = list(_stages(costs, freed))
        self._actions = [[action for action, _ in stage] for stage in reversed(stages)]
        """For each of these parts, the actions of its options."""
        most_before = numpy.cumsum([0, *(max(option.forward_only for _, option in stage) for stage in stages)])
        """Most bytes that all parts before a part have left until the forward ends."""
        time = numpy.array([0], dtype=numpy.int64)
        in_forward = numpy.array([_NOTHING], dtype=numpy.int64)
        """For each way, most bytes alive before the model's forward ends, above what the parts before it have left."""
        in_backward = numpy.array([_NOTHING], dtype=numpy.int64)
        """The same afterwards."""
        needs = numpy.array([0], dtype=numpy.int64)
        """The least `rebuilt` that a way needs of the part before it."""
        for number in range(len(stages) - 1, -1, -1):
            rows = [option for _, option in stages[number]]
            columns: Any = numpy.array(rows, dtype=numpy.int64).T[:, :, None]
            forward, backward, kept, forward_only, spent, rebuilt, needed = columns
            width = len(time)
            possible = numpy.flatnonzero(rebuilt >= needs)
            time = (spent + time).ravel()[possible]
            in_forward = numpy.maximum(forward, kept + forward_only + in_forward).ravel()[possible]
            in_backward = numpy.maximum(backward, kept + in_backward).ravel()[possible]
            needs = numpy.repeat(needed, width)[possible]
            chosen = []
            for need in numpy.unique(needs):  # a way that needs more of the part before is not compared with others
                same = numpy.flatnonzero(needs == need)
                fronts = []
                for share in _SHARES if most_before[-1] else _SHARES[:1]:
                    before = most_before[round(share * number)]
                    peaks = numpy.maximum(in_forward[same] + before, in_backward[same])
                    fronts.append(_front(time[same], peaks, WIDTH))
                # The ways with the lowest peaks must stay, whatever comes before them.
                if most_before[-1]:
                    fronts.append(_front(in_forward[same], in_backward[same]))
                chosen.append(same[numpy.unique(numpy.concatenate(fronts))])
            ways = numpy.sort(numpy.concatenate(chosen))
            self._ways.append((possible[ways] // width, possible[ways] % width))
            time = time[ways]
            in_forward = in_forward[ways]
            in_backward = in_backward[ways]
            needs = needs[ways]
        peaks = numpy.maximum(numpy.maximum(in_forward, in_backward), costs.static.optimizer_peak_bytes)
        self._order = _front(time, peaks)
        self.peaks: list[int] = peaks[self._order].tolist()
        """The peak of each plan, in bytes; the last is the lowest."""
        self.times: list[int] = time[self._order].tolist()
        """The time of each plan, as in `_Option.time`."""

    def first(self, limit: int) -> int | None:
        """The place of the fastest plan whose peak is at most `limit` bytes; None if there is none."""
        return next((place for place, peak in enumerate(self.peaks) if peak <= limit), None)

    def choice(self, place: int) -> Choice:
        """The actions of a plan."""
        way = int(self._order[place])
        actions = []
        for options, (number, following) in zip(reversed(self._actions), reversed(self._ways), strict=True):
            action = options[number[way]]
            if action is not None:
                actions.append(action)
            way = following[way]
        return tuple(actions)


def _front(first: Numbers, second: Numbers, width: int | None = None) -> Numbers:
    """The positions of pairs that are not as large as another in both, by their first number.

    If there are more than `width`, the range of first numbers is divided into as many parts, and the last pair of each
    stays.
    """
    order = numpy.lexsort((second, first))  # by the first number, and of equal ones by the second
    values = second[order]
    least = numpy.minimum.accumulate(values)
    front: Numbers = order[numpy.concatenate([[True], values[1:] < least[:-1]])]
    if width is not None and len(front) > width:
        offsets = first[front] - first[front[0]]
        parts = offsets // max(1, int(offsets[-1]) // (width - 1))
        front = front[numpy.concatenate([parts[1:] != parts[:-1], [True]])]
    return front


def _stages(costs: Costs, freed: int) -> Iterator[list[tuple[Action | None, _Option]]]:
    """The parts of a step in the order of the forward, with their backward, see `timeline`: actions and options.

    What runs before the calls, and the head, have one option without an action. `freed` is as in `_Table`.
    """
    resident = costs.resident_bytes
    yield [(None, _Option(resident + costs.before.peak, resident + costs.before.net, costs.before.net))]
    gradients = sum(call.gradient_bytes for call in costs.calls)
    """Gradients of the calls from this one on, which are there when its backward has ended."""
    spent_at_most = sum(max(map(_nanoseconds, call.costs.values())) for call in costs.calls)
    # The sum of all positions is less than this factor, so that they decide only between equal times.
    factor = len(costs.actions) * len(costs.calls)
    unit = 1 + spent_at_most * factor // 2**61  # above 1 for steps of months, whose times would exceed int64
    before: tuple[str, set[int]] = "", set()
    """The stack of the last call, and what each of its actions can rebuild."""
    for call in costs.calls:
        gradients -= call.gradient_bytes
        beside = resident + costs.at_backward_bytes + gradients - freed
        stack = call.block.stack
        options: list[tuple[Action | None, _Option]] = []
        for action, cost in _least_first(call):
            time = _nanoseconds(cost) * factor // unit + costs.actions.index(action)
            # What this call can rebuild from the one before, and that one can rebuild as well, is not kept at all.
            needs = {size for size in before[1] if cost.rebuilt_bytes} if stack == before[0] else set()
            for need in sorted({0, *needs}):
                kept = cost.kept_bytes - min(need, cost.rebuilt_bytes)
                backward = beside + kept + cost.backward.peak
                fixed = resident + cost.forward.peak, backward, kept, cost.forward_only_bytes, time
                options.append((action, _Option(*fixed, cost.rebuilt_bytes, need)))
        yield options
        before = stack, {cost.rebuilt_bytes for cost in call.costs.values()}
    forward, backward_part = costs.head
    backward = resident + forward.net + backward_part.peak - freed
    yield [(None, _Option(resident + forward.peak - freed, backward, 0))]


def _nanoseconds(cost: Cost) -> int:
    return cost.forward.nanoseconds + cost.backward.nanoseconds


def _least_first(call: CallCosts) -> list[tuple[Action, Cost]]:
    """The actions of a call and their costs; those that keep least come first."""
    return sorted(call.costs.items(), key=lambda pair: pair[1].kept_bytes)


# --- plans for a budget -----------------------------------------------------------------------------------------------


def plan_within(candidates: Sequence[Costs], budget_bytes: int, device: str = "") -> Plan:
    """The fastest plan whose predicted peak is at most `budget_bytes`.

    Args:
        candidates: costs of the same step, to plan with; of equally fast ones, the first is taken.
        budget_bytes: the peak that is allowed.
        device: what it was planned for: a row of the table of devices, or the name of the device that trains.

    Raises `InfeasibleError` if no plan fits, with what fills the lowest peak and what would lower it.
    """
    return plan_of(*choice_within(candidates, budget_bytes), budget_bytes, device)


def choice_within(candidates: Sequence[Costs], budget_bytes: int) -> tuple[Costs, Choice]:
    """The candidate and the choice of actions of the fastest plan within a budget.

    Takes the arguments of `plan_within`, and raises `InfeasibleError` like it.
    """
    choices = [(costs, choice) for costs in candidates if (choice := fastest(costs, budget_bytes)) is not None]
    if not choices:
        raise _infeasible(min(candidates, key=lowest_peak), budget_bytes)
    return min(choices, key=lambda pair: step_nanoseconds(*pair))


def best_plan(candidates: Sequence[Costs], budget_bytes: int, device: str = "") -> tuple[Plan, Sequence[str]]:
    """The plan of `plan_within`; if none fits, the fastest that is near the lowest peak, and what would lower that.

    A block that is called several times needs the same action in all its calls, which `plan_within` cannot ensure,
    because it chooses call by call. Then the first blocks get one action, and the rest another.
    """
    names = {call.block.name for call in candidates[0].calls}
    if len(names) == len(candidates[0].calls):
        try:
            return plan_within(candidates, budget_bytes, device), ()
        except InfeasibleError as error:
            most = round(NEARLY * error.floor_bytes)
            return plan_of(*choice_within(candidates, most), budget_bytes, device), error.hints
    in_runs = [(costs, choice) for costs in candidates for choice in _in_two_runs(costs)]
    peaks = [timeline(*pair).peak_bytes for pair in in_runs]
    hints = []
    most = budget_bytes
    if min(peaks) > budget_bytes:
        hints = [_fewer_tokens(candidates[0])]
        most = round(NEARLY * min(peaks))
    fitting = [pair for pair, peak in zip(in_runs, peaks, strict=True) if peak <= most]
    return plan_of(*min(fitting, key=lambda pair: step_nanoseconds(*pair)), budget_bytes, device), hints


def _in_two_runs(costs: Costs) -> Iterator[Choice]:
    """The choices with one action for the first blocks, and the same or one that keeps more for the rest."""
    names = dict.fromkeys(call.block.name for call in costs.calls)
    places = {name: place for place, name in enumerate(names)}
    # `costs.actions` begins with what keeps most, and so does each pair.
    for rest, first in itertools.combinations_with_replacement(map(costs.uniform, costs.actions), 2):
        for number in range(len(places)):
            yield tuple(
                first[place] if places[call.block.name] < number else rest[place]
                for place, call in enumerate(costs.calls)
            )


def peak_of_least(candidates: Sequence[Costs]) -> int:
    """The lowest peak of any plan, in bytes."""
    return min(map(lowest_peak, candidates))


def frontier(candidates: Sequence[Costs], points: int = 24) -> dict[int, Plan]:
    """Peak in bytes -> the fastest plan for it, for budgets from the lowest peak to that of no checkpointing, in even
    steps.

    Args:
        candidates: costs of the same step, to plan with.
        points: how many budgets; several may have one plan.
    """
    low = peak_of_least(candidates)
    high = max(low, timeline(candidates[0], candidates[0].uniform(KEEP)).peak_bytes)
    plans = [plan_within(candidates, low + (high - low) * number // max(points - 1, 1)) for number in range(points)]
    # Of equally fast plans, that with the lowest peak stays.
    by_seconds = {plan.prediction.step_seconds: plan for plan in reversed(plans) if plan.prediction}
    return {plan.prediction.peak_bytes: plan for plan in reversed(by_seconds.values()) if plan.prediction}


def plan_of(costs: Costs, choice: Choice, budget_bytes: int | None = None, device: str = "") -> Plan:
    """The plan that gives every call its chosen action, with the predicted cost.

    Args:
        costs: of the step.
        choice: the action of every call.
        budget_bytes: the peak that was allowed; None without a budget.
        device: what it was planned for: a row of the table of devices, or the name of the device that trains.
    """
    moments = timeline(costs, choice)
    prediction = Prediction(
        peak_bytes=moments.peak_bytes,
        step_seconds=step_nanoseconds(costs, choice) / 1e9,
        tokens=costs.tokens * costs.accumulation,
        parts=tuple(moments.worst.parts().items()),
        budget_bytes=budget_bytes,
        device=device,
        stacks=tuple(moments.kept_bytes.items()),
    )
    chosen = {call.block: action for call, action in zip(costs.calls, choice, strict=True)}
    pairs = tuple((block, chosen.get(block, KEEP)) for block in costs.blocks or chosen)
    return Plan(costs.family, costs.model, pairs, prediction, costs.head_tokens)


def in_segments_of(costs: Costs, segments: Segments | None = None, fixed: Collection[str] = ()) -> list[Costs]:
    """The costs of plans whose blocks are recomputed in segments, one plan each.

    Empty if there are none: too few blocks are recomputed, a block is called several times, or segments do not work.

    Args:
        costs: of the step.
        segments: as `Spec.segments`; None for several numbers of segments, from that for which a step holds least.
        fixed: names of blocks whose action is not chosen.
    """
    if not costs.divides or len({call.block for call in costs.calls}) < len(costs.calls):
        return []
    longest = max(collections.Counter(call.block.stack for call in costs.calls).values())
    shares = [longest * share // 4 for share in (2, 3)] if longest >= LONG else []
    numbers: list[Segments] = ["sqrt", *shares] if segments is None else [segments]
    plans = []
    for base in costs.actions:
        if base.kind not in RECOMPUTED:
            continue
        pairs = zip(costs.calls, costs.uniform(base), strict=True)
        held = {call.block: action for call, action in pairs if call.block.name not in fixed}
        for number in numbers:
            actions = policies.in_segments(held, number)
            if any(action.made for action in actions.values()):
                plans.append(with_segments(costs, actions))
    return plans


def _fewer_tokens(costs: Costs) -> str:
    """What lowers the memory of activations."""
    smaller = "" if costs.sequences == 1 else "a smaller batch with as many more accumulated steps, or "
    return f"{smaller}shorter sequences"


def _infeasible(costs: Costs, budget_bytes: int) -> InfeasibleError:
    """The error for a budget below the lowest peak of `costs`."""
    lowest = fastest(costs, lowest_peak(costs))
    assert lowest is not None
    moments = timeline(costs, lowest)
    parts = moments.worst.parts()
    hints = [_fewer_tokens(costs)]
    segments_bytes = min(map(lowest_peak, in_segments_of(costs)), default=moments.peak_bytes)
    if segments_bytes * NEARLY < moments.peak_bytes:
        hints.insert(
            0, f'segments of blocks ("segments": "sqrt"), with which the peak is {format_bytes(segments_bytes)}'
        )
    # Then nothing helps that lowers the memory of blocks.
    if costs.static.always + costs.static.gradients > budget_bytes or "optimizer" in moments.worst.label:
        alone = f"weights, gradients and the optimizer alone need {format_bytes(costs.static.optimizer_peak_bytes)}"
        hints = [f"{alone}: use LoRA, an optimizer with a smaller state or step, or shard them"]
    if moments.worst.label.startswith("head"):  # whose own memory no action of a block reduces
        # Advised only where a step has shown that it helps; TRL's losses, for example, never call the head.
        chunks = 'the head in chunks ("head": "auto"), or ' if costs.chunks_help else ""
        size = format_bytes(parts[f"temporary in {moments.worst.label}"])
        hints.append(f"the head and its loss are the peak, with {size}: {chunks}fewer tokens a micro-step")
    kept = parts["kept for backward"]
    if costs.has_host and kept and moments.peak_bytes - kept <= budget_bytes and len(costs.calls) > 1:
        hints.append(f"what blocks keep is {format_bytes(kept)} of it: a larger `host_budget` holds it in host memory")
    filled = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    above = f"{filled}), {format_bytes(moments.peak_bytes - budget_bytes)} too much. What would lower it:"
    lowest_bytes = format_bytes(moments.peak_bytes)
    message = f"no plan fits into {format_bytes(budget_bytes)}: the lowest peak is {lowest_bytes} ({above}"
    error = InfeasibleError(budget_bytes, moments.peak_bytes, parts, hints, message)
    error.notes = costs.notes
    return error
