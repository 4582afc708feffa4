"""The costs of actions that keep a block's tensors in host memory.

They follow from the costs of the actions that keep the same tensors on the device and from the speed of copies, so
nothing more is traced. Pure functions, free of torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hf_ckpt.prediction.costs import BlockCost, Costs, Key, Phase, StackCosts
from hf_ckpt.spec.actions import FULL, Action, offloads

OFFLOADED = offloads()
"""Action -> the action that keeps the same tensors in host memory."""
_OVERHEAD = 2
"""Time that starting a copy takes, in times of starting an operation."""


def with_offloading(
    costs: Costs, host_bandwidth: float, launch_nanoseconds: int, host_limit: int | None = None
) -> tuple[Costs, ...]:
    """`costs` with the actions added that offload, for as many blocks of a stack as host memory has room for.

    Without a limit that is one record of costs. With a limit it is one for each action that offloads: no plan mixes
    them then, so that each may use all of the room. Where nothing can be offloaded, `costs` come back as they are.

    Args:
        costs: traced with actions that keep their tensors on the device.
        host_bandwidth: bytes a second of copies to and from pinned host memory.
        launch_nanoseconds: time to start an operation.
        host_limit: bytes of host memory that may be used. Buffers there are rounded up to powers of two.
    """
    there = [action for action in OFFLOADED if action in costs.actions]
    if not there or not any(len(stack.blocks) > 1 for stack in costs.stacks):
        return (costs,)
    groups = [there] if host_limit is None else [[action] for action in there]
    return tuple(_added(costs, group, host_bandwidth, launch_nanoseconds, host_limit) for group in groups)


def _added(costs: Costs, moved: list[Action], bandwidth: float, launch: int, limit: int | None) -> Costs:
    """`costs` with the offloading counterparts of `moved`, all within `limit` bytes of host memory."""
    first = len(costs.actions)
    instead = {first + number: costs.actions.index(action) for number, action in enumerate(moved)}
    room = limit
    stacks = []
    for stack in costs.stacks:
        found = _Offloading(costs, stack, instead, bandwidth, launch * _OVERHEAD)
        movable = {number: found.how_many(number, room) for number in instead}
        stacks.append(found.stack(movable))
        if room is not None:
            room -= max((found.host_bytes(number) * blocks for number, blocks in movable.items()), default=0)
    actions = (*costs.actions, *(OFFLOADED[action] for action in moved))
    return dataclasses.replace(costs, actions=actions, stacks=tuple(stacks))


class _Offloading:
    """The costs of one stack with the actions added that offload.

    `instead` maps each of these actions to the one that keeps the same tensors on the device, as positions in
    `Costs.actions`.
    """

    def __init__(
        self, costs: Costs, stack: StackCosts, instead: dict[int, int], bandwidth: float, overhead: int
    ) -> None:
        self.found, self.instead, self.bandwidth, self.overhead = stack, instead, bandwidth, overhead
        self.full = costs.actions.index(FULL) if FULL in costs.actions else None

    def hidden_bytes(self, key: Key) -> int:
        """Bytes of the hidden states that a block is given, which are as large as those that it returns."""
        return max(cost.output_bytes for (_, found), cost in self.found.costs.items() if found[0] == key[0])

    def size(self, key: Key) -> int:
        """Bytes that a block keeps in host memory: 0 for an action that does not offload."""
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
        """Most bytes of host memory that a block's buffers take under an action that offloads."""
        sizes = [self.size((kind, number)) for kind in set(self.found.kinds)]
        rounded = 1 << max(0, max(sizes) - 1).bit_length()
        # Where a block has several tensors, each is rounded up by itself, to less than its double.
        return rounded if self.instead[number] == self.full else 2 * max(sizes)

    def how_many(self, number: int, room: int | None) -> int:
        """How many blocks may be given the action: never the last one, whose backward comes at once."""
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
        """The key with the action that keeps the same tensors on the device."""
        return key[0], self.instead.get(key[1], key[1])

    def _costs(self) -> Iterator[tuple[tuple[Key | None, Key], BlockCost]]:
        """The costs for every pair of actions, those that offload among them."""
        for (before, key), cost in self.found.costs.items():
            befores = [before, *(() if before is None else self._moved(before))]
            for place in befores:
                for chosen in (key, *self._moved(key)):
                    yield (place, chosen), self._cost(cost, place, chosen)

    def _moved(self, key: Key) -> Iterator[Key]:
        """The keys with the actions that keep the same tensors in host memory."""
        return ((key[0], number) for number, base in self.instead.items() if base == key[1])

    def _cost(self, cost: BlockCost, before: Key | None, key: Key) -> BlockCost:
        """The cost of a block with key `key` behind one with key `before`, from the `cost` without offloading."""
        ahead = 0 if before is None else self.size(before)
        forward, backward = cost.forward, cost.backward
        if before is not None and ahead and self.instead[before[1]] != self.full:
            # The block before copied results until its end; these copies are waited for at the end of this block.
            still = tuple((other + ahead, done) for other, done in forward.points)
            forward = dataclasses.replace(forward, points=(*still, (forward.net, forward.gradients)))
        if key[1] not in self.instead:
            # A block that offloads fetches ahead for the block before it; this one does not, so that the copy is waited
            # for when the backward of the block before begins.
            late = dataclasses.replace(backward, nanoseconds=backward.nanoseconds + self._copying(ahead))
            return dataclasses.replace(cost, forward=forward, backward=late)
        size = self.size(key)
        # Others may hold the input of the first block, too, so that it is not freed.
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
        """Nanoseconds of a copy."""
        return round(size / self.bandwidth * 1e9)

    def _beside(self, phase: Phase, copying: int) -> Phase:
        """`phase` with a copy that runs at the same time."""
        return dataclasses.replace(phase, nanoseconds=max(phase.nanoseconds, copying) + self.overhead)
