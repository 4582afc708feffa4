"""Values: what the rebuild engine stores in autograd's graph in place of saved tensors.

A value is a kept tensor, or an operation on the values of its operands. It never refers to a node of the graph, so
there are no reference cycles, and a graph that is dropped without a backward frees everything.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_ckpt import compat
from hf_ckpt.engines.seen import Seen, version_of
from hf_ckpt.errors import ChangedBlockError, InPlaceError, RebuildError


class Work:
    """Counts what a block has rebuilt. All values of the block share it, and it does not refer to the model."""

    def __init__(self, block: str) -> None:
        self.block = block
        self.rebuilt = 0
        """Number of operations and modules that were run again."""


def refuse(seen: Seen, block: str, name: str) -> NoReturn:
    """Raise `InPlaceError` or `ChangedBlockError` for a tensor of a block that was overwritten since it was seen."""
    if version_of(seen.tensor) != seen.version:
        raise InPlaceError(block, seen.tensor, seen.version)
    raise ChangedBlockError(block, f"{name} was overwritten")


class Kept(Seen):
    """A kept tensor, without its graph: a view with the same storage and the same version counter.

    Args:
        tensor: the tensor.
        block: name of the block, for errors.
        address: whether its values must still be at the same address when it is needed, if it is a parameter.
    """

    __slots__ = ("block",)

    def __init__(self, tensor: torch.Tensor, block: str, *, address: bool = False) -> None:
        super().__init__(tensor if tensor.grad_fn is None else tensor.detach(), address=address)
        self.block = block

    @property
    def root(self) -> Kept:
        """The value that is held or rebuilt for this one: itself, because it is not a view."""
        return self

    def expect(self) -> None:
        """Count nothing: the tensor is held for as long as the graph."""

    def asked(self) -> None:
        """Count nothing."""

    def value(self) -> torch.Tensor:
        """Return the tensor.

        Raises `InPlaceError` if it has been changed in place since, and `ChangedBlockError` if it was overwritten.
        """
        if self.is_overwritten:
            refuse(self, self.block, f"a parameter of shape {list(self.tensor.shape)}")
        return self.tensor


class _Shared:
    """A tensor that is fetched or rebuilt once in a backward, for all its uses."""

    __slots__ = ("cached", "left", "uses")

    def __init__(self) -> None:
        self.cached: torch.Tensor | None = None
        """The tensor, while it has further uses."""
        self.uses = self.left = 0
        """Number of uses in one backward, and how many of them are still to come."""

    @property
    def root(self) -> Any:
        """The value that is held or rebuilt for this one: itself, because it is not a view."""
        return self

    def asked(self) -> None:
        """Count one of these uses as done. After the last one, drop the tensor and start counting again."""
        self.left -= 1
        if self.left <= 0:
            self.cached, self.left = None, self.uses


class Stored(_Shared):
    """A kept tensor that a pair of hooks stores elsewhere, such as in host memory.

    It is stored when its first use is known: some hooks count on every tensor being fetched.

    Args:
        tensor: the tensor.
        hooks: the functions that store it and return it.
        block: name of the block, for errors.
    """

    __slots__ = ("block", "hooks", "original", "packed", "storage", "version")

    def __init__(self, tensor: torch.Tensor, hooks: compat.torch.SavedTensorHooks, block: str) -> None:
        super().__init__()
        self.block = block
        self.hooks = hooks
        self.original: Seen | None = Seen(tensor)
        """The tensor itself while the forward of its block runs; then None."""
        self.version = self.original.version
        self.storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        """Its memory, which it does not keep."""
        self.packed: Any = None
        """What the hooks hold in place of the tensor."""

    def expect(self) -> None:
        """Count one more use of the tensor in a backward. At the first, store it.

        Raises `InPlaceError` if it was changed in the meantime.
        """
        if not self.uses:
            assert self.original is not None, "uses are known when the forward ends"
            if self.original.is_overwritten:
                refuse(self.original, self.block, "a tensor")
            self.packed = self.hooks[0](self.original.tensor)
        self.uses += 1
        self.left += 1

    def value(self) -> torch.Tensor:
        """Return the tensor: fetch it, or take it from the cache.

        Raises `InPlaceError` if the hooks hold the tensor itself, and it has been changed in place since.
        """
        if self.cached is None:
            tensor = self.hooks[1](self.packed)
            is_itself = tensor.untyped_storage()._cdata == self.storage.cdata
            if is_itself and version_of(tensor) != self.version:
                raise InPlaceError(self.block, tensor, self.version)
            self.cached = tensor
        return self.cached


class Rebuilt(_Shared):
    """A dropped tensor that an operation rebuilds from the values of its operands when it is needed.

    Args:
        work: counts the rebuilding.
        operation: computes the tensor from the operands' tensors.
        operands: values of the operands.
    """

    __slots__ = ("layout", "operands", "operation", "work")

    def __init__(self, work: Work, operation: Callable[..., torch.Tensor], operands: list[Value]) -> None:
        super().__init__()
        self.work = work
        self.operation = operation
        self.operands = operands
        self.layout: tuple[torch.Size, tuple[int, ...], torch.dtype] | None = None
        """Shape, strides and type that the tensor must have; None if unknown."""

    def expect(self) -> None:
        """Count one more use of the tensor in a backward. At the first, it begins to use its operands."""
        if not self.uses:
            for operand in self.operands:
                if type(operand) is not Kept:
                    operand.root.expect()
        self.uses += 1
        self.left += 1

    def value(self) -> torch.Tensor:
        """Return the tensor: rebuild it, or take it from the cache. Cache it while it has further uses.

        Raises `RebuildError` if its shape or type differs from the forward.
        """
        if self.cached is not None:
            return self.cached
        tensor = self.operation(*[operand.value() for operand in self.operands])
        for operand in self.operands:
            if type(operand) is not Kept:
                operand.root.asked()
        self.work.rebuilt += 1
        if self.layout is not None:
            shape, stride, dtype = self.layout
            if tensor.shape != shape or tensor.dtype is not dtype:
                raise RebuildError(
                    self.work.block,
                    f"an operation gave {tensor.dtype} {list(tensor.shape)} when it was run again in backward, but "
                    f"{dtype} {list(shape)} in the forward.",
                )
            if tensor.stride() != stride:
                tensor = torch.empty_strided(shape, stride, dtype=dtype, device=tensor.device).copy_(tensor)
        if self.left > 1:
            self.cached = tensor
        return tensor


class View:
    """A view of another value. `root` is the value at the end of a chain of views."""

    __slots__ = ("of", "operation", "root")

    def __init__(self, of: Value, operation: Callable[..., torch.Tensor]) -> None:
        self.of = of
        self.operation = operation
        self.root: Kept | Stored | Rebuilt = of.root if isinstance(of, View) else of  # a property of others is a call

    def value(self) -> torch.Tensor:
        """Return the view."""
        return self.operation(self.of.value())


Value = Kept | Stored | Rebuilt | View
"""What provides a tensor of the forward in backward."""


class Replay:
    """One call of a small module that is run again as a whole, for its output and for what autograd saved inside.

    It runs with the parameters and attributes that the module had in the forward, such as the `eps` of a norm.

    Args:
        work: counts the run.
        module: the module.
        source: the value of its input.
        module_input: its input in the forward.
        stay: whether its parameters stay on their device, unsharded, throughout a step, and so keep their addresses.
    """

    __slots__ = (
        "__weakref__",
        "attributes",
        "autocast",
        "inside",
        "module",
        "needs_gradient",
        "parameters",
        "saved",
        "source",
        "work",
    )

    def __init__(self, work: Work, module: nn.Module, source: Value, module_input: torch.Tensor, stay: bool) -> None:
        self.work = work
        self.module = module
        self.source = source
        self.needs_gradient = module_input.requires_grad
        dtype = compat.devices.autocast_dtype(module_input.device.type)
        self.autocast = None if dtype is None else (module_input.device.type, dtype)
        self.saved = 0
        """Number of tensors that autograd saved inside the module in the forward."""
        self.inside: list[torch.Tensor | None] = []
        """The same tensors after the module was run again; None for one that was already returned."""
        self.attributes = vars(module).copy()
        """The module's attributes in its forward."""
        self.parameters = {
            name: Seen(parameter, address=stay)
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        """Name -> parameter of the module in its forward."""

    def __call__(self) -> torch.Tensor:
        """Run the module again and fill `inside`. Returns its output without a graph.

        Raises `InPlaceError` or `ChangedBlockError` if one of its parameters has changed since the forward, and
        `RebuildError` if it saves a different number of tensors.
        """
        run = self.module.forward if self._is_as_in_the_forward() else self._run_as_in_the_forward
        inside: list[torch.Tensor | None] = []
        source = self.source.value().detach().requires_grad_(self.needs_gradient)
        autocast = torch.autocast(*self.autocast) if self.autocast else contextlib.nullcontext()
        with torch.enable_grad(), autocast, torch.autograd.graph.saved_tensors_hooks(inside.append, never):
            output: torch.Tensor = run(source)
        self.source.root.asked()
        self.inside = inside.copy()
        inside.clear()  # else a cycle: this run's graph holds the list through its hook, and the tensors hold the graph
        if len(self.inside) != self.saved:
            raise RebuildError(
                self.work.block,
                f"{type(self.module).__name__} saved {self.saved} tensors in the forward and {len(self.inside)} when "
                "it was run again in backward.",
            )
        return output.detach()

    def _is_as_in_the_forward(self) -> bool:
        """Whether the module has the attributes and parameters of its forward. Raises errors as `refuse` does."""
        attributes = vars(self.module)
        current = attributes["_parameters"]
        unchanged = list(attributes) == list(self.attributes)
        # Compared by identity: values may be tensors or arrays, and equal numbers do no harm.
        unchanged = unchanged and all(map(operator.is_, attributes.values(), self.attributes.values()))
        for name, seen in self.parameters.items():
            if seen.is_overwritten:
                refuse(seen, self.work.block, f"`{name}` of {type(self.module).__name__}")
            # torch.func.functional_call replaced it in the forward, or it has been frozen or unfrozen since.
            if current.get(name) is not seen.tensor or seen.tensor.requires_grad != seen.trained:
                unchanged = False
        return unchanged

    def _run_as_in_the_forward(self, source: torch.Tensor) -> Any:
        """Run the module with the attributes and parameters of the forward, and put the present ones back."""
        attributes = vars(self.module)
        now = attributes.copy()
        lent = {name: seen.tensor.detach().requires_grad_(seen.trained) for name, seen in self.parameters.items()}
        attributes.clear()
        attributes.update(self.attributes, _parameters=dict.fromkeys(now["_parameters"]) | lent)
        try:
            return self.module.forward(source)
        finally:
            attributes.clear()
            attributes.update(now)


class Inside:
    """Replaces a tensor that autograd saved inside a module that is run again: the next one of `replay`."""

    __slots__ = ("index", "replay")

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        if not replay.saved and type(replay.source) is not Kept:
            replay.source.root.expect()
        self.index = replay.saved
        replay.saved += 1

    def value(self) -> torch.Tensor:
        """Return the tensor; run the module again if necessary."""
        replay = self.replay
        if not replay.inside or replay.inside[self.index] is None:
            replay()
            replay.work.rebuilt += 1
        tensor = replay.inside[self.index]
        assert tensor is not None
        replay.inside[self.index] = None
        return tensor


class _Reading(threading.local):
    """Whether this thread is reading what a node has saved, and the value found in place of a tensor."""

    on = False
    found: Rebuilt | View | Stored | None = None


_reading = _Reading()
_NOTHING = torch.empty(0, device="cpu")


def read(node: Any, name: str) -> Any:
    """Return what an autograd node has saved under a name; for a dropped or stored tensor its value, without fetching.

    Args:
        node: the node.
        name: the name. Returns None if the node has saved nothing under it.
    """
    _reading.on, _reading.found = True, None
    try:
        saved = getattr(node, f"_saved_{name}", None)
        return saved if _reading.found is None else _reading.found
    finally:
        _reading.on, _reading.found = False, None


@compat.torch.untraced
def unpack(value: Value | Inside) -> torch.Tensor:
    """Saved-tensor hook: return the tensor. It is rebuilt without autocast: its operands have the right types."""
    if type(value) is Kept and not value.is_overwritten:
        return value.tensor
    if _reading.on and isinstance(value, (Rebuilt, View, Stored)):
        _reading.found = value
        return _NOTHING
    if type(value) is Stored and value.original is not None:  # read from a node during the forward
        return value.original.tensor
    if torch.is_grad_enabled() or compat.devices.autocast_is_on():
        with torch.no_grad(), compat.devices.autocast_off():
            return unpack(value)
    tensor = value.value()
    if type(value) is not Inside:
        value.root.asked()  # type: ignore[union-attr]
    return tensor


def never(value: Any) -> torch.Tensor:
    """Replaces `unpack` in a graph that no backward uses. Raises `AssertionError`."""
    raise AssertionError("a replayed module's own graph was asked for a saved tensor")
