"""Finds the fastest actions within a limit, exactly, in milliseconds at any usual depth. Does not import torch.

The task: assign an action to each block, so that the step takes the least time and no moment of it exceeds the limit.
Block by block through the forward, every moment needs `alive + need` bytes. Alive are the bytes that the blocks so far
have left: `level` bytes until the backward, `lent` bytes until the forward ends. The need depends on the block and its
position. The same holds for the block's backward: alive are the bytes that this block and those before it have left,
plus constants (see `timeline`).

The search keeps all choices for the blocks so far that may become the best, and drops the others for four reasons:

- They cannot be completed. `_Search._needs_ahead` computes the least bytes that the blocks ahead need. It also gives
  the lowest peak, without a search.
- Exchanging two neighbours is never worse (`_exchanged`): exchanged, two blocks of a kind
  never need more, take longer or leave more. Only one of their orders is tried.
- They cannot become faster than the best known choice. A price for the bytes of one moment gives a lower bound on the
  time ahead (`_Priced`), as in Lagrangian relaxation of a knapsack.
- Another choice with the same last action is as fast and leaves no more bytes.

Dropping these loses no best choice, so the result is exact for any costs; how many are dropped only affects the time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import numpy.typing

from hf_ckpt.costs.costs import Choice, Costs, Key, Phase, StackCosts
from hf_ckpt.costs.timeline import worst_timeline
from hf_ckpt.spec.actions import FULL

_MANY = 2**61
"""More bytes than any device has; less than half of the largest int64."""
_WIDTH = 256
"""Most choices for the blocks so far in the first search; if there are more, a wider search follows."""
_PRICED = 3
"""Most moments whose bytes get a price."""
_DEAR = 2.0**40
"""Nanoseconds per byte, so high that time does not matter."""
_ROUNDING = 0.5
"""Nanoseconds by which floating-point sums may be off; times are integers."""
Numbers = numpy.typing.NDArray[numpy.int64]
Truths = numpy.typing.NDArray[numpy.bool_]
Moment = tuple[int, bool]
"""(number of the block's stage, whether it is the block's backward)."""
Path = tuple[int, ...]
"""For each stage, the position of the chosen key."""


@dataclasses.dataclass(frozen=True)
class _Moves:
    """The costs of a part of the step, for each action that may be chosen there."""

    forward: Numbers
    """Most bytes of the forward, including those always alive, above `level` and `lent` of the blocks before."""
    backward: Numbers
    """Most bytes of the backward, including all others alive then, above `level` of the blocks before."""
    net: Numbers
    """Bytes kept until the backward."""
    lent: Numbers
    """Bytes kept until the model's forward ends."""
    nanoseconds: Numbers
    """Time of forward and backward."""

    @property
    def alive(self) -> Numbers:
        """Bytes alive until the forward ends."""
        return self.net + self.lent

    def then(self, other: _Moves) -> _Moves:
        """The costs of this part followed by the other one. The arrays of both are broadcast."""
        return _Moves(
            numpy.maximum(self.forward, self.alive + other.forward),
            numpy.maximum(self.backward, self.net + other.backward),
            self.net + other.net,
            self.lent + other.lent,
            self.nanoseconds + other.nanoseconds,
        )

    def at(self, index: Any) -> _Moves:
        """The entries at an index of the arrays."""
        return _Moves(*(values[index] for values in self.arrays))

    def no_worse(self, other: _Moves) -> Truths:
        """Mask of the entries that need no more, take no longer and leave no more than the others."""
        pairs = zip(self.arrays, other.arrays, strict=True)
        found: Truths = numpy.logical_and.reduce([mine <= its for mine, its in pairs])
        return found

    @property
    def arrays(self) -> tuple[Numbers, ...]:
        """All arrays."""
        return self.forward, self.backward, self.net, self.lent, self.nanoseconds


@dataclasses.dataclass(frozen=True)
class _Stage:
    """One block of the search. What runs before a stack belongs to its first block, and the head to the last one."""

    keys: tuple[Key, ...]
    """The keys that it may have, in the order of the arrays of `moves`."""
    ranks: Numbers
    """For each key, its rank among the keys of its stack: those that keep the least come first."""
    moves: _Moves


