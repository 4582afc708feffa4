"""Finds the fastest choice of actions for every limit, in one table. Does not import torch.

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

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import numpy.typing

from hf_ckpt.costs.costs import Choice, Cost, Costs
from hf_ckpt.spec.actions import Action

WIDTH = 1000
"""Most ways to run the calls from a place on that are kept."""
SIZES = 4
"""Most numbers of bytes that the end of a stack is assumed to free."""
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the calls so far that are assumed to free memory when the forward ends, to compare ways."""
_NO_BYTES = -(2**61)
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


def fastest_choice(costs: Costs, limit: int) -> Choice | None:
    """The choice with the least predicted time whose peak is at most `limit` bytes; None if no choice fits.

    Of equally fast choices, that with earlier actions is taken, and of their orders, that in which the first calls keep
    least.
    """
    fitting = [table for table in _tables(costs) if table.peaks[-1] <= limit]
    if not fitting:
        return None
    fastest = min(fitting, key=lambda table: table.times[table.first(limit)])
    return fastest.choice(fastest.first(limit))


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
        in_forward = numpy.array([_NO_BYTES], dtype=numpy.int64)
        """For each way, most bytes alive before the model's forward ends, above what the parts before it have left."""
        in_backward = numpy.array([_NO_BYTES], dtype=numpy.int64)
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

    def first(self, limit: int) -> int:
        """The place of the fastest plan whose peak is at most `limit` bytes; there is one."""
        return next(place for place, peak in enumerate(self.peaks) if peak <= limit)

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
        # Those that keep least come first.
        for action, cost in sorted(call.costs.items(), key=lambda pair: pair[1].kept_bytes):
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
