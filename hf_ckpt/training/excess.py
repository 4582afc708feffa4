"""The watch of a budget: peaks of steps under plans that were measured before, whatever has changed since.

On accelerators it reads the allocator's peak once a step. It does not reset it, so that users still find theirs there:
a peak that stays below the budget says the same of each step so far. Elsewhere a step is slow to measure, so only every
n-th one is a check step, and one after something unusual.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from hf_ckpt import compat
from hf_ckpt.measure.memory import PeakMeter, keeps_statistics

SOON = 10
"""Steps between two checks at least, if something unusual happens in each step."""


class BudgetWatch:
    """Reads the peaks of steps under plans, or says which of them to measure.

    Args:
        devices: the devices of the model.
        check_every: measure every n-th step, where no allocator keeps statistics; 0 for none.
    """

    def __init__(self, devices: Collection[torch.device], check_every: int) -> None:
        there = compat.devices.accelerators(devices)
        has_peaks = bool(there) and all(map(keeps_statistics, there))
        self._meter = PeakMeter(there) if has_peaks else None
        self._check_every = check_every
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
        self._in_a_row_until = 0
        """Until so many steps, a step that exceeds the budget is the second one in a row."""

    def begin(self) -> None:
        """A step under its plan begins."""
        self._steps += 1
        if self._meter is None:
            wait = SOON if self._noticed else self._check_every
            self.is_due = self._steps - self._checked >= wait > 0
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
        """Something unusual has happened, so that a check comes soon."""
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
