"""Which way to plan makes the fastest steps: whole steps decide, because blocks that are timed one by one may wait for
the host, or the device for them, in other ways than in a plan."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Collection, Sequence

from hf_ckpt.costs.costs import Costs
from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Plan

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


class Race:
    """Times of whole steps of a run, relative to their predictions, so that batches of all shapes count."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[Action, ...], list[float]] = collections.defaultdict(list)
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
                self._ratios[entrant.way].append(nanoseconds / 1e9 / max(1e-9, entrant.seconds))

    def winner(self, entrants: Sequence[Entrant]) -> Entrant:
        """Return the fastest plan, with the time that steps have shown."""
        return min(map(self._corrected, entrants), key=lambda entrant: entrant.seconds)

    def _steps(self, entrant: Entrant) -> int:
        return len(self._ratios[entrant.way])

    def _corrected(self, entrant: Entrant) -> Entrant:
        ratios = self._ratios[entrant.way]
        if not ratios:
            return entrant
        return dataclasses.replace(entrant, seconds=entrant.seconds * statistics.median(ratios))


def restricted(costs: Costs, actions: Sequence[Action]) -> Costs:
    """Return costs with some of the actions. A call that may have none of them keeps its own."""
    calls = []
    for call in costs.calls:
        some = {action: cost for action, cost in call.costs.items() if action in actions}
        calls.append(dataclasses.replace(call, costs=some or call.costs))
    return dataclasses.replace(costs, calls=tuple(calls), actions=tuple(actions))
