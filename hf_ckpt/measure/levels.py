"""The boundaries of a training step, with memory or time: the bytes alive and the peak since the last boundary, or the
time since then.

A step has a reader of memory or a clock. Reading memory takes time: on a CPU, and for allocators without peaks, live
tensors are counted, and reading an allocator's statistics takes twenty times as long as an event. So a timed step reads
no memory.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

from hf_ckpt import compat
from hf_ckpt.costs.steps import NOTHING, Call, CallName, Freed, Part, Step, Trial
from hf_ckpt.measure.live import Holder, LiveBytes, Reader
from hf_ckpt.measure.memory import PeakMeter, keeps_statistics
from hf_ckpt.spec.actions import Action


class Clock(Protocol):
    """Tells the time at a boundary."""

    def stamp(self) -> Any:
        """Return a time stamp."""

    def between(self, first: Any, last: Any) -> int:
        """Return the nanoseconds between two stamps. May wait for the device."""


@dataclasses.dataclass(frozen=True)
class Level:
    """The readings at one boundary of a step."""

    what: str
    """`begin`, `forward`, `forwarded`, `backward` or `end`: what begins or has ended there; `returned` between the
    model's forward and the backward; or `cast`, `trial`, `tried`, `shown` or `kept`, see `engines.trials`."""
    block: str
    """Name of the block; empty for `begin` and `end`."""
    has_graph: bool = True
    """For `forward`: whether the block's input requires gradients. For `forwarded`: whether its output does."""
    bytes: int = 0
    """Bytes alive."""
    peak_bytes: int = 0
    """Most bytes alive since the previous boundary."""
    nanoseconds: int = 0
    """Time since the previous boundary; 0 in a step that was not timed."""
    action: Action | None = None
    """The action that is tried, for the marks of a trial."""
    freed: Freed = NOTHING
    """At the end of a trial, what the block was given and the action does not keep."""


class Levels:
    """The boundaries of one step, in order.

    Args:
        reader: reads memory; None for a step that is only timed.
        clock: tells the time; None for a step that is not timed.
    """

    def __init__(self, reader: Reader | None = None, clock: Clock | None = None) -> None:
        self.reader = reader
        self._clock = clock
        self._found: list[tuple[Level, Any]] = []
        """Each boundary with its time stamp."""

    def mark(
        self, what: str, block: str = "", has_graph: bool = True, action: Action | None = None, freed: Freed = NOTHING
    ) -> None:
        """Record a boundary; see `Level`. Backward threads of several devices take turns."""
        read = (0, 0) if self.reader is None else self.reader.read()
        stamp = None if self._clock is None else self._clock.stamp()
        self._found.append((Level(what, block, has_graph, *read, action=action, freed=freed), stamp))

    @property
    def last(self) -> str:
        """What the last boundary is; empty before the first."""
        return self._found[-1][0].what if self._found else ""

    def levels(self) -> tuple[Level, ...]:
        """Return all boundaries, with the times between them. Waits for an accelerator."""
        if self._clock is None:
            return tuple(level for level, _ in self._found)
        before = self._found[:1] + self._found[:-1]
        return tuple(
            dataclasses.replace(level, nanoseconds=self._clock.between(earlier, stamp))
            for (_, earlier), (level, stamp) in zip(before, self._found, strict=True)
        )

    def nanoseconds(self) -> int:
        """Return the time from the first boundary to the last. Waits for an accelerator."""
        assert self._clock is not None
        return self._clock.between(self._found[0][1], self._found[-1][1])


def reader_for(devices: Collection[torch.device], *holders: Holder) -> Reader:
    """Make the reader of memory for a model on these devices.

    Args:
        devices: the devices of the model. Accelerators among them are measured, or else the CPU.
        holders: what holds tensors that are already alive, if tensors must be counted.
    """
    there = compat.devices.accelerators(devices)
    if there and all(map(keeps_statistics, there)):
        return PeakMeter(there)
    return LiveBytes(*holders, device=there[0].type if there else "cpu")


