"""`compiling.py`: how long the first step takes, at several depths."""

from __future__ import annotations

import dataclasses
import json

import compiling
import pytest
from ways import COMPILED
from workers import Worker

from hf_ckpt.prediction.workload import load_config


class Told:
    """A process that says how long its first steps took."""

    asked: list[tuple[str, int]] = []

    def __init__(self, make, workload, way):
        self.blocks = load_config(workload.model).num_hidden_layers
        self.way = way

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass

    def ask(self, name):
        assert name == "first_steps"
        self.asked.append((self.way.name, self.blocks))
        again = self.asked.count((self.way.name, self.blocks))
        return (4.0 * self.blocks if self.way.group == COMPILED else 6.0) + 2 / again, 0.1


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(Told, "asked", [])
    monkeypatch.setattr(compiling, "Worker", Told)


def test_every_way_at_every_depth(told, small, tmp_path, capsys):
    path = tmp_path / "compiling.json"
    words = [small.model, "--depths", "4", "32", "--repeats", "2", "--dtype", "float32", "--json", str(path)]
    assert compiling.main(words) == 0
    printed = capsys.readouterr().out
    found = compiling.CompilingBench.from_dict(json.loads(path.read_text()))
    assert len(Told.asked) == 2 * len(found.rows) == 2 * 2 * len(compiling.WAYS)
    rows = {(row.name, row.blocks): row for row in found.rows}
    one = rows["blocks, one share", 32]
    assert one.first == 7.0  # the faster of 8 and 7
    assert found.over_whole(one) == 7.0 / 129.0
    assert found.over_whole(rows["whole model, budget 0.7", 4]) == 1.0
    assert "0.05x" in printed
    assert compiling.main(["--show", str(path)]) == 0
    assert capsys.readouterr().out == printed


def test_a_workload_at_another_depth(small, tmp_path):
    deep = compiling.at_depth(small, 7, tmp_path / "config.json")
    assert load_config(deep.model).num_hidden_layers == 7
    assert dataclasses.replace(deep, model=small.model) == small


@pytest.mark.slow
@pytest.mark.parametrize("way", compiling.WAYS[-2:], ids=lambda way: way.name)
def test_the_first_steps_of_a_session(small, tmp_path, way):
    with Worker(compiling.Session, compiling.at_depth(small, 3, tmp_path / "config.json"), way) as worker:
        first, later = worker.ask("first_steps")
        assert worker.ask("facts")["blocks"] == 3
    assert first > 0
    assert later > 0
