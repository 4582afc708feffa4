"""The plans of one training: one for each bucket of batch shapes, and the costs that they are made from.

A bucket holds batches whose lengths are at most a quarter apart. Costs are traced for a few shapes; those of a bucket
between two of them lie on the line through both (`prediction.scaling`). Which plan a batch takes is remembered by the
shapes of its tensors, so that a batch like an earlier one takes a look-up.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.machine import DeviceMemory
from hf_ckpt.planner.shapes import BatchShape, is_padded, rounded_up
from hf_ckpt.prediction.costs import Costs
from hf_ckpt.prediction.scaling import UnlikeError, bend, between
from hf_ckpt.spec.plan import Plan

log = logging.getLogger(__name__)

DIGITS = (3, 5)
"""Binary digits of the lengths of buckets: the finer ones are tried where no plan fits the wider bucket."""
MOST_PLANS = 64
"""Most plans that a training holds; the oldest goes first."""
_MOST_TRIES = 3
_MOST_SEEN = 4096
"""Most batches whose plan is remembered by the shapes of their tensors."""
_BEND = 0.02
"""Share of its peak by which the line between two traced shapes may lie too high, unless they are less than twice as
long as each other. Tensors of attention weights and masks grow with the square of the length."""

Trace = Callable[[BatchShape], tuple[Costs, ...]]
"""Gives the candidates for a plan for a batch shape, by running the model on fake tensors."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan that was made for a batch shape, and what it was made from."""

    shape: BatchShape
    limit_bytes: int
    """The peak that was allowed."""
    costs: tuple[Costs, ...]
    """The candidates that the plan was chosen from."""
    plan: Plan
    memory: DeviceMemory
    """The device's memory as it was when the first plan was made."""
    bias_bytes: int = 0
    """How much more than predicted a measured step needed, because of what the prediction does not know of. The plan is
    made for so much less than `limit_bytes`."""
    over: bool = False
    """Whether no plan fits this shape, so that this is the one with the lowest peak."""
    buckets: Buckets = dataclasses.field(default_factory=lambda: Buckets(), compare=False, repr=False)
    """All plans of this training."""

    @property
    def keeps_all(self) -> bool:
        """Whether no other plan is faster, whatever the batch."""
        first = self.costs[0]
        chunks = self.plan.head, self.plan.mlp
        return chunks == (first.head_tokens, first.mlp_tokens) and all(
            action == first.actions[0] for _, action in self.plan.actions
        )

    @property
    def plans(self) -> dict[str, Plan]:
        """The shape that each plan of this training was made for, in words -> the plan; the smallest shape first."""
        held = sorted(self.buckets.held, key=lambda planned: planned.shape.tokens)
        return {str(planned.shape): planned.plan for planned in held}


@dataclasses.dataclass(frozen=True)
class Node:
    """A shape whose costs were traced."""

    shape: BatchShape
    costs: tuple[Costs, ...]


