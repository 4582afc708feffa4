"""The only module that reads clocks and allocators.

Memory has three sources, in this order: the accelerator's allocator (exact), the kernel's counter of the process's peak
resident size (Linux, reset for each window), samples of the resident size. `PeakMeter.source` says which one spoke.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_ckpt import compat

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
SAMPLE_SECONDS = 0.01
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # glibc's malloc.h


class PeakMeter(Protocol):
    """The largest memory use since the last reset. Unknown is None, never 0."""

    source: str
    """Where the figures come from, for people."""
    exact: bool
    """Whether they count bytes of tensors, and nothing else."""

    def reset(self) -> None:
        """Start a new window."""

    def peak_bytes(self) -> int | None:
        """Peak of this window."""

    def reserved_bytes(self) -> int | None:
        """Peak of what the allocator has taken from the device; None without an allocator of that kind."""


def peak_meter() -> PeakMeter:
    """The best meter this machine has."""
    device_type = compat.accelerator_type()
    if device_type is not None:
        module = compat.memory_module(device_type)
        return AllocatorMeter(device_type, module) if module is not None else NoMeter(device_type)
    if KernelMeter.works():
        return KernelMeter()
    return SampledMeter()


class AllocatorMeter:
    """Figures of the accelerator's caching allocator, current device. Reading them does not synchronise."""

    exact = True

    def __init__(self, device_type: str, module: Any) -> None:
        self.source = f"{device_type} allocator"
        self._module = module

    def reset(self) -> None:
        self._module.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        return int(self._module.max_memory_allocated())

    def reserved_bytes(self) -> int | None:
        return int(self._module.max_memory_reserved())


class KernelMeter:
    """VmHWM of /proc/self/status, reset by writing 5 to /proc/self/clear_refs (`man 5 proc_pid_clear_refs`)."""

    source = "process resident size, kernel peak"
    exact = False

    @classmethod
    def works(cls) -> bool:
        """Whether this kernel lets the process reset its own counter."""
        try:
            _CLEAR_REFS.write_text("5")
        except OSError:
            return False
        return cls().peak_bytes() is not None

    def reset(self) -> None:
        _CLEAR_REFS.write_text("5")

    def peak_bytes(self) -> int | None:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None

    def reserved_bytes(self) -> int | None:
        return None


class SampledMeter:
    """The resident size, read every 10 ms by a thread: a peak shorter than that can be missed."""

    source = "process resident size, sampled"
    exact = False

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._peak = 0
        self._stop = threading.Event()
        self.reset()
        self.thread = threading.Thread(target=_sample, args=(weakref.ref(self), self._stop), daemon=True)
        weakref.finalize(self, self._stop.set)
        self.thread.start()

    def _take(self) -> int:
        return int(self._process.memory_info().rss)

    def sample(self) -> None:
        """Look once."""
        self._peak = max(self._peak, self._take())

    def reset(self) -> None:
        self._peak = self._take()

    def peak_bytes(self) -> int | None:
        self.sample()
        return self._peak

    def reserved_bytes(self) -> int | None:
        return None


def _sample(meter: weakref.ref[SampledMeter], stop: threading.Event) -> None:
    while not stop.wait(SAMPLE_SECONDS):
        alive = meter()
        if alive is None:
            return
        alive.sample()
        del alive


class NoMeter:
    """An accelerator whose allocator tells nothing."""

    exact = False

    def __init__(self, device_type: str) -> None:
        self.source = f"unknown ({device_type} reports no peak)"

    def reset(self) -> None:
        pass

    def peak_bytes(self) -> int | None:
        return None

    def reserved_bytes(self) -> int | None:
        return None


