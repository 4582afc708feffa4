"""Computes the memory of a training step under a plan, moment by moment. Exact integers, does not import torch.

A step consists of what runs before the blocks, the forwards of the calls, the head and the loss with their backward,
the backwards of the calls in reverse, and the optimizer's step.
"""

from __future__ import annotations

import dataclasses

from hf_ckpt.costs.costs import Choice, Costs
from hf_ckpt.costs.steps import Part


@dataclasses.dataclass(frozen=True)
class Moment:
    """One part of a timeline, with the bytes alive when it begins."""

    label: str
    """What runs, in words: `embedding`, `forward of decoder 3`, `head and loss, backward`."""
    block: str | None
    """Qualified name of the block that runs, the first one of a segment; None outside the blocks."""
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
    part: Part

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive while it runs."""
        return self.start_bytes + self.part.peak


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The memory of one micro-step under a choice of actions, and of the optimizer's step."""

    moments: tuple[Moment, ...]
    """In order of time."""
    nanoseconds: int
    """Time of one optimizer step with all its micro-steps."""

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
        work = worst.peak_bytes - worst.static_bytes - worst.gradient_bytes
        kept = max(0, min(worst.kept_bytes, work))  # some of it may be freed by then
        return {
            "weights and optimizer state": worst.static_bytes,
            "gradients": worst.gradient_bytes,
            "kept for backward": kept,
            f"temporary in {worst.label}": work - kept,
        }


def step_nanoseconds(costs: Costs, choice: Choice) -> int:
    """Predicted nanoseconds of one optimizer step with all its micro-steps."""
    blocks = sum(call.costs[action].nanoseconds for call, action in zip(costs.calls, choice, strict=True))
    outside = sum(part.nanoseconds for part in (costs.before, *costs.head))
    return (blocks + outside) * costs.accumulation + costs.optimizer_nanoseconds


def timeline(costs: Costs, choice: Choice) -> Timeline:
    """The timeline of the micro-step with the largest peak, and of the optimizer's step.

    Args:
        costs: of the step.
        choice: the action of every call.
    """
    static, resident = costs.static.always, costs.resident_bytes
    moments: list[Moment] = []

    def add(label: str, part: Part, level: int, block: str | None = None, *, back: bool = False, done: int = 0) -> None:
        """Add what runs while calls keep `level` bytes, after `done` bytes of gradients were finished."""
        gradients = resident - static + done
        start = static + gradients + level
        moments.append(Moment(label, block, back, start, static, gradients, level, part))

    level = lent = done = 0
    add("embedding", costs.before, level)
    level += costs.before.net
    levels = []
    for place, (call, action) in enumerate(zip(costs.calls, choice, strict=True)):
        cost, block = call.costs[action], call.blocks[0]
        add(f"forward of {block.stack} {block.index}", cost.forward, level, block.name)
        level, lent = level + cost.forward.net, lent + cost.lent_bytes
        level -= sum(end.freed(choice) for end in costs.ends if end.last == place)
        levels.append(level - lent)
    forward, backward = costs.head
    add("head and loss", forward, level)
    add("head and loss, backward", backward, level - lent + forward.net, back=True)
    moments[-1] = dataclasses.replace(moments[-1], kept_bytes=level - lent)
    for call, action, level in reversed(list(zip(costs.calls, choice, levels, strict=True))):
        block, start = call.blocks[-1], level + costs.at_backward_bytes
        label = f"backward of {block.stack} {block.index}"
        add(label, call.costs[action].backward, start, call.blocks[0].name, back=True, done=done)
        done += call.gradient_bytes
    step = Part(costs.static.step_bytes, 0, costs.optimizer_nanoseconds)
    add("optimizer step", step, 0, done=static + costs.static.gradients - resident)
    return Timeline(tuple(moments), step_nanoseconds(costs, choice))
