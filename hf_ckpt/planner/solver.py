"""Finds the fastest actions whose peak fits a limit, exactly, by dynamic programming over the blocks. Free of torch.

Going through the forward block by block, all that later blocks need to know of the earlier ones is the action of the
last one and the bytes that they left alive, until the backward or until the forward ends. (What the backward adds at a
block follows from these bytes and from constants: see `timeline`.) So of all choices for the blocks so far only those
are kept that are faster than every one that leaves fewer bytes. Pure functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy.typing

from hf_ckpt.prediction.costs import Choice, Costs, Key, Phase, StackCosts
from hf_ckpt.prediction.timeline import worst_timeline
from hf_ckpt.spec.actions import FULL

_NO_LIMIT = 2**62
Numbers = numpy.typing.NDArray[numpy.int64]
"""One integer for each choice of a front."""


@dataclasses.dataclass(frozen=True)
class _Move:
    """What it takes to pass one block, or the part before a stack, under one action."""

    need: int
    """Most bytes of its forward, and of what is always there, above those that earlier blocks left alive."""
    backward_need: int
    """Most bytes of its backward, and of what is there then, above those that earlier blocks keep for the backward."""
    net: int
    """Bytes that it leaves alive until the backward."""
    nanoseconds: int
    """Time of its forward and backward."""
    lent: int = 0
    """Bytes that it leaves alive until the model's forward ends."""


_Stage = Mapping[tuple[Key | None, Key | None], _Move]
"""(key of the block before, key of this block) -> what passing this block takes. The part before a stack is a stage,
too, with the key of the block before it on both sides."""


@dataclasses.dataclass(frozen=True)
class _Front:
    """The choices for all blocks up to one that has a given action, as far as they are worth keeping: no other of them
    leaves fewer bytes and is as good. Every array has one number for each choice."""

    level: Numbers
    """Bytes alive until the backward."""
    lent: Numbers
    """Bytes alive until the forward ends."""
    value: Numbers
    """Nanoseconds so far, or the peak so far: the smaller the better."""
    origin: list[Key | None]
    """Keys of the block before that the choices come from."""
    place: Numbers
    """The key that each choice comes from, as a position in `origin`."""
    parent: Numbers
    """The choice that each comes from, as a position in the front of that key."""


def fastest(costs: Costs, limit: int) -> Choice | None:
    """The choice with the least predicted time whose peak is at most `limit` bytes; None where no choice fits.

    The same costs and limit always give the same choice, and a larger limit never gives a slower one. Within blocks of
    one kind, actions that keep less come first where that is neither slower nor takes more memory.
    """
    if costs.segments:
        only = smallest(costs)
        return only if worst_timeline(costs, only).peak_bytes <= limit else None
    found = _best(costs, limit=limit, minimise_peak=False)
    return None if found is None else _in_order(costs, found)


def smallest(costs: Costs) -> Choice:
    """The choice with the lowest peak."""
    if costs.segments:
        return costs.uniform(costs.actions.index(FULL))
    found = _best(costs, limit=None, minimise_peak=True)
    assert found is not None
    return _in_order(costs, found)


def _best(costs: Costs, *, limit: int | None, minimise_peak: bool) -> Choice | None:
    """The choice with the least time, or with the lowest peak; None where none stays within `limit`."""
    always = max(_base(costs, mode) for mode in costs.modes)
    end = costs.static.beside
    if limit is not None and end > limit:
        return None
    zero = numpy.zeros(1, dtype=numpy.int64)
    fronts: dict[Key | None, _Front] = {
        None: _Front(zero, zero, zero + (end if minimise_peak else 0), [None], zero, zero)
    }
    history = []
    for stage in _stages(costs, always):
        history.append(fronts)
        reached: dict[Key | None, _Front] = {}
        for key in dict.fromkeys(after for _, after in stage):
            moves = [(before, move) for (before, after), move in stage.items() if after == key and before in fronts]
            front = _merged(fronts, moves, limit, minimise_peak)
            if front is not None:
                reached[key] = front
        fronts = reached
        if not fronts:
            return None
    ends = [
        (int(front.value[number]), int(front.level[number]), str(key), number, key)
        for key, front in fronts.items()
        for number in [int(numpy.lexsort((front.lent, front.level, front.value))[0])]
    ]
    *_, number, last = min(ends, key=lambda end: end[:3])
    return _walk_back(costs, [*history[1:], fronts], last, number)


