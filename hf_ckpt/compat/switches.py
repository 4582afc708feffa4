"""Switches of the process that decide which kernels torch runs, and how precisely.

`torch.nn.attention.sdpa_kernel` and `torch.set_float32_matmul_precision` set them, for example. Code that sets them
around a forward has usually reset them when backward recomputes a block, which would then run other kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.overrides

from hf_ckpt.compat.private import private

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
_PRECISIONS = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
)
"""(backend, operation) with a precision for float32 of their own, since torch 2.9. The general ones come first,
because setting one also sets those that inherit from it."""

_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _switch(read: str, write: str, *key: str) -> _Switch:
    """Return the functions of `torch._C` that read and write a switch."""
    reader = functools.partial(getattr(torch._C, read), *key)
    writer = functools.partial(getattr(torch._C, write), *key)
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

_function_modes = private("torch.overrides._get_current_function_mode_stack")
_push_mode = private("torch.overrides._push_mode")
_pop_mode = private("torch.overrides._pop_mode")


class Switches:
    """The switches and the stack of TorchFunctionModes at one moment."""

    def __init__(self) -> None:
        self.values = [read() for read, _ in _SWITCHES]
        self.modes: list[torch.overrides.TorchFunctionMode] = _function_modes()

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function under these switches and modes, and put the present ones back."""
        before = Switches()
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
            if read() != value:
                write(value)
    if current.modes != wanted.modes:
        for _ in current.modes:
            _pop_mode()
        for mode in wanted.modes:
            _push_mode(mode)
