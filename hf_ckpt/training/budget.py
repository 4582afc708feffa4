"""The budget of a run: how much a step may need, what plans may be predicted to need, and the watch of later steps.

The watch looks at steps under plans that were measured before, whatever has changed since. On accelerators it reads the
allocator's peak once a step. It does not reset it, so that users still find theirs there: a peak that stays below the
budget says the same of each step so far. Elsewhere a step is slow to measure, so only every n-th one is a check step
(every second one at most), and the `SOON`-th one if something unusual has happened.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.live import held_bytes
from hf_ckpt.measure.memory import PeakMeter, device_memory, keeps_statistics
from hf_ckpt.spec.plan import Prediction
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import budget_bytes, format_bytes

log = logging.getLogger(__name__)

SHARE_AFTER_FAILURE = 0.9
"""If memory runs out, later plans may need this share of what was predicted for the step that failed."""
SOON = 10
"""The n-th step after a check is the next one, if something unusual has happened in between, and n is not less."""


def budget_of(spec: Spec, base: nn.Module, devices: Collection[torch.device]) -> int:
    """Return the bytes that a `budget` or `auto` allows the steps of a model.

    Raises `InfeasibleError` if the model itself needs more, and `HfCkptError` for a share of several accelerators.
    """
    accelerators = compat.devices.accelerators(devices)
    if len(accelerators) > 1 and not isinstance(spec.budget, int):  # one card is full before the others are
        cards = " and ".join(map(str, accelerators))
        raise HfCkptError(f"`auto` and shares work for one card, but the model is on {cards}. Give bytes instead.")
    held = held_bytes(devices, base, *compat.optimizers.of_model(base))
    memory = device_memory(held, devices)
    budget = budget_bytes(spec.budget, memory.total_bytes)
    if budget > memory.total_bytes:
        text = (
            "hf_ckpt: the budget of %s exceeds the device's memory, %s: steps within the budget may run out of memory."
        )
        warn_once(log, text, format_bytes(budget), format_bytes(memory.total_bytes))
    if spec.policy == "auto":  # all that other processes leave; a share that a user gives is of the whole memory
        budget -= memory.total_bytes - memory.available_bytes
    if held > budget and compat.distributed.parameters_stay(base):
        raise InfeasibleError(
            budget,
            held,
            {"weights and optimizer state": held},
            ["a smaller model, quantised weights, or parameters that are sharded over more devices"],
            f"no plan fits into {format_bytes(budget)}: the model and the state of its optimizer alone take "
            f"{format_bytes(held)}. What would lower it:",
        )
    return budget


class Budget:
    """The bytes that steps of a run may need, and the limit of its plans.

    Args:
        spec: the user's spec.
        base: the model, plain.
        devices: its devices.

    Raises what `budget_of` raises.
    """

    def __init__(self, spec: Spec, base: nn.Module, devices: Collection[torch.device]) -> None:
        self.bytes = budget_of(spec, base, devices)
        """The peak that steps may have."""
        self.limit_bytes = self.bytes
        """The predicted peak that plans may have: lower, once a step has needed more than was predicted."""
        self.watch = BudgetWatch(devices, spec.check_every)

    def lower(self, prediction: Prediction, peak_bytes: int) -> None:
        """Lower the limit by what a step needed more than was predicted, above the budget."""
        # For batches of all sizes: their predictions may miss as much.
        excess_bytes = peak_bytes - prediction.peak_bytes
        self.limit_bytes = min(self.limit_bytes, self.bytes - excess_bytes)
        text = "hf_ckpt: a step needed %s more than was predicted, above the budget of %s; planning again for less."
        log.info(text, format_bytes(excess_bytes), format_bytes(self.bytes))

    def lower_after_failure(self, predicted_bytes: int) -> None:
        """Lower the limit, because memory has run out in a step that was predicted to need this."""
        self.limit_bytes = int(SHARE_AFTER_FAILURE * predicted_bytes)


class BudgetWatch:
    """Reads the peaks of steps under plans, or says which of them to measure.

    Args:
        devices: the devices of the model.
        check_every: measure every n-th step, or every second one for 1, where no allocator keeps statistics; 0 for
            none.
    """

    def __init__(self, devices: Collection[torch.device], check_every: int) -> None:
        there = compat.devices.accelerators(devices)
        has_peaks = bool(there) and all(map(keeps_statistics, there))
        self._meter = PeakMeter(there) if has_peaks else None
        self._check_every = check_every
        # The check step is the n-th one. One step between two of them is left to the watch of blocks.
        self._wait = max(1, check_every - 1)
        """Steps under plans before the next one is measured."""
        self.is_due = False
        """Whether the next step is to be measured."""
        self.is_open = False
        """Whether the allocator's peak is that of steps under plans, and of the optimizer's steps between them."""
        self.voided = 0
        """Plans that were void because a step exceeded the budget."""
        self._steps = 0
        """Steps under plans so far."""
        self._checked = 0
        """`_steps` at the last check."""
        self._noticed = False
        """Whether a check comes after `SOON` steps, unless it comes sooner anyway."""
        self._in_a_row_until = 0
        """Until so many steps, a step that exceeds the budget is the second one in a row."""

    def begin(self) -> None:
        """A step under its plan begins."""
        self._steps += 1
        if self._meter is None:
            waited = self._steps - self._checked
            is_late = waited >= self._wait or (self._noticed and waited >= SOON - 1)
            self.is_due = is_late and self._check_every > 0
        elif not self.is_open:
            self._meter.read()
            self.is_open = True

    def read(self) -> tuple[int, int]:
        """Return (bytes alive, peak of the steps since the window opened)."""
        assert self._meter is not None
        return self._meter.look()

    def close(self) -> None:
        """What runs now is no step under a plan."""
        self.is_open = False

    def notice(self) -> None:
        """Something unusual has happened, so that a check comes after `SOON` steps, unless it comes sooner anyway."""
        self._noticed = bool(self._check_every)

    def checked(self) -> None:
        """A check step was measured."""
        self._checked = self._steps
        self._noticed = self.is_due = False

    def void(self) -> bool:
        """A step has exceeded the budget. Returns whether it is the second one in a row."""
        is_second = self._steps <= self._in_a_row_until
        self._in_a_row_until = self._steps + (self._check_every or 100)
        self.voided += not is_second
        self.is_open = False
        return is_second