def step_of(levels: Sequence[Level], outside_peak_bytes: int = 0) -> Step | None:
    """Split a step at its boundaries.

    None if it has no end, no call, or a repeated backward, or if backwards do not follow all forwards in reverse
    order, which plans rely on.
    """
    if not levels or levels[0].what != "begin" or levels[-1].what != "end":
        return None
    forwards: dict[CallName, int] = {}
    backwards: dict[CallName, int] = {}
    """Calls, and the places where their forward and their backward begin."""
    seen: collections.Counter[str] = collections.Counter()
    waiting: list[CallName] = []
    for place, level in enumerate(levels):
        if level.what == "forward":
            if backwards or levels[place + 1].what != "forwarded":
                return None
            name = level.block, seen[level.block]
            seen[level.block] += 1
            forwards[name] = place
            if levels[place + 1].has_graph:
                waiting.append(name)
        elif level.what == "backward":
            while waiting and waiting[-1][0] != level.block:  # calls without a backward
                waiting.pop()
            if not waiting:
                return None
            backwards[waiting.pop()] = place
    if not backwards:
        return None
    first_backward = min(backwards.values())
    calls = []
    for (name, place), following in zip(forwards.items(), [*forwards.values(), first_backward][1:], strict=True):
        forward = part_of(levels, place, place + 1)
        behind = Part() if following == first_backward else part_of(levels, place + 1, following)
        call = Call(name, levels[place].has_graph, forward, behind, None)
        calls.append(_with_backward(call, levels, backwards[name]) if name in backwards else call)
    return Step(
        start_bytes=levels[0].bytes,
        before=part_of(levels, 0, min(forwards.values())),
        calls=tuple(calls),
        at_backward_bytes=levels[first_backward].bytes - levels[0].bytes,
        head=_head(levels, max(forwards.values()) + 1, first_backward),
        outside_peak_bytes=outside_peak_bytes,
        peak_bytes=max(level.peak_bytes for level in levels[1:]),
    )


def _head(levels: Sequence[Level], forwarded: int, backward: int) -> tuple[Part, Part]:
    """What runs between the last forward and the first backward of blocks: see `Step.head`."""
    ends = [place for place in range(forwarded, backward) if levels[place].what == "returned"]
    returned = ends[-1] if ends else forwarded
    rest = part_of(levels, returned, backward)
    above = max(level.peak_bytes for level in levels[returned + 1 : backward + 1]) - levels[backward].bytes
    return part_of(levels, forwarded, returned), Part(above, 0, rest.nanoseconds)


def _with_backward(call: Call, levels: Sequence[Level], first: int) -> Call:
    """The call with its backward, which begins at the place `first`, and with the trials in it."""
    end = next(place for place in range(first + 1, len(levels)) if levels[place].what in ("backward", "end"))
    arrives = levels[first].bytes
    whole = part_of(levels, first, end)
    trials: dict[Action, Trial] = {}
    for place in range(first + 4, end):
        level = levels[place]
        if level.what not in ("shown", "kept") or level.block != call.name[0] or level.action is None:
            continue
        cast, begins, tried = levels[place - 3 : place]
        kept = tried.bytes - cast.bytes
        arrival = begins.bytes - arrives
        rest = part_of(levels, place, end)
        trials[level.action] = Trial(
            forward_peak=tried.peak_bytes - begins.bytes,
            kept=kept,
            later=level.bytes - begins.bytes - kept,
            backward_peak=rest.peak + arrival if level.what == "kept" else None,
            arrival=arrival,
            freed=level.freed,
            forward_nanoseconds=tried.nanoseconds,
            backward_nanoseconds=rest.nanoseconds,
        )
    if trials:  # they are no part of the backward
        whole = dataclasses.replace(whole, peak=max(levels[first + 1].peak_bytes, levels[end].peak_bytes) - arrives)
    return dataclasses.replace(call, backward=whole, trials=trials)


def part_of(levels: Sequence[Level], first: int, last: int) -> Part:
    """What runs between two levels, by their positions."""
    start = levels[first].bytes
    peak = max((level.peak_bytes for level in levels[first + 1 : last + 1]), default=start)
    nanoseconds = sum(level.nanoseconds for level in levels[first + 1 : last + 1])
    return Part(max(0, peak - start), levels[last].bytes - start, nanoseconds)
