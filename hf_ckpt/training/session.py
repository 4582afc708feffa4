"""The policies `budget` and `auto` in a run: measure the first steps, then plan with the measurements.

A session sees every training batch before its forward. A forward that belongs to the step before only gets room, see
`Session.on_batch`. Any other one begins a step. Then the session stores what the step before has shown, looks for
changes of the model, asks its `Planning` what the new step is for, enables the plan of that, and begins to measure.

A step that is not what was expected (an exception, another forward, gradients that were not cleared) is not used, and
the next one is in the same phase again. After `MOST_FAILURES` such steps in a row, nothing more is measured until the
model changes. A forward without a backward is no step, and neither is one that an error of the user's code has ended.

What a step needs also depends on which parameters are trained, their bytes, autocast's type, the modes of modules and
their attention. In another state of the model, steps are measured again; also once an optimizer has added to its state,
or a step calls blocks that none called before.

Each rank has its own session, because actions do not change the collective operations; for ZeRO-3, see `ranks`. Other
sessions tell each other nothing: ranks may run other numbers of forwards, and one that asked in a forward could wait
for ever. They also race by themselves: waiting for a slower rank takes the same time under every plan.

Who does what: a `Planning` decides what a step is for, with `phases`, `plans`, `measurements` and `budget`; a
`Recorder` measures one step; `batches` and `states` have what a step and its plan depend on.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from typing import Any, NamedTuple

import torch
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
from hf_ckpt.spec.description import Description
from hf_ckpt.training.batches import Batch, StepForwards
from hf_ckpt.training.phases import MOST_FAILURES, TIMED, Phase
from hf_ckpt.training.planning import Planning
from hf_ckpt.training.plans import BatchPlan, StepPlan
from hf_ckpt.training.recorder import Recorder, counted_levels, refuse_compiled, timed_levels
from hf_ckpt.training.states import OptimizerStates

log = logging.getLogger(__name__)

GAVE_UP = f"gave up after {MOST_FAILURES} steps in a row that could not be measured"


class Between(NamedTuple):
    """Memory between two steps."""

    bytes: int
    """Alive when the next step begins."""
    peak_bytes: int
    """The most that were alive since the backward ended; 0 if that may have been in an evaluation, or is stored."""


class Session:
    """Measures the steps of one model in one run, and enables the plan that each of them runs under.

    Args:
        base: the model, plain.
        record: the record of hf_ckpt on it.
        planning: decides what each step is for.
    """

    def __init__(self, base: nn.Module, record: Installation, planning: Planning) -> None:
        self._base = weakref.ref(base)
        self.planning = planning
        self._budget_watch = planning.budget.watch
        self._state = planning.state
        self._optimizers = OptimizerStates()
        handle = compat.optimizers.call_before(self._before_optimizer)
        # The model's end must end it, too: a hook of the process would live on, once for each model.
        self._end_of_steps = weakref.finalize(base, handle.remove)
        self._forwards = StepForwards()

        self.planned: StepPlan | None = None
        """What the last step is for; None before the first."""
        self.recorder: Recorder | None = None
        """What measures the current step; None if it is not measured."""
        self._thread = 0
        """The thread whose training forward runs; 0 without one."""
        self._idle: dict[Region, int] = {}
        """The functions of blocks that no step called so far, which a deeper one may call, and their forwards."""
        self._graphs: GraphsReference | None = None
        """Refers to the graphs of the forwards of a step that is not measured: see `watch_graphs`."""
        self._other_forwards = 0
        """`Installation.other_forwards` when the last measured step ended."""

    # --- what others call ---

    def on_batch(
        self, record: Installation, running: nn.Module, stack: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Choose and enable the plan for a training forward of `running` that is about to begin."""
        base = self._base()
        assert base is not None
        self._refuse_threads(running)
        self._drop_interrupted()
        forward = self._forwards.read(base if stack is None else running, stack, args, kwargs)
        if self._goes_on():
            self._forwards.current.append(forward)
            if self.recorder is not None:
                self.recorder.begin_forward()
            self._make_room(base, record)
            return
        # The last step belongs to the model as it was. What changes now may then make the session forget it.
        between = self._finish(record)
        if self._budget_watch.is_open:
            self._judge()
        self._look_for_changes(base)
        state = self._state.present
        has_gradients = self._state.has_gradients()
        # A guess for a step of several forwards: only the first is known now, and it must run under some plan.
        batch = Batch(self._forwards.begin(forward, has_gradients, state), has_gradients, state)
        self._optimizers.has_stepped = False
        self._graphs = None
        if between is not None:
            self.planning.measurements.learn_start(batch, between.bytes, between.peak_bytes)
        planned = self.planning.next(batch)
        self._enable(planned, base, record)
        if planned.phase is Phase.PLAN and not planned.is_over:
            self._budget_watch.begin()
            return
        self._budget_watch.close()
        if planned.phase in self.planning.measured_phases:
            self._begin(record, base, running, planned, args, kwargs)

    def after_forward(self, output: Any) -> None:
        """A training forward has ended with an output, or has raised an error, without one."""
        self._thread = 0
        if output is None:
            # No backward will end this step, and a count of live tensors would slow down what the user runs next.
            self._forwards.current.clear()
            self._budget_watch.notice()
            if self.recorder is not None:
                self._drop()
                self._count_error(compat.torch.error_of_forward())
        elif self.recorder is not None:
            self.recorder.boundaries.finish(output)
        else:
            self._graphs = watch_graphs(output, self._graphs)

    def _drop_interrupted(self) -> None:
        """Drop the step whose forward a KeyboardInterrupt has ended: no hook was called then."""
        if self.recorder is not None and self.recorder.was_left:
            self.after_forward(None)

    def _count_error(self, error: BaseException | None) -> None:
        """Count a measured forward that an error has ended, unless the user's code has raised it by itself.

        A recomputation of a user's own checkpoint runs within a backward, and torch ends it by an error.
        """
        is_of_user = error is not None and not compat.devices.is_out_of_memory(error)
        if not is_of_user or compat.autograd.running_node() is not None:
            self.planning.failed()

    def before_others(self) -> None:
        """A forward outside of training begins. Unless it is a part of the step, as that of a reference model, its peak
        is not one of the step."""
        self._drop_interrupted()  # before the end of this forward is taken for that of the step's
        if self.recorder is not None and self.recorder.has_ended:
            self.recorder.levels.stop()  # an optimizer's step starts it again
        if self._budget_watch.is_open and not self._goes_on():
            self._judge()
            self._budget_watch.close()

    def stop(self, record: Installation) -> None:
        """Stop measuring. If the last step has ended, store its measurements first."""
        if self.recorder is not None and self.recorder.has_ended:
            self._finish(record)
        elif self.recorder is not None and self.recorder.goes_on:  # its backward may come after the pause
            self.planning.failed()
        self._drop()
        self.before_others()
        self._budget_watch.notice()

    def close(self) -> None:
        """End what outlives a pause of the plan: an optimizer may step in it."""
        self._end_of_steps()

    def lower_limit(self) -> str | None:
        """Memory has run out in this step: try less, or plan for less, from now on. Returns what is done, in words.

        None before the first step, and if nothing needs less.
        """
        change = None if self.planned is None else self.planning.lower_limit(self.planned)
        if change is not None:
            self._drop()
            self._forwards.current.clear()  # the retry is another step
            self._budget_watch.close()  # so the peak of this one, which is above the budget, voids no plan as well
        return change

    @property
    def measuring(self) -> str | None:
        """Why the current plan is not the plan of the run yet, in words; None if it is, and after giving up."""
        if self.planned is None:
            return "measuring"
        is_measuring = self.planned.is_provisional and not self.gave_up
        return f"measuring ({self.planned.phase.value})" if is_measuring else None

    @property
    def _plan(self) -> BatchPlan | None:
        """The plan that the last step ran under; None if it was for something else."""
        return None if self.planned is None else self.planned.of_batch

    @property
    def measured_bytes(self) -> int | None:
        """The measured peak of the current plan's first step; None if it was not measured."""
        return None if self._plan is None else self._plan.measured_bytes

    @property
    def gave_up(self) -> bool:
        """Whether steps cannot be measured, so that nothing more is tried."""
        return self.planned is not None and self.planned.phase is Phase.GIVEN_UP

    def room_bytes(self) -> int:
        """Return the bytes of the budget that the plan of a batch leaves to a check."""
        plan = self._plan
        assert plan is not None
        prediction = plan.plan.prediction  # None if blocks save nothing, so that there is nothing to check
        return plan.limit_bytes - max(plan.measured_bytes or 0, prediction.peak_bytes if prediction else 0)

    def described(self, description: Description) -> Description:
        """Return a description with the plans of the run, the smallest batch first, and the peak of the current one."""
        in_order = sorted(self.planning.plans.values(), key=lambda plan: plan.batch.elements)
        return dataclasses.replace(
            description,
            plans={str(plan.batch): plan.plan for plan in in_order},
            measuring=GAVE_UP if self.gave_up else description.measuring,
            voided=self._budget_watch.voided,
            measured_bytes=self.measured_bytes,
            without=None if self._plan is None else self._plan.without,
        )

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
        if self._optimizers.have_grown(base, self.planning.devices) or run_more:
            self.planning.forget_steps()
        if self._state.has_changed():
            self.planning.failures = 0  # its steps may be others
            log.info("hf_ckpt: the model has changed; measuring its steps again.")

    def _make_room(self, base: nn.Module, record: Installation) -> None:
        """Enable the plan that keeps least if another forward of the step has no room under the current plan."""
        planned = self.planned
        if planned is None or planned.keeps_least or planned.batch.has_room_for(self._forwards.current):
            return
        if len(self._forwards.current) > len(planned.batch.forwards):
            self._forwards.learn()
        if not self.planning.switches_within_steps:
            return
        # The step has another plan in its first forwards than in this one, so its measurements mean nothing.
        self._drop()
        self.planned = self.planning.maker.keeping_least(planned.batch, Phase.PAUSED)
        exchange(base, record, self.planned.plan)

    def _enable(self, planned: StepPlan, base: nn.Module, record: Installation) -> None:
        """Give the blocks of the model the functions of a plan."""
        for name, attempts in planned.attempts.items():
            record.functions.make_for_trials(name, attempts)
        self.planned = planned
        exchange(base, record, planned.plan)
        self._idle.clear()
        idle = frozenset() if planned.of_batch is None else planned.of_batch.idle
        for name in idle & record.regions.keys():
            self._idle[record.regions[name]] = record.regions[name].forwards

    def _refuse_threads(self, running: nn.Module) -> None:
        """Raise `HfCkptError` if another thread is in a training forward of the model."""
        thread = threading.get_ident()
        if self._thread not in (0, thread) and compat.frames.is_calling(self._thread, running):
            raise HfCkptError(
                f"{type(running).__name__} runs a training forward in another thread, too, and "
                f"`{self.planning.spec.policy}` plans for one step at a time. Give `full` or `selective`, or let the "
                "threads take turns."
            )
        self._thread = thread

    def _begin(
        self, record: Installation, base: nn.Module, running: nn.Module, planned: StepPlan, args: Any, kwargs: Any
    ) -> None:
        """Start to measure the step that begins now. `running` is the model whose forward begins, with its wrappers."""
        planning = self.planning
        if any(map(compat.compiler.is_compiled, running.modules())):
            refuse_compiled(base, planning.devices, planning.spec.policy)
        tries = planned.phase in (Phase.MEASURE, Phase.TIME)
        in_segments = tries and any(action.made for _, action in planned.plan.actions)
        if not planning.measured_steps:
            where = ", in segments" if in_segments else ""
            tell("hf_ckpt: %s: measuring the first steps, under `%s`%s", planning.name, planning.least, where)
        # A hook inside of a graph of torch.compile would break the graph.
        modules = compat.compiler.outside_graphs(running, planning.measurements.modules)
        if planned.phase is Phase.RACE and not planning.measurements.skips:
            # Only the begin and the end of the step count, so that one block is enough to see its backward. That of the
            # last block that has one comes first.
            last = planning.measurements.blocks_with_backward(planning.measurements.step_of(planned.batch))[-1]
            modules = {name: module for name, module in modules.items() if name == last}
        if planned.phase in TIMED:
            levels = timed_levels(planning.devices)
        else:
            levels = counted_levels(planning.devices, base, args, kwargs)
        self.recorder = Recorder(record, base, modules, levels)
        self.recorder.let_try(planned.attempts, in_segments)
        planning.measured_steps += 1

    def _drop(self) -> None:
        """Stop measuring the current step."""
        if self.recorder is not None:
            self.recorder.stop()
            self.recorder = None

    def _finish(self, record: Installation) -> Between | None:
        """Store what the last step has shown, if it was measured.

        Returns the memory since its end; None if that was not read, or was not like that of other steps.
        """
        recorder = self.recorder
        if recorder is None:
            return None
        self._drop()
        reader = recorder.levels.reader
        # The reader was last read when the backward ended, so its peak is that of the time since.
        between = None if reader is None else Between(*reader.read())
        if between is not None and record.other_forwards != self._other_forwards:  # it may be that of an evaluation
            between = between._replace(peak_bytes=0)
        self._other_forwards = record.other_forwards
        if recorder.is_stored:
            return between
        is_like_others = self._store(recorder, 0 if between is None else between.peak_bytes)
        return between._replace(peak_bytes=0) if is_like_others and between is not None else None

    def _before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.before_step(optimizer)
        base = self._base()
        if base is None or not self.planning.agrees_before(optimizer, base):
            return
        if self.recorder is not None and self.recorder.has_ended and not self.recorder.is_stored:
            self._store(self.recorder, 0)
        self.planning.agree()

    def _store(self, recorder: Recorder, outside_peak_bytes: int) -> bool:
        """Store what a step has shown. Returns whether it was like other steps."""
        planned = self.planned
        assert planned is not None
        recorder.is_stored = True
        step = recorder.step(outside_peak_bytes)
        if step is not None:
            self._learn(planned, recorder, step)
        elif saves_nothing(recorder.levels.levels()):
            self.planning.keep_all(planned.batch)
        elif recorder.had_backward or self._optimizers.has_stepped:  # else it was no step, but a forward
            self.planning.failed()
            self._judge_unusable(planned, recorder)
        return step is not None

    def _learn(self, planned: StepPlan, recorder: Recorder, step: Step) -> None:
        """Store what a measured step has shown."""
        planning = self.planning
        planning.failures = 0
        # A head whose weight FSDP frees between calls cannot run in chunks.
        can_chunk = planning.spec.head == "whole" and self._state.parameters_stay
        planning.maker.chunks_help = can_chunk and recorder.boundaries.chunks_help
        self._forwards.learn()
        nanoseconds = recorder.levels.nanoseconds() if planned.phase is Phase.RACE else 0
        planning.learn(planned, self._batch_of(planned), step, nanoseconds)

    def _batch_of(self, planned: StepPlan) -> Batch:
        """What the step really was; what it was expected to be after a forward that failed."""
        forwards = tuple(self._forwards.current) or planned.batch.forwards
        return dataclasses.replace(planned.batch, forwards=forwards)

    # --- the budget ---

    def _judge(self) -> None:
        """Compare the peak of the step under a plan that has ended with the budget."""
        alive_bytes, peak_bytes = self._budget_watch.read()
        planned = self.planned
        assert planned is not None
        served = self.planning.plans.get(planned.batch)
        if served is None or served.plan.prediction is None:  # blocks save nothing, so that no plan needs less
            return
        if peak_bytes > self.planning.budget.bytes:
            self.planning.void(planned, self._batch_of(planned), peak_bytes, alive_bytes)

    def _judge_unusable(self, planned: StepPlan, recorder: Recorder) -> None:
        """Compare the peak of a check step that shows nothing else, such as one of two backwards, with the budget."""
        if planned.phase is Phase.CHECK and not planned.is_over and recorder.peak_bytes > self.planning.budget.bytes:
            start_bytes = recorder.levels.levels()[0].bytes
            self.planning.void(planned, self._batch_of(planned), recorder.peak_bytes, start_bytes)
