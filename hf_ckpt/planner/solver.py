"""Finds the fastest actions whose peak fits a limit, exactly, in milliseconds at any usual depth. Free of torch.

The task: give each block an action, so that the step takes the least time and no moment of it exceeds the limit. Going
through the forward block by block, every moment needs `alive + need` bytes. Alive is what the blocks so far have left:
`level` bytes last until the backward, `lent` bytes until the forward ends. The need follows from the block, the block
before it and its place. That holds for the block's backward, too: it finds alive what the blocks up to there have left,
and constants (see `timeline`).

The search keeps all choices for the blocks so far that may become the best, and drops the others for four reasons:

- They cannot be completed. `_Search._needs_ahead` gives what the blocks ahead need at least, for each action of the
  last block. It also gives the lowest peak, without a search.
- Exchanging two neighbours is never worse (`_exchanged`). The costs themselves say so: exchanged, two blocks of a kind
  never need more, take longer or leave more, whatever comes before and behind them. Only one of their orders is tried.
- They cannot become faster than the best choice known. A price for the bytes of one moment gives a lower bound of the
  time ahead (`_Priced`), as Lagrangian relaxation of a knapsack does.
- Another choice with the same last block is as fast and leaves no more bytes.

Dropping them loses no best choice, so the result is exact for any costs; how much is dropped decides the time only.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy
import numpy.typing

from hf_ckpt.prediction.costs import Choice, Costs, Key, Phase, StackCosts
from hf_ckpt.prediction.timeline import worst_timeline
from hf_ckpt.spec.actions import FULL

_MANY = 2**61
"""More bytes than there are; less than half of the largest number."""
_WIDTH = 256
"""Choices for the blocks so far that are followed at first; where there are more, another search follows more."""
_PRICED = 3
"""Most moments whose bytes are given a price."""
_DEAR = 2.0**40
"""Nanoseconds for a byte, as if time did not matter."""
_ROUNDING = 0.5
"""Nanoseconds by which sums of floating-point numbers may be off; times are whole numbers."""
Numbers = numpy.typing.NDArray[numpy.int64]
Reals = numpy.typing.NDArray[numpy.float64]
Truths = numpy.typing.NDArray[numpy.bool_]
Moment = tuple[int, bool]
"""(block, as the number of its stage; whether it is the block's backward)."""
Path = tuple[int, ...]
"""For each stage, the position of the chosen key."""


@dataclasses.dataclass(frozen=True)
class _Moves:
    """What it takes to pass one block: a number for each key of the block before it (row) and each of its own (column).

    A key is a kind and an action. What runs before a stack is passed with its first block, and the head with the last.
    """

    forward: Numbers
    """Most bytes of the forward, and of what is always there, above `level` and `lent` of the blocks before."""
    backward: Numbers
    """Most bytes of the backward in a first micro-step, and of what is there then, above `level` of those before."""
    later: Numbers
    """The same in a micro-step that adds to gradients."""
    net: Numbers
    """Bytes left until the backward."""
    lent: Numbers
    """Bytes left until the model's forward ends."""
    nanoseconds: Numbers
    """Of forward and backward."""

    def then(self, other: _Moves) -> _Moves:
        """What it takes to pass both. The arrays of both are broadcast."""
        return _Moves(
            numpy.maximum(self.forward, self.net + self.lent + other.forward),
            numpy.maximum(self.backward, self.net + other.backward),
            numpy.maximum(self.later, self.net + other.later),
            self.net + other.net,
            self.lent + other.lent,
            self.nanoseconds + other.nanoseconds,
        )

    def at(self, *index: Numbers) -> _Moves:
        """Those for some of the keys."""
        return _Moves(*(values[index] for values in self.arrays))

    def no_worse(self, other: _Moves) -> Truths:
        """Where these need no more, take no longer and leave no more than others."""
        pairs = zip(self.arrays, other.arrays, strict=True)
        found: Truths = numpy.logical_and.reduce([mine <= its for mine, its in pairs])
        return found

    @property
    def arrays(self) -> tuple[Numbers, ...]:
        """All the numbers."""
        return self.forward, self.backward, self.later, self.net, self.lent, self.nanoseconds


@dataclasses.dataclass(frozen=True)
class _Stage:
    """A block to pass."""

    keys: tuple[Key, ...]
    """The keys that it may have, the columns of `moves`."""
    ranks: tuple[int, ...]
    """For each of them its place among the keys of its kind: those that keep the least come first."""
    moves: _Moves
    like: int
    """Stages with the same number have the same moves, but for `added`."""
    added: tuple[int, int] = (0, 0)
    """Bytes among `moves.backward` and `moves.later` that depend on the place."""


def fastest(costs: Costs, limit: int) -> Choice | None:
    """The choice with the least predicted time whose peak is at most `limit` bytes; None where no choice fits.

    The same costs and limit always give the same choice, and a larger limit never gives a slower one. Within blocks of
    one kind, actions that keep less come first where that is neither slower nor takes more memory.
    """
    if costs.segments:
        only = smallest(costs)
        return only if worst_timeline(costs, only).peak_bytes <= limit else None
    search = _Search(costs)
    return _in_order(costs, search.fastest(limit)) if search.lowest_peak <= limit else None


def smallest(costs: Costs) -> Choice:
    """The choice with the lowest peak; of several the fastest."""
    if costs.segments:
        return costs.uniform(costs.actions.index(FULL))
    search = _Search(costs)
    return _in_order(costs, search.fastest(search.lowest_peak))


def lowest_peak(costs: Costs) -> int:
    """The lowest peak of all choices, in bytes."""
    return worst_timeline(costs, smallest(costs)).peak_bytes if costs.segments else _Search(costs).lowest_peak


class _Search:
    """The stages of a step, and the search for the choice that passes them in the least time."""

    def __init__(self, costs: Costs) -> None:
        self.stacks = costs.stacks
        self.stages = list(_stages(costs))
        self.allowed = _exchanged(self.stages)
        moves = [stage.moves for stage in self.stages]
        self.forward = [found.forward for found in moves]
        self.backward = [numpy.maximum(found.backward, found.later) for found in moves]
        if not any(found.lent.any() for found in moves):  # then both are above the same bytes
            self.backward = self.forward = [*map(numpy.maximum, self.forward, self.backward)]
        self.net, self.alive = [found.net for found in moves], [found.net + found.lent for found in moves]
        self.nanoseconds = [
            numpy.where(may, found.nanoseconds, numpy.inf) for may, found in zip(self.allowed, moves, strict=True)
        ]
        self.ahead, start = self._needs_ahead()
        self.lowest_peak = max(costs.static.beside, min(map(max, start)))

    def _needs_ahead(self) -> tuple[list[tuple[Numbers, Numbers]], list[tuple[int, int]]]:
        """What the blocks ahead need at least, behind each stage, and at the beginning.

        These are pairs: bytes above `level` and `lent`, bytes above `level`. What fits one pair of the last block's key
        can be completed. The arrays are [pairs, keys]; keys with fewer pairs have pairs that nothing fits.
        """
        needs = [[(-_MANY, -_MANY)] for _ in self.stages[-1].keys]
        found = []
        for number in range(len(self.stages) - 1, -1, -1):
            most = max(map(len, needs))
            padded = numpy.array([[*row, *[(_MANY, _MANY)] * (most - len(row))] for row in needs], dtype=numpy.int64)
            found.append((padded[:, :, 0].T, padded[:, :, 1].T))
            arrays = (self.allowed, self.forward, self.alive, self.backward, self.net)
            rows = zip(*(values[number].tolist() for values in arrays), strict=True)
            needs = [_lowest(zip(*row, needs, strict=True)) for row in rows]
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
        """The best price for each of the moments at which the fastest choices exceed the limit most, and the lowest one
        that keeps the moment within the limit.

        Of two prices, one too low to keep the moment within the limit and one high enough, the price is tried at which
        their choices cost the same, until that shows no third choice.
        """
        left = {moment: size for moment, size in free.sizes.items() if size > limit}
        sizes: Mapping[Moment, int] = free.sizes
        for _ in range(min(_PRICED, len(left))):
            moment = max(left, key=sizes.__getitem__)
            del left[moment]
            low, high = free, _Priced(self, moment, limit, _DEAR, free)
            if high.sizes[moment] > limit:
                continue
            while True:
                price = (high.nanoseconds - low.nanoseconds) / (low.sizes[moment] - high.sizes[moment])
                found = _Priced(self, moment, limit, max(0.0, price), free)
                if found.cost >= low.nanoseconds + price * (low.sizes[moment] - limit) - _ROUNDING:
                    break
                low, high = (found, high) if found.sizes[moment] > limit else (low, found)
            yield found, high
            sizes = high.sizes

    def _followed(
        self, bounds: Sequence[_Priced], limit: int, best: tuple[int, Path] | None, width: int
    ) -> tuple[tuple[int, Path] | None, bool]:
        """Follow choices from block to block, at most `width` of them, those with the earliest bounds.

        Args:
            bounds: of the time that is ahead.
            limit: the most bytes that may be alive.
            best: time and path of the best choice known.
            width: how many to follow.

        Returns the best choice known then, and whether others were left out that might be better.
        """
        zero = numpy.zeros(1, dtype=numpy.int64)
        key, level, alive, spent = zero, zero, zero, zero
        cut, parents = False, []
        for number, (needs_alive, needs_level) in enumerate(self.ahead):
            fits = (alive[:, None] + self.forward[number][key] <= limit) & self.allowed[number][key]
            fits &= level[:, None] + self.backward[number][key] <= limit
            level, alive = level[:, None] + self.net[number][key], alive[:, None] + self.alive[number][key]
            spent = spent[:, None] + self.stages[number].moves.nanoseconds[key]
            pairs = zip(needs_alive, needs_level, strict=True)
            fits &= numpy.logical_or.reduce([(alive + one <= limit) & (level + other <= limit) for one, other in pairs])
            bound = spent + functools.reduce(numpy.maximum, (found.ahead(number, level, alive) for found in bounds))
            if best is not None:
                fits &= bound < best[0] - _ROUNDING
            parent, key = numpy.nonzero(fits)
            if not len(key):
                return best, cut
            level, alive, spent, bound = level[fits], alive[fits], spent[fits], bound[fits]
            kept = _undominated(key, alive - level, level, spent)
            if len(kept) > width:
                cut = True
                kept = numpy.sort(kept[numpy.argsort(bound[kept], kind="stable")[:width]])
            key, level, alive, spent = key[kept], level[kept], alive[kept], spent[kept]
            parents.append((parent[kept], key))
        number = int(numpy.lexsort((level, spent))[0])
        nanoseconds, path = int(spent[number]), []
        for parent, key in reversed(parents):
            path.append(int(key[number]))
            number = int(parent[number])
        return (nanoseconds, tuple(reversed(path))), cut

    def _choice(self, path: Path) -> Choice:
        """The actions along a path, stack by stack."""
        actions = (stage.keys[place][1] for stage, place in zip(self.stages, path, strict=True))
        return tuple(tuple(itertools.islice(actions, len(stack.blocks))) for stack in self.stacks)


class _Priced:
    """The fastest choice where every byte above the limit at one moment costs time, and every byte below gains it.

    No choice that fits can be faster than `cost`, whatever the price.

    Args:
        search: the stages.
        moment: whose bytes have a price; None for no price.
        limit: the limit.
        price: nanoseconds for a byte.
        free: the same without a price.
    """

    def __init__(
        self,
        search: _Search,
        moment: Moment | None = None,
        limit: int = 0,
        price: float = 0.0,
        free: _Priced | None = None,
    ) -> None:
        self.price, depth = price, len(search.stages)
        self.until, backward = moment or (depth - 1, False)
        self.backward = backward
        self._times: list[Reals] = list(free._times) if free else [numpy.zeros(len(search.stages[-1].keys))] * depth
        """For each stage and each of its keys: the least time of the blocks ahead, without the price of the bytes that
        are alive there."""
        self._best: list[list[int]] = list(free._best) if free else [[]] * depth
        net, need = (search.net, search.backward) if backward else (search.alive, search.forward)
        times = self._times[self.until]
        for number in range(self.until, -1, -1):
            self._times[number] = times
            total = search.nanoseconds[number] + times
            if price:
                total += price * (net[number] if number < self.until else need[number] - limit)
            self._best[number] = total.argmin(axis=1).tolist()
            times = total.min(axis=1)
        self.cost = float(times[0])
        """Time of the choice, and of its bytes."""
        path: list[int] = []
        self.sizes: dict[Moment, int] = {}
        """Bytes at each moment."""
        self.nanoseconds, level, alive, key = 0, 0, 0, 0
        for number, stage in enumerate(search.stages):
            place = key, self._best[number][key]
            self.sizes[number, False] = alive + int(search.forward[number][place])
            self.sizes[number, True] = level + int(search.backward[number][place])
            level, alive = level + int(search.net[number][place]), alive + int(search.alive[number][place])
            self.nanoseconds += int(stage.moves.nanoseconds[place])
            key = place[1]
            path.append(key)
        self.path: Path = tuple(path)

    def ahead(self, number: int, level: Numbers, alive: Numbers) -> Reals:
        """The least time of the blocks behind stage `number`, by the bytes alive behind it: [choices, keys]."""
        times = self._times[number]
        return times + self.price * (level if self.backward else alive) if number < self.until and self.price else times


def _lowest(moves: Iterator[tuple[bool, int, int, int, int, list[tuple[int, int]]]]) -> list[tuple[int, int]]:
    """The pairs of needs that some move has, together with what is ahead of it, but for those no lower than another."""
    pairs = sorted(
        {
            (max(forward, alive + one), max(backward, net + other))
            for may, forward, alive, backward, net, ahead in moves
            if may
            for one, other in ahead
        }
    )
    least = itertools.accumulate((other for _, other in pairs), min)
    return [pair for pair, before in zip(pairs, itertools.chain([_MANY], least), strict=False) if pair[1] < before]


def _undominated(key: Numbers, lent: Numbers, level: Numbers, spent: Numbers) -> Numbers:
    """The positions of the choices that are faster than all with the same key and `lent` whose `level` is as low."""
    order = numpy.lexsort((spent, level, lent, key))
    changes = (numpy.diff(key[order], prepend=-1) != 0) | (numpy.diff(lent[order], prepend=0) != 0)
    # What is taken off for the number of the group puts every time below those of the groups before.
    least = numpy.minimum.accumulate(spent[order] - numpy.cumsum(changes) * (int(spent.max()) + 1))
    first = numpy.ones(len(order), dtype=bool)
    first[1:] = least[1:] < least[:-1]
    return order[first]


def _exchanged(stages: Sequence[_Stage]) -> list[Truths]:
    """For each stage: which of its keys may follow each key of the block before.

    Left out are pairs of neighbours in the wrong order: exchanging the two is never worse, whatever comes before and
    behind, and each exchange puts two blocks of a kind into the order of their ranks, so that it comes to an end.
    """
    allowed = [numpy.ones(stage.moves.net.shape, dtype=bool) for stage in stages]
    end = numpy.full((len(stages[-1].keys), 1), -_MANY)
    nothing = end * 0
    behind = _Stage((), (), _Moves(end, end, end, nothing, nothing, nothing), -1)
    known: dict[object, Truths] = {}
    for number, (first, second, third) in enumerate(zip(stages, stages[1:], [*stages[2:], behind], strict=False)):
        if first.keys == second.keys:
            added = [tuple(map(int.__sub__, stage.added, first.added)) for stage in (second, third)]
            kind = first.like, second.like, third.like, *added
            if kind not in known:
                ranks = numpy.array(first.ranks)
                known[kind] = (ranks[:, None] <= ranks) | ~_exchangeable(first.moves, second.moves, third.moves)
            allowed[number + 1] = known[kind]
    return allowed


def _exchangeable(first: _Moves, second: _Moves, third: _Moves) -> Truths:
    """For each key of a block and each of the next: whether it is never worse to exchange them."""
    before, key, following, behind = numpy.ix_(*map(range, (*first.net.shape, *third.net.shape)))
    ways = [
        first.at(before, one).then(second.at(one, other)).then(third.at(other, behind))
        for one, other in ((key, following), (following, key))
    ]
    found: Truths = numpy.logical_and.reduce(ways[1].no_worse(ways[0]), axis=(0, 3))
    return found


def _stages(costs: Costs) -> Iterator[_Stage]:
    """The blocks of a step, in the order of the forward. What they need also covers their backward."""
    pending = sum(stack.before_gradients for stack in costs.stacks)
    pending += sum(stack.gradients[kind] for stack in costs.stacks for kind in stack.kinds)
    pending += next(iter(costs.head.values()))[1].gradients
    held = sum(stack.held_by(kind) for stack in costs.stacks for kind in stack.kinds)
    befores: tuple[Key | None, ...] = (None,)
    numbers = itertools.count()
    for stack in costs.stacks:
        pending -= stack.before_gradients
        in_front = _before(costs, stack, befores, pending, held)
        ranks = _ranks(stack)
        known: dict[object, tuple[_Moves, int]] = {}
        for place, kind in enumerate(stack.kinds):
            pending -= stack.gradients[kind]
            held -= stack.held_by(kind)
            keys = tuple((kind, action) for action in stack.choices_at(place))
            at_end = place == len(stack.kinds) - 1
            if (befores, keys, at_end, not place) not in known:
                known[befores, keys, at_end, not place] = _block(costs, stack, place, befores), next(numbers)
            moves, like = known[befores, keys, at_end, not place]
            moves = dataclasses.replace(moves, backward=moves.backward + (pending + held), later=moves.later + held)
            if not place:
                moves = in_front.then(moves)
            if at_end and stack is costs.stacks[-1]:
                moves = moves.then(_head(costs, keys))
            yield _Stage(keys, tuple(ranks[key] for key in keys), moves, like, (pending + held, held))
            befores = keys


def _moves(rows: Sequence[Sequence[tuple[int, int, int, int, int, int]]]) -> _Moves:
    """Moves from the numbers of each pair of keys, in the order of the fields."""
    return _Moves(*numpy.moveaxis(numpy.array(rows, dtype=numpy.int64), -1, 0))


def _before(costs: Costs, stack: StackCosts, lasts: Sequence[Key | None], pending: int, held: int) -> _Moves:
    """What it takes to pass what runs before a stack, for each key of the last block of the stack before.

    `pending` are the bytes of the gradients that its backward finds finished, `held` those that blocks behind it hold.
    """
    first, later = _backward(costs, stack.before_backward, pending)
    rest = stack.before_turn_bytes + held
    rows = []
    for phase in (stack.before[last] for last in lasts):
        needs = _always(costs) + phase.peak(True), phase.net + rest + first, phase.net + rest + later
        rows.append([(*needs, phase.net, 0, phase.nanoseconds + stack.before_backward.nanoseconds)])
    return _moves(rows)


def _block(costs: Costs, stack: StackCosts, place: int, befores: Sequence[Key | None]) -> _Moves:
    """What it takes to pass the block at `place`, without what the blocks behind it finish and hold."""
    at_end = place == len(stack.kinds) - 1
    rows = []
    for before in befores:
        row = []
        for action in stack.choices_at(place):
            key = stack.kinds[place], action
            cost = stack.costs[before if place else None, key]
            backward = stack.last_backward[key] if at_end else cost.backward
            first, later = _backward(costs, backward, 0)
            net = cost.forward.net - cost.lent_bytes
            turn = net + stack.turn_bytes - cost.output_bytes + (0 if at_end else stack.shared_bytes)
            needs = _always(costs) + cost.forward.peak(True), turn + first, turn + later
            row.append((*needs, net, cost.lent_bytes, cost.forward.nanoseconds + cost.backward.nanoseconds))
        rows.append(row)
    return _moves(rows)


def _head(costs: Costs, lasts: Sequence[Key]) -> _Moves:
    """What it takes to pass the head and its loss, for each key of the last block."""
    row = []
    for last in lasts:
        forward, backward = costs.head[last]
        first, later = _backward(costs, backward, 0)
        net = costs.stacks[-1].lent_by(last) + forward.net
        needs = _always(costs) + forward.peak(True), net + first, net + later
        row.append((*needs, 0, 0, forward.nanoseconds + backward.nanoseconds))
    return _moves([row])


def _always(costs: Costs) -> int:
    """Most bytes that are alive all through a micro-step."""
    return costs.static.always + (costs.static.gradients if True in costs.modes else 0)


def _backward(costs: Costs, phase: Phase, pending: int) -> tuple[int, int]:
    """Most bytes of a part of the backward, with what is always there: in a first micro-step, where gradients of
    `pending` bytes are finished before it, and in one that adds to gradients."""
    later = costs.static.always + costs.static.gradients + phase.peak(True) if True in costs.modes else -_MANY
    return costs.static.always + pending + phase.peak(False), later


def _ranks(stack: StackCosts) -> dict[Key, int]:
    """Key -> its place among all keys, those first that keep the least bytes, and of these the fastest."""
    kept: dict[Key, tuple[int, int, int]] = {}
    for (_, key), cost in stack.costs.items():
        time = cost.forward.nanoseconds + cost.backward.nanoseconds
        found = cost.forward.net - cost.lent_bytes, time, key[1]
        kept[key] = min(found, kept.get(key, found))
    return {key: place for place, key in enumerate(sorted(kept, key=kept.__getitem__))}


def _in_order(costs: Costs, choice: Choice) -> Choice:
    """The same actions with those first that keep the least, unless that is slower or takes more memory; else with all
    but those of the first blocks in this order, unless that is."""
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
    """The actions of one stack from one block on, sorted within blocks of one kind: those first that keep the least."""
    ranks, keys = _ranks(stack), stack.keys(chosen)[first:]
    in_order = sorted(keys, key=ranks.__getitem__)
    rows = {kind: iter([key for key in in_order if key[0] == kind]) for kind in stack.kinds}
    return (next(rows[kind])[1] for kind, _ in keys)
