"""Start other processes from tests, so that none of them outlives its test, whatever it does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

SCRIPTS = Path(__file__).parent / "scripts"
# What a launcher tells its children; a test that is itself run under a launcher must not hand it on.
_LAUNCHER_PREFIXES = ("ACCELERATE_", "TORCHELASTIC_", "FSDP_")
_LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def run(
    command: Sequence[str | Path],
    *,
    timeout: float = 120,
    cwd: Path | None = None,
    extra: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it printed; fail, with its output, when it takes longer."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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


def torchrun(script: str, *arguments: str | Path, processes: int = 2, timeout: float = 150, **options: Any) -> None:
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
    # One thread each: several processes share the cores, and sums are then taken in one order.
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"} | dict(extra)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process and everything below it: elastic launchers put their workers into sessions of their own."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
