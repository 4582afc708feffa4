"""Measures one step: its memory or its time at the boundaries of blocks."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.attach.record import Installation
from hf_ckpt.costs.steps import Step
from hf_ckpt.engines.segments import Watching
from hf_ckpt.engines.trials import Attempts
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.levels import Boundary, DeviceClock, Levels, as_held, reader_for, step_of
from hf_ckpt.measure.memory import keeps_statistics
from hf_ckpt.models.blocks import vocabulary_head


class Recorder:
    """Measures the step that begins now.

    On a CPU a reader of memory slows every operation down, so it does not run longer than the step: until the graph of
    the step is gone, and while an optimizer steps. `stop` ends it for good, and so does the end of the model.

    Args:
        record: the record on the model.
        base: the model, plain.
        modules: name -> block, as far as their boundaries are measured.
        levels: reads memory, or only the time.
    """

    def __init__(self, record: Installation, base: nn.Module, modules: Mapping[str, nn.Module], levels: Levels) -> None:
        self._record = record
        self.levels = levels
        self.boundaries = Boundaries(modules, levels.mark, levels.stop, vocabulary_head(base))
        self._graphs = compat.compiler.compiled_graphs()
        """How many graphs torch.compile had made when the step began."""
        handles: list[Any] = [self.boundaries]
        if levels.reader is not None:
            handles += compat.optimizers.call_around(self._before_optimizer, self._after_optimizer)
            levels.reader.is_over = self.boundaries.was_interrupted
        # The finalizer must not refer to the recorder, which refers to the record and so to the model's blocks.
        self._end = weakref.finalize(base, _remove, handles, levels)
        self.is_stored = False
        """Whether what it has shown is stored, but for what the optimizer's step needs."""
        self._end.atexit = False  # at the end of the process there is nothing to clean up for
        self.begin_forward()
        levels.mark(Boundary.BEGIN)

    def begin_forward(self) -> None:
        """Measure from here until the graph of the forward is gone."""
        self.boundaries.begin()
        if self.levels.reader is not None:
            self.levels.reader.start()

    @property
    def goes_on(self) -> bool:
        """Whether a forward that begins now belongs to the step: the last one had no backward, and its graph exists."""
        return self.levels.last in (Boundary.FORWARDED, Boundary.RETURNED) and self.boundaries.has_graph

    @property
    def has_ended(self) -> bool:
        """Whether the backward of the step has ended."""
        return self.levels.last is Boundary.END

    @property
    def was_left(self) -> bool:
        """Whether a KeyboardInterrupt has ended the step."""
        reader = self.levels.reader
        was_interrupted = self.boundaries.was_interrupted() or (reader is not None and reader.is_over())
        return was_interrupted and not self.has_ended

    @property
    def had_backward(self) -> bool:
        """Whether a block had a backward."""
        return any(level.what is Boundary.BACKWARD for level in self.levels.levels())

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive so far; 0 if graphs were compiled, which may take memory only once."""
        if compat.compiler.compiled_graphs() != self._graphs:
            return 0
        return max((level.peak_bytes for level in self.levels.levels()[1:]), default=0)

    def let_try(self, attempts: Mapping[str, Attempts], in_segments: bool) -> None:
        """Let the recomputations of the step try actions, and mark what segments do."""
        mark = self.boundaries.mark
        watching = None
        if in_segments:
            watching = Watching(mark)
            self.levels.missing_bytes = watching.missing_bytes
        self._record.set_trials(attempts, mark, watching)

    def stop(self) -> None:
        """Stop measuring."""
        self._end()
        self._record.set_trials({})

    def step(self, outside_peak_bytes: int) -> Step | None:
        """Return the step, with the most bytes that were alive after its end; None if it cannot be used."""
        if compat.compiler.compiled_graphs() != self._graphs:
            return None  # compiling takes time, and may take memory; the next step uses the new graphs
        return None if self.levels.is_blind else step_of(as_held(self.levels.levels()), outside_peak_bytes)

    def _before_optimizer(self) -> None:
        if self.levels.reader is not None:
            self.levels.reader.start()
        self.boundaries.before_optimizer()

    def _after_optimizer(self) -> None:
        self.boundaries.after_optimizer()
        # An optimizer that steps within the backward must not end the measurement. A graph that was dropped without a
        # backward has ended it already.
        if self.has_ended or not self.boundaries.has_graph:
            self.levels.stop()


def _remove(handles: list[Any], levels: Levels) -> None:
    for handle in handles:
        handle.remove()
    levels.stop()


def timed_levels(devices: Collection[torch.device]) -> Levels:
    """Return levels that read the time only."""
    return Levels(clock=DeviceClock(devices))


def counted_levels(devices: Collection[torch.device], base: nn.Module, args: Any, kwargs: Any) -> Levels:
    """Return levels that read memory. The arguments are those of the forward that begins the step."""
    # All that lives while the step begins must be known to a count of live tensors, which sees only new ones.
    optimizers = compat.optimizers.of_model(base)
    return Levels(reader_for(devices, base, {"batch": (args, kwargs)}, *optimizers))


def refuse_compiled(base: nn.Module, devices: Collection[torch.device], policy: str) -> None:
    """Raise `HfCkptError` if the memory of compiled blocks cannot be measured."""
    accelerators = compat.devices.accelerators(devices)
    has_peaks = bool(accelerators) and all(map(keeps_statistics, accelerators))
    if not (compat.transformers.HOOKS_STAY_OUTSIDE and has_peaks and compat.distributed.parameters_stay(base)):
        raise HfCkptError(
            f"policy: {policy} cannot measure compiled blocks here: that needs transformers 5.23 or later, an "
            "accelerator whose allocator reports peaks, and parameters that are not split over ranks. Give a `share` "
            "with the policy `selective`, or do not compile blocks."
        )
