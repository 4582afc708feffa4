"""One plan for all ranks, under `budget` and `auto` with DeepSpeed ZeRO-3.

There, the recomputation of a block gathers its parameters again. Ranks that recompute different blocks gather different
parameters, and wait for each other for ever. So all ranks run every micro-step under the same actions and trials,
whatever the shapes of their batches.

They agree inside the optimizer's step, which all ranks reach after the same micro-steps under ZeRO-3. No forward
contains a collective of hf_ckpt. What they have agreed on holds until the next optimizer step:

| phase | what all ranks run | how they agree |
|---|---|---|
| *warm-up* | `full`, until the first optimizer step | nothing to agree on |
| *measure*, *time* | what any of them still has to measure | the first that is lacking on any rank |
| *race* | plans that may be the fastest, one after the other | each rank proposes some, and each judges all of them |
| *plan* | the plan that took the least time for each token | times and tokens of all ranks are added up |
| *given up* | `full` | one rank cannot measure its steps |

A plan fits if it fits on every rank, for the largest batches that the rank has seen. A rank that sees a larger one, or
exceeds the budget, says so in the next optimizer step, and all of them plan again.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.record import Installation
from hf_ckpt.costs.costs import Costs, step_nanoseconds
from hf_ckpt.engines.trials import Attempts
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.levels import DeviceClock
from hf_ckpt.planner.planner import Selection
from hf_ckpt.spec.actions import Action
from hf_ckpt.training.batches import Batch
from hf_ckpt.training.measurements import TIMED_STEPS
from hf_ckpt.training.phases import MEASURED, MOST_FAILURES, RACE_STEPS, Entered, Entrant, Phase
from hf_ckpt.training.planning import Planning
from hf_ckpt.training.plans import BatchPlan, StepPlan
from hf_ckpt.training.session import Session

ENTRANTS = 3
"""Plans that are timed at most."""
UNTIMED = 2
"""Optimizer steps of each plan before those that are timed: DeepSpeed records anew what it gathers in which order, and
prefetches nothing until it has."""
MOST_TRIALS = 8
"""Optimizer steps that measure for the same batch, at most: one of its length may never come again."""
Actions = Mapping[str, Action]
"""Block -> its action, for blocks that do not keep least."""


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What all ranks run until the next optimizer step."""

    phase: Phase
    actions: Actions = dataclasses.field(default_factory=dict)
    attempts: Mapping[str, Attempts] = dataclasses.field(default_factory=dict)


class Judged(NamedTuple):
    """What one rank predicts of a plan."""

    excess_bytes: int
    """What its largest step needs above the limit; 0 if the plan fits."""
    seconds: float


class Timed(NamedTuple):
    """What one rank has run under a plan in a race."""

    nanoseconds: int = 0
    elements: int = 0
    """Of its batches."""


def all_of(answers: Sequence[tuple[Any, str]]) -> list[Any]:
    """What ranks have answered. Raises `HfCkptError` if one of them has failed, whose error is its second item."""
    for rank, (_, error) in enumerate(answers):
        if error:
            raise HfCkptError(f"rank {rank} cannot plan for its steps, and all ranks need one plan: {error}")
    return [value for value, _ in answers]


def fitting(options: Sequence[Actions], judged: Sequence[Sequence[Judged]]) -> tuple[list[Actions], bool]:
    """Return the options that fit on all ranks, the fastest first, or the one that needs least beyond the limit, and
    whether any fits.

    Args:
        options: actions of blocks.
        judged: for each rank, what it predicts of each option.
    """
    worst = [Judged(*map(max, zip(*of_ranks, strict=True))) for of_ranks in zip(*judged, strict=True)]
    places = sorted(range(len(options)), key=lambda place: worst[place])
    fit = [place for place in places if not worst[place].excess_bytes]
    return [options[place] for place in fit or places[:1]], bool(fit)


