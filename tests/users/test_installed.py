"""The installed package: from a wheel, outside of this repository, and as an extension of the `hf` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from helpers.processes import python, run

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow
PLAN = ["plan", "mini-gpt2", "--device", "a10", "--budget", "1GiB"]
# The real client without network access: it installs this repository's wheel instead of an archive from GitHub.
CLIENT = """
import subprocess, sys
from huggingface_hub.cli import extensions, hf

SOURCE, WHEEL = "https://github.com/someone/hf-ckpt/archive/HEAD.zip", sys.argv[1]
asked, run = [], subprocess.run

def github(method, url, **kwargs):
    if method != "HEAD":  # whether the repository exists; there is nothing else of it
        raise OSError("no network")

def from_wheel(command, **options):
    if SOURCE in command:
        asked.append(command)
        instead = {SOURCE: WHEEL, "--force-reinstall": "--no-deps"}
        command = [instead.get(word, word) for word in command]
    return run(command, **options)

extensions._github_request, subprocess.run = github, from_wheel
extensions.shutil.which = lambda name: None  # pip, and not uv
sys.argv = ["hf", "extensions", "install", "someone/hf-ckpt"]
try:
    hf.main()
finally:
    assert len(asked) == 1, asked
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `pip wheel .` builds."""
    folder = tmp_path_factory.mktemp("wheels")
    done = python("-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder, timeout=300)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_a_wheel_runs_outside_of_the_repository(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = python("-m", "pip", "install", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
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
    assert not list(site.glob("tests")) + list(site.glob("recipes"))


def test_it_is_an_extension_of_hf(wheel: Path, tmp_path: Path) -> None:
    """`hf extensions install OWNER/hf-ckpt` installs the repository, and `hf ckpt` runs `hf-ckpt`."""
    pytest.importorskip("huggingface_hub.cli.extensions", reason="this huggingface_hub has no extensions")
    (tmp_path / "client.py").write_text(CLIENT)
    home = {"HOME": str(tmp_path), "PYTHONPATH": ""}
    done = python(tmp_path / "client.py", wheel, cwd=tmp_path, extra=home, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    hf = Path(sys.executable).with_name("hf")
    version = run([hf, "ckpt", "--version"], cwd=tmp_path, extra=home)
    assert version.stdout.startswith("hf-ckpt 0."), version.stderr
    # The extension's environment has only hf_ckpt; torch and transformers come from this environment.
    lent = [path for path in sys.path if Path(path).name == "site-packages"]
    planned = run([hf, "ckpt", *PLAN], cwd=tmp_path, extra=home | {"PYTHONPATH": os.pathsep.join(lent)})
    assert planned.returncode == 0, planned.stderr
    assert "GPT2LMHeadModel" in planned.stdout
