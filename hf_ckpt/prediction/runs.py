"""What traced steps showed of each stack, gathered into the stack's costs."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from hf_ckpt.prediction.costs import BlockCost, Key, Phase
from hf_ckpt.prediction.tracer import Place, Tracer
from hf_ckpt.prediction.walks import Walk

_Pair = tuple[Key | None, Key]
"""(key of the block before it, or None for the first block; key of the block)."""


class Run:
    """What one traced step showed: a forward and backward of a short model whose stacks follow `walks`."""

    def __init__(self, walks: Sequence[Walk], tracer: Tracer) -> None:
        self.walks = tuple(walks)
        self.phases = tracer.phases
        self.starts = tracer.starts
        self.ends = tracer.ends
        self.outputs = tracer.outputs()
        self.lent = tracer.lent
        self.lent_before = 0
        """Bytes that the blocks of earlier stacks made and that are freed when the forward ends."""
        self.released = tracer.released
        self.held = tracer.held

    def copy(self) -> Run:
        """The same, to gather costs from, which changes `lent_before` and `released`."""
        copied = copy.copy(self)
        copied.released = copy.copy(self.released)
        return copied

    def phase(self, what: str, stack: int, block: int) -> Phase:
        """A part of the step, named as in `tracer.Place`; empty where that part was not run."""
        return self.phases.get((what, stack, block), Phase())

    def cost(self, stack: int, block: int) -> tuple[int, int]:
        """(bytes that a block leaves alive behind its forward, nanoseconds of its forward and backward)."""
        forward, backward = self.phase("forward", stack, block), self.phase("backward", stack, block)
        return forward.net, forward.nanoseconds + backward.nanoseconds

    def behind(self, what: str, stack: int) -> Phase:
        """The part `what` ("before" the next stack, or "head") behind `stack`, as if it freed nothing that was made
        before the stack.

        Whether it does depends on the stack's first block, but this phase is kept for each key of the last block.
        """
        phase, held = self.phase(*((what, stack + 1, 0) if what == "before" else (what, 0, 0))), self.released[stack]
        return dataclasses.replace(phase, points=tuple((other + held, done) for other, done in phase.points))

    def held_behind(self, stack: int, block: int) -> int:
        """Bytes that the blocks behind one made, in its stack and in later ones, and that last to the end."""
        return sum(size for (_, *place), size in self.held.items() if tuple(place) > (stack, block))

    def other(self, place: Place) -> int | None:
        """Bytes alive when a part began, finished gradients not counted; None where it was not run."""
        found = self.starts.get(place)
        return None if found is None else found[0]


def stack_costs(
    stack: int, runs: Sequence[Run], gradients: Sequence[int], row: Sequence[int], choices: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What the runs showed of one stack, as arguments of `StackCosts`.

    Args:
        stack: its position in the model.
        runs: which together show every action behind every other, as `walks_of` arranges.
        gradients: kind -> bytes of the gradients of one block's parameters.
        row: the kind of each block of the real stack.
        choices: kind -> its actions, as positions in `Costs.actions`.
    """
    costs = _costs_inside(stack, runs)
    last_backward: dict[Key, Phase] = {}
    before: dict[Key | None, Phase] = {}
    turns: list[int] = []
    before_turns: list[int] = []
    shared: list[int] = []
    for run in runs:
        walk = run.walks[stack]
        if stack:
            before[run.walks[stack - 1][-1]] = run.behind("before", stack - 1)
        else:
            before[None] = run.phase("before", 0, 0)
        last_backward[walk[-1]] = run.phase("backward", stack, len(walk) - 1)
        turn, its_shared = _at_turn(stack, run, costs)
        turns += turn
        shared += its_shared
        start = run.other(("before back", stack, 0))
        if start is not None:
            start -= run.held_behind(stack, -1)
            before_turns.append(start - run.starts["forward", stack, 0][0] + run.lent_before)
    first = runs[0]
    return {
        "costs": _with_unseen(costs, row, choices),
        "last_backward": last_backward,
        "gradients": tuple(gradients),
        "before": before,
        "before_backward": first.phase("before back", stack, 0),
        "before_gradients": first.phase("before back", stack, 0).gradients,
        "turn_bytes": max(turns, default=0),
        "shared_bytes": max((*shared, 0)),
        "before_turn_bytes": max(before_turns, default=0),
        "held": tuple(_held(stack, runs, kind) for kind in range(len(gradients))),
    }


