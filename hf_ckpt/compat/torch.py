"""Code that depends on torch's version, build or private names: autograd, hooks, modes, fake tensors."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils.hooks import RemovableHandle

from hf_ckpt.compat.frames import running_backward
from hf_ckpt.compat.private import private

log = logging.getLogger(__name__)


is_compiling = torch.compiler.is_compiling
"""Returns whether torch.compile is tracing the current call."""


def is_replica(module: nn.Module) -> bool:
    """Whether a module is a copy made by `nn.DataParallel`, whose copies run in parallel threads."""
    return bool(vars(module).get("_is_replica", False))


def transforms() -> set[str]:
    """Return the active transforms of torch.func: `grad`, `vmap`, and `jvp`, which also means forward-mode AD."""
    stack = private("torch._C._functorch.get_interpreter_stack")() or ()
    # Forward-mode AD without torch.func has no entry in that stack, but a level from 0 on.
    forward_mode = {"jvp"} if private("torch.autograd.forward_ad")._current_level >= 0 else set()
    # `functionalize`, which torch.compile uses itself, also has entries. It changes nothing here.
    return {entry.key().name.lower() for entry in stack} & {"grad", "jvp", "vmap"} | forward_mode


def has_gradient_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether a hook runs in backward as soon as a gradient is complete, as for optimizers that step in backward."""
    return any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters)


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


def error_of_forward() -> BaseException | None:
    """Return the error that ended a module's forward. Must be called from a hook that torch calls even after errors.

    torch calls such hooks while it handles the error (`Module._call_impl`).
    """
    return sys.exc_info()[1]


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


def saving_nothing() -> torch.autograd.graph.saved_tensors_hooks:
    """Context manager in which graphs save no tensors, and so have no backward."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)


def is_in_place_error(error: Exception) -> bool:
    """Whether autograd raised an error because a saved tensor was changed in place."""
    # torch/csrc/autograd/saved_variable.cpp; it has no class of errors for it.
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


def is_of_script(error: BaseException | None) -> bool:
    """Whether a scripted function raised the error, in place of any error inside of it."""
    return isinstance(error, RuntimeError) and "TorchScript interpreter" in str(error)


def add_note(error: Exception, text: str) -> None:
    """Add a note to an error, once. Python 3.10 has no notes: the text is logged."""
    if text not in getattr(error, "__notes__", ()):
        getattr(error, "add_note", log.error)(text)


def refuses_hooks(error: RuntimeError) -> bool:
    """Whether torch raised the error because hooks on saved tensors were active (torch/_functorch/vmap.py)."""
    return "support saved tensor hooks" in str(error)


_Hooks = tuple[dict[int, Any] | None, dict[int, Any] | None]
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_hooks_of = operator.attrgetter(*_HOOKS)


def tensor_hooks(tensors: Sequence[torch.Tensor]) -> list[_Hooks]:
    """Return the gradient hooks of some tensors, for `restore_tensor_hooks`."""
    boxes = list(map(_hooks_of, tensors))
    if boxes == [(None, None)] * len(boxes):  # most blocks
        return boxes
    return [(before and before.copy(), after and after.copy()) for before, after in boxes]


def restore_tensor_hooks(tensors: Sequence[torch.Tensor], hooks: list[_Hooks]) -> bool:
    """Give tensors the gradient hooks that they had, and return whether they had others by now.

    Handles that remove hooks keep working.
    """
    if list(map(_hooks_of, tensors)) == hooks:
        return False
    for tensor, contents in zip(tensors, hooks, strict=True):
        for name, content in zip(_HOOKS, contents, strict=True):
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


def is_held_by_hooks(node: Any, name: str) -> bool:
    """Whether saved-tensor hooks hold what an autograd node has saved under this name. Nothing is unpacked.

    Also True if torch cannot tell (2.8).
    """
    # `_saved_` would unpack the tensor, which calls the hook, and with `selective` computes the tensor.
    saved = getattr(node, f"_raw_saved_{name}", None)
    return saved is not None and getattr(saved, "unpack_hook", True) is not None


next_autograd_sequence_number: Callable[[], int] = private("torch.autograd._get_sequence_nr")
"""Returns the sequence number of this thread's next autograd node; later nodes have larger numbers."""


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