def _merged(
    fronts: Mapping[Key | None, _Front], moves: Sequence[tuple[Key | None, _Move]], limit: int | None, peaks: bool
) -> _Front | None:
    """The front behind a block under one action, reached by `moves` from the fronts before it; None where none fits."""
    levels: list[Numbers] = []
    lents: list[Numbers] = []
    values: list[Numbers] = []
    places: list[Numbers] = []
    parents: list[Numbers] = []
    for number, (before, move) in enumerate(moves):
        front = fronts[before]
        needed = numpy.maximum(front.level + front.lent + move.need, front.level + move.backward_need)
        fits: Numbers = numpy.flatnonzero(needed <= (limit if limit is not None else _NO_LIMIT))
        levels.append(front.level[fits] + move.net)
        lents.append(front.lent[fits] + move.lent)
        values.append(numpy.maximum(front.value[fits], needed[fits]) if peaks else front.value[fits] + move.nanoseconds)
        places.append(numpy.full(len(fits), number, dtype=numpy.int64))
        parents.append(fits)
    if not sum(map(len, levels)):
        return None
    level, lent, value, place, parent = map(numpy.concatenate, (levels, lents, values, places, parents))
    order = numpy.lexsort((parent, place, value, level, lent))
    # Choices with the same `lent` form a group, sorted by level; of a group those stay that are better than all before
    # them. What is taken off for the number of the group puts every value below those of the groups before.
    group = numpy.cumsum(numpy.diff(lent[order], prepend=lent[order][0]) != 0)
    best = numpy.minimum.accumulate(value[order] - group * (int(value.max()) + 1))
    first = numpy.ones(len(order), dtype=bool)
    first[1:] = best[1:] < best[:-1]
    kept = order[first]
    return _Front(level[kept], lent[kept], value[kept], [before for before, _ in moves], place[kept], parent[kept])


def _walk_back(costs: Costs, history: Sequence[Mapping[Key | None, _Front]], key: Key | None, number: int) -> Choice:
    """The choice that ends as number `number` of the front of `key`; `history` are the fronts behind each stage."""
    keys: list[Key | None] = []
    for fronts in reversed(history):
        keys.append(key)
        front = fronts[key]
        key, number = front.origin[int(front.place[number])], int(front.parent[number])
    keys.reverse()
    places = iter(keys)
    choice = []
    for stack in costs.stacks:
        next(places)  # the part before the stack has no action
        choice.append(tuple(found[1] for _ in stack.blocks if (found := next(places)) is not None))
    return tuple(choice)


def _base(costs: Costs, accumulated: bool) -> int:
    """Bytes that are alive all through a micro-step."""
    return costs.static.always + (costs.static.gradients if accumulated else 0)


