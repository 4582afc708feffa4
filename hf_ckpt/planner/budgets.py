"""Finds the fastest plan within a budget, or the one with the lowest peak. Pure functions that do not import torch."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence

from hf_ckpt.costs.costs import Choice, Costs, step_nanoseconds, timeline
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.planner.choose import fastest, lowest_peak
from hf_ckpt.spec.actions import KEEP
from hf_ckpt.spec.plan import Plan, Prediction
from hf_ckpt.units import format_bytes

NEARLY = 1.02
"""If no plan fits, the plan may need this multiple of the lowest peak: the last percents of memory cost most time."""


def plan_within(ways: Sequence[Costs], budget_bytes: int, device: str = "") -> Plan:
    """The fastest plan whose predicted peak is at most `budget_bytes`.

    Args:
        ways: the candidates to plan with; of equally fast ones, the first is taken.
        budget_bytes: the peak that is allowed.
        device: name of the row whose speed was assumed.

    Raises `InfeasibleError` if no plan fits, with what fills the lowest peak and what would lower it.
    """
    return plan_of(*choice_within(ways, budget_bytes), budget_bytes, device)


def choice_within(ways: Sequence[Costs], budget_bytes: int) -> tuple[Costs, Choice]:
    """The candidate and the choice of actions of the fastest plan within a budget.

    Takes the arguments of `plan_within`, and raises `InfeasibleError` like it.
    """
    choices = [(costs, choice) for costs in ways if (choice := fastest(costs, budget_bytes))]
    if not choices:
        raise _infeasible(min(ways, key=lowest_peak), budget_bytes)
    return min(choices, key=lambda way: step_nanoseconds(*way))


def best_plan(ways: Sequence[Costs], budget_bytes: int, device: str = "") -> tuple[Plan, Sequence[str]]:
    """The plan of `plan_within`; if none fits, the fastest that is near the lowest peak, and what would lower that.

    A block that is called several times needs the same action in all its calls, which `plan_within` cannot ensure. Then
    the first blocks get one action, and the rest another.
    """
    names = {call.block.name for call in ways[0].calls}
    if len(names) == len(ways[0].calls):
        try:
            return plan_within(ways, budget_bytes, device), ()
        except InfeasibleError as error:
            most = round(NEARLY * error.floor_bytes)
            return plan_of(*choice_within(ways, most), budget_bytes, device), error.hints
    in_runs = [(costs, choice) for costs in ways for choice in _in_two_runs(costs)]
    peaks = [timeline(*way).peak_bytes for way in in_runs]
    hints = [_fewer_tokens(ways[0])] if min(peaks) > budget_bytes else []
    most = round(NEARLY * min(peaks)) if hints else budget_bytes
    fitting = [way for way, peak in zip(in_runs, peaks, strict=True) if peak <= most]
    return plan_of(*min(fitting, key=lambda way: step_nanoseconds(*way)), budget_bytes, device), hints


def _in_two_runs(costs: Costs) -> Iterator[Choice]:
    """The choices with one action for the first blocks, and the same or one that keeps more for the rest."""
    names = dict.fromkeys(call.block.name for call in costs.calls)
    places = {name: place for place, name in enumerate(names)}
    for rest, first in itertools.combinations_with_replacement(map(costs.uniform, costs.actions), 2):
        for number in range(len(places)):
            of_both = zip(costs.calls, first, rest, strict=True)
            yield tuple(one if places[call.block.name] < number else other for call, one, other in of_both)


def peak_of_least(ways: Sequence[Costs]) -> int:
    """The lowest peak of any plan, in bytes."""
    return min(map(lowest_peak, ways))


def frontier(ways: Sequence[Costs], points: int = 24) -> dict[int, Plan]:
    """Peak in bytes -> the fastest plan for it, for budgets from the lowest peak to that of no checkpointing, in even
    steps.

    Args:
        ways: the candidates to plan with.
        points: how many budgets; several may have one plan.
    """
    low = peak_of_least(ways)
    high = max(low, timeline(ways[0], ways[0].uniform(KEEP)).peak_bytes)
    plans = [plan_within(ways, low + (high - low) * number // max(points - 1, 1)) for number in range(points)]
    # Of equally fast plans, that with the lowest peak stays.
    by_seconds = {plan.prediction.step_seconds: plan for plan in reversed(plans) if plan.prediction}
    return {plan.prediction.peak_bytes: plan for plan in reversed(by_seconds.values()) if plan.prediction}


def plan_of(costs: Costs, choice: Choice, budget_bytes: int | None = None, device: str = "") -> Plan:
    """The plan that gives every call its chosen action, with the predicted cost.

    Args:
        costs: of the step.
        choice: the action of every call.
        budget_bytes: the peak that was allowed; None without a budget.
        device: name of the row whose speed was assumed.
    """
    course = timeline(costs, choice)
    stacks: collections.Counter[str] = collections.Counter()
    for call, action in zip(costs.calls, choice, strict=True):
        stacks[call.block.stack] += max(0, call.costs[action].kept_bytes)
    prediction = Prediction(
        peak_bytes=course.peak_bytes,
        step_seconds=step_nanoseconds(costs, choice) / 1e9,
        tokens=costs.tokens * costs.accumulation,
        parts=tuple(course.worst.parts().items()),
        budget_bytes=budget_bytes,
        device=device,
        stacks=tuple(stacks.items()),
    )
    chosen = {call.block: action for call, action in zip(costs.calls, choice, strict=True)}
    pairs = tuple((block, chosen.get(block, KEEP)) for block in costs.blocks or chosen)
    return Plan(costs.family, costs.model, pairs, prediction, costs.head_tokens)


def _fewer_tokens(costs: Costs) -> str:
    """What lowers the memory of activations."""
    smaller = "" if costs.sequences == 1 else "a smaller batch with as many more accumulated steps, or "
    return f"{smaller}shorter sequences"


def _infeasible(costs: Costs, budget_bytes: int) -> InfeasibleError:
    """The error for a budget below the lowest peak of `costs`."""
    lowest = fastest(costs, lowest_peak(costs))
    assert lowest is not None
    course = timeline(costs, lowest)
    parts = course.worst.parts()
    hints = [_fewer_tokens(costs)]
    if costs.static.always + costs.static.gradients > budget_bytes or "optimizer" in course.worst.label:
        alone = f"weights, gradients and the optimizer alone need {format_bytes(costs.static.beside)}"
        hints = [f"{alone}: use LoRA, an optimizer with a smaller state or step, or shard them"]
    if course.is_heads:
        chunks = 'the head in chunks ("head": "auto"), or ' if costs.chunks_help else ""
        size = format_bytes(parts[f"temporary in {course.worst.label}"])
        hints.append(f"the head and its loss are the peak, with {size}: {chunks}fewer tokens a micro-step")
    kept = parts["kept for backward"]
    if kept and course.peak_bytes - kept <= budget_bytes and len(costs.calls) > 1:
        host = "a larger `host_budget` holds it in host memory, or " if costs.has_host else ""
        less = "`full` with `segments` keeps less, for one more forward"
        hints.append(f"what blocks keep is {format_bytes(kept)} of it: {host}{less}")
    filled = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    above = f"{filled}), {format_bytes(course.peak_bytes - budget_bytes)} too much. What would lower it:"
    lowest_bytes = format_bytes(course.peak_bytes)
    message = f"no plan fits into {format_bytes(budget_bytes)}: the lowest peak is {lowest_bytes} ({above}"
    error = InfeasibleError(budget_bytes, course.peak_bytes, parts, hints, message)
    error.notes = costs.notes
    return error
