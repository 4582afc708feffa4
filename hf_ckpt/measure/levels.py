"""The boundaries of a training step, with memory or time: the bytes alive and the peak since the last boundary, or the
time since then.

Whoever measures puts a reader of memory or a clock into `Levels`, and has it mark each boundary. In a run it is one of
them. Reading memory takes time: on a CPU, and for allocators without peaks, live tensors are counted, and reading an
allocator's statistics takes twenty times as long as an event. So a timed step reads no memory. On fake tensors both are
exact, and one step has both.

Each boundary has a name, see `Boundary`.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hf_ckpt import compat
from hf_ckpt.costs.steps import NOTHING, Call, CallName, Freed, Needs, Part, Step
from hf_ckpt.measure.live import Holder, LiveBytes, MemoryReader
from hf_ckpt.measure.memory import PeakMeter, keeps_statistics
from hf_ckpt.spec.actions import KEEP, Action


class Boundary(enum.Enum):
    """What begins or has ended at a boundary of a step."""

    BEGIN = "begin"
    """The step begins."""
    FORWARD = "forward"
    """The forward of a block begins."""
    FORWARDED = "forwarded"
    """The forward of a block has ended."""
    RETURNED = "returned"
    """The model's forward has ended, and autocast around it."""
    BACKWARD = "backward"
    """The backward of a block begins: its output's gradient has arrived."""
    END = "end"
    """The backward of the step has ended."""

    # In the recomputation of a block: see `engines.trials`.
    HELD = "held"
    """A run has saved nothing, but its graph is there: only of blocks whose layers hold tensors by themselves."""
    CAST = "cast"
    """Nothing but autocast's cache is left of a plain run: what casts of weights need."""
    TRIAL = "trial"
    """That is freed, and the trial begins."""
    TRIED = "tried"
    """The trial's output has been freed; autocast's cache holds casts of weights again."""
    SHOWN = "shown"
    """That cache has been freed, too, and only what the action keeps is left. The block runs once more."""
    KEPT = "kept"
    """The same, but backward goes on with what the trial has kept."""
    FREED = "freed"
    """The trial's graph is freed: after `HELD` only."""
    TILE = "tile"
    """The recomputation of a tile begins."""
    RECOMPUTED = "recomputed"
    """A recomputation without trials has ended, and says what it has dropped."""
    MADE = "made"
    """A block whose hidden states were not held has them again, see `engines.segments`: `as_held`."""


class Clock(Protocol):
    """Tells the time at a boundary."""

    def stamp(self) -> Any:
        """Return a time stamp."""

    def between(self, first: Any, last: Any) -> int:
        """Return the nanoseconds between two stamps. May wait for the device."""


class DeviceClock:
    """Time stamps on the devices of a model.

    Accelerators record an event at each boundary, so that nothing waits for them while the step runs. If their events
    measure no time, each boundary waits for the devices.

    Args:
        devices: the devices of the model; without an accelerator among them, the clock is the host's.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._devices = compat.devices.accelerators(devices)
        self._by_events = bool(self._devices) and all(map(compat.devices.has_timed_events, self._devices))

    def stamp(self) -> Any:
        """Return a time stamp, without waiting for devices that have timed events."""
        # One event for each device: their clocks do not agree, so only times of one device can be compared.
        if self._by_events:
            return [compat.devices.timed_event(device) for device in self._devices]
        compat.devices.synchronize(self._devices)
        return time.perf_counter_ns()

    def between(self, first: Any, last: Any) -> int:
        """Return the nanoseconds between two stamps, on the device that worked longest. Waits for the devices."""
        if not self._by_events:
            return int(last - first)
        for event in last:  # an event has no time before the device has passed it
            event.synchronize()
        return max(int(begin.elapsed_time(end) * 1e6) for begin, end in zip(first, last, strict=True))


@dataclasses.dataclass(frozen=True)
class Level:
    """The readings at one boundary of a step."""

    what: Boundary
    block: str = ""
    """Name of the block; empty for what is not of a block."""
    has_graph: bool = True
    """For `FORWARD`: whether the block's input requires gradients. For `FORWARDED`: whether its output does."""
    bytes: int = 0
    """Bytes alive."""
    peak_bytes: int = 0
    """Most bytes alive since the previous boundary."""
    nanoseconds: int = 0
    """Time since the previous boundary; 0 in a step that was not timed."""
    action: Action | None = None
    """The action that is tried, for the marks of a trial."""
    missing_bytes: int = 0
    """Bytes of hidden states that do not exist, because backward makes them again: see `as_held`."""
    freed: Freed = NOTHING
    """At the end of a trial or recomputation, what the action does not keep."""


