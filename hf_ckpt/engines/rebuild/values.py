"""Values: what the rebuild engine stores in autograd's graph in place of saved tensors.

| value | holds |
|---|---|
| `Kept` (of `seen`) | the tensor |
| `Stored` | what hooks of the user, or the host memory, hold in place of the tensor |
| `Rebuilt` | an operation, and the values of its operands |
| `View` | another value, and an operation that returns a view of it |
| `Inside` (of `replay`) | the place of the tensor among those that a small module saves when it is run again |

Several nodes may save one tensor, and several operations may need it. So the forward counts the uses of each `Stored`
and `Rebuilt` value, and backward computes it at the first use and drops it after the last one:

    forward     unused --- begin_use, the first time ---> in use         it is stored, or begins to use its sources
    backward    in use --- value, the first time -------> cached         it is fetched, or rebuilt: ends those uses
                cached --- end_use, the last time ------> in use again   it is dropped, and the count starts anew

Whoever begins a use ends it. `Tape.pack` begins one for each tensor that autograd saves, and `unpack` ends it. A
`Rebuilt` begins one of each of its sources when its own first use begins, and ends these when it has been rebuilt. A
view has no count: it uses what it is a view of.

The count decides when a tensor is dropped, and never what it is. If fewer uses end than have begun (a backward through
a part of the graph, or one that fails), the tensor stays until autograd drops the graph. If more end (another backward
through a retained graph, or one in a second thread), it is computed once more.

A value never refers to a node of the graph, so there are no reference cycles, and a graph that is dropped without a
backward frees everything.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_ckpt import compat
from hf_ckpt.engines.rebuild.layouts import Layout, Strides
from hf_ckpt.engines.seen import Kept, Seen, refuse, version_of
from hf_ckpt.errors import InPlaceError, RebuildError


class Work:
    """Counts what a block has rebuilt. All values of the block share it, and it does not refer to the model."""

    def __init__(self, block: str) -> None:
        self.block = block
        self.rebuilt = 0
        """Number of operations and modules that were run again."""


class Shared:
    """A tensor that is fetched or rebuilt once in a backward, for all its uses. `value` returns it in each.

    Args:
        sources: what it is rebuilt from, as far as uses of that are counted.
    """

    __slots__ = ("cached", "left", "sources", "uses")

    def __init__(self, sources: Sequence[Shared] = ()) -> None:
        self.sources = sources
        self.cached: torch.Tensor | None = None
        """The tensor, while it has further uses."""
        self.uses = 0
        """Number of uses in one backward, as the forward has counted them."""
        self.left = 0
        """How many of them are still to come."""

    def begin_use(self) -> None:
        """Count one more use of the tensor in a backward. At the first, begin to use the sources."""
        if not self.uses:
            for source in self.sources:
                source.begin_use()
        self.uses += 1
        self.left += 1

    def end_use(self) -> None:
        """Count one of these uses as done. After the last one, drop the tensor and start counting again."""
        self.left -= 1
        # Not `==`: a use that the forward did not count must not keep the tensor for good.
        if self.left <= 0:
            self.cached = None
            self.left = self.uses  # for another backward through a graph that is retained


DEEPEST = 64
"""How many values may follow one another, each rebuilt from the one before, as in a recurrent layer's loop over tokens.
The next one is kept: each would take a Python frame of its own, and Python allows 1,000."""


@final
class Stored(Shared):
    """A kept tensor that a pair of hooks stores elsewhere, such as in host memory.

    It is stored when its first use is known: some hooks count on every tensor being fetched.

    Args:
        tensor: the tensor.
        hooks: the functions that store it and return it.
        block: name of the block, for errors.
    """

    __slots__ = ("block", "hooks", "original", "packed", "storage", "version")
    depth: ClassVar[int] = 0
    """Number of values behind it, see `DEEPEST`."""

    def __init__(self, tensor: torch.Tensor, hooks: compat.autograd.SavedTensorHooks, block: str) -> None:
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

    def begin_use(self) -> None:
        """Count one more use of the tensor in a backward. At the first, store it.

        Raises `InPlaceError` if it was changed in the meantime.
        """
        if not self.uses:
            assert self.original is not None, "uses are known when the forward ends"
            if self.original.is_overwritten:
                refuse(self.original, self.block, "a tensor")
            self.packed = self.hooks[0](self.original.tensor)
        super().begin_use()

    def value(self) -> torch.Tensor:
        """Return the tensor: fetch it, or take it from the cache.

        Raises `InPlaceError` if the hooks hold the tensor itself, and it has been changed in place since.
        """
        tensor = self.cached
        if tensor is None:
            tensor = self.hooks[1](self.packed)
            # Hooks that return the same memory share its changes. Those that store a copy are right to return old
            # values.
            is_itself = tensor.untyped_storage()._cdata == self.storage.cdata
            if is_itself and version_of(tensor) != self.version:
                raise InPlaceError(self.block, tensor, self.version)
            self.cached = tensor
        return tensor


@final
class Rebuilt(Shared):
    """A dropped tensor that an operation rebuilds from the values of its operands when it is needed.

    Args:
        work: counts the rebuilding.
        operation: computes the tensor from the operands' tensors.
        operands: values of the operands.
        strides: what is known of its strides without `layout`.
    """

    __slots__ = ("depth", "layout", "operands", "operation", "strides", "work")

    def __init__(
        self,
        work: Work,
        operation: Callable[..., torch.Tensor],
        operands: list[Value],
        strides: Strides = Strides.SAME,
    ) -> None:
        super().__init__(sources_of(operands))
        self.depth: int = 1
        """Number of values behind it, with itself; see `DEEPEST`."""
        for operand in operands:
            if operand.depth >= self.depth:
                self.depth = operand.depth + 1
        self.strides = strides
        self.work = work
        self.operation = operation
        self.operands = operands
        self.layout: Layout | None = None
        """What the tensor must have; None if nothing saved it, so that only other operations see it."""

    def value(self) -> torch.Tensor:
        """Return the tensor: rebuild it, or take it from the cache. Cache it while it has further uses.

        Raises `RebuildError` if its shape or type differs from the forward.
        """
        tensor = self.cached
        if tensor is not None:
            return tensor
        tensor = self.operation(*map(_tensor_of, self.operands))
        for source in self.sources:
            source.end_use()
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
            # forward. Views of this tensor are taken by its strides in the forward, see `Graph.view_of`.
            if tensor.stride() != layout.stride:
                tensor = layout.of(tensor)
        if self.left > 1:  # the last use need not keep it
            self.cached = tensor
        return tensor


_tensor_of = operator.methodcaller("value")


@final
class View:
    """A view of another value."""

    __slots__ = ("depth", "layout", "of", "operation", "root", "strides")

    def __init__(self, of: Value, operation: Callable[..., torch.Tensor], strides: Strides = Strides.SAME) -> None:
        self.of = of
        self.depth: int = of.depth + 1
        self.strides = strides
        self.layout: Layout | None = None
        """What the view must have; None if nothing saved it, and if it has the strides of the forward anyway."""
        self.operation = operation
        root = of.root if type(of) is View else of
        self.root: Stored | Rebuilt | None = None if type(root) is Kept else root
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


def sources_of(values: Sequence[Value]) -> list[Shared]:
    """Return those of the values, or of what they are views of, whose uses are counted."""
    sources: list[Shared] = []
    for value in values:
        root = value.root if type(value) is View else value
        if root is not None and type(root) is not Kept:
            sources.append(root)
    return sources


def strides_of(value: Value) -> Strides:
    """Return what is known of the strides of a value while the forward of its block runs."""
    if isinstance(value, (Rebuilt, View)):
        if value.layout is not None:
            return Strides.CONTIGUOUS if value.layout.is_contiguous() else Strides.SAME
        if value.strides is Strides.AS_OPERANDS:
            value.strides = min(map(strides_of, value.operands))
        return value.strides
    seen = value if isinstance(value, Kept) else value.original
    return Strides.SAME if seen is None else Strides.of(seen.tensor)


def fix_strides(value: Value, tensor: torch.Tensor) -> None:
    """Note the strides of the forward's tensor, if those of its value are unknown."""
    if isinstance(value, (Rebuilt, View)) and value.layout is None and value.strides is Strides.UNKNOWN:
        value.layout = Layout(tensor.size(), tensor.stride(), tensor.dtype)
