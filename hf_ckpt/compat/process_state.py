"""State of the process that a recomputation must find as the forward did: random state, and switches of kernels."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
import torch.overrides

from hf_ckpt.compat.devices import accelerator_type, is_initialized
from hf_ckpt.compat.private import private
from hf_ckpt.compat.torch import tree_leaves

# --- the random state of Python's `random`, of numpy's global functions and of torch ----------------------------------

_LOCK = threading.RLock()
"""Held while the generators are in a state of another moment. A block may be recomputed inside of another one."""


class RandomState:
    """The random state at one moment: of Python, numpy and torch.

    Args:
        devices: devices to include besides the CPU. Those that torch has not initialised are left out.
        of_torch: whether to include torch's state.
        of_host: whether to include the states of Python's `random` and of numpy; reading them takes 20 to 60 us.
    """

    __slots__ = ("devices", "of_cpu", "of_host")

    def __init__(self, devices: Iterable[torch.device] = (), *, of_torch: bool = True, of_host: bool = True) -> None:
        self.of_host = (random.getstate(), numpy.random.get_state(legacy=False)) if of_host else None
        self.of_cpu: torch.Tensor | None = torch.get_rng_state() if of_torch else None
        self.devices = [(device, _of_device(device)) for device in devices if of_torch and _is_ready(device)]

    def may_have_moved(self) -> bool:
        """Whether a number may have been drawn or a seed set since."""
        return (self.of_host is not None and self.of_host_has_moved()) or self.of_torch_has_moved()

    def of_host_has_moved(self) -> bool:
        """The same for the generators of Python and numpy alone, if they are included."""
        if self.of_host is None:
            return False
        of_python, of_numpy = self.of_host
        # numpy's state is a dict with an array and numbers, which `==` does not compare.
        pairs = zip(tree_leaves(of_numpy), tree_leaves(numpy.random.get_state(legacy=False)), strict=False)
        return of_python != random.getstate() or not all(numpy.array_equal(one, other) for one, other in pairs)

    def of_torch_has_moved(self) -> bool:
        """The same for torch's generators alone."""
        if self.of_cpu is not None and _ends_of(self.of_cpu) != _ends_of(torch.get_rng_state()):
            return True
        if not self.devices:
            return False
        return any(_bytes(state) != _bytes(_of_device(device)) for device, state in self.devices)

    def restore(self) -> None:
        """Reset the generators to this state."""
        if self.of_host is not None:
            random.setstate(self.of_host[0])
            numpy.random.set_state(self.of_host[1])
        if self.of_cpu is not None:
            torch.set_rng_state(self.of_cpu)
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(state, device)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Reset the generators to this state inside this context; afterwards they continue as before.

        One thread at a time: generators belong to the process, and backwards may run in several threads.
        """
        # What `restore` does not change needs no keeping.
        devices = [device for device, _ in self.devices]
        of_torch = self.of_cpu is not None
        with _LOCK, RandomState(devices, of_torch=of_torch, of_host=self.of_host is not None).kept():
            self.restore()
            yield

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Reset the generators to this state at the end of this context."""
        try:
            yield
        finally:
            self.restore()


def devices_of(values: Iterable[Any]) -> list[torch.device]:
    """Return the devices of all tensors among the values, each once, without the CPU."""
    return list({value.device: None for value in values if isinstance(value, torch.Tensor) and not value.is_cpu})


def all_devices() -> list[torch.device]:
    """Return every device of the machine's accelerator: `torch.manual_seed` sets the generators of all of them."""
    return [torch.device(accelerator_type() or "cpu", n) for n in range(torch.accelerator.device_count())]


def _is_ready(device: torch.device) -> bool:
    """Whether a device has a random state now: reading it would initialise a CUDA device."""
    module = getattr(torch, device.type, None)
    if not hasattr(module, "get_rng_state"):
        return False
    # `mps` needs no initialisation, and may say that there was none: https://github.com/pytorch/pytorch/issues/194478
    return device.type == "mps" or is_initialized(module)


def _of_device(device: torch.device) -> torch.Tensor:
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


_STATE_BYTES = 5056
"""Size of the CPU's state as torch has had it so far."""
_First = ctypes.c_char * 512
_Last = ctypes.c_char * 64


