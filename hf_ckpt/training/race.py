"""Which way to plan makes the fastest steps: whole steps decide, because blocks that are timed one by one may wait for
the host, or the device for them, in other ways than in a plan."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Collection, Mapping, Sequence

from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Plan
from hf_ckpt.training.batches import Batch

RACE_STEPS = 3
"""Steps of each plan that are timed. The median counts, so that the first may be slower."""


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A plan that may be the fastest."""

    way: tuple[Action, ...]
    """The actions that it chooses from."""
    plan: Plan
    seconds: float
    """Its predicted time."""


@dataclasses.dataclass(frozen=True)
class Entered:
    """The plans that may be the fastest for a batch."""

    batch: Batch
    entrants: tuple[Entrant, ...]
    hints: tuple[str, ...] = ()
    """What would lower the peak, if none of them fits."""


class Race:
    """Times of whole steps of a run, relative to their predictions, so that batches of all shapes count."""

    def __init__(self) -> None:
        self.ratios: dict[tuple[Action, ...], list[float]] = {}
        """Way to plan -> measured time of each step, as a multiple of the predicted one."""

    def next(self, entrants: Sequence[Entrant]) -> Entrant | None:
        """Return the plan to time in the next step; None if enough steps were timed, or if all plans are the same."""
        plans = {entrant.plan.actions for entrant in entrants}
        least = min(entrants, key=self._steps)
        return None if len(plans) == 1 or self._steps(least) >= RACE_STEPS else least

    def learn(self, plan: Plan, entrants: Collection[Entrant], nanoseconds: int) -> None:
        """Store the time of a step under a plan, for all ways that make this plan."""
        for entrant in entrants:
            if entrant.plan.actions == plan.actions:
                self.ratios.setdefault(entrant.way, []).append(nanoseconds / 1e9 / max(1e-9, entrant.seconds))

    def take_slowest(self, ranks: Sequence[Mapping[tuple[Action, ...], Sequence[float]]]) -> None:
        """Take the longest time of each step among `ratios` of all ranks."""
        for way, own in self.ratios.items():
            steps = itertools.zip_longest(own, *(ratios.get(way, ()) for ratios in ranks), fillvalue=0.0)
            self.ratios[way] = [max(step) for step in steps][: len(own)]

    def winner(self, entrants: Sequence[Entrant]) -> Entrant:
        """Return the fastest plan, with the time that steps have shown."""
        return min(map(self._corrected, entrants), key=lambda entrant: entrant.seconds)

    def _steps(self, entrant: Entrant) -> int:
        return len(self.ratios.get(entrant.way, ()))

    def _corrected(self, entrant: Entrant) -> Entrant:
        ratios = self.ratios.get(entrant.way)
        if not ratios:
            return entrant
        return dataclasses.replace(entrant, seconds=entrant.seconds * statistics.median(ratios))
