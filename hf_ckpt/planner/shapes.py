"""What a plan for a batch depends on: the sizes of the batch, and the state that training is in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.prediction.batches import Inputs, has_room_for, with_room_for

Sizes = dict[str, tuple[int, int]]
"""Stack -> (sequences, tokens) that go into the stack."""


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """What a batch looks like, and the state that training is in, as far as a plan depends on them."""

    sizes: Sizes
    padded: bool = False
    """Whether attention gets a mask that masks anything."""
    accumulation: int = 1
    """Micro-steps of one optimizer step; 2 stands for any number above 1."""
    autocast: torch.dtype | None = None
    """The type that autocast computes in; None without autocast."""
    held_back: bool = False
    """Whether FSDP2 keeps whole gradients from one micro-step to the next, instead of this rank's part of them."""
    inputs: Inputs = ()
    """All that goes into the model, where that is more than text of these sizes."""

    @property
    def tokens(self) -> int:
        """Tokens of the batch, those of all stacks added up."""
        return sum(sequences * tokens for sequences, tokens in self.sizes.values())

    def covers(self, other: BatchShape) -> bool:
        """Whether a plan for this shape fits the other shape, too."""
        return (
            all(
                stack in self.sizes and size[0] <= self.sizes[stack][0] and size[1] <= self.sizes[stack][1]
                for stack, size in other.sizes.items()
            )
            and self.padded >= other.padded
            and (self.accumulation > 1) >= (other.accumulation > 1)
            and self.held_back >= other.held_back
            and has_room_for(self.inputs, other.inputs)
        )

    def bucket(self, digits: int = 3) -> BatchShape:
        """This shape with every length `rounded_up`; with images, sounds and the like, as it is."""
        return self if self.inputs else self.resized(lambda tokens: rounded_up(tokens, digits))

    def resized(self, change: Callable[[int], int], sequences: int | None = None) -> BatchShape:
        """This shape with other lengths, and with as many `sequences` where that is given.

        Args:
            change: gives the new number of tokens for the old one.
            sequences: in place of those of every stack.
        """
        sizes = {stack: (sequences or rows, max(1, change(tokens))) for stack, (rows, tokens) in self.sizes.items()}
        return dataclasses.replace(self, sizes=sizes)

    @property
    def sequences(self) -> int:
        """The most sequences that go into a stack."""
        return max(rows for rows, _ in self.sizes.values())

    @property
    def longest(self) -> int:
        """The most tokens of a sequence in any stack."""
        return max(tokens for _, tokens in self.sizes.values())

    @property
    def state(self) -> tuple[Any, ...]:
        """All but the sizes."""
        inputs = tuple((name, len(shape), dtype) for name, shape, dtype in self.inputs)
        return self.padded, self.accumulation, self.autocast, self.held_back, inputs

    def reaches(self, other: BatchShape) -> bool:
        """Whether this shape is at least as large as the other in all stacks whose sizes it tells."""
        part = {stack: size for stack, size in other.sizes.items() if stack in self.sizes}
        return bool(part) and self.covers(dataclasses.replace(other, sizes=part))

    def with_room_for(self, other: BatchShape) -> BatchShape:
        """The smallest shape that covers both."""
        sizes = {
            stack: (max(mine[0], yours[0]), max(mine[1], yours[1]))
            for stack in self.sizes | other.sizes
            for mine, yours in [(self.sizes.get(stack, (0, 0)), other.sizes.get(stack, (0, 0)))]
        }
        accumulation = max(self.accumulation, other.accumulation)
        padded, held_back = self.padded or other.padded, self.held_back or other.held_back
        inputs = with_room_for(self.inputs, other.inputs)
        return BatchShape(sizes, padded, accumulation, self.autocast, held_back, inputs)

    def __str__(self) -> str:
        shapes = {f"{name} of {' x '.join(map(str, shape))}" for name, shape, _ in self.inputs} or {
            f"{batch} x {tokens} tokens" for batch, tokens in self.sizes.values()
        }
        padded = ", padded" if self.padded else ""
        return " and ".join(sorted(shapes)) + padded + (", accumulated" if self.accumulation > 1 else "")


def rounded_up(number: int, digits: int) -> int:
    """The next number with so many binary digits, followed by zeros; with 3, it is at most a quarter larger.

    They are 1 to 8, 10, 12, 14, 16, 20, 24, 28, 32, 40 and so on then.
    """
    zeros = max(0, number.bit_length() - digits)
    return -(-number >> zeros) << zeros


def sizes_with(
    stacks: Sequence[str], stack: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: Inputs
) -> Sizes:
    """`sizes_of` a batch; of one without text, how many samples it has, as sequences of one token."""
    found = sizes_of(stacks, stack, args, kwargs)
    if found or not inputs:
        return found
    return {stacks[0]: (next((shape[0] for _, shape, _ in inputs if shape), 1), 1)}


def sizes_of(stacks: Sequence[str], stack: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sizes:
    """The sequences and tokens that go into each stack, as far as the arguments of a forward tell.

    Args:
        stacks: names of the model's stacks, in the order in which they run.
        stack: the stack whose forward it is; None for that of the whole model.
        args: positional arguments of the forward.
        kwargs: keyword arguments of the forward: tensors of [sequences, tokens, ...].
    """
    found: Sizes = {}

    def take(name: str, *values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.dim() >= 2:
                found[name] = value.shape[0], value.shape[1]
                return

    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
    take(stack or stacks[0], *given, kwargs.get("hidden_states"))
    if stack is None and len(stacks) > 1:
        names = ("labels", "decoder_input_ids", "decoder_inputs_embeds")
        take(stacks[-1], *(kwargs.get(name) for name in names))
    return found


def is_padded(kwargs: Mapping[str, Any], known: bool) -> bool:
    """Whether the attention mask masks anything.

    Where plans are `known` to have room for masks, any mask counts: to ask for its values makes the host wait for the
    device.
    """
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor):
        return False
    return known or mask.dim() > 2 or not bool((mask != 0).all())


def micro_steps(base: nn.Module) -> int:
    """1, or 2 for any number above: what matters is whether gradients of earlier micro-steps are there."""
    there = any(parameter.grad is not None for parameter in base.parameters() if parameter.requires_grad)
    return 2 if there or compat.accumulated_steps() > 1 else 1


def autocast_of(base: nn.Module) -> torch.dtype | None:
    """The type that autocast computes in on the model's device; None while it is off."""
    parameter = next(base.parameters())
    return compat.autocast_dtype(parameter.device.type)
