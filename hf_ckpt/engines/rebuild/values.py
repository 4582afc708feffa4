"""Values: what the rebuild engine leaves in autograd's graph in the place of saved tensors.

A value is a tensor that stays, or an operation on the values of its operands. It never refers to a node of the graph,
so no reference cycle arises, and a graph that is dropped without a backward frees everything.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.forward_state import address_of
from hf_ckpt.errors import ChangedBlockError, HfCkptError, InPlaceError, RebuildError, ReplayError
from hf_ckpt.logs import warn_once

log = logging.getLogger(__name__)

NO_GRAPH = "(no graph)"
"""Stands for the name of a node in reports, for tensors that no node made: masks, position tables, statistics."""


MASKS = "(masks as bits)"
"""Stands for the name of a node in reports, for the bits of dropout's masks."""


class Work:
    """The count of what a block has rebuilt. All values of the block share it, and it holds nothing of the model."""

    def __init__(self, block: str) -> None:
        self.block = block
        self.rebuilt = 0
        """Number of operations and modules that were run again."""
        self.observer: Callable[[], contextlib.AbstractContextManager[None]] | None = None
        """Makes a context that is entered around all rebuilding; set by measurements, else None."""

    def tried(self, held: TrialValue) -> bool:
        """Whether a value on trial can be rebuilt. The work that this takes is not counted."""
        before = self.rebuilt
        try:
            return held.holds()
        finally:
            self.rebuilt = before

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "observer": None}  # measurements belong to this process


class Kept:
    """A tensor that stays, without its graph: a view with the same storage and the same version counter.

    Args:
        tensor: the tensor.
        block: name of the block, for errors.
        copied: whether its storage is another one than the forward used.
        with_graph: whether `tensor` may be held as it is, because its graph leads to nothing but a leaf.
        address: the address that its values must still have when it is needed; 0 for any.
    """

    __slots__ = ("address", "block", "copied", "tensor", "version")

    def __init__(
        self, tensor: torch.Tensor, block: str, *, copied: bool = False, with_graph: bool = False, address: int = 0
    ) -> None:
        self.block = block
        self.copied = copied
        self.address = address
        try:
            self.version = tensor._version
        except RuntimeError:  # of an inference tensor
            self.version = -1
        """How often the tensor had been changed in place; -1 where that is not known."""
        self.tensor = tensor if with_graph or tensor.grad_fn is None else tensor.detach()

    @property
    def root(self) -> Kept:
        """The value that is held or rebuilt for this one: itself, as it is no view."""
        return self

    def storage(self) -> tuple[Any, int]:
        """Return a key that tells its storage from others, and the storage's bytes."""
        storage = self.tensor.untyped_storage()
        return storage._cdata, storage.nbytes()

    def expect(self) -> None:
        """Note that one more place will ask for the tensor in a backward."""

    def asked(self) -> None:
        """Note that one of these places has the tensor."""

    def value(self) -> torch.Tensor:
        """Return the tensor.

        Raises `InPlaceError` if it was changed in place since, and `ChangedBlockError` if it was given other values.
        """
        tensor = self.tensor
        if self.version >= 0 and tensor._version != self.version:
            raise InPlaceError(self.block, tuple(tensor.shape), self.version, tensor._version)
        if self.address and tensor.data_ptr() != self.address:
            raise ChangedBlockError(self.block, f"a parameter of shape {list(tensor.shape)} was overwritten")
        return tensor


class _Shared:
    """A tensor that is fetched or rebuilt once in a backward, for all places that ask for it."""

    __slots__ = ("cached", "left", "uses")

    def __init__(self) -> None:
        self.cached: torch.Tensor | None = None
        """The tensor, while further places will ask for it."""
        self.uses = self.left = 0
        """Number of places that ask for it in one backward, and how many of them have not asked yet."""

    def expect(self) -> None:
        """Note that one more place will ask for the tensor in a backward."""
        self.uses += 1
        self.left += 1

    def asked(self) -> None:
        """Note that one of these places has the tensor. After the last one it is dropped, and counting begins anew."""
        self.left -= 1
        if self.left <= 0:
            self.cached, self.left = None, self.uses