class Levels:
    """The boundaries of one step, in order.

    Args:
        reader: reads memory; None for a step that is only timed.
        clock: tells the time; None for a step that is not timed.
    """

    def __init__(self, reader: MemoryReader | None = None, clock: Clock | None = None) -> None:
        self.reader = reader
        self.missing_bytes: Callable[[], int] = int
        """Returns `Level.missing_bytes` of now."""
        self._clock = clock
        self._marked: list[tuple[Level, Any]] = []
        """Each boundary with its time stamp."""
        self.is_blind = False
        """Whether the backward ended in a thread that the reader does not see."""

    def mark(
        self,
        what: Boundary,
        block: str = "",
        has_graph: bool = True,
        action: Action | None = None,
        freed: Freed = NOTHING,
    ) -> None:
        """Record a boundary; see `Level`. `attach.boundaries` lets only one thread at a time call it."""
        alive_bytes, peak_bytes = (0, 0) if self.reader is None else self.reader.read()
        if what is Boundary.END and self.reader is not None:
            self.is_blind = not self.reader.sees_this_thread()
        stamp = None if self._clock is None else self._clock.stamp()
        missing_bytes = self.missing_bytes()
        level = Level(what, block, has_graph, alive_bytes, peak_bytes, 0, action, missing_bytes, freed)
        self._marked.append((level, stamp))

    def stop(self) -> None:
        """Stop reading memory, which slows down what follows."""
        if self.reader is not None:
            self.reader.stop()

    @property
    def last(self) -> Boundary | None:
        """What the last boundary is; None before the first."""
        return self._marked[-1][0].what if self._marked else None

    def levels(self) -> tuple[Level, ...]:
        """Return all boundaries, with the times between them. Waits for an accelerator."""
        if self._clock is None:
            return tuple(level for level, _ in self._marked)
        before = self._marked[:1] + self._marked[:-1]
        return tuple(
            dataclasses.replace(level, nanoseconds=self._clock.between(earlier, stamp))
            for (_, earlier), (level, stamp) in zip(before, self._marked, strict=True)
        )

    def nanoseconds(self) -> int:
        """Return the time from the first boundary to the last. Waits for an accelerator."""
        assert self._clock is not None
        return self._clock.between(self._marked[0][1], self._marked[-1][1])


def reader_for(devices: Collection[torch.device], *holders: Holder) -> MemoryReader:
    """Make the reader of memory for a model on these devices.

    Args:
        devices: the devices of the model. Accelerators among them are measured, or else the CPU.
        holders: what holds tensors that are already alive, if tensors must be counted.
    """
    accelerators = compat.devices.accelerators(devices)
    if not accelerators:
        return LiveBytes(*holders, device="cpu")
    if all(map(keeps_statistics, accelerators)):
        return PeakMeter(accelerators)
    return LiveBytes(*holders, device=accelerators[0].type)


def as_held(levels: Sequence[Level]) -> list[Level]:
    """Return the levels of a step that holds all hidden states, from one in segments.

    What makes them again is left out. While a block is recomputed, its hidden states are there in both; afterwards they
    are free in segments, unless the block saves them: the trials of `keep` show that.
    """
    freed = max((level.freed.hidden for level in levels if level.action == KEEP), default=0)
    held = []
    is_made = False
    for level in levels:
        if level.what is Boundary.MADE:
            is_made = True
            continue
        ends = level.what in (Boundary.BACKWARD, Boundary.END)
        peak = level.peak_bytes + level.missing_bytes + (freed if is_made and ends else 0)
        held.append(dataclasses.replace(level, bytes=level.bytes + level.missing_bytes, peak_bytes=peak))
        is_made = is_made and not ends
    return held


def step_of(levels: Sequence[Level], outside_peak_bytes: int = 0) -> Step | None:
    """Split a step at its boundaries.

    Of several backwards of one graph, the last one counts; what the others need counts before it.

    None if it has no end or no call, or if backwards do not follow all forwards in reverse order, which plans rely on.
    """
    step = _step_between(levels, outside_peak_bytes)
    return step or _step_between(_of_last_backward(levels), outside_peak_bytes)


