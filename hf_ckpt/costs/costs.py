"""What blocks, stacks and a whole model cost under every action, in bytes and nanoseconds. Does not import torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Block

Key = tuple[int, int]
"""(kind of a block, position of its action in `Costs.actions`)."""
Choice = tuple[tuple[int, ...], ...]
"""For each stack, the action of each of its blocks, as positions in `Costs.actions`."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """One part of a step, such as the forward of a block: its time, and the bytes alive in it above those at its
    beginning."""

    points: tuple[tuple[int, int], ...] = ()
    """After each operation: (bytes of everything but finished gradients, bytes of gradients finished so far). Both are
    counted from the beginning of the phase. A gradient is finished when it is in `parameter.grad`."""
    nanoseconds: int = 0

    def peak(self, accumulated: bool) -> int:
        """Most bytes alive above those at the beginning, at least 0.

        If gradients are `accumulated` into those of earlier micro-steps, finished ones need no new memory.
        """
        return self._peaks[accumulated]

    @functools.cached_property
    def _peaks(self) -> tuple[int, int]:
        first = max((other + done for other, done in self.points), default=0)
        return max(0, first), max((0, *(other for other, _ in self.points)))

    @property
    def net(self) -> int:
        """Bytes still alive at the end, without finished gradients."""
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
    """Bytes that its forward allocates and the following block or head frees."""
    forward_only_bytes: int = 0
    """Bytes that its forward allocates and that are freed when the model's forward ends, such as autocast's copies of
    weights."""


@dataclasses.dataclass(frozen=True)
class StackEnd:
    """What is freed when the forward of a stack ends, because only its variables held it."""

    first: int
    """Place of its first call."""
    last: int
    """Place of its last call."""
    input_bytes: tuple[int, ...]
    """Action -> bytes of the stack's input that are freed if the first call has this action."""
    shared_bytes: tuple[int, ...]
    """Action -> bytes of what all calls share, such as masks, that are freed if all calls have this action. A call with
    an action that frees less keeps the rest."""

    def with_actions(self, like: Iterable[int]) -> StackEnd:
        """The same with further actions, each of which frees what another one does."""
        numbers = list(like)
        own, shared = ([sizes[number] for number in numbers] for sizes in (self.input_bytes, self.shared_bytes))
        return dataclasses.replace(
            self, input_bytes=(*self.input_bytes, *own), shared_bytes=(*self.shared_bytes, *shared)
        )

    def freed(self, chosen: Sequence[int]) -> int:
        """Bytes that are freed if the calls of the whole model have these actions."""
        mine = chosen[self.first : self.last + 1]
        return self.input_bytes[mine[0]] + min(self.shared_bytes[action] for action in mine)


@dataclasses.dataclass(frozen=True)
class StackCosts:
    """Everything that the planner needs to know about one stack."""

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
    """Key -> what the last block costs. Its backward allocates the gradients of tensors that all blocks share."""
    gradients: tuple[int, ...]
    """Kind -> bytes of the gradients of one block's parameters."""
    before: Phase
    """Forward of what runs before this stack: the embedding, or the modules between two stacks."""
    before_backward: Phase
    """Backward of what runs before the stack."""
    at_backward_bytes: int
    """How many more bytes are alive when the backward of the stack begins than after its forward, without its output
    and finished gradients."""
    shared_bytes: int
    """Bytes of the gradients of tensors that all its blocks share, alive from the last block's backward on."""
    before_at_backward_bytes: int
    """How many more bytes are alive when the backward of what runs before the stack begins than after its forward."""
    ends: tuple[StackEnd, ...] = ()
    """What is freed at the ends of the stacks of the model, if that is known."""
    held: tuple[int, ...] = ()
    """Kind -> bytes that one block holds until the backward of the whole model ends, under every action; empty for
    none. 8-bit layers of bitsandbytes hold their inputs that long."""
    on_device: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Action that keeps tensors in host memory -> the action that keeps the same tensors on the device."""
    most_blocks: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Action that keeps tensors in host memory -> how many blocks may have it, counted from the first block."""

    def choices_at(self, place: int) -> tuple[int, ...]:
        """The actions available to the block at `place` in the stack."""
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
    """Temporary bytes of the optimizer's step, in addition to its state."""
    gathered: int = 0
    """Under FSDP2, where `parameters` counts this rank's shards: the unsharded parameters outside the blocks, and the
    all-gather buffer."""

    @property
    def always(self) -> int:
        """Bytes alive at every moment: everything but gradients and `step_bytes`."""
        return self.parameters + self.gathered + self.buffers + self.optimizer + self.batch

    @property
    def beside(self) -> int:
        """Most bytes alive before and after the micro-steps, whatever the blocks do."""
        return self.always + self.gradients + self.step_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """What a model costs under every action, for one batch shape."""

    family: str
    model: str
    actions: tuple[Action, ...]
    stacks: tuple[StackCosts, ...]
    head: tuple[Phase, Phase]
    """Forward and backward of the head and the loss. The forward does not include freeing `forward_only_bytes`."""
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
    """For each stack, how many segments its blocks are recomputed in; empty if blocks are recomputed one by one.
    Segments allow only one choice: `full` for every block."""
    blocks: tuple[Block, ...] = ()
    """All blocks of the model, if a step may not call some of them; these keep nothing and get the action `keep`."""
    notes: tuple[str, ...] = ()
    """Remarks on the origin of the figures, for example that times were measured."""

    @property
    def modes(self) -> tuple[bool, ...]:
        """The kinds of micro-steps: False for one that begins without gradients, True for one that adds to the
        gradients of earlier micro-steps."""
        return (False, True) if self.accumulation > 1 else (False,)

    def uniform(self, action: int) -> Choice:
        """The choice that gives `action` to every block that may have it.

        Other blocks get the action that keeps the same tensors on the device, or else the first of their own actions.
        """

        def fitting(stack: StackCosts, place: int) -> int:
            here = stack.choices_at(place)
            return next((found for found in (action, stack.on_device.get(action)) if found in here), here[0])

        return tuple(tuple(fitting(stack, place) for place in range(len(stack.kinds))) for stack in self.stacks)
