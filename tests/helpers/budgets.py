"""Trainings under `policy: budget`, and what their steps needed.

A row is a function that gets a spec, or None for no hf_ckpt, and returns a model and a function that trains it. All
live tensors are counted meanwhile. Plans are read from hf_ckpt's record on the model, so that this does not depend on
how they are made.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
from collections.abc import Callable

import torch
from torch import nn

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.measure.live import LiveBytes

MOST, MOST_FIRST, MOST_PREDICTED = 1.06, 1.08, 1.08
"""Largest ratios: real peak to budget from the second planned step on, in the first planned step, and predicted to real
peak."""


@dataclasses.dataclass
class Step:
    """One micro-step, with the optimizer's step after it, if there is one."""

    kind: str
    """Its batch's shape, or the state of the model, if steps differ in it."""
    peak_bytes: int = 0
    predicted_bytes: int | None = None
    """Predicted peak of its plan; None while the session measures, and without a plan."""
    keeps_all: bool = False


class Watch:
    """Records what happens in each micro-step; the training reports where one begins."""

    def __init__(self, model: nn.Module, live: LiveBytes) -> None:
        self.model, self.live = model, live
        self.steps: list[Step] = []
        self.recomputed = 0
        self._step: Step | None = None

    def begin(self, kind: str = "") -> None:
        """End the last micro-step, and begin another."""
        self.end()
        self._step = Step(kind)
        self.live.peak_bytes = self.live.current_bytes

    def end(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        step.peak_bytes = self.live.peak_bytes
        record = installation(self.model)
        if record is not None:
            planned = getattr(record.session, "planned", None)
            if planned is not None and not planned.is_provisional:
                step.predicted_bytes = planned.plan.prediction.peak_bytes
                step.keeps_all = not planned.plan.active()
            self.recomputed = max(self.recomputed, sum(hf_ckpt.describe(self.model).recomputed.values()))
        self.steps.append(step)


Row = Callable[[dict | None], tuple[nn.Module, Callable[[Watch], None]]]


@dataclasses.dataclass
class Trained:
    """The results of a training."""

    steps: list[Step]
    recomputed: int
    tensors: dict[str, torch.Tensor]
    """Final parameters, and gradients as `NAME.grad`."""

    @property
    def peak_bytes(self) -> int:
        return max(step.peak_bytes for step in self.steps)


def trained(row: Row, spec: dict | None) -> Trained:
    """Train under a spec, or without hf_ckpt for None."""
    gc.collect()
    model, train = row(spec)
    with LiveBytes(model) as live:
        watch = Watch(model, live)
        train(watch)
        watch.end()
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach().clone()
        if parameter.grad is not None:
            tensors[f"{name}.grad"] = parameter.grad.clone()
    hf_ckpt.uninstall(model)
    return Trained(watch.steps, watch.recomputed, tensors)


def missed(steps: list[Step], budget: int, full_bytes: int) -> list[str]:
    """Failed expectations of peaks, in words."""
    kinds: dict[str, list[Step]] = collections.defaultdict(list)
    for step in steps:
        kinds[step.kind].append(step)
    groups = [list(itertools.dropwhile(lambda step: step.predicted_bytes is None, kind)) for kind in kinds.values()]
    groups = [group for group in groups if group]
    if not groups:
        return ["no plan was made"]
    planned = {id(step) for group in groups for step in group}
    measuring = [step for step in steps if id(step) not in planned]
    ratios = {
        "measuring": (MOST, [step.peak_bytes / max(budget, full_bytes) for step in measuring]),
        "first planned": (MOST_FIRST, [group[0].peak_bytes / budget for group in groups]),
        "planned": (MOST, [step.peak_bytes / budget for group in groups for step in group[1:]]),
    }
    last = groups[-1]
    if len(kinds) == 1 and not last[-1].keeps_all:  # if all fits, it may be high
        real = max(step.peak_bytes for step in (last[1:] or last))
        ratios["predicted"] = MOST_PREDICTED, [(last[-1].predicted_bytes or 0) / real]
    return [f"{name} {max(found):.3f}" for name, (most, found) in ratios.items() if found and max(found) > most]


def differing(expected: dict, found: dict, recomputed: int) -> list[str]:
    """Tensors that are not bit-equal, and whether nothing was recomputed."""
    same = {name for name in expected.keys() & found.keys() if torch.equal(expected[name], found[name])}
    names = sorted(expected.keys() | found.keys() - same)
    return [f"{name} differs" for name in names if name not in same] + ["nothing was recomputed"] * (not recomputed)
