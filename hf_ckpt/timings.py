"""Times of the actions, measured on this machine, in the place of a table's.

Two shallow models with random weights are really run, one two blocks deeper than the other, under each action in turn:
what the deeper one takes longer is two blocks. Only times are replaced; bytes stay as they were traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.families import base_model, find_blocks
from hf_ckpt.install import trial
from hf_ckpt.measure import device_name, stopwatch
from hf_ckpt.plan import Action, Plan
from hf_ckpt.setups import Setup, real_model, step_of_model
from hf_ckpt.timeline import BlockCost, Costs, Phase

DEPTHS = (1, 3)
REPEATS = 5
StepSeconds = Callable[[int, Action], float]
"""(blocks in every stack, action of all of them) -> seconds of one forward and backward."""


def measured(
    costs: Costs,
    step_seconds: StepSeconds,
    on_progress: Callable[[str], None] = lambda text: None,
    *,
    depths: tuple[int, int] = DEPTHS,
) -> Costs:
    """`costs` with times of this machine's accelerator, or of its CPU, in the place of a table's."""
    seconds: dict[tuple[Action, int], list[float]] = {(a, d): [] for a in costs.actions for d in depths}
    for repeat in range(REPEATS + 1):
        on_progress(f"timing blocks, {repeat} of {REPEATS}")
        for action, depth in seconds:
            taken = step_seconds(depth, action)
            if repeat:  # the first one warms up
                seconds[action, depth].append(taken)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    low, high = depths
    block = {a: max(0.0, medians[a, high] - medians[a, low]) / (high - low) for a in costs.actions}
    ratios = [block[a] * 1e9 / max(1, _table_block(costs, number)) for number, a in enumerate(costs.actions)]
    rest = max(0.0, medians[costs.actions[0], low] - low * block[costs.actions[0]]) * 1e9 / max(1, _table_rest(costs))
    note = f"times measured on {device_name()}: medians of {REPEATS} steps of {low} and of {high} blocks a stack"
    return dataclasses.replace(_scaled(costs, ratios, rest), notes=(*costs.notes, note))


def of_setup(setup: Setup) -> StepSeconds:
    """Steps of shallow models with random weights, on this machine. Takes the memory of a few blocks."""
    device = compat.accelerator_type() or "cpu"
    models: dict[int, nn.Module] = {}

    def step_seconds(depth: int, action: Action) -> float:
        if depth not in models:
            models[depth] = real_model(setup, depth).to(device).train()
        model = models[depth]
        step = step_of_model(setup, model)
        inputs: dict[str, Any] = {name: value.to(device) for name, value in step.batch.items()}
        if compat.wants_use_cache(base_model(model)):
            inputs["use_cache"] = False
        autocast = torch.autocast(device, dtype=step.autocast or torch.bfloat16, enabled=step.autocast is not None)
        return timed_step(model, inputs, action, autocast, step.loss)

    return step_seconds


def timed_step(
    model: nn.Module,
    inputs: Mapping[str, Any],
    action: Action,
    autocast: contextlib.AbstractContextManager[Any] | None = None,
    loss_of: Callable[[Any], torch.Tensor] | None = None,
) -> float:
    """Seconds of one forward and backward with every block under `action`."""
    found = find_blocks(model)
    plan = Plan(found.family, found.model, tuple((block, action) for block in found.blocks))
    model.zero_grad(set_to_none=True)
    with trial(model, plan), stopwatch() as seconds:
        with autocast or contextlib.nullcontext():
            outputs = model(**inputs)
            loss = outputs.loss if loss_of is None else loss_of(outputs)
        loss.backward()
    return seconds[0]


def _table_block(costs: Costs, action: int) -> int:
    """Nanoseconds that the table gives one block of every stack."""
    total = 0
    for stack in costs.stacks:
        key = stack.kinds[-1], action
        cost = next(found for (before, after), found in stack.costs.items() if after == key and before is not None)
        total += cost.forward.nanoseconds + cost.backward.nanoseconds
    return total


def _table_rest(costs: Costs) -> int:
    around = [phase for stack in costs.stacks for phase in (next(iter(stack.before.values())), stack.before_backward)]
    return sum(phase.nanoseconds for phase in (*around, *next(iter(costs.head.values()))))


def _scaled(costs: Costs, ratios: list[float], rest: float) -> Costs:
    def times(phase: Phase, ratio: float) -> Phase:
        return dataclasses.replace(phase, nanoseconds=round(phase.nanoseconds * ratio))

    def blocks(found: Mapping[Any, BlockCost]) -> dict[Any, BlockCost]:
        return {
            ways: dataclasses.replace(
                cost,
                forward=times(cost.forward, ratios[ways[1][1]]),
                backward=times(cost.backward, ratios[ways[1][1]]),
            )
            for ways, cost in found.items()
        }

    stacks = tuple(
        dataclasses.replace(
            stack,
            costs=blocks(stack.costs),
            last_backward={key: times(phase, ratios[key[1]]) for key, phase in stack.last_backward.items()},
            before={key: times(phase, rest) for key, phase in stack.before.items()},
            before_backward=times(stack.before_backward, rest),
        )
        for stack in costs.stacks
    )
    head = {key: (times(forward, rest), times(backward, rest)) for key, (forward, backward) in costs.head.items()}
    return dataclasses.replace(costs, stacks=stacks, head=head)
