"""Collects the costs of each stack from traced steps."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from hf_ckpt.costs.costs import BlockCost, Key, Phase
from hf_ckpt.prediction.tracer import Place, Tracer

Row = tuple[Key, ...]
"""The blocks of one stack of a traced model, in the order in which they run: (kind, action) of each."""


def short_row(kinds: Sequence[int]) -> tuple[int, ...]:
    """The kinds of a short stack that represents a whole one: the first block, the last one, and between them one block
    of each kind, after another of its kind if the real stack has such neighbours.

    Args:
        kinds: the kind of each block of the real stack.
    """
    if len(kinds) == 1:
        return tuple(kinds)
    neighbours = set(itertools.pairwise(kinds))
    inner = kinds[1:-1] or (kinds[:1] if kinds[0] == kinds[-1] else ())
    row = [kinds[0]]
    for kind in dict.fromkeys(inner):
        row += [kind] * (2 if row[-1] != kind and (kind, kind) in neighbours else 1)
    return (*row, kinds[-1])


class Run:
    """The result of one traced step: a forward and backward of a model with the blocks in `rows`."""

    def __init__(self, rows: Sequence[Row], tracer: Tracer) -> None:
        self.rows = tuple(rows)
        self.phases = tracer.phases
        self.starts = tracer.starts
        self.ends = tracer.ends
        self.outputs = tracer.outputs()
        self.lent = tracer.lent
        self.lent_before = 0
        """Bytes that the blocks of earlier stacks allocated and that are freed when the forward ends."""
        self.released = tracer.released
        self.held = tracer.held

    def copy(self) -> Run:
        """A copy for `stack_costs`, which changes `lent_before` and `released`."""
        copied = copy.copy(self)
        copied.released = copy.copy(self.released)
        return copied

    def phase(self, what: str, stack: int, block: int) -> Phase:
        """A part of the step, named as in `tracer.Place`; empty if that part did not run."""
        return self.phases.get((what, stack, block), Phase())

    def cost(self, stack: int, block: int) -> BlockCost:
        """The cost of the block at this position."""
        at = ("forward", stack, block)
        backward = self.phase("backward", stack, block)
        return BlockCost(self.phase(*at), backward, self.outputs.get(at, 0), self.lent.get(at, 0))

    def behind(self, what: str, stack: int) -> Phase:
        """The part `what` ("before" the next stack, or "head") after `stack`, as if it freed nothing that was allocated
        before the stack."""
        phase, held = self.phase(*((what, stack + 1, 0) if what == "before" else (what, 0, 0))), self.released[stack]
        return dataclasses.replace(phase, points=tuple((other + held, done) for other, done in phase.points))

    def held_behind(self, stack: int, block: int) -> int:
        """Bytes that the blocks after this one, in its stack and in later ones, allocate and hold to the end."""
        return sum(size for (_, *place), size in self.held.items() if tuple(place) > (stack, block))

    def other(self, place: Place) -> int | None:
        """Bytes alive when a part began, without finished gradients; None if it did not run."""
        found = self.starts.get(place)
        return None if found is None else found[0]


def stack_costs(stack: int, runs: Sequence[Run], kinds: int) -> dict[str, Any]:
    """The costs of one stack, as arguments of `StackCosts`.

    Args:
        stack: its position in the model.
        runs: one for each action, in which all blocks that may have the action have it. Their `lent_before` is updated
            for the next stack.
        kinds: how many kinds of blocks the stack has.
    """
    costs = [_costs(stack, run) for run in runs]
    turns: list[int] = []
    before_turns: list[int] = []
    shared: list[int] = []
    for run, found in zip(runs, costs, strict=True):
        turn, its_shared = _at_turn(stack, run, found)
        turns += turn
        shared += its_shared
        start = run.other(("before back", stack, 0))
        if start is not None:
            start -= run.held_behind(stack, -1)
            before_turns.append(start - run.starts["forward", stack, 0][0] + run.lent_before)
        run.lent_before += sum(cost.forward_only_bytes for cost in found)
    rows = [run.rows[stack] for run in runs]
    return {
        "first": {row[0]: found[0] for row, found in zip(rows, costs, strict=True)},
        "inner": {
            key: cost
            for row, found in zip(rows, costs, strict=True)
            for key, cost in zip(row[1:-1], found[1:-1], strict=True)
        },
        "last": {row[-1]: found[-1] for row, found in zip(rows, costs, strict=True)},
        "before": runs[0].behind("before", stack - 1) if stack else runs[0].phase("before", 0, 0),
        "before_backward": runs[0].phase("before back", stack, 0),
        "at_backward_bytes": max(turns, default=0),
        "shared_bytes": max((*shared, 0)),
        "before_at_backward_bytes": max(before_turns, default=0),
        "held": tuple(_held(stack, runs, kind) for kind in range(kinds)),
    }


def _held(stack: int, runs: Sequence[Run], kind: int) -> int:
    """Bytes that a block of this kind holds until the backward of the model ends."""
    found = (
        run.held.get(("forward", stack, place), 0)
        for run in runs
        for place, key in enumerate(run.rows[stack])
        if key[0] == kind
    )
    return max(found, default=0)


def _costs(stack: int, run: Run) -> list[BlockCost]:
    """The cost of each block of a run's stack.

    The forward of the last block includes bytes freed after the stack, so another block of its kind and action is used
    for it.
    """
    row = run.rows[stack]
    costs = [run.cost(stack, place) for place in range(len(row))]
    like = next((cost for key, cost in zip(row[-2::-1], costs[-2::-1], strict=True) if key == row[-1]), None)
    if len(row) > 1:
        costs[-1] = (
            dataclasses.replace(costs[-1], forward_only_bytes=0)
            if like is None
            else dataclasses.replace(like, backward=costs[-1].backward)
        )
    return costs


def _at_turn(stack: int, run: Run, costs: Sequence[BlockCost]) -> tuple[list[int], list[int]]:
    """A run's figures for `StackCosts.at_backward_bytes` and `StackCosts.shared_bytes`, one for each block with one."""
    lasting: list[int] = []
    """For each block, the bytes alive after its forward that outlive the forward of the model."""
    lent = run.lent_before
    for place, cost in enumerate(costs):
        at = ("forward", stack, place)
        lent += cost.forward_only_bytes
        # A block that the batch did not reach changed nothing.
        lasting.append(run.ends[at][0] - lent if at in run.ends else lasting[-1] if lasting else 0)
    turns: list[int] = []
    shared: list[int] = []
    turn = 0
    for place in range(len(costs) - 1, -1, -1):
        start = run.other(("backward", stack, place))
        if start is None:
            continue
        start -= run.held_behind(stack, place)
        above = start - lasting[place] + costs[place].output_bytes + run.released[stack]
        if place == len(costs) - 1:
            turn = above
            turns.append(turn)
        else:
            shared.append(above - turn)
    return turns, shared
