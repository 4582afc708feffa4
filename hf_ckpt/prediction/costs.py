"""Records of what blocks, stacks and a whole model cost under every action, in bytes and nanoseconds. Free of torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Block

Key = tuple[int, int]
"""(kind of a block, its action): the action is a position in `Costs.actions`."""
Choice = tuple[tuple[int, ...], ...]
"""For each stack, the action of each of its blocks, as positions in `Costs.actions`."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """One part of a step, such as the forward of a block: the bytes alive in it, above those at its beginning, and its
    time."""

    points: tuple[tuple[int, int], ...] = ()
    """After each operation: (bytes of everything but finished gradients, bytes of gradients finished so far). Both are
    counted from the beginning of the phase. A gradient is finished when it is in `parameter.grad`."""
    nanoseconds: int = 0

    def peak(self, accumulated: bool) -> int:
        """Most bytes alive above those at the beginning, at least 0.

        Where gradients are `accumulated` into those of earlier micro-steps, finished ones take no memory of their own.
        """
        return self._peaks[accumulated]

    @functools.cached_property
    def _peaks(self) -> tuple[int, int]:
        first = max((other + done for other, done in self.points), default=0)
        return max(0, first), max((0, *(other for other, _ in self.points)))

    @property
    def net(self) -> int:
        """Bytes that are left at the end, finished gradients not counted."""
        return self.points[-1][0] if self.points else 0

    @property
    def gradients(self) -> int:
        """Bytes of the gradients that are finished in this phase."""
        return self.points[-1][1] if self.points else 0


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """What one block costs under one action."""

    forward: Phase
    backward: Phase
    output_bytes: int
    """Bytes of tensors that its forward makes and that are freed in the block or head behind it."""
    forward_only_bytes: int = 0
    """Bytes of tensors that its forward makes and that are freed when the model's forward ends, such as the copies of
    weights that autocast makes."""


@dataclasses.dataclass(frozen=True)
class StackCosts:
    """Everything that planning needs to know of one stack."""

    name: str
    blocks: tuple[Block, ...]
    kinds: tuple[int, ...]
    """The kind of each block, as a number; blocks of one kind cost the same."""
    choices: tuple[tuple[int, ...], ...]
    """Kind -> the actions to choose from, as positions in `Costs.actions`."""
    first: Mapping[Key, BlockCost]
    """Key -> what the first block of the stack costs."""
    inner: Mapping[Key, BlockCost]
    """Key -> what a block between two others costs."""
    last: Mapping[Key, BlockCost]
    """Key -> what the last block costs, in whose backward the gradients of what all blocks share begin."""
    gradients: tuple[int, ...]
    """Kind -> bytes of the gradients of one block's parameters."""
    before: Phase
    """Forward of what runs before this stack: the embedding, or what lies between the stacks."""
    before_backward: Phase
    """Backward of what runs before the stack."""
    at_backward_bytes: int
    """How many bytes more are alive when the backward of the stack begins than after its forward, its output and
    finished gradients not counted."""
    shared_bytes: int
    """Bytes of the gradients of tensors that all its blocks share, alive from the last block's backward on."""
    before_at_backward_bytes: int
    """How many bytes more are alive when the backward of what runs before the stack begins than after its forward."""
    held: tuple[int, ...] = ()
    """Kind -> bytes of one block that are held until the backward of the whole model ends, under every action; empty
    for none. Layers of bitsandbytes in 8 bits hold on to their inputs so."""
    on_device: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Action that keeps tensors in host memory -> the action that keeps the same tensors on the device."""
    most_blocks: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Action that keeps tensors in host memory -> how many blocks may be given it, from the first block on."""

    def choices_at(self, place: int) -> tuple[int, ...]:
        """The actions to choose from for the block at `place` in the stack."""
        here = self.choices[self.kinds[place]]
        return tuple(action for action in here if place < self.most_blocks.get(action, len(self.blocks)))

    def cost_at(self, place: int, action: int) -> BlockCost:
        """What the block at `place` costs under an action."""
        at_end = place == len(self.kinds) - 1
        return (self.last if at_end else self.inner if place else self.first)[self.kinds[place], action]

    def held_by(self, kind: int) -> int:
        """Bytes that one block of a kind holds until the backward ends."""
        return self.held[kind] if self.held else 0


@dataclasses.dataclass(frozen=True)
class Static:
    """Bytes that do not depend on the actions of the blocks."""

    parameters: int
    buffers: int
    optimizer: int
    gradients: int
    """Bytes of the gradients of all trainable parameters."""
    batch: int
    step_bytes: int = 0
    """Bytes that the optimizer's step takes for a moment, beside its state."""
    gathered: int = 0
    """Under FSDP2, where `parameters` are this rank's parts: the whole parameters outside the blocks, and the buffer in
    which whole parameters arrive."""

    @property
    def always(self) -> int:
        """Bytes alive at every moment: everything but gradients and `step_bytes`."""
        return self.parameters + self.gathered + self.buffers + self.optimizer + self.batch

    @property
    def beside(self) -> int:
        """Most bytes alive before and after the micro-steps, whatever blocks do."""
        return self.always + self.gradients + self.step_bytes


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a model costs under every action, for one batch shape."""

    family: str
    model: str
    actions: tuple[Action, ...]
    stacks: tuple[StackCosts, ...]
    head: tuple[Phase, Phase]
    """Forward and backward of the head and the loss. The forward frees nothing that blocks have lent."""
    static: Static
    tokens: int
    """Tokens of one micro-step."""
    accumulation: int = 1
    """Micro-steps of one optimizer step."""
    optimizer_nanoseconds: int = 0
    head_tokens: int | str = "full"
    """How the head runs, in the words of `Plan.head`: `full`, `auto`, or the tokens of a chunk."""
    mlp_tokens: int | str = "full"
    """How the feed-forward of each block runs, in the words of `Plan.mlp`."""
    segments: tuple[int, ...] = ()
    """For each stack, how many segments its blocks are recomputed in; empty where blocks are recomputed one by one.
    Segments go with one choice only: `full` for every block."""
    notes: tuple[str, ...] = ()
    """Remarks on where the figures come from, as that times were measured."""

    @property
    def modes(self) -> tuple[bool, ...]:
        """The micro-steps that differ: False for one that begins without gradients, True for one that adds to those of
        earlier micro-steps."""
        return (False, True) if self.accumulation > 1 else (False,)

    def uniform(self, action: int) -> Choice:
        """The choice that gives `action` to every block that may have it.

        Another block gets the action that keeps the same on the device, or else the first of its own actions.
        """

        def fitting(stack: StackCosts, place: int) -> int:
            here = stack.choices_at(place)
            return next((found for found in (action, stack.on_device.get(action)) if found in here), here[0])

        return tuple(tuple(fitting(stack, place) for place in range(len(stack.kinds))) for stack in self.stacks)
