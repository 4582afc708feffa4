"""Times of blocks that depend on no clock."""

from __future__ import annotations

import pytest

from hf_ckpt.spec.actions import FULL_SELECTIVE
from hf_ckpt.training.measurements import Measurements


@pytest.fixture
def steady_times(monkeypatch):
    """Give all calls the same time, and each action a fixed share of it: no plan depends on a clock."""

    def learn_times(known, batch, step, tried):
        known.timed += 1
        known.times[None] = (0, 0, 0)
        for kind in set(known.kinds[batch.state].values()):
            for number, action in enumerate(known.actions):
                known.times[kind, action] = (1_000_000, 0, 2_000_000)
                known.ratios[kind, action] = 1.05 if action == FULL_SELECTIVE else 0.6 + 0.05 * number

    monkeypatch.setattr(Measurements, "learn_times", learn_times)