def fastest(costs: Costs, limit: int) -> Choice | None:
    """The choice with the least predicted time whose peak is at most `limit` bytes; None if no choice fits.

    The same costs and limit always give the same choice, and a larger limit never gives a slower one. Among blocks of
    one kind, actions that keep less come first if that is neither slower nor needs more memory.
    """
    if costs.segments:
        only = smallest(costs)
        return only if worst_timeline(costs, only).peak_bytes <= limit else None
    search = _Search(costs)
    return _in_order(costs, search.fastest(limit)) if search.lowest_peak <= limit else None


def smallest(costs: Costs) -> Choice:
    """The choice with the lowest peak; of several, the fastest."""
    if costs.segments:
        return costs.uniform(costs.actions.index(FULL))
    search = _Search(costs)
    return _in_order(costs, search.fastest(search.lowest_peak))


def lowest_peak(costs: Costs) -> int:
    """The lowest peak of all choices, in bytes."""
    return worst_timeline(costs, smallest(costs)).peak_bytes if costs.segments else _Search(costs).lowest_peak


class _Search:
    """The stages of a step, and the search for the fastest choice."""

    def __init__(self, costs: Costs) -> None:
        self.stacks = costs.stacks
        stages = list(_stages(costs))
        self.keys = [stage.keys for stage in stages]
        self.moves = [stage.moves for stage in stages]
        self.allowed = _exchanged(stages)
        if not any(moves.lent.any() for moves in self.moves):  # then both needs add to the same bytes
            needs = [numpy.maximum(moves.forward, moves.backward) for moves in self.moves]
            pairs = zip(self.moves, needs, strict=True)
            self.moves = [dataclasses.replace(moves, forward=need, backward=need) for moves, need in pairs]
        self.ahead, start = self._needs_ahead()
        self.lowest_peak = max(costs.static.beside, min(map(max, start)))

    def _needs_ahead(self) -> tuple[list[tuple[Numbers, Numbers]], list[tuple[int, int]]]:
        """The least bytes that the blocks ahead need, after each stage and at the beginning.

        They are pairs: bytes above `level` and `lent`, bytes above `level`. A choice that fits one pair of its last key
        can be completed. The arrays are [pairs, keys]; keys with fewer pairs are padded with pairs that never fit.
        """
        needs = [[(-_MANY, -_MANY)] for _ in self.keys[-1]]
        found = []
        for moves, allowed in zip(reversed(self.moves), reversed(self.allowed), strict=True):
            most = max(map(len, needs))
            padded = numpy.array([[*row, *[(_MANY, _MANY)] * (most - len(row))] for row in needs], dtype=numpy.int64)
            found.append((padded[:, :, 0].T, padded[:, :, 1].T))
            columns = (moves.forward, moves.alive, moves.backward, moves.net)
            rows = list(zip(*(column.tolist() for column in columns), needs, strict=True))
            needs = [_lowest(itertools.compress(rows, may)) for may in allowed]
        return found[::-1], needs[0]

    def fastest(self, limit: int) -> Choice:
        """The choice with the least time within `limit`, which must be at least the lowest peak."""
        free = _Priced(self)
        if max(free.sizes.values()) <= limit:
            return self._choice(free.path)
        pairs = list(self._prices(free, limit))
        bounds = [free, *(bound for bound, _ in pairs)]
        fitting = [found for _, found in pairs if max(found.sizes.values()) <= limit]
        best = min(((found.nanoseconds, found.path) for found in fitting), default=None)
        width, cut = _WIDTH, True
        while cut:
            best, cut = self._followed(bounds, limit, best, width)
            width *= 8
        assert best is not None
        return self._choice(best[1])

    def _prices(self, free: _Priced, limit: int) -> Iterator[tuple[_Priced, _Priced]]:
        """For each of the moments at which the fastest choices exceed the limit most: the best price, and the lowest
        one that keeps the moment within the limit.

        Starts from a price too low to keep the moment within the limit and one high enough. It tries the price at which
        their choices cost the same, until that yields no third choice.
        """
        left = {moment: size for moment, size in free.sizes.items() if size > limit}
        sizes: Mapping[Moment, int] = free.sizes
        for _ in range(min(_PRICED, len(left))):
            moment = max(left, key=sizes.__getitem__)
            del left[moment]
            low, high = free, _Priced(self, moment, limit, _DEAR)
            if high.sizes[moment] > limit:
                continue
            while True:
                price = (high.nanoseconds - low.nanoseconds) / (low.sizes[moment] - high.sizes[moment])
                found = _Priced(self, moment, limit, max(0.0, price))
                if found.cost >= low.nanoseconds + price * (low.sizes[moment] - limit) - _ROUNDING:
                    break
                low, high = (found, high) if found.sizes[moment] > limit else (low, found)
            yield found, high
            sizes = high.sizes

    def _followed(
        self, bounds: Sequence[_Priced], limit: int, best: tuple[int, Path] | None, width: int
    ) -> tuple[tuple[int, Path] | None, bool]:
        """Follow choices from block to block: at most `width`, those with the lowest bounds.

        Args:
            bounds: lower bounds on the time ahead.
            limit: the most bytes that may be alive.
            best: time and path of the best known choice.
            width: how many to follow.

        Returns the best choice known then, and whether it left out choices that might be better.
        """
        level = alive = spent = numpy.zeros((1, 1), dtype=numpy.int64)
        place = numpy.zeros(1, dtype=numpy.int64)
        cut, parents = False, []
        for number, (moves, (needs_alive, needs_level)) in enumerate(zip(self.moves, self.ahead, strict=True)):
            fits = (alive + moves.forward <= limit) & (level + moves.backward <= limit) & self.allowed[number][place]
            level, alive, spent = level + moves.net, alive + moves.alive, spent + moves.nanoseconds
            pairs = zip(needs_alive, needs_level, strict=True)
            fits &= numpy.logical_or.reduce([(alive + one <= limit) & (level + other <= limit) for one, other in pairs])
            bound = spent + functools.reduce(numpy.maximum, (found.ahead(number, level, alive) for found in bounds))
            if best is not None:
                fits &= bound < best[0] - _ROUNDING
            parent, place = numpy.nonzero(fits)
            if not len(place):
                return best, cut
            level, alive, spent, bound = level[fits], alive[fits], spent[fits], bound[fits]
            kept = _undominated(place, alive - level, level, spent)
            if len(kept) > width:
                cut = True
                kept = numpy.sort(kept[numpy.argsort(bound[kept], kind="stable")[:width]])
            place, level, alive, spent = place[kept], level[kept, None], alive[kept, None], spent[kept, None]
            parents.append((parent[kept], place))
        number = int(numpy.lexsort((level[:, 0], spent[:, 0]))[0])
        nanoseconds, path = int(spent[number, 0]), []
        for parent, chosen in reversed(parents):
            path.append(int(chosen[number]))
            number = int(parent[number])
        return (nanoseconds, tuple(reversed(path))), cut

    def _choice(self, path: Path) -> Choice:
        """The actions along a path, stack by stack."""
        actions = (keys[place][1] for keys, place in zip(self.keys, path, strict=True))
        return tuple(tuple(itertools.islice(actions, len(stack.blocks))) for stack in self.stacks)


