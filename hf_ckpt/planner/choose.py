"""Chooses the fastest actions within a limit. Pure functions that do not import torch.

Every moment of a step needs the bytes that the blocks so far have left, plus bytes of its own. So the table of a batch
is made from the last block to the first: each way to run the blocks behind a place has its time, and the bytes that it
needs above those alive before them. A way that is slower and needs more than another is dropped. At the first block,
the rest are the fastest plans for every limit there is; a limit only selects one of them, so a larger limit never
costs time. If a place has more than `WIDTH` ways, ways of about the same time are dropped, too.

Bytes are exact. Times are exact up to `WIDTH` ways, and good to a small share of what recomputation costs beyond.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy
import numpy.typing

from hf_ckpt.costs.costs import Choice, Costs, Phase, StackCosts
from hf_ckpt.costs.timeline import step_nanoseconds, worst_timeline
from hf_ckpt.spec.actions import FULL

WIDTH = 1000
"""Most ways to run the blocks behind a place that are kept."""
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the blocks so far that are assumed to free memory when the forward ends, to compare the ways behind."""
_NOTHING = -(2**61)
"""Bytes that nothing needs; far below all others, and above half of the smallest int64."""
Numbers = numpy.typing.NDArray[numpy.int64]


@dataclasses.dataclass(frozen=True)
class _Option:
    """One action of a block, or a part of the step without a choice."""

    action: int
    """Position in `Costs.actions`; -1 without a choice."""
    forward: int
    """Most bytes of the forward, including those always alive, above those that the blocks before have left."""
    backward: int
    """Most bytes of the backward, including all others alive then, above those that the blocks before keep."""
    net: int
    """Bytes kept until the backward."""
    lent: int
    """Further bytes left until the model's forward ends."""
    nanoseconds: int


def fastest(costs: Costs, limit: int) -> Choice | None:
    """The choice with the least predicted time whose peak is at most `limit` bytes; None if no choice fits.

    Among blocks of one kind, actions that keep less come first if that is neither slower nor needs more memory.
    """
    if costs.segments:
        choice = costs.uniform(costs.actions.index(FULL))
        return choice if worst_timeline(costs, choice).peak_bytes <= limit else None
    table = _table(costs)
    place = next((place for place, peak in enumerate(table.peaks) if peak <= limit), None)
    # The table does not know what is freed at the end of a stack if all its blocks have one action.
    choices = [] if place is None else [_in_order(costs, table.choice(place))]
    choices += [choice for choice in _uniform(costs) if worst_timeline(costs, choice).peak_bytes <= limit]
    return min(choices, key=lambda choice: step_nanoseconds(costs, choice), default=None)


def _uniform(costs: Costs) -> list[Choice]:
    return [costs.uniform(number) for number in range(len(costs.actions))] if costs.stacks[0].ends else []


def smallest(costs: Costs) -> Choice:
    """The choice with the lowest peak; of several, the fastest."""
    choice = fastest(costs, lowest_peak(costs))
    assert choice is not None
    return choice


def lowest_peak(costs: Costs) -> int:
    """The lowest peak of all choices, in bytes."""
    if costs.segments:
        return worst_timeline(costs, costs.uniform(costs.actions.index(FULL))).peak_bytes
    return min([*_table(costs).peaks, *(worst_timeline(costs, choice).peak_bytes for choice in _uniform(costs))])


