"""Values: what the rebuild engine stores in autograd's graph in place of saved tensors.

| value | holds |
|---|---|
| `Kept` (of `seen`) | the tensor |
| `Stored` | what hooks of the user, or the host memory, hold in place of the tensor |
| `Rebuilt` | an operation, and the values of its operands |
| `View` | another value, and an operation that returns a view of it |
| `Inside` | the place of the tensor among those that a small module saves when it is run again (`Replay`) |

Several nodes may save one tensor, and several operations may need it. So the forward counts the uses of a value
(`add_use`), and backward rebuilds it at the first use and drops it after the last one (`end_use`).

A value never refers to a node of the graph, so there are no reference cycles, and a graph that is dropped without a
backward frees everything.
"""

from __future__ import annotations

import contextlib
import enum
import operator
import threading
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_ckpt import compat
from hf_ckpt.engines.seen import Kept, Seen, refuse, version_of
from hf_ckpt.errors import InPlaceError, RebuildError


class Work:
    """Counts what a block has rebuilt. All values of the block share it, and it does not refer to the model."""

    def __init__(self, block: str) -> None:
        self.block = block
        self.rebuilt = 0
        """Number of operations and modules that were run again."""


class _Shared:
    """A tensor that is fetched or rebuilt once in a backward, for all its uses."""

    __slots__ = ("cached", "left", "uses")

    def __init__(self) -> None:
        self.cached: torch.Tensor | None = None
        """The tensor, while it has further uses."""
        self.uses = 0
        """Number of uses in one backward, as the forward has counted them."""
        self.left = 0
        """How many of them are still to come."""

    @property
    def root(self) -> Any:
        """The value whose uses are counted: itself, because it is not a view."""
        return self

    def end_use(self) -> None:
        """Count one of these uses as done. After the last one, drop the tensor and start counting again."""
        self.left -= 1
        # Not `==`: a use that the forward did not count must not keep the tensor for good.
        if self.left <= 0:
            self.cached = None
            self.left = self.uses  # for another backward through a graph that is retained


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

    def add_use(self) -> None:
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
            # Hooks that return the same memory share its changes. Those that store a copy are right to return old
            # values.
            is_itself = tensor.untyped_storage()._cdata == self.storage.cdata
            if is_itself and version_of(tensor) != self.version:
                raise InPlaceError(self.block, tensor, self.version)
            self.cached = tensor
        return self.cached


class Layout(NamedTuple):
    """What a rebuilt tensor must have as the tensor of the forward had it."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def is_contiguous(self) -> bool:
        """Whether a tensor of this layout is contiguous."""
        following = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != following:
                return 0 in self.size
            following *= size
        return True

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a rebuilt tensor with these strides."""
        if tensor.stride() == self.stride:
            return tensor
        return torch.empty_strided(*self[:2], dtype=self.dtype, device=tensor.device).copy_(tensor)


class Strides(enum.IntEnum):
    """What is known of the strides that a value is rebuilt with. The least of several holds for all of them."""

    UNKNOWN = 0
    """The forward may have had others: no node of autograd shows the memory format of a copy."""
    SAME = 1
    """They are those of the forward."""
    AS_OPERANDS = 2
    """They are those of the forward, which are contiguous if the operands are: only copies ask whether they are."""
    CONTIGUOUS = 3
    """They are those of the forward, which are contiguous."""


def strides_of(value: Value) -> Strides:
    """Return what is known of the strides of a value while the forward of its block runs."""
    if isinstance(value, (Rebuilt, View)):
        if value.layout is not None:
            return Strides.CONTIGUOUS if value.layout.is_contiguous() else Strides.SAME
        if value.strides is Strides.AS_OPERANDS:
            value.strides = min(map(strides_of, value.operands))
        return value.strides
    seen = value if isinstance(value, Kept) else value.original
    return Strides.CONTIGUOUS if seen is not None and seen.tensor.is_contiguous() else Strides.SAME


def fix_strides(value: Value, tensor: torch.Tensor) -> None:
    """Note the strides of the forward's tensor, if those of its value are unknown."""
    if isinstance(value, (Rebuilt, View)) and value.layout is None and value.strides is Strides.UNKNOWN:
        value.layout = Layout(tensor.size(), tensor.stride(), tensor.dtype)


class Rebuilt(_Shared):
    """A dropped tensor that an operation rebuilds from the values of its operands when it is needed.

    Args:
        work: counts the rebuilding.
        operation: computes the tensor from the operands' tensors.
        operands: values of the operands.
        strides: what is known of its strides without `layout`.
    """

    __slots__ = ("layout", "operands", "operation", "strides", "work")

    def __init__(
        self,
        work: Work,
        operation: Callable[..., torch.Tensor],
        operands: list[Value],
        strides: Strides = Strides.SAME,
    ) -> None:
        super().__init__()
        self.strides = strides
        self.work = work
        self.operation = operation
        self.operands = operands
        self.layout: Layout | None = None
        """What the tensor must have; None if nothing saved it, so that only other operations see it."""

    def add_use(self) -> None:
        """Count one more use of the tensor in a backward. At the first, it begins to use its operands."""
        if not self.uses:
            for operand in self.operands:
                root = operand.root
                if root is not None:
                    root.add_use()
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
            root = operand.root
            if root is not None:
                root.end_use()
        self.work.rebuilt += 1
        layout = self.layout
        if layout is not None:
            if tensor.shape != layout.size or tensor.dtype is not layout.dtype:
                raise RebuildError(
                    self.work.block,
                    f"an operation gave {tensor.dtype} {list(tensor.shape)} when backward recomputed it, but "
                    f"{layout.dtype} {list(layout.size)} in the forward.",
                )
            # Operations choose strides by those of their operands, and a rebuilt operand may have others than in the
            # forward. Views of this tensor are taken by its strides in the forward, see `Tape._view_of`.
            if tensor.stride() != layout.stride:
                tensor = layout.of(tensor)
        if self.left > 1:  # the last use need not keep it
            self.cached = tensor
        return tensor


