"""What torch tells of devices: their memory, streams, events and autocast, and the errors of a full device.

A name of one vendor stands in this module only. `torch.accelerator` has most functions for every type of device, and
raises RuntimeError where a device lacks what they ask for; the module of the device (`torch.cuda`, `torch.xpu`, ...) is
asked first, where it has more.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_ckpt.compat.private import private


def accelerator_type() -> str | None:
    """Return the type of the machine's accelerator (`cuda`, `xpu`, `mps`, ...); None on a machine without one."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else device.type


def current_accelerator() -> torch.device | None:
    """Return the current device of the machine's accelerator; None on a machine without one."""
    device_type = accelerator_type()
    return None if device_type is None else torch.device(device_type, torch.accelerator.current_device_index())


def accelerators(devices: Iterable[torch.device] | None) -> list[torch.device]:
    """Return those of some devices that are not the CPU (or `meta`), each once, in the order of their numbers.

    None gives the machine's current accelerator, if any. A device without a number is the current one of its type.
    """
    numbered = set()
    for device in filter(None, [current_accelerator()] if devices is None else devices):
        if device.type not in ("cpu", "meta"):
            # torch tells the current number of the machine's accelerator only; of other types, models use the first.
            current = torch.accelerator.current_device_index() if device.type == accelerator_type() else 0
            numbered.add(torch.device(device.type, current if device.index is None else device.index))
    return sorted(numbered, key=lambda device: (device.type, device.index))


def shares_host_memory(device_type: str) -> bool:
    """Whether this type of device uses the machine's memory, so there is no device figure to read."""
    return device_type in ("cpu", "mps")


def device_name(devices: Iterable[torch.device] | None) -> str:
    """Return the name of the first accelerator among some devices, such as `NVIDIA A100-SXM4-80GB`, or its type if
    torch does not tell the name; `cpu` without one. None is as for `accelerators`."""
    for device in accelerators(devices):
        get_name = getattr(getattr(torch, device.type, None), "get_device_name", None)
        return device.type if get_name is None else str(get_name(device))
    return "cpu"


# --- memory -----------------------------------------------------------------------------------------------------------


class AllocatorBytes(NamedTuple):
    """The statistics of a device's caching allocator, in bytes.

    Bytes in use are `active`: memory that a stream still uses counts, although its tensor is gone.
    https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.memory_stats.html
    """

    current: int = 0
    """Bytes in use."""
    peak: int = 0
    """The most bytes in use since the peak was last reset."""
    reserved: int = 0
    """Bytes that the allocator holds, in use or not."""
    reserved_peak: int = 0
    """The most of these since the peak was last reset."""


def allocator_bytes(device: torch.device) -> AllocatorBytes:
    """Read the statistics of a device's allocator, without waiting for the device.

    Raises RuntimeError if it keeps none, such as that of `mps` or a `CUDAPluggableAllocator`, or does not count what is
    in use, although it has the key for it (as torch's reference backend, which counts what was allocated).
    """
    module = _module_with("memory_stats", device)
    # torch makes the flat dict from the nested one, with a hundred keys, and steps read memory at every boundary.
    read = getattr(module, "memory_stats_as_nested_dict", module.memory_stats)
    statistics = read(device)
    if not statistics:  # nothing has been allocated yet
        return AllocatorBytes()
    active = _statistic(statistics, "active_bytes")
    reserved = _statistic(statistics, "reserved_bytes")
    if not any(active) and any(_statistic(statistics, "allocated_bytes")):
        raise RuntimeError("the allocator counts allocated bytes, but no active ones")
    return AllocatorBytes(*active, *reserved)


def _statistic(statistics: Mapping[str, Any], kind: str) -> tuple[int, int]:
    """Return (current, peak) of a kind of statistics. Raises RuntimeError if the device does not keep it."""
    try:
        if kind in statistics:  # a nested dict
            return int(statistics[kind]["all"]["current"]), int(statistics[kind]["all"]["peak"])
        return int(statistics[f"{kind}.all.current"]), int(statistics[f"{kind}.all.peak"])
    except KeyError:
        raise RuntimeError(f"the allocator keeps no {kind}") from None


def reset_peak(device: torch.device) -> None:
    """Begin a new peak in the statistics of a device's allocator. Raises RuntimeError if it keeps none."""
    _module_with("reset_peak_memory_stats", device).reset_peak_memory_stats(device)


def _module_with(name: str, device: torch.device) -> Any:
    """Return the module that has this function for a device. Raises RuntimeError if there is none."""
    module = getattr(torch, device.type, None)
    if hasattr(module, name):
        return module
    if device.type != accelerator_type() or not hasattr(torch.accelerator, name):
        raise RuntimeError(f"torch has no {name} for {device.type}")
    return torch.accelerator


