"""Calls of modules that are watched for a while, and transformers' own checkpointing, which is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.spec.plan import Plan


@contextlib.contextmanager
def own_trial(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Inside the `with` block, let transformers itself checkpoint the blocks whose action in `plan` is not `keep`.

    This is for comparing costs, which differ from those of `full` where the switch of transformers does more than run
    blocks again. Nothing of hf_ckpt may be installed on the model.
    """
    modules = find_blocks(model).modules
    with compat.own_checkpointing(base_model(model), only={modules[name] for name in plan.active()}):
        yield


def watch_calls(
    module: nn.Module, *, before: Callable[..., Any] | None = None, after: Callable[..., Any] | None = None
) -> list[Any]:
    """Call `before(module, args, kwargs)` and `after(module, args, output)` around every forward of a module.

    Both must return None. Returns the handles, whose `remove` ends that.
    """
    handles: list[Any] = []
    if before is not None:
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
    if after is not None:
        handles.append(module.register_forward_hook(after))
    return handles