class _Priced:
    """The fastest choice if every byte above the limit at one moment costs time, and every byte below it saves time.

    No choice that fits can be faster than `cost`, whatever the price.

    Args:
        search: the stages.
        moment: the moment whose bytes have a price; None for no price.
        limit: the limit.
        price: nanoseconds per byte.
    """

    def __init__(self, search: _Search, moment: Moment | None = None, limit: int = 0, price: float = 0.0) -> None:
        self.price = price
        self.until, self.backward = moment or (-1, False)
        self._times: list[Any] = []
        """For each stage and each of its keys: the least time of the blocks ahead, without the price of the bytes alive
        there."""
        best: list[list[int]] = []
        times: Any = numpy.zeros(len(search.keys[-1]))
        for number in range(len(search.moves) - 1, -1, -1):
            moves = search.moves[number]
            self._times.append(times)
            total = moves.nanoseconds + times
            if number < self.until:
                total += price * (moves.net if self.backward else moves.alive)
            elif number == self.until:
                total += price * ((moves.backward if self.backward else moves.forward) - limit)
            totals = numpy.where(search.allowed[number], total, numpy.inf)
            best.append(totals.argmin(axis=1).tolist())
            times = totals.min(axis=1)
        self._times.reverse()
        self.cost = float(times[0])
        """Time of the choice, plus the price of its bytes."""
        path: list[int] = []
        self.sizes: dict[Moment, int] = {}
        """Bytes at each moment."""
        self.nanoseconds, level, alive, place = 0, 0, 0, 0
        for number, (moves, following) in enumerate(zip(search.moves, reversed(best), strict=True)):
            place = following[place]
            self.sizes[number, False] = alive + int(moves.forward[place])
            self.sizes[number, True] = level + int(moves.backward[place])
            level, alive = level + int(moves.net[place]), alive + int(moves.alive[place])
            self.nanoseconds += int(moves.nanoseconds[place])
            path.append(place)
        self.path: Path = tuple(path)

    def ahead(self, number: int, level: Numbers, alive: Numbers) -> Any:
        """The least time of the blocks after stage `number`, given the bytes alive after it: [choices, keys]."""
        times = self._times[number]
        return times + self.price * (level if self.backward else alive) if number < self.until else times


