"""The costs of actions that keep a block's tensors in host memory.

They are computed from the costs of the actions that keep the same tensors on the device and from the speed of copies,
without further traces. Pure functions that do not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hf_ckpt.costs.costs import BlockCost, Costs, Key, Phase, StackCosts
from hf_ckpt.spec.actions import FULL, Action, offloads

OFFLOADED = offloads()
"""Action -> the action that keeps the same tensors in host memory."""
_OVERHEAD = 2
"""Time to start a copy, as a multiple of the time to start an operation."""


def with_offloading(
    costs: Costs, host_bandwidth: float, launch_nanoseconds: int, host_limit: int | None = None
) -> tuple[Costs, ...]:
    """Add the actions that offload to `costs`, for as many blocks of a stack as fit into host memory.

    Without a limit, returns one record of costs. With a limit, returns one for each action that offloads: no plan mixes
    them, so each may use the whole limit. If nothing can be offloaded, returns `costs` unchanged.

    Args:
        costs: traced with actions that keep their tensors on the device.
        host_bandwidth: bytes per second of copies to and from pinned host memory.
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
    on_device = {first + number: costs.actions.index(action) for number, action in enumerate(moved)}
    room = limit
    stacks = []
    for stack in costs.stacks:
        found = _Offloading(costs, stack, on_device, bandwidth, launch * _OVERHEAD)
        most_blocks = {number: found.how_many(number, room) for number in on_device}
        stacks.append(found.stack(most_blocks))
        if room is not None:
            room -= max((found.host_bytes(number) * blocks for number, blocks in most_blocks.items()), default=0)
    actions = (*costs.actions, *(OFFLOADED[action] for action in moved))
    return dataclasses.replace(costs, actions=actions, stacks=tuple(stacks))


class _Offloading:
    """Adds the actions that offload to the costs of one stack.

    `on_device` maps each of these actions to the one that keeps the same tensors on the device, as positions in
    `Costs.actions`.
    """

    def __init__(
        self, costs: Costs, stack: StackCosts, on_device: dict[int, int], bandwidth: float, overhead: int
    ) -> None:
        self.found, self.on_device, self.bandwidth, self.overhead = stack, on_device, bandwidth, overhead
        self.full = costs.actions.index(FULL) if FULL in costs.actions else None

    def hidden_bytes(self, kind: int) -> int:
        """Bytes of a block's input hidden states, which are as large as its output."""
        tables = self.found.first, self.found.inner, self.found.last
        return max(cost.output_bytes for found in tables for key, cost in found.items() if key[0] == kind)

    def size(self, key: Key) -> int:
        """Bytes that a block keeps in host memory."""
        base = key[0], self.on_device[key[1]]
        if base[1] == self.full:
            return self.hidden_bytes(key[0])
        cost = self.found.inner.get(base)
        return 0 if cost is None else max(0, cost.forward.net - cost.forward_only_bytes)

    def host_bytes(self, number: int) -> int:
        """Most bytes of host memory that a block's buffers need under an action that offloads."""
        sizes = [self.size((kind, number)) for kind in set(self.found.kinds)]
        rounded = 1 << max(0, max(sizes) - 1).bit_length()
        # Each of several tensors is rounded up by itself, to less than twice its size.
        return rounded if self.on_device[number] == self.full else 2 * max(sizes)

    def how_many(self, number: int, room: int | None) -> int:
        """How many blocks may have the action: never the last one, whose backward follows at once."""
        most, each = len(self.found.blocks) - 1, self.host_bytes(number)
        return most if room is None else max(0, min(most, room // max(1, each)))

    def stack(self, most_blocks: dict[int, int]) -> StackCosts:
        """The stack with the new actions."""
        stack = self.found
        choices = tuple(
            (*choice, *(number for number, base in self.on_device.items() if base in choice))
            for choice in stack.choices
        )
        return dataclasses.replace(
            stack,
            choices=choices,
            first=self._costs(stack.first, at_begin=True),
            inner=self._costs(stack.inner, at_begin=False),
            ends=tuple(end.with_actions(self.on_device.values()) for end in stack.ends),
            most_blocks=most_blocks,
            on_device=self.on_device,
        )

    def _costs(self, found: Mapping[Key, BlockCost], *, at_begin: bool) -> dict[Key, BlockCost]:
        """The costs of blocks under all actions, including those that offload."""
        added = {
            (key[0], number): self._moved(cost, (key[0], number), at_begin)
            for key, cost in found.items()
            for number, base in self.on_device.items()
            if base == key[1]
        }
        return {**found, **added}

    def _moved(self, cost: BlockCost, key: Key, at_begin: bool) -> BlockCost:
        """The cost of a block that offloads, from the `cost` of keeping the same tensors on the device.

        Its backward prefetches the tensors of the block before. The model assumes that that block offloads as much, and
        that the blocks that offload are the first ones of the stack. The last of them waits for its own copy; the first
        block's cost includes that time.
        """
        size, forward, backward = self.size(key), cost.forward, cost.backward
        ahead = 0 if at_begin else size
        points = list(forward.points)
        if ahead and self.on_device[key[1]] != self.full:  # the previous block's copies, which end with this one
            points = [*((other + ahead, done) for other, done in points), (forward.net, forward.gradients)]
        # The input of the first block may be held elsewhere, too, so it is not freed.
        freed = max(0, size - self.hidden_bytes(key[0])) if at_begin else size
        gone = (*points, (forward.net - freed, forward.gradients))
        there = size + ahead
        back = ((there, 0), *((other + there, done) for other, done in backward.points))
        copying = round(size / self.bandwidth * 1e9)
        forward = dataclasses.replace(forward, points=gone)
        backward = dataclasses.replace(backward, points=(*back, (backward.net + freed, backward.gradients)))
        forward, backward = self._beside(forward, copying), self._beside(backward, copying)
        if at_begin:
            backward = dataclasses.replace(backward, nanoseconds=backward.nanoseconds + copying)
        return dataclasses.replace(cost, forward=forward, backward=backward)

    def _beside(self, phase: Phase, copying: int) -> Phase:
        """`phase` with a concurrent copy."""
        return dataclasses.replace(phase, nanoseconds=max(phase.nanoseconds, copying) + self.overhead)