class TrainingClock:
    """Wall time of training steps, data loading included, evaluation and saving left out."""

    def __init__(self) -> None:
        self._running_since: float | None = None
        self._seconds = 0.0
        self._steps = 0

    @property
    def running(self) -> bool:
        """Whether time counts now."""
        return self._running_since is not None

    @property
    def steps(self) -> int:
        """Steps of the window so far."""
        return self._steps

    def resume(self) -> None:
        """Count from here on, if not counting already."""
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def pause(self) -> None:
        """Stop counting until `resume`."""
        if self._running_since is not None:
            self._seconds += time.perf_counter() - self._running_since
            self._running_since = None

    def count_step(self) -> None:
        """One training step has ended."""
        self._steps += 1

    def take(self) -> tuple[float, int]:
        """(seconds, steps) of the window that ends now; a new one begins. The accelerator is waited for."""
        device_type = compat.accelerator_type()
        if device_type is not None:
            compat.synchronize(device_type)
        was_running = self.running
        self.pause()
        taken = self._seconds, self._steps
        self._seconds, self._steps = 0.0, 0
        if was_running:
            self.resume()
        return taken


class RecomputeClock:
    """Time spent running blocks again in backward; entered around each recomputation by the engines.

    On an accelerator by its own events, so that nothing is synchronised before `take`.
    """

    def __init__(self) -> None:
        self._device_type = compat.accelerator_type()
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if self._device_type is None:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._seconds += time.perf_counter() - start
            return
        begin, end = compat.timing_event(self._device_type), compat.timing_event(self._device_type)
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._events.append((begin, end))

    def take(self) -> float:
        """Seconds since the last take. The accelerator must have been synchronised."""
        seconds: float = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        self._seconds, self._events = 0.0, []
        return seconds


Holder = nn.Module | torch.optim.Optimizer | Mapping[str, Any]  # a batch is a mapping


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all live tensor storages, each once, after every operation of forward and backward.

        with LiveBytes(model) as live:
            model(**batch).loss.backward()
        live.peak_bytes, live.timeline

    Exact for what PyTorch holds, on any device, and much slower than the step itself. Scratch memory that a kernel
    takes and frees within one operation is not seen, nor that a storage is resized, as FSDP2's are.

    With `device`, a type as `cuda`, only tensors there are counted.
    """

    def __init__(self, *holders: Holder, device: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.current_bytes = 0
        self.peak_bytes = 0
        self.timeline: list[int] = []
        """Live bytes after each operation."""
        self._live: set[int] = set()
        for holder in holders:
            for tensor in _tensors_of(holder):
                self._count(tensor)
        self.start_bytes = self.current_bytes
        """What was alive before: parameters, gradients, buffers, optimizer state of `holders`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value)
        self.timeline.append(self.current_bytes)
        return result

    def _count(self, tensor: torch.Tensor) -> bool:
        """Whether its storage is new."""
        if self._device is not None and tensor.device.type != self._device:
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return False
        size = storage.nbytes()
        self._live.add(key)
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        weakref.finalize(storage, self._freed, key, size).atexit = False
        return True

    def _freed(self, key: int, size: int) -> None:
        self._live.discard(key)
        self.current_bytes -= size