class KeptByUser(_Shared):
    """A tensor that stays in the form that the user's saved-tensor hooks around the model give it (`save_on_cpu`).

    Whether it is changed in place is for those hooks to find. They may be able to unpack it once only.

    Args:
        tensor: the tensor.
        hooks: the user's hooks.
        copied: whether its storage is another one than the forward used.
    """

    __slots__ = ("copied", "nbytes", "original", "packed", "restore", "version")

    def __init__(self, tensor: torch.Tensor, hooks: compat.SavedTensorHooks, *, copied: bool = False) -> None:
        super().__init__()
        self.copied = copied
        self.version = -1 if tensor.is_inference() else tensor._version
        self.nbytes = tensor.nbytes
        self.original: torch.Tensor | None = tensor
        """The tensor itself, while the forward of its block runs; then None."""
        pack, self.restore = hooks
        self.packed = pack(tensor)

    @property
    def root(self) -> KeptByUser:
        """The value that is held or rebuilt for this one: itself, as it is no view."""
        return self

    def storage(self) -> tuple[Any, int]:
        """Return a key of its own, since the hooks may have copied the tensor, and the bytes that the tensor had."""
        return (self,), self.nbytes  # not `self`: sets of these keys hold values as well

    def value(self) -> torch.Tensor:
        """Return the tensor that the hooks give back."""
        if self.cached is None:
            self.cached = self.restore(self.packed)
        return self.cached


Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and type of a tensor."""


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return shape, strides and type of a tensor."""
    return tensor.size(), tensor.stride(), tensor.dtype


