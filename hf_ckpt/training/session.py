"""The policies `budget` and `auto` in a run: measure the first steps, then plan with the measurements.

A session sees every training batch before its forward. A batch size whose plan exists, or that a larger batch's plan
covers, runs under it. Otherwise the step is for the first of these phases that is still to be done, see `phases`:

| phase | its steps run under | it ends |
|---|---|---|
| *warm-up* | `full`, unmeasured | after two steps under DDP |
| *measure* | `full`; the recomputations try other actions | after two steps of about this size |
| *time* | a mixture of actions | after `TIMED_STEPS` steps |
| *race* | the plans that may be the fastest, in turn | after `RACE_STEPS` steps of each |
| *check* | the plan; its first step is measured | after that step |
| *plan* | the plan of the batch | |
| *given up* | `full` | |

If the peak of a checked step exceeds the budget, the limit of all later plans is lower by what it needed more than was
predicted. With compiled blocks, share 0 takes the place of `full`, single blocks try other shares in their forward, and
a step that compiles a graph is not used. A step that is not what was expected (an exception, another forward, gradients
that were not cleared) is not used either, and the next one is in the same phase again. After `MOST_FAILURES` such steps
in a row, nothing more is measured.

No batch ends a run: if no plan fits, the session uses the one with the lowest peak, and warns once.

What a step needs also depends on which parameters are trained, their bytes, and autocast's type. In another state of
the model, steps are measured again. Once an optimizer has stepped for the first time, so that its state exists, they
are measured again, too. Each rank has its own session, because actions do not change the collective operations. Under
ZeRO-3 they do, so all ranks use the plan of the rank with the largest batch.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import exchange
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.attach.record import Installation
from hf_ckpt.costs.costs import Costs, with_offloading
from hf_ckpt.costs.steps import Step
from hf_ckpt.engines.trials import Tries
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.forecast.devices import this_device
from hf_ckpt.logs import tell, warn_once
from hf_ckpt.measure.clocks import DeviceClock
from hf_ckpt.measure.levels import Levels, reader_for, step_of
from hf_ckpt.measure.live import held_bytes
from hf_ckpt.measure.memory import device_memory, keeps_statistics
from hf_ckpt.models.blocks import FoundBlocks, Look, find_blocks, vocabulary_head
from hf_ckpt.planner.budgets import best_plan
from hf_ckpt.spec.actions import COMPILED, FULL, Action, candidates
from hf_ckpt.spec.plan import Plan
from hf_ckpt.training.batches import Batch, Forward, forward_of
from hf_ckpt.training.measurements import TIMED_STEPS, Measurements
from hf_ckpt.training.phases import MOST_FAILURES, Known, Phase, phase_of
from hf_ckpt.training.race import Entered, Entrant, Race
from hf_ckpt.units import budget_bytes, format_bytes

log = logging.getLogger(__name__)

SIMPLE = Action("selective", ("attention",))
"""The action that a race always tries beside `full`: it keeps little, and recomputes in larger parts than others."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan that a session has enabled, and the batch for which it was made."""

    shape: Batch
    limit_bytes: int
    """The predicted peak that was allowed."""
    plan: Plan
    over: bool = False
    """Whether no plan fits; then this is the one with the lowest peak."""
    phase: Phase = Phase.PLAN
    """What this step is for."""
    tries: Mapping[str, Tries] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """What recomputations in this step try."""
    actions: Mapping[str, Action] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """Blocks that have another action than the one that keeps least, to be measured."""
    held: Mapping[Batch, Planned] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    """All plans of the run, by their batch."""
    measured_bytes: int | None = dataclasses.field(default=None, compare=False)
    """The measured peak of its first step; None before that step, and if steps are not measured."""

    @property
    def measures(self) -> bool:
        """Whether the plan is enabled for one step only, because it is not the plan of the batch yet."""
        return not self.phase.is_planned

    @property
    def measuring(self) -> str | None:
        """Why the plan is enabled for one step only; None if it is the plan of the batch."""
        if self.phase is Phase.GIVEN_UP:
            return f"gave up after {MOST_FAILURES} steps in a row that could not be measured"
        return f"measuring ({self.phase.value})" if self.measures else None

    @property
    def plans(self) -> dict[str, Plan]:
        """Return batch, in words -> its plan, for all plans of the run; the smallest batch comes first."""
        held = sorted(self.held.values(), key=lambda planned: planned.shape.elements)
        return {str(planned.shape): planned.plan for planned in held}


