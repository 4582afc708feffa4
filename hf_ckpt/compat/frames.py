"""Reads call frames for facts that no argument carries."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers.pytorch_utils
from torch.nn import functional

_DROPOUT = getattr(functional.dropout, "__code__", None)
_LINEAR = torch.nn.modules.linear.__file__, transformers.pytorch_utils.__file__
"""The files with the forward of linear layers. That of transformers has a transposed weight (GPT-2)."""


def callers() -> Iterator[types.FrameType]:
    """Yield the frames from which hf_ckpt is called, without its own, innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith("hf_ckpt."):
            yield frame
        frame = frame.f_back


def input_of_dropout() -> torch.Tensor | None:
    """Return the input of `nn.functional.dropout`, if hf_ckpt is called from it, for example in a saved-tensor hook.

    `nn.Dropout` calls that function, too. None if hf_ckpt is called from anything else, such as a replacement of that
    function.
    """
    frame = next(callers(), None)
    # Some programs replace `functional.dropout`, and then `_DROPOUT` may be the code of their own function.
    if frame is None or frame.f_code is not _DROPOUT or frame.f_code.co_filename != functional.__file__:
        return None
    tensor: torch.Tensor = frame.f_locals["input"]
    return tensor


def bias_of_linear() -> torch.Tensor | None:
    """Return the bias of the linear layer whose own forward hf_ckpt is called from, for example in a saved-tensor hook.

    None if the layer has none, or if hf_ckpt is called from anything else, such as a block that passes a layer's weight
    to a function together with another bias.
    """
    # Not by `callers`: rebuilding calls this for every linear layer, and a generator takes three times as long.
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("hf_ckpt."):
        frame = frame.f_back
    if frame.f_code.co_name != "forward" or frame.f_code.co_filename not in _LINEAR:
        return None
    # Not `self.bias`, which is a property under torch.nn.utils.parametrize, and would compute another tensor.
    bias: torch.Tensor | None = vars(frame.f_locals["self"])["_parameters"].get("bias")
    return bias


def calling_objects(kind: type) -> Iterator[Any]:
    """Yield the objects of this type whose methods call hf_ckpt right now, innermost first: modules in a saved-tensor
    hook, or the Trainer and its callback handler, which transformers passes to no callback."""
    owners = (frame.f_locals.get("self") for frame in callers())
    yield from (owner for owner in owners if isinstance(owner, kind))


class _Mark:
    """What a frame has as `f_trace`, which nothing calls unless a debugger traces calls that run already.

    The next call may get the address of a frame that is gone, but not its mark.
    """

    def __call__(self, *event: Any) -> None:
        """Trace nothing."""


class Running(NamedTuple):
    """A call that runs, without a reference to its frame, which would keep all of its variables alive."""

    thread: int
    frame: int
    mark: object
    """The frame's `f_trace`: a `_Mark`, or what a debugger had put there before."""

    def has_ended(self) -> bool:
        """Whether the call has ended; also known if hf_ckpt was not told, as after a KeyboardInterrupt.

        False in another thread, whose frames do not show it.
        """
        if self.thread != threading.get_ident():
            return False
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if id(frame) == self.frame and frame.f_trace is self.mark:
                return False
            frame = frame.f_back
        return True


def running_module() -> Running | None:
    """Return the innermost call of a module that hf_ckpt is called from."""
    return next(_calls_of("_call_impl"), None)


def running_backward() -> Running | None:
    """Return the outermost backward that hf_ckpt is called from; None if another thread called it."""
    calls = list(_calls_of("_engine_run_backward"))
    return calls[-1] if calls else None


def running_optimizer() -> Running | None:
    """Return the step of an optimizer that hf_ckpt is called from."""
    return next(_calls_of("wrapper"), None)


def _calls_of(function: str) -> Iterator[Running]:
    """Yield the running calls of torch's function with this name, innermost first."""
    for frame in callers():
        if frame.f_code.co_name == function and str(frame.f_globals.get("__name__")).startswith("torch."):
            if frame.f_trace is None:
                frame.f_trace = _Mark()
            yield Running(threading.get_ident(), id(frame), frame.f_trace)


def is_calling(thread: int, module: object) -> bool:
    """Whether a thread, by its number, is inside a call of a module."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        # Other frames are not asked for their variables, which Python would keep alive until they end.
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False