class CpuAllocations:
    """What the CPU's allocator hands out and takes back, as torch's profiler sees it: also inside compiled graphs, and
    scratch memory within one operation.

        with CpuAllocations() as found:
            step()
        found.peak_bytes  # most that was alive at any moment of what was allocated since the beginning
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> CpuAllocations:
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        self._profile.__exit__(*raised)  # type: ignore[no-untyped-call]
        current = 0
        for size in compat.cpu_allocations(self._profile):
            current += size
            self.peak_bytes = max(self.peak_bytes, current)


class BlockBytes(LiveBytes):
    """Counts, beside all live bytes, those of storages that were made while one of `blocks` ran.

        with BlockBytes(blocks, model, batch) as live:
            outputs = model(**batch)
            live.block_bytes  # what the blocks' forwards leave: saved tensors and their outputs

    Parameters, the batch and what the model makes around its blocks are not among them.
    """

    def __init__(self, blocks: Iterable[nn.Module], *holders: Holder) -> None:
        self.block_bytes = 0
        self._blocks = tuple(blocks)
        self._depth = 0
        self._made_inside: set[int] = set()
        self._handles: list[Any] = []
        super().__init__(*holders)

    def __enter__(self) -> BlockBytes:
        for block in self._blocks:
            self._handles.append(block.register_forward_pre_hook(self._enter_block))
            self._handles.append(block.register_forward_hook(self._leave_block, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter_block(self, *_: Any) -> None:
        self._depth += 1

    def _leave_block(self, *_: Any) -> None:
        self._depth -= 1

    def _count(self, tensor: torch.Tensor) -> bool:
        new = super()._count(tensor)
        if new and self._depth:
            storage = tensor.untyped_storage()
            self._made_inside.add(storage._cdata)
            self.block_bytes += storage.nbytes()
        return new

    def _freed(self, key: int, size: int) -> None:
        super()._freed(key, size)
        if key in self._made_inside:
            self._made_inside.discard(key)
            self.block_bytes -= size


def _tensors_of(holder: Holder) -> Iterator[torch.Tensor]:
    if isinstance(holder, nn.Module):
        yield from holder.buffers()
        for parameter in holder.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    else:
        held = list((holder.state if isinstance(holder, torch.optim.Optimizer) else holder).values())
        yield from (value for value in tree_leaves(held) if isinstance(value, torch.Tensor))


def release_freed_memory() -> None:
    """Give freed memory back to the system, so that the resident size of what follows means something.

    glibc keeps freed blocks for reuse (`man 3 malloc_trim`); other C libraries are left alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """From here on this process keeps the memory that it frees for its next tensors, as accelerators' allocators do.

    glibc gives large blocks back at once (`man 3 mallopt`), so that every step pays for fresh pages: on a CPU that, and
    not what is computed, would decide which way to save memory is the fastest. Other C libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, value in ((_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 * 2**20), (_M_MMAP_MAX, 0)):
            mallopt(parameter, value)


@contextlib.contextmanager
def stopwatch() -> Iterator[list[float]]:
    """`with stopwatch() as seconds: ...` leaves the elapsed time in `seconds[0]`, accelerator included."""
    device_type = compat.accelerator_type()
    if device_type is not None:
        compat.synchronize(device_type)
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    if device_type is not None:
        compat.synchronize(device_type)
    seconds.append(time.perf_counter() - start)


def circumstances(device: str) -> dict[str, Any]:
    """What figures depend on beside the code that is measured: when, on what machine, with which versions."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name() if device == "cuda" else f"{device} ({_processor()})",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "peft", "trl")},
        **({"cuda": torch.version.cuda, "driver": _driver()} if device == "cuda" else {}),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """What the kernel says of NVIDIA's driver; None where it says nothing."""
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    return None


def device_name() -> str:
    """What the accelerator calls itself; `cpu` without one."""
    device_type = compat.accelerator_type()
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    return device_type or "cpu"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Of the device that models train on; of the machine, or what its container may use, where that is the CPU."""

    total_bytes: int
    available_bytes: int
    """What this process may still come to hold in tensors, those it holds now included."""
    outside_bytes: int | None
    """CPU only: what the process holds beside its tensors, so that its resident size can be compared with theirs."""


def device_memory(held_bytes: int) -> DeviceMemory:
    """Read the memory of the current device. `held_bytes` are those of the tensors that are known to be there."""
    if compat.accelerator_type() == "cuda":
        free, total = torch.cuda.mem_get_info()
        return DeviceMemory(total, free + torch.cuda.memory_reserved(), None)
    import psutil

    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    allowed = _container_memory()
    if allowed is not None and allowed[0] < total:
        total, available = allowed[0], min(available, allowed[0] - allowed[1])
    resident = int(psutil.Process().memory_info().rss)
    return DeviceMemory(total, available + held_bytes, max(0, resident - held_bytes))


def _container_memory() -> tuple[int, int] | None:
    """(limit, use without what can be dropped) of the container, in bytes; None without a limit. Cgroups 2, then 1."""
    for folder, limit, use in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            most, used = int((folder / limit).read_text()), int((folder / use).read_text())
            cached = 0
            for line in (folder / "memory.stat").read_text().splitlines():
                if line.startswith(("inactive_file ", "total_inactive_file ")):
                    cached = int(line.split()[1])
            return most, max(0, used - cached)
    return None


def of_all_ranks(value: Any) -> list[Any]:
    """`value` of every rank, in rank order; only this process's without torch.distributed. All ranks must call it."""
    if not compat.is_distributed():
        return [value]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def over_ranks(values: dict[str, float | None]) -> list[dict[str, float | None]]:
    """`values` of every rank, as `of_all_ranks`."""
    return of_all_ranks(values)
