"""Measures the times of the actions on this machine, in place of those that the device table predicts.

Two shallow models with random weights are trained, one some blocks deeper than the other, under each action in turn:
what the deeper one takes longer is the time of these blocks. The optimizer's step is timed by itself. The fastest of
all turns counts, because whatever else a machine does makes steps slower, never faster. Only times are replaced; bytes
stay as traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import trial
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.clocks import stopwatch
from hf_ckpt.measure.machine import device_name
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.prediction.batches import real_inputs, step_of_model
from hf_ckpt.prediction.costs import BlockCost, Costs, Key, Phase
from hf_ckpt.prediction.optimizers import optimizer_for
from hf_ckpt.prediction.question import Workload
from hf_ckpt.prediction.workload import real_model
from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Plan

DEPTHS = (1, 3)
"""Blocks in every stack of the two shallow models."""
REPEATS = 5
"""Turns, of which the fastest counts."""
StepSeconds = Callable[[int, Action], float]
"""(blocks in every stack, action of all of them) -> seconds of one forward and backward."""
OptimizerSeconds = Callable[[int], float | None]
"""Blocks in every stack -> seconds of the optimizer's step; None where it cannot be run."""


def depths_of(costs: Costs, wanted: tuple[int, int] = DEPTHS) -> tuple[int, int]:
    """Two depths for the shallow models: `wanted`, or less where a stack of the model has fewer blocks.

    Raises `HfCkptError` where a stack has only one block.
    """
    most = min(len(stack.blocks) for stack in costs.stacks)
    if most < 2:
        raise HfCkptError(
            "times of blocks are measured on models of two depths, but a stack of this one has one block."
        )
    high = min(wanted[1], most)
    return min(wanted[0], high - 1), high


class Timings:
    """Measures the times of every action in turns.

    Args:
        costs: traced, whose times are to be replaced.
        step_seconds: runs and times one forward and backward of a shallow model.
        optimizer_seconds: runs and times one step of its optimizer.
        depths: blocks in every stack of the two shallow models.
    """

    def __init__(
        self,
        costs: Costs,
        step_seconds: StepSeconds,
        optimizer_seconds: OptimizerSeconds = lambda depth: None,
        *,
        depths: tuple[int, int] = DEPTHS,
    ) -> None:
        self._costs, self._step, self._optimizer, self._depths = costs, step_seconds, optimizer_seconds, depths
        self._seconds: dict[tuple[Action, int], list[float]] = {(a, d): [] for a in costs.actions for d in depths}
        self._updates: dict[int, list[float]] = {depth: [] for depth in depths}

    def take(self) -> None:
        """One turn: time one step of every action at both depths, and one of the optimizer."""
        for action, depth in self._seconds:
            self._seconds[action, depth].append(self._step(depth, action))
        for depth, found in self._updates.items():
            taken = self._optimizer(depth)
            found += [] if taken is None else [taken]

    def costs(self) -> Costs:
        """The traced costs with the fastest times so far in place of the table's."""
        costs, (low, high) = self._costs, self._depths
        fastest = {key: min(values) for key, values in self._seconds.items()}
        block = {a: max(0.0, fastest[a, high] - fastest[a, low]) / (high - low) for a in costs.actions}
        ratios = [block[a] * 1e9 / max(1, _table_block(costs, number)) for number, a in enumerate(costs.actions)]
        around = max(0.0, fastest[costs.actions[0], low] - low * block[costs.actions[0]])
        rest = around * 1e9 / max(1, _table_rest(costs))
        count = len(self._seconds[costs.actions[0], low])
        note = f"times measured on {device_name()}: fastest of {count} turns of {low} and of {high} blocks a stack"
        return dataclasses.replace(
            _scaled(costs, ratios, rest), notes=(*costs.notes, note), optimizer_nanoseconds=self._update()
        )

    def _update(self) -> int:
        """Nanoseconds of the optimizer's step at the real depth; the table's where it cannot be run."""
        if not all(self._updates.values()):
            return self._costs.optimizer_nanoseconds
        (low, high), stacks = self._depths, self._costs.stacks
        first, last = (min(self._updates[depth]) for depth in (low, high))
        depth = sum(len(stack.blocks) for stack in stacks) / len(stacks)
        return round(1e9 * (first + max(0.0, last - first) / (high - low) * (depth - low)))


def measured(
    costs: Costs,
    step_seconds: StepSeconds,
    on_progress: Callable[[str], None] = lambda text: None,
    *,
    depths: tuple[int, int] = DEPTHS,
    optimizer_seconds: OptimizerSeconds = lambda depth: None,
) -> Costs:
    """`costs` with times measured in `REPEATS` turns in place of the table's.

    Args:
        costs: traced.
        step_seconds: runs and times one forward and backward of a shallow model.
        on_progress: called with a few words before each turn.
        depths: blocks in every stack of the two shallow models.
        optimizer_seconds: runs and times one step of the optimizer.
    """
    timings = Timings(costs, step_seconds, optimizer_seconds, depths=depths)
    for repeat in range(REPEATS):
        on_progress(f"timing blocks, {repeat + 1} of {REPEATS}")
        timings.take()
    return timings.costs()


