"""The memory of a training step, moment by moment, put together from traced parts. Exact integers, free of torch.

A step is: what is before the blocks, the blocks' forwards, the head and the loss with their backward, the blocks'
backwards in reverse, and what is before the blocks again. `Costs` has each part once for every kind of block, every
action and every action of the block before it, so that a timeline of any depth is put together without tracing more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from hf_ckpt.plan import Action, Block, run_lengths

Key = tuple[int, int]
"""(kind of block, number of its action)."""
Choice = tuple[tuple[int, ...], ...]
"""The number of the action of every block, stack by stack."""


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a step: live bytes against those at its beginning, and its time."""

    points: tuple[tuple[int, int], ...] = ()
    """After each operation: (bytes of everything but finished gradients, bytes of gradients finished so far)."""
    nanoseconds: int = 0
    flops: int = 0
    moved_bytes: int = 0
    """Read and written by operations that compute."""
    operations: int = 0

    def peak(self, accumulated: bool) -> int:
        """Largest value, at least 0. Where gradients are `accumulated` into those of before, finished ones are gone."""
        return self._peaks[accumulated]

    @functools.cached_property
    def _peaks(self) -> tuple[int, int]:
        first = max((other + done for other, done in self.points), default=0)
        return max(0, first), max((0, *(other for other, _ in self.points)))

    @property
    def net(self) -> int:
        """What is left at the end, finished gradients apart."""
        return self.points[-1][0] if self.points else 0

    @property
    def gradients(self) -> int:
        """Bytes of gradients that it finishes."""
        return self.points[-1][1] if self.points else 0


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """One block under one action, behind a block under some action."""

    forward: Phase
    backward: Phase
    output_bytes: int
    """Made by its forward, and let go by the block or head behind it."""
    lent_bytes: int = 0
    """Made by its forward, and let go when the whole forward ends: autocast's copies of weights."""


@dataclasses.dataclass(frozen=True)
class StackCosts:
    """All that planning needs to know of one stack."""

    name: str
    blocks: tuple[Block, ...]
    kinds: tuple[int, ...]
    """Of each block: blocks of one kind cost the same."""
    choices: tuple[tuple[int, ...], ...]
    """Kind -> the actions to choose from, as numbers of `Costs.actions`."""
    costs: Mapping[tuple[Key | None, Key], BlockCost]
    """(the block before or None for the first, the block) -> its cost."""
    last_backward: Mapping[Key, Phase]
    """Of the stack's last block, where gradients of what all blocks share begin."""
    gradients: tuple[int, ...]
    """Kind -> bytes of its parameters' gradients."""
    before: Mapping[Key | None, Phase]
    """What runs before the stack, by the last block of the stack before (None for the first stack)."""
    before_backward: Phase
    """Its backward."""
    before_gradients: int
    turn_bytes: int
    """More alive when its backward begins than after its forward, its output and finished gradients left out."""
    shared_bytes: int
    """Gradients of what its blocks share, alive from the last block's backward on."""
    before_turn_bytes: int
    """As `turn_bytes`, for what runs before the stack."""
    instead: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Action that moves what it keeps to host memory -> the one that keeps the same on the device."""
    movable: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Such an action -> how many blocks it may be given to, from the first one on."""

    def choices_at(self, place: int) -> tuple[int, ...]:
        """The actions to choose from for one block."""
        here = self.choices[self.kinds[place]]
        return tuple(action for action in here if place < self.movable.get(action, len(self.blocks)))

    def lent_by(self, key: Key) -> int:
        """`lent_bytes` of a block, whatever is before it."""
        return max(cost.lent_bytes for (_, found), cost in self.costs.items() if found == key)

    def keys(self, choice: Sequence[int]) -> list[Key]:
        """One key a block."""
        return list(zip(self.kinds, choice, strict=True))


