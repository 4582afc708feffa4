"""Makes the plans of a run from what is measured: those of the steps before the plan of a batch, and the plans that may
be the fastest for it."""

from __future__ import annotations

import collections
import dataclasses
import logging
import types
from collections.abc import Collection, Mapping, Sequence

import torch

from hf_ckpt import compat
from hf_ckpt.attach.record import Installation
from hf_ckpt.costs.costs import ON_DEVICE, Costs, with_offloading, with_segments
from hf_ckpt.engines.segments import are_others_hooks
from hf_ckpt.engines.trials import Attempts
from hf_ckpt.forecast.devices import this_device
from hf_ckpt.logs import warn_once
from hf_ckpt.models.blocks import FoundBlocks
from hf_ckpt.planner import policies
from hf_ckpt.planner.planner import Planner, Selection, in_segments_of
from hf_ckpt.spec.actions import COMPILED, FULL, Action, planned_actions
from hf_ckpt.spec.plan import Block, Plan, Prediction
from hf_ckpt.spec.spec import Spec
from hf_ckpt.training.batches import Batch
from hf_ckpt.training.budget import Budget
from hf_ckpt.training.measurements import Measurements
from hf_ckpt.training.phases import Actions, Entered, Entrant, Phase

log = logging.getLogger(__name__)

NO_ACTIONS: Mapping[str, Action] = types.MappingProxyType({})
NO_ATTEMPTS: Mapping[str, Attempts] = types.MappingProxyType({})
SIMPLE = Action("selective", ("attention",))
"""The action that a race always tries beside `full`: it keeps little, and recomputes in larger parts than others."""


def actions_to_choose(spec: Spec) -> tuple[Action, ...]:
    """Return the actions that plans of a run choose from, those that keep most first; the last one keeps least.

    Blocks that hf_ckpt compiles cannot get others than compiled ones.
    """
    least = policies.least(spec)
    tile = None if spec.mlp == "whole" else spec.mlp
    actions = planned_actions(compiled=least == COMPILED, tile=tile)
    return *(action for action in actions if action != least), least


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What a step is for, and the plan that it runs under."""

    phase: Phase
    batch: Batch
    """What the step is expected to be."""
    plan: Plan
    actions: Mapping[str, Action] = dataclasses.field(default_factory=dict)
    """Blocks that have another action than the one that keeps least, to be measured."""
    attempts: Mapping[str, Attempts] = dataclasses.field(default_factory=dict)
    """What recomputations in this step try."""
    of_batch: BatchPlan | None = None
    """The plan of the batch, in the phases in which the step runs under it."""

    @property
    def is_provisional(self) -> bool:
        """Whether this is not the plan of the batch, but one that a phase before it needs."""
        return self.phase not in (Phase.CHECK, Phase.PLAN)

    @property
    def is_over(self) -> bool:
        """Whether no plan of the batch fits."""
        return self.of_batch is not None and self.of_batch.is_over

    @property
    def keeps_least(self) -> bool:
        """Whether every block keeps least, but for those that a rule gives another action."""
        return self.is_provisional and self.phase is not Phase.RACE and not self.actions

    @property
    def shows_forwards(self) -> bool:
        """Whether this is the first measured step of a batch. All others are compared with it."""
        shows_backwards = any(attempts.last for attempts in self.attempts.values())
        return self.phase is Phase.MEASURE and not self.actions and not shows_backwards


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The plan of a batch, and of those that it covers."""

    batch: Batch
    limit_bytes: int
    """The predicted peak that was allowed."""
    plan: Plan
    is_over: bool = False
    """Whether no plan fits; then this is the one with the lowest peak."""
    is_checked: bool = False
    """Whether its first step was measured, or need not be."""
    measured_bytes: int | None = None
    """The measured peak of its first step; None before that step, and if that is not measured."""
    idle: frozenset[str] = frozenset()
    """Blocks that the steps that it was made from did not call."""
    without: Prediction | None = None
    """What the step is predicted to need without checkpointing; None if blocks save nothing."""

    def step(self, phase: Phase) -> StepPlan:
        """Return what a step under this plan is."""
        return StepPlan(phase, self.batch, self.plan, of_batch=self)


