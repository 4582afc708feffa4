"""Measures what a step really needs, once for each plan that was made for a batch.

A window opens in the forward of the batch, and closes when the optimizer is about to step, or with the first training
forward after a backward, if that comes first. What was measured goes to the decider, which may give another plan then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.record import Installation
from hf_ckpt.measure.step import step_meter

_Gradients = tuple[tuple[int, int] | None, ...]
"""For each trainable parameter: which tensor its gradient is and how often that was changed; None without one."""


class StepWindow:
    """Measures from now on until `close`; `on_step` is called when the optimizer is about to step."""

    def __init__(
        self, base: nn.Module, record: Installation, limit_bytes: int, batch: Any, on_step: Callable[[nn.Module], None]
    ) -> None:
        self.planned = record.planned
        """What was decided for the batch."""
        self._base = weakref.ref(base)
        self._on_step = on_step
        self._before = _gradients(base)
        optimizers = compat.optimizers_of(base)
        self._handles = [optimizer.register_step_pre_hook(self._steps) for optimizer in optimizers]
        self._meter = step_meter(limit_bytes, base, {"batch": batch}, *optimizers) if optimizers else None
        self._end = weakref.finalize(base, self.close)  # a model may go before its optimizer steps

    @property
    def accumulated(self) -> bool:
        """Whether there were gradients when the window opened."""
        return any(gradient is not None for gradient in self._before)

    def has_seen_backward(self, base: nn.Module) -> bool:
        """Whether gradients have changed since the window was opened."""
        return _gradients(base) != self._before

    def close(self) -> int | None:
        """End the measurement, and return the peak in bytes; None where it is unknown."""
        self._end.detach()
        for handle in self._handles:
            handle.remove()
        meter, self._handles, self._meter = self._meter, [], None
        return None if meter is None else meter.stop()

    def _steps(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        base = self._base()
        if base is None:
            self.close()
        else:
            self._on_step(base)


def _gradients(base: nn.Module) -> _Gradients:
    found = (parameter.grad for parameter in base.parameters() if parameter.requires_grad)
    return tuple(None if gradient is None else (id(gradient), gradient._version) for gradient in found)
