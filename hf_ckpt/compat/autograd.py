"""Nodes of autograd, and hooks on the tensors that they save."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_ckpt.compat.private import private
from hf_ckpt.compat.torch import untraced


def call_after_backward(function: Callable[[], None]) -> bool:
    """Call `function` when the current backward has ended without an error.

    DDP and FSDP2 end their backward in this way. Must be called from a tensor hook. Returns False if no backward runs.
    """
    try:
        private("torch.autograd.Variable._execution_engine").queue_callback(function)
    except RuntimeError:  # saved-tensor hooks are also called by code that inspects a graph, such as torchviz
        return False
    return True


running_node: Callable[[], Any] = private("torch._C._current_autograd_node")
"""Returns the node of autograd that this thread runs; None outside a backward."""


def is_unused_random_state(saved: torch.Tensor) -> bool:
    """Whether a saved tensor that backward asks for is the random state of an attention without dropout.

    Fused kernels on CUDA save it, and leave its memory unwritten then: those of torch, and the package flash-attn. Must
    be called from an unpack hook.
    """
    # Cheap tests first: every saved tensor comes here while a block is checked.
    if saved.is_floating_point() or saved.numel() > _MOST_STATE:
        return False
    node = running_node()
    # Nodes of torch's operations have `_saved_dropout_p`; flash-attn's Python function stores it under its own name.
    return getattr(node, "_saved_dropout_p", getattr(node, "dropout_p", None)) == 0.0


_MOST_STATE = 2
"""Numbers of the random state that an attention saves: a seed and an offset, together or apart."""


SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""The functions (pack, unpack) for `torch.autograd.graph.saved_tensors_hooks`."""


top_saved_tensor_hooks: Callable[[], SavedTensorHooks | None]
top_saved_tensor_hooks = functools.partial(private("torch._C._autograd._top_saved_tensors_default_hooks"), True)
"""Returns the innermost active saved-tensor hooks; None without any."""


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Context manager in which autograd saves tensors without the innermost active hooks."""
    hooks = top_saved_tensor_hooks()
    if hooks is None:
        yield
        return
    # torch has a context that forbids all hooks (`disable_saved_tensors_hooks`), but none that lifts one pair.
    private("torch._C._autograd._pop_saved_tensors_default_hooks")()
    try:
        yield
    finally:
        private("torch._C._autograd._push_saved_tensors_default_hooks")(*hooks)


class _NothingSavedError(Exception):
    """A backward asked for a tensor of a graph that saves none."""


@untraced
def _save_nothing(tensor: torch.Tensor) -> None:
    """Saved-tensor hook."""


@untraced
def _refuse_to_load(nothing: None) -> torch.Tensor:
    """Saved-tensor hook."""
    raise _NothingSavedError


def run_without_saving(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function for what it returns: its graph, which must not be used, saves no tensors.

    A function that runs a backward itself needs them, and is called once more.
    """
    try:
        with torch.autograd.graph.saved_tensors_hooks(_save_nothing, _refuse_to_load):
            return function(*args)
    except _NothingSavedError:
        return function(*args)


def is_in_place_error(error: Exception) -> bool:
    """Whether autograd raised an error because a saved tensor was changed in place."""
    # torch/csrc/autograd/saved_variable.cpp; it has no class of errors for it.
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


def refuses_hooks(error: RuntimeError) -> bool:
    """Whether torch raised the error because hooks on saved tensors were active (torch/_functorch/vmap.py)."""
    return "support saved tensor hooks" in str(error)


def is_held_by_hooks(node: Any, name: str) -> bool:
    """Whether saved-tensor hooks hold what an autograd node has saved under this name. Nothing is unpacked.

    Also True if torch cannot tell (2.8).
    """
    # `_saved_` would unpack the tensor, which calls the hook, and with `selective` computes the tensor.
    saved = getattr(node, f"_raw_saved_{name}", None)
    return saved is not None and getattr(saved, "unpack_hook", True) is not None


next_autograd_sequence_number: Callable[[], int] = private("torch.autograd._get_sequence_nr")
"""Returns the sequence number of this thread's next autograd node; later nodes have larger numbers."""


def users_of(tensor: torch.Tensor) -> int:
    """How much refers to a tensor or to its memory: Python objects, autograd's nodes, and views.

    More of them after a block has run mean that its graph keeps the tensor.
    """
    # A graph may keep the memory by a view, the tensor by a node, or its Python object by a saved-tensor hook.
    of_memory: int = private("torch._C._storage_Use_Count")(tensor.untyped_storage()._cdata)
    nodes: int = private("torch.Tensor._use_count")(tensor)
    return sys.getrefcount(tensor) + nodes + of_memory
