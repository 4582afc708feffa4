"""The policies `budget` and `auto` in a run: measure the first steps, then plan with the measurements.

A session sees every training batch before its forward. A batch size whose plan exists, or that a larger batch's plan
covers, runs under it. Otherwise the first of these phases that applies says what the step does. Each ends by itself, in
whatever order batches come:

| phase | its steps run under | it ends |
|---|---|---|
| *warm-up* | `full`, unmeasured | after two steps under DDP |
| *measure full* | `full` | when a step of about this size was measured |
| *try actions* | `full`, but one block of a kind under an action | when each kind was tried under each, where it fits |
| *time* | a mixture of actions | after `TIMED_STEPS` steps |
| *check* | the plan; its first step is measured | after that step |
| *plan* | the plan of the batch | |

If the peak of a checked step exceeds the budget, the limit of all later plans is lower by what it needed more than was
predicted. With compiled blocks, share 0 takes the place of `full`, and a step that compiles a graph is not used. A step
that is not what was expected (an exception, another forward, gradients that were not cleared) is not used either, and
the next one is in the same phase again. After `MOST_FAILURES` such steps in a row, nothing more is measured.

No batch ends a run: if no plan fits, the session uses the one with the lowest peak, and warns once.

What a step needs also depends on which parameters are trained, their bytes, and autocast's type. In another state of
the model, steps under `full` are measured again, and actions are tried on kinds of blocks that are new. Once an
optimizer has stepped for the first time, so that its state exists, steps under `full` are measured again, too. Each
rank has its own session, because actions do not change the collective operations. Under ZeRO-3 they do, so all ranks
use the plan of the rank with the largest batch.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import exchange
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.attach.record import Installation
from hf_ckpt.costs.costs import with_offloading
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.forecast.devices import this_device
from hf_ckpt.logs import tell, warn_once
from hf_ckpt.measure.clocks import Meter
from hf_ckpt.measure.levels import Levels, meter_for, step_of
from hf_ckpt.measure.live import held_bytes
from hf_ckpt.measure.memory import device_memory, keeps_statistics
from hf_ckpt.models.blocks import FoundBlocks, find_blocks, look_of, vocabulary_head
from hf_ckpt.planner.budgets import best_plan
from hf_ckpt.planner.segments import in_segments
from hf_ckpt.spec.actions import COMPILED, FULL, Action, candidates
from hf_ckpt.spec.plan import Plan
from hf_ckpt.training.batches import Batch, Forward, forward_of
from hf_ckpt.training.measurements import Measurements
from hf_ckpt.units import budget_bytes, format_bytes

log = logging.getLogger(__name__)

TIMED_STEPS = 2
SURE = 0.97
"""Share of the limit that a timed step may need. The rest is a margin: the need may be estimated from other blocks."""
MOST_FAILURES = 8
"""After so many steps in a row that could not be measured, nothing more is measured."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan that a session has enabled, and the batch for which it was made."""

    shape: Batch
    limit_bytes: int
    """The predicted peak that was allowed."""
    plan: Plan
    over: bool = False
    """Whether no plan fits; then this is the one with the lowest peak."""
    phase: str = "plan"
    """What the session does in this step: `warm-up`, `measure full`, `try actions`, `time`, `check` or `plan`."""
    held: Mapping[Batch, Planned] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """All plans of the run, by their batch."""
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
        modules: Mapping[str, nn.Module],
    ) -> None:
        self.planned, self.tried = planned, tried
        self.graphs = compat.compiler.compiled_graphs()
        """How many graphs torch.compile had made when the step began."""
        self.levels = levels = Levels(meter)
        self.boundaries = Boundaries(modules, levels.mark, meter.stop, vocabulary_head(base))
        meter.has_raised = self.boundaries.has_raised
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
        self._name, self._family = found.model, found.family
        self._devices = compat.distributed.devices_of_model(base)
        accelerators = compat.devices.accelerators(self._devices)
        self._device_type = accelerators[0].type if accelerators else "cpu"
        if len(accelerators) > 1 and not isinstance(self._spec.budget, int):  # one card is full before the others are
            cards = " and ".join(map(str, accelerators))
            raise HfCkptError(f"`auto` and shares are for one card, but the model is on {cards}. Give bytes instead.")
        self._sharded = not compat.distributed.parameters_stay(base)
        self._together = compat.distributed.is_distributed() and compat.distributed.ranks_recompute_together(base)
        held = held_bytes(self._devices, base, *compat.torch.optimizers_of(base))
        memory = device_memory(held, self._devices)
        self.budget_bytes = budget_bytes(self._spec.budget, memory.total_bytes)
        """The peak that steps may have."""
        if self.budget_bytes > memory.total_bytes:
            text = "hf_ckpt: the budget of %s is more than the memory, %s: steps within it may run out of memory."
            warn_once(log, text, format_bytes(self.budget_bytes), format_bytes(memory.total_bytes))
        if self._spec.policy == "auto":  # less what other processes hold
            self.budget_bytes -= memory.total_bytes - memory.available_bytes
        self.limit_bytes = self.budget_bytes
        """The predicted peak that plans may have: lower, once a step has needed more than was predicted."""
        if held > self.limit_bytes and not self._sharded:
            raise InfeasibleError(
                self.limit_bytes,
                held,
                {"weights and optimizer state": held},
                ["a smaller model, quantised weights, or parameters that are sharded over more devices"],
                f"no plan fits into {format_bytes(self.limit_bytes)}: the model and the state of its optimizer hold "
                f"{format_bytes(held)} by themselves. What would lower it:",
            )
        self._least = FULL if self._spec.compile is None else COMPILED
        """The action that keeps least. Blocks that hf_ckpt compiles cannot get others than compiled ones."""
        if self._least == COMPILED:
            self._refuse_unmeasurable()
        actions = candidates(compiled=self._least == COMPILED)
        self._actions = (*(action for action in actions if action != self._least), self._least)
        """The actions to choose from; the last one keeps least."""
        self.plans: dict[Batch, Planned] = {}
        """The plans of the run, by their batch."""
        self._begin_with(found, record)
        self.recorder: _Recorder | None = None
        """What measures the current step; None if it is not measured."""
        self._looks: dict[Any, int] = {}
        """States of the model that were seen, and their numbers: see `look_of`."""
        self._state: tuple[Any, int] = (None, 0)
        """The present state of the model, as in `Batch.state`."""
        self._seen: list[Batch] = []
        """Batches that came before, one of each size."""
        self._expected: dict[tuple[Any, Forward], tuple[Forward, ...]] = {}
        """(state of the model, first forward of a step) -> all forwards of the last such step."""
        self._surprises = 0
        """Steps in a row with other forwards than were expected."""
        self._forwards: list[Forward] = []
        """Forwards of the current step."""
        self._padded = False
        self._warm_steps = 0
        """Unmeasured steps at the beginning."""
        self._passes = 0
        """`Installation.passes` when the last measured step ended."""
        self._failures = 0
        """Steps in a row that could not be measured."""
        self._forget_optimizers: Any = None
        """Call it to see no more steps of optimizers."""
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """The optimizers that have stepped."""
        self._has_new_optimizer = False
        """Whether an optimizer has stepped for the first time since the last batch."""
        self._state_bytes = 0
        """Bytes of the optimizers' state when such an optimizer was last seen."""
        self._may_try = True
        """Whether actions may be tried: not once a step has run out of memory."""
        self.measured_steps = 0
        self._chunks_help = False
        """Whether `"head": "auto"` would lower the peak of the head in the last measured step."""

    def _begin_with(self, found: FoundBlocks, record: Installation) -> None:
        """Forget all measurements and plans, and measure these blocks."""
        # Blocks of stacks for which a rule says what they get, and that.
        fixed = {block.name: action for block, action in record.plan.actions if self._spec.is_fixed(block.stack)}
        self.known = Measurements(found, self._actions, fixed)
        self.plans.clear()

    def _refuse_unmeasurable(self) -> None:
        """Raise `HfCkptError` if the memory of compiled blocks cannot be measured."""
        reason = ""
        if not compat.transformers.HOOKS_STAY_OUTSIDE:
            reason = "this version of transformers runs a block together with its hooks; 5.23 does not"
        elif self._device_type == "cpu" or not all(map(keeps_statistics, self._devices)):
            reason = f"that needs an allocator that reports peaks, which {self._device_type} has not"
        elif self._sharded:
            reason = "parameters are split over ranks"
        if reason:
            raise HfCkptError(
                f"policy: {self._spec.policy} cannot measure compiled blocks: {reason}. Give a `share` with the policy "
                "`selective`, or do not compile blocks."
            )

    # --- what others call ---

    def on_batch(
        self, record: Installation, running: nn.Module, stack: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Choose and enable the plan for a training forward of `running` that is about to begin."""
        base = self._base()
        assert base is not None
        if self._forget_optimizers is None:  # of the whole process: a model does not refer to its optimizer
            handle = compat.torch.call_before_optimizers(self._on_optimizer)
            self._forget_optimizers = weakref.finalize(base, handle.remove)
        forward = forward_of(stack, args, kwargs, self._padded)
        self._padded |= forward.padded
        if self._goes_on(forward):
            self._forwards.append(forward)
            if self.recorder is not None:
                self.recorder.begin_forward()
            self._make_room(base, record)
            return
        level = self._finish(record)
        if self._has_new_optimizer:
            self._has_new_optimizer, before = False, self._state_bytes
            self._state_bytes = held_bytes(self._devices, *compat.torch.optimizers_of(base))
            if self._state_bytes > before:  # its state is alive from now on
                self.known.full.clear()
                self.plans.clear()
        look = look_of(base, self._device_type, self._sharded)
        if self._looks and look not in self._looks:
            log.info("hf_ckpt: the model has changed, so that its steps are measured again.")
            found = find_blocks(base)
            if found.modules != self.known.modules:  # layers were removed, added or replaced
                self._begin_with(found, record)
        self._state = look[0], self._looks.setdefault(look, len(self._looks))
        self._forwards = [forward]
        forwards = self._expected.get((self._state, forward), (forward,))
        has_gradients = any(parameter.grad is not None for parameter in base.parameters())
        batch = Batch(forwards, has_gradients, self._state)
        self.known.begins_at(batch, level)
        planned, tried = self._next(batch)
        if self._together:
            planned = self._agreed(planned)
        exchange(base, record, planned)
        if planned.phase not in ("warm-up", "plan") and self._failures < MOST_FAILURES:
            self._begin(base, running, planned, tried, args, kwargs)

    def after_forward(self, failed: bool) -> None:
        """A training forward has ended, or has raised an error."""
        if self.recorder is not None and failed:
            self._drop()
        elif self.recorder is not None:
            self.recorder.boundaries.finish()

    def stop(self, record: Installation) -> None:
        """Stop measuring. If the last step has ended, store its measurements first."""
        if self.recorder is not None and self.recorder.levels.last == "end":
            self._finish(record)
        self._drop()
        if self._forget_optimizers is not None:
            self._forget_optimizers()
            self._forget_optimizers = None

    def lower(self, planned: Planned) -> bool:
        """After a step has run out of memory: try no more actions, and plan for a tenth less than its plan needs.

        Returns whether that makes another plan.
        """
        self._drop()
        is_least = planned.over or self._is_uniform(planned.plan, self._least)
        makes_another = not is_least and (self._may_try or bool(self.plans))
        self._may_try = False
        prediction = planned.plan.prediction
        used = self.limit_bytes if prediction is None else prediction.peak_bytes
        self.limit_bytes = min(self.limit_bytes, round(0.9 * used))
        self.plans.clear()
        return makes_another

    # --- the phases ---

    def _next(self, batch: Batch) -> tuple[Planned, Mapping[str, Action]]:
        """Return the plan for a batch, and the blocks in it that do not run under `full` to be measured."""
        known, limit = self.known, self.limit_bytes
        serving = self.plans.get(batch) or self._covering(batch)
        if compat.distributed.is_distributed() and self._warm_steps < 2:
            self._warm_steps += 1  # DDP builds its gradient buckets in the first step and rebuilds them in the second
            return self._trying(batch, "warm-up"), {}
        if serving is not None:
            unchecked = serving.shape == batch and serving.measured_bytes is None
            return dataclasses.replace(serving, phase="check" if unchecked else "plan"), {}
        if known.reference(batch) is None:
            return self._trying(batch, "measure full"), {}
        # If even `full` needs more than the limit, for the optimizer's step, a step may need as much.
        least = known.costs(batch).peak({})
        tried = known.to_try(batch, max(limit, least)) if self._may_try else {}
        if tried:
            return self._trying(batch, "try actions", tried), tried
        tried = known.to_time(batch, max(round(limit * SURE), least)) if known.timed < TIMED_STEPS else {}
        if tried:
            return self._trying(batch, "time", tried), tried
        return dataclasses.replace(self._made(batch), phase="check"), {}

    def _covering(self, batch: Batch) -> Planned | None:
        """The plan of the smallest batch that covers this one; None without one, and if this one comes again, and may
        do with less than the larger one."""
        came_before = any(map(batch.is_near, self._seen))
        if not came_before:
            self._seen.append(batch)
        covering = [planned for shape, planned in self.plans.items() if shape.covers(batch)]
        serving = min(covering, key=lambda planned: planned.shape.elements, default=None)
        if serving is None or not came_before or serving.shape.is_near(batch):
            return serving
        return serving if self._is_uniform(serving.plan, self._actions[0]) else None

    def _is_uniform(self, plan: Plan, action: Action) -> bool:
        """Whether a plan gives this action to all blocks for which no rule says what they get."""
        return all(chosen == action for block, chosen in plan.actions if block.name not in self.known.fixed)

    def _trying(self, batch: Batch, phase: str, tried: Mapping[str, Action] | None = None) -> Planned:
        """The plan for one step of a phase before the plan: all blocks keep least, but for those in `tried`."""
        chosen = {**self.known.fixed, **(tried or {})}
        rows = tuple((block, chosen.get(name, self._least)) for name, block in self.known.blocks.items())
        plan = Plan(self._family, self._name, rows, head=self._spec.head)
        return Planned(batch, self.limit_bytes, plan, phase=phase, held=self.plans)

    def _agreed(self, planned: Planned) -> Planned:
        """Return the plan of the rank with the largest batch. All ranks must call it."""
        ranks = compat.distributed.of_all_ranks((planned.shape.elements, planned.plan.to_dict()))
        chosen = Plan.from_dict(max(ranks, key=lambda rank: rank[0])[1])
        if chosen == planned.plan:
            return planned
        return dataclasses.replace(planned, plan=chosen, phase="warm-up")

    # --- a step ---

    def _on_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer of the process is about to step."""
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            compat.torch.remember_optimizer(optimizer)
            self._has_new_optimizer = True

    def _goes_on(self, forward: Forward) -> bool:
        """Whether a forward belongs to the current step."""
        if not self._forwards:
            return False
        if self.recorder is not None:
            return self.recorder.levels.last == "forwarded" and self.recorder.boundaries.has_graph
        expected = self._expected.get((self._state, self._forwards[0]), ())
        return len(expected) > len(self._forwards) and expected[len(self._forwards)].stack == forward.stack

    def _expect(self, planned: Planned) -> None:
        """Expect the forwards of this step again, if it ran under `full`, or if the last one was a surprise, too.

        So steps that take turns with others do not keep each other from being measured.
        """
        forwards = tuple(self._forwards)
        self._surprises = 0 if forwards == planned.shape.forwards else self._surprises + 1
        if planned.phase == "measure full" or self._surprises > 1:
            self._expected[planned.shape.state, forwards[0]] = forwards
            self._surprises = 0

    def _make_room(self, base: nn.Module, record: Installation) -> None:
        """Enable the tightest plan if another forward of the same step does not fit the current plan."""
        planned: Planned | None = record.planned
        if planned is None or Batch(planned.shape.forwards, True).covers(Batch(tuple(self._forwards), True)):
            return
        if planned.measures and (self.recorder is None or not self.recorder.tried):
            return  # the tightest plan is already enabled
        self._drop()
        self._expect(planned)
        tightest = self._trying(planned.shape, "warm-up")
        exchange(base, record, tightest)

    def _begin(
        self, base: nn.Module, running: nn.Module, planned: Planned, tried: Mapping[str, Action], args: Any, kwargs: Any
    ) -> None:
        """Start to measure the step that begins now. `running` is the model whose forward begins, with its wrappers."""
        batch, optimizers = {"batch": (args, kwargs)}, compat.torch.optimizers_of(base)
        if any(map(compat.compiler.is_compiled, running.modules())):
            self._refuse_unmeasurable()
        meter = meter_for(self._devices, base, batch, *optimizers, timed_only=planned.phase == "time")
        if not self.measured_steps:
            text = "hf_ckpt: %s: measuring the first steps, under `%s` but for a few blocks"
            tell(text, self._name, self._least)
        modules = compat.compiler.outside_graphs(running, self.known.modules)
        self.recorder = _Recorder(base, meter, planned, tried, modules)
        self.measured_steps += 1

    def _drop(self) -> None:
        """Stop measuring the current step."""
        if self.recorder is not None:
            self.recorder.stop()
            self.recorder = None

    def _finish(self, record: Installation) -> int:
        """Store the measurements of the last step, if it was measured and has ended.

        Returns the bytes that are alive now, or 0 if they were not read.
        """
        recorder = self.recorder
        if recorder is None:
            return 0
        self._drop()
        if compat.compiler.compiled_graphs() != recorder.graphs:
            return 0  # compiling takes time, and may take memory; the next step uses the new graphs
        self._chunks_help = recorder.boundaries.chunks_help and self._spec.head == "full" and not self._sharded
        levels, planned, known = recorder.levels, recorder.planned, self.known
        level, outside = levels.meter.read()
        outside = outside if record.passes == self._passes else 0  # else it may include an evaluation
        self._passes = record.passes
        step = step_of(levels.levels(), outside)
        self._failures = 0 if step is not None else self._failures + 1
        if step is None:
            if self._failures == MOST_FAILURES:
                log.warning(
                    "hf_ckpt: the steps of this run cannot be measured, so that every block stays under `%s`. Give a "
                    "policy that needs no measuring, such as `selective`.",
                    self._least,
                )
            return 0
        self._expect(planned)
        batch = dataclasses.replace(planned.shape, forwards=tuple(self._forwards))
        if planned.phase == "check" and batch == planned.shape:
            # What was alive only in this step, such as the graph of one that failed before, does not count.
            reference = known.reference(batch)
            start_bytes = step.start_bytes if reference is None else reference[1].start_bytes
            self._check(planned, start_bytes + step.peak_bytes - step.start_bytes)
        elif planned.phase == "time":
            known.learn_times(batch, step, recorder.tried)
        elif planned.phase == "measure full":
            known.learn_full(batch, step)
        elif planned.phase == "try actions" and known.learn_trial(batch, step, recorder.tried):
            self.plans.clear()  # there may be faster ones now
        return level

    def _check(self, planned: Planned, peak_bytes: int) -> None:
        """Store the measured peak of a plan's first step. Lower the limit if it exceeds the budget."""
        assert planned.plan.prediction is not None
        excess = peak_bytes - planned.plan.prediction.peak_bytes
        if planned.shape in self.plans:
            self.plans[planned.shape] = dataclasses.replace(planned, measured_bytes=peak_bytes)
        if not planned.over and peak_bytes > self.budget_bytes and self.budget_bytes - excess < self.limit_bytes:
            self.limit_bytes = self.budget_bytes - excess
            text = "hf_ckpt: a step needed %s more than was predicted, above the budget of %s; planned for less."
            log.info(text, format_bytes(excess), format_bytes(self.budget_bytes))
            self.plans.clear()

    # --- plans ---

    def _made(self, batch: Batch) -> Planned:
        """Make and hold the fastest plan for a batch, or the one with the lowest peak, from the measurements."""
        device = this_device(self._devices)
        costs = dataclasses.replace(
            self.known.costs(batch), has_host=device.host_bandwidth > 0, chunks_help=self._chunks_help
        )
        ways = with_offloading(costs, device.host_bandwidth, device.launch_nanoseconds, self._spec.host_budget)
        stacks = {block.stack for block in self.known.blocks.values()}
        if len(stacks) == 1 and not (self._least == COMPILED or self._sharded):
            ways = [*ways, *in_segments(costs)]
        made, hints = best_plan(ways, self.limit_bytes, compat.devices.device_name(self._devices))
        actions = {**self.known.fixed, **{block.name: action for block, action in made.actions}}
        blocks = tuple((block, actions.get(name, self._least)) for name, block in self.known.blocks.items())
        plan = Plan(self._family, self._name, blocks, made.prediction, self._spec.head)
        planned = Planned(batch, self.limit_bytes, plan, bool(hints), held=self.plans)
        self.plans[batch] = planned
        assert made.prediction is not None
        text = "hf_ckpt: %s: planned for %s (`%s`): %s; %s, from %d measured steps"
        tell(text, self._name, batch, self._spec.policy, plan.summary(), made.prediction, self.measured_steps)
        if hints:
            warn_once(
                log,
                "hf_ckpt: no plan fits into %s (%s). Such batches get the fastest plan near the lowest peak, %s. What "
                "would lower it: %s",
                format_bytes(self.limit_bytes),
                batch,
                format_bytes(made.prediction.peak_bytes),
                "; ".join(hints),
            )
        return planned
