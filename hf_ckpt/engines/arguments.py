"""The arguments of a block's forward, with the containers among them as they were when the forward began.

A block may change a list or dict that it was given: take an entry, count a call, add a result. Its forward changes the
caller's container, as it would without checkpointing. Recomputations get copies, so nothing is taken or added twice.

Lists, dicts, sets, deques, dataclasses and namespaces are copied, and tuples that contain them; tensors and other
objects are not.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_CONTAINERS = (list, dict, set, collections.deque, types.SimpleNamespace)
_FIXED = frozenset({type(None), bool, int, float, str, torch.Tensor, nn.Parameter, torch.Size, torch.dtype})
"""Types of most arguments. Nothing is copied there."""


def as_given(
    fn: Callable[..., Any], args: tuple[Any, ...], *, ran: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return what a block passes to its checkpointing function, such that every call has containers of its own.

    The first call, the forward, gets the caller's containers, unless `ran` says that the forward runs elsewhere.
    Without containers, `fn` and `args` are returned as is.
    """
    bound = fn if isinstance(fn, functools.partial) else functools.partial(fn)
    values = [*args, *bound.keywords.values()]
    if not any(_is_changeable(value) for value in values if type(value) not in _FIXED):
        return fn, args
    named: list[tuple[int | str, Any]] = [*enumerate(args, len(bound.args)), *bound.keywords.items()]
    callers = None if ran else {name: value for name, value in named if _is_changeable(value)}
    args, keywords = copied((args, bound.keywords))
    return functools.partial(_OwnContainers(bound.func, callers), *bound.args, **keywords), args


class _OwnContainers:
    """A block's forward, called with copies of the caller's containers."""

    def __init__(self, fn: Callable[..., Any], callers: dict[int | str, Any] | None) -> None:
        self.fn = fn
        self.callers = callers
        """The caller's containers, by place or name. None once the forward has begun: a block may add its results to
        them, and their graphs refer to this object."""
        self.__self__ = getattr(fn, "__self__", None)  # until transformers 5.17, engines find the block by it

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        callers, self.callers = self.callers, None
        if callers is None:
            args, keywords = copied((args, keywords))
        else:
            args = tuple(callers.get(place, value) for place, value in enumerate(args))
            keywords = {name: callers.get(name, value) for name, value in keywords.items()}
        return self.fn(*args, **keywords)


def _is_changeable(value: Any) -> bool:
    """Whether a value is a container that a block can change, or a tuple with such a container."""
    if type(value) in _FIXED:
        return False
    if isinstance(value, tuple):
        return any(map(_is_changeable, value))
    return isinstance(value, _CONTAINERS) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def copied(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """Return a value with all its containers copied. `copies` has those copied so far, by id of the original."""
    copies = {} if copies is None else copies
    if id(value) in copies or not _is_changeable(value):
        return copies.get(id(value), value)
    if isinstance(value, tuple):
        items = [copied(item, copies) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    made = copies[id(value)] = copy.copy(value)
    if isinstance(value, (list, collections.deque)):
        for place, item in enumerate(value):
            made[place] = copied(item, copies)
    elif isinstance(value, dict):
        for key, item in value.items():
            made[key] = copied(item, copies)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        names = list(getattr(value, "__dict__", ()))
    for name in names:
        object.__setattr__(made, name, copied(getattr(value, name), copies))
    return made
