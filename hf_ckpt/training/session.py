"""The policies `budget` and `auto` in a run: measure the first steps, then plan with the measurements.

A session sees every training batch before its forward. It is in the first of these phases that applies to the batch:

1. *warm-up*: the step is not typical. Every block runs under `full`, and nothing is measured. DDP has two such steps. A
   batch size waits at most `MOST_WAITS` steps for later micro-steps or for the optimizer's state.
2. *measure full*: no measured batch is near this one in size, so its step is measured under `full`. A batch that the
   plan of a larger one covers uses that plan, and is measured when its size comes for the second time.
3. *try actions*: a kind of block was not measured under some action, and there is room for it. One block of each such
   kind runs under that action, and all others under `full`. Actions that keep least come first. Changes that were
   measured on one batch are scaled for others, so any batch with room will do.
4. *time*: two steps in which blocks have different actions are timed.
5. *check*: the fastest plan that fits is enabled, and its first step is measured. If the peak exceeds the limit, the
   difference is subtracted from the limit of all later plans.
6. *plan*: the batch has its plan.

With compiled blocks, share 0 takes the place of `full`, and a step that compiles a graph is not used.

The session does not use a step that is not what it expected (an exception, another forward, gradients that were not
cleared); the next step is in the same phase again. So a run needs one step for each size of batch, for each action, for
each timed step and for each check, in whatever order batches come. After `MOST_FAILURES` failed measurements in a row,
it measures one step in `REST`.

No batch ends a run: if no plan fits, the session uses the one with the lowest peak, and warns once.

Steps under `full` belong to a state of the model: which parameters are trained, their bytes, and autocast's type. In
another state the session measures them again, and tries actions on kinds of blocks that are new. For another optimizer,
it repeats the steps under `full`.

Each rank has its own session, because actions do not change the collective operations. Under ZeRO-3 they do, so all
ranks use the plan of the rank with the largest batch.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import exchange
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.attach.record import Installation
from hf_ckpt.costs.costs import Costs, with_offloading
from hf_ckpt.costs.steps import Step
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.forecast.devices import this_device
from hf_ckpt.logs import PLANS
from hf_ckpt.measure.levels import Levels, Meter, meter_for, step_of
from hf_ckpt.measure.live import held_bytes, state_bytes
from hf_ckpt.measure.machine import DeviceMemory, device_memory, device_name
from hf_ckpt.measure.memory import keeps_statistics
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.planner.budgets import above_budget, plan_of, plan_of_least, plan_within
from hf_ckpt.planner.segments import in_segments
from hf_ckpt.spec.actions import COMPILED, FULL, Action, candidates, offloads
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec
from hf_ckpt.training.batches import Batch, Forward, forward_of, has_gradients, look_of
from hf_ckpt.training.measurements import Measurements, choice_of, peak_of
from hf_ckpt.units import budget_bytes, format_bytes, format_seconds

log = logging.getLogger(__name__)

TIMED_STEPS = 2
SURE = 0.97
"""Share of the limit that a timed step may need. The rest is a margin: the need may be estimated from other blocks."""
MOVED = frozenset(offloads().values())
"""The actions that use host memory."""
MOST_PLANS = 64
"""The most plans in a run. The oldest is dropped first."""
MOST_SEEN = 256
"""The most batch sizes of which a session knows that they came before."""
MOST_STATES = 16
"""The most states of the model whose measurements are held. The oldest is dropped first."""
MOST_WAITS = 32
"""The most steps in which a batch size waits for others to be measured first."""
MOST_FAILURES, REST = 8, 100
"""After so many failed measurements in a row, one step in so many is measured."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan that a session has enabled, and the batch for which it was made."""

    shape: Batch
    limit_bytes: int
    """The peak that is allowed."""
    plan: Plan
    bias_bytes: int = 0
    """Measured minus predicted peak. The limit of plans is reduced by this."""
    over: bool = False
    """Whether no plan fits; then this is the one with the lowest peak."""
    measures: bool = False
    """Whether the session is still measuring; then the plan is enabled for one step."""
    phase: str = "plan"
    """What the session does in this step: `warm-up`, `measure full`, `try actions`, `time`, `check` or `plan`."""
    steps_left: int = 0
    """The most steps of this batch size, with this one, before its plan comes; 0 if this is the plan."""
    held: Mapping[Batch, Planned] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """All plans of the run, by their batch."""
    costs: tuple[tuple[str, int, float | None], ...] = dataclasses.field(default=(), compare=False)
    """For each action: (its name, bytes that a block saves, its time as a share of the time under `full`)."""
    measured_bytes: int | None = dataclasses.field(default=None, compare=False)
    """The measured peak of its first step; None before that step, and if steps are not measured."""

    @property
    def plans(self) -> dict[str, Plan]:
        """Return batch, in words -> its plan, for all plans of the run; the smallest batch comes first."""
        held = sorted(self.held.values(), key=lambda planned: planned.shape.elements)
        return {str(planned.shape): planned.plan for planned in held}