class View:
    """A view of another value."""

    __slots__ = ("layout", "of", "operation", "root", "strides")

    def __init__(self, of: Value, operation: Callable[..., torch.Tensor], strides: Strides = Strides.SAME) -> None:
        self.of = of
        self.strides = strides
        self.layout: Layout | None = None
        """What the view must have; None if nothing saved it, and if it has the strides of the forward anyway."""
        self.operation = operation
        self.root: Stored | Rebuilt | None = of.root
        """The value at the end of a chain of views, whose uses are counted; None if that is a kept tensor."""

    @property
    def operands(self) -> tuple[Value]:
        """The value that it is a view of."""
        return (self.of,)

    def value(self) -> torch.Tensor:
        """Return the view."""
        tensor = self.operation(self.of.value())
        return tensor if self.layout is None else self.layout.of(tensor)


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

    def __init__(self, work: Work, module: nn.Module, source: Value, module_input: torch.Tensor, stay: bool) -> None:
        self.work = work
        self.module = module
        # Counts of its uses: one for each run of the module. `Inside` adds it, and `__call__` ends it. So a `Rebuilt`
        # with a replay as its operation has no operands: it would count the source a second time.
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
        # The module saves other tensors if its input requires gradients, so it must be as in the forward.
        source = self.source.value().detach().requires_grad_(self.needs_gradient)
        autocast = torch.autocast(*self.autocast) if self.autocast else contextlib.nullcontext()
        with torch.enable_grad(), autocast, torch.autograd.graph.saved_tensors_hooks(inside.append, never):
            output: torch.Tensor = run(source)
        root = self.source.root
        if root is not None:
            root.end_use()
        self.inside = inside.copy()
        inside.clear()  # else a cycle: this run's graph holds the list through its hook, and the tensors hold the graph
        if len(self.inside) != self.saved:
            raise RebuildError(
                self.work.block,
                f"{type(self.module).__name__} saved {self.saved} tensors in the forward and "
                f"{len(self.inside)} when backward recomputed it.",
            )
        return output.detach()

    def _is_as_in_the_forward(self) -> bool:
        """Whether the module has the attributes and parameters of its forward. Raises errors as `refuse` does."""
        attributes = vars(self.module)
        current = attributes["_parameters"]
        unchanged = list(attributes) == list(self.attributes)  # names, before values are compared in pairs
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
        # Detached, so that the run does not touch the gradients of the parameters.
        as_before = {name: seen.tensor.detach().requires_grad_(seen.trained) for name, seen in self.parameters.items()}
        attributes.clear()
        attributes.update(self.attributes, _parameters=dict.fromkeys(now["_parameters"]) | as_before)
        try:
            return self.module.forward(source)
        finally:
            attributes.clear()
            attributes.update(now)


class Inside:
    """Replaces a tensor that autograd saved inside a module that is run again: the next one of `replay`."""

    __slots__ = ("index", "replay")
    root: ClassVar[None] = None
    """The value whose uses are counted: none, because each place has one use. Its replay counts those of the input."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        root = replay.source.root
        if root is not None and not replay.saved:  # one run of the module fills all places, and uses its input once
            root.add_use()
        self.index = replay.saved
        replay.saved += 1

    def value(self) -> torch.Tensor:
        """Return the tensor; run the module again if necessary."""
        replay = self.replay
        if not replay.inside or replay.inside[self.index] is None:  # the first place, or a second backward
            replay()
            replay.work.rebuilt += 1
        tensor = replay.inside[self.index]
        assert tensor is not None
        replay.inside[self.index] = None
        return tensor


class _Reading(threading.local):
    """How `read` gets a value from behind autograd, which returns only tensors. `unpack` sees that it is on."""

    on = False
    """Whether this thread reads what a node has saved."""
    value: Rebuilt | View | Stored | None = None
    """What `unpack` was called with, in place of a tensor."""


_reading = _Reading()
_NOTHING = torch.empty(0, device="cpu")
"""What `unpack` returns to `read`, because autograd accepts only a tensor."""


def read(node: Any, name: str) -> Any:
    """Return what an autograd node has saved under a name; for a dropped or stored tensor its value, without fetching.

    Args:
        node: the node.
        name: the name. Returns None if the node has saved nothing under it.
    """
    _reading.on = True
    try:
        saved = getattr(node, f"_saved_{name}", None)
        return saved if _reading.value is None else _reading.value
    finally:
        _reading.on = False
        _reading.value = None


@compat.torch.untraced
def unpack(value: Value | Inside) -> torch.Tensor:
    """Saved-tensor hook: return the tensor. It is rebuilt without autocast: its operands have the right types."""
    if type(value) is Kept and not value.is_overwritten:  # first, because most are of this kind
        return value.tensor
    if _reading.on and isinstance(value, (Rebuilt, View, Stored)):
        _reading.value = value
        return _NOTHING
    if type(value) is Stored and value.original is not None:  # read from a node during the forward
        return value.original.tensor
    if torch.is_grad_enabled() or compat.devices.autocast_is_on():
        with torch.no_grad(), compat.devices.autocast_off():
            return unpack(value)
    tensor = value.value()
    root = value.root
    if root is not None:
        root.end_use()
    return tensor


def never(value: Any) -> torch.Tensor:
    """Replaces `unpack` in a graph that no backward uses. Raises `AssertionError`."""
    raise AssertionError("a replayed module's own graph was asked for a saved tensor")
