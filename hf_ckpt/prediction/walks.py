"""Chooses the short models to trace, so that together they show every action behind every other action.

Blocks are keys (kind, action) here. Tracing a stack means walking from key to key along the steps that occur in it.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence

from hf_ckpt.prediction.costs import Key

Walk = tuple[Key, ...]
"""The blocks of one stack of a short model, in the order in which they run: (kind, action) of each."""


def walks_of(row: Sequence[int], choices: Sequence[Sequence[int]]) -> list[Walk]:
    """Walks that together show how each key of a stack behaves: first, last, and behind every other.

    Every kind that comes first or last in the stack does so under each of its actions. Where blocks of one kind follow
    each other, each action follows each; where a kind follows another kind, each action of either is in one step at
    least.

    Args:
        row: the kind of each block of the real stack.
        choices: kind -> its actions, as positions in `Costs.actions`.
    """
    steps = _steps(row, choices)
    starts: list[Key] = [(row[0], action) for action in choices[row[0]]]
    if len(row) == 1:
        return [(key,) for key in starts]
    lasts: set[Key] = {(row[-1], action) for action in choices[row[-1]]}
    left = {(key, following) for key, found in steps.items() for following in found}
    left_starts, left_lasts = list(starts), set(lasts)

    def has_more(key: Key) -> bool:
        return any((key, following) in left for following in steps[key])

    def way_on(key: Key, wanted: Callable[[Key], bool]) -> list[Key]:
        """The shortest path of at least one step: a block that is first and last at once would show neither."""
        paths = [_path(following, steps, wanted) for following in steps[key]]
        return min((path for path in paths if path), key=len, default=[])

    walks: list[Walk] = []
    inside: set[tuple[Key, Key]] = set()
    while left_starts or left or left_lasts:
        if left_starts:
            walk = [left_starts.pop(0)]
        else:
            walk = [next(k for k in starts if way_on(k, left_lasts.__contains__) or _path(k, steps, has_more))]
        while path := _path(walk[-1], steps, has_more):
            unseen = next(key for key in steps[path[-1]] if (path[-1], key) in left)
            left.discard((path[-1], unseen))
            walk += [*path[1:], unseen]
        if len(walk) == 1 or walk[-1] not in left_lasts:
            tail = way_on(walk[-1], left_lasts.__contains__)
            if not tail and (len(walk) == 1 or walk[-1] not in lasts):
                tail = way_on(walk[-1], lasts.__contains__)
            walk += tail
        # The forward of a walk's last block is mixed with what is freed behind the stack: a step that so far was only
        # the last of a walk is taken once more.
        while walk[-1] in steps[walk[-1]] and (walk[-2], walk[-1]) not in inside | set(itertools.pairwise(walk[:-1])):
            walk.append(walk[-1])
        inside |= set(itertools.pairwise(walk[:-1]))
        left_lasts.discard(walk[-1])
        left -= set(itertools.pairwise(walk))
        walks.append(tuple(walk))
    return walks


def rows_of(row: Sequence[int], choices: Sequence[Sequence[int]]) -> list[Walk]:
    """The whole stack under each action in turn, for models that run with their own blocks in their own order only.

    Args:
        row: the kind of each block of the real stack.
        choices: kind -> its actions, as positions in `Costs.actions`.
    """
    most = max(len(choices[kind]) for kind in row)
    return [tuple((kind, choices[kind][min(n, len(choices[kind]) - 1)]) for kind in row) for n in range(most)]


def _steps(row: Sequence[int], choices: Sequence[Sequence[int]]) -> collections.defaultdict[Key, list[Key]]:
    """Key -> the keys that have to follow it in some walk; empty for a key that nothing follows."""
    pairs = set(itertools.pairwise(row))
    steps: collections.defaultdict[Key, list[Key]] = collections.defaultdict(list)
    for kind, following in sorted(pairs):
        here, there = choices[kind], choices[following]
        wide = kind == following or (following, following) not in pairs
        for number, place in itertools.product(range(len(here)), range(len(there))):
            if wide or place % len(here) == number or number % len(there) == place:
                steps[kind, here[number]].append((following, there[place]))
    return steps


def _path(start: Key, steps: Mapping[Key, Sequence[Key]], wanted: Callable[[Key], bool]) -> list[Key]:
    """The shortest path from `start` to a key that is wanted, both included; empty where there is none."""
    queue = collections.deque([[start]])
    seen = {start}
    while queue:
        path = queue.popleft()
        if wanted(path[-1]):
            return path
        for following in steps.get(path[-1], ()):
            if following not in seen:
                seen.add(following)
                queue.append([*path, following])
    return []
