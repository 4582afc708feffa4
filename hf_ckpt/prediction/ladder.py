"""Chooses which of many actions a plan has to choose from: those that mixtures of the others do not do as well.

A plan may give some blocks one action and the rest another. So an action pays only if it takes less time than every
mixture of two others that keeps as many bytes: if it lies below their lower convex hull. Free of torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

MOST = 2
"""Most actions that are added: tracing and solving take longer with each."""
LEAST_GAIN = 0.005
"""What an added action must gain at least, as a share of the time of the blocks under the first action."""

Point = tuple[int, int, int]
"""(blocks, bytes that one of them keeps, nanoseconds that one of them takes) under one action."""


def rungs(stacks: Sequence[Sequence[Point]], always: int) -> list[int]:
    """Choose actions, as positions; that which keeps most comes first.

    Args:
        stacks: for each stack, what its blocks keep and take under each action.
        always: how many of the actions, from the first one on, are chosen in any case.
    """
    chosen, left = list(range(always)), list(range(always, max(map(len, stacks), default=0)))
    whole = sum(blocks * nanoseconds for (blocks, _, nanoseconds), *_ in stacks)
    while left and len(chosen) < always + MOST:
        gains = {number: sum(_gain(points, chosen, number) for points in stacks) for number in left}
        best = max(left, key=gains.__getitem__)
        if gains[best] < LEAST_GAIN * whole:
            break
        left.remove(best)
        chosen.append(best)
    first, *others = chosen
    return [first, *sorted(others, key=lambda number: -sum(blocks * size for blocks, size, _ in _at(stacks, number)))]


def _at(stacks: Sequence[Sequence[Point]], number: int) -> list[Point]:
    return [points[number] for points in stacks]


def _gain(points: Sequence[Point], chosen: Collection[int], number: int) -> float:
    """Nanoseconds by which an action is faster in a stack than every mixture of `chosen` ones that keeps as much."""
    blocks, size, nanoseconds = points[number]
    less = [points[other] for other in chosen if points[other][1] <= size]
    more = [points[other] for other in chosen if points[other][1] > size]
    alone = [float(time) for _, _, time in less]
    mixed = [
        low_time + (high_time - low_time) * (size - low) / (high - low)
        for (_, low, low_time), (_, high, high_time) in itertools.product(less, more)
    ]
    return blocks * max(0.0, min([*alone, *mixed], default=float(nanoseconds)) - nanoseconds)
