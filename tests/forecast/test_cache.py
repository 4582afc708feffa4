"""A second question about a training is answered from disk, with the same result."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.planned import saved_config

from hf_ckpt.forecast import cache
from hf_ckpt.forecast.forecast import Forecaster
from hf_ckpt.forecast.record import remembered
from hf_ckpt.prediction.question import Question


@pytest.fixture
def asked(tmp_path):
    return Question(str(saved_config(tmp_path)), batch=2, tokens=32, device="h100", budget="2GiB")


def test_other_budgets_are_answered_without_torch(asked):
    first = Forecaster(asked).forecast()
    low = dataclasses.replace(asked, budget=f"{first.floor_bytes + 1000}B", frontier=True)
    assert remembered(low).to_dict() == Forecaster(low).forecast().to_dict()
    assert remembered(low).plan != first.plan
    assert remembered(dataclasses.replace(asked, budget="1KiB")) is None  # suggestions need a trace
    words = ["plan", asked.model, "--batch", "2", "--seq", "32", "--device", "h100", "--budget", "2GiB", "--json"]
    code = f"import sys; from hf_ckpt.cli.main import main; main({words}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(first.to_dict()))


def test_another_training_or_another_config_is_another_file(asked, monkeypatch):
    Forecaster(asked).forecast()
    assert remembered(asked) is not None
    for changes in ({"tokens": 33}, {"lora": 4}, {"head": "auto"}, {"max_batch": True}):
        assert remembered(dataclasses.replace(asked, **changes)) is None, changes
    assert cache._path(dataclasses.replace(asked, device=None)) is None
    with monkeypatch.context() as patched:
        patched.setattr(cache.importlib.metadata, "version", lambda name: "0")
        assert remembered(asked) is None
    config = Path(asked.model, "config.json")
    config.write_text(config.read_text() + " ")
    assert remembered(asked) is None


def test_files_that_are_not_whole_are_as_good_as_none(asked, monkeypatch):
    Forecaster(asked).forecast()
    (file,) = cache.folder().iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    assert remembered(asked) is None
    monkeypatch.setattr(cache, "KEPT_FILES", 1)
    Forecaster(dataclasses.replace(asked, tokens=33)).forecast()
    assert remembered(dataclasses.replace(asked, tokens=33)) is not None
    assert len(list(cache.folder().iterdir())) == 1
    monkeypatch.setenv("HF_HOME", asked.model + "/config.json")  # no folder can be created there
    Forecaster(asked).forecast()
