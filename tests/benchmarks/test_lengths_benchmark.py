"""`lengths.py`: batches of mixed lengths, under `full`, one plan, and a plan for every bucket."""

from __future__ import annotations

import json

import lengths
import pytest

SMALL = ["--layers", "2", "--hidden", "64", "--batches", "4", "--sequences", "2", "--epochs", "1", "--longest", "96"]


@pytest.mark.slow
def test_short_batches_are_free(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lengths, "keep_freed_memory", lambda: None)
    assert lengths.main([*SMALL, "--share", "0.3", "--json", str(tmp_path / "lengths.json")]) == 0
    found = json.loads((tmp_path / "lengths.json").read_text())
    full, one, each = found["rows"]
    assert found["ok"]
    assert full["free"] == one["free"] == 0 < each["free"] < 4
    assert all(max(row["peak_bytes"]) <= found["budget_bytes"] for row in (one, each))
    assert [row["first_difference"] for row in found["rows"]] == [None] * 3
    assert len(each["plans"]) > 1
    assert each["planning_seconds"] > 0 == one["planning_seconds"]
    assert all(len(row["epoch_seconds"]) == 1 for row in found["rows"])
    assert "batches of mixed lengths" in capsys.readouterr().out


@pytest.mark.parametrize("installed", [True, False], ids=["speeches", "random words"])
def test_batches_hold_texts_of_similar_lengths(installed, monkeypatch):
    if not installed:
        monkeypatch.setattr(lengths.importlib.util, "find_spec", lambda name: None)
    label, batches = lengths.batches_of(lengths.LengthsSettings(batches=12))
    sizes = sorted(batch["input_ids"].shape[1] for batch in batches)
    assert ("speeches" in label) == installed
    assert len(sizes) == 12
    assert sizes[0] < sizes[6] < 0.6 * sizes[-1]
    assert all((batch["labels"] == -100).eq(batch["attention_mask"] == 0).all() for batch in batches)


def test_asked_wrongly(capsys):
    assert lengths.main(["--share", "2"]) == 2
    assert "share must be at least 0 and below 1, but is 2.0 instead." in capsys.readouterr().err
