"""The policies `budget` and `auto` in a run: measure the first steps, then plan with the measurements.

A session sees every training batch before its forward. It asks its phases in this order, and the first that applies to
the batch says what the step does. Each ends by itself, so a run needs one step for each size of batch, for each action,
for each timed step and for each check, in whatever order batches come:

| phase | its steps run under | it ends |
|---|---|---|
| *warm-up* | `full`, unmeasured | after two steps under DDP; for a batch size, after `MOST_WAITS` steps of it |
| *measure full* | `full` | when a step of about this size was measured, or a larger batch's plan covers it |
| *try actions* | `full`, but one block of a kind under an action | when each kind was tried under each, where it fits |
| *time* | a mixture of actions | after `TIMED_STEPS` steps |
| *plan* | the plan of the batch | |
| *check* | the plan; its first step is measured | after that step |

If the peak of a checked step exceeds the limit, the difference is subtracted from the limit of all later plans. With
compiled blocks, share 0 takes the place of `full`, and a step that compiles a graph is not used. A step that is not
what was expected (an exception, another forward, gradients that were not cleared) is not used either, and the next one
is in the same phase again. After `MOST_FAILURES` such steps in a row, one step in `REST` is measured.

No batch ends a run: if no plan fits, the session uses the one with the lowest peak, and warns once.

Steps under `full` belong to a state of the model: which parameters are trained, their bytes, and autocast's type. In
another state they are measured again, and actions are tried on kinds of blocks that are new. For another optimizer, the
steps under `full` are measured again. Each rank has its own session, because actions do not change the collective
operations. Under ZeRO-3 they do, so all ranks use the plan of the rank with the largest batch.
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
from hf_ckpt.measure.clocks import Meter
from hf_ckpt.measure.levels import Levels, meter_for, step_of
from hf_ckpt.measure.live import held_bytes
from hf_ckpt.measure.memory import device_memory, device_name, keeps_statistics
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.planner.budgets import above_budget, plan_of, plan_of_least, plan_within
from hf_ckpt.planner.segments import in_segments
from hf_ckpt.spec.actions import COMPILED, FULL, Action, candidates, offloads
from hf_ckpt.spec.plan import Plan
from hf_ckpt.training.batches import Batch, Forward, forward_of, look_of
from hf_ckpt.training.measurements import Measurements, choice_of, peak_of
from hf_ckpt.units import budget_bytes, format_bytes, format_seconds

log = logging.getLogger(__name__)

TIMED_STEPS = 2
SURE = 0.97
"""Share of the limit that a timed step may need. The rest is a margin: the need may be estimated from other blocks."""
MOVED = frozenset(offloads().values())
"""The actions that use host memory."""
MOST_PLANS, MOST_SEEN, MOST_STATES = 64, 256, 16
"""The most plans in a run, batch sizes that are known to have come before, and states of the model whose measurements
are held. The oldest is dropped first."""
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
    def measures(self) -> bool:
        """Whether the session is still measuring; then the plan is enabled for one step."""
        return self.phase not in ("check", "plan")

    @property
    def plans(self) -> dict[str, Plan]:
        """Return batch, in words -> its plan, for all plans of the run; the smallest batch comes first."""
        held = sorted(self.held.values(), key=lambda planned: planned.shape.elements)
        return {str(planned.shape): planned.plan for planned in held}

    @property
    def moves(self) -> bool:
        """Whether blocks use host memory."""
        return any(action in MOVED for _, action in self.plan.actions)


@dataclasses.dataclass
class _State:
    """What a session knows about the model in one state: see `batches.look_of`."""

    known: Measurements
    plans: dict[Batch, Planned] = dataclasses.field(default_factory=dict)
    expected: dict[Forward, tuple[Forward, ...]] = dataclasses.field(default_factory=dict)
    """First forward of a step -> all forwards of the last such step."""
    seen: dict[Batch, None] = dataclasses.field(default_factory=dict)
    """Batches that came before; the oldest comes first."""
    waits: collections.Counter[Batch] = dataclasses.field(default_factory=collections.Counter)
    """How many steps a batch has waited."""


class _Recorder:
    """Measures the step that begins now.

    On a CPU the meter slows every operation down, so it does not run longer than the step: until the graph of the step
    is gone, and while an optimizer steps. `stop` ends it for good, and so does the end of the model.
    """

    def __init__(
        self,
        base: nn.Module,
        meter: Meter,
        planned: Planned,
        tried: Mapping[str, Action],
        state: _State,
        running: nn.Module,
    ) -> None:
        self.planned, self.tried, self.state = planned, tried, state
        self.graphs = compat.compiler.compiled_graphs()
        """How many graphs torch.compile had made when the step began."""
        self.levels = levels = Levels(meter)
        modules = compat.compiler.outside_graphs(running, state.known.modules)
        self.boundaries = Boundaries(modules, levels.mark, meter.stop)
        # An optimizer that steps within the backward must not end the measurement.
        after = lambda: meter.stop() if levels.last == "end" else None  # noqa: E731
        handles: list[Any] = [*compat.torch.call_around_optimizers(meter.start, after), self.boundaries]

        def stop() -> None:
            for handle in handles:
                handle.remove()
            meter.stop()

        self.stop = weakref.finalize(base, stop)
        self.stop.atexit = False
        self.begin_forward()
        levels.mark("begin")

    def begin_forward(self) -> None:
        """Measure from here until the graph of the forward is gone."""
        self.boundaries.begin()
        self.levels.meter.start()


class Session:
    """The measurements and plans of one model in one run.

    Args:
        base: the model, plain.
        record: the record of hf_ckpt on it.

    Raises `InfeasibleError` if the model itself needs more than the budget.
    """

    def __init__(self, base: nn.Module, record: Installation) -> None:
        found = find_blocks(base)
        self._base, self._spec = weakref.ref(base), record.spec
        self._name, self._family, self._modules = found.model, found.family, found.modules
        self._blocks = {block.name: block for block in found.blocks}
        self._devices = compat.distributed.devices_of_model(base)
        accelerators = compat.devices.accelerators(self._devices)
        self._device_type = accelerators[0].type if accelerators else "cpu"
        self._sharded = not compat.distributed.parameters_stay(base)
        self._together = compat.distributed.is_distributed() and compat.distributed.ranks_recompute_together(base)
        held = held_bytes(self._devices, base, *compat.torch.optimizers_of(base))
        memory = device_memory(held, self._devices)
        self.limit_bytes = budget_bytes(self._spec.budget, memory.total_bytes)
        if self._spec.policy == "auto":  # less what other processes hold
            self.limit_bytes -= memory.total_bytes - memory.available_bytes
        if held > self.limit_bytes and not self._sharded:
            raise InfeasibleError(
                self.limit_bytes,
                held,
                {"weights": held},
                ["a smaller model, quantised weights, or parameters that are sharded over more devices"],
                f"no plan fits into {format_bytes(self.limit_bytes)}: the model holds {format_bytes(held)} by itself. "
                "What would lower it:",
            )
        self._compiles = self._spec.compile is not None
        """Whether hf_ckpt compiles the blocks."""
        if self._compiles:
            self._refuse_unmeasurable()
        self._is_compiled = self._compiles
        """Whether blocks are compiled, by whatever it is."""
        self._least = COMPILED if self._compiles else FULL
        actions = candidates(compiled=self._compiles)
        self._actions = (*(action for action in actions if action != self._least), self._least)
        """The actions to choose from; the last one keeps least."""
        self._biases = {False: 0, True: 0}
        """Measured minus predicted peak of all plans, and in addition of those that use host memory, whose copies take
        their time."""
        self._recorder: _Recorder | None = None
        self._forwards: list[Forward] = []
        """Forwards of the current step."""
        self._resident = self._was_resident = False
        """Whether there were gradients when this step began, and the one before."""
        self._padded = False
        self._warm_steps = 0
        """Unmeasured steps at the beginning."""
        self._passes = 0
        """`Installation.passes` when the last measured step ended."""
        self._level: int | None = None
        """Bytes alive when the step begins; None if they were not read."""
        self._failures = self._rested = 0
        """Failed measurements in a row, and how many steps ago the last was tried after too many of them."""
        self._said: set[str] = set()
        self._forget_optimizers: Any = None
        """Call it to stop recording the optimizers that step."""
        self._optimizers = compat.torch.optimizer_changes()
        self._known_optimizers = weakref.WeakSet(compat.torch.optimizers_of(base))
        self._state_bytes = self._bytes_of(self._known_optimizers)
        """Bytes of the optimizers' state when steps were last measured."""
        self._stepped = False
        """Whether an optimizer has stepped, so that its state exists."""
        self._may_try = True
        """Whether actions may be tried: not once a step has run out of memory."""
        self.measured_steps = 0
        """Whether a plan was dropped since the last batch."""
        self._states: dict[Any, _State] = {}
        self._look = look_of(base, self._device_type, self._sharded)
        self._state = self._states[self._look] = _State(
            Measurements(self._modules, self._blocks, self._actions, self._look[0])
        )

    def _refuse_unmeasurable(self) -> None:
        """Raise `HfCkptError` if the memory of compiled blocks cannot be measured."""
        reason = ""
        if not compat.transformers.HOOKS_STAY_OUTSIDE:
            reason = "this version of transformers runs a block together with its hooks; 5.23 does not"
        elif self._device_type == "cpu":
            reason = "that needs an allocator that reports peaks, as accelerators have"
        elif not all(map(keeps_statistics, self._devices)):
            reason = f"the allocator of {self._device_type} reports no peaks"
        elif self._sharded:
            reason = "parameters are split over ranks"
        if reason:
            raise HfCkptError(
                f"policy: {self._spec.policy} cannot measure compiled blocks: {reason}. Give a `share` with the policy "
                "`selective`, or do not compile blocks."
            )

    @property
    def known(self) -> Measurements:
        """The measurements of the model in its present state."""
        return self._state.known

    @property
    def plans(self) -> dict[Batch, Planned]:
        """The plans for the model in its present state, by their batch."""
        return self._state.plans

    @property
    def bias_bytes(self) -> int:
        """Measured minus predicted peak of all plans."""
        return self._biases[False]

    @property
    def is_measuring(self) -> bool:
        """Whether the current step is measured."""
        return self._recorder is not None

    # --- what others call ---

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
            self._forget_optimizers = weakref.finalize(base, compat.torch.remember_optimizers_that_step().remove)
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
        planned, tried = self._next(base, batch)
        if self._together:
            planned = self._agreed(planned)
        measured = planned.phase not in ("warm-up", "plan")
        if self._failures >= MOST_FAILURES:
            self._rested = (self._rested + 1) % REST
            measured = measured and not self._rested
        exchange(base, record, planned.plan, planned)
        if measured:
            self._begin(base, running, planned, tried, args, kwargs)

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
        is_known = self.known.reference(planned.shape) is not None
        less = self._made(planned.shape) if is_known else self._trying(planned.shape, "warm-up")
        if less.plan == record.plan:
            return None
        exchange(base, record, less.plan, less)
        return "the plan that needs least" if less.over else f"a plan for {format_bytes(less.limit_bytes)}"

    # --- the phases ---

    def _next(self, base: nn.Module, batch: Batch) -> tuple[Planned, Mapping[str, Action]]:
        """Return the plan for a batch, and the blocks in it that do not run under `full` to be measured."""
        known, came_before = self.known, self._came_before(batch)
        first = self._was_resident and not batch.resident
        """Whether this is the first micro-step of an optimizer step."""
        later = dataclasses.replace(batch, resident=True) if first else batch
        covering = [planned for shape, planned in self.plans.items() if shape.covers(batch)]
        serving = min(covering, key=lambda planned: planned.shape.elements, default=None)
        """The plan of the smallest batch that covers this one."""
        keeps_all = serving is not None and all(action == self._actions[0] for _, action in serving.plan.actions)
        if serving is not None and came_before and not keeps_all and not serving.shape.is_near(later):
            serving = None  # the batch comes again, and may do with less than the larger one

        # warm-up
        if compat.distributed.is_distributed() and self._warm_steps < 2:
            self._warm_steps += 1  # DDP builds its gradient buckets in the first step and rebuilds them in the second
            return self._trying(batch, "warm-up"), {}
        if first and not covering and (not came_before or known.reference(later) is not None) and self._may_wait(batch):
            return self._trying(batch, "warm-up"), {}  # later micro-steps need more, and this one uses their plan
        # measure full
        if serving is None and known.reference(batch) is None:
            return self._trying(batch, "measure full"), {}
        # try actions
        tried = known.to_try(batch, self._room(batch, 1.0)) if self._may_try and known.pending(batch) else {}
        if tried:
            return self._trying(batch, "try actions", tried), tried
        # time
        tried = known.to_time(batch, self._room(batch, SURE)) if known.timed < TIMED_STEPS else {}
        if tried:
            return self._trying(batch, "time", tried), tried
        # plan
        if serving is not None:
            unchecked = serving.shape == batch and serving.measured_bytes is None and serving.plan.prediction
            return dataclasses.replace(serving, phase="check" if unchecked else "plan"), {}
        if batch.resident and not self._stepped:
            self._stepped = any(optimizer.state for optimizer in compat.torch.optimizers_of(base))
        if batch.resident and not self._stepped and self._may_wait(batch):
            self._say("waits", "hf_ckpt: planned after the first step of the optimizer, when its state is there.")
            return self._trying(batch, "warm-up"), {}
        # check
        return dataclasses.replace(self._made(batch), phase="check"), {}

    def _trying(self, batch: Batch, phase: str, tried: Mapping[str, Action] | None = None) -> Planned:
        """The plan for one step of a phase before the plan: all blocks keep least, but for those in `tried`."""
        rows = tuple((block, (tried or {}).get(name, self._least)) for name, block in self._blocks.items())
        plan = Plan(self._family, self._name, rows, head=self._spec.head)
        known = self.known
        tries = len(self._actions) - 1 if known.reference(batch) is None else known.pending(batch)
        steps = (known.reference(batch) is None) + (tries if self._may_try else 0)
        steps *= 1 + self._is_compiled  # the first step under an action compiles its graphs
        left = max(1, steps + max(0, TIMED_STEPS - known.timed))
        return Planned(batch, self.limit_bytes, plan, self.bias_bytes, False, phase, left, self.plans)

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
        before = batch in seen or any(map(batch.is_near, seen))
        seen[batch] = None
        if len(seen) > MOST_SEEN:
            del seen[next(iter(seen))]
        return before

    def _agreed(self, planned: Planned) -> Planned:
        """Return the plan of the rank with the largest batch. All ranks must call it."""
        ranks = compat.distributed.of_all_ranks((planned.shape.elements, planned.plan.to_dict()))
        chosen = Plan.from_dict(max(ranks, key=lambda rank: rank[0])[1])
        if chosen == planned.plan:
            return planned
        return dataclasses.replace(planned, plan=chosen, phase="warm-up")

    # --- a step ---

    def _look_at(self, base: nn.Module) -> None:
        """Note what the step depends on beside its batch: the state of the model, its gradients and its optimizers."""
        look = look_of(base, self._device_type, self._sharded)
        if look != self._look:
            log.info("hf_ckpt: the model has changed, so that its steps are measured again.")
            if look not in self._states:
                known = Measurements(self._modules, self._blocks, self._actions, look[0], self.known)
                self._states[look] = _State(known)
                if len(self._states) > MOST_STATES:
                    del self._states[next(iter(self._states))]
            self._look, self._state = look, self._states[look]
        has_gradients = any(parameter.grad is not None for parameter in base.parameters())
        self._was_resident, self._resident = self._resident, has_gradients
        self._stepped |= self._was_resident and not self._resident
        changes = compat.torch.optimizer_changes()
        if changes != self._optimizers:
            self._optimizers, self._stepped = changes, True
            optimizers = compat.torch.optimizers_of(base)
            if self._device_type != "cpu":  # an allocator has counted what was there before the optimizer was known
                new = [optimizer for optimizer in optimizers if optimizer not in self._known_optimizers]
                self._state_bytes += self._bytes_of(filter(compat.torch.came_with_state, new))
            self._known_optimizers.update(optimizers)
            state_bytes = self._bytes_of(optimizers)
            if state_bytes != self._state_bytes and any(state.plans for state in self._states.values()):
                for state in self._states.values():  # other bytes were in memory when these steps were measured
                    state.known.full.clear()
                self._forget_plans()
            else:
                for state in self._states.values():
                    state.known.grow(max(0, state_bytes - self._state_bytes))
            self._state_bytes = state_bytes
        if self._level is not None:
            self.known.begins_at(self._level, self._resident)

    def _bytes_of(self, optimizers: Iterable[torch.optim.Optimizer]) -> int:
        """Bytes of the optimizers' state on the devices of the model."""
        return held_bytes(self._devices, *optimizers)

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
        if planned.measures and (self._recorder is None or not self._recorder.tried):
            return  # the tightest plan is already enabled
        self._drop()
        tightest = self._trying(planned.shape, "warm-up")
        exchange(base, record, tightest.plan, tightest)

    def _begin(
        self, base: nn.Module, running: nn.Module, planned: Planned, tried: Mapping[str, Action], args: Any, kwargs: Any
    ) -> None:
        """Start to measure the step that begins now. `running` is the model whose forward begins, with its wrappers."""
        batch, optimizers = {"batch": (args, kwargs)}, compat.torch.optimizers_of(base)
        self._is_compiled = self._compiles or any(map(compat.compiler.is_compiled, running.modules()))
        if self._is_compiled:
            self._refuse_unmeasurable()
        meter = meter_for(self._devices, base, batch, *optimizers, timed_only=planned.phase == "time")
        if planned.phase != "check":
            number = (1 + self._is_compiled) * len(self._actions) + TIMED_STEPS
            text = f"measuring: up to {number} steps run under `{self._least}`, but for a few blocks"
            self._say("measures", f"hf_ckpt: {self._name}: {text}")
        self._recorder = _Recorder(base, meter, planned, tried, self._state, running)
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
        if compat.compiler.compiled_graphs() != recorder.graphs:
            return  # compiling takes time, and may take memory; the next step uses the new graphs
        levels, planned, known = recorder.levels, recorder.planned, recorder.state.known
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
                    self._least,
                    REST,
                )
            return
        self._level = level if levels.meter.counts else None
        forwards = tuple(self._forwards)
        recorder.state.expected[forwards[0]] = forwards
        batch = dataclasses.replace(planned.shape, forwards=forwards)
        if planned.phase == "check" and batch == planned.shape:
            self._check(planned, step)
        elif planned.phase == "time":
            known.learn_times(batch, step, recorder.tried)
        elif planned.phase == "measure full":
            known.learn_full(batch, step)
        elif planned.phase == "try actions" and known.learn_trial(batch, step, recorder.tried):
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
            self.plans[planned.shape] = dataclasses.replace(planned, measured_bytes=real)
        excess = real - prediction.peak_bytes
        if not planned.over and real > self.limit_bytes and excess > (0 if planned.moves else self.bias_bytes):
            self._biases[planned.moves] = excess + (self._biases[True] if planned.moves else 0)
            log.info(
                "hf_ckpt: a step needed %s more than was predicted, which is above the limit of %s; planned for less.",
                format_bytes(excess),
                format_bytes(self.limit_bytes),
            )
            self._forget_plans()

    # --- plans ---

    def _made(self, batch: Batch) -> Planned:
        """Make and hold the fastest plan for a batch, or the one with the lowest peak, from the measurements."""
        known, base = self.known, self._base()
        costs = known.costs(batch)
        device = this_device(self._devices)
        ways = with_offloading(costs, device.host_bandwidth, device.launch_nanoseconds, self._spec.host_budget)
        more = self._biases[True]
        static = [dataclasses.replace(way.static, parameters=way.static.parameters + more) for way in ways]
        if more:
            ways = [costs, *(dataclasses.replace(way, static=bytes_) for way, bytes_ in zip(ways, static, strict=True))]
        stacks = {block.stack for block in self._blocks.values()}
        if base is not None and len(stacks) == 1 and not (self._compiles or self._sharded):
            ways = [*ways, *in_segments(costs)]
        made, over = _best(ways, self.limit_bytes - self.bias_bytes, device_name(self._devices))
        actions = {block.name: action for block, action in made.actions}
        blocks = tuple((block, actions.get(name, self._least)) for name, block in self._blocks.items())
        plan = Plan(self._family, self._name, blocks, made.prediction, self._spec.head)
        table = tuple((str(action), kept, share) for action, kept, share in known.table(batch))
        planned = Planned(batch, self.limit_bytes, plan, self.bias_bytes, over, held=self.plans, costs=table)
        self._tell(planned)
        self.plans[batch] = planned
        if len(self.plans) > MOST_PLANS:
            del self.plans[next(iter(self.plans))]
        return planned

    def _forget_plans(self) -> None:
        for state in self._states.values():
            state.plans.clear()

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
            "hf_ckpt: %s: planned for %s %s %s (`%s`): %s; peak %s, step %s, from %d measured steps",
            planned.plan.model,
            planned.shape,
            "above" if planned.over else "within",
            format_bytes(planned.limit_bytes),
            self._spec.policy,
            planned.plan.summary(),
            format_bytes(prediction.peak_bytes),
            format_seconds(prediction.step_seconds),
            self.measured_steps,
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
    plans = []
    for costs in ways:
        for action in costs.actions:
            choices = (dict.fromkeys(names[number:], action) for number in range(len(names) + 1))
            fitting = next((chosen for chosen in choices if peak_of(costs, chosen) <= limit), None)
            if fitting is not None:
                plans.append(plan_of(costs, choice_of(costs, fitting), limit, device))
    if plans:
        return min(plans, key=lambda plan: plan.prediction.step_seconds if plan.prediction else 0.0), False
    lowest = min(ways, key=lambda costs: peak_of(costs, {}))
    return plan_of(lowest, choice_of(lowest, {}), limit, device), True
