"""torch.compile, fake tensors, and what tensors and modules are made of."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

from hf_ckpt.compat.private import private

log = logging.getLogger(__name__)


is_compiling = torch.compiler.is_compiling
"""Returns whether torch.compile is tracing the current call."""


def is_replica(module: nn.Module) -> bool:
    """Whether a module is a copy made by `nn.DataParallel`, whose copies run in parallel threads."""
    return bool(vars(module).get("_is_replica", False))


def error_of_forward() -> BaseException | None:
    """Return the error that ended a module's forward. Must be called from a hook that torch calls even after errors.

    torch calls such hooks while it handles the error (`Module._call_impl`).
    """
    return sys.exc_info()[1]


def is_of_script(error: BaseException | None) -> bool:
    """Whether a scripted function raised the error, in place of any error inside of it."""
    return isinstance(error, RuntimeError) and "TorchScript interpreter" in str(error)


def add_note(error: Exception, text: str) -> None:
    """Add a note to an error, once. Python 3.10 has no notes: the text is logged."""
    if text not in getattr(error, "__notes__", ()):
        getattr(error, "add_note", log.error)(text)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Keep torch.compile from tracing a function and everything that it calls.

    This marks the code itself, at no cost per call; `torch.compiler.disable` would wrap the function.
    """
    private("torch._C._dynamo.eval_frame.set_code_exec_strategy")(function.__code__, _skipping())
    return function


@functools.cache  # each checkpointed block needs it three times a step
def _skipping() -> Any:
    """What makes torch.compile skip a function's own frame, and frames that it calls."""
    skip = private("torch._C._dynamo.eval_frame._FrameAction").SKIP
    return private("torch._C._dynamo.eval_frame._FrameExecStrategy")(skip, skip)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake: with a shape and a type, but no values."""
    return isinstance(tensor, FakeTensor)


def is_any_wrapper(types: Iterable[type]) -> bool:
    """Whether one of these tensor types wraps other tensors and runs its operations on them, like DTensor."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def parts_with_storage(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with storage that make up a tensor: itself, those it wraps, or values and indices if sparse.

    A subclass that only describes a tensor has none.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in parts:
            if isinstance(part, torch.Tensor):  # a DTensor also lists its mesh
                yield from parts_with_storage(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif is_fake(tensor) or _has_memory(tensor):
        yield tensor


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # torch has no other way to ask
        return False
    return True


_resize_watchers: list[Callable[[torch.UntypedStorage], Any]] = []


def watch_resizes(watcher: Callable[[torch.UntypedStorage], Any]) -> None:
    """Call `watcher` with each storage whose `resize_` is called, until `unwatch_resizes`.

    FSDP frees and allocates gathered parameters that way, which dispatch modes do not see. With a watcher,
    `torch.UntypedStorage` overrides the method that it inherits.
    """
    if not _resize_watchers:  # the method is inherited from a class in C, which cannot be changed
        torch.UntypedStorage.resize_ = _resize  # type: ignore
    _resize_watchers.append(watcher)


def unwatch_resizes(watcher: Callable[[torch.UntypedStorage], Any]) -> None:
    """Undo `watch_resizes`."""
    if watcher in _resize_watchers:
        _resize_watchers.remove(watcher)
        if not _resize_watchers:  # storages run the inherited method again, without a Python call
            del torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    super(torch.UntypedStorage, storage).resize_(size)
    for watcher in tuple(_resize_watchers):  # a watcher may end its own watch
        watcher(storage)
    return storage
