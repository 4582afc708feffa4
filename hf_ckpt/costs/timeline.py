"""Computes the memory of a training step from traced parts, moment by moment. Exact integers, does not import torch.

A step consists of what runs before the blocks, the blocks' forwards, the head and the loss with their backward, the
blocks' backwards in reverse, the backward of what runs before them, and the optimizer's step. `Costs` has each part
once for every kind of block and every action, so timelines of any depth need no further tracing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from hf_ckpt.costs.costs import Choice, Costs, Phase, StackCosts
from hf_ckpt.spec.plan import Block, run_lengths


@dataclasses.dataclass(frozen=True)
class Moment:
    """One phase of a timeline, with the bytes alive when it begins."""

    label: str
    """What runs, in words: `embedding`, `forward of decoder 3`, `head and loss, backward`."""
    block: str | None
    """Qualified name of the block that runs; None outside the blocks."""
    backward: bool
    """Whether it is part of the backward."""
    start_bytes: int
    """Bytes alive when it begins."""
    static_bytes: int
    """How many of these are alive all the time: weights, buffers, optimizer state and batch."""
    gradient_bytes: int
    """How many of these are finished gradients."""
    kept_bytes: int
    """How many of these are kept for the backward; in the head, those that everything before it keeps."""
    phase: Phase
    accumulated: bool
    """Whether it belongs to a micro-step that adds to the gradients of earlier ones."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive while it runs."""
        return self.start_bytes + self.phase.peak(self.accumulated)

    def levels(self) -> Iterator[tuple[int, int]]:
        """For each operation: (bytes alive after it, bytes of finished gradients among them)."""
        for other, done in self.phase.points:
            new = 0 if self.accumulated else done
            yield self.start_bytes + other + new, self.gradient_bytes + new


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The memory of one micro-step under a choice of actions, and of the optimizer's step."""

    moments: tuple[Moment, ...]
    """In order of time."""
    nanoseconds: int
    """Time of one optimizer step with all its micro-steps."""
    accumulated: bool
    """Whether the micro-step adds to the gradients of earlier ones."""

    @property
    def worst(self) -> Moment:
        """The moment with the peak."""
        return max(self.moments, key=lambda moment: moment.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at any moment."""
        return self.worst.peak_bytes

    @property
    def is_heads(self) -> bool:
        """Whether the peak is in the head and its loss, whose own memory no action of a block reduces."""
        return self.worst.block is None and "head" in self.worst.label

    def parts(self) -> dict[str, int]:
        """What fills the peak: name -> bytes. The bytes add up to `peak_bytes`."""
        worst = self.worst
        level, gradients = max(((worst.start_bytes, worst.gradient_bytes), *worst.levels()))
        # Some of it may be freed by then: all of it in the head, where autocast's copies of weights are freed, too.
        saved = max(0, min(worst.kept_bytes, level - worst.static_bytes - gradients))
        return {
            "weights and optimizer state": worst.static_bytes,
            "gradients": gradients,
            "kept for backward": saved,
            f"temporary in {worst.label}": level - worst.static_bytes - gradients - saved,
        }


def step_nanoseconds(costs: Costs, choice: Choice) -> int:
    """Predicted nanoseconds of one optimizer step with all its micro-steps."""
    total = sum(phase.nanoseconds for phase in _phases(costs, choice))
    return total * costs.accumulation + costs.optimizer_nanoseconds


def timeline(costs: Costs, choice: Choice, accumulated: bool = False) -> Timeline:
    """The timeline of one micro-step under a choice of actions, and of the optimizer's step.

    Args:
        costs: traced.
        choice: the action of every block.
        accumulated: whether the micro-step adds to the gradients of earlier ones.
    """
    if costs.segments:
        return _in_segments(costs, choice, accumulated)
    builder = _Builder(costs, choice, accumulated)
    builder.add_forwards()
    builder.add_head()
    builder.add_backwards()
    builder.add_optimizer()
    return Timeline(tuple(builder.moments), step_nanoseconds(costs, choice), accumulated)


class _Builder:
    """Collects the moments of a timeline; its methods are called in order."""

    def __init__(self, costs: Costs, choice: Choice, accumulated: bool) -> None:
        self.costs, self.choice, self.accumulated = costs, choice, accumulated
        self.static = costs.static.always
        self.resident = costs.static.gradients if accumulated else 0
        """Bytes of gradients that exist at the beginning."""
        self.moments: list[Moment] = []
        self.level = self.static + self.resident
        """Bytes alive after the forwards so far."""
        self.after: list[list[int]] = []
        """For each stack: bytes alive before it, and after the forward of each of its blocks, that outlive the forward.
        """
        self.lent = 0
        """Bytes of all blocks that are freed when the forward ends."""
        self.done = 0
        """Bytes of the gradients that the backwards so far finish."""
        self.held = 0
        """Bytes that blocks still hold after their backwards so far."""

    def add_forwards(self) -> None:
        for stack, chosen in zip(self.costs.stacks, self.choice, strict=True):
            self._add(_before(stack, self.costs), stack.before, self.level, self.resident)
            self.level += stack.before.net
            self.after.append([self.level - self.lent])
            for place, (block, action) in enumerate(zip(stack.blocks, chosen, strict=True)):
                cost = stack.cost_at(place, action)
                label = f"forward of {stack.name} {block.index}"
                self._add(label, cost.forward, self.level, self.resident, block.name)
                self.level += cost.forward.net
                self.level -= sum(end.freed(chosen) for end in stack.ends if end.last == place)
                self.lent += cost.forward_only_bytes
                self.after[-1].append(self.level - self.lent)

    def add_head(self) -> None:
        forward, backward = self.costs.head
        self._add("head and loss", forward, self.level, self.resident)
        self.level -= self.lent
        self._add("head and loss, backward", backward, self.level + forward.net, self.resident, back=True)
        self.done = backward.gradients

    def add_backwards(self) -> None:
        for stack, chosen, levels in zip(
            reversed(self.costs.stacks), reversed(self.choice), reversed(self.after), strict=True
        ):
            for place in range(len(chosen) - 1, -1, -1):
                kind, block, cost = stack.kinds[place], stack.blocks[place], stack.cost_at(place, chosen[place])
                shared = 0 if place == len(chosen) - 1 else stack.shared_bytes
                start = levels[place + 1] + stack.at_backward_bytes - cost.output_bytes + shared
                new = 0 if self.accumulated else self.done
                label = f"backward of {stack.name} {block.index}"
                self._add(label, cost.backward, start + self.held + new, self.resident + new, block.name, True)
                self.done += stack.gradients[kind]
                self.held += stack.held_by(kind)
            new = 0 if self.accumulated else self.done
            start = levels[0] + stack.before_at_backward_bytes + self.held + new
            label = f"{_before(stack, self.costs)}, backward"
            self._add(label, stack.before_backward, start, self.resident + new, None, True)
            self.done += stack.before_backward.gradients

    def add_optimizer(self) -> None:
        static = self.costs.static
        step = Phase(((static.step_bytes, 0), (0, 0)), self.costs.optimizer_nanoseconds)
        self._add("optimizer step", step, self.static + static.gradients, static.gradients)

    def _add(
        self, label: str, phase: Phase, start: int, gradients: int, block: str | None = None, back: bool = False
    ) -> None:
        kept = start - self.static - gradients
        if label.startswith("head"):
            kept = self.level - self.static - self.resident
        self.moments.append(Moment(label, block, back, start, self.static, gradients, kept, phase, self.accumulated))


def worst_timeline(costs: Costs, choice: Choice) -> Timeline:
    """The timeline of the micro-step with the largest peak."""
    return max((timeline(costs, choice, mode) for mode in costs.modes), key=lambda found: found.peak_bytes)


def _in_segments(costs: Costs, choice: Choice, accumulated: bool) -> Timeline:
    """The timeline of segments: runs of neighbouring blocks that are recomputed as one region.

    A run keeps only the first block's input. Its backward first recomputes all its blocks under `keep`, the
    first of the actions. Blocks that may not have the action `full` are treated like blocks that may.
    """
    apart = dataclasses.replace(costs, segments=())
    alone = timeline(apart, choice, accumulated)
    kept: dict[tuple[str | None, bool], Moment] = {
        (moment.block, moment.backward): moment
        for moment in timeline(apart, costs.uniform(0), accumulated).moments
        if moment.block
    }
    named = {moment.block: moment for moment in alone.moments if moment.block and moment.backward}
    runs = {
        block.name: run
        for stack, number in zip(costs.stacks, costs.segments, strict=True)
        for run in _runs(stack.blocks, number)
        for block in run
    }
    shared = {stack.blocks[-1].name: stack.shared_bytes for stack in costs.stacks}
    moments: list[Moment] = []
    gone = 0
    """Bytes of inputs that `full` keeps but the runs so far do not."""
    less: dict[str, int] = {}
    """First block of a run, or label of the part before a stack -> `gone` when it began."""
    for moment in alone.moments:
        if moment.block is None:
            before = less.setdefault(moment.label.removesuffix(", backward"), gone)
            moments.append(_lowered(moment, 0 if moment is alone.moments[-1] else before))
            continue
        run = runs[moment.block]
        if not moment.backward:
            less.setdefault(run[0].name, gone)
            moments.append(_lowered(moment, gone))
            gone += max(0, moment.phase.net) if moment.block != run[0].name else 0
        elif moment.block == run[-1].name:
            begun = less[run[0].name] + (shared.get(run[-1].name, 0) if len(run) > 1 else 0)
            moments += _run_backward(run, kept, named[run[0].name], moment, begun)
    return dataclasses.replace(alone, moments=tuple(moments))


def _lowered(moment: Moment, size: int) -> Moment:
    """The moment with `size` fewer bytes kept for the backward."""
    return dataclasses.replace(moment, start_bytes=moment.start_bytes - size, kept_bytes=moment.kept_bytes - size)


def _run_backward(
    run: Sequence[Block], kept: Mapping[tuple[str | None, bool], Moment], first: Moment, last: Moment, less: int
) -> Iterator[Moment]:
    """The backward of a run: it recomputes its blocks' forwards, then runs their backwards.

    Args:
        run: the blocks.
        kept: (block, whether backward) -> its moment under `keep`.
        first: the backward of the first block if blocks are recomputed one by one.
        last: that of the last block.
        less: bytes that are not kept at the beginning of the run.
    """
    gradients = last.gradient_bytes
    level = first.start_bytes - first.gradient_bytes + gradients - less
    for backward, blocks in ((False, run), (True, run[::-1])):
        for block in blocks:
            phase, accumulated = kept[block.name, backward].phase, last.accumulated
            label = f"backward of {block.stack} {block.index}" + ("" if backward else ", forward again")
            held = level - last.static_bytes - gradients
            yield Moment(label, block.name, True, level, last.static_bytes, gradients, held, phase, accumulated)
            new = 0 if accumulated or not backward else phase.gradients
            level, gradients = level + phase.net + new, gradients + new


def _runs(blocks: Sequence[Block], number: int) -> Iterator[Sequence[Block]]:
    """Split the blocks of a stack into `number` runs, at most one per block; longer ones come first."""
    start = 0
    for length in run_lengths(len(blocks), min(number, len(blocks))):
        yield blocks[start : start + length]
        start += length


def _before(stack: StackCosts, costs: Costs) -> str:
    """The name of the part before a stack."""
    return "embedding" if stack is costs.stacks[0] else f"between {costs.stacks[0].name} and {stack.name}"


def _phases(costs: Costs, choice: Choice) -> Iterator[Phase]:
    """All phases of one micro-step."""
    for stack, chosen in zip(costs.stacks, choice, strict=True):
        yield from (stack.before, stack.before_backward)
        for place, action in enumerate(chosen):
            cost = stack.cost_at(place, action)
            yield from (cost.forward, cost.backward)
    yield from costs.head
