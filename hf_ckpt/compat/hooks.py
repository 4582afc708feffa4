"""Hooks on modules and on tensors."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.compat.private import private


def has_gradient_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a hook runs in backward as soon as a gradient is complete, as for optimizers that step in backward."""
    return any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_hooks_of = operator.attrgetter(*_HOOKS)


_Hooks = tuple[dict[int, Any] | None, dict[int, Any] | None]
TensorHooks = tuple[list[_Hooks] | None, int]
"""The gradient hooks of each of some tensors, None if no tensor has any; and how many hooks were registered in this
process by then."""


def tensor_hooks(tensors: Sequence[torch.Tensor]) -> TensorHooks:
    """Return the gradient hooks of some tensors, for `restore_tensor_hooks`."""
    boxes = list(map(_hooks_of, tensors))
    if boxes == [(None, None)] * len(boxes):  # most blocks
        return None, RemovableHandle.next_id
    return [(before and before.copy(), after and after.copy()) for before, after in boxes], RemovableHandle.next_id


def restore_tensor_hooks(tensors: Sequence[torch.Tensor], hooks: TensorHooks) -> bool:
    """Give tensors the gradient hooks that they had, and return whether they had others by now.

    Handles that remove hooks keep working.
    """
    before, registered = hooks
    if before is None and registered == RemovableHandle.next_id:  # most blocks
        return False
    contents = before or [(None, None)] * len(tensors)
    if list(map(_hooks_of, tensors)) == contents:
        return False
    for tensor, of_tensor in zip(tensors, contents, strict=True):
        for name, content in zip(_HOOKS, of_tensor, strict=True):
            box = getattr(tensor, name)
            if box is not None and box != content:
                box.clear()
                box.update(content or {})
    return True


def registered_hooks() -> int:
    """Return how many hooks on modules, tensors and optimizers were registered in this process so far."""
    return RemovableHandle.next_id


has_global_hooks: Callable[[], bool] = private("torch.nn.modules.module._has_any_global_hook")
"""Returns whether global module hooks are registered, as by `torch.nn.modules.module.register_module_forward_hook`."""


global_forward_hooks: dict[int, Any] = private("torch.nn.modules.module._global_forward_hooks")
"""Those that run after the forward of every module, before its own: `register_module_forward_hook` adds to it."""


@contextlib.contextmanager
def same_hook_number(hooks: Mapping[int, Any]) -> Iterator[None]:
    """Give a hook that is registered into `hooks` inside this context the first free number below 0.

    By default, torch assigns a new number. torch.compile guards on the numbers of hooks with `always_call`, so every
    block would be compiled by itself, and again after every registration, up to the recompilation limit.
    """
    following = RemovableHandle.next_id  # a counter of the class, from which every handle takes its number
    RemovableHandle.next_id = min((0, *hooks)) - 1
    try:
        yield
    finally:
        RemovableHandle.next_id = following
