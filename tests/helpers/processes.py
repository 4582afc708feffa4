"""Start processes from tests, as users do, so that none of them outlives its test."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "scripts"


def run(
    command: Sequence[str | Path],
    *,
    timeout: float = 300,
    cwd: Path | None = None,
    extra: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it printed; fail with its output if it takes longer than `timeout` seconds."""
    # One thread each: several processes share the cores, and the order of sums is fixed.
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        cwd=cwd,
        env={**os.environ, **own, **(extra or {})},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _end(process)
        out, err = process.communicate()
        shown = f"{out[-2000:]}\n{err[-6000:]}"
        raise AssertionError(f"still running after {timeout} s, so it was killed.\n{shown}") from None
    finally:
        _end(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def python(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """`run` with this interpreter."""
    return run([sys.executable, *arguments], **options)


def torchrun(script: str | Path, folder: Path, *arguments: str | Path, **options: Any) -> list[dict[str, Any]]:
    """Run a script on two ranks on the CPU; returns what each of them wrote to `folder`/rank<n>.json."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = python(*launcher, script, *arguments, folder, **{"timeout": 900, **options})
    assert done.returncode == 0, f"{script} failed.\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def run_on_ranks(cases: Mapping[str, Any], folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Run cases of `helpers.ranks`; for each rank, name -> result.

    They share one launch, because starting processes costs far more than a case.
    """
    (folder / "cases.json").write_text(json.dumps({name: dataclasses.asdict(case) for name, case in cases.items()}))
    return torchrun(SCRIPTS / "ranks.py", folder, folder / "cases.json", **options)


def each_rank(results: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Every rank's result of one case; fails with the traceback if the case raised."""
    for rank, found in enumerate(results):
        assert "error" not in found[name], f"rank {rank}: {found[name]['error']}"
    return [found[name] for found in results]


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process and all its descendants: elastic launchers start workers in their own sessions."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    if process.poll() is None:
        process.kill()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