class ShallowModels:
    """Shallow models of a workload with random weights, trained on this machine to be timed.

    They are made when they are first needed, and stay. They take the memory of a few blocks.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.device = compat.accelerator_type() or "cpu"
        self._models: dict[int, nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer | None] = {}

    def _at(self, depth: int) -> nn.Module:
        if depth not in self._models:
            self._models[depth] = real_model(self.workload, depth).to(self.device).train()
        return self._models[depth]

    def step_seconds(self, depth: int, action: Action, steps: int = 1, mlp: int | str = "full") -> float:
        """Seconds of one forward and backward with every block under `action`.

        Args:
            depth: blocks in every stack.
            action: of every block.
            steps: of which the fastest counts, behind one that warms up.
            mlp: how the feed-forward of each block runs, as `Plan.mlp`.
        """
        model = self._at(depth)
        step = step_of_model(self.workload, model)
        inputs = real_inputs(self.workload, model, self.device)
        dtype, enabled = step.autocast or torch.bfloat16, step.autocast is not None
        autocast = torch.autocast(self.device, dtype=dtype, enabled=enabled)
        return timed_step(model, inputs, action, autocast, step.loss, steps, mlp)

    def optimizer_seconds(self, depth: int) -> float | None:
        """Seconds of one step of the optimizer, behind one that makes its state.

        None where PyTorch has no optimizer of the name that the workload gives.
        """
        model = self._at(depth)
        if depth not in self._optimizers:
            self._optimizers[depth] = optimizer_for(self.workload, model)
        optimizer = self._optimizers[depth]
        if optimizer is None:
            return None
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        with stopwatch() as seconds:
            optimizer.step()
        return seconds[0]


def timed_step(
    model: nn.Module,
    inputs: Mapping[str, Any],
    action: Action,
    autocast: contextlib.AbstractContextManager[Any] | None = None,
    loss_of: Callable[[Any], torch.Tensor] | None = None,
    steps: int = 1,
    mlp: int | str = "full",
) -> float:
    """Seconds of one forward and backward with every block under `action`.

    Args:
        model: with weights, in train mode, plain or wrapped.
        inputs: keyword arguments of its forward.
        action: of every block.
        autocast: the context that the forward runs in.
        loss_of: makes the loss from the outputs of a model that computes none itself.
        steps: of which the fastest counts, behind one that warms up.
        mlp: how the feed-forward of each block runs, as `Plan.mlp`.
    """
    found = find_blocks(model)
    plan = Plan(found.family, found.model, tuple((block, action) for block in found.blocks), mlp=mlp)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with autocast or contextlib.nullcontext():
            outputs = model(**inputs)
            loss = outputs.loss if loss_of is None else loss_of(outputs)
        del outputs
        loss.backward()

    times = []
    with trial(model, plan):
        step()
        for _ in range(steps):
            with stopwatch() as seconds:
                step()
            times.append(seconds[0])
    return min(times)


def _table_block(costs: Costs, action: int) -> int:
    """Nanoseconds that the device table predicts for one block of every stack, forward and backward."""
    found = [stack.cost_at(max(0, len(stack.kinds) - 2), action) for stack in costs.stacks]
    return sum(cost.forward.nanoseconds + cost.backward.nanoseconds for cost in found)


def _table_rest(costs: Costs) -> int:
    """Nanoseconds that the device table predicts for everything outside the blocks, forward and backward."""
    around = [phase for stack in costs.stacks for phase in (stack.before, stack.before_backward)]
    return sum(phase.nanoseconds for phase in (*around, *costs.head))


def _scaled(costs: Costs, ratios: list[float], rest: float) -> Costs:
    """`costs` with the times of blocks multiplied by the ratio of their action, and all others by `rest`."""

    def times(phase: Phase, ratio: float) -> Phase:
        return dataclasses.replace(phase, nanoseconds=round(phase.nanoseconds * ratio))

    def blocks(found: Mapping[Key, BlockCost]) -> dict[Key, BlockCost]:
        return {
            key: dataclasses.replace(
                cost, forward=times(cost.forward, ratios[key[1]]), backward=times(cost.backward, ratios[key[1]])
            )
            for key, cost in found.items()
        }

    stacks = tuple(
        dataclasses.replace(
            stack,
            first=blocks(stack.first),
            inner=blocks(stack.inner),
            last=blocks(stack.last),
            before=times(stack.before, rest),
            before_backward=times(stack.before_backward, rest),
        )
        for stack in costs.stacks
    )
    return dataclasses.replace(costs, stacks=stacks, head=(times(costs.head[0], rest), times(costs.head[1], rest)))
