"""The watch: compare the tensors that a block's backward gets with those that its forward saved, bit for bit.

For one forward, a `Check` replaces the block's checkpointing function, which may belong to hf_ckpt or to anything else.
It calls that function with a wrapper of the block's own forward, whose saved-tensor hooks nest inside the function's.
The inner hooks pass every tensor that autograd saves to the outer hooks, and keep a reference to it. When backward asks
for the tensor, they compare what the outer hooks return (recomputed, rebuilt, unpacked, or copied back from host
memory) with the reference. The block runs no more often than without the watch.

Reentrant checkpointing saves nothing in the forward. There, the watch compares the outputs of the forward with the
outputs of the recomputation.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.arguments import as_given
from hf_ckpt.engines.causes import BlockState
from hf_ckpt.engines.differences import (
    Difference,
    difference_of,
    has_graph,
    has_no_values,
    is_plain,
    parameter_of,
    version_of,
)


class Check:
    """The check of one forward of one block, and of its backward.

    Args:
        block: qualified name of the block.
        module: the block.
        function: its checkpointing function, called as `function(fn, *args)`.
        room_bytes: the most bytes of tensors to keep. Tensors that do not fit are not compared.
        put_back: called with the check when the forward begins; restores the block's function.
        on_gradient: calls a function with the gradient of a tensor, for checks that run the block a second time.
        whole: whether every parameter stays on its device, unsharded, throughout a step. If not, they are not compared.
        done: called with the check when the backward ends, or when the forward ends if it saved nothing, such as the
            forward of a frozen block.
    """

    def __init__(
        self,
        block: str,
        module: nn.Module,
        function: Callable[..., Any],
        *,
        room_bytes: int,
        put_back: Callable[[Check], None],
        on_gradient: Callable[[torch.Tensor, Callable[[torch.Tensor], None]], None],
        done: Callable[[Check], None],
        whole: bool = True,
    ) -> None:
        self.block, self.module, self.function = block, module, function
        self.whole = whole
        self.compared = 0
        """Number of tensors that were compared."""
        self.left_out = 0
        """Number of saved tensors that could not be compared: there was no room, or they were changed in place."""
        self.saved = 0
        """Number of tensors that the forward saved."""
        self.found: list[tuple[int, Difference]] = []
        """The differences, each with the position of the tensor among the saved ones."""
        self.kept_bytes = 0
        """Bytes of the tensors that are kept only to be compared, without parameters and inputs."""
        self.room_bytes = room_bytes
        self.put_back, self.on_gradient, self.done = put_back, on_gradient, done
        self._first_call = threading.Lock()
        self._storages: set[int] = set()
        self._names: dict[int, str] = {}
        self._outer: compat.SavedTensorHooks | None = None
        """The outer hooks while the forward runs. They hold the inputs of the block."""
        self._run: Callable[[], Any] | None = None
        """Runs the block again on the same inputs, to find the cause of a difference."""
        self._reentrant = False
        """Whether the block ran without gradients, as under reentrant checkpointing."""
        self._ends = False
        """Whether `_end` is scheduled or has run."""
        self._before: BlockState | None = None

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `function(fn, *args)`, where `fn` is the block's own forward."""
        self.put_back(self)
        if not self.is_first_call():
            return self.function(fn, *args)
        unusual = compat.is_compiling() or compat.is_capturing() or compat.transforms()
        if not torch.is_grad_enabled() or unusual or any(map(has_no_values, args)):
            return self.function(fn, *args)
        self._names = {id(module): name for name, module in self.module.named_modules()}
        if isinstance(fn, functools.partial):
            watched = functools.partial(_Forward(self, fn.func), *fn.args, **fn.keywords)
        else:
            watched = functools.partial(_Forward(self, fn))
        inputs = [*args, *watched.keywords.values()]
        tensors = [leaf for leaf in compat.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        if all(self._take_room_for(tensor, is_input=True) for tensor in tensors):
            again, own_args = as_given(fn, args, ran=True)
            self._run = functools.partial(again, *own_args)
        self._before = BlockState(self.module, inputs if self._run is not None else [])
        try:
            output = self.function(watched, *args)
        finally:
            self._outer = None
        self._before.forward_has_ended()
        trained = any(parameter.requires_grad for parameter in self.module.parameters())
        if self._reentrant and trained and not any(has_graph(value) for value in compat.tree_leaves(output)):
            self.note(0, "gradient", (), "none reaches the block, although it is trained", 1.0)
            self._end()
        elif not (self.saved or self._reentrant):
            self._run = None
            self.done(self)
        return output

    def is_first_call(self) -> bool:
        """Whether this is the first call: another thread may run the same block at the same time."""
        return self._first_call.acquire(blocking=False)

    # --- the forward ---

    def begins(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> BlockState:
        """Record the state of the block before its first run."""
        assert self._before is not None
        with torch.no_grad(), compat.unseen_by_modes():
            self._before.first_run(args, keywords, self._take_room_for)
        return self._before

    @compat.untraced  # compiled parts of a block call it
    def pack(self, tensor: torch.Tensor) -> Any:
        """Saved-tensor hook: pass a tensor to the outer hooks, and keep a reference to it."""
        assert self._outer is not None
        held = _Held(self._outer[0](tensor), self._outer[1])
        self.saved += 1
        if not is_plain(tensor):
            self.left_out += 1
            return held
        parameter = parameter_of(tensor)
        if parameter is not None:
            if not self.whole:
                self.left_out += 1
                return held
        elif not self._take_room_for(tensor):
            self.left_out += 1
            return held
        held.original = _Original(tensor, parameter, self.saved, self._running_module())
        return held

    def _take_room_for(self, tensor: torch.Tensor, is_input: bool = False) -> bool:
        """Whether there is room to keep a tensor; if so, reserve it. Most actions keep inputs anyway."""
        if not is_plain(tensor):
            return is_input
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            if storage.nbytes() > self.room_bytes:
                return False
            self.room_bytes -= storage.nbytes()
            self.kept_bytes += 0 if is_input else storage.nbytes()
            self._storages.add(key)
        return True

    def _running_module(self) -> str:
        return next((self._names[id(module)] for module in compat.running_modules() if id(module) in self._names), "")

    # --- the backward ---

    @compat.untraced
    def unpack(self, held: _Held) -> torch.Tensor:
        """Saved-tensor hook: return what the outer hooks return, after comparing it with the original."""
        # Compare nothing in a second backward, or when an engine or other code reads what a node has saved.
        if self._before is None or self._before.running or not self._end_later():
            return held.load(held.value)
        tensor = held.load(held.value)
        original, held.original = held.original, None
        if original is not None and not compat.is_unused_random_state(tensor):
            with torch.no_grad(), compat.unseen_by_modes():
                self._compare(original, tensor)
        return tensor

    def _compare(self, original: _Original, tensor: torch.Tensor) -> None:
        if original.parameter is not None:
            if original.is_unchanged_parameter(tensor):
                self.compared += 1
                return
            if original.parameter_has_changed() and not original.was_moved(tensor):
                name = next((n for n, p in self.module.named_parameters() if p is original.parameter), "")
                text = "changed in place, or replaced, between the forward and the backward"
                self.note(original.place, "parameter", original.shape, f"`{name}` was {text}", 1.0)
                return
        elif original.has_changed():  # without checkpointing, torch raises an error in this backward
            self.left_out += 1
            return
        self.compared += 1
        found = difference_of(original.tensor, tensor)
        if found is not None:
            self.note(original.place, original.operation, original.shape, *found, module=original.module)

    def compare_outputs(self, first: list[torch.Tensor], again: list[torch.Tensor]) -> None:
        """Compare the outputs of the forward with those of the recomputation."""
        with torch.no_grad(), compat.unseen_by_modes():
            if len(first) != len(again):
                text = f"{len(again)} tensors come out of the recomputation, {len(first)} came out of the forward"
                self.note(1, "output", (), text, float("inf"))
                return
            for place, (one, other) in enumerate(zip(first, again, strict=True), 1):
                self.compared += 1
                found = difference_of(one, other)
                if found is not None:
                    self.note(place, "output", tuple(one.shape), *found)

    def note(self, place: int, operation: str, shape: tuple[int, ...], what: str, share: float, **more: str) -> None:
        """Record a difference of the tensor that was saved at `place`; `more` are further fields of `Difference`."""
        self.found.append(
            (place, Difference(self.block, more.pop("module", ""), operation, shape, what, share, **more))
        )

    def _end_later(self) -> bool:
        """Schedule `_end` for the end of the running backward; return False if none is running."""
        if not self._ends and compat.call_after_backward(self._end):
            self._ends = True
            assert self._before is not None
            self._before.backward_begins()
        return self._ends

    def _end(self) -> None:
        """End the check: find the cause of the differences, and call `done`."""
        self._ends = True
        before, self._before = self._before, None
        assert before is not None
        for name, kind in before.updated_again().items():
            self.note(self.saved + 1, kind, (), f"`{name}` was updated once more by the recomputation", 1.0)
        if self.found:
            self.found.sort(key=lambda pair: pair[0])
            cause = before.cause(self._run if self.whole else None, self.found[0][1], self._rebuilds)
            self.found = [(place, dataclasses.replace(found, cause=cause)) for place, found in self.found]
        self._run = None
        self.done(self)

    @property
    def _rebuilds(self) -> bool:
        return not getattr(self.function, "runs_block_again", True)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The differences, in the order in which the forward saved the tensors."""
        return tuple(found for _, found in self.found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        return copy.deepcopy(self.function, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return _the_same, (self.function,)


def _the_same(function: Any) -> Any:
    return function


class _Forward:
    """The forward of a block. Only its first call runs under the saved-tensor hooks of a check."""

    def __init__(self, check: Check, function: Callable[..., Any]) -> None:
        self.function = function
        self.check: Check | None = check
        """None once it is not needed: the outer hooks may hold this forward, and the check holds the hooks."""
        self.before: BlockState | None = None
        """The state of the first run, to compare with the recomputation."""
        self.ran = False
        self.first: list[torch.Tensor] | None = None
        """The outputs of the first call, if gradients were off and nothing was saved."""
        self.__self__ = getattr(function, "__self__", None)  # until transformers 5.17, engines find the block by it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check = self.check
        if not self.ran and check is not None:
            self.ran = True
            self.before = check.begins(args, kwargs)
            if not torch.is_grad_enabled():
                check._reentrant = True
                output = self.function(*args, **kwargs)
                self.first = [value.detach() for value in compat.tree_leaves(output) if torch.is_tensor(value)]
                return output
            self.check = None
            check._outer = compat.top_saved_tensor_hooks()
            if check._outer is None:
                return self.function(*args, **kwargs)
            with compat.inner_saved_tensor_hooks(check.pack, check.unpack):
                return self.function(*args, **kwargs)
        if self.before is not None and not self.before.running:
            before, self.before = self.before, None
            with torch.no_grad(), compat.unseen_by_modes():
                before.next_run(args, kwargs)
        if check is None:
            return self.function(*args, **kwargs)
        first, self.first, self.check = self.first or [], None, None
        check._end_later()
        output = self.function(*args, **kwargs)
        check.compare_outputs(first, [value for value in compat.tree_leaves(output) if torch.is_tensor(value)])
        return output


class _Held:
    """What autograd holds in place of a tensor."""

    __slots__ = ("load", "original", "value")

    def __init__(self, value: Any, load: Callable[[Any], torch.Tensor]) -> None:
        self.value, self.load = value, load
        """What the outer hooks packed, and their unpack hook."""
        self.original: _Original | None = None


class _Original:
    """A tensor that autograd has saved."""

    __slots__ = ("address", "module", "operation", "parameter", "place", "shape", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, parameter: nn.Parameter | None, place: int, module: str) -> None:
        self.parameter, self.place, self.module = parameter, place, module
        self.operation = "input" if tensor.grad_fn is None else tensor.grad_fn.name()
        self.shape = tuple(tensor.shape)
        self.tensor = tensor.detach()  # its graph would hold it: a reference cycle
        self.version = version_of(tensor)
        self.address = 0 if parameter is None else parameter.data_ptr()

    def has_changed(self) -> bool:
        return self.version >= 0 and self.tensor._version != self.version

    def is_unchanged_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the saved parameter, with unchanged values."""
        return parameter_of(tensor) is self.parameter and not self.parameter_has_changed()

    def was_moved(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the parameter's values at another address, such as an offloaded weight."""
        return not self.has_changed() and difference_of(self.tensor, tensor) is None

    def parameter_has_changed(self) -> bool:
        assert self.parameter is not None
        return self.has_changed() or self.parameter.data_ptr() != self.address
