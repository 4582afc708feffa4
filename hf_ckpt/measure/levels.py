"""Memory at the boundaries of a training step: the bytes alive, the peak since the last boundary, and the time.

On an accelerator the allocator reports both figures, and times come from events, so that nothing waits for the device
while the step runs. Without such an allocator, and on a CPU, hf_ckpt counts live tensors, which slows the step down (by
a tenth, or more for tiny models). Such a step is either counted or timed.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch

from hf_ckpt import compat
from hf_ckpt.costs.steps import Call, CallName, Part, Step
from hf_ckpt.measure.clocks import DeviceClock, Meter
from hf_ckpt.measure.live import Holder, LiveBytes
from hf_ckpt.measure.memory import PeakMeter, keeps_statistics


@dataclasses.dataclass(frozen=True)
class Level:
    """The readings at one boundary of a step."""

    what: str
    """`begin`, `forward`, `forwarded`, `backward` or `end`: what begins or has ended there."""
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


class Levels:
    """The boundaries of one step, in order.

    Args:
        meter: reads memory and time.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._found: list[tuple[Level, Any]] = []
        """Each boundary with its time stamp."""

    def mark(self, what: str, block: str = "", has_graph: bool = True) -> None:
        """Record a boundary; see `Level`. Backward threads of several devices take turns."""
        self._found.append((Level(what, block, has_graph, *self.meter.read()), self.meter.stamp()))

    @property
    def last(self) -> str:
        """What the last boundary is; empty before the first."""
        return self._found[-1][0].what if self._found else ""

    def levels(self) -> tuple[Level, ...]:
        """Return all boundaries, with the times between them. Waits for an accelerator. The meter must have stopped."""
        before = self._found[:1] + self._found[:-1]
        return tuple(
            dataclasses.replace(level, nanoseconds=self.meter.between(earlier, stamp))
            for (_, earlier), (level, stamp) in zip(before, self._found, strict=True)
        )


def meter_for(devices: Collection[torch.device], *holders: Holder, timed_only: bool = False) -> Meter:
    """Make the meter for a model on these devices.

    Args:
        devices: the devices of the model. Accelerators among them are measured, or else the CPU.
        holders: what holds tensors that are already alive, if tensors must be counted.
        timed_only: whether only times are needed.
    """
    there = compat.devices.accelerators(devices)
    if there and all(map(keeps_statistics, there)):
        return PeakMeter(there)
    if timed_only:
        return DeviceClock(there)
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
        end = backwards.get(name)
        forward, behind = part_of(levels, place, place + 1), part_of(levels, place + 1, following)
        backward = None if end is None else part_of(levels, end, end + 1)
        calls.append(Call(name, levels[place].has_graph, forward, behind, backward))
    return Step(
        start_bytes=levels[0].bytes,
        before=part_of(levels, 0, min(forwards.values())),
        calls=tuple(calls),
        at_backward_bytes=levels[first_backward].bytes - levels[0].bytes,
        outside_peak_bytes=outside_peak_bytes,
        peak_bytes=max(level.peak_bytes for level in levels[1:]),
    )


def part_of(levels: Sequence[Level], first: int, last: int) -> Part:
    """What runs between two levels, by their positions."""
    start = levels[first].bytes
    peak = max((level.peak_bytes for level in levels[first + 1 : last + 1]), default=start)
    nanoseconds = sum(level.nanoseconds for level in levels[first + 1 : last + 1])
    return Part(max(0, peak - start), levels[last].bytes - start, nanoseconds)
