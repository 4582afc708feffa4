"""Experiment trackers receive the callback's figures. CI installs them and runs these tests in a separate step."""

from __future__ import annotations

import json
import re
import sqlite3

import pytest
from helpers.processes import SCRIPTS, python
from helpers.trainers import metrics

pytestmark = pytest.mark.slow
FIGURES = ("memory/peak_gib", "memory/head_gib", "time/step_s", "time/tokens_per_s")


def trained(tracker, folder):
    """Rows that the callback logged in a training with a tracker, which writes to the folder."""
    pytest.importorskip(tracker)
    places = {"HOME": str(folder), "WANDB_DIR": str(folder), "WANDB_MODE": "offline", "TRACKIO_DIR": str(folder)}
    done = python(SCRIPTS / "tracked.py", tracker, folder / "out", extra=places, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = metrics(folder / "out")
    assert [row["step"] for row in rows] == [1, 2]
    return rows


def test_trackio(tmp_path):
    rows = trained("trackio", tmp_path)
    (database,) = tmp_path.glob("*.db")
    with sqlite3.connect(database) as connection:
        found = [json.loads(text) for (text,) in connection.execute("SELECT metrics FROM metrics ORDER BY step")]
    logged = [row for row in found if "train/loss" in row]
    assert len(logged) == len(rows)
    for row, shown in zip(rows, logged, strict=True):
        assert {key: shown[f"train/{key}"] for key in FIGURES} == {key: row[key] for key in FIGURES}


def test_weights_and_biases_without_a_network(tmp_path):
    """An offline run's file lists records with names and JSON values; the summary repeats values."""
    rows = trained("wandb", tmp_path)
    (path,) = tmp_path.rglob("run-*.wandb")
    data = path.read_bytes()
    for key in FIGURES:
        values = [float(value) for value in re.findall(rb"train/%s\x82\x01.([0-9.e-]+)" % key.encode(), data)]
        assert list(dict.fromkeys(values)) == list(dict.fromkeys(row[key] for row in rows)), key