class _Table:
    """The plans that are the fastest for some limit, the fastest plan first."""

    def __init__(self, costs: Costs) -> None:
        self._stacks = costs.stacks
        self._steps: list[tuple[Numbers, Numbers]] = []
        """For each part of the step, last part first, and each way to run it and what is behind: the action, and which
        of the ways behind."""
        stages = list(_stages(costs))
        lent = numpy.cumsum([0, *(max(option.lent for option in stage) for stage in stages)])
        time, alive, level = (numpy.array([first], dtype=numpy.int64) for first in (0, _NOTHING, _NOTHING))
        for number in range(len(stages) - 1, -1, -1):
            action, forward, backward, net, lends, spent = _columns(stages[number])
            time = (spent + time).ravel()
            alive = numpy.maximum(forward, net + lends + alive).ravel()
            level = numpy.maximum(backward, net + level).ravel()
            reserves = {int(lent[round(share * number)]) for share in _SHARES}
            kept = [_front(time, numpy.maximum(alive + reserve, level), WIDTH) for reserve in reserves]
            ways = numpy.unique(numpy.concatenate([*kept, *([_front(alive, level)] if lent[-1] else [])]))
            width = len(time) // len(action)
            self._steps.append((action[ways // width, 0], ways % width))
            time, alive, level = time[ways], alive[ways], level[ways]
        peaks = numpy.maximum(numpy.maximum(alive, level), costs.static.beside)
        self._order = _front(time, peaks)
        self.peaks: list[int] = peaks[self._order].tolist()

    def choice(self, place: int) -> Choice:
        """The actions of a plan."""
        way, actions = int(self._order[place]), []
        for action, behind in reversed(self._steps):
            actions.append(int(action[way]))
            way = int(behind[way])
        chosen = iter([action for action in actions if action >= 0])
        return tuple(tuple(next(chosen) for _ in stack.blocks) for stack in self._stacks)


@functools.lru_cache(maxsize=8)
def _table(costs: Costs) -> _Table:
    return _Table(costs)


def _columns(stage: list[_Option]) -> Iterator[Any]:
    """The fields of options, each as a column."""
    return iter(numpy.array([dataclasses.astuple(option) for option in stage], dtype=numpy.int64).T[:, :, None])


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
        parts = offsets * (width - 1) // max(1, int(offsets[-1]))
        front = front[numpy.concatenate([parts[1:] != parts[:-1], [True]])]
    return front


def _stages(costs: Costs) -> Iterator[list[_Option]]:
    """The parts of a step in the order of the forward, with their backward."""
    pending = sum(stack.before_backward.gradients for stack in costs.stacks)
    pending += sum(stack.gradients[kind] for stack in costs.stacks for kind in stack.kinds)
    pending += costs.head[1].gradients
    held = sum(stack.held_by(kind) for stack in costs.stacks for kind in stack.kinds)
    always = costs.static.always + (costs.static.gradients if True in costs.modes else 0)

    def option(
        action: int, forward: Phase, backward: Phase, turn: int, net: int, lent: int = 0, first: int = 0, held: int = 0
    ) -> _Option:
        needs = costs.static.always + first + held + backward.peak(False)
        if True in costs.modes:
            needs = max(needs, always + held + backward.peak(True))
        nanoseconds = forward.nanoseconds + backward.nanoseconds
        return _Option(action, always + forward.peak(True), turn + needs, net, lent, nanoseconds)

    for stack in costs.stacks:
        pending -= stack.before_backward.gradients
        net = stack.before.net
        turn = net + stack.before_at_backward_bytes
        yield [option(-1, stack.before, stack.before_backward, turn, net, first=pending, held=held)]
        for place, kind in enumerate(stack.kinds):
            pending, held = pending - stack.gradients[kind], held - stack.held_by(kind)
            shared = stack.at_backward_bytes + (0 if place == len(stack.kinds) - 1 else stack.shared_bytes)
            options = []
            for action in stack.choices_at(place):
                cost = stack.cost_at(place, action)
                net, lent = cost.forward.net - cost.forward_only_bytes, cost.forward_only_bytes
                turn = net + shared - cost.output_bytes
                options.append(option(action, cost.forward, cost.backward, turn, net, lent, pending, held))
            yield options
    forward, backward = costs.head
    yield [option(-1, forward, backward, forward.net, 0)]


def _in_order(costs: Costs, choice: Choice) -> Choice:
    """Sort the actions of each kind so that those that keep the least come first, if that is not worse."""
    now = worst_timeline(costs, choice)
    ordered = tuple(_ordered(stack, row) for stack, row in zip(costs.stacks, choice, strict=True))
    for stack, row in zip(costs.stacks, ordered, strict=True):
        if any(action not in stack.choices_at(place) for place, action in enumerate(row)):
            return choice
    then = worst_timeline(costs, ordered)
    return ordered if then.nanoseconds <= now.nanoseconds and then.peak_bytes <= now.peak_bytes else choice


def _ordered(stack: StackCosts, chosen: tuple[int, ...]) -> tuple[int, ...]:
    """The actions of one stack, sorted within each kind: those that keep the least come first."""

    def kept(key: tuple[int, int]) -> tuple[int, int]:
        cost = stack.inner.get(key) or stack.last.get(key) or stack.first[key]
        return cost.forward.net - cost.forward_only_bytes, key[1]

    rows = {
        kind: iter(sorted(((k, a) for k, a in zip(stack.kinds, chosen, strict=True) if k == kind), key=kept))
        for kind in stack.kinds
    }
    return tuple(next(rows[kind])[1] for kind in stack.kinds)
