"""Fake tensors, which have a shape and a type but no values: how models and operations run on them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.nn import functional
from transformers.utils import import_utils

from hf_ckpt.compat.private import private

_lock = threading.RLock()
_in_kernel = private("torch._subclasses.fake_tensor.in_kernel_invocation_manager")
_without_modes = private("torch._C._DisableTorchDispatch")


@dataclasses.dataclass(slots=True)
class Known:
    """What is known of an operation on tensors of some shapes: its result is one new tensor, or its first argument."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    work: Any = None
    """What the caller of `run_on_fakes` has stored here; None before that."""


_known: dict[Any, Known] = {}
"""(operation, shapes of its arguments and of those by keyword, number of different tensors) -> what is known of it."""
_kinds: dict[Any, str] = {}
"""Operation -> see `_kind_of`."""
_attributes: dict[torch.device, dict[str, Any]] = {}
"""Device -> the attributes that torch gives its new fake tensors, but for their mode."""


def run_on_fakes(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Known | None]:
    """Run an operation for a dispatch mode that is directly above that of fake tensors.

    Views, and operations that ran before on tensors of the same shapes, and that return one new tensor or change their
    first argument, are most of a step. They bypass torch's own cache of results, whose key takes longer than they do.

    Returns the result, and what is known of these operations but for views; None for all others.
    """
    # Others go to torch as they are: constants have values, and subclasses and sparse tensors other rules.
    source = args[0] if args else None
    if type(source) is not FakeTensor or source.constant is not None or source.layout is not torch.strided:
        return function(*args, **kwargs), None
    if function is torch.ops.aten._grouped_mm.default and source.dtype is not torch.bfloat16:
        return _grouped_product(*args, **kwargs), None
    operation = function._op  # found by its address, while torch hashes `function` in Python
    kind = _kinds.get(operation)
    if kind is None:
        kind = _kinds[operation] = _kind_of(function)
    if kind == "view" and not kwargs:
        with _in_kernel(source.fake_mode):  # inside, a fake tensor is one on `meta`, whose kernels make the view
            view = function(*args)
        return _fake(source, view), None
    if not kind:
        return function(*args, **kwargs), None
    # With torch's own cache alone, `predict` took 2.7 times as long (LLaMA, 16 blocks; CPU, torch 2.13).
    tensors: set[int] = set()
    shapes = _shapes_of(args, tensors)
    key = operation, shapes, _shapes_of(kwargs.items(), tensors) if kwargs else (), len(tensors)
    entry = _known.get(key)
    if entry is not None and kind == "in place":
        return source, entry
    if entry is not None:
        with _without_modes():
            empty = torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype, device="meta")
        return _fake(source, empty), entry
    result = function(*args, **kwargs)
    # `empty_strided` would allocate other bytes for a result that is a part of its storage.
    if kind == "in place" or result.untyped_storage().nbytes() == result.nbytes:
        entry = _known[key] = Known(result.shape, result.stride(), result.dtype)
    return result, entry


def _fake(source: FakeTensor, meta: torch.Tensor) -> FakeTensor:
    """A fake tensor like `source`, with the shape and the storage of a tensor on `meta`.

    What torch's constructor does takes twice as long as all else that a small operation needs.
    """
    device = source.fake_device
    attributes = _attributes.get(device)
    if attributes is None:
        attributes = _attributes[device] = dict(vars(FakeTensor(source.fake_mode, meta, device)))
        del attributes["fake_mode"]
    tensor: FakeTensor = torch.Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    vars(tensor).update(attributes, fake_mode=source.fake_mode)
    return tensor


def _shapes_of(values: Iterable[Any], tensors: set[int]) -> tuple[Any, ...]:
    """What the shape of a result depends on: the shapes and types of tensors, and the values of all others.

    Adds the tensors to `tensors`, by their `id`: an operation reads one that it is given twice only once.
    """
    parts: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.add(id(value))
            parts.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, (list, tuple)):
            parts.append(_shapes_of(value, tensors))
        else:
            parts.append((type(value), value))  # 1, 1.0 and True are equal, but give results of different types
    return tuple(parts)


def _kind_of(function: Any) -> str:
    """Return `view` for an operation that returns a view of its first argument, `new` for one that returns one new
    tensor, whose shape does not depend on values, `in place` for one that changes nothing but the values of its first
    argument and returns that; empty for all others, such as those that resize it."""
    first, *more = function._schema.returns or [None]
    arguments = function._schema.arguments
    resizes = torch.Tag.inplace_view in function.tags
    if more or not isinstance(getattr(first, "type", None), torch.TensorType):
        return ""
    if function._schema.is_mutable:
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
        return "in place" if written == [True, *[False] * (len(written) - 1)] and not resizes else ""
    if first.alias_info is not None or function is torch.ops.aten._unsafe_view.default:
        return "view"
    # nonzero, unique or item, for example: a result of an earlier call says nothing of this one.
    depends = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return "new" if depends.isdisjoint(function.tags) else ""


def _grouped_product(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """The result of `torch._grouped_mm`, whose shape torch infers for bfloat16 only (seen in torch 2.13).

    Shapes: [rows, k] x [groups, k, n] -> [rows, n]; [m, k] x [k, n] -> [groups, m, n], a product for each group of k;
    [groups, m, k] x [k, n] -> [m, n]; [groups, m, k] x [groups, k, n] -> [groups, m, n].
    """
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        shape.insert(0, a.shape[0] if a.dim() == 3 else offs.shape[0])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def depends_on_values(error: Exception) -> bool:
    """Whether an error says that something needs the values of fake tensors."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


@contextlib.contextmanager
def as_on_real_devices(*, on_accelerator: bool) -> Iterator[None]:
    """Make models run on fake tensors of the CPU as on real ones of a device, inside this context.

    transformers 5 asks whether a tensor is fake before it reads whether a mask masks anything, which decides which
    attention kernel runs. It is told that none is.

    On an accelerator, dropout's mask has one byte per element; on the CPU it is noise in the input's type
    (aten/src/ATen/native/Dropout.cpp). Accelerators have fused kernels for attention with dropout, which save what
    those without save; the CPU has none (aten/src/ATen/native/transformers/attention.cpp). A torch function mode would
    not work: autograd turns it off, so blocks would run differently when recomputed.
    """
    attention = functools.partial(_attention, functional.scaled_dot_product_attention)
    with _lock, contextlib.ExitStack() as patches:
        # transformers 4 has no such function. A mock would hold the tensors that it was called with.
        patches.enter_context(mock.patch.object(import_utils, "is_fake_tensor", _is_never_fake, create=True))
        if on_accelerator:
            patches.enter_context(mock.patch.object(private("torch._VF"), "dropout", _dropout))
            patches.enter_context(mock.patch.object(functional, "scaled_dot_product_attention", attention))
        yield


def _is_never_fake(value: object) -> bool:
    return False


def _dropout(tensor: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    # As in aten/src/ATen/native/Dropout.cpp, where other cases need no mask.
    if type(tensor) is FakeTensor and training and 0 < p < 1 and tensor.numel():
        return torch.native_dropout(tensor, p, training)[0]
    return torch.dropout(tensor, p, training)


def _attention(usual: Callable[..., torch.Tensor], query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # Without dropout, attention takes the same path on fake tensors of the CPU as a fused kernel does with it. Models
    # of transformers pass it by keyword.
    if type(query) is FakeTensor and "dropout_p" in kwargs:
        kwargs["dropout_p"] = 0.0
    return usual(query, *args, **kwargs)