def _ends_of(state: torch.Tensor) -> tuple[bytes, bytes]:
    """Return the parts of the CPU's state that tell whether it has moved; all of a state of another size.

    The state is a position among 624 numbers, these numbers, and one normal number that is left over
    (aten/src/ATen/CPUGeneratorImpl.cpp). A draw moves the position or uses up what is left over, and after the last
    number there are 624 others. The whole state has 5 kB, and every block comes here.
    """
    if state.nbytes != _STATE_BYTES:
        return _bytes(state), b""
    first = state.data_ptr()
    last = first + state.nbytes - 64
    return _First.from_address(first).raw, _Last.from_address(last).raw


def _bytes(state: torch.Tensor) -> bytes:
    """Return a state of torch as bytes, without an operation that dispatch modes would see."""
    # Not by numpy, which cannot read the tensors that a transform of torch.func wraps.
    return ctypes.string_at(state.data_ptr(), state.nbytes)


# --- switches that decide which kernels torch runs, and how precisely -------------------------------------------------

# `torch.nn.attention.sdpa_kernel` and `torch.set_float32_matmul_precision` set them, for example. Code that sets them
# around a forward has usually reset them when backward recomputes a block, which would then run other kernels.
_NAMES = (
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    ("_get_cublas_allow_fp16_reduced_precision_reduction", "_set_cublas_allow_fp16_reduced_precision_reduction"),
    ("_get_cublas_allow_bf16_reduced_precision_reduction", "_set_cublas_allow_bf16_reduced_precision_reduction"),
)
"""Functions of `torch._C` that read and write a switch each. A build may lack some of them."""
_PRECISIONS = (("generic", "all"), *itertools.product(("cuda", "mkldnn"), ("all", "matmul", "conv")))
"""(backend, operation) with a precision for float32 of their own, since torch 2.9. The general ones come first,
because setting one also sets those that inherit from it."""

_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _switch(read: str, write: str, *key: str) -> _Switch:
    """Return the functions of `torch._C` that read and write a switch."""
    # Not the attributes of torch.backends: after `torch.backends.disable_global_flags()`, setting one is an error.
    reader = getattr(torch._C, read)
    writer = getattr(torch._C, write)
    if key:
        reader = functools.partial(reader, *key)
        writer = functools.partial(writer, *key)
    # A switch of cuBLAS has two values since torch 2.10, which it takes as two arguments.
    return reader, lambda value: writer(*value) if isinstance(value, tuple) else writer(value)


_SWITCHES: list[_Switch] = [
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(_switch(*names) for names in _NAMES if hasattr(torch._C, names[0]) and hasattr(torch._C, names[1])),
]
if hasattr(torch._C, "_get_fp32_precision_getter"):
    _SWITCHES += [_switch("_get_fp32_precision_getter", "_set_fp32_precision_setter", *key) for key in _PRECISIONS]
else:
    _SWITCHES.append((torch.get_float32_matmul_precision, torch.set_float32_matmul_precision))

_READERS = [read for read, _ in _SWITCHES]
_count_modes = private("torch._C._len_torch_function_stack")
_function_modes = private("torch.overrides._get_current_function_mode_stack")
_push_mode = private("torch.overrides._push_mode")
_pop_mode = private("torch.overrides._pop_mode")


class Switches:
    """The switches and the stack of TorchFunctionModes at one moment."""

    def __init__(self) -> None:
        self.values = [read() for read in _READERS]
        self.modes: list[torch.overrides.TorchFunctionMode] = _function_modes() if _count_modes() else []

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function under these switches and modes, and put the present ones back."""
        before = Switches()
        # Nearly always the same, so that this is all that a recomputation pays.
        if before.values == self.values and before.modes == self.modes:
            return function(*args)
        _change(before, self)
        try:
            return function(*args)
        finally:
            _change(self, before)


def _change(current: Switches, wanted: Switches) -> None:
    """Write the switches, and exchange the modes, that differ."""
    if current.values != wanted.values:
        for (read, write), value in zip(_SWITCHES, wanted.values, strict=True):
            if read() != value:  # read anew: writing a precision also changes those that inherit from it
                write(value)
    # A mode may have been entered below others, so take all off and enter those of that time.
    if current.modes != wanted.modes:
        for _ in current.modes:
            _pop_mode()
        for mode in wanted.modes:
            _push_mode(mode)
