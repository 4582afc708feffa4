"""The optimizers of the process: those of a model, and hooks around their steps."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hf_ckpt.compat.torch import is_compiling

# Neither a model nor torch refers to the optimizers of a model.
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def remember(optimizer: torch.optim.Optimizer) -> None:
    """Let `of_model` find an optimizer as long as it exists."""
    _optimizers.add(optimizer)


def call_before(before: Callable[[torch.optim.Optimizer], None]) -> RemovableHandle:
    """Call a function before every optimizer step of the process, until the handle is removed.

    A method is not called any more once its object is gone: the hook does not keep it alive.
    """
    return register_optimizer_step_pre_hook(_weak(before))


def call_after(after: Callable[[torch.optim.Optimizer], None]) -> RemovableHandle:
    """As `call_before`, but after every step that did not raise."""
    return register_optimizer_step_post_hook(_weak(after))


def _weak(function: Callable[[torch.optim.Optimizer], None]) -> Callable[..., None]:
    reference: Callable[[], Any] = weakref.WeakMethod(function) if inspect.ismethod(function) else lambda: function

    def call(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        called = None if is_compiling() else reference()
        if called is not None:
            called(optimizer)

    return call


class _Arguments(dict[str, Any]):
    """The keyword arguments of an optimizer's step, which live as long as the step."""


def call_around(before: Callable[[], None], after: Callable[[], None]) -> list[RemovableHandle]:
    """Call two functions before and after every optimizer step of the process, until the handles are removed.

    torch calls no hook after a step that raised. Then `after` is called as soon as nothing refers to the frames of the
    step any more, that is, when the error has been handled.
    """

    def begin(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_compiling():
            return None
        before()
        arguments = _Arguments(kwargs)
        weakref.finalize(arguments, after).atexit = False
        return args, arguments

    return [register_optimizer_step_pre_hook(begin), call_after(lambda _: after())]


def of_model(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the known optimizers that update parameters of `model`: see `remember`."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}

    def updates_this_model(optimizer: torch.optim.Optimizer) -> bool:
        return any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"])

    return list(filter(updates_this_model, _optimizers))
