"""What the rebuild engine leaves in the graph in place of saved tensors: values, free of graph nodes.

A value never refers to a node of the graph that holds it: no reference cycle arises, and a graph that is dropped
without a backward frees everything.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError, InPlaceError, ReplayError

NO_GRAPH = "(no graph)"
"""In place of the name of a node: masks, position tables, statistics, which no node made."""


class Work:
    """What one block rebuilt in backward, and who watches. Values hold it; it holds nothing of the model."""

    def __init__(self, block: str) -> None:
        self.block = block
        self.rebuilt = 0
        """Operations and modules run again."""
        self.observer: Callable[[], contextlib.AbstractContextManager[None]] | None = None
        """Entered around every rebuilding; set by measurements."""

    def tried(self, witness: Witness) -> bool:
        """Whether it holds; what that takes is not counted."""
        before = self.rebuilt
        try:
            return witness.holds()
        finally:
            self.rebuilt = before

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "observer": None}  # measurements belong to this process


class Kept:
    """A tensor that stays: a view of it (same storage, same version counter) without its graph."""

    __slots__ = ("block", "copied", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, block: str, *, copied: bool = False, with_graph: bool = False) -> None:
        """`with_graph` saves the detaching of what leads to nothing but a leaf."""
        self.block = block
        self.copied = copied
        """Whether the storage is not the one the forward used."""
        self.version = -1 if tensor.is_inference() else tensor._version
        self.tensor = tensor if with_graph or tensor.grad_fn is None else tensor.detach()

    @property
    def root(self) -> Kept:
        """What has to be there for this value: itself."""
        return self

    def storage(self) -> tuple[Any, int]:
        """What tells its storage from others, and its bytes."""
        storage = self.tensor.untyped_storage()
        return storage._cdata, storage.nbytes()

    def expect(self) -> None:
        """One more place will ask for it."""

    def asked(self) -> None:
        """One of the places has it."""

    def value(self) -> torch.Tensor:
        """The tensor. Raises `InPlaceError` when it was changed since."""
        tensor = self.tensor
        if self.version >= 0 and tensor._version != self.version:
            raise InPlaceError(self.block, tuple(tensor.shape), self.version, tensor._version)
        return tensor


class _Shared:
    """A tensor that has to be fetched or made once, for all who ask for it in one backward."""

    __slots__ = ("cached", "left", "uses")

    def __init__(self) -> None:
        self.cached: torch.Tensor | None = None
        self.uses = self.left = 0
        """Places that will ask for it in one backward, and how many of them have not asked yet."""

    def expect(self) -> None:
        """One more place will ask for it."""
        self.uses += 1
        self.left += 1

    def asked(self) -> None:
        """One of the places has it. After the last one it is dropped; it can be had again (`retain_graph`)."""
        self.left -= 1
        if self.left <= 0:
            self.cached, self.left = None, self.uses


class KeptByUser(_Shared):
    """A tensor that stays as the saved-tensor hooks around the model have it: on another device, packed. A change in
    place is theirs to find; they may unpack once only."""

    __slots__ = ("copied", "nbytes", "original", "packed", "restore", "version")

    def __init__(self, tensor: torch.Tensor, hooks: compat.SavedTensorHooks, *, copied: bool = False) -> None:
        super().__init__()
        self.copied = copied
        self.version = -1 if tensor.is_inference() else tensor._version
        self.nbytes = tensor.nbytes
        self.original: torch.Tensor | None = tensor
        """The tensor itself, while the forward of its block runs."""
        pack, self.restore = hooks
        self.packed = pack(tensor)

    @property
    def root(self) -> KeptByUser:
        """What has to be there for this value: itself."""
        return self

    def storage(self) -> tuple[Any, int]:
        """Hooks may have copied it, so it has one of its own; the bytes it had."""
        return (self,), self.nbytes  # not itself: those who count tell storages from values

    def value(self) -> torch.Tensor:
        """What the hooks give back."""
        if self.cached is None:
            self.cached = self.restore(self.packed)
        return self.cached


class Recipe(_Shared):
    """A tensor that is made again: an operation on operand values."""

    __slots__ = ("op_class", "operands", "operation", "stride", "work")

    def __init__(
        self, work: Work, op_class: str, operation: Callable[..., torch.Tensor], operands: list[Value]
    ) -> None:
        super().__init__()
        self.work = work
        self.op_class = op_class
        self.operation = operation
        self.operands = operands
        self.stride: tuple[int, ...] | None = None
        for operand in operands:
            if type(operand) is not Kept:
                operand.root.expect()

    @property
    def root(self) -> Recipe:
        """What has to be there for this value: itself."""
        return self

    def value(self) -> torch.Tensor:
        """Make it, or return it while others wait for it, too."""
        cached = self.cached
        if cached is not None:
            return cached
        tensor = self.operation(*[operand.value() for operand in self.operands])
        for operand in self.operands:
            if type(operand) is not Kept:
                operand.root.asked()
        if type(self.operation) is not Replay:  # which counts by itself
            self.work.rebuilt += 1
        if self.stride is not None and tensor.stride() != self.stride:
            laid_out = torch.empty_strided(tensor.shape, self.stride, dtype=tensor.dtype, device=tensor.device)
            tensor = laid_out.copy_(tensor)
        if self.left > 1:
            self.cached = tensor
        return tensor


class View:
    """A view of another value."""

    __slots__ = ("of", "operation", "root")

    def __init__(self, of: Value, operation: Callable[..., torch.Tensor]) -> None:
        self.of = of
        self.operation = operation
        self.root: Kept | KeptByUser | Recipe = of.root

    def value(self) -> torch.Tensor:
        return self.operation(self.of.value())


Value = Kept | KeptByUser | Recipe | View


class Replay:
    """One call of a small module that is run again as a whole, for its output and for what autograd saved inside."""

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
        self, work: Work, module: nn.Module, source: Value, given: torch.Tensor, *, checked: bool = True
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
        """Whether what it saves inside is counted, and must come out the same."""
        self.saved = 0
        self.inside: list[torch.Tensor | None] = []
        self.parameters = [
            (name, parameter, parameter._version)
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        """Those it ran with, and their versions."""
        source.root.expect()

    def __call__(self) -> torch.Tensor:
        """Run the module; what it saves inside lies ready afterwards. Returns its output, without a graph.

        Raises `InPlaceError` when one of its parameters was changed since, and `ReplayError` when it saves otherwise.
        """
        current = self.module._parameters
        run: Callable[..., Any] = self.module.forward
        for name, parameter, version in self.parameters:
            if parameter._version != version:
                raise InPlaceError(self.work.block, tuple(parameter.shape), version, parameter._version)
            if current.get(name) is not parameter:  # torch.func.functional_call lent it others for the forward
                lent: dict[str, torch.Tensor] = {name: parameter for name, parameter, _ in self.parameters}
                run = functools.partial(torch.func.functional_call, self.module, lent)
        inside: list[torch.Tensor | None] = []
        source = self.source.value().detach().requires_grad_(self.needs_gradient)
        autocast = torch.autocast(*self.autocast) if self.autocast else contextlib.nullcontext()
        with torch.enable_grad(), autocast, torch.autograd.graph.saved_tensors_hooks(inside.append, never):
            output: torch.Tensor = run(source)
        self.source.root.asked()
        self.work.rebuilt += 1
        made = inside.copy()
        inside.clear()  # the graph of the run holds this list, by its hook, and what was in it holds the graph
        if not self.checked:
            return output.detach()
        if len(made) != self.saved:
            raise ReplayError(self.work.block, type(self.module).__name__, self.saved, len(made))
        self.inside = made
        return output.detach()

    def take(self, index: int) -> torch.Tensor:
        """The tensor saved as number `index` inside. Each is handed out once per run of the module."""
        found = self.inside[index] if self.inside else None
        if found is None:
            self()
            found = self.inside[index]
        assert found is not None
        self.inside[index] = None
        return found


class Inside:
    """A tensor that autograd saved inside a replayed module."""

    __slots__ = ("index", "replay")

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.index = replay.saved
        replay.saved += 1


class Witness:
    """A value on trial, and the tensor it stands for, until that has been made again and found the same."""

    __slots__ = ("made_by", "tensor", "value")

    def __init__(self, value: Value | Inside, tensor: torch.Tensor, block: str) -> None:
        self.value = value
        self.tensor: Kept | None = Kept(tensor, block)
        self.made_by = NO_GRAPH if tensor.grad_fn is None else tensor.grad_fn.name()

    def holds(self) -> bool:
        """Whether the value gives the very tensor, bit for bit. It must be asked in the order of a backward."""
        assert self.tensor is not None
        with torch.no_grad(), compat.autocast_off():
            try:
                found, wanted = _hand_out(self.value), self.tensor.value()
            except (RuntimeError, HfCkptError) as error:  # whatever cannot be run again
                if compat.is_out_of_memory(error):
                    raise
                return False
            if found.shape != wanted.shape or found.dtype != wanted.dtype:
                return False
            return torch.equal(found, wanted) or bool(((found == wanted) | (found != found) & (wanted != wanted)).all())

    def storage(self) -> tuple[Any, int]:
        """Of the tensor."""
        assert self.tensor is not None
        return self.tensor.storage()

    def believe(self, done: set[Any]) -> None:
        """It has been found the same. What was made for that is let go, but for `done`, which has been."""
        self.tensor = None
        _let_go(self.value, done)

    def keep(self) -> None:
        """It has not, or another has not: the tensor itself stays."""
        assert self.tensor is not None
        self.value = self.tensor


def _let_go(value: Value | Inside, done: set[Any]) -> None:
    """Forget what was made of a value, and of all that it is made from."""
    made = value.replay if type(value) is Inside else value.root  # type: ignore[union-attr]
    if made in done:
        return
    done.add(made)
    if type(made) is Replay:
        made.inside = []
        _let_go(made.source, done)
    elif isinstance(made, _Shared):
        made.cached, made.left = None, made.uses
        if type(made) is Recipe:
            if type(made.operation) is Replay:
                made.operation.inside = []
                _let_go(made.operation.source, done)
            for operand in made.operands:
                _let_go(operand, done)


@compat.untraced
def unpack(value: Value | Inside | Witness) -> torch.Tensor:
    """What autograd gets back in backward: under `no_grad`, autocast off; the operands have their dtypes already."""
    if type(value) is Witness:
        value = value.value
    assert not isinstance(value, Witness)
    if type(value) is Kept:
        return value.value()
    if type(value) is KeptByUser and value.original is not None:  # read off a node in forward
        return value.original
    work: Work | None = None  # of what has to be made now
    if type(value) is Inside:
        ready = value.replay.inside
        if not ready or ready[value.index] is None:
            work = value.replay.work
    else:
        root = value.root  # type: ignore[union-attr]
        if type(root) is Recipe and root.cached is None:
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
    if type(value) is Inside:
        return value.replay.take(value.index)
    assert not isinstance(value, Inside)
    tensor = value.value()
    value.root.asked()
    return tensor


def never(value: Any) -> torch.Tensor:
    """In place of `unpack` where no backward will come."""
    raise AssertionError("a replayed module's own graph was asked for a saved tensor")