def memory_info(device: torch.device) -> tuple[int, int]:
    """Return the (free, total) bytes of a device, counting all processes. Raises RuntimeError if it does not tell."""
    of_device = getattr(getattr(torch, device.type, None), "mem_get_info", None)
    free, total = (of_device or _module_with("get_memory_info", device).get_memory_info)(device)
    return int(free), int(total)


def release_memory() -> None:
    """Collect unreachable Python objects, and empty the cache of the accelerator's allocator."""
    gc.collect()
    device = current_accelerator()
    if device is not None:
        with contextlib.suppress(RuntimeError):  # an allocator without a cache
            _module_with("empty_cache", device).empty_cache()


def write_snapshot(path: Path) -> None:
    """Write torch's snapshot of the memory of CUDA, if its history is recorded.

    `torch.cuda.memory._record_memory_history()` begins that. https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """
    runs = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    # A build with CUDA on a machine without a driver has the function, too, and fails in it.
    if runs and getattr(torch._C, "_cuda_isHistoryEnabled", bool)():
        private("torch.cuda.memory._dump_snapshot")(str(path))


_OUT_OF_MEMORY = (
    "out of memory",  # CUDA, HIP, XPU, MPS, NPU, MLU, MUSA
    "DefaultCPUAllocator: can't allocate memory",
    "CUDNN_STATUS_NOT_SUPPORTED.",  # accelerate takes it for one, too
    "PT_DEVMEM Allocation failed",  # HPU
    "STATUS_ALLOC_FAILED",  # cuBLAS, hipBLAS, muBLAS, cuDNN
    "RESULT_ERROR_OUT_OF_",  # XPU: level zero (ZE_) and unified runtime (UR_)
    "EL0004",  # NPU: https://www.hiascend.com/document, "Failed to allocate memory"
)
"""Words of errors that say that a device is out of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host is out of memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # Other kinds come from the libraries of a device, which say it in words.
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


# --- streams, events and graphs ---------------------------------------------------------------------------------------


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until these devices have done all their work."""
    for device in accelerators(devices):
        if device.type == accelerator_type():
            torch.accelerator.synchronize(device)


def new_stream(device: torch.device) -> torch.Stream | None:
    """Make another stream of a device; None for a device that has none, or that uses the host's memory itself."""
    if shares_host_memory(device.type) or device.type != accelerator_type():
        return None
    try:
        return torch.Stream(device)
    except RuntimeError:  # a device that works in order
        return None


def used_here(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that may have been allocated on another stream, for any number of uses on the current one.

    Its memory is reused only after all that the current stream is given until the tensor is freed.
    """
    if tensor.device.type == accelerator_type() and not shares_host_memory(tensor.device.type):
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    return tensor


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Make a stream the current one of its device, in this thread and context.

    Not by `with stream`: torch 2.13 keeps what to restore on the stream, and several threads may enter it.
    """
    number = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)  # makes its device the current one, too
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(number)


def has_timed_events(device: torch.device) -> bool:
    """Whether the events of a device measure time. Waits for the device."""
    try:
        first = timed_event(device)
        last = timed_event(device)
        last.synchronize()
        first.elapsed_time(last)
    except (RuntimeError, ValueError):  # torch tells neither in advance
        return False
    return True


def timed_event(device: torch.device) -> Any:
    """Record an event that measures time, on the current stream of a device, whichever device is the current one."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def is_capturing() -> bool:
    """Whether a graph of the accelerator (such as a CUDA graph) is being captured on the current stream."""
    device = torch.accelerator.current_accelerator()
    module = None if device is None else getattr(torch, device.type, None)
    if module is None or not is_initialized(module):
        return False
    return bool(getattr(module, "is_current_stream_capturing", bool)())  # some devices have no graphs


def is_initialized(module: Any) -> bool:
    """Whether the module of a device, such as `torch.cuda`, has initialised the device. Some do so on their own."""
    tells = getattr(module, "is_initialized", None)
    return tells is None or bool(tells())


# --- autocast ---------------------------------------------------------------------------------------------------------

autocast_is_on: Callable[[], bool] = private("torch._C._is_any_autocast_enabled")
"""Returns whether autocast is enabled for any device."""


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return autocast's current type on this type of device; None while it is off, or if the device has none."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_to(
    device_type: str, dtype: torch.dtype | None, *, caches: bool | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Make a context with autocast to `dtype` on this type of device; None turns it off.

    Args:
        device_type: the type of device.
        dtype: the type to cast to.
        caches: whether casts of weights are kept for further uses; None for the current setting.
    """
    if dtype is None and autocast_dtype(device_type) is None:  # a device without autocast refuses to turn it off
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype, dtype is not None, caches)


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """Turn autocast off on the CPU and on the accelerator, inside this context."""
    with autocast_to("cpu", None), autocast_to(accelerator_type() or "cpu", None):
        yield
