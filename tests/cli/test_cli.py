"""The `hf-ckpt` program: what it refuses, and `check`."""

import json
import os
import shlex
from pathlib import Path

import pytest
from helpers.processes import python
from helpers.tables import table

from hf_ckpt.cli.main import main
from hf_ckpt.engines import full
from hf_ckpt.models.tiny import tiny_model

WORDS = table(__file__, "words.yaml")
ALL_IN_ONE = """
import json, sys
from hf_ckpt import __main__
from hf_ckpt.cli.main import main
codes = []
for words in json.loads(sys.argv[1]):
    print("-----", file=sys.stderr)
    try:
        codes.append(__main__.main(words[1:]) if words[0] == "hf_ckpt" else main(words))
    except SystemExit as ended:
        codes.append(ended.code)
print(json.dumps([codes, sorted({"torch", "transformers", "numpy"} & set(sys.modules))]))
"""


def test_help_and_wrong_words_are_answered_before_torch_is_imported(tmp_path):
    (tmp_path / "script.py").write_text("raise SystemExit('the script ran')\n")
    words = [shlex.split(text) for text, _ in WORDS]
    done = python("-c", ALL_IN_ONE, json.dumps(words), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    codes, imported = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0 if "--help" in text else 2 for text, _ in WORDS]
    assert imported == []
    for (text, said), error in zip(WORDS, done.stderr.split("-----\n")[1:], strict=True):
        assert said in error, text
        assert "Traceback" not in error, text
    assert os.listdir(tmp_path) == ["script.py"]


@pytest.mark.compat
def test_check_of_every_family(capsys):
    for words, models in (
        ("--spec layers=0,-1 --bf16", "llama gpt2 bert t5"),
        ("--spec head=4", "llama gpt2 t5"),  # BERT's head is no projection onto a vocabulary
    ):
        assert main(["check", *words.split(), "--json", "--tokens", "8"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [(row["model"], row["ok"]) for row in rows] == [(f"{name} (random)", True) for name in models.split()]


def test_check_of_saved_models_and_what_it_cannot_check(tmp_path, capsys, monkeypatch):
    for family in ("llama", "bert", "t5"):
        tiny_model(family, layers=2, dropout=0.1).save_pretrained(tmp_path)
        assert main(["check", str(tmp_path), "--tokens", "8"]) == 0
        assert "bit-equal" in capsys.readouterr().out
    for words, said in (
        ("no/such/model", "cannot load a model from 'no/such/model'"),
        ("--spec layers=99", "`layers`"),
    ):
        assert main(["check", *words.split()]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error
    monkeypatch.setattr(full.FullRegion, "__call__", lambda self, fn, *args: fn(*args))
    assert main(["check", str(tmp_path)]) == 1
    assert "planned but not recomputed" in capsys.readouterr().out


@pytest.mark.long
def test_the_demo_writes_its_table_and_picture(tmp_path):
    script = Path(__file__).parents[2] / "recipes" / "demo.py"
    words = ("--tiny", "--steps", "1", "--batch", "1", "--tokens", "32", "--out", tmp_path)
    done = python(script, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    none, selective, every, whole, planned, guarded = json.loads((tmp_path / "demo.json").read_text())["runs"]
    assert [run["recomputed"] for run in (none, every, whole)] == [0, 4, 8]
    assert whole["live_peak_bytes"] < every["live_peak_bytes"] < none["live_peak_bytes"] > selective["live_peak_bytes"]
    assert max(planned["live_peak_bytes"], guarded["live_peak_bytes"]) < none["live_peak_bytes"]
    assert guarded["tightened"] == ["selective (save linear, attention)", "full"]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
