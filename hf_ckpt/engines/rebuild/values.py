"""Values: what the rebuild engine stores in autograd's graph in place of saved tensors.

A value is a kept tensor, or an operation on the values of its operands. It never refers to a node of the graph, so
there are no reference cycles, and a graph that is dropped without a backward frees everything.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.seen import address_of
from hf_ckpt.errors import ChangedBlockError, InPlaceError, RebuildError


class Work:
    """Counts what a block has rebuilt. All values of the block share it, and it does not refer to the model."""

    def __init__(self, block: str) -> None:
        self.block = block
        self.rebuilt = 0
        """Number of operations and modules that were run again."""


class Kept:
    """A kept tensor, without its graph: a view with the same storage and the same version counter.

    Args:
        tensor: the tensor.
        block: name of the block, for errors.
        is_leaf: whether it is a parameter or a view of one. It is held with its graph, which leads only to a leaf.
        address: the address that its values must still have when it is needed; 0 for any.
    """

    __slots__ = ("address", "block", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, block: str, *, is_leaf: bool = False, address: int = 0) -> None:
        self.block = block
        self.address = address
        self.version = -1 if tensor.is_inference() else tensor._version
        """The in-place version of the tensor; -1 for inference tensors, which have none."""
        self.tensor = tensor if is_leaf or tensor.grad_fn is None else tensor.detach()

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
        tensor = self.tensor
        if self.version >= 0 and tensor._version != self.version:
            raise InPlaceError(self.block, tensor, self.version)
        if self.address and tensor.data_ptr() != self.address:
            raise ChangedBlockError(self.block, f"a parameter of shape {list(tensor.shape)} was overwritten")
        return tensor


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

    def expect(self) -> None:
        """Count one more use of the tensor in a backward."""
        self.uses += 1
        self.left += 1

    def asked(self) -> None:
        """Count one of these uses as done. After the last one, drop the tensor and start counting again."""
        self.left -= 1
        if self.left <= 0:
            self.cached, self.left = None, self.uses


class Stored(_Shared):
    """A kept tensor that a pair of hooks stores elsewhere, such as in host memory. They detect in-place changes.

    Args:
        tensor: the tensor.
        hooks: the functions that store it and return it.
    """

    __slots__ = ("original", "packed", "restore", "version")

    def __init__(self, tensor: torch.Tensor, hooks: compat.torch.SavedTensorHooks) -> None:
        super().__init__()
        self.version = tensor._version
        self.original: torch.Tensor | None = tensor
        """The tensor itself while the forward of its block runs; then None."""
        pack, self.restore = hooks
        self.packed = pack(tensor)

    def value(self) -> torch.Tensor:
        """Return the tensor: fetch it, or take it from the cache."""
        if self.cached is None:
            self.cached = self.restore(self.packed)
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
        for operand in operands:
            if type(operand) is not Kept:
                operand.root.expect()

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
        self.root: Kept | Stored | Rebuilt = of.root

    def value(self) -> torch.Tensor:
        """Return the view."""
        return self.operation(self.of.value())


Value = Kept | Stored | Rebuilt | View
"""What provides a tensor of the forward in backward."""


class Replay:
    """One call of a small module that is run again as a whole, for its output and for what autograd saved inside.

    Args:
        work: counts the run.
        module: the module.
        source: the value of its input.
        module_input: its input in the forward.
        stay: whether its parameters stay on their device, unsharded, throughout a step, and so keep their addresses.
    """

    __slots__ = (
        "__weakref__",
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
        self.parameters = [
            (name, parameter, parameter._version, address_of(parameter) if stay else 0, parameter.requires_grad)
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        """(name, parameter, version, address or 0, whether it requires gradients) in the module's forward."""
        if type(source) is not Kept:
            source.root.expect()

    def __call__(self) -> torch.Tensor:
        """Run the module again and fill `inside`. Returns its output without a graph.

        Raises `InPlaceError` or `ChangedBlockError` if one of its parameters has changed since the forward, and
        `RebuildError` if it saves a different number of tensors.
        """
        current = self.module._parameters
        run: Callable[..., Any] = self.module.forward
        for name, parameter, version, address, trained in self.parameters:
            if parameter._version != version:
                raise InPlaceError(self.work.block, parameter, version)
            if address and parameter.data_ptr() != address:
                raise ChangedBlockError(self.work.block, f"`{name}` of {type(self.module).__name__} was overwritten")
            # torch.func.functional_call replaced it in the forward, or it has been frozen or unfrozen since.
            if current.get(name) is not parameter or parameter.requires_grad != trained:
                run = self._with_parameters_of_the_forward
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

    def _with_parameters_of_the_forward(self, source: torch.Tensor) -> Any:
        """Run the module on the parameters of the forward, with the `requires_grad` that they had then."""
        lent = {name: parameter.detach().requires_grad_(trained) for name, parameter, *_, trained in self.parameters}
        return torch.func.functional_call(self.module, lent, source)


class Inside:
    """Replaces a tensor that autograd saved inside a module that is run again: the next one of `replay`."""

    __slots__ = ("index", "replay")

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
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
    found: Rebuilt | View | None = None


_reading = _Reading()
_NOTHING = torch.empty(0, device="cpu")


def read(node: Any, name: str) -> Any:
    """Return what an autograd node has saved under a name. For a dropped tensor, return its value without rebuilding.

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
    if type(value) is Kept:
        return value.value()
    if _reading.on and isinstance(value, (Rebuilt, View)):
        _reading.found = value
        return _NOTHING
    if type(value) is Stored and value.original is not None:  # read from a node during the forward
        return value.original
    if not (torch.is_grad_enabled() or compat.devices.autocast_is_on()):
        return _hand_out(value)
    with torch.no_grad(), compat.devices.autocast_off():
        return _hand_out(value)


def _hand_out(value: Value | Inside) -> torch.Tensor:
    """Return the tensor of a value, and count one use as done."""
    tensor = value.value()
    if type(value) is not Inside:
        value.root.asked()  # type: ignore[union-attr]
    return tensor


def never(value: Any) -> torch.Tensor:
    """Replaces `unpack` in a graph that no backward uses. Raises `AssertionError`."""
    raise AssertionError("a replayed module's own graph was asked for a saved tensor")
