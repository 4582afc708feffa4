"""Batch shapes, and other training state that a plan depends on."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""(name of a tensor, its shape)."""
NEAR = 0.8
"""Batches of at least this share of another one's size use its measurements and plans."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """One training forward of the model, or of a stack if the model's own forward is not called."""

    stack: str | None
    """Name of the stack; None for the whole model."""
    shapes: Shapes
    padded: bool
    """Whether the attention mask masks a token."""

    def covers(self, other: Forward) -> bool:
        """Whether every tensor is at least as large as in another forward."""
        return (
            self.stack == other.stack
            and self.padded >= other.padded
            and [(name, len(shape)) for name, shape in self.shapes]
            == [(name, len(shape)) for name, shape in other.shapes]
            and all(
                mine >= its
                for (_, one), (_, two) in zip(self.shapes, other.shapes, strict=True)
                for mine, its in zip(one, two, strict=True)
            )
        )

    @property
    def text(self) -> tuple[int, int]:
        """(sequences, tokens of each); (1, 0) for a forward without text."""
        shapes = dict(self.shapes)
        for name in ("input_ids", "inputs_embeds", "hidden_states"):
            if len(shapes.get(name, ())) >= 2:
                return shapes[name][0], shapes[name][1]
        first = next((shape for _, shape in self.shapes if len(shape) >= 2), (1, 0))
        return first[0], first[1]


@dataclasses.dataclass(frozen=True)
class Batch:
    """The forwards of one step in order, and whether there are gradients at its beginning."""

    forwards: tuple[Forward, ...]
    resident: bool
    """Whether there are gradients of earlier micro-steps."""

    def covers(self, other: Batch) -> bool:
        """Whether a step with this batch needs at least as much memory as one with another, whatever the plan."""
        return (
            self.resident >= other.resident
            and len(self.forwards) >= len(other.forwards)
            and all(mine.covers(its) for mine, its in zip(self.forwards, other.forwards, strict=False))
        )

    @property
    def tokens(self) -> int:
        """Tokens of all forwards."""
        return sum(rows * length for rows, length in (forward.text for forward in self.forwards))

    @property
    def elements(self) -> int:
        """The number of elements of all tensors, to sort batches by."""
        return sum(math.prod(shape) for forward in self.forwards for _, shape in forward.shapes)

    def growth(self, other: Batch) -> float:
        """How many times as many elements the tensors of this batch have as those of another, at most; infinite if the
        batches do not have the same tensors."""
        pairs = list(zip(self.forwards, other.forwards, strict=False))
        names = [([name for name, _ in one.shapes], [name for name, _ in two.shapes]) for one, two in pairs]
        if len(self.forwards) != len(other.forwards) or any(one != two for one, two in names):
            return math.inf
        sizes = [
            (math.prod(mine), math.prod(its))
            for one, two in pairs
            for (_, mine), (_, its) in zip(one.shapes, two.shapes, strict=True)
        ]
        return max((mine / max(1, its) for mine, its in sizes), default=1.0)

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
    given = itertools.chain(((str(place), value) for place, value in enumerate(args)), kwargs.items())
    shapes = tuple(
        (name, tuple(leaf.shape))
        for name, value in sorted(given)
        for leaf in ([value] if isinstance(value, torch.Tensor) else compat.tree_leaves(value))
        if isinstance(leaf, torch.Tensor)
    )
    mask = kwargs.get("attention_mask")
    padded = isinstance(mask, torch.Tensor) and (padded_before or mask.dim() > 2 or not bool((mask != 0).all()))
    return Forward(stack, shapes, padded)


def has_gradients(base: nn.Module) -> bool:
    """Whether a parameter has a gradient."""
    return any(parameter.grad is not None for parameter in base.parameters())


def look_of(base: nn.Module, device_type: str, sharded: bool) -> tuple[Any, ...]:
    """Return what a step depends on beside its batch: which parameters are trained, their bytes (unless `sharded`), and
    autocast's type.

    It runs for every batch. For 32 blocks of LLaMA, it takes 0.1 to 0.2 ms, a quarter of `base.parameters()`.
    """
    found: list[nn.Parameter | None] = []
    modules = [base]
    while modules:
        here = vars(modules.pop())
        found += here["_parameters"].values()
        modules += [module for module in here["_modules"].values() if module is not None]
    parameters = tuple((p.requires_grad, 0 if sharded else p.nbytes) for p in found if p is not None)
    return compat.autocast_dtype(device_type), parameters