class _Recorder:
    """Measures the step that begins now.

    On a CPU a reader of memory slows every operation down, so it does not run longer than the step: until the graph of
    the step is gone, and while an optimizer steps. `stop` ends it for good, and so does the end of the model.
    """

    def __init__(self, base: nn.Module, levels: Levels, planned: Planned, modules: Mapping[str, nn.Module]) -> None:
        self.planned = planned
        self.levels = levels
        self.end_trials: Callable[[], None] = lambda: None
        self.graphs = compat.compiler.compiled_graphs()
        """How many graphs torch.compile had made when the step began."""
        reader = levels.reader
        gone = None if reader is None else reader.stop
        self.boundaries = Boundaries(modules, levels.mark, gone, vocabulary_head(base))
        handles: list[Any] = [self.boundaries]
        if reader is not None:
            reader.has_raised = self.boundaries.has_raised
            # An optimizer that steps within the backward must not end the measurement.
            after = lambda: reader.stop() if levels.last == "end" else None  # noqa: E731
            handles += compat.torch.call_around_optimizers(reader.start, after)

        def stop() -> None:
            for handle in handles:
                handle.remove()
            if reader is not None:
                reader.stop()

        self.stop = weakref.finalize(base, stop)
        self.stop.atexit = False
        self.begin_forward()
        levels.mark("begin")

    def begin_forward(self) -> None:
        """Measure from here until the graph of the forward is gone."""
        self.boundaries.begin()
        if self.levels.reader is not None:
            self.levels.reader.start()


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
        tile = None if self._spec.mlp == "full" else self._spec.mlp
        actions = candidates(compiled=self._least == COMPILED, tile=tile)
        self._actions = (*(action for action in actions if action != self._least), self._least)
        """The actions to choose from; the last one keeps least."""
        self.plans: dict[Batch, Planned] = {}
        """The plans of the run, by their batch."""
        self._begin_with(found, record)
        self.recorder: _Recorder | None = None
        """What measures the current step; None if it is not measured."""
        self._look = Look(base)
        self._looks: dict[Any, int] = {}
        """States of the model that were seen, and their numbers: see `Look`."""
        self._state: tuple[Any, int] = (None, 0)
        """The present state of the model, as in `Batch.state`."""
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
        self.measured_steps = 0
        self.entered: Entered | None = None
        """The plans that race, or that have raced."""
        self._settled = not compat.distributed.is_distributed()
        """Whether no rank waits for a race any more, so that ranks need not tell each other what they do."""
        self._chunks_help = False
        """Whether `"head": "auto"` would lower the peak of the head in the last measured step."""

    def _begin_with(self, found: FoundBlocks, record: Installation) -> None:
        """Forget all measurements and plans, and measure these blocks."""
        # Blocks of stacks for which a rule says what they get, and that.
        fixed = {block.name: action for block, action in record.plan.actions if self._spec.is_fixed(block.stack)}
        self.known = Measurements(found, self._actions, fixed)
        self.race = Race()
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
                self.known.forget_steps()
                self.plans.clear()
        look = self._look.now(self._device_type, self._sharded)
        if self._looks and look not in self._looks:
            log.info("hf_ckpt: the model has changed, so that its steps are measured again.")
            found = find_blocks(base)
            if found.modules != self.known.modules:  # layers were removed, added or replaced
                self._begin_with(found, record)
        self._state = look[0], self._looks.setdefault(look, len(self._looks))
        self._forwards = [forward]
        forwards = self._expected.get((self._state, forward), (forward,))
        batch = Batch(forwards, self._look.has_gradients(), self._state)
        if level:
            self.known.begins_at(batch, level)
        planned = self._next(batch)
        if self._together:
            planned = self._agreed(planned)
        elif not self._settled:
            planned = self._with_other_ranks(planned)
        for name, tries in planned.tries.items():
            record.functions.trials(name, tries)  # so that their hooks are on the blocks when the plan is
        exchange(base, record, planned)
        if planned.phase.is_measured:
            self._begin(record, base, running, planned, args, kwargs)

    def after_forward(self, output: Any) -> None:
        """A training forward has ended with an output, or has raised an error, without one."""
        if self.recorder is None:
            return
        if output is None:
            self._drop()
            self._failed()
            return
        self.recorder.boundaries.finish(output)

    def stop(self, record: Installation) -> None:
        """Stop measuring. If the last step has ended, store its measurements first."""
        if self.recorder is not None and self.recorder.levels.last == "end":
            self._finish(record)
        self._drop()
        if self._forget_optimizers is not None:
            self._forget_optimizers()
            self._forget_optimizers = None

    # --- the phases ---

    def _next(self, batch: Batch) -> Planned:
        """Return the plan for a batch, and what is measured in its step."""
        serving = self.plans.get(batch) or self._covering(batch)
        needs_warm_up = compat.distributed.is_distributed()  # DDP builds its gradient buckets in the first two steps
        known = Known(
            is_warm=self._warm_steps >= 2 or not needs_warm_up,
            failures=self._failures,
            has_plan=serving is not None,
            is_checked=serving is not None and (serving.shape != batch or serving.measured_bytes is not None),
        )
        phase = phase_of(known)
        if phase in (Phase.WARM_UP, Phase.GIVEN_UP):
            self._warm_steps += 1
            return self._trying(batch, phase)
        if serving is not None:
            return dataclasses.replace(serving, phase=phase)
        return self._measured(batch, known)

    def _measured(self, batch: Batch, known: Known) -> Planned:
        """Return what is measured next of a batch without a plan, or its plan."""
        tries, actions = self._to_measure(batch)
        known = dataclasses.replace(known, has_bytes=not (tries or actions))
        if phase_of(known) is Phase.MEASURE:
            return self._trying(batch, Phase.MEASURE, actions, tries)
        # If even `full` needs more than the limit, for the optimizer's step, a step may need as much.
        limit = max(self.limit_bytes, self.known.costs(batch).peak({}))
        timed = self.known.to_time(batch, limit) if self.known.timed < TIMED_STEPS else {}
        known = dataclasses.replace(known, has_times=not timed)
        if phase_of(known) is Phase.TIME:
            return self._trying(batch, Phase.TIME, timed)
        self.entered = self._enter(batch)
        ranks_wait = not self._settled or not compat.distributed.is_distributed()
        entrant = self.race.next(self.entered.entrants) if ranks_wait else None
        known = dataclasses.replace(known, has_raced=entrant is None)
        if entrant is not None and phase_of(known) is Phase.RACE:
            return Planned(batch, self.limit_bytes, entrant.plan, phase=Phase.RACE, held=self.plans)
        return self._made(self.entered)

    def _to_measure(self, batch: Batch) -> tuple[Mapping[str, Tries], Mapping[str, Action]]:
        """Return what recomputations try next, and what blocks try in their forward; both empty if nothing is left.

        The first step of a batch is always measured. Compiled blocks are not recomputed as a whole; nor can a
        recomputation under ZeRO-3 go on to its end, because it would release the weights that backward needs.
        """
        reference = self.known.reference(batch)
        in_forward = self._least == COMPILED or self._together
        if reference is None:
            nothing = dict.fromkeys(self.known.blocks, Tries())
            return (nothing if in_forward else self.known.to_show(batch) or nothing), {}
        is_new = reference[0] == batch and batch in self.known.full and batch not in self.known.tried
        if is_new and not in_forward:
            return self.known.to_try(batch), {}
        limit = max(self.limit_bytes, self.known.costs(batch).peak({}))
        return {}, self.known.to_run(batch, limit, everything=in_forward)

    def _covering(self, batch: Batch) -> Planned | None:
        """The plan of the smallest batch that covers this one; None without one, and if this one may do with less."""
        covering = [planned for shape, planned in self.plans.items() if shape.covers(batch)]
        serving = min(covering, key=lambda planned: planned.shape.elements, default=None)
        if serving is None or serving.shape.is_near(batch):
            return serving
        return serving if self._is_uniform(serving.plan, self._actions[0]) else None

    def _is_uniform(self, plan: Plan, action: Action) -> bool:
        """Whether a plan gives this action to all blocks for which no rule says what they get."""
        return all(chosen == action for block, chosen in plan.actions if block.name not in self.known.fixed)

    def _trying(
        self,
        batch: Batch,
        phase: Phase,
        actions: Mapping[str, Action] | None = None,
        tries: Mapping[str, Tries] | None = None,
    ) -> Planned:
        """The plan for one step of a phase before the plan: all blocks keep least, but for those in `actions`."""
        chosen = {**self.known.fixed, **(actions or {})}
        rows = tuple((block, chosen.get(name, self._least)) for name, block in self.known.blocks.items())
        plan = Plan(self._family, self._name, rows, head=self._spec.head)
        return Planned(
            batch, self.limit_bytes, plan, phase=phase, held=self.plans, tries=tries or {}, actions=actions or {}
        )

    def _agreed(self, planned: Planned) -> Planned:
        """Return the plan of the rank with the largest batch. All ranks must call it."""
        shown = sorted((name, str(tries)) for name, tries in planned.tries.items())
        ranks = compat.distributed.of_all_ranks((planned.shape.elements, planned.plan.to_dict(), shown))
        largest = max(ranks, key=lambda rank: rank[0])
        chosen = Plan.from_dict(largest[1])
        if chosen == planned.plan and largest[2] == shown:
            return planned
        return dataclasses.replace(planned, plan=chosen, phase=Phase.WARM_UP, tries={})

    def _with_other_ranks(self, planned: Planned) -> Planned:
        """Race in the same steps as all other ranks, and choose the same way to plan. All ranks must call it.

        The slowest rank decides, since the others wait for it. A rank that could race alone takes the prediction. Once
        all ranks have plans, they tell each other nothing more.
        """
        ranks = compat.distributed.of_all_ranks((planned.phase.value, self.race.ratios))
        phases = {phase for phase, _ in ranks}
        self._settled = phases <= {Phase.PLAN.value, Phase.GIVEN_UP.value}
        self.race.take_slowest([ratios for _, ratios in ranks])
        entered = self.entered
        if entered is None or entered.batch != planned.shape or planned.phase is Phase.PLAN:
            return planned
        races_alone = planned.phase is Phase.RACE and phases != {Phase.RACE.value}
        loses = planned.phase is Phase.CHECK and self.race.winner(entered.entrants).plan != planned.plan
        return self._made(entered) if races_alone or loses else planned

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
            return self.recorder.levels.last in ("forwarded", "returned") and self.recorder.boundaries.has_graph
        expected = self._expected.get((self._state, self._forwards[0]), ())
        return len(expected) > len(self._forwards) and expected[len(self._forwards)].stack == forward.stack

    def _expect(self, planned: Planned) -> None:
        """Expect the forwards of this step again, if it ran under `full`, or if the last one was a surprise, too.

        So steps that take turns with others do not keep each other from being measured.
        """
        forwards = tuple(self._forwards)
        self._surprises = 0 if forwards == planned.shape.forwards else self._surprises + 1
        is_first = planned.phase is Phase.MEASURE and not any(tries.last for tries in planned.tries.values())
        if is_first or self._surprises > 1:
            self._expected[planned.shape.state, forwards[0]] = forwards
            self._surprises = 0

    def _make_room(self, base: nn.Module, record: Installation) -> None:
        """Enable the tightest plan if another forward of the same step does not fit the current plan."""
        planned: Planned | None = record.planned
        if planned is None or Batch(planned.shape.forwards, True).covers(Batch(tuple(self._forwards), True)):
            return
        if planned.measures and planned.phase is not Phase.RACE and not planned.actions:
            return  # the tightest plan is already enabled
        self._drop()
        self._expect(planned)
        tightest = self._trying(planned.shape, Phase.WARM_UP)
        exchange(base, record, tightest)

    def _begin(
        self, record: Installation, base: nn.Module, running: nn.Module, planned: Planned, args: Any, kwargs: Any
    ) -> None:
        """Start to measure the step that begins now. `running` is the model whose forward begins, with its wrappers."""
        if any(map(compat.compiler.is_compiled, running.modules())):
            self._refuse_unmeasurable()
        if not self.measured_steps:
            tell("hf_ckpt: %s: measuring the first steps, under `%s`", self._name, self._least)
        modules = compat.compiler.outside_graphs(running, self.known.modules)
        if planned.phase in (Phase.TIME, Phase.RACE):
            levels = Levels(clock=DeviceClock(self._devices))
        else:
            optimizers = compat.torch.optimizers_of(base)
            levels = Levels(reader_for(self._devices, base, {"batch": (args, kwargs)}, *optimizers))
        if planned.phase is Phase.RACE:  # begin to end: the last block has the first backward
            modules = dict(list(modules.items())[-1:])
        self.recorder = _Recorder(base, levels, planned, modules)
        record.begin_trials(planned.tries, self.recorder.boundaries.mark)
        self.recorder.end_trials = record.end_trials
        self.measured_steps += 1

    def _drop(self) -> None:
        """Stop measuring the current step."""
        if self.recorder is None:
            return
        self.recorder.stop()
        self.recorder.end_trials()
        self.recorder = None

    def _failed(self) -> None:
        """A step could not be measured."""
        self._failures += 1
        if self._failures == MOST_FAILURES:
            log.warning(
                "hf_ckpt: the steps of this run cannot be measured, so that every block stays under `%s`. Give a "
                "policy that needs no measuring, such as `selective`.",
                self._least,
            )

    def _finish(self, record: Installation) -> int:
        """Store the measurements of the last step, if it was measured and has ended.

        Returns the bytes that are alive now, or 0 if they were not read.
        """
        recorder = self.recorder
        if recorder is None:
            return 0
        self._drop()
        reader = recorder.levels.reader
        level, outside = (0, 0) if reader is None else reader.read()
        outside = outside if record.passes == self._passes else 0  # else it may include an evaluation
        self._passes = record.passes
        step = step_of(recorder.levels.levels(), outside)
        # Compiling takes time, and may take memory. The next step uses the new graphs.
        if step is None or compat.compiler.compiled_graphs() != recorder.graphs:
            self._failed()
            return 0
        self._failures = 0
        self._chunks_help = recorder.boundaries.chunks_help and self._spec.head == "full" and not self._sharded
        self._expect(recorder.planned)
        self._learn(recorder, step)
        return level

    def _learn(self, recorder: _Recorder, step: Step) -> None:
        """Store what a measured step has shown."""
        known = self.known
        planned = recorder.planned
        batch = dataclasses.replace(planned.shape, forwards=tuple(self._forwards))
        is_as_planned = batch == planned.shape
        if planned.phase is Phase.TIME:
            known.learn_times(batch, step, planned.actions)
        elif planned.phase is Phase.RACE:
            if is_as_planned and self.entered is not None:
                self.race.learn(planned.plan, self.entered.entrants, recorder.levels.nanoseconds())
        elif planned.phase is Phase.CHECK:
            if is_as_planned:
                # What was alive only in this step, such as the graph of one that failed before, does not count.
                reference = known.reference(batch)
                start_bytes = step.start_bytes if reference is None else reference[1].start_bytes
                self._check(planned, start_bytes + step.peak_bytes - step.start_bytes)
        elif planned.actions:
            known.learn_actions(batch, step, planned.actions)
        elif not any(tries.last for tries in planned.tries.values()):
            known.learn(batch, step)
        elif is_as_planned:
            known.learn_trials(batch, step)

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

    def _enter(self, batch: Batch) -> Entered:
        """The fastest plan for a batch, or the one with the lowest peak, and the best simple ones that need no more."""
        device = this_device(self._devices)
        costs = self.known.costs(batch)
        costs = dataclasses.replace(costs, has_host=device.host_bandwidth > 0, chunks_help=self._chunks_help)
        ways = with_offloading(costs, device.host_bandwidth, device.launch_nanoseconds, self._spec.host_budget)
        first, hints = self._entrant(self._actions, ways, self.limit_bytes)
        entrants = [first]
        prediction = first.plan.prediction
        assert prediction is not None
        most = self._actions[0]
        for action in (most, self._least, SIMPLE):
            if action in self._actions:
                way = tuple(dict.fromkeys((most, action)))
                limit = max(self.limit_bytes, prediction.peak_bytes)
                entrant, too_much = self._entrant(way, [self.known.costs(batch, way)], limit)
                if not too_much:
                    entrants.append(entrant)
        return Entered(batch, tuple(entrants), tuple(hints))

    def _entrant(self, actions: tuple[Action, ...], ways: Sequence[Costs], limit: int) -> tuple[Entrant, Sequence[str]]:
        """The fastest plan with these costs, and what would lower its peak, if that is above a limit, in bytes."""
        made, hints = best_plan(ways, limit, compat.devices.device_name(self._devices))
        assert made.prediction is not None
        chosen = {**self.known.fixed, **{block.name: action for block, action in made.actions}}
        blocks = tuple((block, chosen.get(name, self._least)) for name, block in self.known.blocks.items())
        plan = Plan(self._family, self._name, blocks, made.prediction, self._spec.head)
        return Entrant(actions, plan, made.prediction.step_seconds), hints

    def _made(self, entered: Entered) -> Planned:
        """Hold the winner of a race as the plan of its batch, which is to be checked."""
        batch = entered.batch
        hints = entered.hints
        winner = self.race.winner(entered.entrants)
        assert winner.plan.prediction is not None
        prediction = dataclasses.replace(
            winner.plan.prediction, step_seconds=winner.seconds, budget_bytes=self.limit_bytes
        )
        plan = dataclasses.replace(winner.plan, prediction=prediction)
        planned = Planned(batch, self.limit_bytes, plan, bool(hints), Phase.CHECK, held=self.plans)
        self.plans[batch] = planned
        text = "hf_ckpt: %s: planned for %s (`%s`): %s; %s, from %d measured steps"
        tell(text, self._name, batch, self._spec.policy, plan.summary(), prediction, self.measured_steps)
        if hints:
            warn_once(
                log,
                "hf_ckpt: no plan fits into %s (%s). Such batches get the fastest plan near the lowest peak, %s. What "
                "would lower it: %s",
                format_bytes(self.limit_bytes),
                batch,
                format_bytes(prediction.peak_bytes),
                "; ".join(hints),
            )
        return planned
