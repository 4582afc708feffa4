"""Chooses the fastest actions within a limit. Pure functions that do not import torch.

Every moment of a step needs the bytes that the calls so far have left, plus bytes of its own. So the table of a batch
is made from the last call to the first: each way to run the calls behind a place has its time, and the bytes that it
needs above those alive before them. A way that is slower and needs more than another is dropped. At the first call, the
rest are the fastest plans for every limit there is; a limit only selects one of them, so a larger limit never costs
time. If a place has more than `WIDTH` ways, ways of about the same time are dropped, too.

Bytes are exact. Times are exact up to `WIDTH` ways, and good to a small share of what recomputation costs beyond.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import numpy.typing

from hf_ckpt.costs.costs import CallCosts, Choice, Cost, Costs, timeline
from hf_ckpt.spec.actions import Action

WIDTH = 1000
"""Most ways to run the calls behind a place that are kept."""
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the calls so far that are assumed to free memory when the forward ends, to compare the ways behind."""
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
    lent: int = 0
    """Further bytes left until the model's forward ends."""
    nanoseconds: int = 0
    """Time, multiplied so that the position of the action in `Costs.actions` decides between equally fast ones."""


def fastest(costs: Costs, limit: int) -> Choice | None:
    """The choice with the least predicted time whose peak is at most `limit` bytes; None if no choice fits.

    Of equally fast choices, that with earlier actions is taken, and of their orders, that in which the first calls keep
    least.
    """
    table = _table(costs)
    for place, peak in enumerate(table.peaks):
        if peak <= limit or (peak <= limit + table.more and table.exact_peak(place) <= limit):
            return table.choice(place)
    return None


def lowest_peak(costs: Costs) -> int:
    """The lowest peak of all choices, in bytes."""
    table = _table(costs)
    near = [place for place, peak in enumerate(table.peaks) if peak <= table.peaks[-1] + table.more]
    return min(map(table.exact_peak, near))


class _Table:
    """The plans that are the fastest for some limit, the fastest plan first."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._steps: list[tuple[Numbers, Numbers]] = []
        """For each call, last call first, and each way to run it and what is behind: the number of the action, and
        which of the ways behind."""
        stages = list(_stages(costs))
        lent = numpy.cumsum([0, *(max(option.lent for option in stage) for stage in stages)])
        time, alive, level = (numpy.array([first], dtype=numpy.int64) for first in (0, _NOTHING, _NOTHING))
        for number in range(len(stages) - 1, -1, -1):
            columns: Any = numpy.array(stages[number], dtype=numpy.int64).T[:, :, None]
            forward, backward, kept, lends, spent = columns
            width = len(time)
            time = (spent + time).ravel()
            alive = numpy.maximum(forward, kept + lends + alive).ravel()
            level = numpy.maximum(backward, kept + level).ravel()
            fronts = [_front(time, numpy.maximum(alive + lent[round(s * number)], level), WIDTH) for s in _SHARES]
            ways = numpy.unique(numpy.concatenate([*fronts, _front(alive, level)] if lent[-1] else fronts[:1]))
            self._steps.append((ways // width, ways % width))
            time, alive, level = time[ways], alive[ways], level[ways]
        peaks = numpy.maximum(numpy.maximum(alive, level), costs.static.beside)
        self._order = _front(time, peaks)
        self.peaks: list[int] = peaks[self._order].tolist()
        """The peak of each plan, in bytes; the last is the lowest. What a call keeps or not depending on the actions of
        other calls counts as kept."""
        self.more = sum(
            max(cost.shared_bytes + cost.rebuilt_bytes for cost in call.costs.values()) for call in costs.calls
        )
        """Bytes by which these may be too high."""

    def exact_peak(self, place: int) -> int:
        """The peak of a plan, in bytes."""
        return timeline(self._costs, self.choice(place)).peak_bytes

    def choice(self, place: int) -> Choice:
        """The actions of a plan."""
        way, actions = int(self._order[place]), []
        # The first and the last step are what runs before the calls, and the head.
        for call, (number, behind) in zip((None, *self._costs.calls), reversed(self._steps[1:]), strict=True):
            if call is not None:
                actions.append(_least_first(call)[number[way]][0])
            way = behind[way]
        return tuple(actions)


_table = functools.lru_cache(maxsize=64)(_Table)


def _front(first: Numbers, second: Numbers, width: int | None = None) -> Numbers:
    """The positions of pairs that are not as large as another in both, by their first number.

    If there are more than `width`, the range of first numbers is divided into as many parts, and the last pair of each
    stays.
    """
    order = numpy.lexsort((second, first))
    values = second[order]
    least = numpy.minimum.accumulate(values)
    front: Numbers = order[numpy.concatenate([[True], values[1:] < least[:-1]])]
    if width is not None and len(front) > width:
        offsets = first[front] - first[front[0]]
        parts = offsets // max(1, int(offsets[-1]) // (width - 1))
        front = front[numpy.concatenate([parts[1:] != parts[:-1], [True]])]
    return front


def _stages(costs: Costs) -> Iterator[list[_Option]]:
    """The parts of a step in the order of the forward, with their backward; see `timeline`."""
    alive, done = costs.resident_bytes, sum(call.gradient_bytes for call in costs.calls)
    yield [_Option(alive + costs.before.peak, alive + costs.before.net, costs.before.net)]
    ranks = {action: rank for rank, action in enumerate(costs.actions)}
    for call in costs.calls:
        done -= call.gradient_bytes
        behind = alive + costs.at_backward_bytes + done
        """Bytes alive in the backward beside those that the calls so far keep."""
        options = []
        for action, cost in _least_first(call):
            kept = cost.kept_bytes
            needs = alive + cost.forward.peak, behind + kept + cost.backward.peak
            spent = cost.forward.nanoseconds + cost.backward.nanoseconds
            time = spent * len(ranks) * len(costs.calls) + ranks[action]
            options.append(_Option(*needs, kept, cost.lent_bytes, time))
        yield options
    forward, backward = costs.head
    yield [_Option(alive + forward.peak, alive + forward.net + backward.peak, 0)]


def _least_first(call: CallCosts) -> list[tuple[Action, Cost]]:
    """The actions of a call and their costs; those that keep least come first."""
    return sorted(call.costs.items(), key=lambda pair: pair[1].kept_bytes)
