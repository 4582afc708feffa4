"""The installed package: a wheel outside of this repository."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.processes import ROOT, python, run

pytestmark = pytest.mark.slow
PLAN = ["plan", "mini-gpt2", "--device", "a10", "--budget", "1GiB"]


def test_a_wheel_runs_outside_of_the_repository(tmp_path: Path) -> None:
    done = python("-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    assert python("-m", "pip", "install", "--no-deps", "--target", site, wheel, cwd=tmp_path).returncode == 0
    extra = {"PYTHONPATH": str(site)}
    where = python("-c", "import hf_ckpt; print(hf_ckpt.__file__)", cwd=tmp_path, extra=extra)
    assert Path(where.stdout.strip()) == site / "hf_ckpt" / "__init__.py"
    planned = run([sys.executable, site / "bin" / "hf-ckpt", *PLAN], cwd=tmp_path, extra=extra)  # its own presets
    assert planned.returncode == 0, planned.stderr
    assert "GPT2LMHeadModel" in planned.stdout
    script = tmp_path / "train.py"
    script.write_text(
        "from hf_ckpt.models.tiny import tiny_model\n"
        "tiny_model('llama').gradient_checkpointing_enable({'layers': '0'})\n"
    )
    trained = python("-m", "hf_ckpt", script, cwd=tmp_path, extra=extra)
    assert trained.stderr.splitlines() == ["hf_ckpt: LlamaForCausalLM: full on block 0 of 4"]
    names = {path.name for path in (*site.iterdir(), *(site / "hf_ckpt").iterdir())}
    assert names & {"tests", "recipes", "SKILL.md"} == {"SKILL.md"}
