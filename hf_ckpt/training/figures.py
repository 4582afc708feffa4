"""What `MemoryTimeCallback` measures: memory, time and tokens of the training steps from one log to the next."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hf_ckpt import compat
from hf_ckpt.attach.record import Installation
from hf_ckpt.measure.levels import DeviceClock
from hf_ckpt.measure.memory import PeakMeter
from hf_ckpt.units import to_gib

Metrics = dict[str, float | None]
"""Key of a figure -> its value, or None if it is unknown. `training.callback` lists the keys."""


class Tokens:
    """Counts the tokens of batches, and those that are padding."""

    def __init__(self) -> None:
        self._tokens: int | None = 0
        """None once a batch had no token ids."""
        self._attended: list[torch.Tensor] | None = []
        """For each batch, the number of tokens that are no padding, on the device: reading it would make the host wait.
        None once a batch had no mask."""

    def count(self, inputs: Any) -> None:
        """Count a batch: the arrays whose names end with `input_ids`, and the masks of the same names."""
        named = inputs.items() if isinstance(inputs, Mapping) else ()
        ids = {str(name): value for name, value in named if str(name).endswith("input_ids")}
        ids = {name: value for name, value in ids.items() if isinstance(value, torch.Tensor)}
        if not ids or self._tokens is None:
            self._tokens = None
            return
        for name, value in ids.items():
            self._tokens += value.numel()
            mask = inputs.get(name.removesuffix("input_ids") + "attention_mask")
            if not isinstance(mask, torch.Tensor) or mask.shape != value.shape:
                self._attended = None
            elif self._attended is not None:
                self._attended.append(mask.count_nonzero())

    def read(self) -> tuple[int | None, int | None]:
        """Return (tokens, those of them that are padding); None if they are not known. Waits for the device."""
        if self._tokens is None or self._attended is None:
            return self._tokens, None
        return self._tokens, self._tokens - sum(int(count) for count in self._attended)


class Figures:
    """Measures windows: the training steps since the last log, without evaluation and saving.

    Args:
        devices: the devices of the model.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        devices = list(devices)
        self.clock = DeviceClock(devices)
        self._meter = PeakMeter(devices)
        self._is_on_cpu = not compat.devices.accelerators(devices)
        self.since: Any = None
        """The time up to which the window has counted, by the clock; None while no time is counted."""
        self.windows: list[Metrics] = []
        """The figures of all windows that have ended, once for each of their steps."""
        self._begin()

    def _begin(self) -> None:
        self.steps = 0
        """Optimizer steps of the window."""
        self._memory: Metrics = {}
        """The memory that this rank used in the window, as far as the meter was read."""
        self._nanoseconds = 0
        self._tokens = Tokens()
        self._predicted: int | None = 0
        """The largest predicted peak of a micro-step, in bytes; None once one ran without a prediction."""
        self._step_peak: int | None = None
        """The largest measured peak of the plans that ran, in bytes; None if none was measured."""

    def go_on(self) -> None:
        """Begin to count; what ran before, such as an evaluation, is in no window."""
        self._meter.read()
        self.since = self.clock.stamp()

    def pause(self) -> None:
        """Stop counting until `go_on`. Waits for the devices."""
        if self.since is not None:
            self._read()
            self.since = None

    def count(self, inputs: Any, record: Installation | None) -> None:
        """Count a micro-step that has ended, by its batch and the record on the model."""
        self._tokens.count(inputs)
        prediction = None if record is None or not record.enabled else record.plan.prediction
        if prediction is None or self._predicted is None:
            self._predicted = None
        else:
            self._predicted = max(self._predicted, prediction.peak_bytes)
        if record is not None and record.session is not None and self._is_on_cpu:
            self._step_peak = max(self._step_peak or 0, record.session.measured_bytes or 0) or None

    def _read(self) -> None:
        """Add the time and the memory since the last call to the window. Waits for the devices."""
        now = self.clock.stamp()
        self._nanoseconds += self.clock.between(self.since, now)
        self.since = now
        reserved = to_gib(self._meter.reserved_bytes())  # before its peak begins anew
        peaks: Metrics = {"memory/peak_gib": to_gib(self._meter.read_peak()), "memory/reserved_gib": reserved}
        self._memory = largest([self._memory, peaks])

    def end_window(self) -> Metrics | None:
        """End the window, and return its figures over all ranks; None if it has no step, on all ranks alike."""
        if not self.steps:
            return None
        if self.since is not None:
            self._read()
        tokens, padding = self._tokens.read()
        window = {**self._memory, "memory/predicted_gib": to_gib(self._predicted or None)}
        if self._is_on_cpu:
            window["memory/step_peak_gib"] = to_gib(self._step_peak)
        window["time/step_s"] = self._nanoseconds / 1e9 / self.steps
        ranks = compat.distributed.of_all_ranks((window, tokens, padding))
        metrics = largest([row for row, _, _ in ranks])
        metrics.update(_rates([row[1:] for row in ranks], (metrics["time/step_s"] or 0.0) * self.steps))
        self.windows += [metrics] * self.steps
        self._begin()
        return metrics

    def of_run(self) -> Metrics:
        """Return the figures of all steps: the largest memory, and the medians of times and rates."""
        figures = largest(self.windows)
        for key in ("time/step_s", "tokens_per_second", "padding"):
            values = [value for window in self.windows if (value := window.get(key)) is not None]
            if key in figures:
                figures[key] = statistics.median(values) if values else None
        return figures


def _rates(ranks: list[tuple[int | None, int | None]], seconds: float) -> Metrics:
    """Tokens per second and the share of padding, from (tokens, padding) of each rank."""
    tokens = _sum([tokens for tokens, _ in ranks])
    padding = _sum([padding for _, padding in ranks])
    return {
        "tokens_per_second": tokens / seconds if tokens and seconds else None,
        "padding": padding / tokens if tokens and padding is not None else None,
    }


def _sum(counts: list[int | None]) -> int | None:
    """The sum of counts; None if one is unknown."""
    numbers = [count for count in counts if count is not None]
    return sum(numbers) if len(numbers) == len(counts) else None


def largest(rows: list[Metrics]) -> Metrics:
    """The largest value of each figure in several rows; None if no row knows it."""
    values: Metrics = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        figures = [value for row in rows if (value := row.get(key)) is not None]
        values[key] = max(figures, default=None)
    return values
