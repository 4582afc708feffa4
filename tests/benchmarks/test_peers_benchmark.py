"""`peers.py`: ways beside each other, at sizes where no figure of time means anything."""

from __future__ import annotations

import dataclasses
import json

import peers
import pytest
import torch
from figures import PeerBench, PeerRow
from forecaster import BUDGETS, LINEAR, Forecaster, restricted
from helpers.in_process import InProcess
from peers import Case, bench_peers
from ways import NONE, OURS, TRANSFORMERS, Way
from workers import WorkerError

from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import FAMILIES
from hf_ckpt.prediction.workload import Workload, real_model
from hf_ckpt.spec.actions import FULL
from hf_ckpt.spec.plan import Plan

# --- turns ------------------------------------------------------------------------------------------------------------


class Timed:
    """A way whose steps take these times, and that fails when there are no more."""

    def __init__(self, *seconds):
        self.seconds = iter(seconds)

    def ask(self, name):
        assert name == "timed"
        found = next(self.seconds, None)
        if found is None:
            raise WorkerError("killed", "")
        return found


def turns_of(tmp_path, count, **seconds):
    """`count` turns, in which ways beside `none` alternate with it."""
    ways = {name: NONE if name == "none" else Way(name, OURS) for name in seconds}
    rows = {way: PeerRow(way.name, way.group) for way in ways.values()}
    case = Case(Workload("some-model"), rows, tmp_path, print)
    case.reference, case.facts = NONE, {"tokens": 30}
    workers = {ways[name]: Timed(*found) for name, found in seconds.items()}
    for _ in range(count):
        case.turn({way: worker for way, worker in workers.items() if way is not NONE}, workers[NONE])
    case.conclude()
    return {way.name: row for way, row in case.rows.items()}


def test_the_fastest_steps_of_a_turn_are_compared(tmp_path, monkeypatch):
    """The machine is half as fast in the second turn, and busy in one step of each: no ratio shows it."""
    monkeypatch.setattr(peers, "STEPS", 2)
    rows = turns_of(tmp_path, 2, none=[1, 8, 2, 2], full=[9, 1.5, 3, 16])
    full = rows["full"]
    assert (full.step_seconds, full.reference_seconds) == ([1.5, 3], [1, 2])
    assert full.time_ratios == [1.5, 1.5]
    assert (full.time_ratio, full.seconds, full.tokens_per_second) == (1.5, 1.5, 20.0)


def test_what_fails_on_the_way_keeps_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "STEPS", 2)
    rows = turns_of(tmp_path, 2, none=[1] * 4, full=[2] * 3, selective=[3] * 4)
    assert rows["full"].error == "killed"
    assert rows["full"].time_ratios == [2]
    assert rows["selective"].time_ratios == [3, 3]
    rows = turns_of(tmp_path, 2, none=[1, 1], full=[2] * 4)
    assert rows["none"].error == "killed"
    assert rows["full"].time_ratios == [2]
    rows = turns_of(tmp_path, 1, none=[], full=[2] * 2)
    assert (rows["none"].error, rows["full"].time_ratio, rows["full"].seconds) == ("killed", None, None)


# --- the comparison ---------------------------------------------------------------------------------------------------


class Planner:
    """In the place of a forecaster: plans `full` twice, and predicts `none` only."""

    def __init__(self, workload, compiled=False):
        found = find_blocks(real_model(workload))
        self.plan = Plan(found.family, found.model, tuple((block, FULL) for block in found.blocks))

    def take(self):
        pass

    def plans(self):
        return [(f"planned for {share:.0%}", share, 2**30, self.plan) for share in (0.3, 0.5)]

    def compiled_plans(self):
        return []

    def predictions(self):
        return {"none": (2**20, 1.0)}


@pytest.fixture
def planner(monkeypatch, here):
    monkeypatch.setattr(peers, "Forecaster", Planner)


def test_a_way_that_fails_is_a_row_that_says_so(small, planner, monkeypatch):
    monkeypatch.setattr("ways.PEERS", (NONE, Way("broken", TRANSFORMERS, {"no_such_option": 1})))
    monkeypatch.setattr("ways.OUR_WAYS", (Way("misspelt", OURS, {"policy": "ful"}),))
    saved = []
    found = bench_peers([small], repeats=2, on_case=lambda result: saved.append(len(result.cases)))
    rows = {row.name: row for row in found.cases[0].rows}
    assert "no_such_option" in rows["broken"].error
    assert "1 problem in the activation checkpointing spec" in rows["misspelt"].error
    assert rows["misspelt"].details.startswith("Traceback")
    assert all(len(row.step_seconds) == (0 if row.error else 2) for row in rows.values())
    assert all(len(row.reference_seconds) == len(row.step_seconds) for row in rows.values())
    assert rows["planned for 50%"].recomputed == 2
    assert (rows["none"].predicted_peak_bytes, rows["none"].predicted_seconds) == (2**20, 1.0)
    assert saved == [1]