def is_cast(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `tensor` holds the values of the 16-bit `source` in float32."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or source.dtype.itemsize != 2:
        return False
    found, wanted = tensor.reshape(-1), source.detach().reshape(-1)
    few = slice(0, 64)  # most tensors that are no cast differ in these
    return torch.equal(found[few], wanted[few].float()) and torch.equal(found, wanted.float())


class Rebuilt(_Shared):
    """A tensor that is rebuilt when it is needed, by an operation on the values of its operands.

    Args:
        work: counts it.
        op_class: class of the operation, or name of the module that is run again.
        operation: makes the tensor from the operands' tensors.
        operands: their values.
    """

    __slots__ = ("layout", "op_class", "operands", "operation", "work")

    def __init__(
        self, work: Work, op_class: str, operation: Callable[..., torch.Tensor], operands: list[Value]
    ) -> None:
        super().__init__()
        self.work = work
        self.op_class = op_class
        self.operation = operation
        self.operands = operands
        self.layout: Layout | None = None
        """What the tensor must be like; None if that is not known."""
        for operand in operands:
            if type(operand) is not Kept:
                operand.root.expect()

    @property
    def root(self) -> Rebuilt:
        """The value that is held or rebuilt for this one: itself, as it is no view."""
        return self

    def value(self) -> torch.Tensor:
        """Return the tensor: rebuild it, or take it from the cache while further places wait for it.

        Raises `RebuildError` if it has another shape or type than in the forward.
        """
        cached = self.cached
        if cached is not None:
            return cached
        tensor = self.operation(*[operand.value() for operand in self.operands])
        for operand in self.operands:
            if type(operand) is not Kept:
                operand.root.asked()
        if type(self.operation) is not Replay:  # which counts itself
            self.work.rebuilt += 1
        if self.layout is not None:
            shape, stride, dtype = self.layout
            if tensor.shape != shape or tensor.dtype is not dtype:
                raise RebuildError(
                    self.work.block, self.op_class, (tuple(shape), dtype), (tuple(tensor.shape), tensor.dtype)
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
        self.root: Kept | KeptByUser | Rebuilt = of.root

    def value(self) -> torch.Tensor:
        """Return the view."""
        return self.operation(self.of.value())


Value = Kept | KeptByUser | Rebuilt | View
"""How to have a tensor of the forward again."""


class Replay:
    """One call of a small module that is run again as a whole, for its output and for what autograd saved inside.

    Args:
        work: counts it.
        module: the module.
        source: the value of its input.
        given: its input in the forward.
        checked: whether the number of tensors that it saves is counted, and must be the same when it runs again.
        whole: whether its parameters lie whole on their device throughout a step, and so must keep their addresses.
    """

    __slots__ = (
        "__weakref__",
        "autocast",
        "checked",
        "inside",
        "module",
        "needs_gradient",
        "parameters",
        "saved",
        "source",
        "work",
    )

    def __init__(
        self, work: Work, module: nn.Module, source: Value, given: torch.Tensor, *, checked: bool = True, whole: bool
    ) -> None:
        self.work = work
        self.module = module
        self.source = source
        self.needs_gradient = given.requires_grad
        device_type = given.device.type
        self.autocast = (
            (device_type, torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else None
        )
        self.checked = checked
        self.saved = 0
        """Number of tensors that autograd saved inside the module in the forward."""
        self.inside: list[torch.Tensor | None] = []
        """The same tensors after the module was run again; None for one that was handed out."""
        self.parameters = [
            (name, parameter, parameter._version, address_of(parameter) if whole else 0, parameter.requires_grad)
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        """(name, parameter, version, address or 0, whether it is trained) of those that the module ran with."""
        source.root.expect()

    def __call__(self) -> torch.Tensor:
        """Run the module again and fill `inside`. Returns its output without a graph.

        Raises `InPlaceError` or `ChangedBlockError` if one of its parameters has other values than in the forward, and
        `ReplayError` if it saves another number of tensors than then.
        """
        current = self.module._parameters
        run: Callable[..., Any] = self.module.forward
        for name, parameter, version, address, trained in self.parameters:
            if parameter._version != version:
                raise InPlaceError(self.work.block, tuple(parameter.shape), version, parameter._version)
            if address and parameter.data_ptr() != address:
                raise ChangedBlockError(self.work.block, f"`{name}` of {type(self.module).__name__} was overwritten")
            # torch.func.functional_call replaced it in the forward, or it was frozen or unfrozen since.
            if current.get(name) is not parameter or parameter.requires_grad != trained:
                run = self._with_its_own
        inside: list[torch.Tensor | None] = []
        source = self.source.value().detach().requires_grad_(self.needs_gradient)
        autocast = torch.autocast(*self.autocast) if self.autocast else contextlib.nullcontext()
        with torch.enable_grad(), autocast, torch.autograd.graph.saved_tensors_hooks(inside.append, never):
            output: torch.Tensor = run(source)
        self.source.root.asked()
        self.work.rebuilt += 1
        made = inside.copy()
        inside.clear()  # else a cycle: the graph of this run holds the list by its hook, and the tensors hold the graph
        if not self.checked:
            return output.detach()
        if len(made) != self.saved:
            raise ReplayError(self.work.block, type(self.module).__name__, self.saved, len(made))
        self.inside = made
        return output.detach()

    def _with_its_own(self, source: torch.Tensor) -> Any:
        """Run the module on the parameters of the forward, which are trained or frozen as they were then."""
        lent = {name: parameter.detach().requires_grad_(trained) for name, parameter, *_, trained in self.parameters}
        return torch.func.functional_call(self.module, lent, source)

    def take(self, index: int) -> torch.Tensor:
        """Hand out the tensor that was saved as number `index` inside; the module is run again if need be."""
        found = self.inside[index] if self.inside else None
        if found is None:
            self()
            found = self.inside[index]
        assert found is not None
        self.inside[index] = None
        return found


class Inside:
    """Stands for a tensor that autograd saved inside a module that is run again: the next one of `replay`."""

    __slots__ = ("index", "replay")

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.index = replay.saved
        replay.saved += 1


class TrialValue:
    """A value on trial, together with its tensor, until that was rebuilt and found to be the same.

    Blocks whose code is not known are tried in this way in their first forward.
    """

    __slots__ = ("made_by", "tensor", "value")

    def __init__(self, value: Value | Inside, tensor: torch.Tensor, block: str) -> None:
        self.value = value
        self.tensor: Kept | None = Kept(tensor, block)
        self.made_by = NO_GRAPH if tensor.grad_fn is None else tensor.grad_fn.name()

    def holds(self) -> bool:
        """Whether the value gives the same tensor, bit for bit. Values must be asked in the order of a backward."""
        assert self.tensor is not None
        with torch.no_grad(), compat.autocast_off():
            try:
                found, wanted = _hand_out(self.value), self.tensor.value()
            except (RuntimeError, HfCkptError) as error:  # something that cannot be run again
                if compat.is_out_of_memory(error):
                    raise
                return False
            if found.shape != wanted.shape or found.dtype != wanted.dtype:
                return False
            return torch.equal(found, wanted) or bool(((found == wanted) | (found != found) & (wanted != wanted)).all())

    def storage(self) -> tuple[Any, int]:
        """Return a key that tells the tensor's storage from others, and the storage's bytes."""
        assert self.tensor is not None
        return self.tensor.storage()

    def believe(self, done: set[Any]) -> None:
        """Rely on the value from now on, and free what the trial has made; `done` are values where this was done."""
        self.tensor = None
        _let_go(self.value, done)

    def keep(self) -> None:
        """Keep the tensor itself in place of the value, because some value of the block is wrong."""
        assert self.tensor is not None
        self.value = self.tensor


def _let_go(value: Value | Inside, done: set[Any]) -> None:
    """Free the tensors that were rebuilt for a value and for its operands."""
    made = value.replay if type(value) is Inside else value.root  # type: ignore[union-attr]
    if made in done:
        return
    done.add(made)
    if type(made) is Replay:
        made.inside = []
        _let_go(made.source, done)
    elif isinstance(made, _Shared):
        made.cached, made.left = None, made.uses
        if type(made) is Rebuilt:
            if type(made.operation) is Replay:
                made.operation.inside = []
                _let_go(made.operation.source, done)
            for operand in made.operands:
                _let_go(operand, done)


class _Reading(threading.local):
    """Whether this thread reads what a node has saved, and the value that was found in the place of a tensor."""

    on = False
    found: Rebuilt | View | None = None


_reading = _Reading()
_NOTHING = torch.empty(0, device="cpu")


def read(node: Any, name: str) -> Any:
    """Return what an autograd node has saved, or, without rebuilding it, the value of a tensor that is to be rebuilt.

    Args:
        node: the node.
        name: the name that it saves something under. None is returned for a name that the node does not have.
    """
    _reading.on, _reading.found = True, None
    try:
        saved = getattr(node, f"_saved_{name}", None)
        return saved if _reading.found is None else _reading.found
    finally:
        _reading.on, _reading.found = False, None


@compat.untraced
def unpack(value: Value | Inside | TrialValue) -> torch.Tensor:
    """Saved-tensor hook: return the tensor. It is rebuilt without autocast: its operands have the right types."""
    if type(value) is TrialValue:
        value = value.value
    assert not isinstance(value, TrialValue)
    if type(value) is Kept:
        return value.value()
    if _reading.on and isinstance(value, (Rebuilt, View)):
        _reading.found = value
        return _NOTHING
    if type(value) is KeptByUser and value.original is not None:  # read from a node during the forward
        return value.original
    work: Work | None = None  # of the value, if it has to be rebuilt now
    if type(value) is Inside:
        ready = value.replay.inside
        if not ready or ready[value.index] is None:
            work = value.replay.work
    else:
        root = value.root  # type: ignore[union-attr]
        if type(root) is Rebuilt and root.cached is None:
            work = root.work
    observer = work.observer if work is not None else None
    if work is None or (observer is None and not torch.is_grad_enabled() and not compat.autocast_is_on()):
        return _hand_out(value)
    with contextlib.ExitStack() as around:
        around.enter_context(torch.no_grad())
        around.enter_context(compat.autocast_off())
        if observer is not None:
            around.enter_context(observer())
        return _hand_out(value)


def _hand_out(value: Value | Inside) -> torch.Tensor:
    """Return the tensor of a value for one of the places that ask for it."""
    if type(value) is Inside:
        return value.replay.take(value.index)
    assert not isinstance(value, Inside)
    tensor = value.value()
    value.root.asked()
    return tensor


def never(value: Any) -> torch.Tensor:
    """Stands for `unpack` where no backward will come. Raises `AssertionError`."""
    raise AssertionError("a replayed module's own graph was asked for a saved tensor")


def warn_nothing_dropped(save: tuple[str, ...], compiled: bool) -> None:
    """Warn once of a block in which nothing is rebuilt; `compiled` says whether it is compiled in itself."""
    warn_once(
        log,
        "`selective` with save %s found nothing in a block that can be rebuilt, so every activation is kept there. %s",
        list(save),
        "It is compiled in itself: compile the whole model instead, or replace each block by `torch.compile(block)`; "
        "or use `full`."
        if compiled
        else "Use `full` for such blocks.",
    )


def shaped(shape: torch.Size, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return `x` in another shape and, if given, another type."""
    return x.to(dtype).view(shape) if dtype is not None else x.view(shape)
