"""Clocks: wall time of training steps, and time spent recomputing blocks in backward."""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_ckpt import compat

MOST_EVENTS = 1000
"""For how many recomputations a `RecomputeClock` holds events, before it adds up those that are done."""


class TrainingClock:
    """Wall time of training steps.

    It counts between `resume` and `pause`. The callback pauses it during evaluation and saving. Data loading counts.
    """

    def __init__(self) -> None:
        self._running_since: float | None = None
        self._seconds = 0.0
        self.steps = 0
        """Steps counted since the last `take`."""

    @property
    def running(self) -> bool:
        """Whether time is being counted now."""
        return self._running_since is not None

    def resume(self) -> None:
        """Start to count time, if it is not counted already."""
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def pause(self) -> None:
        """Stop counting time until `resume`."""
        if self._running_since is not None:
            self._seconds += time.perf_counter() - self._running_since
            self._running_since = None

    def count_step(self) -> None:
        """Count a training step that has just ended."""
        self.steps += 1

    def take(self) -> tuple[float, int]:
        """Return (seconds, steps) since the last `take`, and start again from zero. Waits for the accelerator."""
        _wait()
        if self.running:
            self.pause()
            self.resume()
        taken = self._seconds, self.steps
        self._seconds, self.steps = 0.0, 0
        return taken


class RecomputeClock:
    """Time spent recomputing blocks in backward: a context that the engines enter around each recomputation.

    On an accelerator it uses the device's events, so that nothing waits for the device before `take`.
    """

    def __init__(self) -> None:
        self._device_type = compat.accelerator_type()
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if self._device_type is None:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._seconds += time.perf_counter() - start
            return
        begin, end = compat.timing_event(self._device_type), compat.timing_event(self._device_type)
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._events.append((begin, end))
            if len(self._events) > MOST_EVENTS:
                self._add_up()

    def observer(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Return the observer that engines enter around each recomputation. It does not keep the clock alive, and does
        nothing once the clock is gone: if training ends with an error, the observer stays on the model."""
        clock = weakref.ref(self)
        return lambda: (clock() or contextlib.nullcontext)()

    def _add_up(self) -> None:
        """Add up the times of recomputations that are done, and free their events."""
        if len(self._events) > 2 * MOST_EVENTS:  # the accelerator is far behind
            self._events[MOST_EVENTS][1].synchronize()
        done = list(itertools.takewhile(lambda pair: pair[1].query(), self._events))
        self._seconds += sum(begin.elapsed_time(end) for begin, end in done) / 1e3
        del self._events[: len(done)]

    def take(self) -> float:
        """Return the seconds since the last `take`. The caller must first wait for the accelerator."""
        seconds: float = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        self._seconds, self._events = 0.0, []
        return seconds


@contextlib.contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Time a block of code: `with stopwatch() as seconds: ...` stores its seconds in `seconds[0]`.

    Waits for the accelerator before and after.
    """
    _wait()
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    _wait()
    seconds.append(time.perf_counter() - start)


def _wait() -> None:
    if compat.accelerator_type() is not None:
        torch.accelerator.synchronize()
