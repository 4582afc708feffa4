"""`held.py`: what blocks hold under `selective`, with dropout on."""

from __future__ import annotations

import json

import held
import pytest


@pytest.mark.parametrize("model", ["Mistral", pytest.param("GPT-2", marks=pytest.mark.thorough)])
def test_what_is_held_is_counted(model, tmp_path, capsys):
    words = ["--model", model, "--hidden", "64", "--blocks", "2", "--batch", "1", "--tokens", "32"]
    assert held.main([*words, "--json", str(tmp_path / "held.json")]) == 0
    found = json.loads((tmp_path / "held.json").read_text())
    assert found["ok"]
    rows = found["rows"]
    assert [(row["tuning"], row["save"]) for row in rows] == [(tuning, list(save)) for tuning, save in held.WAYS]
    for row in rows:
        assert 0 < row["held_bytes"] < row["none_bytes"]
        assert row["bound"] is None
    assert rows[1]["held_bytes"] > rows[2]["held_bytes"]
    assert "held at the end of the forward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "Falcon"], "models must be of Mistral, GPT-2, RoBERTa, mT5, but are Falcon instead."),
        (["--hidden", "100"], "hidden must be a multiple of 64, but is 100 instead."),
    ],
)
def test_asked_wrongly(words, said, capsys):
    assert held.main(words) == 2
    assert said in capsys.readouterr().err
