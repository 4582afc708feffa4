"""`head.py`: the head and its loss, as a whole and in chunks."""

from __future__ import annotations

import json

import head
import pytest


def test_heads_are_measured_whole_and_in_chunks(tmp_path, capsys):
    words = ["--vocabulary", "4000", "--tokens", "512", "--hidden", "32", "--chunk", "64", "--chunk", "128"]
    assert head.main([*words, "--repeats", "2", "--json", str(tmp_path / "head.json")]) == 0
    found = json.loads((tmp_path / "head.json").read_text())
    assert found["ok"]
    rows = found["rows"]
    assert [row["head"] for row in rows] == ["full", 64, 128] * 4
    for whole, small, large in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert whole["bytes_ratio"] == whole["time_ratio"] == 1
        assert whole["peak_bytes"] > large["peak_bytes"] > small["peak_bytes"] > 0
        assert large["peak_bytes"] - large["weight_gradient_bytes"] < whole["peak_bytes"] / 3
        assert small["error"] <= 1.2 * whole["error"] + 1e-6
        assert len(small["step_seconds"]) == 2
    assert "the head and its loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "64", "--hidden", "32", "--chunk", "64"], "64 tokens do not make several chunks of 64"),
        (["--dtype", "int8"], "dtype must be float32, bfloat16 or float16, but is 'int8' instead."),
    ],
)
def test_asked_wrongly(words, said, capsys):
    assert head.main(words) == 2
    assert said in capsys.readouterr().err
