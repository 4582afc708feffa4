"""What a plan depends on: the shapes of a step's forwards, and the state of the model."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Mapping
from typing import Any

import torch

from hf_ckpt import compat

NEAR = 0.8
"""Batches of at least this share of another one's size use its measurements and plans."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """One training forward of the model, or of a part of it if the model's own forward is not called."""

    stack: str | None
    """Name of the part, such as a stack; None for the whole model."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """(name of a tensor, its shape)."""
    padded: bool
    """Whether the attention mask masks a token."""

    def covers(self, other: Forward) -> bool:
        """Whether every tensor is at least as large as in another forward."""
        if (self.stack, len(self.shapes)) != (other.stack, len(other.shapes)) or self.padded < other.padded:
            return False
        return all(
            mine == its and len(one) == len(two) and all(map(operator.ge, one, two))
            for (mine, one), (its, two) in zip(self.shapes, other.shapes, strict=True)
        )

    @property
    def text(self) -> tuple[int, int]:
        """(sequences, tokens of each); (1, 0) for a forward without text."""
        shapes = {name: shape for name, shape in self.shapes if len(shape) >= 2}
        names = [name for name in ("input_ids", "inputs_embeds", "hidden_states") if name in shapes]
        shape = shapes[names[0]] if names else next(iter(shapes.values()), (1, 0))
        return shape[0], shape[1]


@dataclasses.dataclass(frozen=True)
class Batch:
    """The forwards of one step in order, and the state in which it begins."""

    forwards: tuple[Forward, ...]
    resident: bool
    """Whether there are gradients of earlier micro-steps."""
    state: tuple[Any, int] = (None, 0)
    """The type that autocast computes in, and a number for which parameters are trained: see `Look`."""

    def covers(self, other: Batch) -> bool:
        """Whether a step with this batch needs at least as much memory as one with another, whatever the plan."""
        return (
            self.state == other.state
            and self.resident >= other.resident
            and len(self.forwards) >= len(other.forwards)
            and all(mine.covers(its) for mine, its in zip(self.forwards, other.forwards, strict=False))
        )

    @property
    def elements(self) -> int:
        """The number of elements of all tensors, to sort batches by."""
        return sum(math.prod(shape) for forward in self.forwards for _, shape in forward.shapes)

    def growth(self, other: Batch) -> float:
        """How many times as many elements the tensors of this batch have as those of another, at most; 0 if the
        batches do not have the same tensors."""
        mine, its = ([row for forward in batch.forwards for row in forward.shapes] for batch in (self, other))
        if [name for name, _ in mine] != [name for name, _ in its]:
            return 0.0
        pairs = zip(mine, its, strict=True)
        return max((math.prod(one) / max(1, math.prod(two)) for (_, one), (_, two) in pairs), default=1.0)

    def is_near(self, other: Batch) -> bool:
        """Whether a step with one batch tells what one with the other needs: one covers the other, and is hardly
        larger."""
        if (self.resident, len(self.forwards)) != (other.resident, len(other.forwards)):
            return False
        small, large = (other, self) if self.covers(other) else (self, other)
        return large.covers(small) and small.elements >= NEAR * large.elements

    def __str__(self) -> str:
        rows = dict.fromkeys(f"{rows} x {tokens} tokens" for rows, tokens in (f.text for f in self.forwards))
        padded = ", padded" if any(forward.padded for forward in self.forwards) else ""
        return " and ".join(rows) + padded + (", accumulated" if self.resident else "")


def forward_of(stack: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], padded_before: bool) -> Forward:
    """Describe a forward by its arguments.

    After the first padded batch, every attention mask counts as padded: reading one makes the host wait for the device.
    """
    arguments = itertools.chain(((str(place), value) for place, value in enumerate(args)), kwargs.items())
    shapes = tuple(
        (name, tuple(leaf.shape))
        for name, value in sorted(arguments, key=operator.itemgetter(0))
        for leaf in ([value] if isinstance(value, torch.Tensor) else compat.torch.tree_leaves(value))
        if isinstance(leaf, torch.Tensor)
    )
    mask = kwargs.get("attention_mask")
    padded = isinstance(mask, torch.Tensor) and (padded_before or mask.dim() > 2 or not bool((mask != 0).all()))
    return Forward(stack, shapes, padded)
