"""What each step of a run is for, and the plan that it runs under.

A batch size whose plan exists, or that a larger batch's plan covers, runs under it. Otherwise the step is for the first
of these phases in which something is left to do, see `phases`:

| phase | its steps run under | it ends |
|---|---|---|
| *warm-up* | what keeps least, unmeasured | after two steps under DDP |
| *measure* | what keeps least; the recomputations try other actions | after two steps of about this size |
| *time* | a mixture of actions | after `TIMED_STEPS` steps |
| *race* | the plans that may be the fastest, in turn | after `RACE_STEPS` steps of each |
| *check* | the plan; its first step is measured | after that step |
| *plan* | the plan of the batch | |
| *given up* | what keeps least | |
| *paused* | what keeps least: a forward has no room under the plan; unmeasured | after that step |

If the peak of a checked step exceeds the budget, the limit of all later plans is lower by what it needed more than was
predicted. `full` keeps least, or `full+tiles` where the spec has `mlp`: see `planner.policies.least`; in segments, if
the spec has them. What `full` itself needs follows from such a step, see `measure.levels.as_held`. With compiled blocks
it is share 0, single blocks try other shares in their forward, and a step that compiles a graph is not used.

Later steps are watched: see `budget`. The first one above the budget voids all plans, and steps are measured again. If
that does not help, the limit is lower, too.

No batch ends a run: if no plan fits, the one with the lowest peak is used, with one warning.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.record import Installation
from hf_ckpt.costs.steps import Step
from hf_ckpt.logs import tell
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.spec.actions import COMPILED, Action
from hf_ckpt.spec.plan import Plan, Prediction
from hf_ckpt.training.batches import Batch
from hf_ckpt.training.budget import Budget
from hf_ckpt.training.measurements import TIMED_STEPS, Measurements
from hf_ckpt.training.phases import MEASURED, MOST_FAILURES, Entered, Phase, Race, phases_for
from hf_ckpt.training.plans import BatchPlan, PlanMaker, StepPlan, actions_to_choose
from hf_ckpt.training.recorder import refuse_compiled
from hf_ckpt.training.states import ModelState
from hf_ckpt.units import format_bytes

log = logging.getLogger(__name__)


class Planning:
    """The measurements and plans of a run, by which it chooses what the next step is for.

    Args:
        base: the model, plain.
        record: the record of hf_ckpt on it.

    Raises `InfeasibleError` if the model itself needs more than the budget.
    """

    measured_phases = MEASURED
    """Phases whose steps are measured."""
    switches_within_steps = True
    """Whether another plan may be enabled between two forwards of a step."""

    def __init__(self, base: nn.Module, record: Installation) -> None:
        blocks = find_blocks(base)
        self.spec = record.spec
        self.name = blocks.class_name
        self.devices = compat.distributed.devices_of_model(base)
        self.budget = Budget(record.spec, base, self.devices)
        actions = actions_to_choose(self.spec)
        self.least = actions[-1]
        """The action that keeps least."""
        if self.least == COMPILED:
            refuse_compiled(base, self.devices, self.spec.policy)
        # Blocks of stacks for which a rule says what they get, and that.
        fixed = {block.name: action for block, action in record.plan.actions if self.spec.is_fixed(block.stack)}
        skips = compat.transformers.skips_blocks(base)
        self.measurements = Measurements(blocks, actions, {**fixed, **record.avoided}, skips)
        self.state = ModelState(base, self.devices)
        parameters_stay = self.state.parameters_stay
        self.maker = PlanMaker(blocks, record, self.devices, self.measurements, self.budget, parameters_stay)
        self.race = Race()

        self.plans: dict[Batch, BatchPlan] = {}
        """The plans of the run, by their batch."""
        self.entered: Entered | None = None
        """The plans that race, or that have raced."""
        self.measured_steps = 0
        """Steps that were to be measured so far."""
        self.failures = 0
        """Steps in a row that could not be measured."""
        self._warm_steps = 0
        """Steps of the warm-up so far."""
        self._logged: frozenset[Action] = frozenset()
        """The actions of the last plan that was logged for the user."""
        self._has_warned = False
        """Whether the user was warned that no plan fits."""

    def agrees_before(self, optimizer: torch.optim.Optimizer, base: nn.Module) -> bool:
        """Whether ranks agree on what comes next before a step of this optimizer."""
        return False

    def agree(self) -> None:
        """Agree on what comes next."""

    # --- the next step ---

    def next(self, batch: Batch) -> StepPlan:
        """Return what the step of a batch is for: the first phase in which something is left to do."""
        # A plan made for exactly this batch wins over that of a larger one, which recomputes more.
        plan = self.plans.get(batch) or self._covering(batch)
        needs_warm_up = compat.distributed.has_process_group()  # DDP builds its gradient buckets in the first two steps
        phases = phases_for(
            is_warm=self._warm_steps >= 2 or not needs_warm_up,
            failures=self.failures,
            has_plan=plan is not None,
            # A larger batch checks its plan with a step of its own, which needs more than this one.
            is_checked=plan is not None and not self.budget.watch.is_due and (plan.batch != batch or plan.is_checked),
        )
        for phase in phases:
            step_plan = self._step_for(phase, batch, plan)
            if step_plan is not None:
                return step_plan
        raise AssertionError("a batch whose steps are known has a plan")

    def _step_for(self, phase: Phase, batch: Batch, plan: BatchPlan | None) -> StepPlan | None:
        """The step of a batch in this phase; None if nothing is left to do in it.

        `plan` is the one that was made for the batch, or for one that covers it.
        """
        match phase:
            case Phase.WARM_UP:
                self._warm_steps += 1
                return self.maker.keeping_least(batch, phase)
            case Phase.GIVEN_UP:
                return self.maker.keeping_least(batch, phase)
            case Phase.MEASURE:
                return self._to_measure(batch)
            case Phase.TIME:
                return self._to_time(batch)
            case Phase.RACE:
                return self._to_race(batch)
            case Phase.CHECK if plan is None:
                plan = self._plan_winner()
                return plan.step(Phase.PLAN if plan.is_checked else Phase.CHECK)
        assert plan is not None
        return plan.step(phase)

    def _to_measure(self, batch: Batch) -> StepPlan | None:
        """The next step that shows something of the memory of a batch.

        The first step of a batch is measured even if it tries nothing: all others are compared with it. Compiled blocks
        are not recomputed as a whole.
        """
        measurements = self.measurements
        runs_in_forward = self.least == COMPILED
        if measurements.lacks_forwards(batch):
            attempts = {} if runs_in_forward else measurements.forwards_to_try(batch)
            return self.maker.keeping_least(batch, Phase.MEASURE, attempts=attempts)
        if runs_in_forward:
            actions = measurements.actions_to_run(batch, self.maker.limit_of_attempts(batch))
            return self.maker.keeping_least(batch, Phase.MEASURE, actions) if actions else None
        if not measurements.lacks_backwards(batch):
            return None
        room = self.maker.limit_of_attempts(batch) - self.maker.peak_of_least(batch)
        attempts = measurements.backwards_to_try(batch, measurements.costs(batch).peak({}) + room)
        return self.maker.keeping_least(batch, Phase.MEASURE, attempts=attempts) if attempts else None

    def _to_time(self, batch: Batch) -> StepPlan | None:
        """The next step whose times are read, of a batch whose memory is known."""
        if self.measurements.timed >= TIMED_STEPS:
            return None
        actions = self.measurements.actions_to_time(batch, self.maker.limit_of_attempts(batch))
        return self.maker.keeping_least(batch, Phase.TIME, actions) if actions else None

    def _to_race(self, batch: Batch) -> StepPlan | None:
        """The next step under a plan that may be the fastest, of a batch whose memory and times are known."""
        self.entered = self.maker.enter(batch)
        entrant = self.race.next(self.entered.entrants)
        return None if entrant is None else StepPlan(Phase.RACE, batch, entrant.plan)

    def _plan_winner(self) -> BatchPlan:
        """Make the fastest of the plans that have raced the plan of its batch, and tell the user."""
        assert self.entered is not None
        batch = self.entered.batch
        winner = self.race.winner(self.entered.entrants)
        assert winner.plan.prediction is not None
        limit_bytes = self.budget.limit_bytes
        # The budget of a prediction is what `Prediction` compares its peak with: the limit, which may be lower.
        prediction = dataclasses.replace(winner.plan.prediction, step_seconds=winner.seconds, budget_bytes=limit_bytes)
        called = {name for name, _ in self.measurements.step_of(batch).names}
        plan = BatchPlan(
            batch,
            limit_bytes,
            dataclasses.replace(winner.plan, prediction=prediction),
            is_over=bool(self.entered.hints),
            is_checked=not self._needs_check(batch),
            idle=frozenset(self.measurements.blocks.keys() - called),
            without=self.maker.without(batch, winner),
        )
        self.plans[batch] = plan
        self._tell_of(plan, prediction, self.entered.hints)
        return plan

    def _tell_of(self, plan: BatchPlan, prediction: Prediction, hints: Sequence[str]) -> None:
        """Tell the user of the plan of a batch, and what would lower its peak if it does not fit."""
        text = "hf_ckpt: %s: planned for %s (`%s`): %s; %s, from %d measured steps"
        kinds = frozenset(action for _, action in plan.plan.actions)
        # With batches of many lengths, each has a plan, but most differ only in how many blocks have which action.
        say = log.debug if kinds == self._logged else tell
        say(text, self.name, plan.batch, self.spec.policy, plan.plan.summary(), prediction, self.measured_steps)
        self._logged = kinds
        if plan.is_over and not self._has_warned:
            self._has_warned = True
            log.warning(
                "hf_ckpt: no plan fits into %s (%s). Using the fastest plan near the lowest peak, %s. What "
                "would lower it: %s",
                format_bytes(plan.limit_bytes),
                plan.batch,
                format_bytes(prediction.peak_bytes),
                "; ".join(hints),
            )

    def _needs_check(self, batch: Batch) -> bool:
        """Whether to measure the first step under the plan of a batch: not if a plan was measured of one that differs
        only in its length, and so many lengths were measured that this one follows from them."""
        checked = [other for other, plan in self.plans.items() if plan.measured_bytes is not None]
        is_like_them = any(batch.length_of(other) is not None for other in checked)
        return not (is_like_them and self.measurements.follows(batch))

    def _covering(self, batch: Batch) -> BatchPlan | None:
        """The plan of the smallest batch that covers this one and is hardly larger; None without one."""
        near = [larger for larger in self.plans if larger.covers(batch) and larger.is_near(batch)]
        smallest = min(near, key=lambda larger: larger.elements, default=None)
        return None if smallest is None else self.plans[smallest]

    # --- what steps have shown ---

    def learn(self, step_plan: StepPlan, batch: Batch, step: Step, nanoseconds: int) -> None:
        """Store what a measured step has shown.

        Args:
            step_plan: what the step was for.
            batch: what it really was.
            step: its memory or times.
            nanoseconds: its time as a whole.
        """
        match step_plan.phase:
            case Phase.MEASURE:
                self._learn_bytes(step_plan, batch, step)
            case Phase.TIME:
                self.measurements.learn_times(batch, step, step_plan.actions)
            case Phase.RACE:
                self._learn_race(step_plan, batch, step, nanoseconds)
            case Phase.CHECK:
                self._check(step_plan, batch, step)

    def _learn_bytes(self, step_plan: StepPlan, batch: Batch, step: Step) -> None:
        """Store what actions keep and need. All steps but the first are compared with what was expected of them."""
        if step_plan.shows_forwards:
            self.measurements.learn_forwards(batch, step)
        elif batch != step_plan.batch:
            return
        elif step_plan.actions:
            self.measurements.learn_actions(batch, step, step_plan.actions)
        else:
            self.measurements.learn_backwards(batch, step)

    def _learn_race(self, step_plan: StepPlan, batch: Batch, step: Step, nanoseconds: int) -> None:
        """Store the time of a step under a plan that may be the fastest."""
        if batch != step_plan.batch or self.entered is None:
            return
        if self.measurements.skips:  # the predictions are for steps that skip nothing
            nanoseconds = nanoseconds * len(self.measurements.step_of(batch).calls) // len(step.calls)
        self.race.learn(step_plan.plan, self.entered.entrants, nanoseconds)

    def keep_all(self, batch: Batch) -> None:
        """Plan for a batch whose blocks save nothing: `keep` on all of them."""
        if not self.plans:
            text = "hf_ckpt: %s: no block saves anything for the backward of %s, so all have `%s`"
            tell(text, self.name, batch, self.measurements.actions[0])
        plan = self.maker.keeping_all()
        self.plans[batch] = BatchPlan(batch, self.budget.limit_bytes, plan, is_checked=True, measured_bytes=0)
        self.budget.watch.checked()

    def failed(self) -> None:
        """A step could not be measured."""
        self.failures += 1
        if self.failures == MOST_FAILURES:
            log.warning(
                "hf_ckpt: the steps of this run cannot be measured, so every block stays under `%s`. Give a "
                "policy that needs no measuring, such as `selective`.",
                self.least,
            )

    def forget_steps(self) -> None:
        """Forget what steps need, and the plans that were made from it."""
        self.measurements.forget_steps()
        self.plans.clear()

    # --- the budget ---

    def _check(self, step_plan: StepPlan, batch: Batch, step: Step) -> None:
        """Store the measured peak of a plan's first step, or compare that of a later one with the budget."""
        plan = step_plan.of_batch
        assert plan is not None
        # What was alive only in this step, such as the graph of one that failed before, does not count.
        start_bytes = self.measurements.step_of(plan.batch).start_bytes
        peak_bytes = start_bytes + step.peak_bytes - step.start_bytes
        is_of_plan = batch == plan.batch
        self.budget.watch.checked()
        if is_of_plan and plan.measured_bytes is None and batch in self.plans:
            self.plans[batch] = dataclasses.replace(plan, is_checked=True, measured_bytes=peak_bytes)
        if peak_bytes <= self.budget.bytes or plan.is_over:
            return
        if is_of_plan and not plan.is_checked:  # what it was made from was measured just before
            self._lower(plan.plan, peak_bytes)
        else:
            self.void(step_plan, batch, peak_bytes, step.start_bytes)

    def void(self, step_plan: StepPlan, batch: Batch, peak_bytes: int, start_bytes: int) -> None:
        """Measure again what a plan was made from, since a later step has exceeded the budget.

        Args:
            step_plan: what the step was for.
            batch: what it really was.
            peak_bytes: what the step needed.
            start_bytes: what was alive when it began, or after it.
        """
        if self.budget.watch.void():
            self._lower(step_plan.plan, peak_bytes)
            return
        more_bytes = start_bytes - self.measurements.step_of(step_plan.batch).start_bytes
        causes = [f"it was planned for {step_plan.batch}"] if batch != step_plan.batch else []
        if more_bytes > (peak_bytes - self.budget.bytes) / 2:
            causes.append(f"{format_bytes(more_bytes)} more are alive between steps, such as the optimizer's state")
        text = "hf_ckpt: %s: a step of %s needed %s, above the budget of %s; steps are measured again%s"
        sizes = format_bytes(peak_bytes), format_bytes(self.budget.bytes)
        tell(text, self.name, batch, *sizes, "".join(f". What differs: {cause}" for cause in causes))
        self.forget_steps()

    def _lower(self, plan: Plan, peak_bytes: int) -> None:
        """Plan for less, because a step needed more than was predicted, above the budget."""
        if plan.prediction is None:  # blocks save nothing, so that no plan needs less
            return
        self.budget.lower(plan.prediction, peak_bytes)
        self.plans.clear()

    def lower_limit(self, step_plan: StepPlan) -> str | None:
        """Memory has run out in a step: try less, or plan for less. Returns what is done, in words.

        None if the step ran under what keeps least, and tried nothing; or if its plan was above the limit already, as
        no plan fits.
        """
        if any(attempts.shown or attempts.last for attempts in step_plan.attempts.values()):
            return self.measurements.try_less(step_plan.shows_forwards)
        prediction = step_plan.plan.prediction
        if prediction is not None:  # an evaluation may have voided what it was made from
            peak_bytes = prediction.peak_bytes
        elif step_plan.actions:
            peak_bytes = self.measurements.costs(step_plan.batch).peak(step_plan.actions)
        else:
            return None
        if peak_bytes > self.budget.limit_bytes:
            return None
        self.budget.lower_after_failure(peak_bytes)
        self.plans.clear()
        return f"plans for at most {format_bytes(self.budget.limit_bytes)}"
