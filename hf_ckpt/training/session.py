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
| *paused* | the same, because a further forward has no room under its plan; unmeasured | after that step |

If the peak of a checked step exceeds the budget, the limit of all later plans is lower by what it needed more than was
predicted. `full` keeps least, or `full+tiles` where the spec has `mlp`: see `planner.policies.least`; in segments, if
the spec has them. What `full` itself needs follows from such a step, see `measure.levels.as_held`. With compiled blocks
it is share 0, single blocks try other shares in their forward, and a step that compiles a graph is not used. A
step that is not what was expected (an exception, another forward, gradients that were not cleared) is not used either,
and the next one is in the same phase again. After `MOST_FAILURES` such steps in a row, nothing more is measured. A
forward without a backward is no step.

Later steps are watched: see `excess`. The first one above the budget voids all plans, and steps are measured again. If
that does not help, the limit is lower, too.

No batch ends a run: if no plan fits, the session uses the one with the lowest peak, and warns once.

What a step needs also depends on which parameters are trained, their bytes, autocast's type, the modes of modules and
their attention. In another state of the model, steps are measured again; also once an optimizer has added to its state,
or a step calls blocks that none called before.

Each rank has its own session, because actions do not change the collective operations. Sessions of ranks tell each
other nothing: ranks may run other numbers of forwards, and one that asked in a forward could wait for ever. They also
race by themselves: waiting for a slower rank takes the same time under every plan.

Who does what: a `Recorder` measures one step, `measurements` has what is known of blocks, `conditions` what a step and
its plan depend on, and `phases` decides what a step is for, and which plan is the fastest.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.boundaries import Boundaries, GraphsReference, watch_graphs
from hf_ckpt.attach.enable import exchange
from hf_ckpt.attach.record import Installation
from hf_ckpt.costs.costs import ON_DEVICE, Costs, with_offloading, with_segments
from hf_ckpt.costs.steps import Step
from hf_ckpt.engines.region import Region
from hf_ckpt.engines.segments import Watching, are_others_hooks
from hf_ckpt.engines.trials import Attempts
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.devices import this_device
from hf_ckpt.logs import tell
from hf_ckpt.measure.levels import DeviceClock, Levels, as_held, reader_for, saves_nothing, step_of
from hf_ckpt.models.blocks import find_blocks, vocabulary_head
from hf_ckpt.planner import policies
from hf_ckpt.planner.planner import Planner, Selection, in_segments_of
from hf_ckpt.spec.actions import COMPILED, FULL, Action, planned_actions
from hf_ckpt.spec.description import Description
from hf_ckpt.spec.plan import Block, Plan, Prediction
from hf_ckpt.training import conditions
from hf_ckpt.training.conditions import Batch, ModelState, OptimizerStates, StepForwards
from hf_ckpt.training.excess import BudgetWatch
from hf_ckpt.training.measurements import TIMED_STEPS, Measurements
from hf_ckpt.training.phases import MEASURED, MOST_FAILURES, Actions, Entered, Entrant, Phase, Progress, Race, phase_of
from hf_ckpt.units import format_bytes

log = logging.getLogger(__name__)

GAVE_UP = f"gave up after {MOST_FAILURES} steps in a row that could not be measured"
NO_ACTIONS: Mapping[str, Action] = types.MappingProxyType({})
SHARE_AFTER_FAILURE = 0.9
"""If memory runs out, later plans may need this share of what was predicted for the step that failed."""
SIMPLE = Action("selective", ("attention",))
"""The action that a race always tries beside `full`: it keeps little, and recomputes in larger parts than others."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan that a session has enabled, and the batch for which it was made."""

    batch: Batch
    limit_bytes: int
    """The predicted peak that was allowed."""
    plan: Plan
    over: bool = False
    """Whether no plan fits; then this is the one with the lowest peak."""
    phase: Phase = Phase.PLAN
    """What this step is for."""
    attempts: Mapping[str, Attempts] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """What recomputations in this step try."""
    actions: Mapping[str, Action] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """Blocks that have another action than the one that keeps least, to be measured."""
    idle: frozenset[str] = dataclasses.field(default=frozenset(), compare=False, repr=False)
    """Blocks that the steps that it was made from did not call."""
    measured_bytes: int | None = dataclasses.field(default=None, compare=False)
    """The measured peak of its first step; None before that step, and if steps are not measured."""
    without: Prediction | None = dataclasses.field(default=None, compare=False)
    """What the step is predicted to need without checkpointing; None in steps that are measured."""

    @property
    def is_provisional(self) -> bool:
        """Whether this is not the plan of the batch, but one that a phase before it needs."""
        return self.phase not in (Phase.CHECK, Phase.PLAN)

    @property
    def shows_forwards(self) -> bool:
        """Whether this is the first measured step of a batch. All others are compared with it."""
        shows_backwards = any(attempts.last for attempts in self.attempts.values())
        return self.phase is Phase.MEASURE and not self.actions and not shows_backwards


