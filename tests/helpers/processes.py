"""Start processes from tests so that none of them outlives its test."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
# Variables that launchers set for their children; a test under a launcher must not pass them on.
_LAUNCHER_PREFIXES = ("ACCELERATE_", "TORCHELASTIC_", "FSDP_")
_LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def run(
    command: Sequence[str | Path],
    *,
    timeout: float = 300,
    cwd: Path | None = None,
    extra: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it printed; fail with its output if it takes longer than `timeout` seconds."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        cwd=cwd,
        env=_environment(extra or {}),
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


def wanted(request: pytest.FixtureRequest, cases: Mapping[str, Any]) -> dict[str, Any]:
    """The `cases` that selected tests of this fixture use as their parameter `name`, in order."""
    tests = [item for item in request.session.items if request.fixturename in getattr(item, "fixturenames", ())]
    names = {item.callspec.params["name"] for item in tests}
    return {name: case for name, case in cases.items() if name in names}


def run_on_ranks(script: str, cases: Mapping[str, Any], folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Run cases (dicts or dataclasses) in one of `tests/scripts` on two ranks; for each rank, name -> result.

    They share one launch, because starting processes costs far more than a case.
    """
    plain = {name: dataclasses.asdict(case) if dataclasses.is_dataclass(case) else case for name, case in cases.items()}
    (folder / "cases.json").write_text(json.dumps(plain))
    torchrun(script, folder / "cases.json", folder, **options)
    return read_ranks(folder)


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """The results that two ranks wrote."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def each_rank(results: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Every rank's result of one case; fails with the traceback if the case raised."""
    for rank, found in enumerate(results):
        assert "error" not in found[name], f"rank {rank}: {found[name]['error']}"
    return [found[name] for found in results]


def torchrun(script: str, *arguments: str | Path, processes: int = 2, timeout: float = 400, **options: Any) -> None:
    """Run one of `tests/scripts` in several processes on the CPU; fail with its output unless all of them succeed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    done = python(*launcher, SCRIPTS / script, *arguments, timeout=timeout, **options)
    assert done.returncode == 0, f"{script} failed.\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}"


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name not in _LAUNCHER_NAMES
    }
    # One thread each: several processes share the cores, and the order of sums is fixed.
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"} | dict(extra)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process and all its descendants: elastic launchers start workers in their own sessions."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