def test_ways_run_one_after_the_other_where_they_share_a_device(small, planner, monkeypatch):
    """Each is over before the next begins, the forecaster first, and all of the same is measured."""
    alive, most = [], []

    class Counting(InProcess):
        def ask(self, name, *arguments):
            if self not in alive:
                alive.append(self)
            most.append(len(alive))
            return super().ask(name, *arguments)

        def close(self):
            super().close()
            if self in alive:
                alive.remove(self)

    monkeypatch.setattr(peers, "Worker", Counting)
    together = bench_peers([small], repeats=2, only=["full (HF)"])
    assert max(most) == 5  # the forecaster, none, full and two plans
    most.clear()
    run = Case.run
    monkeypatch.setattr(Case, "run", lambda self, repeats, forecaster=None: run(self, repeats))
    apart = bench_peers([small], repeats=2, only=["full (HF)"])
    assert max(most) == 2  # the forecaster is not told to go before, because this is a CPU
    for case in (together.cases[0], apart.cases[0]):
        assert [len(row.step_seconds) for row in case.rows] == [2] * 4
        assert [len(row.reference_seconds) for row in case.rows] == [2] * 4
    pairs = zip(together.cases[0].rows, apart.cases[0].rows, strict=True)
    assert all(one.recomputed == other.recomputed for one, other in pairs)


def test_where_none_does_not_run_the_first_that_does_is_the_reference(small, planner, monkeypatch):
    make = peers.Session

    def session(workload, way):
        if way.name == "none":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return make(workload, way)

    monkeypatch.setattr(peers, "Session", session)
    found = bench_peers([small], repeats=1, only=["full (HF)", "selective"])
    case = found.cases[0]
    rows = {row.name: row for row in case.rows}
    assert case.reference == "full (HF)"
    assert rows["none"].error == "OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert len(rows["full (HF)"].reference_seconds) == 1
    assert rows["selective"].difference == 0.0
    assert found.ok
    assert PeerBench.from_dict(found.to_dict()).cases[0].reference == "full (HF)"


def test_where_nothing_runs(small, planner):
    with pytest.raises(HfCkptError, match=r"nothing runs on .* but not with lion"):
        bench_peers([dataclasses.replace(small, optimizer="lion")], repeats=1, only=["TRL"])


# --- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_plans_choose_from_what_users_plans_choose_from(small, here):
    made = Forecaster(dataclasses.replace(small, batch=2, tokens=32))
    made.take()
    costs = made.timings.costs()
    linear = costs.actions.index(LINEAR)
    fewer = restricted(costs, made.actions)
    assert all(linear in some for stack in costs.stacks for some in stack.choices)
    assert {linear in some for stack in fewer.stacks for some in stack.choices} == {LINEAR in made.actions}
    for *_, plan in made.plans():
        assert {*dict(plan.actions).values()} <= {*made.actions}
    assert {"none", "full (HF)", "selective, save linear", "planned for 50%"} <= made.predictions().keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_peaks_are_those_predicted(configs, here, family):
    """Of every row that the planner can predict: T5's under transformers' own checkpointing among them."""
    workload = Workload(configs[family], batch=4, tokens=96, dtype="float32")
    found = bench_peers([workload], repeats=1, only=[TRANSFORMERS, OURS])
    assert found.ok
    case = found.cases[0]
    ran = [row for row in case.rows if row.error is None]
    assert {row.name for row in case.rows if row.error} == {
        *("offload (HF)", "offload"),
        *(("head in chunks", "full, head in chunks") if family == "bert" else ()),
    }
    assert len(ran) == 14 + (0 if family == "bert" else 2)
    assert all(row.peak_error is not None and row.seconds_error is not None for row in ran)
    assert {row.name: row.peak_error for row in ran if abs(row.peak_error) > 0.055} == {}  # the smallest of models
    lines = case.at_budgets()
    assert [line.share for line in lines] == list(BUDGETS)
    rows = {row.name: row for row in ran}
    assert all(rows[line.ours].allocated_bytes <= 1.02 * line.budget_bytes for line in lines)


# --- the script, and real processes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_with_processes_of_their_own(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(peers, "TAKES", 1)
    words = [small.model, "--batch", "2", "--seq", "32", "--dtype", "float32", "--repeats", "1"]
    files = {name: tmp_path / f"peers.{name}" for name in ("json", "png")}
    words += [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert peers.main([*words, "--only", "full (HF)", "--only", "offload"]) == 0
    found = json.loads(files["json"].read_text())
    rows = {row["name"]: row for row in found["cases"][0]["rows"]}
    assert set(rows) == {"none", "full (HF)", "offload", *(f"planned for {share:.0%}" for share in BUDGETS)}
    assert rows["offload"]["error"].startswith("needs an accelerator")
    assert rows["full (HF)"]["difference"] == 0.0
    assert rows["full (HF)"]["reserved_bytes"] > 50 * 2**20
    assert len(rows["full (HF)"]["step_seconds"]) == 1
    assert all(row["peak_error"] is not None for name, row in rows.items() if name != "offload")
    assert files["png"].stat().st_size > 10_000
    capsys.readouterr()
    assert peers.main(["--show", str(files["json"]), "--markdown", str(tmp_path / "peers.md")]) == 0
    assert "full (HF)" in capsys.readouterr().out
    assert "| full (HF) |" in (tmp_path / "peers.md").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "nobody"], "a way must be one of"),
        (["--show", "no-such.json"], "cannot read figures from no-such.json"),
    ],
)
def test_wrong_words(words, told, capsys):
    assert peers.main(words) == 2
    assert told in capsys.readouterr().err
