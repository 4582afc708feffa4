"""What a step of a run under `budget` or `auto` is for."""

from __future__ import annotations

import dataclasses
import enum

MOST_FAILURES = 8
"""After so many steps in a row that could not be measured, nothing more is measured."""


class Phase(enum.Enum):
    """What a step is for."""

    WARM_UP = "warm-up"
    MEASURE = "measure"
    TIME = "time"
    RACE = "race"
    CHECK = "check"
    PLAN = "plan"
    GIVEN_UP = "given up"

    @property
    def is_planned(self) -> bool:
        """Whether such a step runs under a plan that stays; a plan of another step is enabled for one step."""
        return self in (Phase.CHECK, Phase.PLAN)

    @property
    def is_measured(self) -> bool:
        """Whether memory or time of such a step is read."""
        return self not in (Phase.WARM_UP, Phase.PLAN, Phase.GIVEN_UP)


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known when a batch comes."""

    is_warm: bool = True
    """Whether enough steps ran before the first measured one."""
    failures: int = 0
    """Steps in a row that could not be measured."""
    has_plan: bool = False
    """Whether a plan was made for the batch, or for one that covers it."""
    is_checked: bool = False
    """Whether a step under that plan was measured, or the plan is that of a larger batch."""
    has_bytes: bool = False
    """Whether the bytes of every action are known."""
    has_times: bool = False
    """Whether their times are known, or none can be timed within the budget."""
    has_raced: bool = False
    """Whether whole steps have decided between the plans that may be the fastest, or there is only one."""


def phase_of(known: Known) -> Phase:
    """Return what the next step is for: the first of these that is still to be done."""
    gave_up = known.failures >= MOST_FAILURES
    if not known.is_warm:
        return Phase.WARM_UP
    if known.has_plan:
        return Phase.PLAN if known.is_checked or gave_up else Phase.CHECK
    if gave_up:
        return Phase.GIVEN_UP
    if not known.has_bytes:
        return Phase.MEASURE
    if not known.has_times:
        return Phase.TIME
    if not known.has_raced:
        return Phase.RACE
    return Phase.CHECK
