"""Budgets hold in trainings of every kind, in one process and on two ranks. See `helpers.budgets`."""

from __future__ import annotations

import dataclasses

import pytest
from helpers.budgets import ROWS, SHARES, misses, references
from helpers.planned import budgeted, live_peak
from helpers.processes import each_rank, run_on_ranks
from helpers.ranks import Case
from helpers.steps import assert_same, enable, step

import hf_ckpt
from hf_ckpt.models.tiny import tiny_batch, tiny_model

QUICK, *SLOW = ROWS
RANK_ROWS = {
    "ddp, other lengths": Case("ddp", tokens=(96, 64), steps=12),
    "fsdp1": Case("fsdp1", tokens=(96,), steps=12),
    "fsdp2, bf16, three micro-steps": Case("fsdp2", half=True, accumulate=3, tokens=(96,), steps=8),
}


def cases(names):
    """CI runs the rows at one share, another marker at all shares."""
    for name in names:
        yield pytest.param(name, (0.5,), marks=pytest.mark.slow, id=name)
        yield pytest.param(name, SHARES, marks=pytest.mark.thorough, id=f"{name}, all shares")


@pytest.mark.usefixtures("one_thread", "steady_times")
@pytest.mark.parametrize(("name", "shares"), [pytest.param(QUICK, (0.5,), id=QUICK), *cases(SLOW)])
def test_budgets_hold(name, shares):
    """Real peaks stay within the budget, predictions are not too high, and gradients and weights are bit-equal."""
    keep, full_bytes = references(ROWS[name])
    missed = {share: misses(ROWS[name], keep, full_bytes, share) for share in shares}
    assert missed == {share: [] for share in shares}


def test_segments_are_taken_where_nothing_else_fits():
    """A deep model's budget below the peak of `full`: the plan is exact, and the gradients are those of `full`."""
    batch = tiny_batch("llama", batch=8, tokens=128)
    models = {name: tiny_model("llama", layers=24, hidden=32, attention="sdpa") for name in ("full", "segments")}
    hf_ckpt.install(models["full"], "full")
    enable(models["full"])
    expected = step(models["full"], batch)
    budget = round(0.8 * live_peak(models["full"], batch))
    budgeted(models["segments"], budget)
    for _ in range(4):
        step(models["segments"], batch)
    plan = hf_ckpt.describe(models["segments"]).plan
    assert len(plan.segments()) > 1
    assert live_peak(models["segments"], batch) == plan.prediction.peak_bytes <= budget
    assert_same(expected, step(models["segments"], batch))
    assert sum(hf_ckpt.describe(models["segments"]).recomputed.values()) > 0


@pytest.mark.parametrize(("name", "shares"), [*cases(RANK_ROWS)])
def test_budgets_hold_on_ranks(name, shares, tmp_path):
    """Each rank has its own peaks; the budget is the same on all ranks."""
    named = {f"{name} at {share}": dataclasses.replace(RANK_ROWS[name], share=share) for share in shares}
    results = run_on_ranks(named, tmp_path)
    missed = {case: [found["missed"] for found in each_rank(results, case)] for case in named}
    assert missed == {case: [[], []] for case in named}
