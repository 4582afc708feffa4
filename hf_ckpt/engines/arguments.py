"""The arguments of a block's forward, with the containers among them as they were when the forward began.

A block may change a list or dict that it was given: take an entry, count a call, add a result. Its forward changes the
caller's container, as it would without checkpointing. Recomputations get copies, so nothing is taken or added twice.

Lists, dicts and sets are copied, and tuples that contain them; tensors and other objects are not.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_FIXED = frozenset({type(None), bool, int, float, str, torch.Tensor, nn.Parameter, torch.Size, torch.dtype})
"""Types of most arguments. Nothing is copied there."""


def as_given(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return what a block passes to its checkpointing function, such that every call has containers of its own.

    The first call, the forward, gets the caller's containers. Without containers, `fn` and `args` are returned as is.
    """
    bound = fn if isinstance(fn, functools.partial) else functools.partial(fn)
    named: list[tuple[int | str, Any]] = [*enumerate(args, len(bound.args)), *bound.keywords.items()]
    callers = {name: value for name, value in named if type(value) not in _FIXED and _is_changeable(value)}
    if not callers:
        return fn, args
    args, keywords = copied((args, bound.keywords), {})
    return functools.partial(_OwnContainers(bound.func, callers), *bound.args, **keywords), args


class _OwnContainers:
    """A block's forward, called with copies of the caller's containers."""

    def __init__(self, fn: Callable[..., Any], callers: dict[int | str, Any]) -> None:
        self.fn = fn
        self.callers: dict[int | str, Any] | None = callers
        """The caller's containers, by place or name. None once the forward has begun: a block may add its results to
        them, and their graphs refer to this object."""
        self.__self__ = getattr(fn, "__self__", None)  # until transformers 5.17, engines find the block by it

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        callers, self.callers = self.callers, None
        if callers is None:
            args, keywords = copied((args, keywords), {})
        else:
            args = tuple(callers.get(place, value) for place, value in enumerate(args))
            keywords = {name: callers.get(name, value) for name, value in keywords.items()}
        return self.fn(*args, **keywords)


def _is_changeable(value: Any) -> bool:
    """Whether a value is a container that a block can change, or a tuple with such a container."""
    return any(map(_is_changeable, value)) if isinstance(value, tuple) else isinstance(value, (list, dict, set))


def copied(value: Any, copies: dict[int, Any]) -> Any:
    """Return a value with all its containers copied. `copies` has those copied so far, by id of the original."""
    if id(value) in copies or not _is_changeable(value):
        return copies.get(id(value), value)
    if isinstance(value, tuple):
        items = [copied(item, copies) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    made = copies[id(value)] = copy.copy(value)
    if isinstance(value, list):
        made[:] = [copied(item, copies) for item in value]
    elif isinstance(value, dict):
        for key, item in value.items():
            made[key] = copied(item, copies)
    return made
