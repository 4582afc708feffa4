"""The policies `budget` and `auto` in a run: measure the first steps, then plan with the measurements.

A session sees every training batch before its forward, and does the first of these that applies:

1. If the batch is larger than all measured ones, it runs every block under `full` and measures the step.
2. If a kind of block has not been tried under some action, and there is room, one block of each such kind runs under
   that action, and all others under `full`.
3. It times two steps in which blocks have different actions.
4. It makes the fastest plan that fits, and measures its first step. If the peak exceeds the limit, the difference is
   subtracted from the limit of all later plans.

A smaller batch uses the plan of a larger one. When its size comes for the second time, its step is measured under
`full`, too. Batches between two measured sizes get plans from interpolated costs. No batch ends a run: if no plan fits,
the session uses the one with the lowest peak, and warns once.

If parameters are frozen, unfrozen, cast or added, or if autocast changes, the session measures everything again. For
another optimizer, it repeats the step under `full`.

Each rank has its own session, because actions do not change the collective operations. Under ZeRO-3 they do, so all
ranks use the plan of the rank with the largest batch.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import exchange, paused
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.attach.record import Installation
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.logs import PLANS
from hf_ckpt.measure.levels import Levels, Meter, can_be_measured, meter_for
from hf_ckpt.measure.machine import DeviceMemory, device_memory, device_name
from hf_ckpt.models.blocks import find_blocks, vocabulary_head
from hf_ckpt.planner.budgets import above_budget, plan_of, plan_of_least, plan_within
from hf_ckpt.planner.options import in_segments, with_host_memory
from hf_ckpt.prediction.costs import Costs
from hf_ckpt.prediction.machine import this_device
from hf_ckpt.prediction.measured import Step, step_of
from hf_ckpt.prediction.optimizers import held_bytes
from hf_ckpt.spec.actions import COMPILED, FULL, KEEP, Action, candidates
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec
from hf_ckpt.training.batches import Batch, Forward, forward_of, has_gradients, look_of
from hf_ckpt.training.measurements import Measurements, choice_of, peak_of
from hf_ckpt.training.traced import traced_costs
from hf_ckpt.units import budget_bytes, format_bytes, format_seconds

log = logging.getLogger(__name__)

NEAR = 0.8
"""Batches of at least this share of a plan's size use that plan."""
TIMED_STEPS = 2
SURE = 0.97
"""Share of the limit that a timed step may need. The rest is a margin: the need may be estimated from other blocks."""
MOST_PLANS = 64
"""The most plans in a run. The oldest is dropped first."""
MOST_SEEN = 4096
"""The most batch sizes that are counted."""
MOST_FAILURES = 8
"""After so many failed measurements in a row, the session stops measuring."""
LOGIT_BYTES = 16
"""The most additional bytes per logit that a whole head needs, compared with one in chunks."""


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
    known: Measurements
    tried: Mapping[str, Action] = dataclasses.field(default_factory=dict)
    """Blocks that do not run under `full`, with their actions."""
    times: bool = False
    """Whether the step is measured for its time."""
    planned: Planned | None = None
    """The plan whose peak is checked, if any."""


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
        self._devices = {parameter.device for parameter in base.parameters()}
        self._sharded = not compat.parameters_stay(base)
        head = vocabulary_head(found.base)
        self._together = compat.is_distributed() and compat.ranks_recompute_together(base)
        self._vocabulary = 0 if head is None else int(head.weight.shape[0])  # type: ignore[index]
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
        self.bias_bytes = 0
        self._meter: Meter | None = None
        self._recorder: tuple[Levels, Boundaries, _Measured] | None = None
        self._forwards: list[Forward] = []
        """Forwards of the current step."""
        self._resident = False
        self._padded = False
        self._waited = 0
        """Steps that were skipped at the beginning."""
        self._passes = 0
        """`Installation.passes` when the last measured step ended."""
        self._level: int | None = None
        """Bytes alive when the step begins; None if they were not read."""
        self._failures = 0
        self._said: set[str] = set()
        self._optimizers = compat.optimizer_changes()
        self._look: Any = None
        compiled = any(getattr(block, "_compiled_call_impl", None) is not None for block in found.modules.values())
        self._measures = self._spec.compile is None and not compiled and all(map(can_be_measured, self._devices))
        """Whether steps are measured: not if memory cannot be read, and not inside compiled code."""
        self._forget(base)

    def _forget(self, base: nn.Module) -> None:
        """Forget all measurements."""
        self._stop()
        actions = [action for action in candidates() if action != FULL]
        heads = {"full": ("full",), "auto": ("full", "auto")}.get(str(self._spec.head), (self._spec.head,))
        mlps = {"full": ("full",), "auto": ("full", "auto")}.get(str(self._spec.mlp), (self._spec.mlp,))
        self.ways = [
            Measurements(base, self._blocks, (*actions, FULL), self._name, head, mlp) for mlp in mlps for head in heads
        ]
        """Measurements of each way to run head and feed-forward; those with fewer chunks come first."""
        self._plans: dict[Batch, Planned] = {}
        """The plans of the run, by their batch."""
        self._expected: dict[Forward, tuple[Forward, ...]] = {}
        """First forward of a step -> all forwards of the last such step."""
        self._seen: set[Batch] = set()
        self._stepped = False
        """Whether an optimizer has stepped, so that its state exists."""
        self._accumulates = False
        self.measured_steps = 0

    # --- what attach calls ---

    @property
    def is_measuring(self) -> bool:
        """Whether the current step is measured."""
        return self._recorder is not None

    def on_batch(self, record: Installation, stack: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Choose and enable the plan for a training forward that is about to begin."""
        base = self._base()
        assert base is not None
        forward = forward_of(stack, args, kwargs, self._padded)
        self._padded |= forward.padded
        if self._goes_on(forward):
            self._forwards.append(forward)
            self._make_room(base, record)
            return
        self._level = None
        self._finish(record)
        self._look_at(base)
        if self._level is not None:
            for known in self.ways:
                known.begins_at(self._level, self._resident)
        self._forwards = [forward]
        batch = Batch(self._expected.get(forward, (forward,)), self._resident)
        planned, measured = self._next(batch) if self._measures else (self._by_traces(base, batch), None)
        if self._together:
            planned, measured = self._agreed(batch, planned, measured)
        planned = dataclasses.replace(planned, phase=_phase(planned, measured), steps_left=self._steps_left(planned))
        exchange(base, record, planned.plan, planned)
        if measured is not None and self._failures < MOST_FAILURES:
            self._begin(base, measured, args, kwargs)

    def _steps_left(self, planned: Planned) -> int:
        usual = len(self.ways[0].actions) + TIMED_STEPS
        return max(1, usual - self.measured_steps) if planned.measures else 0

    def stop(self, record: Installation) -> None:
        """Stop measuring. If the last step has ended, store its measurements first."""
        if self._recorder is not None and self._recorder[0].last == "end":
            self._finish(record)
        self._stop()

    def _stop(self) -> None:
        self._drop()
        if self._meter is not None:
            self._meter.stop()
            self._meter = None

    def lower(self, record: Installation) -> str | None:
        """After a step has run out of memory, enable a plan that needs a tenth less.

        Returns the change in words; None if there is no other plan.
        """
        base, planned = self._base(), record.planned
        if base is None or planned is None:
            return None
        self._drop()
        for known in self.ways:
            known.try_nothing_more()
        prediction = planned.plan.prediction
        used = planned.limit_bytes - planned.bias_bytes if prediction is None else prediction.peak_bytes
        self.limit_bytes = min(self.limit_bytes, round(used * 0.9) + self.bias_bytes)
        self._plans.clear()
        less = self._tightest(planned.shape)
        if any(known.covers(planned.shape) for known in self.ways):
            less = self._make(planned.shape)
            self._hold(less)
        if less.plan == record.plan:
            return None
        exchange(base, record, less.plan, less)
        return f"a plan for {format_bytes(less.limit_bytes)}" if not less.over else "the plan that needs least"

    # --- the state of the run ---

    def _look_at(self, base: nn.Module) -> None:
        """Forget measurements that no longer apply."""
        look = look_of(base, next(iter(self._devices)).type, self._sharded)
        if look != self._look:
            if self._look is not None:
                log.info("hf_ckpt: the model has changed, so that its steps are measured again.")
            self._look = look
            self._forget(base)
        resident = has_gradients(base)
        self._stepped |= self._resident and not resident
        self._accumulates |= resident
        self._resident = resident
        changes = compat.optimizer_changes()
        if changes != self._optimizers:
            self._optimizers, self._stepped = changes, True
            if self._plans:  # another optimizer holds a different number of bytes
                self._plans.clear()
                for known in self.ways:
                    known.full.clear()

    def _goes_on(self, forward: Forward) -> bool:
        """Whether a forward belongs to the current step."""
        if not self._forwards:
            return False
        if self._recorder is not None:
            return self._recorder[0].last == "forwarded"
        known = self._expected.get(self._forwards[0], ())
        return len(known) > len(self._forwards) and known[len(self._forwards)].stack == forward.stack

    def _make_room(self, base: nn.Module, record: Installation) -> None:
        """Enable the tightest plan if another forward of the same step does not fit the current plan."""
        planned: Planned | None = record.planned
        if planned is None or Batch(planned.shape.forwards, True).covers(Batch(tuple(self._forwards), True)):
            return
        if planned.measures and (self._recorder is None or not self._recorder[2].tried):
            return  # the tightest plan is already enabled
        self._drop()
        tightest = self._tightest(planned.shape)
        exchange(base, record, tightest.plan, tightest)

    # --- what comes next ---

    def _next(self, batch: Batch) -> tuple[Planned, _Measured | None]:
        """Return the plan for a batch, and what to measure in its step, if anything."""
        if compat.is_distributed() and self._waited < 2:
            self._waited += 1  # DDP builds its gradient buckets in the first step and rebuilds them in the second
            return self._tightest(batch), None
        if self._accumulates or compat.accumulated_steps() > 1:
            first, batch = not batch.resident, dataclasses.replace(batch, resident=True)
            if first and self._serving(batch) is None:  # steps with gradients in memory need more: those are measured
                return self._tightest(batch), None
        for known in reversed(self.ways):  # more chunks need less memory
            if known.covers(batch):
                found = self._tried_on(known, batch)
                if found is not None:
                    return found
            elif known is self.ways[-1] or self._has_room_for(known, batch):
                return self._tightest(batch, known), _Measured(batch, known)
        if batch.resident and not self._optimizer_has_stepped():
            self._say("waits", "hf_ckpt: planned after the first step of the optimizer, when its state is there.")
            return self._tightest(batch), None
        return self._plan(batch)

    def _optimizer_has_stepped(self) -> bool:
        """Whether the optimizer has its state."""
        base = self._base()
        if not self._stepped and base is not None:
            self._stepped = any(optimizer.state for optimizer in compat.optimizers_of(base))
        return self._stepped

    def _tried_on(self, known: Measurements, batch: Batch) -> tuple[Planned, _Measured] | None:
        """Return a step that tries or times actions; None if all are known."""
        # If even `full` needs more than the limit (for the optimizer's step), trials may need as much.
        floor = peak_of(known.costs(batch), {})
        tried = known.to_try(batch, max(self.limit_bytes, floor))
        if tried:
            return self._trying(batch, known, tried), _Measured(batch, known, tried)
        if known.timed < TIMED_STEPS and known.changes:
            tried = known.to_time(batch, max(round((self.limit_bytes - self.bias_bytes) * SURE), floor))
            if tried:
                return self._trying(batch, known, tried), _Measured(batch, known, tried, times=True)
        return None

    def _has_room_for(self, known: Measurements, batch: Batch) -> bool:
        """Whether a step under `full` fits with fewer chunks than the measured one."""
        tight = self.ways[-1]
        peak = peak_of(tight.costs(batch), {})
        if known.head != tight.head:
            peak += batch.tokens * self._vocabulary * LOGIT_BYTES
        if known.mlp != tight.mlp:  # in chunks, recomputing a block takes at least half of what it takes as a whole
            backwards = [call.backward.peak for call in tight.reference(batch)[1].calls if call.backward is not None]
            peak += 2 * max(backwards, default=0)
        return peak <= self.limit_bytes

    def _plan(self, batch: Batch) -> tuple[Planned, _Measured | None]:
        """Return the plan for a batch whose costs are known."""
        serving = self._serving(batch)
        known, again = self.ways[-1], batch in self._seen
        if len(self._seen) >= MOST_SEEN:
            self._seen.clear()
        self._seen.add(batch)
        if serving is not None:
            if batch.elements >= NEAR * serving.shape.elements or _keeps_all(serving.plan):
                return serving, None
            if not any(batch.covers(other) for other in known.full):
                if not again:
                    return serving, None
                return self._tightest(batch), _Measured(batch, known)
        made = self._make(batch)
        self._hold(made)
        return made, _Measured(batch, self._way_of(made.plan), planned=made)

    def _by_traces(self, base: nn.Module, batch: Batch) -> Planned:
        """Return the plan for a batch from a trace of the model, if steps are not measured."""
        serving = self._serving(batch)
        if serving is not None and (
            batch.elements >= NEAR * serving.shape.elements or _keeps_all(serving.plan) or "untraced" in self._said
        ):
            return serving
        try:
            with paused(base):
                ways = list(traced_costs(base, self._spec, batch))
        except HfCkptError as error:
            self._say(
                "untraced", f"hf_ckpt: no plan is made, because steps can be neither measured nor traced: {error}"
            )
            planned = dataclasses.replace(self._tightest(batch), measures=False)
        else:
            planned = self._planned(batch, ways)
        self._hold(planned)
        return planned

    def _agreed(self, batch: Batch, planned: Planned, measured: _Measured | None) -> tuple[Planned, _Measured | None]:
        """Return the plan of the rank with the largest batch. All ranks must call it."""
        ranks = compat.of_all_ranks((batch.elements, planned.plan.to_dict()))
        chosen = Plan.from_dict(max(ranks, key=lambda found: found[0])[1])
        if chosen == planned.plan:
            return planned, measured
        return dataclasses.replace(planned, plan=chosen, measures=True), None

    def _serving(self, batch: Batch) -> Planned | None:
        """Return the plan of the smallest batch that covers this one."""
        found = [planned for known, planned in self._plans.items() if known.covers(batch)]
        return min(found, key=lambda planned: planned.shape.elements, default=None)

    # --- measuring ---

    def _begin(self, base: nn.Module, measured: _Measured, args: Any, kwargs: Any) -> None:
        """Start to measure the step that begins now."""
        if measured.times or self._meter is None:
            self._stop()
            batch, optimizers = {"batch": (args, kwargs)}, compat.optimizers_of(base)
            self._meter = meter_for(self._devices, base, batch, *optimizers, timed_only=measured.times)
        if measured.planned is None:
            number = len(measured.known.actions) + TIMED_STEPS
            text = f"measuring: up to {number} steps run under `full`, but for a few blocks"
            self._say("measures", f"hf_ckpt: {self._name}: {text}")
        levels = Levels(self._meter)
        self._recorder = levels, Boundaries(measured.known.modules, levels.mark), measured
        self.measured_steps += 1
        levels.mark("begin")

    def _finish(self, record: Installation) -> None:
        """Store the measurements of the last step, if it was measured and has ended."""
        if self._recorder is None:
            return
        levels, _, measured = self._recorder
        level, outside = levels.outside()
        self._level = level if levels.meter.counts else None
        outside = outside if record.passes == self._passes else 0  # else it may include an evaluation
        self._passes = record.passes
        step = step_of(levels.levels(), outside)
        self._drop()
        if measured.times or measured.planned is not None:
            self._stop()
        self._failures = 0 if step is not None else self._failures + 1
        if step is None:
            if self._failures == MOST_FAILURES:
                log.warning("hf_ckpt: the steps of this run cannot be measured: every block stays under `full`.")
            return
        forwards = tuple(self._forwards)
        self._expected[forwards[0]] = forwards
        batch = dataclasses.replace(measured.batch, forwards=forwards)
        if measured.planned is not None:
            self._check(measured, step)
        elif measured.times:
            measured.known.learn_times(batch, step, measured.tried)
        elif not measured.tried:
            measured.known.learn_full(batch, step)
        elif measured.known.covers(batch):
            measured.known.learn_trial(batch, step, measured.tried)

    def _drop(self) -> None:
        if self._recorder is not None:
            self._recorder[1].remove()
            self._recorder = None

    def _check(self, measured: _Measured, step: Step) -> None:
        """Lower the limit if the peak of a step exceeded it."""
        planned = measured.planned
        assert planned is not None
        prediction = planned.plan.prediction
        if prediction is None or planned.over:
            return
        known = measured.known.full.get(planned.shape)
        start = step.start_bytes if known is None else max(known.start_bytes, step.start_bytes)
        real = start + (step.peak_bytes - step.start_bytes)
        if planned.shape in self._plans:
            self._hold(dataclasses.replace(planned, measured_bytes=real))
        excess = real - prediction.peak_bytes
        if prediction.peak_bytes + excess > self.limit_bytes and excess > self.bias_bytes:
            self.bias_bytes = excess
            log.info(
                "hf_ckpt: a step needed %s more than was predicted, which is above the limit of %s; planned for less.",
                format_bytes(excess),
                format_bytes(self.limit_bytes),
            )
            self._plans.clear()

    # --- plans ---

    def _make(self, batch: Batch) -> Planned:
        """Make the plan for a batch from the measurements."""
        ways = [known.costs(batch) for known in self.ways if known.covers(batch)]
        return self._planned(batch, self._with_more(ways))

    def _planned(self, batch: Batch, ways: list[Costs]) -> Planned:
        """Return the fastest plan for a batch, or the one with the lowest peak."""
        made, over = _best(ways, self.limit_bytes - self.bias_bytes)
        actions = {block.name: action for block, action in made.actions}
        blocks = tuple((block, actions.get(name, FULL)) for name, block in self._blocks.items())
        plan = dataclasses.replace(made, actions=blocks, family=self._family)
        known = self._way_of(plan)
        rows = known.table(batch) if known.covers(batch) else []
        table = tuple((str(action), kept, share) for action, kept, share in rows)
        planned = Planned(batch, self.limit_bytes, plan, self.bias_bytes, over, held=self._plans, costs=table)
        self._tell(planned)
        return planned

    def _way_of(self, plan: Plan) -> Measurements:
        """Return the measurements with the plan's way to run head and feed-forward."""
        return next((way for way in self.ways if (way.head, way.mlp) == (plan.head, plan.mlp)), self.ways[0])

    def _with_more(self, ways: list[Costs]) -> list[Costs]:
        """Return the candidates, with offloading and segments, whose costs are computed from other actions."""
        found = list(with_host_memory(ways, this_device(), self._spec.host_budget))
        base = self._base()
        if base is None or self._sharded or len({block.stack for block in self._blocks.values()}) > 1:
            return found
        return [*found, *(more for costs in ways for more in in_segments(costs))]

    def _tightest(self, batch: Batch, known: Measurements | None = None) -> Planned:
        return self._trying(batch, known or self.ways[-1], {})

    def _trying(self, batch: Batch, known: Measurements, tried: Mapping[str, Action]) -> Planned:
        least = FULL if self._spec.compile is None else COMPILED
        rows = tuple((block, tried.get(name, least)) for name, block in self._blocks.items())
        plan = Plan(self._family, self._name, rows, head=known.head, mlp=known.mlp)
        return Planned(batch, self.limit_bytes, plan, self.bias_bytes, measures=True, held=self._plans)

    def _hold(self, planned: Planned) -> None:
        if len(self._plans) >= MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[planned.shape] = planned

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
            f"from {self.measured_steps} measured steps" if self._measures else "predicted",
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


def _best(ways: list[Costs], limit: int) -> tuple[Plan, bool]:
    """Return the fastest plan within a limit and False; if none fits, the one with the lowest peak and True.

    A block that is called several times needs the same action in all its calls. The solver cannot ensure that; then
    the candidates are `full` on the first blocks and one other action on the rest.
    """
    device = device_name()
    if all(len({block.name for block in stack.blocks}) == len(stack.blocks) for c in ways for stack in c.stacks):
        try:
            return plan_within(ways, limit, device), False
        except InfeasibleError:
            return plan_of_least(ways, limit, device), True
    ways = [costs for costs in ways if not costs.segments]
    found = []
    for costs in ways:
        names = list(dict.fromkeys(block.name for block in costs.stacks[0].blocks))
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


def _keeps_all(plan: Plan) -> bool:
    return all(action == KEEP for _, action in plan.actions)