@dataclasses.dataclass(frozen=True)
class _Measured:
    """A step that is being measured, and its purpose."""

    batch: Batch
    tried: Mapping[str, Action] = dataclasses.field(default_factory=dict)
    """Blocks that do not run under `full`, with their actions."""
    times: bool = False
    """Whether the step is measured for its time."""
    planned: Planned | None = None
    """The plan whose peak is checked, if any."""


class _Recorder:
    """Measures the step that begins now.

    On a CPU the meter slows every operation down, so it does not run longer than the step: until the graph of the step
    is gone, and while an optimizer steps. `stop` ends it for good, and so does the end of the model.
    """

    def __init__(
        self,
        base: nn.Module,
        meter: Meter,
        purpose: _Measured,
        known: Measurements,
        modules: Mapping[str, nn.Module],
    ) -> None:
        self.purpose, self.known = purpose, known
        self.levels = levels = Levels(meter)
        self.boundaries = Boundaries(modules, levels.mark, meter.stop)
        # An optimizer that steps within the backward must not end the measurement.
        after = lambda: meter.stop() if levels.last == "end" else None  # noqa: E731
        handles = compat.call_around_optimizers(meter.start, after)
        self.stop = weakref.finalize(base, _stop, meter, self.boundaries, handles)
        self.stop.atexit = False
        self.begin_forward()
        levels.mark("begin")

    def begin_forward(self) -> None:
        """Measure from here until the graph of the forward is gone."""
        self.boundaries.begin()
        self.levels.meter.start()