class PlanMaker:
    """Makes plans of a model from what is measured in the run.

    Args:
        blocks: of the model.
        record: the record of hf_ckpt on it.
        devices: its devices.
        measurements: what is known of its blocks.
        budget: the budget of the run.
        parameters_stay: whether every parameter stays on its device, unsharded.
    """

    def __init__(
        self,
        blocks: FoundBlocks,
        record: Installation,
        devices: Collection[torch.device],
        measurements: Measurements,
        budget: Budget,
        parameters_stay: bool,
    ) -> None:
        self._family = blocks.family
        self._name = blocks.class_name
        self._spec = record.spec
        self._head = record.plan.head
        self._devices = devices
        self._measurements = measurements
        self._budget = budget
        self._parameters_stay = parameters_stay
        self.chunks_help = False
        """Whether `"head": "auto"` would lower the peak of the head in the last measured step."""

    # --- steps before the plan of a batch ---

    def plan_with(self, actions: Mapping[str, Action], prediction: Prediction | None = None) -> Plan:
        """Return the plan that gives blocks these actions, by name; all others keep least, but for fixed ones."""
        measurements = self._measurements
        chosen = {**measurements.fixed, **actions}
        rows = tuple((block, chosen.get(name, measurements.least)) for name, block in measurements.blocks.items())
        return Plan(self._family, self._name, rows, prediction, self._head)

    def keeping_all(self) -> Plan:
        """Return the plan for blocks that save nothing: `keep` on all of them, which has nothing to predict."""
        measurements = self._measurements
        chosen = measurements.blocks.keys() - measurements.fixed.keys()
        return self.plan_with(dict.fromkeys(chosen, measurements.actions[0]))

    def keeping_least(
        self,
        batch: Batch,
        phase: Phase,
        actions: Mapping[str, Action] = NO_ACTIONS,
        attempts: Mapping[str, Attempts] = NO_ATTEMPTS,
    ) -> StepPlan:
        """Return the plan for one step before the plan of a batch: all blocks keep least, but for those in `actions`.

        `attempts` are what its recomputations try.
        """
        plan = self.plan_with(actions)
        divided = self._in_segments(dict(plan.actions))
        if divided:
            rows = tuple((block, divided.get(block, action)) for block, action in plan.actions)
            plan = dataclasses.replace(plan, actions=rows)
        return StepPlan(phase, batch, plan, actions, attempts)

    def peak_of_least(self, batch: Batch) -> int:
        """Return the peak of the step of a batch in which all blocks keep least, in the segments of the spec."""
        costs = self._measurements.costs(batch)
        divided = self._in_segments(dict.fromkeys((call.block for call in costs.calls), self._measurements.least))
        is_called_once = len({call.block for call in costs.calls}) == len(costs.calls)
        is_divided = is_called_once and any(action.made for action in divided.values())
        return min(costs.peak({}), with_segments(costs, divided).peak({})) if is_divided else costs.peak({})

    def limit_of_attempts(self, batch: Batch) -> int:
        """Return the peak that a step which tries something may have.

        If even what keeps least needs more than the limit, as for the optimizer's step, other actions cost nothing as
        long as they need no more than that.
        """
        return max(self._budget.limit_bytes, self.peak_of_least(batch))

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
        return self._parameters_stay and not (self._measurements.skips or are_others_hooks())

    # --- the plans that may be the fastest ---

    def enter(self, batch: Batch) -> Entered:
        """Return the fastest plan for a batch, or the one with the lowest peak, and the best simple ones that need no
        more."""
        entrants, hints = self._first_entrants(self.costs_with_host(batch))
        prediction = entrants[0].plan.prediction
        assert prediction is not None
        # If no plan fits, the first one is near the lowest peak. Others that need no more than it are as good.
        limit = max(self._budget.limit_bytes, prediction.peak_bytes)
        most = self._measurements.actions[0]
        for action in dict.fromkeys((most, self._measurements.least, FULL, SIMPLE)):
            if action in self._measurements.actions:
                allowed = tuple(dict.fromkeys((most, action)))
                entrant, hints_of_entrant = self._entrant(allowed, [self._measurements.costs(batch, allowed)], limit)
                if not hints_of_entrant:  # it fits
                    entrants.append(entrant)
        return Entered(batch, tuple(entrants), tuple(hints))

    def costs_with_host(self, batch: Batch) -> list[Costs]:
        """Return the costs for a batch, with each of the actions that offload, if there is host memory."""
        device = this_device(self._devices)
        costs = self._measurements.costs(batch)
        costs = dataclasses.replace(
            costs,
            has_host=device.host_bandwidth > 0,
            chunks_help=self.chunks_help,
            divides=self._divides,
        )
        host = device.host_bandwidth, device.launch_nanoseconds, self._spec.host_budget
        return with_offloading(costs, *host, self._measurements.fixed)

    def _first_entrants(self, with_host: Sequence[Costs]) -> tuple[list[Entrant], Sequence[str]]:
        """The fastest plan for a batch, and what would lower its peak if none fits.

        Segments take the time of a forward for each input that they make again. So a plan in segments is entered only
        where no other fits without host memory, and takes turns with one that offloads.

        Args:
            with_host: see `costs_with_host`.
        """
        limit = self._budget.limit_bytes
        first, hints = self._entrant(self._measurements.actions, with_host, limit)
        uses_host = any(action in ON_DEVICE for _, action in first.plan.actions)
        if not (hints or uses_host or self._spec.segments is not None):
            return [first], hints
        divided = in_segments_of(with_host[0], self._spec.segments, self._measurements.fixed)
        if not divided:
            self._say_without_segments(with_host[0])
            return [first], hints
        least = dataclasses.replace(self._measurements.least, made=True)
        segmented, hints_of_segmented = self._entrant((least,), divided, limit)
        if not hints_of_segmented:  # it fits
            return [segmented] if hints else [first, segmented], ()
        if not hints:
            return [first], hints
        lowest, hints = self._entrant(self._measurements.actions, [*with_host, *divided], limit)
        return [lowest], hints

    def _say_without_segments(self, costs: Costs) -> None:
        """Warn once if the plan has no segments, although the spec asks for them."""
        counts = collections.Counter(call.block.name for call in costs.calls)
        if self._spec.segments is not None and max(counts.values()) > 1:
            text = "hf_ckpt: the plan has no `segments`, because each step calls %s several times."
            warn_once(log, text, f"`{max(counts, key=lambda name: counts[name])}`")

    def _entrant(self, allowed: Actions, costs: Sequence[Costs], limit: int) -> tuple[Entrant, Sequence[str]]:
        """The fastest plan with these costs, and what would lower its peak, if that is above a limit, in bytes."""
        selection, hints = Planner(costs).nearest(limit)
        plan = selection.plan(limit, compat.devices.device_name(self._devices))
        prediction = plan.prediction
        assert prediction is not None
        # Costs know only blocks that a measured step has called.
        plan = self.plan_with({block.name: action for block, action in plan.actions}, prediction)
        return Entrant(allowed, plan, prediction.step_seconds), hints

    def without(self, batch: Batch, winner: Entrant) -> Prediction:
        """Return what the step of a batch is predicted to need without checkpointing."""
        costs = self._measurements.costs(batch)
        prediction = Selection(costs, costs.uniform(self._measurements.actions[0])).plan().prediction
        assert prediction is not None
        assert winner.plan.prediction is not None
        planned_seconds = winner.plan.prediction.step_seconds
        if not planned_seconds:
            return prediction
        # The race has timed whole steps; only the proportion of the two comes from the costs of their parts.
        seconds = winner.seconds * prediction.step_seconds / planned_seconds
        return dataclasses.replace(prediction, step_seconds=seconds)
