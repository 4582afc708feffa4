"""How the modules of a block are set: what decides, beside its tensors, what its forward does.

A recomputation looks at it to find whether the block was changed since its forward, and to put that back.
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
"""Types without a forward, of which only the contents are compared."""
_INDIFFERENT = (nn.Linear, nn.Identity, *_CONTAINERS)
"""Types whose forward, if they have one, looks at no plain attribute, so that these are not compared."""
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ABOUT_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class Settings:
    """How the modules of a block and their configs are set: plain attributes, children and hooks.

    It is found by a walk over the block, holds for as long as nothing of that changes, and is shared by the forwards in
    between. It refers to everything below the block but not to the block, which refers to the function that has it.
    """

    def __init__(self, block: nn.Module) -> None:
        modules = [module for module in block.modules() if isinstance(vars(module).get("_parameters"), dict)]
        inside = [vars(module) for module in modules]
        configs = {id(config): config for module in modules if (config := compat.config_of(module)) is not None}
        looked_at = [module for module in modules if type(module) not in _INDIFFERENT or module is block]
        owners = [vars(owner) for owner in (*looked_at, *configs.values())]
        tests = [_is_plain] * len(looked_at) + [compat.is_implementation] * len(configs)
        self.inner = owners[1:]
        """Attributes of the modules below the block that are compared, and of configs."""
        self.known = [frozenset(owner) for owner in owners]
        """Names of all attributes of each owner."""
        self.attributes = [
            {name: value for name, value in owner.items() if test(name, value)}
            for owner, test in zip(owners, tests, strict=True)
        ]
        """The plain ones, and what implementations the configs name."""
        self.getters = [operator.itemgetter(*found) for found in self.attributes]
        self.plain = [getter(owner) for getter, owner in zip(self.getters, owners, strict=True)]
        self.parameters = inside[0]["_parameters"]
        """The dict of the block's own parameters, which tells the block from others."""
        self.tensors = [box for owner in inside for name in ("_parameters", "_buffers") if (box := owner[name])]
        """Dicts of parameters and of buffers."""
        self.names = [tuple(box) for box in self.tensors]
        self.buffers = [(box, name) for owner in inside for box in [owner["_buffers"]] for name in box]
        self.changing: list[tuple[dict[str, Any], str]] | None = None
        """The buffers that the forward changes; None until a forward has shown it."""
        self.written: set[int] | None = None
        """Places of the parameters that the forward itself writes to, as PEFT does where it adapts a router: that they
        were written to tells nothing. None until a forward has shown it."""
        hooks = [vars(module)[name] for module in modules for name in _HOOKS if type(module) not in _CONTAINERS]
        boxes = [*hooks, *(owner[name] for owner in inside for name in ("_modules", *_ABOUT_HOOKS))]
        boxes += [value for owner in inside for name, value in owner.items() if _is_box(name, value)]
        self.boxes = [box for box in boxes if box]
        """Dicts of children, of hooks, and of plain values."""
        self.contents = [dict(box) for box in self.boxes]
        self.no_hooks = [box for box in hooks if not box]
        """The same dicts, of the modules without hooks."""
        self.merged = [merged for owner in inside if (merged := compat.merged_adapters(owner)) is not None]
        """Lists of the adapters that are merged into a weight."""
        self.merges = [len(merged) for merged in self.merged]
        self.counted = [*self.tensors, *self.merged]
        self.sizes = [*map(len, owners), *map(len, self.counted)]
        self.chooses = bool(routers(block))
        """Whether the block sends tokens to experts."""

    def hold(self, block: nn.Module) -> bool:
        """Whether the block is the one that was looked at, and nothing has changed since."""
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
        except (KeyError, RuntimeError, ValueError):  # another attribute, or a tensor or array in the place of a number
            return False

    def all_tensors(self) -> Iterator[Any]:
        """Yield the parameters and buffers that the block has now; None in the place of one that it lacks."""
        return chain.from_iterable(map(dict.values, self.tensors))

    def put_back(self, block: nn.Module, undo: contextlib.ExitStack) -> None:
        """Set the block as it was found here, until `undo` ends."""
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
    """Whether an attribute is a number, a flag or text, or a list of texts such as names of adapters.

    Others are left alone: to hold what a forward may have stored would keep that forward's activations alive. So are
    the counts of DeepSpeed, which go on while a block runs again.
    """
    if compat.counted_by_deepspeed(name):
        return False
    return type(value) in _SIMPLE or (type(value) is list and bool(value) and all(type(item) is str for item in value))


def _is_box(name: str, value: Any) -> bool:
    """Whether an attribute is a dict of plain values, as adapters have for their scaling."""
    return type(value) is dict and name not in _OF_MODULES and all(type(item) in _SIMPLE for item in value.values())


def lend(box: dict[Any, Any], content: dict[Any, Any], undo: contextlib.ExitStack) -> None:
    """Give a dict other content until `undo` ends, unless it has that content now."""
    if list(box) != list(content) or not all(map(operator.is_, box.values(), content.values())):
        undo.enter_context(_lent(box, content))


@contextlib.contextmanager
def _lent(box: dict[Any, Any], content: dict[Any, Any]) -> Iterator[None]:
    """Give a dict other content inside this context."""
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
    """Give attributes other values inside this context, and take away those that were `added`."""
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
