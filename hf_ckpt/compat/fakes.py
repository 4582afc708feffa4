"""Runs operations on fake tensors, which have a shape and a type but no values, faster than torch does.

torch looks up results in a cache; building the key from all properties of the arguments takes most of the time.
Blocks of a kind repeat the same operations, so a shorter key is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hf_ckpt.compat.private import private

_VIEWS = frozenset(
    (
        torch.ops.aten.as_strided.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.expand.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.select.int,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.squeeze.dim,
        torch.ops.aten.t.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default,
    )
)
"""Operations that return a view of their first argument: most operations of a traced step."""
_PLAIN = (int, float, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, str)
_MOST = 10_000
_in_kernel = private("torch._subclasses.fake_tensor.in_kernel_invocation_manager")


class _Made(NamedTuple):
    """Properties of a new tensor that an operation returned."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_known: dict[Any, _Made] = {}
"""Key of an operation and its arguments -> what it returns."""


def run_on_fakes(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation for a dispatch mode that is directly above that of fake tensors."""
    source = args[0] if args else None
    if _in_kernel is None or type(source) is not FakeTensor or source.constant is not None:
        return function(*args, **kwargs)
    if function in _VIEWS and not kwargs:
        with _in_kernel(source.fake_mode):
            made = function(*args)
        return FakeTensor(source.fake_mode, made, source.fake_device)
    key = _key(function, args, kwargs) if _makes_a_new_tensor(function) else None
    found = None if key is None else _known.get(key)
    if found is not None:
        with _in_kernel(source.fake_mode):
            made = torch.empty_strided(found.shape, found.stride, dtype=found.dtype, device="meta")
        return FakeTensor(source.fake_mode, made, found.device)
    result = function(*args, **kwargs)
    if key is not None and _is_new(result, args, kwargs):
        if len(_known) >= _MOST:
            _known.clear()
        _known[key] = _Made(result.shape, result.stride(), result.dtype, result.fake_device)
    return result


@functools.cache
def _makes_a_new_tensor(function: Any) -> bool:
    """Whether an operation returns one new tensor, determined by its arguments, and changes none of them."""
    schema, tags = function._schema, {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    if schema.is_mutable or len(schema.returns) != 1 or not tags.isdisjoint(function.tags):
        return False
    returned = schema.returns[0]
    return returned.alias_info is None and isinstance(returned.type, torch.TensorType)


def _key(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A key that distinguishes a call from calls with other results; None if that is not known."""
    parts: list[Any] = [function]
    for value in (*args, *kwargs.keys(), *kwargs.values()) if kwargs else args:
        if type(value) is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
                return None
            parts.append((value.shape, value.stride(), value.dtype, value.fake_device))
        elif isinstance(value, _PLAIN):
            parts.append((type(value), value))
        elif isinstance(value, (list, tuple)) and all(type(number) is int for number in value):
            parts.append(tuple(value))
        else:
            return None
    return tuple(parts)


def _is_new(result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a result is a plain tensor with its own storage, and uses all of it."""
    if type(result) is not FakeTensor or result.constant is not None or result.layout is not torch.strided:
        return False
    storage = result.untyped_storage()
    given = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    if any(value.untyped_storage()._cdata == storage._cdata for value in given):
        return False
    size = 1 + sum((length - 1) * step for length, step in zip(result.shape, result.stride(), strict=True))
    return not result.storage_offset() and result.numel() > 0 and storage.nbytes() == size * result.element_size()