def _of_last_backward(levels: Sequence[Level]) -> list[Level]:
    """The levels of a step without the boundaries of its backwards before the last one; none if it has only one.

    The level after them has their peak and their time.
    """
    backwards = [place for place, level in enumerate(levels) if level.what is Boundary.BACKWARD]
    ends = [place for place, level in enumerate(levels) if level.what is Boundary.END]
    if len(ends) < 2:
        return []
    following = ends[-2] + 1
    merged = dataclasses.replace(
        levels[following],
        peak_bytes=max(level.peak_bytes for level in levels[backwards[0] : following + 1]),
        nanoseconds=sum(level.nanoseconds for level in levels[backwards[0] : following + 1]),
    )
    return [*levels[: backwards[0]], merged, *levels[following + 1 :]]


def _step_between(levels: Sequence[Level], outside_peak_bytes: int) -> Step | None:
    """As `step_of`, for steps with one backward of each graph."""
    if not levels or levels[0].what is not Boundary.BEGIN or levels[-1].what is not Boundary.END:
        return None
    places = _places_of_calls(levels)
    if places is None:
        return None
    forwards, backwards = places
    first_backward = min(backwards.values())
    next_places = [*forwards.values(), first_backward][1:]
    calls = []
    for (name, place), next_place in zip(forwards.items(), next_places, strict=True):
        until_next = Part()
        if next_place != first_backward:
            until_next = part_of(levels, place + 1, next_place)
        call = Call(name, levels[place].has_graph, part_of(levels, place, place + 1), until_next, None)
        call = dataclasses.replace(call, records_graph=levels[place + 1].has_graph)
        if name in backwards:
            call = _with_backward(call, levels, backwards[name])
        calls.append(call)
    return Step(
        start_bytes=levels[0].bytes,
        before=part_of(levels, 0, min(forwards.values())),
        calls=tuple(calls),
        at_backward_bytes=levels[first_backward].bytes - levels[0].bytes,
        head=_head(levels, max(forwards.values()) + 1, first_backward),
        outside_peak_bytes=outside_peak_bytes,
        peak_bytes=max(level.peak_bytes for level in levels[1:]),
    )


def saves_nothing(levels: Collection[Level]) -> bool:
    """Whether the blocks of a step ran, and none recorded a graph: only what is above them is trained."""
    graphs = [level.has_graph for level in levels if level.what is Boundary.FORWARDED]
    return bool(graphs) and not any(graphs)


def _places_of_calls(levels: Sequence[Level]) -> tuple[dict[CallName, int], dict[CallName, int]] | None:
    """The calls of a step: where their forwards begin, and where their backwards begin; None as for `step_of`."""
    forwards: dict[CallName, int] = {}
    backwards: dict[CallName, int] = {}
    numbers: collections.Counter[str] = collections.Counter()
    """Block -> its calls so far."""
    with_graph: list[CallName] = []
    """Calls whose backward has not come, in the order of their forwards."""
    for place, level in enumerate(levels):
        if level.what is Boundary.FORWARD:
            if backwards or levels[place + 1].what is not Boundary.FORWARDED:  # it raised, or blocks run in threads
                return None
            name = level.block, numbers[level.block]
            numbers[level.block] += 1
            forwards[name] = place
            if levels[place + 1].has_graph:
                with_graph.append(name)
        elif level.what is Boundary.BACKWARD:
            later_calls = [number for number, (block, _) in enumerate(with_graph) if block == level.block]
            if not later_calls:
                return None
            # Calls behind it whose results the loss did not use have no backward.
            backwards[with_graph[later_calls[-1]]] = place
            del with_graph[later_calls[-1] :]
    return (forwards, backwards) if backwards else None


def _head(levels: Sequence[Level], forwarded: int, backward: int) -> tuple[Part, Part]:
    """What runs between the last forward and the first backward of blocks: see `Step.head`."""
    ends = [place for place in range(forwarded, backward) if levels[place].what is Boundary.RETURNED]
    # A loss of several forwards, as in DPO, has several ends. A model whose forward is not called has none.
    returned = ends[-1] if ends else forwarded
    rest = part_of(levels, returned, backward)
    above = max(level.peak_bytes for level in levels[returned + 1 : backward + 1]) - levels[backward].bytes
    return part_of(levels, forwarded, returned), Part(above, 0, rest.nanoseconds)


