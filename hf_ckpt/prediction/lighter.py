"""The costs of actions that keep as much as another one from forward to backward, and need less in the backward.

`full+selective` is one: in the forward it does what `full` does. So only the backward of a block under it is traced, in
one short model, and where it cannot lower the peak nothing is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_ckpt.prediction.costs import BlockCost, Costs, Key, Phase, StackCosts
from hf_ckpt.prediction.devices import Device
from hf_ckpt.prediction.runs import Run
from hf_ckpt.prediction.skeleton import Skeleton
from hf_ckpt.prediction.timeline import worst_timeline
from hf_ckpt.prediction.trace import CannotTraceError, Step, trace_walks
from hf_ckpt.prediction.walks import Walk
from hf_ckpt.spec.actions import Action, lighter

LIGHTER = lighter()
"""Action -> the one that keeps as much, and whose backward needs more."""
_Backwards = Mapping[Key, Phase]
"""Key of a block -> its backward."""


def with_lighter(ways: Sequence[Costs], skeleton: Skeleton, step: Step, device: Device) -> list[Costs]:
    """Each of `ways` with the actions added that are lighter than another of its actions.

    One comes back as it is where that lowers no peak: if the peak under that other action, given to all blocks, is not
    in the backward of one of these. So do all where short models cannot be traced.

    Args:
        ways: costs traced of `skeleton` and `step`, which differ in the head at most.
        skeleton: of the model.
        step: the micro-step that was traced.
        device: whose row says how long operations take.
    """
    known = {action: number for number, action in enumerate(ways[0].actions)}
    wanted = {action: known[like] for action, like in LIGHTER.items() if like in known and action not in known}
    pays = [any(_is_peak(costs, like) for like in set(wanted.values())) for costs in ways]
    if not any(pays):
        return list(ways)
    first = ways[0]
    actions = (*first.actions, *wanted)
    instead = {len(first.actions) + number: like for number, like in enumerate(wanted.values())}
    walks = [_walk(stack, instead) for stack in first.stacks]
    try:
        run = trace_walks(skeleton, walks, step, device, actions, mlp=first.mlp_tokens)
    except CannotTraceError:
        return list(ways)
    backwards = [_backwards(run, number) for number in range(len(walks))]
    return [
        _added(costs, actions, backwards, instead) if lower else costs for costs, lower in zip(ways, pays, strict=True)
    ]


def _is_peak(costs: Costs, number: int) -> bool:
    """Whether the peak under one action is in the backward of a block, and that of a block that has the action."""
    choice = costs.uniform(number)
    chosen = {
        block.name: action
        for stack, row in zip(costs.stacks, choice, strict=True)
        for block, action in zip(stack.blocks, row, strict=True)
    }
    worst = worst_timeline(costs, choice).worst
    return worst.backward and worst.block is not None and chosen[worst.block] == number


def _walk(stack: StackCosts, instead: Mapping[int, int]) -> Walk:
    """Blocks of every kind: two with the action that keeps as much, of which the second is behind one like itself, and
    one with each lighter action.

    Behind them all is one more, because the last block of a stack differs.
    """
    walk: list[Key] = []
    for kind in dict.fromkeys(stack.kinds):
        here = [number for number, like in instead.items() if like in stack.choices[kind]]
        if not here:
            walk.append((kind, stack.choices[kind][0]))
            continue
        likes = dict.fromkeys(instead[number] for number in here)
        walk += [(kind, like) for like in likes] + [(kind, like) for like in likes]
        walk += [(kind, number) for number in here]
    kind = walk[-1][0]
    return (*walk, (kind, instead.get(walk[-1][1], walk[-1][1])))


def _backwards(run: Run, stack: int) -> _Backwards:
    """The backward of every key in a run's walk; of several that of the last one, behind one that keeps as much."""
    keys = run.walks[stack][:-1]
    return {key: run.phase("backward", stack, place) for place, key in enumerate(keys)}


def _added(
    costs: Costs, actions: tuple[Action, ...], backwards: Sequence[_Backwards], instead: Mapping[int, int]
) -> Costs:
    """`costs` with the lighter ones among `actions`."""
    stacks = tuple(_stack(*pair, instead) for pair in zip(costs.stacks, backwards, strict=True))
    return dataclasses.replace(costs, actions=actions, stacks=stacks, head=_for_alike(costs.head, instead))


def _stack(stack: StackCosts, backwards: _Backwards, instead: Mapping[int, int]) -> StackCosts:
    """A stack with the lighter actions."""
    last = {
        key: phase if key == like else _backward(phase, backwards[key], backwards[like])
        for like, phase in stack.last_backward.items()
        for key in _alike(like, instead)
    }
    return dataclasses.replace(
        stack,
        choices=tuple((*row, *(number for number, like in instead.items() if like in row)) for row in stack.choices),
        costs=dict(_costs(stack, backwards, instead)),
        last_backward=last,
        before=_for_alike(stack.before, instead),
    )


def _alike(key: Key | None, instead: Mapping[int, int]) -> list[Key]:
    """The key, and those with an action that keeps as much; none for None."""
    if key is None:
        return []
    return [key, *((key[0], number) for number, like in instead.items() if like == key[1])]


def _for_alike(found: Mapping[Any, Any], instead: Mapping[int, int]) -> dict[Any, Any]:
    """What is known for keys, for all keys with actions that keep as much, too."""
    return {**found, **{alike: value for key, value in found.items() for alike in _alike(key, instead)}}


def _costs(
    stack: StackCosts, backwards: _Backwards, instead: Mapping[int, int]
) -> Iterator[tuple[tuple[Key | None, Key], BlockCost]]:
    """The costs for every pair of actions, lighter ones among them."""
    for (before, key), cost in stack.costs.items():
        for chosen in _alike(key, instead):
            found = cost
            if chosen != key:
                found = dataclasses.replace(cost, backward=_backward(cost.backward, backwards[chosen], backwards[key]))
            yield from (((place, chosen), found) for place in (_alike(before, instead) or (None,)))


def _backward(known: Phase, lighter: Phase, like: Phase) -> Phase:
    """The backward of a block under a lighter action, from that under the action that keeps as much.

    Args:
        known: of the block, under the other action, behind any action.
        lighter: its backward behind one that keeps as much, as it was traced.
        like: the same under the other action.
    """
    more = max(0, known.peak(True) - like.peak(True))
    points = ((other + more, done) for other, done in lighter.points)
    nanoseconds = lighter.nanoseconds * known.nanoseconds // max(1, like.nanoseconds)
    return dataclasses.replace(lighter, points=(*points, (known.net, known.gradients)), nanoseconds=nanoseconds)
