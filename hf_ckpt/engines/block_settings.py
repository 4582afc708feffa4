"""The settings of a block's modules: everything beside its tensors that decides what its forward does.

A recomputation compares them to find out whether the block has changed since its forward, and restores them if so.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.models.blocks import routers

_SIMPLE = (bool, int, float, str)
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)
"""Types without a forward. Only their contents are compared."""
_INDIFFERENT = (nn.Linear, nn.Identity, *_CONTAINERS)
"""Types whose forward, if any, reads no plain attribute, so their attributes are not compared."""
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ABOUT_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class Settings:
    """The settings of a block's modules and their configs: plain attributes, children and hooks.

    They are collected by a walk over the block, and all forwards share them until one of them changes. They refer to
    everything below the block but not to the block itself, which would be a reference cycle.
    """

    def __init__(self, block: nn.Module) -> None:
        modules = [module for module in block.modules() if isinstance(vars(module).get("_parameters"), dict)]
        inside = [vars(module) for module in modules]
        configs = {id(config): config for module in modules if (config := compat.config_of(module)) is not None}
        looked_at = [module for module in modules if type(module) not in _INDIFFERENT or module is block]
        owners = [vars(owner) for owner in (*looked_at, *configs.values())]
        tests = [_is_plain] * len(looked_at) + [compat.is_implementation] * len(configs)
        self.inner = owners[1:]
        """Attributes of configs, and of those modules below the block that are compared."""
        self.known = [frozenset(owner) for owner in owners]
        """Names of all attributes of each owner."""
        self.attributes = [
            {name: value for name, value in owner.items() if test(name, value)}
            for owner, test in zip(owners, tests, strict=True)
        ]
        """The plain attributes of modules, and the implementations that configs name."""
        self.getters = [operator.itemgetter(*found) for found in self.attributes]
        self.plain = [getter(owner) for getter, owner in zip(self.getters, owners, strict=True)]
        self.parameters = inside[0]["_parameters"]
        """The dict of the block's own parameters, which identifies the block."""
        self.tensors = [box for owner in inside for name in ("_parameters", "_buffers") if (box := owner[name])]
        """Dicts of parameters and of buffers."""
        self.names = [tuple(box) for box in self.tensors]
        self.buffers = [(box, name) for owner in inside for box in [owner["_buffers"]] for name in box]
        self.changing: list[tuple[dict[str, Any], str]] | None = None
        """The buffers that the forward changes; None before the first forward."""
        self.written: set[int] | None = None
        """Places of the tensors that the forward itself writes to, such as a router's weight that PEFT adapts: a write
        to them does not count as a change. None before the first forward."""
        hooks = [vars(module)[name] for module in modules for name in _HOOKS if type(module) not in _CONTAINERS]
        boxes = [*hooks, *(owner[name] for owner in inside for name in ("_modules", *_ABOUT_HOOKS))]
        boxes += [value for owner in inside for name, value in owner.items() if _is_box(name, value)]
        self.boxes = [box for box in boxes if box]
        """The dicts of children, of hooks, and of plain values that are not empty."""
        self.contents = [dict(box) for box in self.boxes]
        self.no_hooks = [box for box in hooks if not box]
        """The empty dicts of hooks."""
        self.merged = [merged for owner in inside if (merged := compat.merged_adapters(owner)) is not None]
        """Lists of adapters that are merged into a weight."""
        self.merges = [len(merged) for merged in self.merged]
        self.counted = [*self.tensors, *self.merged]
        self.sizes = [*map(len, owners), *map(len, self.counted)]
        self.chooses = bool(routers(block))
        """Whether the block sends tokens to experts."""

    def hold(self, block: nn.Module) -> bool:
        """Whether `block` is the block of these settings and still has them."""
        own = vars(block)
        owners = [own, *self.inner]
        try:
            return (
                own["_parameters"] is self.parameters
                and not any(self.no_hooks)
                and self.boxes == self.contents
                and self.sizes == [*map(len, owners), *map(len, self.counted)]
                and self.plain == [getter(owner) for getter, owner in zip(self.getters, owners, strict=True)]
            )
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or is now a tensor or an array
            return False

    def all_tensors(self) -> Iterator[Any]:
        """Yield the parameters and buffers that the block has now; None for one that is not set."""
        return chain.from_iterable(map(dict.values, self.tensors))

    def put_back(self, block: nn.Module, undo: contextlib.ExitStack) -> None:
        """Restore these settings on the block until `undo` ends."""
        for attributes, known, owner in zip(self.attributes, self.known, [vars(block), *self.inner], strict=True):
            changed = {
                name: value for name, value in attributes.items() if name not in owner or owner[name] is not value
            }
            added = {name for name in owner.keys() - known if _is_plain(name, owner[name])}
            if changed or added:
                undo.enter_context(_lent_attributes(owner, changed, added))
        for box, content in zip(self.boxes, self.contents, strict=True):
            lend(box, content, undo)
        for box in self.no_hooks:
            lend(box, {}, undo)


def _is_plain(name: str, value: Any) -> bool:
    """Whether an attribute is a number, a flag or a string, or a list of strings such as names of adapters.

    Other attributes may hold what a forward stored, and to keep them would keep its activations alive. DeepSpeed's
    counters do not count either: they go on during a recomputation.
    """
    if compat.counted_by_deepspeed(name):
        return False
    return type(value) in _SIMPLE or (type(value) is list and bool(value) and all(type(item) is str for item in value))


def _is_box(name: str, value: Any) -> bool:
    """Whether an attribute is a dict of plain values, such as the scaling of adapters."""
    return type(value) is dict and name not in _OF_MODULES and all(type(item) in _SIMPLE for item in value.values())


def lend(box: dict[Any, Any], content: dict[Any, Any], undo: contextlib.ExitStack) -> None:
    """Replace the content of a dict until `undo` ends, unless it already has that content."""
    if list(box) != list(content) or not all(map(operator.is_, box.values(), content.values())):
        undo.enter_context(_lent(box, content))


@contextlib.contextmanager
def _lent(box: dict[Any, Any], content: dict[Any, Any]) -> Iterator[None]:
    """Replace the content of a dict inside this context."""
    before = list(box.items())
    box.clear()
    box.update(content)
    try:
        yield
    finally:
        box.clear()
        box.update(before)


@contextlib.contextmanager
def _lent_attributes(owner: dict[str, Any], changed: dict[str, Any], added: set[str]) -> Iterator[None]:
    """Set the `changed` attributes and remove the `added` ones inside this context."""
    before = {name: owner[name] for name in (*changed, *added) if name in owner}
    owner.update(changed)
    for name in added:
        del owner[name]
    try:
        yield
    finally:
        for name in changed:
            owner.pop(name, None)
        owner.update(before)
