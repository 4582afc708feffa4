"""What hf_ckpt has put on modules: a list of rows, each of which can undo itself.

A row undoes only what it has put there itself. What has taken its place since stays: another model's plan on a block
that was moved there, or a wrapper of another package. So rows may be undone at any time, and twice.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn

_GONE = weakref.ref(nn.Module())
"""Refers to a module that no longer exists."""


class Weak:
    """Base of what refers to the modules of a model, and is held by one of them.

    It refers to modules weakly, so that the model can be freed. A copied or unpickled model gets a copy that refers to
    the new modules.

    Args:
        arguments: modules and other values. Subclasses say which.
    """

    def __init__(self, *arguments: Any) -> None:
        # A module holds its hooks, so a hook that held the module would be a cycle, which only the garbage collector
        # frees: a script that loads the next model would have both in memory.
        self._held: tuple[Any, ...] = tuple(map(_weakly, arguments))

    @property
    def module(self) -> nn.Module | None:
        """The module that is the first argument; None if it no longer exists."""
        module: nn.Module | None = self._held[0]()
        return module

    def arguments(self) -> list[Any]:
        """Return the arguments; a module that no longer exists is None."""
        return [value() if isinstance(value, weakref.ref) else value for value in self._held]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # deepcopy enters a module into `memo` before it copies what the module holds. A part that is copied by itself
        # keeps the hook of its model.
        parts = (
            memo.get(id(part), part) if isinstance(part, nn.Module) else copy.deepcopy(part, memo)
            for part in self.arguments()
        )
        return type(self)(*parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self.arguments())  # weak references cannot be pickled


def _weakly(value: Any) -> Any:
    """Return a weak reference to a module, or to one that is gone for None; other values as they are."""
    if value is None:  # of a layer that was removed from a model that is then pickled or copied
        return _GONE
    return weakref.ref(value) if isinstance(value, nn.Module) else value


def is_part(module: nn.Module, base: nn.Module) -> bool:
    """Return whether a module is a part of a model now."""
    return any(part is module for part in base.modules())


class Row(Protocol):
    """One thing that hf_ckpt has put on a module, or has removed from it."""

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it no longer exists."""

    def undo(self) -> None:
        """Make the module as it was before."""


class Put(Weak):
    """An attribute of a module: the module, the name, the value, and the value before, if it had one of its own."""

    def undo(self) -> None:
        """Put the value before in its place, or delete the attribute, unless it has another value now."""
        module, name, value, *before = self.arguments()
        if module is None or vars(module).get(name) is not value:
            return
        if before:
            vars(module)[name] = before[0]
        else:
            del vars(module)[name]


class Hooked(Weak):
    """A hook that was registered with torch: the module, the handle, and the hook."""

    def undo(self) -> None:
        """Remove the hook, unless another one has got its number."""
        _, handle, hook = self.arguments()
        hooks = handle.hooks_dict_ref()
        if hooks is not None and hooks.get(handle.id) is hook:
            handle.remove()


class WithoutInputGradients(Weak):
    """A hook that made the embeddings' output require gradients, and was removed: the model."""

    def undo(self) -> None:
        """Let the model register such a hook again."""
        (base,) = self.arguments()
        if base is not None:
            base.enable_input_require_grads()


def undo(rows: Iterable[Row]) -> None:
    """Undo rows in order; the last one that was added comes first."""
    for row in reversed([*rows]):
        row.undo()
