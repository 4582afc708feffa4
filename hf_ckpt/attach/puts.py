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

from hf_ckpt import compat

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
    """One thing that hf_ckpt puts on a module, or removes from it."""

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it no longer exists."""

    def put(self) -> None:
        """Change the module."""

    def undo(self) -> None:
        """Make the module as it was before. Without `put` before, do nothing."""


class Put(Weak):
    """An attribute of a module: the module, the name, the value, and the value before, if it had one of its own."""

    def put(self) -> None:
        """Set the attribute."""
        module, name, value = self.arguments()
        if name in vars(module):
            self._held += (vars(module)[name],)
        vars(module)[name] = value

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
    """A forward hook: the module, the hook, whether it runs `before` or `after` the forward, and whether it gets
    keyword arguments. After `put`, also its handle."""

    def put(self) -> None:
        """Register the hook. One after the forward is also called if the module raises an error."""
        module, hook, when, with_kwargs = self.arguments()
        if when == "before":
            handle = module.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
        else:
            with compat.hooks.same_hook_number(module._forward_hooks):
                handle = module.register_forward_hook(hook, always_call=True)
        self._held += (handle,)

    def undo(self) -> None:
        """Remove the hook, unless another one has got its number."""
        _, hook, _, _, *handles = self.arguments()
        for handle in handles:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and hooks.get(handle.id) is hook:
                handle.remove()


class WithoutInputGradients(Weak):
    """The hooks that make the embeddings' output require gradients are removed: the model, and how many there were.

    They exist for reentrant checkpointing. Non-reentrant checkpointing needs no input that requires gradients, and
    they make frozen blocks below the first adapter save, recompute and run backward.
    https://github.com/huggingface/transformers/issues/21381
    """

    def put(self) -> None:
        """Remove the hooks."""
        (base,) = self.arguments()
        is_one = compat.transformers.makes_inputs_require_gradients
        most = 0
        for module in base.modules():
            keys = [key for key, hook in module._forward_hooks.items() if is_one(hook)]
            for key in keys:  # not by handle: a second enable call loses the first one's handle
                del module._forward_hooks[key]
            most = max(most, len(keys))
        self._held += (most,)

    def undo(self) -> None:
        """Let the model register such hooks again."""
        base, *counts = self.arguments()
        if base is not None:
            for _ in range(sum(counts)):
                base.enable_input_require_grads()


def put(rows: Iterable[Row], on_model: list[Row]) -> None:
    """Put rows on modules in order, and append them to a list, by which they can be undone.

    If one of them cannot be put there, all of them are undone.
    """
    try:
        for row in rows:
            on_model.append(row)
            row.put()
    except BaseException:
        undo(on_model)
        on_model.clear()
        raise


def undo(rows: Iterable[Row]) -> None:
    """Undo rows in order; the last one that was added comes first."""
    for row in reversed([*rows]):
        row.undo()
