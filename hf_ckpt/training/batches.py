"""What a session knows of the batches of a run: the shapes of a step's forwards.

A step may have several forwards before its backward, as in DPO, and its plan is chosen at the first of them. So a
`Batch` is what the step is expected to be: `StepForwards` takes it from the last step that began in the same way. What
the step really had is known at its end.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat

NEAR = 0.8
"""Batches of at least this share of another one's size use its measurements and plans. A plan for 25 % more tokens
recomputes a little more than it must, which costs less than to measure and race each length by itself."""

SMALLER_STEPS = 3
"""After so many measured steps in a row with fewer or smaller forwards than expected, no others are expected. The next
time, after twice as many."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """One training forward of the model, or of a part of it if the model's own forward is not called."""

    stack: str | None
    """Name of the part, such as a stack; None for the whole model."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """(name of a tensor, its shape)."""
    padded: bool
    """Whether the attention mask masks a token, or an earlier batch was padded: see `StepForwards.read`."""

    def covers(self, other: Forward) -> bool:
        """Whether every tensor is at least as large as in another forward.

        A padded forward may need more than one without padding: transformers drops a mask that masks nothing
        (`_ignore_causal_mask_sdpa` in `masking_utils`), and then attention may run in a kernel that needs less memory.
        """
        if (self.stack, len(self.shapes)) != (other.stack, len(other.shapes)) or self.padded < other.padded:
            return False
        return all(
            name == other_name and len(shape) == len(other_shape) and all(map(operator.ge, shape, other_shape))
            for (name, shape), (other_name, other_shape) in zip(self.shapes, other.shapes, strict=True)
        )

    def has_form_of(self, other: Forward) -> bool:
        """Whether both have the same tensors, for as many sequences, whatever their lengths."""
        forms = [[(name, len(shape), shape[:1]) for name, shape in forward.shapes] for forward in (self, other)]
        return (self.stack, self.padded) == (other.stack, other.padded) and forms[0] == forms[1]

    @property
    def rows_and_tokens(self) -> tuple[int, int]:
        """(sequences, tokens of each); (1, 0) for a forward without text."""
        # Vectors, such as the lengths of packed rows, tell nothing of the tokens of a row.
        shapes = {name: shape for name, shape in self.shapes if len(shape) >= 2}
        names = [name for name in ("input_ids", "inputs_embeds", "hidden_states") if name in shapes]
        shape = shapes[names[0]] if names else next(iter(shapes.values()), (1, 0))
        return shape[0], shape[1]


@dataclasses.dataclass(frozen=True)
class Batch:
    """The forwards of one step in order, and the state in which it begins."""

    forwards: tuple[Forward, ...]
    has_gradients: bool
    """Whether there are gradients of earlier micro-steps."""
    state: tuple[Any, int] = (None, 0)
    """See `ModelState.present`."""

    def covers(self, other: Batch) -> bool:
        """Whether a step with this batch needs at least as much memory as one with another, whatever the plan."""
        if self.state != other.state or self.has_gradients < other.has_gradients:
            return False
        return self.has_room_for(other.forwards)

    def has_room_for(self, forwards: Sequence[Forward]) -> bool:
        """Whether these forwards are not more, and none is larger, than those of this batch."""
        return _have_room(self.forwards, forwards)

    @property
    def elements(self) -> int:
        """The number of elements of all tensors, to sort batches by."""
        return sum(math.prod(shape) for _, shape in self._shapes)

    def growth(self, other: Batch) -> float:
        """How many times as many elements the tensors of this batch have as those of another, at most; 0 if the
        batches do not have the same tensors."""
        if [name for name, _ in self._shapes] != [name for name, _ in other._shapes]:
            return 0.0
        pairs = zip(self._shapes, other._shapes, strict=True)
        ratios = [math.prod(shape) / max(1, math.prod(other_shape)) for (_, shape), (_, other_shape) in pairs]
        return max(ratios, default=1.0)

    @property
    def _shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of all tensors of all forwards."""
        return [row for forward in self.forwards for row in forward.shapes]

    def is_near(self, other: Batch) -> bool:
        """Whether a step with one batch tells what one with the other needs: one covers the other, and is hardly
        larger."""
        if (self.has_gradients, len(self.forwards)) != (other.has_gradients, len(other.forwards)):
            return False
        if self.covers(other):
            return other.elements >= NEAR * self.elements
        return other.covers(self) and self.elements >= NEAR * other.elements

    def length_of(self, other: Batch) -> float | None:
        """The length of another batch as a multiple of that of this one, if they differ in nothing else."""
        pairs: set[tuple[int, int]] = set()
        for forward, another in itertools.zip_longest(self.forwards, other.forwards):
            if forward is None or another is None or not forward.has_form_of(another):
                return None
            for (_, shape), (_, other_shape) in zip(forward.shapes, another.shapes, strict=True):
                pairs.update(zip(shape, other_shape, strict=True))
        ratios = {max(1, there) / max(1, here) for here, there in pairs if here != there}
        if (self.state, self.has_gradients) != (other.state, other.has_gradients) or len(ratios) > 1:
            return None
        return ratios.pop() if ratios else 1.0

    def __str__(self) -> str:
        sizes = dict.fromkeys(forward.rows_and_tokens for forward in self.forwards)
        text = " and ".join(f"{rows} x {tokens} tokens" for rows, tokens in sizes)
        padded = ", padded" if any(forward.padded for forward in self.forwards) else ""
        return text + padded + (", accumulated" if self.has_gradients else "")


