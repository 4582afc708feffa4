"""The simulated device `sim` (see `sim/sim.h`): builds and loads it, and switches what it can do.

It is for tests of the marker `accelerator` only. From `load` on the whole process has an accelerator. With the
environment variable `HF_CKPT_ACCELERATOR=cuda` (or another type) the same tests use the accelerator of the machine, and
those that switch something, or read what only the simulated device counts, are skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

NAME = os.environ.get("HF_CKPT_ACCELERATOR", "sim")
IS_SIMULATED = NAME == "sim"
FIRST, SECOND = f"{NAME}:0", f"{NAME}:1"
DEVICES = 2 if IS_SIMULATED else torch.accelerator.device_count()
_SOURCES = sorted((Path(__file__).parent / "sim").glob("*.*"))


def load() -> None:
    """Build the device, unless it is built for this torch already (about a minute), and register it as `torch.sim`."""
    if not IS_SIMULATED:
        _use_real_one()
        return
    if hasattr(torch, NAME):
        return
    torch.set_num_threads(1)  # each stream has a thread of its own
    from torch.utils import cpp_extension  # needs setuptools

    digest = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()[:12]
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder = Path(root) / f"hf_ckpt_{NAME}-{torch.__version__}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest's workers come here at the same time
        library = folder / f"hf_ckpt_{NAME}.so"
        if library.exists():
            torch.ops.load_library(library)
        else:
            scripts = str(Path(sys.executable).parent)  # of the environment, which has ninja
            os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", "")])
            cpp_extension.load(
                library.stem,
                [str(source) for source in _SOURCES if source.suffix == ".cpp"],
                extra_cflags=["-O1"],
                build_directory=str(folder),
                is_python_module=False,
            )
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()


def _use_real_one() -> None:
    """Let kernels add in the same order in every run."""
    where = torch.accelerator.current_accelerator()
    if where is None or where.type != NAME:
        raise RuntimeError(f"HF_CKPT_ACCELERATOR is {NAME}, and this machine's accelerator is {where}")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def needs(*where: str) -> None:
    """Skip a test of a device that this machine does not have."""
    for name in where:
        if (torch.device(name).index or 0) >= DEVICES:
            pytest.skip(f"needs {name}")


def _module() -> types.ModuleType:
    """Make `torch.sim`: the functions that torch needs, and none that torch documents as optional."""
    module = types.ModuleType(f"torch.{NAME}")
    calls = torch.ops.sim

    def index(device: torch.device | int | str | None) -> int:
        found = device if isinstance(device, int) else None if device is None else torch.device(device).index
        return torch.accelerator.current_device_index() if found is None else found

    module.is_available = lambda: True
    module.device_count = lambda: DEVICES
    module.current_device = torch.accelerator.current_device_index
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.get_rng_state = lambda device=None: calls.get_state(index(device))
    module.set_rng_state = lambda state, device=None: calls.set_state(index(device), state)
    module.manual_seed_all = lambda seed: [calls.set_seed(number, seed) for number in range(DEVICES)] and None
    module._is_in_bad_fork = lambda: False
    return module


def moved_to(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Move a model to a device. Tied weights stay tied, which `nn.Module.to` does not do for devices of this kind."""
    model.to(device)
    model.tie_weights()
    return model


# --- what it has done -------------------------------------------------------------------------------------------------


def counted(device: int = 0) -> dict[str, int]:
    """Bytes that were copied to the host and from it, and the allocator's own counts, with or without statistics.

    `peak_bytes` are the most active bytes since `reset_peak`; nothing else resets them. A real device counts no copies.
    """
    if not IS_SIMULATED:
        now = torch.accelerator.memory_stats(device)  # empty before the first allocation
        kinds = {"peak_bytes": "active_bytes.all.peak", "reserved_bytes": "reserved_bytes.all.current"}
        return {kind: now.get(name, 0) for kind, name in kinds.items()}
    return dict(torch.ops.sim.count(device))


def reset_peak(device: int = 0) -> None:
    """Begin a new `peak_bytes` in `counted`."""
    if not IS_SIMULATED:
        torch.accelerator.reset_peak_memory_stats(device)
        return
    torch.ops.sim.reset_peak(device)


# --- switches ---------------------------------------------------------------------------------------------------------


_DEFAULTS = {"default_pace": 0, "other_pace": 0, "event_times": 1, "dropout_rounds_alike": 1}
_PACES = {"free": 0, "eager": 1, "late": 2}


def _setting(name: str, value: int) -> contextlib.AbstractContextManager[None]:
    return _switched(f"has {name}", "set", (name, value), (name, _DEFAULTS[name]))


@contextlib.contextmanager
def pace(*, computing: str = "free", copying: str = "free") -> Iterator[None]:
    """Say how far the default streams (`computing`) and all others (`copying`) run behind the host.

    `free` is as fast as their threads can, `eager` makes the host wait for what the stream can do, and with `late`
    nothing runs before somebody waits for it. With one eager and the other late, the order of all tasks depends only on
    the program's waits: a missing wait gives the same wrong result each time.
    """
    if computing == copying == "free":
        yield
        return
    with _setting("default_pace", _PACES[computing]), _setting("other_pace", _PACES[copying]):
        yield


def no_event_times() -> contextlib.AbstractContextManager[None]:
    """Let `elapsed_time` of events raise RuntimeError."""
    return _setting("event_times", 0)


def other_rounding() -> contextlib.AbstractContextManager[None]:
    """Let dropout's backward round its scale to 16 bits before it multiplies, and its forward after."""
    return _setting("dropout_rounds_alike", 0)


def no_statistics() -> contextlib.AbstractContextManager[None]:
    """Use an allocator without statistics, such as `CUDAPluggableAllocator`: `torch.accelerator` raises for all."""
    return _switched("can have no statistics", "set_statistics", (False,), (True,))


def memory_of(size: int, device: int = 0, words: str | None = None) -> contextlib.AbstractContextManager[None]:
    """Give a device `size` bytes of memory. Beyond that it raises `torch.OutOfMemoryError`, or, with `words`, a plain
    RuntimeError that says so in a backend's own words."""
    return _switched("can have less memory", "set_capacity", (device, size, words), (device, None, None))


@contextlib.contextmanager
def _switched(what: str, function: str, inside: tuple, after: tuple) -> Iterator[None]:
    """Call a function of the device with these arguments inside of the context, and with others after it."""
    if not IS_SIMULATED:
        pytest.skip(f"only the simulated device {what}")
    getattr(torch.ops.sim, function)(*inside)
    try:
        yield
    finally:
        getattr(torch.ops.sim, function)(*after)
