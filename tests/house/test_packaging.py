"""What the package says of itself: the versions of Python that are tested, and no others."""

import re
import shutil
import subprocess

import pytest
from helpers.processes import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
OLDEST = re.search(r'^requires-python = ">=(3\.\d+)"$', PROJECT, re.MULTILINE).group(1)


def test_classifiers_name_the_python_of_ci_and_the_oldest():
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    of_ci = re.search(r"with Python (3\.\d+)", page).group(1)
    assert re.findall(r"Python :: (3\.\d+)", PROJECT) == [OLDEST, of_ci]
    assert f'target-version = "py{OLDEST.replace(".", "")}"' in PROJECT
    assert f'python_version = "{OLDEST}"' in PROJECT


def test_the_oldest_python_compiles_every_file(tmp_path):
    """`ruff` checks the grammar of this version, too; this runs the interpreter where there is one."""
    python = shutil.which(f"python{OLDEST}")
    if python is None or subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip(f"there is no Python {OLDEST} here")
    command = [python, "-W", "error", "-m", "compileall", "-q", ROOT / "hf_ckpt", ROOT / "recipes"]
    done = subprocess.run(command, env={"PYTHONPYCACHEPREFIX": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