def _with_backward(call: Call, levels: Sequence[Level], first: int) -> Call:
    """The call with its backward, which begins at the place `first`, and with the trials in it."""
    last = (Boundary.BACKWARD, Boundary.END)
    end = next(place for place in range(first + 1, len(levels)) if levels[place].what in last)
    backward = part_of(levels, first, end)
    # A block inside a running block has trials of its own, which belong to no call.
    of_block = [place for place in range(first, end) if levels[place].block == call.name[0]]
    needs = {trial.action: _needs(levels, first, trial, end) for trial in _trials(levels, of_block)}
    if needs:
        # The peaks of the trials are no part of the backward, but what runs before the first and after the last is. The
        # bytes alive at the end are right, since trials are freed. A backward after `KEPT` is not that of `full`: only
        # the trials of such a step are used.
        peak = max(levels[first + 1].peak_bytes, levels[end].peak_bytes)
        backward = dataclasses.replace(backward, peak=peak - levels[first].bytes)
    whole_bytes = _whole_bytes([*(levels[place] for place in of_block), levels[end]])
    return dataclasses.replace(call, backward=backward, needs=needs, whole_bytes=whole_bytes)


class _Trial(NamedTuple):
    """The levels at the boundaries of one trial: see `engines.trials`."""

    action: Action
    held: Level | None
    """At `HELD`; None if the layers of the block hold nothing by themselves."""
    cast: Level
    begin: Level
    tried: Level
    ended: Level
    """At `SHOWN` or `KEPT`."""
    place: int
    """The place of the last boundary of the trial, behind which its backward or the next run begins."""


def _trials(levels: Sequence[Level], places: Iterable[int]) -> Iterator[_Trial]:
    """Yield the trials of a block, whose boundaries are at these places."""
    seen: dict[Boundary, Level] = {}
    for place in places:
        level = levels[place]
        seen[level.what] = level
        if level.what in (Boundary.SHOWN, Boundary.KEPT) and level.action is not None:
            held = seen.get(Boundary.HELD)
            begin = place if held is None else place + 1  # `FREED` follows
            cast, trial, tried = (seen[what] for what in (Boundary.CAST, Boundary.TRIAL, Boundary.TRIED))
            yield _Trial(level.action, held, cast, trial, tried, level, begin)
            seen.clear()


def _whole_bytes(levels: Sequence[Level]) -> int:
    """Most bytes that a backward would need in addition if its block was recomputed as a whole, and all was kept.

    Args:
        levels: of the block, from the beginning of its backward, and the one at the end.
    """
    dropped_bytes = sum(level.freed.dropped for level in levels)
    places = [place for place, level in enumerate(levels) if level.what is Boundary.TILE]
    # In the first one, which may be short, weights get gradients that stay. The last one is followed by the backward of
    # the rest of the block.
    alone = places[1:-1] or places
    tile_bytes = max((levels[place + 1].peak_bytes - levels[place].bytes for place in alone), default=0)
    return dropped_bytes + len(places) * tile_bytes


def _needs(levels: Sequence[Level], first: int, trial: _Trial, end: int) -> Needs:
    """What a trial has shown, in a backward of its block that begins and ends at the places `first` and `end`."""
    # Autocast's cache is full at both, so its copies of weights cancel out.
    kept = trial.tried.bytes - trial.cast.bytes
    arrival = trial.begin.bytes - levels[first].bytes
    rest = part_of(levels, trial.place, end)
    return Needs(
        forward_peak=trial.tried.peak_bytes - trial.begin.bytes,
        kept=kept,
        kept_casts=trial.ended.bytes - trial.begin.bytes - kept,
        backward_peak=rest.peak + arrival if trial.ended.what is Boundary.KEPT else None,
        arrival=arrival,
        freed=trial.ended.freed,
        held=0 if trial.held is None else trial.held.bytes - trial.cast.bytes,
        forward_nanoseconds=trial.tried.nanoseconds,
        backward_nanoseconds=rest.nanoseconds,
    )


def part_of(levels: Sequence[Level], first: int, last: int) -> Part:
    """What runs between two levels, by their positions."""
    start = levels[first].bytes
    peak = max((level.peak_bytes for level in levels[first + 1 : last + 1]), default=start)
    nanoseconds = sum(level.nanoseconds for level in levels[first + 1 : last + 1])
    return Part(max(0, peak - start), levels[last].bytes - start, nanoseconds)
