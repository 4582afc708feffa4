"""What engines read from the frames they are called from, where no argument tells it, and functions made anew."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

_LIBRARIES = {"accelerate", "hf_ckpt", "peft", "torch", "transformers", "trl"}


def is_called_by_a_library() -> bool:
    """Return whether the caller of the function that asks is code of transformers, PEFT, TRL and the like."""
    return str(sys._getframe(2).f_globals.get("__name__")).partition(".")[0] in _LIBRARIES


def input_of_dropout() -> torch.Tensor | None:
    """Return what is given to the `nn.functional.dropout` that hf_ckpt is called from, as a saved-tensor hook is.

    `nn.Dropout` calls that function, too. None where hf_ckpt is called from anything else. A function that somebody has
    put in its place does not count.
    """
    frame = _caller()
    if frame is None or frame.f_code is not _DROPOUT or frame.f_code.co_filename != functional.__file__:
        return None
    given: torch.Tensor = frame.f_locals["input"]
    return given


_DROPOUT = getattr(functional.dropout, "__code__", None)


class PythonCall(NamedTuple):
    """One call that Python code makes."""

    frame: types.FrameType
    """The frame of the code that makes the call. It holds the local variables, so do not hold it for long."""
    instruction: int
    """Place of the call in the code."""


def python_call() -> PythonCall | None:
    """Return the call that has led to hf_ckpt, as one of torch does to a saved-tensor hook.

    Two tensors that autograd saves in the same call were made by the same function of torch.
    """
    frame = _caller()
    return None if frame is None else PythonCall(frame, frame.f_lasti)


def running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose methods hf_ckpt is called from, as a saved-tensor hook is; the innermost comes first."""
    frame = _caller()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module):
            yield found
        frame = frame.f_back


class LayerUnderDora(NamedTuple):
    """A frozen linear layer whose DoRA adapter is running."""

    weight: nn.Parameter
    """Its weight."""
    cast: torch.Tensor
    """The same values in the type of the adapter's input."""
    bias: torch.Tensor | None
    """The bias that is taken off the layer's result; None without one, and before it is."""
    result: torch.Tensor | None
    """The layer's result without the bias; None where the adapter makes its own."""


def layer_under_dora() -> LayerUnderDora | None:
    """Return the layer whose DoRA adapter hf_ckpt is called from, as a saved-tensor hook is; None where there is none.

    Nor for a weight that is trained, or that is no plain parameter, as a quantised one.
    """
    dora = sys.modules.get("peft.tuners.lora.dora")
    if dora is None:
        return None
    frame, running = _caller(), getattr(dora.DoraLinearLayer.forward, "__code__", None)
    if frame is None or frame.f_code is not running:
        return None
    names = frame.f_locals
    base, cast, bias = names.get("base_layer"), names.get("weight"), names.get("bias")
    weight = getattr(base, "weight", None)
    if type(weight) is not nn.Parameter or weight.requires_grad or not isinstance(cast, torch.Tensor):
        return None
    if cast.shape != weight.shape:
        return None
    frozen = bias if isinstance(bias, torch.Tensor) and not bias.requires_grad else None
    return LayerUnderDora(weight, cast, frozen, names.get("base_result"))


def _caller() -> types.FrameType | None:
    """The frame that hf_ckpt is called from."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("hf_ckpt."):
        frame = frame.f_back
    return frame


def rebound(forward: types.MethodType, other: nn.Module) -> types.MethodType:
    """Return a forward that was put on one model as a forward of `other`.

    Functions remember in their closures what they were made with: the model, its methods, and functions around these.
    """
    known: dict[int, Any] = {id(forward.__self__): other}
    return types.MethodType(_rebound(forward.__func__, known), other)


def _rebound(value: Any, known: dict[int, Any]) -> Any:
    """Return `value` with what `known` has (id of an object -> what stands in its place) in the closures below it."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in known:
        return types.MethodType(_rebound(value.__func__, known), known[id(value.__self__)])
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    cells = tuple(types.CellType() for _ in value.__closure__)
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    made.__kwdefaults__ = value.__kwdefaults__
    made.__dict__.update(value.__dict__)
    known[id(value)] = made
    for cell, old in zip(cells, value.__closure__, strict=True):
        try:
            cell.cell_contents = _rebound(old.cell_contents, known)
        except ValueError:  # an empty cell stays empty
            continue
    return made
