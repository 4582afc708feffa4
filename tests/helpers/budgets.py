"""Trainings within budgets, whose real peaks are counted."""

from __future__ import annotations

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.measure.live import LiveBytes

SHARES = (0.25, 0.5, 0.75)
"""Where budgets lie between the peak of `full` and that of no checkpointing."""
MOST = 1.02
"""How many times its budget a real peak may be."""


def count_steps(trainer):
    """Let a Trainer count the live bytes of its micro-steps; returns the list that their peaks are put into."""
    peaks = []
    original = trainer.training_step

    def counted(model, inputs, *args, **kwargs):
        holders = [held for held in (trainer.optimizer, inputs) if held and not isinstance(held, list)]
        with LiveBytes(model, *holders) as live:
            result = original(model, inputs, *args, **kwargs)
        peaks.append(live.peak_bytes)
        return result

    trainer.training_step = counted
    return peaks


def assert_budgets_hold(train, shares=SHARES, most=MOST, first=0):
    """A real peak is at most `most` times its budget, and the plan does not do more than it has to.

    Args:
        train: trains under a spec, or without a plan for None; returns the Trainer and the peaks of its micro-steps.
        shares: which budgets are tried.
        most: as `MOST`.
        first: the first micro-step that has to be within its budget: 1 where only a measured step can tell.
    """
    highest, lowest = max(train(None)[1]), max(train({"policy": "full"})[1])
    assert lowest < 0.95 * highest, "a budget has nothing to choose from"
    for share in shares:
        budget = int(lowest + (highest - lowest) * share)
        trainer, peaks = train({"policy": "budget", "budget": budget})
        assert 0.9 * budget <= max(peaks[first:]) <= most * budget, (share, peaks, budget)
        record = installation(trainer.model)
        assert record.planned.limit_bytes == budget
        assert sum(hf_ckpt.describe(trainer.model).recomputed.values()) > 0