class Buckets:
    """The plans that a training holds, and which of them a batch takes."""

    def __init__(self) -> None:
        self.held: list[Planned] = []
        self.nodes: list[Node] = []
        self.seen: dict[Any, Planned] = {}
        """The key of a batch -> its plan."""
        self.bias_bytes = 0
        """The largest bias that was measured."""
        self.measured: set[int] = set()
        """Ids of the held plans of which a step was measured."""
        self._tries: collections.Counter[int] = collections.Counter()
        """Id of a plan -> how often a measurement has begun."""
        self.expected = 0
        """Tokens of the longest sequence that the training data are known to hold; 0 where that is not known."""
        self.most = 0
        """Most tokens that the model has positions for; 0 where there is no such limit."""
        self.on_lines = True
        """Whether costs may lie on the line through two shapes; compilers choose anew for each what they keep."""
        self.told = False
        """Whether the forward of the whole model that was seen last has told the shape of its batch."""
        self._state: BatchShape | None = None
        """A shape with all states that training was in."""
        self._sharded = False
        self._parameters: list[nn.Parameter] = []
        self._device_type = "cpu"

    # --- the state of training, at little cost ---

    def observe(self, base: nn.Module, shape: BatchShape, *, sharded: bool | None = None) -> None:
        """Take note of a batch and of the model that is trained.

        Args:
            base: the model.
            shape: of the batch.
            sharded: whether FSDP2 holds the parameters; None where that is known by now.
        """
        self._state = shape if self._state is None else self._state.with_room_for(shape)
        self._parameters = [parameter for parameter in base.parameters() if parameter.requires_grad]
        self._device_type = next(base.parameters()).device.type
        self._sharded = self._sharded if sharded is None else sharded

    def state(self, base: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `BatchShape` beside sizes, for a forward that is given `kwargs`; what was once so stays so."""
        known = self._state
        assert known is not None
        held_back = self._sharded and (known.held_back or compat.holds_gradients_back(base))
        accumulated = held_back or known.accumulation > 1
        accumulated = accumulated or compat.accumulated_steps() > 1
        return {
            "padded": is_padded(kwargs, known.padded),
            "accumulation": 2 if accumulated or any(p.grad is not None for p in self._parameters) else 1,
            "autocast": compat.autocast_dtype(self._device_type),
            "held_back": held_back,
        }

    def key(self, base: nn.Module, stack: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the plan for a batch depends on: the shapes of its tensors, and the state of training.

        None for the forward of a stack whose inputs may be made of images, or which may not be the only stack.
        """
        if stack is not None and (kwargs.get("input_ids") is None or len(self.held[0].shape.sizes) > 1):
            return None
        named = [(name, value.shape) for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
        placed = [value.shape if isinstance(value, torch.Tensor) else None for value in args]
        return stack, *self.state(base, kwargs).values(), *named, *placed

    def remember(self, key: Any, planned: Planned) -> None:
        """Let batches with this key take a plan."""
        if len(self.seen) >= _MOST_SEEN:
            self.seen.clear()
        if key is not None:
            self.seen[key] = planned

    # --- plans ---

    def to_measure(self, planned: Planned) -> bool:
        """Whether the next step of a plan should be measured; a measurement that comes to nothing is begun again."""
        self._tries[id(planned)] += 1
        return id(planned) not in self.measured and self._tries[id(planned)] <= _MOST_TRIES

    def largest(self) -> Planned | None:
        """The plan for the largest shape that one fits."""
        fitting = [planned for planned in self.held if not planned.over]
        return max(fitting, key=lambda planned: planned.shape.tokens, default=None)

    def without_plans(self) -> Buckets:
        """The same training with the same traced costs, but without a plan."""
        found = copy.copy(self)
        found.held, found.seen, found.measured, found._tries = [], {}, set(), collections.Counter()
        return found

    def hold(self, planned: Planned, instead: Planned | None = None) -> Planned:
        """Keep a plan, in the place of an earlier one where one is given; return it."""
        self.bias_bytes = max(self.bias_bytes, planned.bias_bytes)
        self.seen.clear()
        others = [found for found in self.held if found is not instead]
        self.held = [*others[1 - MOST_PLANS :], planned]
        ids = {id(found) for found in self.held}
        if instead is not None and id(instead) in self.measured:
            self.measured.add(id(planned))
        self.measured &= ids
        return planned

    def serving(self, seen: BatchShape) -> Planned | None:
        """The plan for a batch; None where another should be made for it."""
        home = self._home(seen)

        def serves(planned: Planned) -> bool:
            if planned.over:  # where none fits this shape, none fits a larger one
                return seen.reaches(planned.shape)
            near = planned.keeps_all or bool(seen.inputs) or _within(planned.shape, home)
            return near and planned.shape.covers(seen)

        found = [planned for planned in self.held if serves(planned)]
        return min(found, key=lambda each: (each.over, not each.keeps_all, each.shape.tokens), default=None)

    def _home(self, seen: BatchShape) -> BatchShape:
        """The bucket of a batch, with as many sequences as the next traced shape has."""
        high = self._covering(seen)
        return self.bucket_of(seen).resized(lambda tokens: tokens, high.shape.sequences if high else None)

    def bucket_of(self, seen: BatchShape, digits: int = DIGITS[0]) -> BatchShape:
        """The bucket of a batch, without lengths that the training data or the model have no place for."""
        longest = self.expected if len(seen.sizes) == 1 and seen.longest <= self.expected else 0
        return _capped(_capped(seen.bucket(digits), longest), self.most)

    # --- costs ---

    def trace(self, shape: BatchShape, trace: Trace) -> Node:
        """Trace the costs of a shape, and keep them."""
        node = Node(shape, trace(shape))
        self.nodes.append(node)
        return node

    def costs_for(self, shape: BatchShape, trace: Trace) -> tuple[BatchShape, tuple[Costs, ...]]:
        """The candidates for a plan for a shape, or for one that covers it with a few sequences more, and that shape.

        Raises what `trace` raises; it is called three times at most.
        """
        exact = next((node for node in self.nodes if node.shape == shape), None)
        if exact is None and self.on_lines and not shape.inputs:
            high = self._covering(shape) or self._above(shape, trace)
        else:
            high = exact
        if high is None:
            high = self.trace(shape, trace)
        wanted = dataclasses.replace(high.shape, sizes=shape.resized(lambda tokens: tokens, high.shape.sequences).sizes)
        if exact is not None or wanted.sizes == high.shape.sizes:
            return high.shape, high.costs
        low = self._below(wanted, high, trace)
        if low.shape == wanted:
            return wanted, low.costs
        return wanted, _on_line(low, wanted, high) or self.trace(wanted, trace).costs

    def _covering(self, shape: BatchShape) -> Node | None:
        """The smallest traced shape that covers another one, with the fewest sequences."""
        texts = [node for node in self.nodes if not node.shape.inputs and node.shape.autocast == shape.autocast]
        found = [node for node in texts if node.shape.covers(shape)]
        return min(found, key=lambda node: (node.shape.sequences, node.shape.tokens), default=None)

    def _above(self, shape: BatchShape, trace: Trace) -> Node | None:
        """Trace a shape that covers another one and those to come; None where the model does not run with it."""
        most = max((node.shape.sequences for node in self.nodes), default=0)
        rows = shape.sequences if shape.sequences <= most else rounded_up(shape.sequences, DIGITS[0])
        longest = self.expected if len(shape.sizes) == 1 and self.expected >= shape.longest else 0
        wider = _capped(shape.resized(lambda tokens: longest or 1 << (tokens - 1).bit_length(), rows), self.most)
        try:
            return self.trace(wider, trace)
        except HfCkptError:
            if wider == shape:
                raise
            return None

    def _below(self, shape: BatchShape, high: Node, trace: Trace) -> Node:
        """The largest traced shape below another one, in the state of `high`; where there is none, one is traced."""
        alike = [
            node
            for node in self.nodes
            if _within(node.shape, shape)
            and node.shape.state == high.shape.state
            and node.shape.sequences == high.shape.sequences
        ]
        if alike:
            return max(alike, key=lambda node: node.shape.tokens)
        least = high.shape.resized(lambda tokens: tokens // 4).bucket()
        return self.trace(least if _within(least, shape) else shape, trace)


def _capped(shape: BatchShape, most: int) -> BatchShape:
    """A shape with so many tokens at most; as it is for 0, and beside images and the like."""
    return shape.resized(lambda tokens: min(tokens, most)) if most and not shape.inputs else shape


def _within(shape: BatchShape, other: BatchShape) -> bool:
    """Whether a shape is no larger than another one in any stack, in whatever state."""
    return all(
        stack in other.sizes and rows <= other.sizes[stack][0] and tokens <= other.sizes[stack][1]
        for stack, (rows, tokens) in shape.sizes.items()
    )


def _on_line(low: Node, shape: BatchShape, high: Node) -> tuple[Costs, ...] | None:
    """The costs of a shape on the line through two traced ones; None where that is too far from the truth."""
    near = 2 * low.shape.longest >= high.shape.longest
    parts = [
        (tokens - low.shape.sizes[stack][1], high.shape.sizes[stack][1] - low.shape.sizes[stack][1])
        for stack, (_, tokens) in shape.sizes.items()
    ]
    part, whole = max((pair for pair in parts if pair[1]), key=lambda pair: pair[0] / pair[1])
    try:
        if near or bend(low.costs[0], high.costs[0]) <= _BEND:
            return between(low.costs, high.costs, part, whole)
    except UnlikeError:
        log.info("hf_ckpt: %s is traced by itself, because it runs other operations.", shape)
    return None
