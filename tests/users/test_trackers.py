"""Experiment trackers receive the callback's figures. CI installs them and runs these tests in a separate step."""

from __future__ import annotations

import json
import sqlite3

import pytest
from helpers.processes import SCRIPTS, python
from helpers.trainers import metrics

pytestmark = pytest.mark.slow
FIGURES = ("memory/peak_gib", "memory/head_gib", "time/step_s", "time/tokens_per_s")


def test_trackio(tmp_path):
    pytest.importorskip("trackio")
    places = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path)}
    done = python(SCRIPTS / "tracked.py", "trackio", tmp_path / "out", extra=places, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = metrics(tmp_path / "out")
    assert [row["step"] for row in rows] == [1, 2]
    (database,) = tmp_path.glob("*.db")
    with sqlite3.connect(database) as connection:
        found = [json.loads(text) for (text,) in connection.execute("SELECT metrics FROM metrics ORDER BY step")]
    logged = [row for row in found if "train/loss" in row]
    assert len(logged) == len(rows)
    for row, shown in zip(rows, logged, strict=True):
        assert {key: shown[f"train/{key}"] for key in FIGURES} == {key: row[key] for key in FIGURES}