unseen_by_modes: Callable[[], contextlib.AbstractContextManager[Any]]
unseen_by_modes = private("torch.utils._python_dispatch._disable_current_modes")
"""Makes a context that hides operations from dispatch modes: selective checkpointing expects the forward's only."""


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake: with a shape and a type, but no values."""
    return isinstance(tensor, FakeTensor)


def users_of(tensor: torch.Tensor) -> int:
    """How much refers to a tensor or to its memory: Python objects, autograd's nodes, and views.

    More of them after a block has run mean that its graph keeps the tensor.
    """
    # A graph may keep the memory by a view, the tensor by a node, or its Python object by a saved-tensor hook.
    of_memory: int = private("torch._C._storage_Use_Count")(tensor.untyped_storage()._cdata)
    nodes: int = private("torch.Tensor._use_count")(tensor)
    return sys.getrefcount(tensor) + nodes + of_memory


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


without_torch_function: Callable[[], contextlib.AbstractContextManager[None]] = private(
    "torch._C.DisableTorchFunctionSubclass"
)
"""Makes a context in which operations on tensor subclasses bypass the subclass."""
without_torch_functions: Callable[[], contextlib.AbstractContextManager[None]] = private(
    "torch._C.DisableTorchFunction"
)
"""Makes a context in which operations bypass TorchFunctionModes, too."""


_push_mode = private("torch.utils._python_dispatch._push_mode")
_pop_mode = private("torch.utils._python_dispatch._pop_mode")
_modes_on = private("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
_entered: set[TorchDispatchMode] = set()


def enter_dispatch_mode_below(mode: TorchDispatchMode) -> None:
    """Enter a dispatch mode below all active ones, so that their own `with` blocks can still leave them."""
    _entered.add(mode)
    _exchange_modes(mode, [mode])


def leave_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Leave a mode that was entered by `enter_dispatch_mode_below`; other modes stay active.

    A mode in the middle of an operation, or one that is active in another thread, cannot be left: it stays alive.
    """
    if mode in _modes_on():
        _exchange_modes(mode, [])
        _entered.discard(mode)


def leave_after_operation(mode: TorchDispatchMode) -> None:
    """Leave a mode as soon as its operation has ended. Must be called in this operation.

    torch takes the mode off during its operation, and puts it back when no Python code runs; in a backward, once more
    at its end. The next Python code that a profiler would see leaves it. Beside a real profiler it stays on.
    """
    is_seen = running_node() is None or running_backward() is not None
    if is_seen and sys.getprofile() is None:
        sys.setprofile(functools.partial(_leave_and_end, mode))


def _leave_and_end(mode: TorchDispatchMode, *event: Any) -> None:
    if running_node() is None and mode in _modes_on():
        leave_dispatch_mode(mode)
        sys.setprofile(None)


def _exchange_modes(mode: TorchDispatchMode, below: list[TorchDispatchMode]) -> None:
    """Take a mode off the stack of active modes, and put some below the others.

    Garbage collection is off meanwhile: it might free a model and end its measurement, which would call this function
    while the stack is empty.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        modes_on = _modes_on()  # held here, because torch 2.8 frees a mode that it pops and nothing else refers to
        for _ in modes_on:
            _pop_mode()
        for each in (*below, *(other for other in modes_on if other is not mode)):
            _push_mode(each)
    finally:
        if collects:
            gc.enable()


def is_dispatch_mode_on(mode: TorchDispatchMode) -> bool:
    """Whether a dispatch mode sees the operations of this thread."""
    return mode in _modes_on()


def is_seen_by_modes() -> bool:
    """Whether an active dispatch mode must see every operation, so that torch.compile compiles nothing."""
    # Modes of torch that measure or log declare that they need not see what a graph does inside.
    return not all(getattr(type(mode), "ignore_compile_internals", bool)() for mode in _modes_on())
