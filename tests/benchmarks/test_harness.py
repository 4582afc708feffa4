"""The harness: turns, resumed runs, worker processes, and the CPU allocator's allocations."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys

import pytest
import torch
from comparison import Table, first_difference
from harness import Benchmark, Results, fastest, median, option, ratios, rotated
from machine import CpuAllocations, keep_freed_memory
from workers import Worker, WorkerError

from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import LiveBytes

# --- turns ------------------------------------------------------------------------------------------------------------


def taking(log, name, *seconds):
    found = iter(seconds)

    def step():
        log.append(name)
        return next(found)

    return step


def test_ways_alternate_and_the_fastest_step_counts():
    log = []
    found = fastest({"one": taking(log, "one", 3, 1, 2), "other": taking(log, "other", 9, 8, 7)}, steps=3)
    assert found == {"one": 1, "other": 7}
    assert log == ["one", "other"] * 3
    assert fastest({"one": taking([], "one", 3, None), "other": taking([], "other", 9, 8)}, steps=2) == {"other": 8}


@pytest.mark.parametrize(("count", "starts"), [(5, [0, 1, 2, 3, 4]), (30, [0, 1, 2, 3, 4, 5]), (2, [0, 3]), (1, [0])])
def test_turns_begin_evenly_spread_over_the_items(count, starts):
    items = ["a", "b", "c", "d", "e", "f"]
    orders = [rotated(items, number, count) for number in range(len(starts))]
    assert [order[0] for order in orders] == [items[start] for start in starts]
    assert all(sorted(order) == items for order in orders)
    assert rotated(items, 2, 5) == ["c", "d", "e", "f", "a", "b"]


def test_ratios_within_turns_and_their_median():
    assert ratios([2, 9, 8], [1, 3, 2]) == [2, 3, 4]
    assert (median([2, 9, 8]), median([])) == (8, None)


def test_the_first_difference_of_gradients():
    one, other = torch.ones(2), torch.tensor([1.0, 2.0])
    assert first_difference({"a": one, "b": one}, {"a": one.clone(), "b": one}) is None
    assert first_difference({"a": one, "b": one}, {"a": one, "b": other}) == "b"
    assert first_difference({"a": one}, {"a": one, "b": one}) == "1 gradients against 2"
    assert first_difference({}, {}) == "no parameter has a gradient"


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Settings:
    size: int = option(1, "of everything")


class Script:
    """A benchmark of three cases in two families that records what it measures."""

    def __init__(self, **cases):
        self.log = []
        self.cases = {"a, one": 1, "a, other": 2, "b": 3, **cases}
        self.main = Benchmark("doc", Settings, self.all, self.tables, lambda case: ["too much"] * (case["x"] > 9)).main

    def all(self, settings, tell):
        def measure(name, value):
            self.log.append(name)
            if isinstance(value, BaseException):
                raise value
            return {"x": value * settings.size}

        return {name: lambda name=name, value=value: measure(name, value) for name, value in self.cases.items()}

    def tables(self, results):
        return [Table("title", ("case", "x"), [(name, str(case["x"])) for name, case in results.good.items()])]


def test_figures_are_written_and_shown_again(tmp_path, capsys):
    path = tmp_path / "figures.json"
    script = Script()
    assert script.main(["--json", str(path), "--size", "2"]) == 0
    printed = capsys.readouterr().out
    assert script.log == ["a, one", "a, other", "b"]
    assert json.loads(path.read_text())["cases"] == {"a, one": {"x": 2}, "a, other": {"x": 4}, "b": {"x": 6}}
    assert script.main(["--show", str(path)]) == 0
    assert capsys.readouterr().out == printed
    assert len(script.log) == 3


def test_a_run_that_was_killed_goes_on(tmp_path):
    """A killed run resumes: earlier results are kept and not measured again."""
    path = tmp_path / "figures.json"
    with pytest.raises(KeyboardInterrupt):
        Script(b=KeyboardInterrupt()).main(["--json", str(path)])
    assert list(json.loads(path.read_text())["cases"]) == ["a, one", "a, other"]
    again = Script()
    assert again.main(["--json", str(path)]) == 0
    assert again.log == ["b"]
    assert list(Results.read(path).good) == ["a, one", "a, other", "b"]


def test_a_case_that_fails_is_written_down_and_tried_again(tmp_path, capsys):
    path = tmp_path / "figures.json"
    failing = Script(**{"a, other": ValueError("[no] room\nat all")})
    assert failing.main(["--json", str(path)]) == 1
    assert failing.log == ["a, one", "a, other", "b"]
    assert "a, other: ValueError: [no] room" in capsys.readouterr().out
    case = json.loads(path.read_text())["cases"]["a, other"]
    assert case["error"] == "ValueError: [no] room"
    assert "Traceback" in case["traceback"]
    again = Script()
    assert again.main(["--json", str(path)]) == 0
    assert again.log == ["a, other"]


def test_one_family_at_a_time(tmp_path):
    path, script = tmp_path / "figures.json", Script()
    assert script.main(["--json", str(path), "--family", "a"]) == 0
    assert script.log == ["a, one", "a, other"]
    assert script.main(["--json", str(path), "--family", "b"]) == 0
    assert len(Results.read(path).cases) == 3


def test_figures_of_another_run_are_not_added_to(tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert Script().main(["--json", str(path)]) == 0
    assert Script().main(["--json", str(path), "--size", "2"]) == 2
    assert "figures of another run (size 1 there and 2 now)" in capsys.readouterr().err
    figures = json.loads(path.read_text())
    figures["circumstances"]["torch"] = "2.0"
    path.write_text(json.dumps(figures))
    assert Script().main(["--json", str(path)]) == 2
    assert "torch 2.0 there and" in capsys.readouterr().err


def test_faults_are_exit_code_1(capsys):
    assert Script(b=10).main([]) == 1
    assert "b: too much" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--family", "c"], "family must be one of a, b, but is 'c' instead."),
        (["--show", "no-such.json"], "cannot read the figures of a benchmark from no-such.json"),
        (["--json", "no/figures.json"], "there is no folder"),
        (["--json", "figures.txt"], "must end in"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_runs(words, said, capsys):
    script = Script()
    assert script.main(words) == 2
    assert said in capsys.readouterr().err
    assert script.log == []


# --- processes --------------------------------------------------------------------------------------------------------


class Thing:
    """Counts, fails or dies on request."""

    def __init__(self, start):
        if start < 0:
            raise HfCkptError("start must be at least 0, but is negative.")
        self.count = start

    def add(self, number):
        self.count += number
        return self.count, os.getpid()

    def fail(self):
        raise ValueError("a line\nand another")

    def be_killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self):
        signal.pause()

    def given_back(self, keep):
        """Bytes that return to the system when 128 MiB are freed in several pieces."""
        import psutil

        if keep:
            keep_freed_memory()
        held = [torch.ones(2**20) for _ in range(16)] + [torch.ones(2**24)]
        before = psutil.Process().memory_info().rss
        del held
        return before - psutil.Process().memory_info().rss


@pytest.mark.long
def test_objects_live_in_processes_of_their_own():
    with Worker(Thing, 1) as one, Worker(Thing, 10) as other:
        first, pid = one.ask("add", 2)
        assert (first, one.ask("add", 3)[0], other.ask("add", 1)[0]) == (3, 6, 11)
        assert len({pid, other.ask("add", 0)[1], os.getpid()}) == 3
        with pytest.raises(WorkerError, match=r"^ValueError: a line$") as caught:
            one.ask("fail")
        assert "in fail" in caught.value.details
        assert one.ask("add", 5)[0] == 11
        with pytest.raises(WorkerError, match="exit code -9, most likely because memory ran out") as caught:
            one.ask("be_killed")
        assert caught.value.out_of_memory
        other._seconds = 0.2
        with pytest.raises(WorkerError, match=r"sleep took longer than 0\.2 s"):
            other.ask("sleep")
        processes = [one._process, other._process]
    assert not any(process.is_alive() for process in processes)
    with Worker(Thing, -1) as thing, pytest.raises(WorkerError, match=r"^start must be at least 0, but is negative\.$"):
        thing.ask("add", 1)


# --- the allocator ----------------------------------------------------------------------------------------------------


def test_allocations_of_the_cpu_by_hand():
    """The peak has two tensors of 40,000 bytes; one is freed before a third comes. Earlier tensors do not count."""
    before = torch.ones(10_000)
    with CpuAllocations() as found:
        one, two = torch.empty(10_000), torch.empty(10_000)
        del one
        three = torch.empty(5_000)
    assert (found.peak_bytes, found.left_bytes) == (80_000, 60_000)
    del before, two, three


def test_allocations_within_an_operation_are_seen():
    """Memory inside an operation is counted: the CPU's attention kernel allocates scores outside of tensors."""
    query = torch.rand(1, 8, 256, 64)
    with LiveBytes({"query": query}) as live:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    with CpuAllocations() as found:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert found.peak_bytes > 1.1 * (live.peak_bytes - live.start_bytes) >= query.nbytes


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept():
    """Freed memory is kept, which glibc would return to the system at once."""
    with Worker(Thing, 0) as keeping, Worker(Thing, 0) as leaving:
        assert keeping.ask("given_back", True) < 8 * 2**20 < 100 * 2**20 < leaving.ask("given_back", False)
