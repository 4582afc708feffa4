"""`largest.py`: how far every way goes within a budget."""

from __future__ import annotations

import dataclasses
import json

import largest
import pytest
from largest import bench_largest
from ways import PLANNED, PLANNED_BOTH, PLANNED_CHUNKED, PLANNED_COMPILED
from workers import WorkerError

from hf_ckpt import compat
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.prediction.timeline import worst_timeline
from hf_ckpt.prediction.workload import Workload, skeleton_of_workload
from hf_ckpt.spec.plan import Plan


def fits(found):
    """Each is the largest: it was measured, and the next was tried and is too much."""
    for row in found.rows:
        assert row.error is None
        assert row.tried[row.largest] == row.peak_bytes <= found.budget_bytes
        beyond = row.tried[row.largest + 1]
        assert beyond is None or beyond > found.budget_bytes
        assert row.over_none == row.largest / found.rows[0].largest
    return {row.name: row.largest for row in found.rows}


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not(configs, here):
    workload = Workload(configs["gpt2"], batch=4, tokens=64, dtype="float32")
    only = ["full (HF)", "selective", "planned", "planned, head in chunks"]
    most = fits(bench_largest(workload, "batch", 6 * 2**20, only=only))
    assert list(most) == ["none", *only]
    assert most["none"] < most["selective"] < most["planned"] <= most["planned, head in chunks"]
    assert most["planned"] >= most["full (HF)"]


def more_than_predicted(monkeypatch, measure):
    """Every plan is measured to need 2 % more than `measure` says. Returns the plans that were measured."""
    given = []

    def measured(way, workload):
        if isinstance(way.options, Plan):
            given.append(way.options)
        return measure(way, workload) * 102 // 100

    monkeypatch.setattr(largest, "_measured_peak", measured)
    return given


@pytest.fixture(scope="module")
def costs(workload):
    """What plans for `workload` are made of."""
    return largest._costs(PLANNED, workload, skeleton_of_workload(workload))


@pytest.mark.slow
@pytest.mark.skipif(not compat.HOOKS_STAY_OUTSIDE, reason="no plans for compiled blocks")
@pytest.mark.parametrize(("way", "heads"), [(PLANNED_COMPILED, ["full"]), (PLANNED_BOTH, ["full", "auto"])])
def test_plans_for_compiled_blocks_are_made_of_shares(configs, way, heads):
    workload = Workload(configs["llama"], batch=2, tokens=16)
    found = largest._costs(way, workload, skeleton_of_workload(workload))
    assert [costs.head_tokens for costs in found] == heads
    assert {action.kind for costs in found for action in costs.actions} == {"compiled"}


@pytest.fixture
def traced(monkeypatch, costs):
    """Nothing is traced again."""
    monkeypatch.setattr(largest, "_costs", lambda way, workload, skeleton: costs)


def test_a_plan_that_is_predicted_too_low_is_made_again_for_less(workload, costs, traced, monkeypatch):
    """The budget is what keeping everything needs by the prediction."""
    given = more_than_predicted(monkeypatch, lambda way, workload: way.options.prediction.peak_bytes)
    budget = worst_timeline(costs[0], costs[0].uniform(0)).peak_bytes
    assert 0.9 * budget < largest._peak(PLANNED, workload, budget, None) <= budget
    limits = [plan.prediction.budget_bytes for plan in given]
    assert limits == [budget, budget * budget // (budget * 102 // 100)]


@pytest.mark.slow
def test_plans_go_farther_than_none_though_they_are_predicted_too_low(configs, here, monkeypatch):
    workload = Workload(configs["gpt2"], batch=4, tokens=64, dtype="float32")
    given = more_than_predicted(monkeypatch, largest._measured_peak)
    budget = 12 * 2**20
    most = fits(bench_largest(workload, "batch", budget, only=[PLANNED.name]))
    assert most["planned"] > 1.2 * most["none"]
    limits = [plan.prediction.budget_bytes for plan in given]
    assert min(limits) < max(limits) == budget


def test_what_cannot_be_planned_does_not_fit(workload, here, traced):
    """Weights alone are more."""
    found = bench_largest(dataclasses.replace(workload, batch=1), "batch", 2**10, only=[PLANNED.name])
    assert [(row.largest, row.peak_bytes, row.error) for row in found.rows] == [(0, None, None)] * 2
    assert None in found.rows[1].tried.values()


def test_memory_that_runs_out_does_not_fit(workload, here, monkeypatch):
    def peak(way, workload, budget_bytes, skeleton):
        if workload.batch > 9:
            raise WorkerError("OutOfMemoryError: CUDA out of memory. Tried to allocate")
        if way.name == "full (HF)":
            raise WorkerError("KeyError: 'other'")
        return 1

    monkeypatch.setattr(largest, "_peak", peak)
    saved = []
    result = bench_largest(
        workload, "batch", 100, only=["full (HF)"], on_row=lambda found: saved.append(len(found.rows))
    )
    none, full = result.rows
    assert saved == [1, 2]  # what has been found is not lost with what comes next
    assert (none.largest, none.error) == (9, None)
    assert (full.largest, full.error) == (None, "KeyError: 'other'")


def test_a_process_that_was_killed_ran_out_of_memory():
    assert largest._ran_out(WorkerError("its process ended with exit code -9"))
    assert not largest._ran_out(WorkerError("its process ended with exit code 1"))
    assert not issubclass(InfeasibleError, WorkerError)


def test_heads_of_plans_that_are_not_there(configs, here):
    found = bench_largest(Workload(configs["bert"], batch=1, tokens=8), "batch", 2**10, only=[PLANNED_CHUNKED.name])
    assert "has no head over a vocabulary" in found.rows[1].error


@pytest.mark.parametrize("where", ["here", pytest.param("own_allocator", marks=pytest.mark.slow)])
def test_the_script(where, configs, tmp_path, capsys, request):
    """In this process, or in processes of their own. Sequences are no longer than there are positions."""
    request.getfixturevalue(where)
    words = ["tokens", configs["bert"], "--batch", "1", "--seq", "300", "--dtype", "float32"]
    words += ["--budget", "1GiB", "--only", "activation offloading (TRL)", "--json", str(tmp_path / "most.json")]
    assert largest.main(words) == 0
    rows = json.loads((tmp_path / "most.json").read_text())["rows"]
    assert [row["largest"] for row in rows] == [512, None]
    assert rows[1]["error"] == "needs an accelerator: a CPU has no host memory beside its own"
    assert "most tokens within 1.00 GiB" in " ".join(capsys.readouterr().out.split())


def test_wrong_words(capsys):
    assert largest.main(["batch", "mini-gpt2", "--budget", "much"]) == 2
    assert "a size must look like" in capsys.readouterr().err
