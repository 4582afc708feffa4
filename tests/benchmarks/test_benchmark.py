"""The benchmark: every way to run a step, turns, figures that are written as they come, and tables of the pages."""

import argparse
import contextlib
import csv
import json
import os
import re
import runpy
import shlex
import signal
import types

import figures
import memory
import peers
import published
import pytest
import torch
from figures import faults
from harness import Results, Worker, failure
from helpers.tables import table
from ways import COMPILED, NONE, OURS_COMPILED, WAYS, our_way

from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import tiny_model

NAMED = {way.name: way for way in WAYS}
EAGER = [way for way in WAYS if way.group not in (COMPILED, OURS_COMPILED) and "offload" not in way.name]


class InProcess(contextlib.ExitStack):
    """Replaces `harness.Worker`; the object lives in this process."""

    def __init__(self, *made_by):
        super().__init__()
        self.made_by, self.session = made_by, None

    def ask(self, name, *arguments):
        try:
            if self.session is None:
                make, *sizes = self.made_by
                self.session = make(*sizes)
                self.push(self.session.way)
            return getattr(self.session, name)(*arguments)
        except Exception as error:
            return failure(error)

    shutdown = contextlib.ExitStack.close


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the benchmark on a small LLaMA, without worker processes; returns (exit code, rows by name, the case)."""
    monkeypatch.setattr(peers, "Worker", InProcess)
    monkeypatch.setattr(peers, "STEPS", 2)
    config = tiny_model("llama", layers=4, attention="sdpa").config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    sizes = {"model": tmp_path / "config.json", "json": tmp_path / "peers.json", "batch": 8, "dtype": "float32"}

    def run(**others):
        code = peers.main([word for name, value in {**sizes, **others}.items() for word in (f"--{name}", str(value))])
        case = json.loads((tmp_path / "peers.json").read_text())["cases"]["config"]
        return code, {row["name"]: row for row in case["rows"]}, case

    return run


@pytest.mark.long
def test_every_way_recomputes_and_gives_the_same_gradients(run, monkeypatch):
    """Plans keep to their budgets, and a larger budget is used for a larger peak."""
    monkeypatch.setattr(peers, "WAYS", EAGER)
    code, rows, case = run(tokens=96, repeats=1)
    assert (code, case["repeatable"], rows["none"].pop("recomputed")) == (0, True, None)
    plans = [rows.pop(f"planned for {share}%") for share in (10, 30, 50, 70, 90)]
    none, peaks, saved = rows.pop("none"), {}, {}
    for name, row in rows.items():
        assert row["recomputed"] > 0, name
        if "head" in name:  # sums in another order
            assert 0 < row["difference"] < 1e-5, name
        else:
            assert (row["first_difference"], row["difference"]) == (None, 0.0), name
        peaks[name], saved[name] = row["allocated_bytes"], row["saved_bytes"]
    names = ("full (HF)", "every_n_layers: 2 (HF)", "torch_remat", "full", "full, checked")
    assert [rows[name]["recomputed"] for name in names] == [4, 2, 4, 4, 4]
    for sizes, most in ((peaks, none["allocated_bytes"]), (saved, none["saved_bytes"])):
        assert most > sizes["selective"] > sizes["selective, save attention"]
        assert sizes["full"] == pytest.approx(sizes["full (HF)"], rel=0.02)
    sac = ("SAC, all matmuls + attention", "SAC, every 2nd matmul + attention", "SAC, attention")
    sizes = [saved[name] for name in (*sac, "full (HF)")]
    assert sizes == sorted(set(sizes), reverse=True)
    for row in plans:
        assert row["first_difference"] is None, row["plan"]
        assert row["allocated_bytes"] <= 1.02 * row["budget_bytes"]
        assert row["allocated_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.055)  # a tiny model
    assert len({row["allocated_bytes"] for row in plans}) > 1


def test_the_fastest_steps_of_a_turn_are_compared(tmp_path, monkeypatch):
    """Ratios compare the fastest steps of a turn, so a slow turn or a single slow step does not change them."""

    def timed(*seconds):
        """A worker whose steps take these times, and fail after the last."""
        left = list(seconds)
        return types.SimpleNamespace(ask=lambda name: left.pop(0) if left else {"error": "killed"})

    monkeypatch.setattr(peers, "planned", lambda *_: {})
    monkeypatch.setattr(peers, "STEPS", 2)
    full, selective = NAMED["full"], NAMED["selective"]
    test = peers.Run(argparse.Namespace(only=["full", "selective"]), "config", tmp_path)
    test.workers = {NONE: timed(1, 8, 2, 2), full: timed(9, 1.5, 3, 16), selective: timed(3)}
    for _ in range(2):
        test.turn([full, selective], NONE)
    row, failed = test.rows[full], test.rows[selective]
    assert (row["step_seconds"], row["reference_seconds"], figures.ratio(row)) == ([1.5, 3], [1, 2], 1.5)
    assert (failed["error"], failed["step_seconds"]) == ("killed", [])


@pytest.mark.parametrize(("device", "reference"), [("cpu", "none"), ("cuda", "full (HF)")])
def test_ways_side_by_side_or_one_after_the_other(device, reference, run, monkeypatch, capsys):
    """A way that fails still has a row, with its error. The first way that runs is the reference, also where training
    without checkpointing runs out of memory. On accelerators, ways run one after the other."""

    def session(settings, name, way, make=peers.Session):
        if way is NONE and reference != "none":
            raise torch.OutOfMemoryError("CUDA out of memory\nTried to allocate 1 GiB")
        return make(settings, name, way)

    row = {"plan": "full 0-1", "predicted_peak_bytes": 2**20, "budget_share": 0.5, "budget_bytes": 2**30}
    monkeypatch.setattr(peers, "planned", lambda *_: [(our_way("planned for 50%", policy="full"), row)])
    monkeypatch.setattr(peers, "Session", session)
    monkeypatch.setattr(peers, "WAYS", (NONE, NAMED["full (HF)"], our_way("broken", no_such_key=1)))
    monkeypatch.setattr(peers, "DEVICE", device)
    code, rows, case = run(tokens=16, blocks=2, repeats=2)
    assert (code, case["reference"], case["repeatable"]) == (0, reference, True)
    assert "1 problem in the activation checkpointing spec" in rows["broken"]["error"]
    assert rows["none"].get("error") == (None if device == "cpu" else "OutOfMemoryError: CUDA out of memory")
    lengths = [(len(row["step_seconds"]), len(row["reference_seconds"])) for row in rows.values()]
    assert lengths == [(2, 2) if "error" not in row else (0, 0) for row in rows.values()]
    planned = rows["planned for 50%"]
    assert (planned["reference_seconds"] == rows[reference]["step_seconds"]) is (device == "cuda")
    assert (planned["first_difference"], planned["recomputed"]) == (None, 2)
    assert "| planned for 50% |" in capsys.readouterr().out
    monkeypatch.setattr(peers, "Run", None)  # started again, it measures nothing
    assert run(tokens=16, blocks=2, repeats=2)[2] == case


# --- figures ----------------------------------------------------------------------------------------------------------


def test_figures_are_written_as_they_come_and_are_not_measured_again(tmp_path):
    path = tmp_path / "figures" / "figures.json"
    results = Results.begun(path, {"size": 1})
    results.add("one", lambda: {"rows": []})
    results.add("two", lambda: [][0])
    again = Results.begun(path, {"size": 1})
    assert again.cases == {"one": {"rows": []}, "two": {"error": "IndexError: list index out of range"}}
    again.add("one", lambda: [][0])
    again.add("two", lambda: {"rows": [1]})
    assert Results.read(path).good == {"one": {"rows": []}, "two": {"rows": [1]}}
    figures = json.loads(path.read_text())
    figures["circumstances"] |= {"torch": "2.0", "date": "2000-01-01"}
    path.write_text(json.dumps(figures))
    with pytest.raises(HfCkptError, match=r"another run \(size 1 there and 2 now, torch 2\.0 there and [^,]* now\)"):
        Results.begun(path, {"size": 2})


@pytest.mark.long
def test_objects_live_in_processes_of_their_own():
    """What a process raises, and its death, are errors of its way only."""
    with Worker(os.getpid) as one, Worker(os.getpid) as other, Worker(list, [1]) as numbers:
        assert len({one.ask("__int__"), other.ask("__int__"), os.getpid()}) == 3
        assert (numbers.ask("append", 2), numbers.ask("__len__")) == (None, 2)
        assert numbers.ask("index", 7)["error"].startswith("ValueError: ")
    with Worker(int, "a") as invalid, Worker(signal.raise_signal, signal.SIGKILL) as killed:
        assert invalid.ask("bit_length")["error"].startswith("ValueError: ")
        assert killed.ask("bit_length")["error"].startswith("its process was killed, most likely because memory ran")


# --- tables -----------------------------------------------------------------------------------------------------------


def made_up(**changes):
    """Results that can be checked by hand. `changes` are those of the row `full`."""
    results = table(__file__, "made_up.yaml")
    rows = []
    for row in results["rows"]:
        ratio = row.pop("ratio", None)
        times = {"step_seconds": [ratio] * 3 if ratio else [], "reference_seconds": [1.0] * 3}
        rows.append({**results["defaults"], **times, **row, **(changes if row["name"] == "full" else {})})
    return Results({}, {}, {"some-model": {"reference": "none", "repeatable": True, "rows": rows}})


def test_faults_of_our_own_rows():
    """Nothing was recomputed, or gradients differ: not if they are not repeatable, or the head runs in chunks."""
    for changes, told in (
        ({}, []),
        ({"recomputed": 0}, ["some-model: full: nothing was recomputed"]),
        ({"first_difference": "a.weight"}, ["some-model: full: gradients differ: a.weight"]),
        ({"first_difference": "a.weight", "name": "head in chunks"}, []),
    ):
        results = made_up(**changes)
        assert faults(results) == told
        results.cases["some-model"]["repeatable"] = False
        results.cases["other"] = {"error": "no way runs"}
        assert faults(results) == ["other: no way runs", *(fault for fault in told if "differ" not in fault)]


def test_tables_by_hand():
    ways, budgets = figures.tables(made_up())
    assert "| none | 100 | - | 80 | 1.00x | 2.0 | None | equal |" in ways
    assert "| every_n_layers: 2 (HF) | 0 | - | - | 1.20x | 2.0 | 4 | 1e-02 |" in ways
    assert "| offload | no memory | - | - | - | - | - | - |" in ways
    assert "| some-model | 50% | 0 | 0 | 1.10x | every_n_layers: 2 (HF) | 0 | 1.20x | 0.92 |" in budgets  # that fits
    assert "| some-model | 10% | 0 | 0 | 1.50x | - | - | - | 0.00 |" in budgets
    every = figures.every_way(made_up(), skip="torch.compile")
    assert ("| full (HF) | 0, 1.40x |" in every, "compiled, budget" in every) == (True, False)


def test_tables_on_pages_are_those_of_their_figures():
    """`python recipes/benchmarks/figures.py` writes them. Each is shown once, and every file is named."""
    texts = [page.read_text(encoding="utf-8") for page in figures.PAGES]
    assert [figures.rewritten(text) for text in texts] == texts
    assert sorted(mark[1] for text in texts for mark in figures.MARKED.findall(text)) == sorted(figures.TABLES)
    assert sum(text.count("figures -->") for text in texts) == 2 * len(figures.TABLES)
    assert [path.name for path in sorted(figures.HERE.glob("*-cpu.json")) if path.name not in texts[-1]] == []


COMMAND = re.compile(r"(?:`|python recipes/benchmarks/)((?:gpu|memory|peers|published)\.py[^`\n]*)")
COMMANDS = sorted({found for page in figures.PAGES for found in COMMAND.findall(page.read_text(encoding="utf-8"))})


class Parsed(Exception):
    """Raised where a script would begin to measure."""


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_on_pages_are_those_of_the_scripts(command, monkeypatch):
    script, *words = shlex.split(command)
    parse_args = argparse.ArgumentParser.parse_args

    def parse(*args):
        parse_args(*args)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr("sys.argv", [script, *words])
    with pytest.raises(Parsed):
        runpy.run_path(str(figures.HERE / script), run_name="__main__")


def test_the_picture_of_memory_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["memory.py", "--model", "mini-llama", "--tokens", "64", "--out", str(tmp_path / "a.png")]
    )
    memory.main()
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.long
def test_published_peaks_are_predicted_as_the_table_says(tmp_path, monkeypatch):
    """The table has the rows of the file, and one of them is predicted again."""
    rows = json.loads((figures.HERE / "published.json").read_text())
    with (figures.HERE / "published.csv").open() as file:
        assert [{key: row[key] for key in asked} for asked, row in zip(csv.DictReader(file), rows, strict=True)] == [
            *csv.DictReader((figures.HERE / "published.csv").read_text().splitlines())
        ]
    monkeypatch.setattr("sys.argv", ["published.py", "--json", str(tmp_path / "new.json"), "--only", "bert full"])
    published.main()
    (again,) = json.loads((tmp_path / "new.json").read_text())
    assert again == next(row for row in rows if row["id"] == "bert full")