def _have_room(planned: Sequence[Forward], forwards: Sequence[Forward]) -> bool:
    """Whether forwards are not more, and none is larger, than planned ones."""
    if len(planned) < len(forwards):
        return False
    return all(larger.covers(smaller) for larger, smaller in zip(planned, forwards, strict=False))


class StepForwards:
    """The forwards of the current step, and those that such steps are expected to have."""

    def __init__(self) -> None:
        self.current: list[Forward] = []
        self._beginning: Any = None
        """How the current step has begun: (state of the model, whether it has gradients, first forward)."""
        self._expected: dict[Any, tuple[Forward, ...]] = {}
        """How a step begins -> all forwards of such a step."""
        self._smaller: collections.Counter[Any] = collections.Counter()
        """How a step begins -> measured steps in a row with fewer or smaller forwards than were expected."""
        self._patience: dict[Any, int] = {}
        """How a step begins -> after so many of these, no others are expected."""
        self._has_padding = False
        """Whether a batch was padded."""
        self._names: dict[str | None, list[str]] = {}
        """Stack, or None for the model -> the names of its forward's parameters."""

    def read(self, module: nn.Module, stack: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Forward:
        """Describe a forward of a module by its arguments, the same whether they are given by place or by name."""
        arguments = dict(kwargs)
        if args:
            if stack not in self._names:
                self._names[stack] = compat.transformers.forward_parameters(module)
            names = itertools.chain(self._names[stack], map(str, itertools.count()))  # `*args` may be more
            arguments.update(zip(names, args, strict=False))
        shapes = []
        for name in sorted(arguments):  # the order in which a caller writes them makes no other batch
            value = arguments[name]
            leaves = [value] if isinstance(value, torch.Tensor) else compat.torch.tree_leaves(value)
            shapes += [(name, tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        mask = arguments.get("attention_mask")
        is_padded = False
        if isinstance(mask, torch.Tensor):
            # Reading a mask makes the host wait for the device, so after the first padded batch all count as padded. So
            # does one of four dimensions, which transformers passes on as it is (`masking_utils`).
            is_padded = self._has_padding or mask.dim() > 2 or not bool((mask != 0).all())
        self._has_padding |= is_padded
        return Forward(stack, tuple(shapes), is_padded)

    def begin(self, forward: Forward, has_gradients: bool, state: tuple[Any, int]) -> tuple[Forward, ...]:
        """Begin a step with this forward. Returns all forwards that it is expected to have."""
        self.current = [forward]
        self._beginning = state, has_gradients, forward
        return self._expected.get(self._beginning, (forward,))

    def learn(self) -> None:
        """Expect the forwards of the current step of all steps that begin like it.

        Of steps that begin alike and take turns, as in a GAN, the ones with more or larger forwards are expected: a
        plan for them has room for the others. The longer their turns are, the more steps are awaited.
        """
        beginning = self._beginning
        forwards = tuple(self.current)
        expected = self._expected.get(beginning, ())
        if forwards != expected and _have_room(expected, forwards):
            self._smaller[beginning] += 1
            if self._smaller[beginning] < self._patience.setdefault(beginning, SMALLER_STEPS):
                return
            self._patience[beginning] *= 2
        self._smaller[beginning] = 0
        self._expected[beginning] = forwards
