"""Makes plans from the costs of a step: for a budget, near the lowest peak, and for many budgets. Imports no torch."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from hf_ckpt.costs.costs import RECOMPUTED, Choice, Costs, Timeline, step_nanoseconds, timeline, with_segments
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.planner import policies
from hf_ckpt.planner.choose import fastest_choice, lowest_peak
from hf_ckpt.spec.actions import KEEP
from hf_ckpt.spec.plan import Plan, Prediction
from hf_ckpt.spec.reading import Segments
from hf_ckpt.units import format_bytes

NEARLY = 1.02
"""If no plan fits, the plan may need this multiple of the lowest peak: the last percents of memory cost most time."""
LONG = 8
"""Blocks of a stack from which several numbers of segments are compared."""


class Selection(NamedTuple):
    """An action for every call of a step, and what it costs."""

    costs: Costs
    """Of the step."""
    choice: Choice
    """The action of every call."""

    @property
    def timeline(self) -> Timeline:
        """Memory over the step."""
        return timeline(self.costs, self.choice)

    @property
    def nanoseconds(self) -> int:
        """Predicted time of an optimizer step."""
        return step_nanoseconds(self.costs, self.choice)

    def plan(self, budget_bytes: int | None = None, device: str = "") -> Plan:
        """The plan that gives every call its action, with the predicted cost.

        Args:
            budget_bytes: the peak that was allowed; None without a budget.
            device: what it was planned for: a row of the table of devices, or the name of the device that trains.
        """
        costs = self.costs
        moments = self.timeline
        prediction = Prediction(
            peak_bytes=moments.peak_bytes,
            step_seconds=self.nanoseconds / 1e9,
            tokens=costs.tokens * costs.accumulation,
            parts=tuple(moments.worst.parts().items()),
            budget_bytes=budget_bytes,
            device=device,
            stacks=tuple(moments.kept_bytes.items()),
        )
        chosen = {call.block: action for call, action in zip(costs.calls, self.choice, strict=True)}
        pairs = tuple((block, chosen.get(block, KEEP)) for block in costs.blocks or chosen)
        return Plan(costs.family, costs.model, pairs, prediction, costs.head_tokens)


class Planner:
    """Finds plans for one step.

    Args:
        costs: of the step, with each set of actions that no plan mixes with another; of equally fast plans, one with
            earlier costs is taken.
    """

    def __init__(self, costs: Sequence[Costs]) -> None:
        self._costs = costs

    @functools.cached_property
    def lowest_peak(self) -> int:
        """The lowest peak of any plan, in bytes."""
        return min(map(lowest_peak, self._costs))

    def within(self, budget_bytes: int) -> Selection:
        """The fastest actions whose predicted peak is at most `budget_bytes`.

        Raises `InfeasibleError` if no plan fits, with what fills the lowest peak and what would lower it.
        """
        choices = [(costs, fastest_choice(costs, budget_bytes)) for costs in self._costs]
        fitting = [Selection(costs, choice) for costs, choice in choices if choice is not None]
        if not fitting:
            raise _infeasible(min(self._costs, key=lowest_peak), budget_bytes)
        return min(fitting, key=lambda selection: selection.nanoseconds)

    def lowest(self) -> Selection:
        """The fastest actions with the lowest peak."""
        return self.within(self.lowest_peak)

    def within_or_lowest(self, budget_bytes: int) -> Selection:
        """The fastest actions within a budget; if none fit, those with the lowest peak."""
        return self.within(max(budget_bytes, self.lowest_peak))

    def nearest(self, budget_bytes: int) -> tuple[Selection, Sequence[str]]:
        """The fastest actions within a budget; if none fit, the fastest near the lowest peak, and what would lower it.

        A block that is called several times needs the same action in all its calls, which `within` cannot ensure,
        because it chooses call by call. Then the first blocks get one action, and the rest another.
        """
        calls = self._costs[0].calls
        if len({call.block.name for call in calls}) == len(calls):
            try:
                return self.within(budget_bytes), ()
            except InfeasibleError as error:
                return self.within(round(NEARLY * error.floor_bytes)), error.hints
        in_runs = [Selection(costs, choice) for costs in self._costs for choice in _in_two_runs(costs)]
        peaks = [selection.timeline.peak_bytes for selection in in_runs]
        hints = []
        most = budget_bytes
        if min(peaks) > budget_bytes:
            hints = [_fewer_tokens(self._costs[0])]
            most = round(NEARLY * min(peaks))
        fitting = [selection for selection, peak in zip(in_runs, peaks, strict=True) if peak <= most]
        return min(fitting, key=lambda selection: selection.nanoseconds), hints

    def frontier(self, points: int = 24) -> dict[int, Plan]:
        """Peak in bytes -> the fastest plan for it, for budgets from the lowest peak to that of no checkpointing, in
        even steps. Several of the `points` budgets may have one plan.
        """
        low = self.lowest_peak
        high = max(low, timeline(self._costs[0], self._costs[0].uniform(KEEP)).peak_bytes)
        budgets = (low + (high - low) * number // max(points - 1, 1) for number in range(points))
        plans = [self.within(budget).plan(budget) for budget in budgets]
        # Of equally fast plans, that with the lowest peak stays.
        by_seconds = {plan.prediction.step_seconds: plan for plan in reversed(plans) if plan.prediction}
        return {plan.prediction.peak_bytes: plan for plan in reversed(by_seconds.values()) if plan.prediction}


def _in_two_runs(costs: Costs) -> Iterator[Choice]:
    """The choices with one action for the first blocks, and the same or one that keeps more for the rest."""
    names = dict.fromkeys(call.block.name for call in costs.calls)
    places = {name: place for place, name in enumerate(names)}
    # `costs.actions` begins with what keeps most, and so does each pair.
    for rest, first in itertools.combinations_with_replacement(map(costs.uniform, costs.actions), 2):
        for number in range(len(places)):
            yield tuple(
                first[place] if places[call.block.name] < number else rest[place]
                for place, call in enumerate(costs.calls)
            )


def in_segments_of(costs: Costs, segments: Segments | None = None, fixed: Collection[str] = ()) -> list[Costs]:
    """The costs of plans whose blocks are recomputed in segments, one plan each.

    Empty if there are none: too few blocks are recomputed, a block is called several times, or segments do not work.

    Args:
        costs: of the step.
        segments: as `Spec.segments`; None for several numbers of segments, from that for which a step holds least.
        fixed: names of blocks whose action is not chosen.
    """
    if not costs.divides or len({call.block for call in costs.calls}) < len(costs.calls):
        return []
    longest = max(collections.Counter(call.block.stack for call in costs.calls).values())
    shares = [longest * share // 4 for share in (2, 3)] if longest >= LONG else []
    numbers: list[Segments] = ["sqrt", *shares] if segments is None else [segments]
    plans = []
    for base in costs.actions:
        if base.kind not in RECOMPUTED:
            continue
        pairs = zip(costs.calls, costs.uniform(base), strict=True)
        held = {call.block: action for call, action in pairs if call.block.name not in fixed}
        for number in numbers:
            actions = policies.in_segments(held, number)
            if any(action.made for action in actions.values()):
                plans.append(with_segments(costs, actions))
    return plans


def _fewer_tokens(costs: Costs) -> str:
    """What lowers the memory of activations."""
    smaller = "" if costs.sequences == 1 else "a smaller batch with more accumulated steps, or "
    return f"{smaller}shorter sequences"


def _infeasible(costs: Costs, budget_bytes: int) -> InfeasibleError:
    """The error for a budget below the lowest peak of `costs`."""
    moments = Planner([costs]).lowest().timeline
    parts = moments.worst.parts()
    hints = [_fewer_tokens(costs)]
    segments_bytes = min(map(lowest_peak, in_segments_of(costs)), default=moments.peak_bytes)
    if segments_bytes * NEARLY < moments.peak_bytes:
        hints.insert(0, f'segments ("segments": "sqrt"), with which the peak is {format_bytes(segments_bytes)}')
    # Then nothing helps that lowers the memory of blocks.
    if costs.static.always + costs.static.gradients > budget_bytes or "optimizer" in moments.worst.label:
        alone = f"weights, gradients and the optimizer alone need {format_bytes(costs.static.optimizer_peak_bytes)}"
        is_shared = costs.static.gathered > 0 or costs.static.master > 0
        by_ranks = "share them between more ranks" if is_shared else "shard them"
        hints = [f"{alone}: use LoRA, an optimizer with a smaller state or step, or {by_ranks}"]
    if moments.worst.label.startswith("head"):  # whose own memory no action of a block reduces
        # Advised only where a step has shown that it helps; TRL's losses, for example, never call the head.
        chunks = 'the head in chunks ("head": "auto"), or ' if costs.chunks_help else ""
        size = format_bytes(parts[f"temporary in {moments.worst.label}"])
        hints.append(f"the head and its loss are the peak, with {size}: {chunks}fewer tokens a micro-step")
    kept = parts["kept for backward"]
    if costs.has_host and kept and moments.peak_bytes - kept <= budget_bytes and len(costs.calls) > 1:
        hints.append(f"what blocks keep is {format_bytes(kept)} of it: a larger `host_budget` holds it in host memory")
    filled = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    above = f"{filled}), {format_bytes(moments.peak_bytes - budget_bytes)} too much. What would lower it:"
    lowest_bytes = format_bytes(moments.peak_bytes)
    message = f"no plan fits into {format_bytes(budget_bytes)}: the lowest peak is {lowest_bytes} ({above}"
    error = InfeasibleError(budget_bytes, moments.peak_bytes, parts, hints, message)
    error.notes = costs.notes
    return error
