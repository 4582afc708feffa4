"""The policies `budget` and `auto` in a run: measure the first steps, then plan with the measurements.

A session sees every training batch before its forward. A batch size whose plan exists, or that a larger batch's plan
covers, runs under it. Otherwise the step is for the first of these phases that is still to be done, see `phases`:

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

What happens in a step, see `Session.on_batch`: a forward that belongs to the step before only gets room. Any other one
begins a step. Then the session stores what the step before has shown (`_finish`), looks for changes of the model, and
takes the first phase in which something is left to do (`_next`). It enables the plan of that phase, and begins to
measure.

If the peak of a checked step exceeds the budget, the limit of all later plans is lower by what it needed more than was
predicted. `full` keeps least, or `full+tiles` where the spec has `mlp`: see `planner.policies.least`; in segments, if
the spec has them. What `full` itself needs follows from such a step, see `measure.levels.as_held`. With compiled blocks
it is share 0, single blocks try other shares in their forward, and a step that compiles a graph is not used. A
step that is not what was expected (an exception, another forward, gradients that were not cleared) is not used either,
and the next one is in the same phase again. After `MOST_FAILURES` such steps in a row, nothing more is measured. A
forward without a backward is no step.

Later steps are watched: see `budget`. The first one above the budget voids all plans, and steps are measured again. If
that does not help, the limit is lower, too.

No batch ends a run: if no plan fits, the session uses the one with the lowest peak, and warns once.

What a step needs also depends on which parameters are trained, their bytes, autocast's type, the modes of modules and
their attention. In another state of the model, steps are measured again; also once an optimizer has added to its state,
or a step calls blocks that none called before.

Each rank has its own session, because actions do not change the collective operations; for ZeRO-3, see `ranks`. Other
sessions tell each other nothing: ranks may run other numbers of forwards, and one that asked in a forward could wait
for ever. They also race by themselves: waiting for a slower rank takes the same time under every plan.

Who does what: `phases` decides what a step is for and which plan is the fastest, `plans` makes plans, a `Recorder`
measures one step, `measurements` has what is known of blocks, `batches` and `states` have what a step and its plan
depend on, and `budget` the limit of plans.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.boundaries import GraphsReference, watch_graphs
from hf_ckpt.attach.enable import exchange
from hf_ckpt.attach.record import Installation
from hf_ckpt.costs.steps import Step
from hf_ckpt.engines.region import Region
from hf_ckpt.errors import HfCkptError
from hf_ckpt.logs import tell
from hf_ckpt.measure.levels import saves_nothing
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.spec.actions import COMPILED, Action
from hf_ckpt.spec.description import Description
from hf_ckpt.spec.plan import Prediction
from hf_ckpt.training.batches import Batch, StepForwards
from hf_ckpt.training.budget import Budget
from hf_ckpt.training.measurements import TIMED_STEPS, Measurements
from hf_ckpt.training.phases import MEASURED, MOST_FAILURES, TIMED, Entered, Phase, Race, phases_for
from hf_ckpt.training.plans import PlanMaker, Planned, actions_to_choose
from hf_ckpt.training.recorder import Recorder, counted_levels, refuse_compiled, timed_levels
from hf_ckpt.training.states import ModelState, OptimizerStates
from hf_ckpt.units import format_bytes

log = logging.getLogger(__name__)

GAVE_UP = f"gave up after {MOST_FAILURES} steps in a row that could not be measured"


class Session:
    """The measurements and plans of one model in one run.

    Args:
        base: the model, plain.
        record: the record of hf_ckpt on it.

    Raises `InfeasibleError` if the model itself needs more than the budget.
    """

    def __init__(self, base: nn.Module, record: Installation) -> None:
        blocks = find_blocks(base)
        self._base = weakref.ref(base)
        self._spec = record.spec
        self._name = blocks.class_name
        self._devices = compat.distributed.devices_of_model(base)
        self._budget = Budget(record.spec, base, self._devices)
        actions = actions_to_choose(self._spec)
        self._least = actions[-1]
        """The action that keeps least."""
        if self._least == COMPILED:
            refuse_compiled(base, self._devices, self._spec.policy)
        # Blocks of stacks for which a rule says what they get, and that.
        fixed = {block.name: action for block, action in record.plan.actions if self._spec.is_fixed(block.stack)}
        skips = compat.transformers.skips_blocks(base)
        self._measurements = Measurements(blocks, actions, {**fixed, **record.avoided}, skips)
        self._state = ModelState(base, self._devices)
        parameters_stay = self._state.parameters_stay
        self._maker = PlanMaker(blocks, record, self._devices, self._measurements, self._budget, parameters_stay)
        self._race = Race()
        self._optimizers = OptimizerStates()
        self._forwards = StepForwards()

        self.plans: dict[Batch, Planned] = {}
        """The plans of the run, by their batch."""
        self.entered: Entered | None = None
        """The plans that race, or that have raced."""
        self.planned: Planned | None = None
        """What is planned for the last batch; None before the first."""
        self.recorder: Recorder | None = None
        """What measures the current step; None if it is not measured."""
        self.measured_steps = 0
        self._warm_steps = 0
        """Steps of the warm-up so far."""
        self._failures = 0
        """Steps in a row that could not be measured."""
        self._thread = 0
        """The thread whose training forward runs; 0 without one."""
        self._idle: dict[Region, int] = {}
        """The functions of blocks that no step called so far, which a deeper one may call, and their forwards."""
        self._graphs: GraphsReference | None = None
        """Refers to the graphs of the forwards of a step that is not measured: see `watch_graphs`."""
        self._other_forwards = 0
        """`Installation.other_forwards` when the last measured step ended."""
        self._told: frozenset[Action] = frozenset()
        """The actions of the last plan that the user was told of."""
        self._has_warned = False
        """Whether the user was told that no plan fits."""

    # --- what others call ---

    def on_batch(
        self, record: Installation, running: nn.Module, stack: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Choose and enable the plan for a training forward of `running` that is about to begin."""
        base = self._base()
        assert base is not None
        self._refuse_threads(running)
        self._optimizers.watch(base)
        if self.recorder is not None and self.recorder.was_left:
            self.after_forward(None)
        forward = self._forwards.read(base if stack is None else running, stack, args, kwargs)
        if self._goes_on():
            self._forwards.current.append(forward)
            if self.recorder is not None:
                self.recorder.begin_forward()
            self._make_room(base, record)
            return
        # The last step belongs to the model as it was. What changes now may then make the session forget it.
        start_bytes = self._finish(record)
        if self._budget.watch.is_open:
            self._judge()
        self._look_for_changes(base)
        state = self._state.present
        has_gradients = self._state.has_gradients()
        # A guess for a step of several forwards: only the first is known now, and it must run under some plan.
        batch = Batch(self._forwards.begin(forward, has_gradients, state), has_gradients, state)
        self._optimizers.has_stepped = False
        self._graphs = None
        if start_bytes is not None:
            self._measurements.learn_start(batch, start_bytes)
        planned = self._next(batch)
        self._enable(planned, base, record)
        if planned.phase is Phase.PLAN and not planned.over:
            self._budget.watch.begin()
            return
        self._budget.watch.close()
        if planned.phase in MEASURED:
            self._begin(record, base, running, planned, args, kwargs)

    def after_forward(self, output: Any) -> None:
        """A training forward has ended with an output, or has raised an error, without one."""
        self._thread = 0
        if output is None:
            # No backward will end this step, and a count of live tensors would slow down what the user runs next.
            self._forwards.current.clear()
            self._budget.watch.notice()
            if self.recorder is not None:
                self._drop()
                self._failed()
        elif self.recorder is not None:
            self.recorder.boundaries.finish(output)
        else:
            self._graphs = watch_graphs(output, self._graphs)

    def before_others(self) -> None:
        """A forward outside of training begins. Unless it is a part of the step, as that of a reference model, its peak
        is not one of the step."""
        if self.recorder is not None and self.recorder.has_ended:
            self.recorder.levels.stop()  # an optimizer's step starts it again
        if self._budget.watch.is_open and not self._goes_on():
            self._judge()
            self._budget.watch.close()

    def stop(self, record: Installation) -> None:
        """Stop measuring. If the last step has ended, store its measurements first."""
        if self.recorder is not None and self.recorder.has_ended:
            self._finish(record)
        self._drop()
        self.before_others()
        self._budget.watch.notice()

    def close(self) -> None:
        """End what outlives a pause of the plan: an optimizer may step in it."""
        self._optimizers.stop()

    def lower_limit(self) -> str | None:
        """Memory has run out in this step: try less, or plan for less, from now on. Returns what is done, in words.

        None before the first step; if the step ran under what keeps least, and tried nothing; or if its plan was above
        the limit already, as no plan fits.
        """
        planned = self.planned
        if planned is None:
            return None
        if any(tried.shown or tried.last for tried in planned.attempts.values()):
            self._end_failed()
            return self._measurements.try_less(planned.shows_forwards)
        prediction = planned.plan.prediction
        if prediction is None and not planned.actions:
            return None
        if prediction is not None:  # an evaluation may have voided what it was made from
            peak_bytes = prediction.peak_bytes
        else:
            peak_bytes = self._measurements.costs(planned.batch).peak(planned.actions)
        if peak_bytes > self._budget.limit_bytes:
            return None
        self._end_failed()
        self._budget.lower_after_failure(peak_bytes)
        self.plans.clear()
        return f"plans for at most {format_bytes(self._budget.limit_bytes)}"

    def _end_failed(self) -> None:
        """Forget a step in which memory has run out."""
        self._drop()
        self._forwards.current.clear()  # the retry is another step
        self._budget.watch.close()  # so the peak of this one, which is above the budget, voids no plan as well

    @property
    def base(self) -> nn.Module | None:
        """The model, plain; None if it does not exist any more."""
        return self._base()

    @property
    def measuring(self) -> str | None:
        """Why the current plan is not the plan of the run yet, in words; None if it is, and after giving up."""
        if self.planned is None:
            return "measuring"
        is_measuring = self.planned.is_provisional and not self.gave_up
        return f"measuring ({self.planned.phase.value})" if is_measuring else None

    @property
    def measured_bytes(self) -> int | None:
        """The measured peak of the current plan's first step; None if it was not measured."""
        return None if self.planned is None else self.planned.measured_bytes

    @property
    def gave_up(self) -> bool:
        """Whether steps cannot be measured, so that nothing more is tried."""
        return self.planned is not None and self.planned.phase is Phase.GIVEN_UP

    def room_bytes(self) -> int:
        """Return the bytes of the budget that the plan of a batch leaves to a check."""
        planned = self.planned
        assert planned is not None
        prediction = planned.plan.prediction  # None if blocks save nothing, so that there is nothing to check
        return planned.limit_bytes - max(planned.measured_bytes or 0, prediction.peak_bytes if prediction else 0)

    def described(self, description: Description) -> Description:
        """Return a description with the plans of the run, the smallest batch first, and the peak of the current one."""
        in_order = sorted(self.plans.values(), key=lambda planned: planned.batch.elements)
        plans = {str(planned.batch): planned.plan for planned in in_order}
        measuring = GAVE_UP if self.gave_up else description.measuring
        voided = self._budget.watch.voided
        described = dataclasses.replace(description, plans=plans, measuring=measuring, voided=voided)
        without = None if self.planned is None else self.planned.without
        return dataclasses.replace(described, measured_bytes=self.measured_bytes, without=without)

    # --- what a step is for: a method for each phase returns its plan, or None if nothing is left to do in it ---

    def _next(self, batch: Batch) -> Planned:
        """Return the plan for the step of a batch: that of the first phase in which something is left to do."""
        # A plan made for exactly this batch wins over that of a larger one, which recomputes more.
        served = self.plans.get(batch) or self._covering(batch)
        needs_warm_up = compat.distributed.has_process_group()  # DDP builds its gradient buckets in the first two steps
        phases = phases_for(
            is_warm=self._warm_steps >= 2 or not needs_warm_up,
            failures=self._failures,
            has_plan=served is not None,
            # A larger batch checks its plan with a step of its own, which needs more than this one.
            is_checked=served is not None
            and not self._budget.watch.is_due
            and (served.batch != batch or served.phase is Phase.PLAN or served.measured_bytes is not None),
        )
        for phase in phases:
            planned = self._to(phase, batch, served)
            if planned is not None:
                return planned
        raise AssertionError("a batch whose steps are known has a plan")

    def _to(self, phase: Phase, batch: Batch, served: Planned | None) -> Planned | None:
        """Return the plan of a step for this phase; None if nothing is left to do in it.

        `served` is the plan that was made for the batch, or for one that covers it.
        """
        match phase:
            case Phase.PLAN | Phase.CHECK if served is not None:
                return served if served.phase is phase else dataclasses.replace(served, phase=phase)
            case Phase.MEASURE:
                return self._to_measure(batch)
            case Phase.TIME:
                return self._to_time(batch)
            case Phase.RACE:
                return self._to_race(batch)
            case Phase.CHECK:
                return self._to_check()
            case Phase.WARM_UP:
                self._warm_steps += 1
        return self._maker.keeping_least(batch, phase)  # to warm up, or because it has given up

    def _to_measure(self, batch: Batch) -> Planned | None:
        """The next step that shows something of the memory of a batch.

        The first step of a batch is measured even if it tries nothing: all others are compared with it. Compiled blocks
        are not recomputed as a whole.
        """
        measurements = self._measurements
        runs_in_forward = self._least == COMPILED
        if measurements.lacks_forwards(batch):
            attempts = {} if runs_in_forward else measurements.forwards_to_try(batch)
            return self._maker.keeping_least(batch, Phase.MEASURE, attempts=attempts)
        if runs_in_forward:
            actions = measurements.actions_to_run(batch, self._maker.limit_of_attempts(batch))
            return self._maker.keeping_least(batch, Phase.MEASURE, actions) if actions else None
        if not measurements.lacks_backwards(batch):
            return None
        room = self._maker.limit_of_attempts(batch) - self._maker.peak_of_least(batch)
        attempts = measurements.backwards_to_try(batch, measurements.costs(batch).peak({}) + room)
        return self._maker.keeping_least(batch, Phase.MEASURE, attempts=attempts) if attempts else None

    def _to_time(self, batch: Batch) -> Planned | None:
        """The next step whose times are read, of a batch whose memory is known."""
        measurements = self._measurements
        if measurements.timed >= TIMED_STEPS:
            return None
        actions = measurements.actions_to_time(batch, self._maker.limit_of_attempts(batch))
        return self._maker.keeping_least(batch, Phase.TIME, actions) if actions else None

    def _to_race(self, batch: Batch) -> Planned | None:
        """The next step under a plan that may be the fastest, of a batch whose memory and times are known."""
        self.entered = self._maker.enter(batch)
        entrant = self._race.next(self.entered.entrants)
        if entrant is None:
            return None
        return Planned(batch, self._budget.limit_bytes, entrant.plan, phase=Phase.RACE)

    def _to_check(self) -> Planned:
        """The first step under the plan of a batch, which the race has shown."""
        assert self.entered is not None
        return self._plan_of_winner(self.entered)

    def _plan_of_winner(self, entered: Entered) -> Planned:
        """Make the winner of a race the plan of its batch, which is to be checked, and tell the user."""
        winner = self._race.winner(entered.entrants)
        assert winner.plan.prediction is not None
        limit_bytes = self._budget.limit_bytes
        # The budget of a prediction is what `Prediction` compares its peak with: the limit, which may be lower.
        prediction = dataclasses.replace(winner.plan.prediction, step_seconds=winner.seconds, budget_bytes=limit_bytes)
        plan = dataclasses.replace(winner.plan, prediction=prediction)
        phase = Phase.CHECK if self._needs_check(entered.batch) else Phase.PLAN
        called = {name for name, _ in self._measurements.bound(entered.batch).names}
        idle = frozenset(self._measurements.blocks.keys() - called)
        without = self._maker.without(entered.batch, winner)
        planned = Planned(entered.batch, limit_bytes, plan, bool(entered.hints), phase, idle=idle, without=without)
        self.plans[entered.batch] = planned
        self._tell_of(planned, prediction, entered.hints)
        return planned

    def _tell_of(self, planned: Planned, prediction: Prediction, hints: Sequence[str]) -> None:
        """Tell the user of the plan of a batch, and what would lower its peak if it does not fit."""
        text = "hf_ckpt: %s: planned for %s (`%s`): %s; %s, from %d measured steps"
        kinds = frozenset(action for _, action in planned.plan.actions)
        # With batches of many lengths, each has a plan, but most differ only in how many blocks have which action.
        say = log.debug if kinds == self._told else tell
        summary = planned.plan.summary()
        say(text, self._name, planned.batch, self._spec.policy, summary, prediction, self.measured_steps)
        self._told = kinds
        if planned.over and not self._has_warned:
            self._has_warned = True
            log.warning(
                "hf_ckpt: no plan fits into %s (%s). Using the fastest plan near the lowest peak, %s. What "
                "would lower it: %s",
                format_bytes(planned.limit_bytes),
                planned.batch,
                format_bytes(prediction.peak_bytes),
                "; ".join(hints),
            )

    def _needs_check(self, batch: Batch) -> bool:
        """Whether to measure the first step under the plan of a batch: not if a plan was measured of one that differs
        only in its length, and so many lengths were measured that this one follows from them."""
        checked = [other for other, planned in self.plans.items() if planned.measured_bytes is not None]
        is_like_them = any(batch.length_of(other) is not None for other in checked)
        return not (is_like_them and self._measurements.follows(batch))

    def _covering(self, batch: Batch) -> Planned | None:
        """The plan of the smallest batch that covers this one and is hardly larger; None without one."""
        near = [larger for larger in self.plans if larger.covers(batch) and larger.is_near(batch)]
        smallest = min(near, key=lambda larger: larger.elements, default=None)
        return None if smallest is None else self.plans[smallest]

    # --- a step ---

    def _goes_on(self) -> bool:
        """Whether a forward that begins now belongs to the current step: the graph of an earlier one exists, and had no
        backward. A loss that is computed from something else than the output has one that is not seen."""
        if not self._forwards.current:
            return False
        if self.recorder is not None:
            return self.recorder.goes_on
        waits = None if self._graphs is None else self._graphs()
        return bool(waits) and not (self._optimizers.has_stepped or self._state.have_new_gradients())

    def _look_for_changes(self, base: nn.Module) -> None:
        """Forget what does not hold any more, because the model or its optimizers have changed."""
        run_more = bool(self._idle) and any(region.forwards > before for region, before in self._idle.items())
        if self._optimizers.have_grown(base, self._devices) or run_more:
            self._measurements.forget_steps()
            self.plans.clear()
        if self._state.has_changed():
            log.info("hf_ckpt: the model has changed; measuring its steps again.")

    def _make_room(self, base: nn.Module, record: Installation) -> None:
        """Enable the plan that keeps least if another forward of the step has no room under the current plan."""
        planned = self.planned
        if planned is None or planned.batch.has_room_for(self._forwards.current):
            return  # this is what the plan was made for
        if planned.is_provisional and planned.phase is not Phase.RACE and not planned.actions:
            return  # all blocks keep least already
        # The step has another plan in its first forwards than in this one, so its measurements mean nothing.
        self._drop()
        if len(self._forwards.current) > len(planned.batch.forwards):
            self._forwards.learn()
        self.planned = self._maker.keeping_least(planned.batch, Phase.PAUSED)
        exchange(base, record, self.planned.plan)

    def _enable(self, planned: Planned, base: nn.Module, record: Installation) -> None:
        """Give the blocks of the model the functions of a plan."""
        for name, attempts in planned.attempts.items():
            record.functions.make_for_trials(name, attempts)
        self.planned = planned
        exchange(base, record, planned.plan)
        self._idle.clear()
        for name in planned.idle & record.regions.keys():
            self._idle[record.regions[name]] = record.regions[name].forwards

    def _refuse_threads(self, running: nn.Module) -> None:
        """Raise `HfCkptError` if another thread is in a training forward of the model."""
        thread = threading.get_ident()
        if self._thread not in (0, thread) and compat.frames.runs_in(self._thread, running):
            raise HfCkptError(
                f"{type(running).__name__} runs a training forward in another thread, too, and `{self._spec.policy}` "
                "plans for one step at a time. Give `full` or `selective`, or let the threads take turns."
            )
        self._thread = thread

    def _begin(
        self, record: Installation, base: nn.Module, running: nn.Module, planned: Planned, args: Any, kwargs: Any
    ) -> None:
        """Start to measure the step that begins now. `running` is the model whose forward begins, with its wrappers."""
        if any(map(compat.compiler.is_compiled, running.modules())):
            refuse_compiled(base, self._devices, self._spec.policy)
        tries = planned.phase in (Phase.MEASURE, Phase.TIME)
        in_segments = tries and any(action.made for _, action in planned.plan.actions)
        if not self.measured_steps:
            where = ", in segments" if in_segments else ""
            tell("hf_ckpt: %s: measuring the first steps, under `%s`%s", self._name, self._least, where)
        # A hook inside of a graph of torch.compile would break the graph.
        modules = compat.compiler.outside_graphs(running, self._measurements.modules)
        if planned.phase is Phase.RACE and not self._measurements.skips:
            # Only the begin and the end of the step count, so that one block is enough to see its backward. That of the
            # last block that has one comes first.
            last = self._measurements.blocks_with_backward(self._measurements.bound(planned.batch))[-1]
            modules = {name: module for name, module in modules.items() if name == last}
        if planned.phase in TIMED:
            levels = timed_levels(self._devices)
        else:
            levels = counted_levels(self._devices, base, args, kwargs)
        self.recorder = Recorder(record, base, modules, levels)
        self.recorder.let_try(planned.attempts, in_segments)
        self.measured_steps += 1

    def _drop(self) -> None:
        """Stop measuring the current step."""
        if self.recorder is not None:
            self.recorder.stop()
            self.recorder = None

    def _failed(self) -> None:
        """A step could not be measured."""
        self._failures += 1
        if self._failures == MOST_FAILURES:
            log.warning(
                "hf_ckpt: the steps of this run cannot be measured, so every block stays under `%s`. Give a "
                "policy that needs no measuring, such as `selective`.",
                self._least,
            )

    def _finish(self, record: Installation) -> int | None:
        """Store the measurements of the last step, if it was measured and has ended.

        Returns the bytes that are alive now; None if they were not read.
        """
        recorder = self.recorder
        if recorder is None:
            return None
        self._drop()
        reader = recorder.levels.reader
        # The reader was last read when the backward ended, so its peak is that of the time since.
        alive_bytes, outside_peak_bytes = (None, 0) if reader is None else reader.read()
        if record.other_forwards != self._other_forwards:  # it may be that of an evaluation
            outside_peak_bytes = 0
        self._other_forwards = record.other_forwards
        if not recorder.is_stored:
            return alive_bytes if self._store(recorder, outside_peak_bytes) else None
        if alive_bytes is not None:
            assert self.planned is not None
            self._measurements.learn_start(self.planned.batch, alive_bytes, outside_peak_bytes)
        return None

    def _store(self, recorder: Recorder, outside_peak_bytes: int) -> bool:
        """Store what a step has shown. Returns whether it was measured."""
        recorder.is_stored = True
        step = recorder.step(outside_peak_bytes)
        if step is None:
            if saves_nothing(recorder.levels.levels()):
                self._keep_all()
            elif recorder.had_backward or self._optimizers.has_stepped:  # else it was no step, but a forward
                self._failed()
                self._judge_unusable(recorder)
            return False
        self._failures = 0
        # A head whose weight FSDP frees between calls cannot run in chunks.
        can_chunk = self._spec.head == "whole" and self._state.parameters_stay
        self._maker.chunks_help = can_chunk and recorder.boundaries.chunks_help
        assert self.planned is not None
        self._forwards.learn()
        self._learn(self.planned, recorder, step)
        return True

    def _keep_all(self) -> None:
        """Plan for a batch whose blocks save nothing: `keep` on all of them, which has nothing to predict."""
        assert self.planned is not None
        plan = self._maker.keeping_all()
        planned = dataclasses.replace(self.planned, plan=plan, phase=Phase.PLAN, attempts={}, measured_bytes=0)
        if not self.plans:
            text = "hf_ckpt: %s: no block saves anything for the backward of %s, so all have `%s`"
            tell(text, self._name, planned.batch, self._measurements.actions[0])
        self.plans[planned.batch] = planned
        self._budget.watch.checked()

    def _learn(self, planned: Planned, recorder: Recorder, step: Step) -> None:
        """Store what a measured step has shown."""
        batch = dataclasses.replace(planned.batch, forwards=tuple(self._forwards.current))
        match planned.phase:
            case Phase.MEASURE:
                self._learn_bytes(planned, batch, step)
            case Phase.TIME:
                self._measurements.learn_times(batch, step, planned.actions)
            case Phase.RACE:
                self._learn_race(planned, batch, step, recorder.levels.nanoseconds())
            case Phase.CHECK:
                self._check(planned, batch, step)

    def _learn_bytes(self, planned: Planned, batch: Batch, step: Step) -> None:
        """Store what actions keep and need. All steps but the first are compared with what was expected of them."""
        if planned.shows_forwards:
            self._measurements.learn_forwards(batch, step)
        elif batch != planned.batch:
            return
        elif planned.actions:
            self._measurements.learn_actions(batch, step, planned.actions)
        else:
            self._measurements.learn_backwards(batch, step)

    def _learn_race(self, planned: Planned, batch: Batch, step: Step, nanoseconds: int) -> None:
        """Store the time of a step under a plan that may be the fastest."""
        if batch != planned.batch or self.entered is None:
            return
        if self._measurements.skips:  # the predictions are for steps that skip nothing
            nanoseconds = nanoseconds * len(self._measurements.bound(batch).calls) // len(step.calls)
        self._race.learn(planned.plan, self.entered.entrants, nanoseconds)

    # --- the budget ---

    def _check(self, planned: Planned, batch: Batch, step: Step) -> None:
        """Store the measured peak of a plan's first step, or compare that of a later one with the budget."""
        # What was alive only in this step, such as the graph of one that failed before, does not count.
        start_bytes = self._measurements.bound(planned.batch).start_bytes
        peak_bytes = start_bytes + step.peak_bytes - step.start_bytes
        is_first = planned.measured_bytes is None
        self._budget.watch.checked()
        if is_first and batch != planned.batch:
            return  # a step that needs less says nothing
        if is_first and batch in self.plans:
            self.plans[batch] = dataclasses.replace(planned, phase=Phase.PLAN, measured_bytes=peak_bytes)
        if peak_bytes <= self._budget.bytes or planned.over:
            return
        if is_first:
            self._lower(planned, peak_bytes)
        else:
            self._void(planned, peak_bytes, step.start_bytes)

    def _judge(self) -> None:
        """Compare the peak of the step under a plan that has ended with the budget."""
        alive_bytes, peak_bytes = self._budget.watch.read()
        assert self.planned is not None
        served = self.plans.get(self.planned.batch)
        if served is None or served.plan.prediction is None:  # blocks save nothing, so that no plan needs less
            return
        if peak_bytes > self._budget.bytes:
            self._void(self.planned, peak_bytes, alive_bytes)

    def _judge_unusable(self, recorder: Recorder) -> None:
        """Compare the peak of a check step that shows nothing else, such as one of two backwards, with the budget."""
        planned = self.planned
        assert planned is not None
        peak_bytes = recorder.peak_bytes
        if planned.phase is Phase.CHECK and not planned.over and peak_bytes > self._budget.bytes:
            self._void(planned, peak_bytes, recorder.levels.levels()[0].bytes)

    def _void(self, planned: Planned, peak_bytes: int, start_bytes: int) -> None:
        """Measure again what a plan was made from, since a later step has exceeded the budget.

        Args:
            planned: the plan.
            peak_bytes: what the step needed.
            start_bytes: what was alive when it began, or after it.
        """
        if self._budget.watch.void():
            self._lower(planned, peak_bytes)
            return
        forwards = tuple(self._forwards.current) or planned.batch.forwards  # none after a forward that failed
        batch = dataclasses.replace(planned.batch, forwards=forwards)
        more_bytes = start_bytes - self._measurements.bound(planned.batch).start_bytes
        causes = [f"it was planned for {planned.batch}"] if batch != planned.batch else []
        if more_bytes > (peak_bytes - self._budget.bytes) / 2:
            causes.append(f"{format_bytes(more_bytes)} more are alive between steps, such as the optimizer's state")
        text = "hf_ckpt: %s: a step of %s needed %s, above the budget of %s; steps are measured again%s"
        sizes = format_bytes(peak_bytes), format_bytes(self._budget.bytes)
        tell(text, self._name, batch, *sizes, "".join(f". What differs: {cause}" for cause in causes))
        self._measurements.forget_steps()
        self.plans.clear()

    def _lower(self, planned: Planned, peak_bytes: int) -> None:
        """Plan for less, because a step needed more than was predicted, above the budget."""
        prediction = planned.plan.prediction
        if prediction is None:  # blocks save nothing, so that no plan needs less
            return
        self._budget.lower(prediction, peak_bytes)
        self.plans.clear()
