"""Costs for a batch shape between two that were traced. Exact integers, free of torch.

With as many sequences, the bytes of every tensor of a model are a polynomial of the number of tokens, without negative
coefficients. So are the bytes alive at each moment, which add tensors up: they are convex, and lie on or below the line
through two traced lengths. A plan that fits on the line fits the lengths below. Where all tensors grow in proportion
with the tokens, as with fused attention, the line is exact. Times are taken from the same line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hf_ckpt.prediction.costs import BlockCost, Costs, Key, Phase, StackCosts, Static
from hf_ckpt.prediction.timeline import Moment, worst_timeline
from hf_ckpt.spec.actions import lighter

_FROM_HIGH = {"movable"}
"""Fields that shrink while shapes grow, so that the value for the larger shape holds for both."""


class UnlikeError(ValueError):
    """Two steps do not run the same operations, so that nothing is known of those between."""


def between(low: Sequence[Costs], high: Sequence[Costs], part: int, whole: int) -> tuple[Costs, ...]:
    """The costs at the place `part / whole` of the way from one batch shape to a larger one.

    Args:
        low: candidates that were traced for the smaller shape.
        high: candidates for the larger shape, of the same model in the same state.
        part: from 0 (the smaller shape) to `whole` (the larger one).
        whole: at least 1.

    Lighter actions that only one of the two has are left out.

    Raises `UnlikeError` where the two do not run the same operations, as a head in more chunks does.
    """
    if [costs.actions for costs in low] != [costs.actions for costs in high]:
        low, high = ([without_lighter(costs) for costs in found] for found in (low, high))
    found: tuple[Costs, ...] = _Line(part, whole).at(tuple(low), tuple(high))
    return found


def without_lighter(costs: Costs) -> Costs:
    """`costs` without the lighter actions, as they were before `lighter.with_lighter`."""
    added = lighter()
    left = [number for number, action in enumerate(costs.actions) if action not in added]
    if len(left) == len(costs.actions):
        return costs
    places = {number: place for place, number in enumerate(left)}

    def kept(found: Mapping[Any, Any]) -> dict[Any, Any]:
        return {
            new: value for key, value in found.items() if (new := _renumbered(key, places)) is not None or key is None
        }

    stacks = tuple(
        dataclasses.replace(
            stack,
            choices=tuple(tuple(places[number] for number in row if number in places) for row in stack.choices),
            costs={
                (_renumbered(before, places), new): cost
                for (before, key), cost in stack.costs.items()
                if (new := _renumbered(key, places)) is not None and (before is None or before[1] in places)
            },
            last_backward=kept(stack.last_backward),
            before=kept(stack.before),
            instead={places[number]: places[like] for number, like in stack.instead.items()},
            movable={places[number]: blocks for number, blocks in stack.movable.items()},
        )
        for stack in costs.stacks
    )
    actions = tuple(costs.actions[number] for number in left)
    return dataclasses.replace(costs, actions=actions, stacks=stacks, head=kept(costs.head))


def _renumbered(key: Key | None, places: Mapping[int, int]) -> Key | None:
    """The key with the new place of its action; None where that is gone, and for None."""
    return None if key is None or key[1] not in places else (key[0], places[key[1]])


class _Line:
    """The values at one place of the way from low to high; what candidates share is computed once."""

    def __init__(self, part: int, whole: int) -> None:
        self.part, self.whole = part, whole
        self._known: dict[tuple[int, int], Any] = {}

    def at(self, low: Any, high: Any) -> Any:
        """A number there, or a record, tuple or table with the numbers there. All else must be the same in both."""
        if low is high:
            return high
        if isinstance(high, int) and isinstance(low, int):
            return low + (high - low) * self.part // self.whole
        pair = id(low), id(high)
        if pair not in self._known:
            self._known[pair] = self._within(low, high)
        return self._known[pair]

    def _within(self, low: Any, high: Any) -> Any:
        _refuse_unless(type(low) is type(high))
        if isinstance(high, Phase):
            return self._phase(low, high)
        if isinstance(high, (BlockCost, Costs, StackCosts, Static)):
            names = [field.name for field in dataclasses.fields(high) if field.name not in _FROM_HIGH]
            return dataclasses.replace(
                high, **{name: self.at(getattr(low, name), getattr(high, name)) for name in names}
            )
        if isinstance(high, Mapping):
            _refuse_unless(low.keys() == high.keys())
            return {key: self.at(low[key], value) for key, value in high.items()}
        if isinstance(high, tuple):
            _refuse_unless(len(low) == len(high))
            return tuple(map(self.at, low, high))
        _refuse_unless(low == high)
        return high

    def _phase(self, low: Phase, high: Phase) -> Phase:
        part, whole = self.part, self.whole
        _refuse_unless(low.operations == high.operations and len(low.points) == len(high.points))
        points = tuple(
            (one + (other - one) * part // whole, first + (last - first) * part // whole)
            for (one, first), (other, last) in zip(low.points, high.points, strict=True)
        )
        names = ("nanoseconds", "flops", "moved_bytes")
        numbers = {name: self.at(getattr(low, name), getattr(high, name)) for name in names}
        return Phase(points, operations=high.operations, **numbers)


def _refuse_unless(alike: bool) -> None:
    if not alike:
        raise UnlikeError("the two steps do not run the same operations")


def bend(low: Costs, high: Costs) -> float:
    """How far the line between two shapes may lie above the truth for a shape between them, as a share of the low peak.

    It is estimated for every moment of the step, as if its bytes were a polynomial of degree 2 without a constant part,
    under the first action and under the last one. A line through a convex curve meets the axis below zero.
    """
    low, high = without_lighter(low), without_lighter(high)
    few, many = low.tokens, high.tokens
    most = 0.0
    for action in (0, len(high.actions) - 1) if few < many else ():
        lines = [worst_timeline(costs, costs.uniform(action)) for costs in (low, high)]
        for less, more in zip(*(map(_variable_bytes, line.moments) for line in lines), strict=False):
            below = max(((y - x) * few / (many - few) - x for x, y in zip(less, more, strict=False)), default=0.0)
            most = max(most, below * (many - few) ** 2 / (4 * few * many) / lines[0].peak_bytes)
    return most


def _variable_bytes(moment: Moment) -> list[int]:
    """The bytes at each point of a moment, without those of gradients and of what is always there."""
    return [level - gradients - moment.static_bytes for level, gradients in moment.levels()]
