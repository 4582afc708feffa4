"""Switches of the process that decide which kernels torch runs, and how precisely.

`torch.nn.attention.sdpa_kernel` and `torch.set_float32_matmul_precision` set them, for example. Code that sets them
around a forward has usually reset them when backward recomputes a block, which would then run other kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.overrides

from hf_ckpt.compat.private import private

_ATTENTION = ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
"""Kernels of scaled dot-product attention."""
_PRECISIONS = (
    ("generic", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
)
"""(backend, operation) with a precision for float32 of their own, since torch 2.9. The general ones come first,
because setting one also sets those that inherit from it."""
_NAMES = (
    *((f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in _ATTENTION),
    ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    *(
        (f"_get_{name}", f"_set_{name}")
        for name in (
            "math_sdp_allow_fp16_bf16_reduction",
            "mkldnn_enabled",
            "mkldnn_deterministic",
            "cudnn_enabled",
            "cudnn_benchmark",
            "cudnn_deterministic",
            "cublas_allow_fp16_accumulation",
        )
    ),
)
"""Functions of `torch._C` that read and write one switch each. A build may lack some of them."""

_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _precision_of(backend: str, operation: str) -> _Switch:
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    return lambda: read(backend, operation), lambda value: write(backend, operation, value)


def _matmul_precision() -> str | None:
    """Return the precision of `torch.set_float32_matmul_precision`; None if it was set by the newer functions, too."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses a mixture
        return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _reduction_of(name: str) -> _Switch:
    """Whether cuBLAS may add up 16-bit numbers in 16 bits, and whether it may split sums: a pair since torch 2.10."""

    def write(value: Any) -> None:
        values = value if isinstance(value, tuple) else (value,)
        getattr(torch._C, f"_set_{name}")(*values)

    return getattr(torch._C, f"_get_{name}"), write


def _all_switches() -> list[_Switch]:
    """Return (function that reads, function that writes) for every switch that this torch has."""
    switches: list[_Switch] = [(_matmul_precision, _set_matmul_precision)]
    switches += [
        (getattr(torch._C, read), getattr(torch._C, write))
        for read, write in _NAMES
        if hasattr(torch._C, read) and hasattr(torch._C, write)
    ]
    for kind in ("fp16", "bf16"):
        name = f"cublas_allow_{kind}_reduced_precision_reduction"
        if hasattr(torch._C, f"_get_{name}"):
            switches.append(_reduction_of(name))
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        switches += [_precision_of(backend, operation) for backend, operation in _PRECISIONS]
    switches.append((torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode))
    return switches


_SWITCHES = _all_switches()
_READERS = [read for read, _ in _SWITCHES]

_function_modes = private("torch.overrides._get_current_function_mode_stack")
_push_mode = private("torch.overrides._push_mode")
_pop_mode = private("torch.overrides._pop_mode")


class Switches:
    """The switches and the stack of TorchFunctionModes at one moment."""

    __slots__ = ("modes", "values")

    def __init__(self) -> None:
        self.values = [read() for read in _READERS]
        self.modes: list[torch.overrides.TorchFunctionMode] = _function_modes()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore them inside this context, and put them back at its end."""
        before = Switches()
        _change(before, self)
        try:
            yield
        finally:
            _change(Switches(), before)


def _change(current: Switches, wanted: Switches) -> None:
    """Write the switches, and exchange the modes, that differ."""
    if current.values != wanted.values:
        for (read, write), value in zip(_SWITCHES, wanted.values, strict=True):
            if read() != value:
                write(value)
    if current.modes != wanted.modes:
        for _ in current.modes:
            _pop_mode()
        for mode in wanted.modes:
            _push_mode(mode)