def _stages(costs: Costs, always: int) -> Iterator[_Stage]:
    """The stages of a step, in the order of the forward. Each stage also has the needs of its backward.

    `always` are the bytes that are alive all through a micro-step.
    """
    pending = sum(stack.before_gradients for stack in costs.stacks)
    pending += sum(stack.gradients[kind] for stack in costs.stacks for kind in stack.kinds)
    pending += next(iter(costs.head.values()))[1].gradients
    held = sum(stack.held_by(kind) for stack in costs.stacks for kind in stack.kinds)
    last_keys: Sequence[Key | None] = [None]
    for stack in costs.stacks:
        pending -= stack.before_gradients
        behind = stack.before_turn_bytes + held + _largest(costs, stack.before_backward, pending)
        before: dict[tuple[Key | None, Key | None], _Move] = {}
        for last in last_keys:
            phase = stack.before[last]
            nanoseconds = phase.nanoseconds + stack.before_backward.nanoseconds
            before[last, last] = _Move(always + phase.peak(True), phase.net + behind, phase.net, nanoseconds)
        yield before
        for place, kind in enumerate(stack.kinds):
            pending -= stack.gradients[kind]
            held -= stack.held_by(kind)
            yield dict(_block_moves(costs, stack, place, always, pending, held, last_keys))
        last_keys = [(stack.kinds[-1], action) for action in stack.choices_at(len(stack.kinds) - 1)]
    head: dict[tuple[Key | None, Key | None], _Move] = {}
    for last, (forward, backward) in costs.head.items():
        behind = costs.stacks[-1].lent_by(last) + forward.net + _largest(costs, backward, 0)
        head[last, last] = _Move(always + forward.peak(True), behind, 0, forward.nanoseconds + backward.nanoseconds)
    yield head


def _block_moves(
    costs: Costs, stack: StackCosts, place: int, always: int, pending: int, held: int, last_keys: Sequence[Key | None]
) -> Iterator[tuple[tuple[Key | None, Key], _Move]]:
    """The stage of one block; `pending` are the bytes of the gradients that its backward finds finished, and `held`
    those that the blocks behind it go on to hold."""
    kind, at_end = stack.kinds[place], place == len(stack.kinds) - 1
    befores: Sequence[Key | None] = last_keys
    if place:
        befores = [(stack.kinds[place - 1], action) for action in stack.choices_at(place - 1)]
    for action in stack.choices_at(place):
        key = kind, action
        for before in befores:
            cost = stack.costs[before if place else None, key]
            backward = stack.last_backward[key] if at_end else cost.backward
            turn = stack.turn_bytes - cost.output_bytes + (0 if at_end else stack.shared_bytes)
            net = cost.forward.net - cost.lent_bytes
            behind = net + turn + held + _largest(costs, backward, pending)
            nanoseconds = cost.forward.nanoseconds + cost.backward.nanoseconds
            yield (before, key), _Move(always + cost.forward.peak(True), behind, net, nanoseconds, cost.lent_bytes)


def _largest(costs: Costs, backward: Phase, gradients: int) -> int:
    """Most bytes of a part of the backward, above those kept for it: what is always there, the `gradients` that are
    finished before it, and its own peak."""
    return max(_base(costs, mode) + (0 if mode else gradients) + backward.peak(mode) for mode in costs.modes)


def _in_order(costs: Costs, choice: Choice) -> Choice:
    """The same actions with those first that keep the least, unless that is slower or takes more memory."""
    ordered = tuple(_ordered(stack, chosen) for stack, chosen in zip(costs.stacks, choice, strict=True))
    rows = zip(costs.stacks, ordered, strict=True)
    allowed = all(action in stack.choices_at(place) for stack, row in rows for place, action in enumerate(row))
    if ordered == choice or not allowed:
        return choice
    now, then = worst_timeline(costs, choice), worst_timeline(costs, ordered)
    return ordered if then.nanoseconds <= now.nanoseconds and then.peak_bytes <= now.peak_bytes else choice


def _ordered(stack: StackCosts, chosen: Sequence[int]) -> tuple[int, ...]:
    """The actions of one stack, sorted within blocks of one kind: those first that keep the least."""
    result = list(chosen)
    for kind in set(stack.kinds):
        places = [place for place, found in enumerate(stack.kinds) if found == kind]

        def left(action: int, kind: int = kind) -> int:
            key = kind, action
            return min(cost.forward.net for (before, found), cost in stack.costs.items() if found == key and before)

        if len(places) > 1:
            for place, action in zip(places, sorted((chosen[place] for place in places), key=left), strict=True):
                result[place] = action
    return tuple(result)
