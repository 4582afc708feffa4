"""`overheads.py`: what masks as bits and changes of plans cost."""

from __future__ import annotations

import json

import held
import overheads
import pytest

from hf_ckpt.errors import HfCkptError


def test_both_are_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(overheads, "WAYS", (("GPT-2", "full"),))
    small = held.HeldSettings(hidden=64, blocks=2, batch=1, tokens=16, dtype="float32", models=("GPT-2",))
    monkeypatch.setattr(held, "HeldSettings", lambda **asked: small)
    monkeypatch.setattr(overheads, "MOST_SHARE", 1)  # of a step that takes milliseconds
    monkeypatch.setattr(overheads, "MOST_MICROSECONDS", 1e6)
    assert overheads.main(["--turns", "2", "--steps", "1", "--json", str(tmp_path / "overheads.json")]) == 0
    found = json.loads((tmp_path / "overheads.json").read_text())
    (row,) = found["rows"]
    assert row["masks"] == 2 * 3  # attention's, and two of each block's results
    assert len(row["step_seconds"]) == len(row["without_seconds"]) == 2
    assert 0 < row["share"] < 1
    assert found["changed"] > 0 < found["same_microseconds"]
    assert found["ok"]
    shown = capsys.readouterr().out
    assert "as bits" in shown
    assert "to change it on" in shown


def test_nothing_packed_is_an_error(monkeypatch):
    monkeypatch.setattr(overheads.masks, "can_pack", lambda tensor: False)
    with pytest.raises(HfCkptError, match="no masks of GPT-2 are packed"):
        overheads._masks("GPT-2", "full", overheads.OverheadsSettings())
