"""Reads call frames for facts that no argument carries."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

_DROPOUT = getattr(functional.dropout, "__code__", None)


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
    if frame is None or frame.f_code is not _DROPOUT or frame.f_code.co_filename != functional.__file__:
        return None
    given: torch.Tensor = frame.f_locals["input"]
    return given


def running_modules() -> Iterator[nn.Module]:
    """Yield the modules from whose methods hf_ckpt is called, for example in a saved-tensor hook, innermost first."""
    found = (frame.f_locals.get("self") for frame in callers())
    yield from (module for module in found if isinstance(module, nn.Module))