class RanksPlanning(Planning):
    """The planning of a model whose ranks must recompute the same blocks.

    Args:
        base: the model, plain.
        record: the record of hf_ckpt on it.

    Raises what `Planning` raises, and `HfCkptError` if ranks cannot agree in the optimizer's step.
    """

    measured_phases = MEASURED - {Phase.RACE}
    """In a race, whole optimizer steps are timed."""
    switches_within_steps = False
    """No rank can take another plan in the middle of a step."""

    def __init__(self, base: nn.Module, record: Installation) -> None:
        _refuse_without_common_step(base, record.spec.policy)
        super().__init__(base, record)
        self.agreed = Agreed(Phase.WARM_UP)
        """The same on all ranks."""
        self._has_run = False
        """Whether there was a micro-step since the last agreement: the same on all ranks."""
        self._seen: list[Batch] = []
        """The largest batches so far, none of which covers another."""
        self._planned_for: list[Batch] = []
        """Those for which the plan was made."""
        self._trials: collections.Counter[Batch] = collections.Counter()
        """How many optimizer steps have measured for a batch, since the last plan."""
        self._can_time = True
        """Whether an action that may be timed fits on all ranks: the same on all ranks."""
        self._entrants: list[Actions] = []
        """The plans that race: the same on all ranks. Empty without a race."""
        self._timed: list[Timed] = []
        """What this rank has run under each of them."""
        self._race_steps = 0
        """Optimizer steps of the race so far."""
        self._clock = DeviceClock(self.devices)
        self._stamp: Any = None
        """The time of the last agreement."""
        self._elements = 0
        """Elements of the batches since then."""

    # --- micro-steps ---

    def next(self, batch: Batch) -> StepPlan:
        """Return what all ranks have agreed on."""
        self._has_run = True
        self._elements += batch.elements
        if not any(larger.covers(batch) for larger in self._seen):
            self._seen = [*(smaller for smaller in self._seen if not batch.covers(smaller)), batch]
        agreed = self.agreed
        plan = self._own_plan()
        if plan is None or agreed.phase is not Phase.PLAN:
            phase = Phase.PAUSED if agreed.phase is Phase.PLAN else agreed.phase  # the next agreement plans again
            return StepPlan(phase, batch, self.maker.plan_with(agreed.actions), agreed.actions, agreed.attempts)
        is_new = plan.measured_bytes is None and batch == plan.batch
        is_due = (is_new or self.budget.watch.is_due) and self.failures < MOST_FAILURES
        return plan.step(Phase.CHECK if is_due else Phase.PLAN)

    def _own_plan(self) -> BatchPlan | None:
        """This rank's prediction of the plan that all have agreed on; None if it does not hold any more."""
        return next((plan for batch, plan in self.plans.items() if batch.state == self.state.present), None)

    # --- what ranks agree on ---

    def agrees_before(self, optimizer: torch.optim.Optimizer, base: nn.Module) -> bool:
        return optimizer in compat.distributed.zero3_optimizers(base)

    def agree(self) -> None:
        """Agree on what comes next. All ranks must call it, after the same micro-steps."""
        if not self._has_run or self.agreed.phase is Phase.GIVEN_UP:
            return
        self._has_run = False
        if self._entrants:
            self._go_on_racing()
        elif self.agreed.phase is not Phase.PLAN or any(self._of_all(self._is_void)):
            self.agreed = self._agree_to_learn() or self._agree_to_race()
        self._stamp = self._clock.stamp()
        self._elements = 0

    def _of_all(self, ask: Callable[[], Any]) -> list[Any]:
        """Return what all ranks answer. A rank that fails must not leave the others waiting."""
        try:
            answer = ask(), ""
        except Exception as error:
            all_of(compat.distributed.of_all_ranks((None, f"{type(error).__name__}: {error}")))
        return all_of(compat.distributed.of_all_ranks(answer))

    def _agree_to_learn(self) -> Agreed | None:
        """What any rank still has to learn; None if nothing."""
        lacking: list[Agreed] = [agreed for agreed in self._of_all(self._lacking) if agreed is not None]
        for phase in (Phase.GIVEN_UP, Phase.MEASURE, Phase.PLAN):
            of_phase = [agreed for agreed in lacking if agreed.phase is phase]
            if of_phase:
                return of_phase[0]
        if not lacking:
            return None
        options = [agreed.actions for agreed in lacking]
        first, fits = fitting(options, self._of_all(lambda: [self._judged(option) for option in options]))
        if fits:
            return Agreed(Phase.TIME, first[-1])  # the slowest: it changes most
        self._can_time = False
        return None

    def _agree_to_race(self) -> Agreed:
        """What comes once all ranks know their steps: a race, or the plan if there is only one."""
        options: list[Actions] = [{}]
        for of_rank in self._of_all(self._proposals):
            options += [actions for actions in of_rank if actions not in options]
        entrants, _ = fitting(options, self._of_all(lambda: [self._judged(option) for option in options]))
        if len(entrants) == 1:
            return self._take(entrants[0])
        self._entrants = entrants[:ENTRANTS]
        self._timed = [Timed()] * len(self._entrants)
        self._race_steps = 0
        return Agreed(Phase.RACE, self._entrants[0])

    def _go_on_racing(self) -> None:
        """Time the optimizer step that ends now, and take the next plan of the race, or the fastest after the last."""
        turn, step = divmod(self._race_steps, UNTIMED + RACE_STEPS)
        if step >= UNTIMED:
            spent = self._clock.between(self._stamp, self._clock.stamp())
            before = self._timed[turn]
            self._timed[turn] = Timed(before.nanoseconds + spent, before.elements + self._elements)
        self._race_steps += 1
        turn = self._race_steps // (UNTIMED + RACE_STEPS)
        if turn < len(self._entrants):
            self.agreed = Agreed(Phase.RACE, self._entrants[turn])
            return
        entrants = self._entrants
        self._entrants = []
        # Ranks wait for each other, so that a step takes as long on each of them.
        of_ranks = zip(*self._of_all(lambda: self._timed), strict=True)
        totals = [Timed(*map(sum, zip(*timed, strict=True))) for timed in of_ranks]
        place = min(range(len(entrants)), key=lambda place: totals[place].nanoseconds / max(1, totals[place].elements))
        self.agreed = self._take(entrants[place])

    # --- what this rank knows ---

    def _batches(self) -> list[Batch]:
        """The largest batches of the present state whose step is known, or may be, the largest first."""
        present = [batch for batch in self._seen if batch.state == self.state.present]
        hopeful = [b for b in present if self._trials[b] < MOST_TRIALS or self.measurements.knows(b)]
        return sorted(hopeful, key=lambda batch: -batch.elements)

    def _is_void(self) -> bool:
        """Whether the plan does not hold any more: it needs too much, or a larger batch has come."""
        if self._own_plan() is None:
            return True
        new = [batch for batch in self._batches() if batch not in self._planned_for]
        return any(not self.measurements.knows(b) or self._excess(b, self.agreed.actions) for b in new)

    def _lacking(self) -> Agreed | None:
        """What this rank still has to measure; None if it knows its largest steps."""
        batches = self._batches()
        plan = self._own_plan()
        if plan is not None and plan.plan.prediction is None:  # blocks save nothing, so that none is recomputed
            return Agreed(Phase.PLAN)
        if not batches or self.failures >= MOST_FAILURES:
            return Agreed(Phase.GIVEN_UP)
        for batch in batches:
            # Backwards are not tried: a recomputation that does not stop early, as that of a trial, frees parameters
            # that backward has gathered before. Their peak under `full` is a bound.
            if self.measurements.lacks_forwards(batch) and self._trials[batch] < MOST_TRIALS:
                self._trials[batch] += 1
                return Agreed(Phase.MEASURE, attempts=self.measurements.forwards_to_try(batch))
        if not self._can_time or self.measurements.timed >= TIMED_STEPS:
            return None
        timed = self.measurements.actions_to_time(batches[0], self.maker.limit_of_attempts(batches[0]))
        return Agreed(Phase.TIME, timed) if timed else None

    def _proposals(self) -> list[Actions]:
        """The plans that may be the fastest for the largest batch."""
        self.entered = self.maker.enter(self._batches()[0])
        plans = [entrant.plan for entrant in self.entered.entrants]
        return [{block.name: action for block, action in plan.actions if action != self.least} for plan in plans]

    def _judged(self, actions: Actions) -> Judged:
        batches = self._batches()
        costs = self._costs_with(batches[0], actions)
        seconds = step_nanoseconds(costs, costs.choice(actions)) / 1e9
        return Judged(max(self._excess(batch, actions) for batch in batches), seconds)

    def _excess(self, batch: Batch, actions: Actions) -> int:
        return max(0, self._costs_with(batch, actions).peak(actions) - self.budget.limit_bytes)

    def _costs_with(self, batch: Batch, actions: Actions) -> Costs:
        """The costs in which all of these actions are."""
        variants = self.maker.costs_with_host(batch)
        return next((costs for costs in variants if {*actions.values()} <= {*costs.actions}), variants[0])

    def _take(self, actions: Actions) -> Agreed:
        """Make these actions the plan of all ranks."""
        self._planned_for = self._batches()
        self._trials.clear()
        batch = self._planned_for[0]
        costs = self._costs_with(batch, actions)
        selection = Selection(costs, costs.choice(actions))
        plan = selection.plan(self.budget.limit_bytes, compat.devices.device_name(self.devices))
        prediction = plan.prediction
        assert prediction is not None
        entrant = Entrant(self.measurements.actions, self.maker.plan_with(actions, prediction), prediction.step_seconds)
        # On a rank on which it does not fit, none does that fits on all ranks.
        hints = ("fewer tokens",) if self._judged(actions).excess_bytes else ()
        self.plans.clear()
        self.entered = Entered(batch, (entrant,), hints)
        self._plan_winner()
        return Agreed(Phase.PLAN, actions)


def _refuse_without_common_step(base: nn.Module, policy: str) -> None:
    """Raise `HfCkptError` if ranks under ZeRO-3 have no optimizer step in which all of them could agree on a plan."""
    reason = compat.distributed.why_no_common_step(base)
    if reason:
        raise HfCkptError(
            f"policy: {policy} cannot plan for this run: under ZeRO-3 all ranks must recompute the same blocks. They "
            f"agree on them in the optimizer's step, but {reason}. Give `full` or `selective`, or a saved plan."
        )


def session_for(base: nn.Module, record: Installation) -> Session:
    """Make the session of a model. Raises what `Planning` and `RanksPlanning` raise."""
    kind = RanksPlanning if compat.distributed.ranks_recompute_together(base) else Planning
    return Session(base, record, kind(base, record))