class Recorder:
    """Measures the step that begins now.

    On a CPU a reader of memory slows every operation down, so it does not run longer than the step: until the graph of
    the step is gone, and while an optimizer steps. `stop` ends it for good, and so does the end of the model.

    Args:
        record: the record on the model.
        base: the model, plain.
        modules: name -> block, as far as their boundaries are measured.
        levels: reads memory, or only the time.
    """

    def __init__(self, record: Installation, base: nn.Module, modules: Mapping[str, nn.Module], levels: Levels) -> None:
        self._record = record
        self.levels = levels
        self.boundaries = Boundaries(modules, levels.mark, levels.stop, vocabulary_head(base))
        self._graphs = compat.compiler.compiled_graphs()
        """How many graphs torch.compile had made when the step began."""
        handles: list[Any] = [self.boundaries]
        if levels.reader is not None:
            handles += compat.optimizers.call_around(self._before_optimizer, self._after_optimizer)
            levels.reader.stop_if(self.boundaries.was_interrupted)
        # The finalizer must not refer to the recorder, which refers to the record and so to the model's blocks.
        self._end = weakref.finalize(base, _remove, handles, levels)
        self.is_stored = False
        """Whether what it has shown is stored, but for what the optimizer's step needs."""
        self._end.atexit = False  # at the end of the process there is nothing to clean up for
        self.begin_forward()
        levels.mark("begin")

    def begin_forward(self) -> None:
        """Measure from here until the graph of the forward is gone."""
        self.boundaries.begin()
        if self.levels.reader is not None:
            self.levels.reader.start()

    @property
    def goes_on(self) -> bool:
        """Whether a forward that begins now belongs to the step: the last one had no backward, and its graph exists."""
        return self.levels.last in ("forwarded", "returned") and self.boundaries.has_graph

    @property
    def has_ended(self) -> bool:
        """Whether the backward of the step has ended."""
        return self.levels.last == "end"

    @property
    def was_left(self) -> bool:
        """Whether a KeyboardInterrupt has ended the step."""
        reader = self.levels.reader
        was_interrupted = self.boundaries.was_interrupted() or (reader is not None and reader.is_over())
        return was_interrupted and not self.has_ended

    @property
    def had_backward(self) -> bool:
        """Whether a block had a backward."""
        return any(level.what == "backward" for level in self.levels.levels())

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive so far; 0 if graphs were compiled, which may take memory only once."""
        if compat.compiler.compiled_graphs() != self._graphs:
            return 0
        return max((level.peak_bytes for level in self.levels.levels()[1:]), default=0)

    def stop(self) -> None:
        """Stop measuring."""
        self._end()
        self._record.set_trials({})

    def step(self, outside_peak_bytes: int) -> Step | None:
        """Return the step, with the most bytes that were alive after its end; None if it cannot be used."""
        if compat.compiler.compiled_graphs() != self._graphs:
            return None  # compiling takes time, and may take memory; the next step uses the new graphs
        return None if self.levels.is_blind else step_of(as_held(self.levels.levels()), outside_peak_bytes)

    def _before_optimizer(self) -> None:
        if self.levels.reader is not None:
            self.levels.reader.start()
        self.boundaries.before_optimizer()

    def _after_optimizer(self) -> None:
        self.boundaries.after_optimizer()
        # An optimizer that steps within the backward must not end the measurement. A graph that was dropped without a
        # backward has ended it already.
        if self.has_ended or not self.boundaries.has_graph:
            self.levels.stop()


def _remove(handles: list[Any], levels: Levels) -> None:
    for handle in handles:
        handle.remove()
    levels.stop()


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
        self._head = record.plan.head
        self._family = blocks.family
        self._devices = compat.distributed.devices_of_model(base)
        self._budget_bytes = conditions.budget_of(record.spec, base, self._devices)
        """The peak that steps may have."""
        self._limit_bytes = self._budget_bytes
        """The predicted peak that plans may have: lower, once a step has needed more than was predicted."""
        self._least = policies.least(self._spec)
        """The action that keeps least. Blocks that hf_ckpt compiles cannot get others than compiled ones."""
        if self._least == COMPILED:
            conditions.refuse_compiled(base, self._devices, self._spec.policy)
        tile = None if self._spec.mlp == "whole" else self._spec.mlp
        actions = planned_actions(compiled=self._least == COMPILED, tile=tile)
        self._actions = (*(action for action in actions if action != self._least), self._least)
        """The actions to choose from; the last one keeps least."""
        self.plans: dict[Batch, Planned] = {}
        """The plans of the run, by their batch."""
        # Blocks of stacks for which a rule says what they get, and that.
        fixed = {block.name: action for block, action in record.plan.actions if self._spec.is_fixed(block.stack)}
        skips = compat.transformers.skips_blocks(base)
        self._measurements = Measurements(blocks, self._actions, {**fixed, **record.avoided}, skips)
        self._race = Race()
        self._state = ModelState(base, self._devices)
        self._optimizers = OptimizerStates()
        self._forwards = StepForwards()
        self._peaks = BudgetWatch(self._devices, record.spec.check_every)

        self.planned: Planned | None = None
        """What is planned for the last batch; None before the first."""
        self.recorder: Recorder | None = None
        """What measures the current step; None if it is not measured."""
        self.measured_steps = 0
        self._warm_steps = 0
        """Steps of the warm-up so far."""
        self._thread = 0
        """The thread whose training forward runs; 0 without one."""
        self._idle: dict[Region, int] = {}
        """The functions of blocks that no step called so far, which a deeper one may call, and their forwards."""
        self._graphs: GraphsReference | None = None
        """Refers to the graphs of the forwards of a step that is not measured: see `watch_graphs`."""
        self._failures = 0
        """Steps in a row that could not be measured."""
        self._other_forwards = 0
        """`Installation.other_forwards` when the last measured step ended."""
        self._chunks_help = False
        """Whether `"head": "auto"` would lower the peak of the head in the last measured step."""
        self._told: frozenset[Action] = frozenset()
        """The actions of the last plan that the user was told of."""
        self._has_warned = False
        """Whether the user was told that no plan fits."""
        self.entered: Entered | None = None
        """The plans that race, or that have raced."""

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
        forward = self._forwards.read(stack, args, kwargs)
        if self._goes_on():
            self._forwards.current.append(forward)
            if self.recorder is not None:
                self.recorder.begin_forward()
            self._make_room(base, record)
            return
        # The last step belongs to the model as it was. What changes now may then make the session forget it.
        start_bytes = self._finish(record)
        if self._peaks.is_open:
            self._judge()
        self._look_for_changes(base)
        state = self._state.present
        has_gradients = self._state.has_gradients()
        # A guess for a step of several forwards: only the first is known now, and it must run under some plan.
        batch = Batch(self._forwards.begin(forward, state), has_gradients, state)
        self._optimizers.has_stepped = False
        self._graphs = None
        if start_bytes is not None:
            self._measurements.learn_start(batch, start_bytes)
        planned = self._next(batch)
        self._enable(planned, base, record)
        if planned.phase is Phase.PLAN and not planned.over:
            self._peaks.begin()
            return
        self._peaks.close()
        if planned.phase in MEASURED:
            self._begin(record, base, running, planned, args, kwargs)

    def _enable(self, planned: Planned, base: nn.Module, record: Installation) -> None:
        """Give the blocks of the model the functions of a plan."""
        for name, attempts in planned.attempts.items():
            # Makes the functions that recomputations will try, so that `exchange` puts their hooks on the blocks.
            record.functions.trials(name, attempts)
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

    def after_forward(self, output: Any) -> None:
        """A training forward has ended with an output, or has raised an error, without one."""
        self._thread = 0
        if output is None:
            # No backward will end this step, and a count of live tensors would slow down what the user runs next.
            self._forwards.current.clear()
            self._peaks.notice()
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
        if self._peaks.is_open and not self._goes_on():
            self._judge()
            self._peaks.close()

    def stop(self, record: Installation) -> None:
        """Stop measuring. If the last step has ended, store its measurements first."""
        if self.recorder is not None and self.recorder.has_ended:
            self._finish(record)
        self._drop()
        self.before_others()
        self._peaks.notice()

    def close(self) -> None:
        """End what outlives a pause of the plan: an optimizer may step in it."""
        self._optimizers.stop()

    def lower_limit(self) -> str | None:
        """Memory has run out in this step: plan for less from now on. Returns what for, in words.

        None if the step ran under what keeps least, or if its plan was above the limit already, as no plan fits.
        """
        planned = self.planned
        if planned is None:
            return None
        prediction = planned.plan.prediction
        if prediction is None and not planned.actions:
            return None
        if prediction is not None:  # an evaluation may have voided what it was made from
            peak_bytes = prediction.peak_bytes
        else:
            peak_bytes = self._measurements.costs(planned.batch).peak(planned.actions)
        if peak_bytes > self._limit_bytes:
            return None
        self._drop()
        self._forwards.current.clear()  # the retry is another step
        self._peaks.close()  # so the peak of this one, which is above the budget, voids no plan as well
        self._limit_bytes = int(SHARE_AFTER_FAILURE * peak_bytes)
        self.plans.clear()
        return f"plans for at most {format_bytes(self._limit_bytes)}"

    @property
    def base(self) -> nn.Module | None:
        """The model, plain; None if it does not exist any more."""
        return self._base()

    @property
    def measuring(self) -> str | None:
        """Why the current plan is not the plan of the run yet, in words; None if it is."""
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
        described = dataclasses.replace(description, plans=plans, measuring=measuring, voided=self._peaks.voided)
        without = None if self.planned is None else self.planned.without
        return dataclasses.replace(described, measured_bytes=self.measured_bytes, without=without)

    # --- the phases ---

    def _next(self, batch: Batch) -> Planned:
        """Return the plan for a batch, and what is measured in its step.

        What a phase has left to do takes long to find out, and needs what the phases before it have shown. So it is
        looked for only when these are done, and `phase_of` is asked again.
        """
        # A plan made for exactly this batch wins over that of a larger one, which recomputes more.
        serving = self.plans.get(batch) or self._covering(batch)
        needs_warm_up = compat.distributed.has_process_group()  # DDP builds its gradient buckets in the first two steps
        progress = Progress(
            is_warm=self._warm_steps >= 2 or not needs_warm_up,
            failures=self._failures,
            has_plan=serving is not None,
            # A larger batch checks its plan with a step of its own, which needs more than this one.
            is_checked=serving is not None
            and not self._peaks.is_due
            and (serving.batch != batch or serving.phase is Phase.PLAN or serving.measured_bytes is not None),
        )
        phase = phase_of(progress)
        if phase is Phase.WARM_UP:
            self._warm_steps += 1
        if phase in (Phase.WARM_UP, Phase.GIVEN_UP):
            return self._keeping_least(batch, phase)
        if serving is not None:
            return serving if serving.phase is phase else dataclasses.replace(serving, phase=phase)
        return self._to_measure(batch, progress) or self._to_time_or_plan(batch, progress)

    def _to_measure(self, batch: Batch, progress: Progress) -> Planned | None:
        """Return what the next step shows of the memory of a batch; None if nothing is left to show.

        The first step of a batch is always measured. Compiled blocks are not recomputed as a whole.
        """
        measurements = self._measurements
        in_forward = self._least == COMPILED
        attempts: Mapping[str, Attempts] = {}
        actions = NO_ACTIONS
        is_first = measurements.lacks_forwards(batch)
        if is_first:
            attempts = {} if in_forward else measurements.forwards_to_try(batch)
        elif measurements.lacks_backwards(batch) and not in_forward:
            room = self._least_limit(batch) - self._peak_of_least(batch)
            attempts = measurements.backwards_to_try(batch, measurements.costs(batch).peak({}) + room)
        elif in_forward:
            actions = measurements.actions_to_run(batch, self._least_limit(batch))
        # A first step is measured even if it tries nothing: all other steps are compared with it.
        progress = dataclasses.replace(progress, has_bytes=not (is_first or attempts or actions))
        if phase_of(progress) is Phase.MEASURE:
            return dataclasses.replace(self._keeping_least(batch, Phase.MEASURE, actions), attempts=attempts)
        return None

    def _to_time_or_plan(self, batch: Batch, progress: Progress) -> Planned:
        """Return what is timed next of a batch whose memory is known, or its plan."""
        measurements = self._measurements
        timed: Mapping[str, Action] = NO_ACTIONS
        if measurements.timed < TIMED_STEPS:
            timed = measurements.actions_to_time(batch, self._least_limit(batch))
        progress = dataclasses.replace(progress, has_bytes=True, has_times=not timed)
        if phase_of(progress) is Phase.TIME:
            return self._keeping_least(batch, Phase.TIME, timed)
        self.entered = self._enter(batch)
        entrant = self._race.next(self.entered.entrants)
        progress = dataclasses.replace(progress, has_raced=entrant is None)
        if entrant is not None and phase_of(progress) is Phase.RACE:
            return Planned(batch, self._limit_bytes, entrant.plan, phase=Phase.RACE)
        return self._plan_of_winner(self.entered)

    def _least_limit(self, batch: Batch) -> int:
        """The peak that a step which tries something may have.

        If even what keeps least needs more than the limit, as for the optimizer's step, other actions cost nothing as
        long as they need no more than that.
        """
        return max(self._limit_bytes, self._peak_of_least(batch))

    def _needs_check(self, batch: Batch) -> bool:
        """Whether to measure the first step under the plan of a batch: not if a plan was measured of one that differs
        only in its length, and enough lengths were measured to predict all others."""
        checked = [other for other, planned in self.plans.items() if planned.measured_bytes is not None]
        is_like_them = any(batch.length_of(other) is not None for other in checked)
        return not (is_like_them and self._measurements.follows(batch))

    def _covering(self, batch: Batch) -> Planned | None:
        """The plan of the smallest batch that covers this one and is hardly larger; None without one."""
        near = [larger for larger in self.plans if larger.covers(batch) and larger.is_near(batch)]
        smallest = min(near, key=lambda larger: larger.elements, default=None)
        return None if smallest is None else self.plans[smallest]

    def _keeping_least(self, batch: Batch, phase: Phase, actions: Mapping[str, Action] = NO_ACTIONS) -> Planned:
        """The plan for one step before the plan of a batch: all blocks keep least, but for those in `actions`."""
        plan = self._plan_with(actions)
        divided = self._in_segments(dict(plan.actions))
        if divided:
            rows = tuple((block, divided.get(block, action)) for block, action in plan.actions)
            plan = dataclasses.replace(plan, actions=rows)
        return Planned(batch, self._limit_bytes, plan, phase=phase, actions=actions)

    def _in_segments(self, actions: Mapping[Block, Action]) -> dict[Block, Action]:
        """The actions of a step before the plan in the segments of the spec; none without segments."""
        if self._spec.segments is None or not self._divides:
            return {}
        chosen = {block: action for block, action in actions.items() if block.name not in self._measurements.fixed}
        return policies.in_segments(chosen, self._spec.segments)

    @property
    def _divides(self) -> bool:
        """Whether blocks can be recomputed in segments in a forward that begins now."""
        # Parameters that are sharded are not there to run the blocks of a segment once more.
        return not (self._state.is_sharded or self._measurements.skips or are_others_hooks())

    def _peak_of_least(self, batch: Batch) -> int:
        """The peak of the step of a batch in which all blocks keep least, in the segments of the spec."""
        costs = self._measurements.costs(batch)
        divided = self._in_segments(dict.fromkeys((call.block for call in costs.calls), self._least))
        is_called_once = len({call.block for call in costs.calls}) == len(costs.calls)
        is_divided = is_called_once and any(action.made for action in divided.values())
        return min(costs.peak({}), with_segments(costs, divided).peak({})) if is_divided else costs.peak({})

    def _plan_with(self, actions: Mapping[str, Action], prediction: Prediction | None = None) -> Plan:
        """The plan that gives blocks these actions, by name; all others keep least, but for fixed ones."""
        measurements = self._measurements
        chosen = {**measurements.fixed, **actions}
        rows = tuple((block, chosen.get(name, self._least)) for name, block in measurements.blocks.items())
        return Plan(self._family, self._name, rows, prediction, self._head)

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
            self._forwards.learn(planned.batch.state)
        self.planned = self._keeping_least(planned.batch, Phase.PAUSED)
        exchange(base, record, self.planned.plan)

    def _begin(
        self, record: Installation, base: nn.Module, running: nn.Module, planned: Planned, args: Any, kwargs: Any
    ) -> None:
        """Start to measure the step that begins now. `running` is the model whose forward begins, with its wrappers."""
        if any(map(compat.compiler.is_compiled, running.modules())):
            conditions.refuse_compiled(base, self._devices, self._spec.policy)
        if not self.measured_steps:
            where = ", in segments" if any(action.made for _, action in planned.plan.actions) else ""
            tell("hf_ckpt: %s: measuring the first steps, under `%s`%s", self._name, self._least, where)
        # A hook inside of a graph of torch.compile would break the graph.
        modules = compat.compiler.outside_graphs(running, self._measurements.modules)
        if planned.phase is Phase.RACE and not self._measurements.skips:
            # Only the begin and the end of the step count, so that one block is enough to see its backward. That of the
            # last block that has one comes first.
            last = self._measurements.blocks_with_backward(self._measurements.bound(planned.batch))[-1]
            modules = {name: module for name, module in modules.items() if name == last}
        if planned.phase in (Phase.TIME, Phase.RACE):
            levels = Levels(clock=DeviceClock(self._devices))
        else:
            # All that lives while the step begins must be known to a count of live tensors, which sees only new ones.
            optimizers = compat.optimizers.of_model(base)
            levels = Levels(reader_for(self._devices, base, {"batch": (args, kwargs)}, *optimizers))
        self.recorder = Recorder(record, base, modules, levels)
        mark = self.recorder.boundaries.mark
        watching = None
        if planned.phase in (Phase.MEASURE, Phase.TIME) and any(action.made for _, action in planned.plan.actions):
            watching = Watching(mark)
            levels.missing_bytes = watching.missing_bytes
        record.set_trials(planned.attempts, mark, watching)
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
        self._chunks_help = (
            recorder.boundaries.chunks_help and self._spec.head == "whole" and not self._state.is_sharded
        )
        assert self.planned is not None
        self._forwards.learn(self.planned.batch.state)
        self._learn(self.planned, recorder, step)
        return True

    def _keep_all(self) -> None:
        """Plan for a batch whose blocks save nothing: `keep` on all of them, which has nothing to predict."""
        assert self.planned is not None
        measurements = self._measurements
        plan = self._plan_with(dict.fromkeys(measurements.blocks.keys() - measurements.fixed.keys(), self._actions[0]))
        planned = dataclasses.replace(self.planned, plan=plan, phase=Phase.PLAN, attempts={}, measured_bytes=0)
        if not self.plans:
            text = "hf_ckpt: %s: no block saves anything for the backward of %s, so all have `%s`"
            tell(text, self._name, planned.batch, self._actions[0])
        self.plans[planned.batch] = planned
        self._peaks.checked()

    def _learn(self, planned: Planned, recorder: Recorder, step: Step) -> None:
        """Store what a measured step has shown."""
        measurements = self._measurements
        batch = dataclasses.replace(planned.batch, forwards=tuple(self._forwards.current))
        if planned.phase is Phase.TIME:
            measurements.learn_times(batch, step, planned.actions)
        elif planned.shows_forwards:
            measurements.learn_forwards(batch, step)
        elif planned.phase is Phase.CHECK:
            # What was alive only in this step, such as the graph of one that failed before, does not count.
            start_bytes = measurements.bound(planned.batch).start_bytes
            self._check(planned, batch, start_bytes + step.peak_bytes - step.start_bytes, step.start_bytes)
        elif batch != planned.batch:
            return  # the others are compared with what was expected
        elif planned.actions:
            measurements.learn_actions(batch, step, planned.actions)
        elif planned.phase is Phase.MEASURE:
            measurements.learn_backwards(batch, step)
        elif planned.phase is Phase.RACE and self.entered is not None:
            nanoseconds = recorder.levels.nanoseconds()
            if measurements.skips:  # the predictions are for steps that skip nothing
                nanoseconds = nanoseconds * len(measurements.bound(batch).calls) // len(step.calls)
            self._race.learn(planned.plan, self.entered.entrants, nanoseconds)

    def _check(self, planned: Planned, batch: Batch, peak_bytes: int, start_bytes: int) -> None:
        """Store the measured peak of a plan's first step, or compare that of a later one with the budget."""
        is_first = planned.measured_bytes is None
        self._peaks.checked()
        if is_first and batch != planned.batch:
            return  # a step that needs less says nothing
        if is_first and batch in self.plans:
            self.plans[batch] = dataclasses.replace(planned, phase=Phase.PLAN, measured_bytes=peak_bytes)
        if peak_bytes <= self._budget_bytes or planned.over:
            return
        if is_first:
            self._lower(planned, peak_bytes)
        else:
            self._void(planned, peak_bytes, start_bytes)

    def _judge(self) -> None:
        """Compare the peak of the step under a plan that has ended with the budget."""
        alive_bytes, peak_bytes = self._peaks.read()
        assert self.planned is not None
        served = self.plans.get(self.planned.batch)
        if served is None or served.plan.prediction is None:  # blocks save nothing, so that no plan needs less
            return
        if peak_bytes > self._budget_bytes:
            self._void(self.planned, peak_bytes, alive_bytes)

    def _judge_unusable(self, recorder: Recorder) -> None:
        """Compare the peak of a check step that shows nothing else, such as one of two backwards, with the budget."""
        planned = self.planned
        assert planned is not None
        peak_bytes = recorder.peak_bytes
        if planned.phase is Phase.CHECK and not planned.over and peak_bytes > self._budget_bytes:
            self._void(planned, peak_bytes, recorder.levels.levels()[0].bytes)

    def _void(self, planned: Planned, peak_bytes: int, start_bytes: int) -> None:
        """Measure again what a plan was made from, since a later step has exceeded the budget.

        Args:
            planned: the plan.
            peak_bytes: what the step needed.
            start_bytes: what was alive when it began, or after it.
        """
        if self._peaks.void():
            self._lower(planned, peak_bytes)
            return
        forwards = tuple(self._forwards.current) or planned.batch.forwards  # none after a forward that failed
        batch = dataclasses.replace(planned.batch, forwards=forwards)
        more_bytes = start_bytes - self._measurements.bound(planned.batch).start_bytes
        causes = [f"it was planned for {planned.batch}"] if batch != planned.batch else []
        if more_bytes > (peak_bytes - self._budget_bytes) / 2:
            causes.append(f"{format_bytes(more_bytes)} more are alive between steps, such as the optimizer's state")
        text = "hf_ckpt: %s: a step of %s needed %s, above the budget of %s; steps are measured again%s"
        sizes = format_bytes(peak_bytes), format_bytes(self._budget_bytes)
        tell(text, self._name, batch, *sizes, "".join(f". What differs: {cause}" for cause in causes))
        self._measurements.forget_steps()
        self.plans.clear()

    def _lower(self, planned: Planned, peak_bytes: int) -> None:
        """Lower the limit by what a step needed more than was predicted, above the budget."""
        prediction = planned.plan.prediction
        if prediction is None:  # blocks save nothing, so that no plan needs less
            return
        # For batches of all sizes: their predictions may miss as much.
        excess_bytes = peak_bytes - prediction.peak_bytes
        self._limit_bytes = min(self._limit_bytes, self._budget_bytes - excess_bytes)
        text = "hf_ckpt: a step needed %s more than was predicted, above the budget of %s; planning again for less."
        log.info(text, format_bytes(excess_bytes), format_bytes(self._budget_bytes))
        self.plans.clear()

    # --- plans ---

    def _enter(self, batch: Batch) -> Entered:
        """The fastest plan for a batch, or the one with the lowest peak, and the best simple ones that need no more."""
        entrants, hints = self._first_entrants(self._costs_with_host(batch))
        prediction = entrants[0].plan.prediction
        assert prediction is not None
        # If no plan fits, the first one is near the lowest peak. Others that need no more than it are as good.
        limit = max(self._limit_bytes, prediction.peak_bytes)
        most = self._actions[0]
        for action in dict.fromkeys((most, self._least, FULL, SIMPLE)):
            if action in self._actions:
                allowed = tuple(dict.fromkeys((most, action)))
                entrant, hints_of_entrant = self._entrant(allowed, [self._measurements.costs(batch, allowed)], limit)
                if not hints_of_entrant:  # it fits
                    entrants.append(entrant)
        return Entered(batch, tuple(entrants), tuple(hints))

    def _costs_with_host(self, batch: Batch) -> list[Costs]:
        """The costs for a batch, with each of the actions that offload, if there is host memory."""
        device = this_device(self._devices)
        costs = self._measurements.costs(batch)
        costs = dataclasses.replace(
            costs,
            has_host=device.host_bandwidth > 0,
            chunks_help=self._chunks_help,
            divides=self._divides,
        )
        host = device.host_bandwidth, device.launch_nanoseconds, self._spec.host_budget
        return with_offloading(costs, *host, self._measurements.fixed)

    def _first_entrants(self, with_host: Sequence[Costs]) -> tuple[list[Entrant], Sequence[str]]:
        """The fastest plan for a batch, and what would lower its peak if none fits.

        Segments take the time of a forward for each input that they make again. So a plan in segments is entered only
        where no other fits without host memory, and takes turns with one that offloads.

        Args:
            with_host: see `_costs_with_host`.
        """
        limit = self._limit_bytes
        first, hints = self._entrant(self._actions, with_host, limit)
        uses_host = any(action in ON_DEVICE for _, action in first.plan.actions)
        if not (hints or uses_host or self._spec.segments is not None):
            return [first], hints
        divided = in_segments_of(with_host[0], self._spec.segments, self._measurements.fixed)
        if not divided:
            return [first], hints
        least = dataclasses.replace(self._least, made=True)
        segmented, hints_of_segmented = self._entrant((least,), divided, limit)
        if not hints_of_segmented:  # it fits
            return [segmented] if hints else [first, segmented], ()
        if not hints:
            return [first], hints
        lowest, hints = self._entrant(self._actions, [*with_host, *divided], limit)
        return [lowest], hints

    def _entrant(self, allowed: Actions, costs: Sequence[Costs], limit: int) -> tuple[Entrant, Sequence[str]]:
        """The fastest plan with these costs, and what would lower its peak, if that is above a limit, in bytes."""
        selection, hints = Planner(costs).nearest(limit)
        plan = selection.plan(limit, compat.devices.device_name(self._devices))
        prediction = plan.prediction
        assert prediction is not None
        # Costs know only blocks that a measured step has called.
        plan = self._plan_with({block.name: action for block, action in plan.actions}, prediction)
        return Entrant(allowed, plan, prediction.step_seconds), hints

    def _plan_of_winner(self, entered: Entered) -> Planned:
        """Make the winner of a race the plan of its batch, which is to be checked, and tell the user."""
        winner = self._race.winner(entered.entrants)
        assert winner.plan.prediction is not None
        limit_bytes = self._limit_bytes
        # The budget of a prediction is what `Prediction` compares its peak with: the limit, which may be lower.
        prediction = dataclasses.replace(winner.plan.prediction, step_seconds=winner.seconds, budget_bytes=limit_bytes)
        plan = dataclasses.replace(winner.plan, prediction=prediction)
        is_over = bool(entered.hints)
        phase = Phase.CHECK if self._needs_check(entered.batch) else Phase.PLAN
        called = {name for name, _ in self._measurements.bound(entered.batch).names}
        idle = frozenset(self._measurements.blocks.keys() - called)
        without = self._without(entered.batch, winner)
        planned = Planned(entered.batch, limit_bytes, plan, is_over, phase, idle=idle, without=without)
        self.plans[entered.batch] = planned
        text = "hf_ckpt: %s: planned for %s (`%s`): %s; %s, from %d measured steps"
        kinds = frozenset(action for _, action in plan.actions)
        # With batches of many lengths, each has a plan, but most differ only in how many blocks have which action.
        say = log.debug if kinds == self._told else tell
        say(text, self._name, entered.batch, self._spec.policy, plan.summary(), prediction, self.measured_steps)
        self._told = kinds
        if is_over and not self._has_warned:
            self._has_warned = True
            log.warning(
                "hf_ckpt: no plan fits into %s (%s). Using the fastest plan near the lowest peak, %s. What "
                "would lower it: %s",
                format_bytes(limit_bytes),
                entered.batch,
                format_bytes(prediction.peak_bytes),
                "; ".join(entered.hints),
            )
        return planned

    def _without(self, batch: Batch, winner: Entrant) -> Prediction:
        """What the step of a batch is predicted to need without checkpointing."""
        costs = self._measurements.costs(batch)
        prediction = Selection(costs, costs.uniform(self._actions[0])).plan().prediction
        assert prediction is not None
        assert winner.plan.prediction is not None
        planned_seconds = winner.plan.prediction.step_seconds
        if not planned_seconds:
            return prediction
        # The race has timed whole steps; only the proportion of the two comes from the costs of their parts.
        seconds = winner.seconds * prediction.step_seconds / planned_seconds
        return dataclasses.replace(prediction, step_seconds=seconds)