def _lowest(moves: Iterable[tuple[int, int, int, int, list[tuple[int, int]]]]) -> list[tuple[int, int]]:
    """The pairs of needs of some moves and the blocks ahead of them, without pairs that are no lower than another."""
    pairs = sorted(
        {
            (max(forward, alive + one), max(backward, net + other))
            for forward, alive, backward, net, ahead in moves
            for one, other in ahead
        }
    )
    least = itertools.accumulate((other for _, other in pairs), min)
    return [pair for pair, before in zip(pairs, itertools.chain([_MANY], least), strict=False) if pair[1] < before]


def _undominated(place: Numbers, lent: Numbers, level: Numbers, spent: Numbers) -> Numbers:
    """The positions of choices faster than all others with the same place and `lent` and a `level` at most as high."""
    order = numpy.lexsort((spent, level, lent, place))
    changes = (numpy.diff(place[order], prepend=-1) != 0) | (numpy.diff(lent[order], prepend=0) != 0)
    # Subtracting a multiple of the group's number puts every time below those of earlier groups.
    least = numpy.minimum.accumulate(spent[order] - numpy.cumsum(changes) * (int(spent.max()) + 1))
    first = numpy.ones(len(order), dtype=bool)
    first[1:] = least[1:] < least[:-1]
    return order[first]


def _exchanged(stages: Sequence[_Stage]) -> list[Truths]:
    """For each stage: which of its keys may follow each key of the block before.

    Pairs of neighbours in the wrong order are left out: exchanging the two is never worse, whatever comes before and
    after. Each exchange puts two blocks of a kind into the order of their ranks, so exchanges come to an end.
    """
    allowed = [numpy.ones((1, len(stages[0].keys)), dtype=bool)]
    for first, second in itertools.pairwise(stages):
        if first.keys != second.keys:
            allowed.append(numpy.ones((len(first.keys), len(second.keys)), dtype=bool))
            continue
        row, column = numpy.ix_(*[range(len(first.keys))] * 2)
        now = first.moves.at(row).then(second.moves.at(column))
        exchanged = first.moves.at(column).then(second.moves.at(row))
        allowed.append((first.ranks[:, None] <= first.ranks) | ~exchanged.no_worse(now))
    return allowed


def _stages(costs: Costs) -> Iterator[_Stage]:
    """The blocks of a step, in the order of the forward. Their needs include their backward."""
    pending = sum(stack.before_backward.gradients for stack in costs.stacks)
    pending += sum(stack.gradients[kind] for stack in costs.stacks for kind in stack.kinds)
    pending += costs.head[1].gradients
    held = sum(stack.held_by(kind) for stack in costs.stacks for kind in stack.kinds)
    for stack in costs.stacks:
        pending -= stack.before_backward.gradients
        in_front, ranks = _before(costs, stack, pending + held, held), _ranks(stack)
        for place, kind in enumerate(stack.kinds):
            pending -= stack.gradients[kind]
            held -= stack.held_by(kind)
            keys = tuple((kind, action) for action in stack.choices_at(place))
            moves = _block(costs, stack, place, pending + held, held)
            if not place:
                moves = in_front.then(moves)
            if place == len(stack.kinds) - 1 and stack is costs.stacks[-1]:
                moves = moves.then(_head(costs))
            yield _Stage(keys, numpy.array([ranks[key] for key in keys]), moves)


