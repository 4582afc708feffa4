"""What offloading adds to a plan's choices: costs of actions that move what a block keeps to host memory.

They follow from the costs of the actions that keep the same things on the device, so nothing more is traced. Pure
functions, free of torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hf_ckpt.plan import Action
from hf_ckpt.timeline import BlockCost, Costs, Key, Phase, StackCosts

FULL, SELECTIVE = Action("full"), Action("selective", ("linear", "attention"))
MOVES = {FULL: Action("offload"), SELECTIVE: Action("selective", ("linear", "attention"), moved=True)}
"""Action -> the same with what it keeps in host memory."""
_OVERHEAD = 2
"""Operations' worth of time that a copy costs beside itself."""


def with_moves(
    costs: Costs, host_bandwidth: float, launch_nanoseconds: int, host_limit: int | None = None
) -> tuple[Costs, ...]:
    """`costs` with actions that move things added, for as many blocks of a stack as the host has room for.

    Without a limit that is one set of costs. With one it is a set for each kind of move: no plan mixes those then, so
    that each has all of the room to itself.

    Args:
        costs: traced.
        host_bandwidth: of copies to and from pinned memory, in bytes a second.
        launch_nanoseconds: of starting an operation.
        host_limit: bytes of host memory, in buffers of powers of two.
    """
    there = [action for action in MOVES if action in costs.actions]
    if not there or not any(len(stack.blocks) > 1 for stack in costs.stacks):
        return (costs,)
    groups = [there] if host_limit is None else [[action] for action in there]
    return tuple(_added(costs, group, host_bandwidth, launch_nanoseconds, host_limit) for group in groups)


def _added(costs: Costs, moved: list[Action], bandwidth: float, launch: int, limit: int | None) -> Costs:
    first = len(costs.actions)
    instead = {first + number: costs.actions.index(action) for number, action in enumerate(moved)}
    room = limit
    stacks = []
    for stack in costs.stacks:
        found = _Moving(costs, stack, instead, bandwidth, launch * _OVERHEAD)
        movable = {number: found.how_many(number, room) for number in instead}
        stacks.append(found.stack(movable))
        if room is not None:
            room -= max((found.host_bytes(number) * blocks for number, blocks in movable.items()), default=0)
    actions = (*costs.actions, *(MOVES[action] for action in moved))
    return dataclasses.replace(costs, actions=actions, stacks=tuple(stacks))


class _Moving:
    """One stack's costs, extended by actions that move: number -> the action that keeps the same."""

    def __init__(
        self, costs: Costs, stack: StackCosts, instead: dict[int, int], bandwidth: float, overhead: int
    ) -> None:
        self.found, self.instead, self.bandwidth, self.overhead = stack, instead, bandwidth, overhead
        self.full = costs.actions.index(FULL) if FULL in costs.actions else None

    def hidden_bytes(self, key: Key) -> int:
        """Of the hidden states that a block is given."""
        return max(cost.output_bytes for (_, found), cost in self.found.costs.items() if found[0] == key[0])

    def size(self, key: Key) -> int:
        """What a block moves under one of the new actions, 0 for the others."""
        base = self.instead.get(key[1])
        if base is None:
            return 0
        if base == self.full:
            return self.hidden_bytes(key)
        kept = [
            cost.forward.net - cost.lent_bytes
            for (before, found), cost in self.found.costs.items()
            if found == (key[0], base) and before is not None
        ]
        return max(0, min(kept, default=0))

    def host_bytes(self, number: int) -> int:
        """Of a block's buffers, at most."""
        sizes = [self.size((kind, number)) for kind in set(self.found.kinds)]
        rounded = 1 << max(0, max(sizes) - 1).bit_length()
        # Of several tensors each is rounded up by itself: to less than its double.
        return rounded if self.instead[number] == self.full else 2 * max(sizes)

    def how_many(self, number: int, room: int | None) -> int:
        """Blocks that the action may be given to: never the last, whose backward comes at once."""
        most, each = len(self.found.blocks) - 1, self.host_bytes(number)
        return most if room is None else max(0, min(most, room // max(1, each)))

    def stack(self, movable: dict[int, int]) -> StackCosts:
        """The stack with the new actions."""
        stack = self.found
        choices = tuple(
            (*choice, *(number for number, base in self.instead.items() if base in choice)) for choice in stack.choices
        )
        costs = dict(self._costs())
        last = {
            key: stack.last_backward[self._base(key)]
            for kind in set(stack.kinds)
            for key in ((kind, number) for number in choices[kind])
            if self._base(key) in stack.last_backward
        }
        return dataclasses.replace(
            stack, choices=choices, costs=costs, last_backward=last, movable=movable, instead=self.instead
        )

    def _base(self, key: Key) -> Key:
        return key[0], self.instead.get(key[1], key[1])

    def _costs(self) -> Iterator[tuple[tuple[Key | None, Key], BlockCost]]:
        for (before, key), cost in self.found.costs.items():
            befores = [before, *(() if before is None else self._moved(before))]
            for place in befores:
                for chosen in (key, *self._moved(key)):
                    yield (place, chosen), self._cost(cost, place, chosen)

    def _moved(self, key: Key) -> Iterator[Key]:
        return ((key[0], number) for number, base in self.instead.items() if base == key[1])

    def _cost(self, cost: BlockCost, before: Key | None, key: Key) -> BlockCost:
        ahead = 0 if before is None else self.size(before)
        forward, backward = cost.forward, cost.backward
        if before is not None and ahead and self.instead[before[1]] != self.full:
            # Copies of results of the block before it, made up to its end, are waited for at the end of this one.
            still = tuple((other + ahead, done) for other, done in forward.points)
            forward = dataclasses.replace(forward, points=(*still, (forward.net, forward.gradients)))
        if key[1] not in self.instead:
            # What the block before it moved is sent for when that one's backward begins, so it is waited for.
            late = dataclasses.replace(backward, nanoseconds=backward.nanoseconds + self._copying(ahead))
            return dataclasses.replace(cost, forward=forward, backward=late)
        size = self.size(key)
        # What the first block is given may be held by others, too.
        freed = size if before is not None else max(0, size - self.hidden_bytes(key))
        gone = (*forward.points, (forward.net - freed, forward.gradients))
        there = size + ahead
        points = ((there, 0), *((other + there, done) for other, done in backward.points))
        back = (*points, (backward.net + freed, backward.gradients))
        copying = self._copying(size)
        return dataclasses.replace(
            cost,
            forward=self._beside(dataclasses.replace(forward, points=gone), copying),
            backward=self._beside(dataclasses.replace(backward, points=back), copying),
        )

    def _copying(self, size: int) -> int:
        return round(size / self.bandwidth * 1e9)

    def _beside(self, phase: Phase, copying: int) -> Phase:
        return dataclasses.replace(phase, nanoseconds=max(phase.nanoseconds, copying) + self.overhead)
