"""The arguments of a block's forward: the tensors as they were, and the containers and objects as they were.

A block may change a list, dict or object that it was given: take an entry, count a call, add a result. Its forward
changes the caller's, as it would without checkpointing. Recomputations get copies, so nothing is taken or added twice.

Tensors are not copied. A recomputation that uses one which was changed in place since is an error. Recomputations get
aliases (`cut`) of those that require gradients, so that the hooks which a recomputation registers on them end with it.
"""

from __future__ import annotations

import array
import collections
import copy
import enum
import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.runs import Runs
from hf_ckpt.errors import ChangedBlockError, HfCkptError, reason_of

FIXED = frozenset({type(None), bool, int, float, str, torch.Tensor, nn.Parameter, torch.Size, torch.dtype})
"""Types of most arguments. Nothing is copied there."""
_TENSORS = frozenset({torch.Tensor, nn.Parameter})
CONTAINERS = (list, dict, set, collections.deque, bytearray, array.array, numpy.ndarray)
"""Types that are copied with `copy.copy`."""


def as_given(
    block: str, fn: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Runs, tuple[Any, ...], list[torch.Tensor]]:
    """Return what a block passes to its checkpointing function, such that every run has containers of its own.

    The first run, the forward, gets the caller's containers.

    Args:
        block: name of the block, for errors.
        fn: the block's own forward, with arguments bound by `functools.partial`.
        args: further positional arguments.

    Returns how the forward runs, its positional arguments, and the tensors given by keyword or inside of containers.
    torch's checkpoint saves positional ones.

    Raises `HfCkptError` for a container, an iterator or an object that cannot be copied.
    """
    bound = fn if isinstance(fn, functools.partial) else functools.partial(fn)
    # Most blocks are given tensors, plain values and tuples of these: a check of all types at once takes fewer calls.
    others = [arg for arg in args if type(arg) not in _TENSORS]
    values = [*bound.keywords.values(), *others]
    values = [item for value in values for item in (value if type(value) is tuple else (value,))]
    if FIXED.issuperset(map(type, values)):
        tensors = [value for value in values if type(value) in _TENSORS]
        if True not in map(_requires_grad, tensors):
            return Runs(fn, fn), args, tensors
    tensors = []

    def collect(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        return value

    copy_of = functools.partial(copied, copies={}, leaf=collect, objects=True)
    try:
        keywords = copy_of(bound.keywords)
        positional = [arg if isinstance(arg, torch.Tensor) else copy_of(arg) for arg in args]
    except TypeError as error:
        problem = f"is given a value that cannot be copied for its recomputation ({error})"
        other = '"policy": "selective", which runs no block twice'
        advice = f"Pass a list, a dict or a tensor in its place, or use {other}."
        raise HfCkptError(f"block {block!r} {problem}. {advice}") from error
    is_same = all(map(operator.is_, (*positional, *keywords.values()), (*args, *bound.keywords.values())))
    if is_same and True not in map(_requires_grad, tensors):
        return Runs(fn, fn), args, tensors  # nothing had to be copied
    ids = list(map(id, (*bound.args, *args)))
    again = functools.partial(_OnCopies(bound.func, ids), *bound.args, **keywords)
    return Runs(lambda *copies: fn(*args), again), tuple(positional), tensors


class _OnCopies:
    """A block's forward, each of whose calls gets copies: there may be several recomputations (`retain_graph=True`).

    Positional tensors are cut from the graph already; those given by keyword or inside of containers are not.

    Args:
        fn: the forward.
        ids: ids of the positional arguments of the first run. A tensor that was given twice must be one tensor.
    """

    def __init__(self, fn: Callable[..., Any], ids: list[int]) -> None:
        self.fn = fn
        self.ids = ids
        self.__self__ = getattr(fn, "__self__", None)  # until transformers 5.17, engines find the block by it

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        cuts = dict(zip((*self.ids, *map(id, args)), (*args, *args), strict=True))
        args, keywords = copied((args, keywords), {}, functools.partial(cut, cuts=cuts), objects=True)
        return self.fn(*args, **keywords)


_requires_grad = operator.attrgetter("requires_grad")


def cut(value: Any, cuts: dict[int, Any]) -> Any:
    """Return an alias of a tensor that requires gradients, for a recomputation, which may register hooks on it.

    Hooks on the tensor itself would run in the backward of the forward's graph, next to those that the forward has
    registered. Other values are returned as they are, and so are parameters.

    Args:
        value: the value.
        cuts: id of a tensor -> what was returned for it.
    """
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    key = id(value)
    alias = cuts.get(key)
    if alias is None:
        is_plain = type(value) is torch.Tensor or compat.torch.is_fake(value)
        if is_plain and value.layout is torch.strided and not value.is_nested:
            # Hooks on a view belong to the view's own node. A leaf would hold the values for as long as the graph, and
            # a trial would find that its action keeps them.
            try:
                alias = value[...]  # not `view_as`, which has other strides where a size is 1
            except ChangedBlockError:  # it was overwritten since, and is refused where the block uses it
                alias = value
        elif isinstance(value, nn.Parameter):
            alias = value
        else:
            alias = value.detach().requires_grad_()
        if value.__dict__:  # code may mark tensors by attributes
            alias.__dict__.update(value.__dict__)
        cuts[key] = alias
    return alias


_OF_PROGRAM = (torch.Tensor, nn.Module, type, enum.Enum, functools.partial, types.MethodType, types.FunctionType)
"""Modules, classes and functions belong to the program: a copy would be another one, and a change of it would be lost.
So do the callable objects of torch and triton, such as operators and kernels."""


def is_object(value: Any) -> bool:
    """Whether a value is an iterator or a view of memory, or has attributes, such as an instance of a dataclass."""
    if isinstance(value, _OF_PROGRAM) or (callable(value) and type(value).__module__.startswith(("torch.", "triton."))):
        return False
    return isinstance(value, (Iterator, memoryview)) or bool(attributes_of(value))


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, with those in `__slots__`."""
    attributes: dict[str, Any] = {}
    for kind in type(value).__mro__:
        slots = vars(kind).values() if "__slots__" in vars(kind) else ()
        names = [slot.__name__ for slot in slots if isinstance(slot, types.MemberDescriptorType)]
        attributes |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    return attributes | getattr(value, "__dict__", {})


def copied(value: Any, copies: dict[int, Any], leaf: Callable[..., Any] = lambda it: it, objects: bool = False) -> Any:
    """Return a value with all its containers copied. A tuple without containers is returned as it is.

    Args:
        value: the value.
        copies: the copies so far, by id of the original.
        leaf: applied to everything that is not copied.
        objects: whether to copy objects, too. Those in attributes of modules may be the state of a whole model, as
            FSDP's.

    Raises TypeError for a container, an iterator or an object that cannot be copied.
    """
    if type(value) in FIXED:
        return leaf(value)
    # Two places may hold one list, and a list may hold itself.
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, tuple):
        items = [copied(item, copies, leaf, objects=objects) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        if hasattr(value, "_make"):  # named tuples take no iterable
            return value._make(items)
        try:
            return type(value)(items)
        except TypeError:  # a class with other arguments
            return tuple.__new__(type(value), items)
    if not isinstance(value, CONTAINERS) and not (objects and is_object(value)):
        return leaf(value)
    if isinstance(value, Iterator):
        raise TypeError(f"a {type(value).__name__} can be read only once")
    try:
        duplicate = copy.copy(value)
    except Exception as error:  # a class may raise anything in `__copy__` or `__reduce__`
        raise TypeError(f"{type(value).__name__}: {reason_of(error)}") from error
    copies[id(value)] = duplicate  # before its items are copied, which may refer to it
    part = functools.partial(copied, copies=copies, leaf=leaf, objects=objects)
    if isinstance(value, (list, collections.deque)):
        for place, item in enumerate(value):
            duplicate[place] = part(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            duplicate[key] = part(item)
    elif isinstance(value, set):
        duplicate.clear()
        duplicate.update(map(part, value))
    if duplicate is not value and is_object(value):
        _copy_attributes(value, duplicate, part)
    return duplicate


def _copy_attributes(value: Any, duplicate: Any, part: Callable[[Any], Any]) -> None:
    """Give the copy of an object its attributes, each copied by `part`."""
    for key, item in attributes_of(value).items():
        copy_of_item = part(item)
        if key in getattr(duplicate, "__dict__", ()):
            vars(duplicate)[key] = copy_of_item
        else:
            object.__setattr__(duplicate, key, copy_of_item)  # a slot, also of a frozen class
