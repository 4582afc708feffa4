"""Reads call frames for facts that no argument carries."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import torch
import transformers.pytorch_utils
from torch import nn
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


def running_call() -> int:
    """Return the number of the call from which hf_ckpt is called.

    It is for `is_running`, and 0 without such a call. It is the address of the call's frame, because the frame itself
    would keep alive all that its variables hold.
    """
    return next(map(id, callers()), 0)


def is_running(number: int) -> bool:
    """Whether a call of this thread, by its number from `running_call`, has not ended yet. True for 0."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and number not in (0, id(frame)):
        frame = frame.f_back
    return frame is not None


def input_of_dropout() -> torch.Tensor | None:
    """Return the input of `nn.functional.dropout`, if hf_ckpt is called from it, for example in a saved-tensor hook.

    `nn.Dropout` calls that function, too. None if hf_ckpt is called from anything else, such as a replacement of that
    function.
    """
    frame = next(callers(), None)
    if frame is None or frame.f_code is not _DROPOUT or frame.f_code.co_filename != functional.__file__:
        return None
    given: torch.Tensor = frame.f_locals["input"]
    return given


def bias_of_linear() -> torch.Tensor | None:
    """Return the bias of the linear layer whose own forward hf_ckpt is called from, for example in a saved-tensor hook.

    None if the layer has none, or if hf_ckpt is called from anything else, such as a block that passes a layer's weight
    to a function together with another bias.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("hf_ckpt."):
        frame = frame.f_back
    if frame.f_code.co_name != "forward" or frame.f_code.co_filename not in _LINEAR:
        return None
    bias: torch.Tensor | None = vars(frame.f_locals["self"])["_parameters"].get("bias")
    return bias


def running_modules() -> Iterator[nn.Module]:
    """Yield the modules from whose methods hf_ckpt is called, for example in a saved-tensor hook, innermost first."""
    found = (frame.f_locals.get("self") for frame in callers())
    yield from (module for module in found if isinstance(module, nn.Module))
