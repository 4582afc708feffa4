"""What a step of a run under `budget` or `auto` is for, and which plan wins a race.

Whole steps decide which plan is the fastest, because blocks that are timed one by one may wait for the host, or the
device for them, in other ways than in a plan.
"""

from __future__ import annotations

import dataclasses
import enum
import statistics
from collections.abc import Collection, Sequence

from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Plan
from hf_ckpt.training.batches import Batch

MOST_FAILURES = 8
"""After so many steps in a row that could not be measured, nothing more is measured."""


class Phase(enum.Enum):
    """What a step is for."""

    WARM_UP = "warm-up"
    """DDP prepares itself, or a run under ZeRO-3 begins; nothing is measured."""
    MEASURE = "measure"
    """Memory is read."""
    TIME = "time"
    """Times of blocks are read."""
    RACE = "race"
    """The time of the whole step is read, under a plan that may be the fastest."""
    CHECK = "check"
    """The first step under the plan of its batch; its memory is read."""
    PLAN = "plan"
    """A step under the plan of its batch."""
    GIVEN_UP = "given up"
    """So many steps could not be measured that none is any more."""
    PAUSED = "paused"
    """A forward more than was expected, or a larger one, has no room under the plan."""


MEASURED = frozenset({Phase.MEASURE, Phase.TIME, Phase.RACE, Phase.CHECK})
"""Phases whose steps have their memory or time read."""
TIMED = frozenset({Phase.TIME, Phase.RACE})
"""Those whose steps have their time read, and no memory."""


def phases_for(
    *, is_warm: bool = True, failures: int = 0, has_plan: bool = False, is_checked: bool = False
) -> tuple[Phase, ...]:
    """Return what the next step may be for, in order: it is for the first in which something is left to do.

    To find out what is left to do takes long, and needs what the phases before have shown. So it is looked for in one
    phase after the other. In the last one, there always is something to do.

    Args:
        is_warm: whether enough steps ran before the first measured one.
        failures: steps in a row that could not be measured.
        has_plan: whether a plan was made for the batch, or for one that covers it.
        is_checked: whether a step under that plan was measured, or the plan is that of a larger batch.
    """
    gave_up = failures >= MOST_FAILURES
    if not is_warm:
        return (Phase.WARM_UP,)
    # A plan that was made is not wrong because later steps cannot be measured.
    if has_plan:
        return (Phase.PLAN,) if is_checked or gave_up else (Phase.CHECK,)
    if gave_up:
        return (Phase.GIVEN_UP,)
    return Phase.MEASURE, Phase.TIME, Phase.RACE, Phase.CHECK


# --- the race ---------------------------------------------------------------------------------------------------------

RACE_STEPS = 3
"""Steps of each plan that are timed. The median counts, so that the first may be slower."""
Actions = tuple[Action, ...]


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A plan that may be the fastest."""

    allowed: Actions
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
        self.ratios: dict[Actions, list[float]] = {}
        """Actions that a plan was chosen from -> measured time of each step, as a multiple of the predicted one."""

    def next(self, entrants: Sequence[Entrant]) -> Entrant | None:
        """Return the plan to time in the next step; None if enough steps were timed, or if all plans are the same."""
        plans = {entrant.plan.actions for entrant in entrants}
        # In turn, so that what slows the machine down for a while slows down all of them.
        least = min(entrants, key=self._steps)
        return None if len(plans) == 1 or self._steps(least) >= RACE_STEPS else least

    def learn(self, plan: Plan, entrants: Collection[Entrant], nanoseconds: int) -> None:
        """Store the time of a step under a plan, for all entrants that have this plan."""
        for entrant in entrants:
            if entrant.plan.actions == plan.actions:
                self.ratios.setdefault(entrant.allowed, []).append(nanoseconds / 1e9 / _predicted(entrant))

    def winner(self, entrants: Sequence[Entrant]) -> Entrant:
        """Return the fastest plan, with the time that steps have shown."""
        return min(map(self._corrected, entrants), key=lambda entrant: entrant.seconds)

    def _steps(self, entrant: Entrant) -> int:
        return len(self.ratios.get(entrant.allowed, ()))

    def _corrected(self, entrant: Entrant) -> Entrant:
        """The entrant with the time that steps have shown; with its prediction if none was raced, because all plans
        are the same."""
        ratios = self.ratios.get(entrant.allowed)
        if not ratios:
            return entrant
        return dataclasses.replace(entrant, seconds=_predicted(entrant) * statistics.median(ratios))


def _predicted(entrant: Entrant) -> float:
    """The predicted time. It is 0 if blocks were never timed, for want of room; then times of a token are compared."""
    prediction = entrant.plan.prediction
    tokens = prediction.tokens if prediction is not None else None
    return entrant.seconds or tokens or 1.0
