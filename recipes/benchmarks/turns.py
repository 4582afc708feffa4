"""Taking turns: what is compared is run side by side, so that a machine that slows down slows all of it.

The speed of a machine changes within minutes, and whatever else it does makes steps slower, never faster. So in one
turn the ways to run a step alternate, step by step, within seconds; the fastest step of each counts, and ratios are
taken within a turn. The figure of a way is the median of its turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from hf_ckpt.measure.clocks import stopwatch

Way = TypeVar("Way", bound=Hashable)
Item = TypeVar("Item")
Step = Callable[[], float | None]
"""Runs one step and returns its seconds; None where it failed, now or before."""


def fastest(ways: Mapping[Way, Step], steps: int = 1) -> dict[Way, float]:
    """One turn: every way takes a step, in order, `steps` times over. Seconds of the fastest step of each.

    A way that fails on the way has no figure in this turn.
    """
    seconds: dict[Way, list[float | None]] = {way: [] for way in ways}
    for _ in range(steps):
        for way, step in ways.items():
            seconds[way].append(step())
    taken = {way: [value for value in values if value is not None] for way, values in seconds.items()}
    return {way: min(values) for way, values in taken.items() if len(values) == steps}


def seconds_of(step: Callable[[], object]) -> float:
    """How long a step takes, accelerator included."""
    with stopwatch() as seconds:
        step()
    return seconds[0]


def rotated(items: Iterable[Item], number: int, turns: int) -> list[Item]:
    """The items in the order of a turn: each of the `turns` begins somewhere else, evenly spread over all items."""
    found = list(items)
    start = number * max(1, len(found) // turns) % max(1, len(found))
    return [*found[start:], *found[:start]]


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """One time over the other, turn by turn: they ran within seconds, at one speed of the machine."""
    return [one / other for one, other in zip(mine, theirs, strict=False)]


def median(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return statistics.median(values) if values else None