@dataclasses.dataclass(frozen=True)
class Static:
    """Bytes that are there all the time."""

    parameters: int
    buffers: int
    optimizer: int
    gradients: int
    """Of all trainable parameters, when all are there."""
    batch: int
    step_bytes: int = 0
    """What the optimizer's step needs for a moment."""
    gathered: int = 0
    """Whole parameters, of which `parameters` are this rank's parts, and the buffer that they come in."""

    @property
    def always(self) -> int:
        """Everything but gradients."""
        return self.parameters + self.gathered + self.buffers + self.optimizer + self.batch


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a model costs under every action, at one batch."""

    family: str
    model: str
    actions: tuple[Action, ...]
    stacks: tuple[StackCosts, ...]
    head: Mapping[Key, tuple[Phase, Phase]]
    """Last block of the last stack -> forward and backward of everything behind it."""
    static: Static
    tokens: int
    """Of one micro-step."""
    accumulation: int = 1
    optimizer_nanoseconds: int = 0
    head_tokens: int | str = "full"
    """How the head runs: as `Plan.head` says."""
    notes: tuple[str, ...] = ()
    """What was assumed."""

    @property
    def modes(self) -> tuple[bool, ...]:
        """Micro-steps that differ: gradients are empty at first, then accumulated into."""
        return (False, True) if self.accumulation > 1 else (False,)

    def uniform(self, action: int) -> Choice:
        """One action for every block that can have it; the others get what is nearest to it."""

        def fitting(stack: StackCosts, place: int) -> int:
            here = stack.choices_at(place)
            return next((found for found in (action, stack.instead.get(action)) if found in here), here[0])

        return tuple(tuple(fitting(stack, place) for place in range(len(stack.kinds))) for stack in self.stacks)


@dataclasses.dataclass(frozen=True)
class Moment:
    """One phase of a timeline, where it lies."""

    label: str
    """`embedding`, `forward 3 of decoder`, `head`, ..."""
    block: str | None
    """Qualified name, for a block's phases."""
    backward: bool
    start_bytes: int
    """Alive when it begins."""
    static_bytes: int
    """The part of it that is always there."""
    gradient_bytes: int
    """The part of it that is gradients."""
    kept_bytes: int
    """The part of it that what runs before the head keeps for its backward."""
    phase: Phase
    accumulated: bool

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive in it."""
        return self.start_bytes + self.phase.peak(self.accumulated)

    def levels(self) -> Iterator[tuple[int, int]]:
        """(live bytes, bytes of gradients among them) after each operation."""
        for other, done in self.phase.points:
            new = 0 if self.accumulated else done
            yield self.start_bytes + other + new, self.gradient_bytes + new


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step under a plan."""

    moments: tuple[Moment, ...]
    nanoseconds: int
    """Of one optimizer step, all its micro-steps."""
    accumulated: bool
    """Whether this is a micro-step behind the first one, whose gradients are there already."""

    @property
    def worst(self) -> Moment:
        """Where the peak is."""
        return max(self.moments, key=lambda moment: moment.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at any moment."""
        return self.worst.peak_bytes

    @property
    def is_heads(self) -> bool:
        """Whether the peak is that of the head and its loss, which no action of a block lowers by itself."""
        return self.worst.block is None and "head" in self.worst.label

    def parts(self) -> dict[str, int]:
        """What fills the peak, in bytes."""
        worst = self.worst
        saved = worst.kept_bytes
        level, gradients = max(((worst.start_bytes, worst.gradient_bytes), *worst.levels()))
        return {
            "weights and optimizer state": worst.static_bytes,
            "gradients": gradients,
            "kept for backward": saved,
            f"work of {worst.label}": level - worst.static_bytes - gradients - saved,
        }


def step_nanoseconds(costs: Costs, choice: Choice) -> int:
    """Predicted time of one optimizer step, all its micro-steps."""
    total = sum(phase.nanoseconds for phase in _phases(costs, choice))
    return total * costs.accumulation + costs.optimizer_nanoseconds


def timeline(costs: Costs, choice: Choice, accumulated: bool = False) -> Timeline:
    """The step under the actions of `choice`; `accumulated` is a micro-step behind the first."""
    static = costs.static.always
    resident = costs.static.gradients if accumulated else 0
    moments: list[Moment] = []

    def add(label: str, phase: Phase, start: int, gradients: int, block: str | None = None, back: bool = False) -> None:
        kept = start - static - gradients
        if label.startswith("head"):
            kept = level - static - resident
        moments.append(Moment(label, block, back, start, static, gradients, kept, phase, accumulated))

    level = static + resident
    after: list[list[int]] = []  # stack -> bytes that last before it, and after the forward of each block
    lent, last_lent = 0, 0
    last: Key | None = None
    for stack, chosen in zip(costs.stacks, choice, strict=True):
        phase = stack.before[last]
        add(_before(stack, costs), phase, level, resident)
        level += phase.net
        after.append([level - lent])
        previous: Key | None = None
        for block, key in zip(stack.blocks, stack.keys(chosen), strict=True):
            cost = stack.costs[previous, key]
            add(f"forward of {stack.name} {block.index}", cost.forward, level, resident, block.name)
            level += cost.forward.net
            lent += cost.lent_bytes
            after[-1].append(level - lent)
            previous = key
        assert previous is not None
        last_lent = stack.lent_by(previous)
        last = previous
    assert last is not None
    forward, backward = costs.head[last]
    add("head and loss", forward, level, resident)
    level -= lent
    add("head and loss, backward", backward, level + last_lent + forward.net, resident, back=True)
    done = backward.gradients
    for stack, chosen, levels in zip(reversed(costs.stacks), reversed(choice), reversed(after), strict=True):
        keys = stack.keys(chosen)
        for place in range(len(keys) - 1, -1, -1):
            key, block = keys[place], stack.blocks[place]
            cost = stack.costs[keys[place - 1] if place else None, key]
            at_end = place == len(keys) - 1
            phase = stack.last_backward[key] if at_end else cost.backward
            start = levels[place + 1] + stack.turn_bytes - cost.output_bytes + (0 if at_end else stack.shared_bytes)
            new = 0 if accumulated else done
            add(f"backward of {stack.name} {block.index}", phase, start + new, resident + new, block.name, True)
            done += stack.gradients[key[0]]
        new = 0 if accumulated else done
        start = levels[0] + stack.before_turn_bytes + new
        add(f"{_before(stack, costs)}, backward", stack.before_backward, start, resident + new, None, True)
        done += stack.before_gradients
    step = Phase(((costs.static.step_bytes, 0), (0, 0)), costs.optimizer_nanoseconds)
    add("optimizer step", step, static + costs.static.gradients, costs.static.gradients)
    return Timeline(tuple(moments), step_nanoseconds(costs, choice), accumulated)


def worst_timeline(costs: Costs, choice: Choice) -> Timeline:
    """The micro-step with the larger peak."""
    return max((timeline(costs, choice, mode) for mode in costs.modes), key=lambda found: found.peak_bytes)


def segmented_peak(costs: Costs, full: int, length: int, accumulated: bool = False) -> int:
    """Most bytes alive when runs of `length` blocks are recomputed as one (0: as many runs as the root of all blocks).

    Of a run only the first block's input stays. Its backward runs all its blocks again, as `keep`, and then back.
    Blocks that have no action `full` are taken for ones that have.
    """
    under_full = {moment.label: moment for moment in timeline(costs, costs.uniform(full), accumulated).moments}
    kept = {(m.block, m.backward): m.phase for m in timeline(costs, costs.uniform(0), accumulated).moments if m.block}
    named = {(moment.block, moment.backward): moment for moment in under_full.values() if moment.block}
    peak = under_full["optimizer step"].peak_bytes
    gone = 0
    """Inputs that `full` keeps, and that runs so far do not."""
    runs: list[tuple[int, Sequence[Block]]] = []
    for stack in costs.stacks:
        before = _before(stack, costs)
        peak = max(peak, *(under_full[label].peak_bytes - gone for label in (before, f"{before}, backward")))
        for run in _runs(stack.blocks, length):
            at_end = len(run) > 1 and run[-1] == stack.blocks[-1]  # what the stack shares begins in it
            runs.append((gone + (stack.shared_bytes if at_end else 0), run))
            for place, block in enumerate(run):
                moment = named[block.name, False]
                peak = max(peak, moment.peak_bytes - gone)
                gone += max(0, moment.phase.net) if place else 0
    peak = max(peak, *(moment.peak_bytes - gone for label, moment in under_full.items() if label.startswith("head")))
    for less, run in runs:
        first, last = named[run[0].name, True], named[run[-1].name, True]
        level = first.start_bytes - first.gradient_bytes + last.gradient_bytes - less
        for block in run:
            peak = max(peak, level + kept[block.name, False].peak(True))
            level += kept[block.name, False].net
        for block in reversed(run):
            phase = kept[block.name, True]
            peak = max(peak, level + phase.peak(accumulated))
            level += phase.net + (0 if accumulated else phase.gradients)
    return peak


def _runs(blocks: Sequence[Block], length: int) -> Iterator[Sequence[Block]]:
    total, start = len(blocks), 0
    lengths = [length] * -(-total // length) if length else run_lengths(total, round(total**0.5))
    for each in lengths:
        yield blocks[start : start + each]
        start += each


def _before(stack: StackCosts, costs: Costs) -> str:
    return "embedding" if stack is costs.stacks[0] else f"between {costs.stacks[0].name} and {stack.name}"


def _phases(costs: Costs, choice: Choice) -> Iterator[Phase]:
    last: Key | None = None
    for stack, chosen in zip(costs.stacks, choice, strict=True):
        yield stack.before[last]
        yield stack.before_backward
        previous: Key | None = None
        for key in stack.keys(chosen):
            yield stack.costs[previous, key].forward
            yield stack.costs[previous, key].backward
            previous = key
        last = previous
    assert last is not None
    yield from costs.head[last]