def _moves(rows: Sequence[tuple[int, int, int, int, int]]) -> _Moves:
    """Create moves from one row per key, in the order of the fields."""
    return _Moves(*numpy.array(rows, dtype=numpy.int64).T)


def _before(costs: Costs, stack: StackCosts, first: int, later: int) -> _Moves:
    """The costs of what runs before a stack.

    `first` and `later` are the bytes alive before its backward in a first micro-step, and in one that adds to
    gradients.
    """
    phase = stack.before
    backward = phase.net + stack.before_at_backward_bytes + _backward(costs, stack.before_backward, first, later)
    nanoseconds = phase.nanoseconds + stack.before_backward.nanoseconds
    return _moves([(_always(costs) + phase.peak(True), backward, phase.net, 0, nanoseconds)])


def _block(costs: Costs, stack: StackCosts, place: int, first: int, later: int) -> _Moves:
    """The costs of the block at `place`; `first` and `later` as in `_before`."""
    shared = 0 if place == len(stack.kinds) - 1 else stack.shared_bytes
    rows = []
    for action in stack.choices_at(place):
        cost = stack.cost_at(place, action)
        net = cost.forward.net - cost.forward_only_bytes
        turn = net + stack.at_backward_bytes - cost.output_bytes + shared
        backward = turn + _backward(costs, cost.backward, first, later)
        nanoseconds = cost.forward.nanoseconds + cost.backward.nanoseconds
        rows.append((_always(costs) + cost.forward.peak(True), backward, net, cost.forward_only_bytes, nanoseconds))
    return _moves(rows)


def _head(costs: Costs) -> _Moves:
    """The costs of the head and its loss."""
    forward, backward = costs.head
    needs = _always(costs) + forward.peak(True), forward.net + _backward(costs, backward, 0, 0)
    return _moves([(*needs, 0, 0, forward.nanoseconds + backward.nanoseconds)])


def _always(costs: Costs) -> int:
    """Most bytes that are alive throughout a micro-step."""
    return costs.static.always + (costs.static.gradients if True in costs.modes else 0)


def _backward(costs: Costs, phase: Phase, first: int, later: int) -> int:
    """Most bytes of a part of the backward, including all bytes alive before it; see `_before`."""
    most = costs.static.always + first + phase.peak(False)
    return max(most, _always(costs) + later + phase.peak(True)) if True in costs.modes else most


def _ranks(stack: StackCosts) -> dict[Key, int]:
    """Key -> its rank among all keys: by bytes kept, then by time, least first."""
    kept: dict[Key, tuple[int, int, int]] = {}
    for key, cost in (*stack.first.items(), *stack.last.items(), *stack.inner.items()):
        kept[key] = (
            cost.forward.net - cost.forward_only_bytes,
            cost.forward.nanoseconds + cost.backward.nanoseconds,
            key[1],
        )
    return {key: place for place, key in enumerate(sorted(kept, key=kept.__getitem__))}


def _in_order(costs: Costs, choice: Choice) -> Choice:
    """Sort the actions so that those that keep the least come first. If that is slower or needs more memory, leave out
    the first block of each stack; if that is worse, too, return the choice unchanged."""
    now = worst_timeline(costs, choice)
    for first in (0, 1):
        pairs = zip(costs.stacks, choice, strict=True)
        ordered = tuple((*row[:first], *_ordered(stack, row, first)) for stack, row in pairs)
        places = ((stack, place) for stack in costs.stacks for place in range(len(stack.blocks)))
        actions = itertools.chain(*ordered)
        if all(action in stack.choices_at(place) for (stack, place), action in zip(places, actions, strict=True)):
            then = worst_timeline(costs, ordered)
            if then.nanoseconds <= now.nanoseconds and then.peak_bytes <= now.peak_bytes:
                return ordered
    return choice


def _ordered(stack: StackCosts, chosen: Sequence[int], first: int) -> Iterator[int]:
    """The actions of one stack from block `first` on, sorted within each kind: those that keep the least come first."""
    ranks, keys = _ranks(stack), list(zip(stack.kinds, chosen, strict=True))[first:]
    in_order = sorted(keys, key=ranks.__getitem__)
    rows = {kind: iter([key for key in in_order if key[0] == kind]) for kind in stack.kinds}
    return (next(rows[kind])[1] for kind, _ in keys)