def _stop(meter: Meter, boundaries: Boundaries, handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    boundaries.remove()
    meter.stop()


@dataclasses.dataclass
class _State:
    """What a session knows about the model in one state: see `batches.look_of`."""

    known: Measurements
    plans: dict[Batch, Planned] = dataclasses.field(default_factory=dict)
    """The plans, by their batch."""
    expected: dict[Forward, tuple[Forward, ...]] = dataclasses.field(default_factory=dict)
    """First forward of a step -> all forwards of the last such step."""
    seen: dict[Batch, None] = dataclasses.field(default_factory=dict)
    """Batches that came before; the oldest comes first."""
    waits: collections.Counter[Batch] = dataclasses.field(default_factory=collections.Counter)
    """How many steps a batch has waited."""


class Session:
    """The measurements and plans of one model in one run.

    Args:
        base: the model, plain.
        record: the record of hf_ckpt on it.

    Raises `InfeasibleError` if the model itself needs more than the budget.
    """

    def __init__(self, base: nn.Module, record: Installation) -> None:
        found = find_blocks(base)
        self._base = weakref.ref(base)
        self._name, self._family = found.model, found.family
        self._spec: Spec = record.spec
        self._blocks = {block.name: block for block in found.blocks}
        self._devices = compat.devices_of_model(base)
        accelerators = compat.accelerators(self._devices)
        self._device_type = accelerators[0].type if accelerators else "cpu"
        self._sharded = not compat.parameters_stay(base)
        self._together = compat.is_distributed() and compat.ranks_recompute_together(base)
        held = held_bytes(base)
        self.limit_bytes = limit_bytes(self._spec, device_memory(held, self._devices))
        if held > self.limit_bytes and not self._sharded:
            raise InfeasibleError(
                self.limit_bytes,
                held,
                {"weights": held},
                ["a smaller model, quantised weights, or parameters that are sharded over more devices"],
                f"no plan fits into {format_bytes(self.limit_bytes)}: the model holds {format_bytes(held)} by itself. "
                "What would lower it:",
            )
        self.bias_bytes = self._moved_bias_bytes = 0
        """Measured minus predicted peak, of all plans and of those that use host memory: copies take their time."""
        self._modules = found.modules
        self._recorder: _Recorder | None = None
        self._forwards: list[Forward] = []
        """Forwards of the current step."""
        self._resident = self._was_resident = False
        """Whether there were gradients when this step began, and the one before."""
        self._padded = False
        self._waited = 0
        """Steps that were skipped at the beginning."""
        self._passes = 0
        """`Installation.passes` when the last measured step ended."""
        self._level: int | None = None
        """Bytes alive when the step begins; None if they were not read."""
        self._failures = self._rested = 0
        """Failed measurements in a row, and how many steps ago the last was tried after too many of them."""
        self._said: set[str] = set()
        self._forget_optimizers: Any = None
        """Call it to stop recording the optimizers that step."""
        self._optimizers = compat.optimizer_changes()
        self._known_optimizers = weakref.WeakSet(compat.optimizers_of(base))
        self._state_bytes = self._bytes_of(self._known_optimizers)
        """Bytes of the optimizers' state when steps were last measured."""
        self._stepped = False
        """Whether an optimizer has stepped, so that its state exists."""
        self._may_try = True
        """Whether actions may be tried: not once a step has run out of memory."""
        self._compiles = self._spec.compile is not None
        """Whether hf_ckpt compiles the blocks."""
        self._is_compiled = self._compiles
        """Whether blocks are compiled, by whatever it is."""
        least = COMPILED if self._compiles else FULL
        self._actions = (*(action for action in candidates(compiled=self._compiles) if action != least), least)
        """The actions to choose from; the last one keeps least."""
        if self._compiles:
            self._refuse_unmeasurable()
        self._graphs = 0
        """How many graphs torch.compile had made when the measured step began."""
        self.measured_steps = 0
        self._dropped = False
        """Whether a plan was dropped since the last batch."""
        self._look: Any = None
        self._state: _State
        self._states: dict[Any, _State] = {}
        self._enter(look_of(base, self._device_type, self._sharded))

    def _refuse_unmeasurable(self) -> None:
        """Raise `HfCkptError` if the memory of compiled blocks cannot be measured."""
        reason = ""
        if not compat.HOOKS_STAY_OUTSIDE:
            reason = "this version of transformers runs a block together with its hooks; 5.23 does not"
        elif self._device_type != "cpu" and not all(map(keeps_statistics, self._devices)):
            reason = f"the allocator of {self._device_type} reports no peaks"
        elif self._sharded:
            reason = "parameters are split over ranks"
        if reason:
            raise HfCkptError(
                f"policy: {self._spec.policy} cannot measure compiled blocks: {reason}. Give a `share` with the policy "
                "`selective`, or do not compile blocks."
            )

    def _enter(self, look: Any) -> None:
        """Use the measurements of a state of the model, or begin new ones."""
        if look not in self._states:
            before: Measurements | None = self._state.known if self._states else None
            self._states[look] = _State(
                Measurements(
                    self._modules,
                    self._blocks,
                    self._actions,
                    self._name,
                    self._spec.head,
                    self._spec.mlp,
                    autocast=look[0],
                    before=before,
                )
            )
            if len(self._states) > MOST_STATES:
                del self._states[next(iter(self._states))]
        self._look, self._state = look, self._states[look]

    @property
    def known(self) -> Measurements:
        """The measurements of the model in its present state."""
        return self._state.known

    @property
    def plans(self) -> dict[Batch, Planned]:
        """The plans for the model in its present state, by their batch."""
        return self._state.plans

    # --- what attach calls ---

    @property
    def is_measuring(self) -> bool:
        """Whether the current step is measured."""
        return self._recorder is not None

    def on_batch(
        self,
        record: Installation,
        running: nn.Module,
        stack: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Choose and enable the plan for a training forward of `running` that is about to begin."""
        base = self._base()
        assert base is not None
        if self._forget_optimizers is None:  # of the whole process: a model does not refer to its optimizer
            self._forget_optimizers = weakref.finalize(base, compat.remember_optimizers_that_step().remove)
        forward = forward_of(stack, args, kwargs, self._padded)
        self._padded |= forward.padded
        if self._goes_on(forward):
            self._forwards.append(forward)
            if self._recorder is not None:
                self._recorder.begin_forward()
            self._make_room(base, record)
            return
        self._finish(record)
        self._look_at(base)
        self._forwards = [forward]
        batch = Batch(self._state.expected.get(forward, (forward,)), self._resident)
        planned, measured = self._next(batch)
        if self._together:
            planned, measured = self._agreed(batch, planned, measured)
        if self._failures >= MOST_FAILURES:
            self._rested = (self._rested + 1) % REST
            measured = None if self._rested else measured
        left = self._steps_left(batch) if planned.measures else 0
        planned = dataclasses.replace(planned, phase=_phase(planned, measured), steps_left=left)
        exchange(base, record, planned.plan, planned)
        if self._dropped:
            self._dropped = False
            plans = (held.plan for state in self._states.values() for held in state.plans.values())
            record.functions.keep_only([record.plan, *plans])
        if measured is not None:
            self._begin(base, running, measured, args, kwargs)

    def after_forward(self, failed: bool) -> None:
        """A training forward has ended, or has raised an error."""
        if self._recorder is not None and failed:
            self._drop()
        elif self._recorder is not None:
            self._recorder.boundaries.finish()

    def stop(self, record: Installation) -> None:
        """Stop measuring. If the last step has ended, store its measurements first."""
        if self._recorder is not None and self._recorder.levels.last == "end":
            self._finish(record)
        self._drop()
        if self._forget_optimizers is not None:
            self._forget_optimizers()
            self._forget_optimizers = None

    def lower(self, record: Installation) -> str | None:
        """After a step has run out of memory, enable a plan that needs a tenth less.

        Returns the change in words; None if there is no other plan.
        """
        base, planned = self._base(), record.planned
        if base is None or planned is None:
            return None
        self._drop()
        self._may_try = False
        prediction = planned.plan.prediction
        used = planned.limit_bytes - planned.bias_bytes if prediction is None else prediction.peak_bytes
        self.limit_bytes = min(self.limit_bytes, round(used * 0.9) + self.bias_bytes)
        self._forget_plans()
        less = self._tightest(planned.shape)
        if self.known.reference(planned.shape) is not None:
            less = self._make(planned.shape)
            self._hold(less)
        if less.plan == record.plan:
            return None
        exchange(base, record, less.plan, less)
        return f"a plan for {format_bytes(less.limit_bytes)}" if not less.over else "the plan that needs least"

    # --- the state of the run ---

    def _look_at(self, base: nn.Module) -> None:
        """Note what the step depends on beside its batch: the state of the model, its gradients and its optimizers."""
        look = look_of(base, self._device_type, self._sharded)
        if look != self._look:
            log.info("hf_ckpt: the model has changed, so that its steps are measured again.")
            self._enter(look)
        self._was_resident, self._resident = self._resident, has_gradients(base)
        self._stepped |= self._was_resident and not self._resident
        changes = compat.optimizer_changes()
        if changes != self._optimizers:
            self._optimizers, self._stepped = changes, True
            optimizers = compat.optimizers_of(base)
            if self._device_type != "cpu":  # an allocator has counted what was there before the optimizer was known
                new = [optimizer for optimizer in optimizers if optimizer not in self._known_optimizers]
                self._state_bytes += self._bytes_of(filter(compat.came_with_state, new))
            self._known_optimizers.update(optimizers)
            state = self._bytes_of(optimizers)
            if state != self._state_bytes and any(each.plans for each in self._states.values()):
                for each in self._states.values():  # other bytes were in memory when these steps were measured
                    each.known.full.clear()
                self._forget_plans()
            else:
                for each in self._states.values():
                    each.known.grow(max(0, state - self._state_bytes))
            self._state_bytes = state
        if self._level is not None:
            self.known.begins_at(self._level, self._resident)

    def _bytes_of(self, optimizers: Iterable[torch.optim.Optimizer]) -> int:
        """Bytes of the optimizers' state on the devices of the model."""
        types = {device.type for device in self._devices}
        return sum(state_bytes(optimizer, types) for optimizer in optimizers)

    def _goes_on(self, forward: Forward) -> bool:
        """Whether a forward belongs to the current step."""
        if not self._forwards:
            return False
        if self._recorder is not None:
            return self._recorder.levels.last == "forwarded" and self._recorder.boundaries.has_graph
        expected = self._state.expected.get(self._forwards[0], ())
        return len(expected) > len(self._forwards) and expected[len(self._forwards)].stack == forward.stack

    def _make_room(self, base: nn.Module, record: Installation) -> None:
        """Enable the tightest plan if another forward of the same step does not fit the current plan."""
        planned: Planned | None = record.planned
        if planned is None or Batch(planned.shape.forwards, True).covers(Batch(tuple(self._forwards), True)):
            return
        if planned.measures and (self._recorder is None or not self._recorder.purpose.tried):
            return  # the tightest plan is already enabled
        self._drop()
        tightest = self._tightest(planned.shape)
        exchange(base, record, tightest.plan, tightest)

    # --- the phases ---

    def _next(self, batch: Batch) -> tuple[Planned, _Measured | None]:
        """Return the plan for a batch, and what to measure in its step, if anything."""
        known, serving, came_before = self.known, self._serving(batch), self._came_before(batch)
        first = self._was_resident and not batch.resident
        """Whether this is the first micro-step of an optimizer step."""
        later = dataclasses.replace(batch, resident=True) if first else batch
        # warm-up
        if compat.is_distributed() and self._waited < 2:
            self._waited += 1  # DDP builds its gradient buckets in the first step and rebuilds them in the second
            return self._tightest(batch), None
        waits = first and serving is None and (not came_before or known.reference(later) is not None)
        if waits and self._may_wait(batch):  # later micro-steps need more, so that this one uses their plan
            return self._tightest(batch), None
        # measure full
        enough = serving is not None and (serving.shape.is_near(later) or self._keeps_all(serving.plan))
        if known.reference(batch) is None and not (serving is not None and (enough or not came_before)):
            return self._tightest(batch), _Measured(batch)
        # try actions
        tried = known.to_try(batch, self._room(batch, 1.0)) if self._may_try and known.pending(batch) else {}
        if tried:
            return self._trying(batch, tried), _Measured(batch, tried)
        # time
        if known.timed < TIMED_STEPS:
            tried = known.to_time(batch, self._room(batch, SURE))
            if tried:
                return self._trying(batch, tried), _Measured(batch, tried, times=True)
        # plan
        if serving is not None and (enough or not came_before):
            unchecked = serving.shape == batch and serving.measured_bytes is None and serving.plan.prediction
            return serving, _Measured(batch, planned=serving) if unchecked else None
        if batch.resident and not self._optimizer_has_stepped() and self._may_wait(batch):
            self._say("waits", "hf_ckpt: planned after the first step of the optimizer, when its state is there.")
            return self._tightest(batch), None
        made = self._make(batch)
        self._hold(made)
        return made, _Measured(batch, planned=made)

    def _room(self, batch: Batch, share: float) -> int:
        """The peak that a step which tries or times actions may have: a share of the limit.

        If even `full` needs more than that, for the optimizer's step, the step may need as much.
        """
        if self.known.reference(batch) is None:
            return 0
        return max(round((self.limit_bytes - self.bias_bytes) * share), peak_of(self.known.costs(batch), {}))

    def _may_wait(self, batch: Batch) -> bool:
        """Whether a batch may wait for one more step."""
        self._state.waits[batch] += 1
        return self._state.waits[batch] <= MOST_WAITS

    def _came_before(self, batch: Batch) -> bool:
        """Whether a batch of about this size came before."""
        seen = self._state.seen
        before = batch in seen or any(batch.is_near(other) for other in seen)
        seen[batch] = None
        if len(seen) > MOST_SEEN:
            del seen[next(iter(seen))]
        return before

    def _steps_left(self, batch: Batch) -> int:
        """The most measuring steps that batches of this size still need, with the current one."""
        known = self.known
        measured = known.reference(batch) is not None
        tries = (known.pending(batch) if measured else len(known.actions) - 1) if self._may_try else 0
        times = 1 + self._is_compiled  # the first step under an action compiles its graphs
        return max(1, times * ((not measured) + tries) + max(0, TIMED_STEPS - known.timed))

    def _optimizer_has_stepped(self) -> bool:
        """Whether the optimizer has its state."""
        base = self._base()
        if not self._stepped and base is not None:
            self._stepped = any(optimizer.state for optimizer in compat.optimizers_of(base))
        return self._stepped

    def _agreed(self, batch: Batch, planned: Planned, measured: _Measured | None) -> tuple[Planned, _Measured | None]:
        """Return the plan of the rank with the largest batch. All ranks must call it."""
        ranks = compat.of_all_ranks((batch.elements, planned.plan.to_dict()))
        chosen = Plan.from_dict(max(ranks, key=lambda found: found[0])[1])
        if chosen == planned.plan:
            return planned, measured
        return dataclasses.replace(planned, plan=chosen, measures=True), None

    def _serving(self, batch: Batch) -> Planned | None:
        """Return the plan of the smallest batch that covers this one."""
        covering = [planned for shape, planned in self.plans.items() if shape.covers(batch)]
        return min(covering, key=lambda planned: planned.shape.elements, default=None)

    # --- measuring ---

    def _begin(self, base: nn.Module, running: nn.Module, measured: _Measured, args: Any, kwargs: Any) -> None:
        """Start to measure the step that begins now. `running` is the model whose forward begins, with its wrappers."""
        batch, optimizers = {"batch": (args, kwargs)}, compat.optimizers_of(base)
        self._is_compiled = self._compiles or any(map(compat.is_compiled, running.modules()))
        kind = {"timed_only": measured.times, "compiled": self._is_compiled}
        meter = meter_for(self._devices, base, batch, *optimizers, **kind)
        if measured.planned is None:
            number = (1 + self._is_compiled) * len(self._actions) + TIMED_STEPS
            text = f"measuring: up to {number} steps run under `{self._actions[-1]}`, but for a few blocks"
            self._say("measures", f"hf_ckpt: {self._name}: {text}")
        self._graphs = compat.compiled_graphs()
        modules = compat.outside_graphs(running, self.known.modules)
        self._recorder = _Recorder(base, meter, measured, self.known, modules)
        self.measured_steps += 1

    def _drop(self) -> None:
        """Stop measuring the current step."""
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None

    def _finish(self, record: Installation) -> None:
        """Store the measurements of the last step, if it was measured and has ended."""
        recorder, self._level = self._recorder, None
        if recorder is None:
            return
        self._drop()
        if compat.compiled_graphs() != self._graphs:
            return  # compiling takes time, and may take memory; the next step uses the new graphs
        levels, measured, known = recorder.levels, recorder.purpose, recorder.known
        level, outside = levels.outside()
        outside = outside if record.passes == self._passes else 0  # else it may include an evaluation
        self._passes = record.passes
        step = step_of(levels.levels(), outside)
        self._failures = 0 if step is not None else self._failures + 1
        if step is None:
            if self._failures == MOST_FAILURES:
                log.warning(
                    "hf_ckpt: the steps of this run cannot be measured: every block stays under `%s`. It is tried "
                    "again in one step of %d.",
                    self._actions[-1],
                    REST,
                )
            return
        self._level = level if levels.meter.counts else None
        forwards = tuple(self._forwards)
        self._state.expected[forwards[0]] = forwards
        batch = dataclasses.replace(measured.batch, forwards=forwards)
        if measured.planned is not None:
            if batch == measured.planned.shape:
                self._check(measured.planned, step)
        elif measured.times:
            known.learn_times(batch, step, measured.tried)
        elif not measured.tried:
            known.learn_full(batch, step)
        elif known.learn_trial(batch, step, measured.tried):
            self._forget_plans()  # they may be faster now

    def _check(self, planned: Planned, step: Step) -> None:
        """Lower the limit if the peak of a step exceeded it."""
        prediction = planned.plan.prediction
        if prediction is None:
            return
        reference = self.known.full.get(planned.shape)
        # What was alive only in this step, such as the graph of one that failed before, is gone by the next one.
        begin = step.start_bytes if self._level is None else min(step.start_bytes, self._level)
        start = begin if reference is None else max(reference.start_bytes, begin)
        real = start + (step.peak_bytes - step.start_bytes)
        if planned.shape in self.plans:
            self._hold(dataclasses.replace(planned, measured_bytes=real))
        excess = real - prediction.peak_bytes
        moves = any(action in MOVED for _, action in planned.plan.actions)
        if not planned.over and real > self.limit_bytes and (excess > 0 if moves else excess > self.bias_bytes):
            if moves:
                self._moved_bias_bytes += excess
            else:
                self.bias_bytes = excess
            log.info(
                "hf_ckpt: a step needed %s more than was predicted, which is above the limit of %s; planned for less.",
                format_bytes(excess),
                format_bytes(self.limit_bytes),
            )
            self._forget_plans()

    # --- plans ---

    def _make(self, batch: Batch) -> Planned:
        """Make the plan for a batch from the measurements."""
        return self._planned(batch, self._with_more(batch, self.known.costs(batch)))

    def _planned(self, batch: Batch, ways: list[Costs]) -> Planned:
        """Return the fastest plan for a batch, or the one with the lowest peak."""
        made, over = _best(ways, self.limit_bytes - self.bias_bytes, device_name(self._devices))
        actions = {block.name: action for block, action in made.actions}
        blocks = tuple((block, actions.get(name, self._actions[-1])) for name, block in self._blocks.items())
        plan = dataclasses.replace(made, actions=blocks, family=self._family)
        table = tuple((str(action), kept, share) for action, kept, share in self.known.table(batch))
        planned = Planned(batch, self.limit_bytes, plan, self.bias_bytes, over, held=self.plans, costs=table)
        self._tell(planned)
        return planned

    def _with_more(self, batch: Batch, costs: Costs) -> list[Costs]:
        """Return the candidates, with offloading and segments, whose costs are computed from other actions."""
        found = with_offloading(costs, *this_device(self._devices).offloading, self._spec.host_budget)
        if self._moved_bias_bytes:
            static = (
                dataclasses.replace(c.static, parameters=c.static.parameters + self._moved_bias_bytes) for c in found
            )
            found = [costs, *(dataclasses.replace(c, static=more) for c, more in zip(found, static, strict=True))]
        base = self._base()
        if base is None or self._compiles or self._sharded or len({block.stack for block in self._blocks.values()}) > 1:
            return found
        return [*found, *in_segments(costs)]

    def _tightest(self, batch: Batch) -> Planned:
        return self._trying(batch, {})

    def _trying(self, batch: Batch, tried: Mapping[str, Action]) -> Planned:
        rows = tuple((block, tried.get(name, self._actions[-1])) for name, block in self._blocks.items())
        plan = Plan(self._family, self._name, rows, head=self._spec.head, mlp=self._spec.mlp)
        return Planned(batch, self.limit_bytes, plan, self.bias_bytes, measures=True, held=self.plans)

    def _hold(self, planned: Planned) -> None:
        plans = self.plans
        plans[planned.shape] = planned
        if len(plans) > MOST_PLANS:
            del plans[next(iter(plans))]
            self._dropped = True

    def _forget_plans(self) -> None:
        for state in self._states.values():
            state.plans.clear()
        self._dropped = True

    def _keeps_all(self, plan: Plan) -> bool:
        return all(action == self._actions[0] for _, action in plan.actions)

    # --- messages ---

    def _say(self, what: str, text: str) -> None:
        """Log a text once."""
        if what not in self._said:
            self._said.add(what)
            PLANS.info(text)

    def _tell(self, planned: Planned) -> None:
        prediction = planned.plan.prediction
        assert prediction is not None
        PLANS.info(
            "hf_ckpt: %s: planned for %s %s %s (`%s`): %s; peak %s, step %s, %s",
            planned.plan.model,
            planned.shape,
            "above" if planned.over else "within",
            format_bytes(planned.limit_bytes),
            self._spec.policy,
            planned.plan.summary(),
            format_bytes(prediction.peak_bytes),
            format_seconds(prediction.step_seconds),
            f"from {self.measured_steps} measured steps",
        )
        if planned.over and "over" not in self._said:
            self._said.add("over")
            log.warning(
                "hf_ckpt: no plan fits %s into %s: the lowest peak is %s. Such batches get the fastest plan with this "
                "peak, which holds %s.",
                planned.shape,
                format_bytes(planned.limit_bytes),
                format_bytes(prediction.peak_bytes + self.bias_bytes),
                above_budget(prediction),
            )


def limit_bytes(spec: Spec, memory: DeviceMemory) -> int:
    """The peak that the policy `budget` or `auto` allows, in bytes.

    `auto` allows the default share of the device's memory, less what other processes hold.
    """
    limit = budget_bytes(spec.budget, memory.total_bytes)
    return limit - (memory.total_bytes - memory.available_bytes) if spec.policy == "auto" else limit


def _best(ways: list[Costs], limit: int, device: str) -> tuple[Plan, bool]:
    """Return the fastest plan within a limit and False; if none fits, the one with the lowest peak and True.

    A block that is called several times needs the same action in all its calls. `plan_within` cannot ensure that; then
    the candidates are `full` on the first blocks and one other action on the rest.
    """
    names = list(dict.fromkeys(call.blocks[0].name for call in ways[0].calls))
    if len(names) == len(ways[0].calls):
        try:
            return plan_within(ways, limit, device), False
        except InfeasibleError:
            return plan_of_least(ways, limit, device), True
    found = []
    for costs in ways:
        for action in costs.actions:
            for number in range(len(names) + 1):
                chosen = dict.fromkeys(names[number:], action)
                if peak_of(costs, chosen) <= limit:
                    found.append(plan_of(costs, choice_of(costs, chosen), limit, device))
                    break
    if found:
        return min(found, key=lambda plan: plan.prediction.step_seconds if plan.prediction else 0.0), False
    lowest = min(ways, key=lambda costs: peak_of(costs, {}))
    return plan_of(lowest, choice_of(lowest, {}), limit, device), True


def _phase(planned: Planned, measured: _Measured | None) -> str:
    if measured is None:
        return "warm-up" if planned.measures else "plan"
    if measured.planned is not None:
        return "check"
    return "time" if measured.times else "try actions" if measured.tried else "measure full"
