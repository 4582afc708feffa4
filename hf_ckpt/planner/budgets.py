"""Finds the fastest plan within a budget, or the one with the lowest peak. Pure functions that do not import torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hf_ckpt.costs.costs import Choice, Costs
from hf_ckpt.costs.timeline import step_nanoseconds, worst_timeline
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.planner.choose import fastest, lowest_peak, smallest
from hf_ckpt.spec.actions import KEEP, Action
from hf_ckpt.spec.plan import Block, Plan, Prediction, numbers_of_runs
from hf_ckpt.units import format_bytes

OPTIMIZER_HINT = (
    "the optimizer's step is the peak, whatever blocks do: LoRA, an optimizer with a smaller state or without "
    "temporary copies (`fused=True`), or weights sharded over more devices"
)
GAIN = 0.01
"""Share of time that another way to train must save to be worth a change of its numbers."""


def plan_within(ways: Costs | Sequence[Costs], budget_bytes: int, device: str = "") -> Plan:
    """The fastest plan whose predicted peak is at most `budget_bytes`.

    Args:
        ways: the costs to plan with, or several candidates; of equally fast ones, the first is taken.
        budget_bytes: the peak that is allowed.
        device: name of the row whose speed was assumed.

    Raises `InfeasibleError` if no plan fits, with what fills the lowest peak and what would lower it.
    """
    return plan_of(*choice_within(ways, budget_bytes), budget_bytes, device)


def choice_within(ways: Costs | Sequence[Costs], budget_bytes: int) -> tuple[Costs, Choice]:
    """The candidate and the choice of actions of the fastest plan within a budget.

    Takes the arguments of `plan_within`, and raises `InfeasibleError` like it.
    """
    best: tuple[int, Costs, Choice] | None = None
    for costs in (candidates := several_of(ways)):
        choice = fastest(costs, budget_bytes)
        if choice is not None:
            nanoseconds = step_nanoseconds(costs, choice)
            if best is None or nanoseconds < best[0]:
                best = nanoseconds, costs, choice
    if best is None:
        raise _infeasible(lowest_of(candidates)[0], budget_bytes)
    return best[1:]


def plan_of_least(ways: Costs | Sequence[Costs], budget_bytes: int | None = None, device: str = "") -> Plan:
    """The fastest of the plans with the lowest peak, which can be that of the optimizer's step or of the head.

    Args:
        ways: the costs to plan with, or several candidates.
        budget_bytes: the peak that was allowed, for the plan's record.
        device: name of the row whose speed was assumed.
    """
    costs, choice = lowest_of(several_of(ways))
    return plan_of(costs, choice, budget_bytes, device)


def peak_of_least(ways: Costs | Sequence[Costs]) -> int:
    """The lowest peak of any plan, in bytes."""
    return min(map(lowest_peak, several_of(ways)))


def fits(ways: Costs | Sequence[Costs], budget_bytes: int) -> bool:
    """Whether some plan's predicted peak is at most `budget_bytes`."""
    return any(costs.static.beside <= budget_bytes and lowest_peak(costs) <= budget_bytes for costs in several_of(ways))


def several_of(ways: Costs | Sequence[Costs]) -> Sequence[Costs]:
    """The candidates as a sequence, even if there is only one."""
    return (ways,) if isinstance(ways, Costs) else ways


def lowest_of(several: Sequence[Costs]) -> tuple[Costs, Choice]:
    """The candidate and the choice of actions of the fastest plan with the lowest peak."""
    return choice_within(several, peak_of_least(several))


def plan_of(costs: Costs, choice: Choice, budget_bytes: int | None = None, device: str = "") -> Plan:
    """The plan that gives every block its chosen action, with the predicted cost.

    Args:
        costs: traced.
        choice: the action of every block.
        budget_bytes: the peak that was allowed; None without a budget.
        device: name of the row whose speed was assumed.
    """
    worst = worst_timeline(costs, choice)
    prediction = Prediction(
        peak_bytes=worst.peak_bytes,
        step_seconds=worst.nanoseconds / 1e9,
        tokens=costs.tokens * costs.accumulation,
        parts=tuple(worst.parts().items()),
        budget_bytes=budget_bytes,
        device=device,
    )
    pairs: list[tuple[Block, Action]] = []
    for number, (stack, chosen) in enumerate(zip(costs.stacks, choice, strict=True)):
        actions = [costs.actions[action] for action in chosen]
        if costs.segments:
            runs = numbers_of_runs(len(actions), min(costs.segments[number], len(actions)))
            actions = [dataclasses.replace(a, segment=run) for a, run in zip(actions, runs, strict=True)]
        pairs += zip(stack.blocks, actions, strict=True)
    if costs.blocks:
        chosen_for = {block.name: action for block, action in pairs}
        pairs = [(block, chosen_for.get(block.name, KEEP)) for block in costs.blocks]
    return Plan(costs.family, costs.model, tuple(pairs), prediction, costs.head_tokens, costs.mlp_tokens)


def above_budget(prediction: Prediction) -> str:
    """What fills a predicted peak above the budget, and what would lower it."""
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in prediction.parts if size)
    where = next((name for name, _ in prediction.parts if name.startswith("temporary in ")), "")
    ways = "smaller batches or shorter sequences"
    if "optimizer" in where:
        ways = OPTIMIZER_HINT
    elif "head" in where:
        ways = f'{ways}, or the head in chunks ("head": "auto")'
    return f"{parts}. What would lower it: {ways}"


def _infeasible(costs: Costs, budget_bytes: int) -> InfeasibleError:
    """The error for a budget below the lowest peak of `costs`."""
    worst = worst_timeline(costs, smallest(costs))
    parts = worst.parts()
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    found: list[str] = []
    static = costs.static
    if static.always + static.gradients > budget_bytes:
        weights = static.parameters + static.gathered
        frozen = static.gradients < weights / 10
        ways = ["a smaller model"] if frozen else ["LoRA", "an optimizer with a smaller state"]
        found.append(
            f"weights {format_bytes(weights)}, optimizer state {format_bytes(static.optimizer)} and gradients "
            f"{format_bytes(static.gradients)} alone need more: use {', '.join(ways)}, or shard them over more devices"
        )
    elif static.beside > budget_bytes:
        found.append(OPTIMIZER_HINT)
    else:
        found.append("a smaller batch with as many more accumulated steps, or shorter sequences")
    if worst.is_heads:
        chunks = 'the head in chunks ("head": "auto"), or ' if costs.head_tokens == "full" else ""
        size = format_bytes(parts[f"temporary in {worst.worst.label}"])
        found.append(f"the head and its loss are the peak, with {size}: {chunks}fewer tokens a micro-step")
    kept = parts["kept for backward"]
    kept *= worst.peak_bytes - kept <= budget_bytes  # otherwise, offloading all of it would not be enough
    if kept and not any(stack.on_device for stack in costs.stacks):
        found.append(f"what blocks keep is {format_bytes(kept)} of it: a `host_budget`, for host memory to hold that")
    elif kept and any(room < len(stack.blocks) - 1 for stack in costs.stacks for room in stack.most_blocks.values()):
        found.append(f"what blocks keep is {format_bytes(kept)} of it: a larger `host_budget`")
    error = InfeasibleError(
        budget_bytes,
        worst.peak_bytes,
        parts,
        found,
        f"no plan fits into {format_bytes(budget_bytes)}: the lowest peak is {format_bytes(worst.peak_bytes)} "
        f"({shown}), {format_bytes(worst.peak_bytes - budget_bytes)} too much. What would lower it:",
    )
    error.model, error.notes = costs.model, costs.notes
    return error
