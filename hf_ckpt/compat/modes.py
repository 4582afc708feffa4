"""Dispatch modes, function modes and transforms: what sees the operations of a thread."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from hf_ckpt.compat.autograd import running_node
from hf_ckpt.compat.frames import running_backward
from hf_ckpt.compat.private import private

_Context = Callable[[], contextlib.AbstractContextManager[Any]]


def transforms() -> set[str]:
    """Return the active transforms of torch.func: `grad`, `vmap`, and `jvp`, which also means forward-mode AD."""
    stack = private("torch._C._functorch.get_interpreter_stack")() or ()
    # Forward-mode AD without torch.func has no entry in that stack, but a level from 0 on.
    forward_mode = {"jvp"} if private("torch.autograd.forward_ad")._current_level >= 0 else set()
    # `functionalize`, which torch.compile uses itself, also has entries. It changes nothing here.
    return {entry.key().name.lower() for entry in stack} & {"grad", "jvp", "vmap"} | forward_mode


unseen_by_modes: _Context = private("torch.utils._python_dispatch._disable_current_modes")
"""Makes a context that hides operations from dispatch modes: selective checkpointing expects the forward's only."""


without_torch_function: _Context = private("torch._C.DisableTorchFunctionSubclass")
"""Makes a context in which operations on tensor subclasses bypass the subclass."""
without_torch_functions: _Context = private("torch._C.DisableTorchFunction")
"""Makes a context in which operations bypass TorchFunctionModes, too."""


_push_mode = private("torch.utils._python_dispatch._push_mode")
_pop_mode = private("torch.utils._python_dispatch._pop_mode")
_modes_on = private("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
_entered: set[TorchDispatchMode] = set()


def enter_dispatch_mode_below(mode: TorchDispatchMode) -> None:
    """Enter a dispatch mode below all active ones, so that their own `with` blocks can still leave them."""
    _entered.add(mode)
    _exchange_modes(mode, [mode])


def leave_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Leave a mode that was entered by `enter_dispatch_mode_below`; other modes stay active.

    A mode in the middle of an operation, or one that is active in another thread, cannot be left: it stays alive.
    """
    if mode in _modes_on():
        _exchange_modes(mode, [])
        _entered.discard(mode)


def leave_after_operation(mode: TorchDispatchMode) -> None:
    """Leave a mode as soon as its operation has ended. Must be called in this operation.

    torch takes the mode off during its operation, and puts it back when no Python code runs; in a backward, once more
    at its end. The next Python code that a profiler would see leaves it. Beside a real profiler it stays on.
    """
    is_seen = running_node() is None or running_backward() is not None
    if is_seen and sys.getprofile() is None:
        sys.setprofile(functools.partial(_leave_and_end, mode))


def _leave_and_end(mode: TorchDispatchMode, *event: Any) -> None:
    if running_node() is None and mode in _modes_on():
        leave_dispatch_mode(mode)
        sys.setprofile(None)


def _exchange_modes(mode: TorchDispatchMode, below: list[TorchDispatchMode]) -> None:
    """Take a mode off the stack of active modes, and put some below the others.

    Garbage collection is off meanwhile: it might free a model and end its measurement, which would call this function
    while the stack is empty.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        modes_on = _modes_on()  # held here, because torch 2.8 frees a mode that it pops and nothing else refers to
        for _ in modes_on:
            _pop_mode()
        for each in (*below, *(other for other in modes_on if other is not mode)):
            _push_mode(each)
    finally:
        if collects:
            gc.enable()


def is_dispatch_mode_on(mode: TorchDispatchMode) -> bool:
    """Whether a dispatch mode sees the operations of this thread."""
    return mode in _modes_on()


def is_seen_by_modes() -> bool:
    """Whether an active dispatch mode must see every operation, so that torch.compile compiles nothing."""
    # Modes of torch that measure or log declare that they need not see what a graph does inside.
    return not all(getattr(type(mode), "ignore_compile_internals", bool)() for mode in _modes_on())