def _held(stack: int, runs: Sequence[Run], kind: int) -> int:
    """Bytes that a block of a kind holds until the backward of the model ends."""
    found = (
        run.held.get(("forward", stack, place), 0)
        for run in runs
        for place, key in enumerate(run.walks[stack])
        if key[0] == kind
    )
    return max(found, default=0)


def ways_of(walk: Walk) -> list[_Pair]:
    """For each block of a walk: (key of the block before it, or None; key of the block)."""
    return list(zip((None, *walk), walk, strict=False))


def _costs_inside(stack: int, runs: Sequence[Run]) -> dict[_Pair, BlockCost]:
    """The costs of blocks behind which another block runs; of a walk of one block, of that one."""
    costs: dict[_Pair, BlockCost] = {}
    for run in runs:
        walk = run.walks[stack]
        for place, (previous, key) in enumerate(ways_of(walk)[:-1] if len(walk) > 1 else ways_of(walk)):
            at, backward = ("forward", stack, place), run.phase("backward", stack, place)
            costs[previous, key] = BlockCost(run.phase(*at), backward, run.outputs.get(at, 0), run.lent.get(at, 0))
    return costs


def _lasting(stack: int, run: Run, costs: dict[_Pair, BlockCost]) -> list[int]:
    """Bytes alive after the forward of each block that last longer than the forward of the model.

    Adds the costs of the run's last block to `costs` where they are not there yet.
    """
    lasting: list[int] = []
    lent = run.lent_before
    for place, (previous, key) in enumerate(ways_of(run.walks[stack])):
        at = ("forward", stack, place)
        if (previous, key) not in costs:
            # Seen only at an end, where everything it made is freed behind the stack: another block of its key tells
            # which part of it is its output.
            like = next((cost for (_, found), cost in costs.items() if found == key), None)
            output, given = (like.output_bytes, like.lent_bytes) if like else (run.outputs.get(at, 0), 0)
            costs[previous, key] = BlockCost(run.phase(*at), run.phase("backward", stack, place), output, given)
        lent += costs[previous, key].lent_bytes
        # A block that the batch did not reach has left everything as it was.
        lasting.append(run.ends[at][0] - lent if at in run.ends else lasting[-1] if lasting else 0)
    return lasting


def _at_turn(stack: int, run: Run, costs: dict[_Pair, BlockCost]) -> tuple[list[int], list[int]]:
    """What a run showed of `StackCosts.turn_bytes` and `StackCosts.shared_bytes`: a number for each block that tells.

    Adds the costs of the run's last block to `costs`, as `_lasting` does.
    """
    walk, lasting = run.walks[stack], _lasting(stack, run, costs)
    turns: list[int] = []
    shared: list[int] = []
    turn = 0
    for place, pair in reversed(list(enumerate(ways_of(walk)))):
        start = run.other(("backward", stack, place))
        if start is None:
            continue
        start -= run.held_behind(stack, place)
        above = start - lasting[place] + costs[pair].output_bytes + run.released[stack]
        if place == len(walk) - 1:
            turn = above
            turns.append(turn)
        else:
            shared.append(above - turn)
    return turns, shared


def _with_unseen(
    costs: dict[_Pair, BlockCost], row: Sequence[int], choices: Sequence[Sequence[int]]
) -> dict[_Pair, BlockCost]:
    """`costs` with the pairs of actions of different kinds that were not run: the block's own action is what counts."""
    full = dict(costs)
    for kind, following in set(itertools.pairwise(row)):
        for action in choices[kind]:
            for next_action in choices[following]:
                key = following, next_action
                wanted = (kind, action), key
                if wanted not in full:
                    seen = [pair for pair in costs if pair[1] == key and pair[0] is not None]
                    seen.sort(key=lambda pair: costs[pair].forward.net, reverse=True)
                    likes: Iterable[_Pair] = ((following, action), key), *seen, (None, key)
                    full[wanted] = next(costs[like] for like in likes if like in costs)
    return full
