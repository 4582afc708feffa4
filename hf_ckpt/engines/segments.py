"""Segments: hidden states that backward makes again, by running the blocks before them once more.

Of the blocks of a segment, only the first holds its hidden states. The checkpoint of each later one holds, in their
place, how to make them: the block before, and what that ran on. Backward needs the last block of a segment first. This
runs the earlier ones once, and leaves to each block the hidden states that it needs next. Prior work: Chen et al.,
"Training Deep Nets with Sublinear Memory Cost" (2016, https://arxiv.org/abs/1604.06174).

The tensors that a block returns carry how to make them (`pass_on`). So what is made again are exactly the tensors that
one block returns and the next one is given; if a model does anything in between, the next block holds its own. All that
a `Run` holds is older than its results, as in autograd's graph, so there are no reference cycles.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from hf_ckpt import compat
from hf_ckpt.engines.host_memory import Group
from hf_ckpt.engines.seen import Kept, version_of
from hf_ckpt.engines.snapshot import without_graph
from hf_ckpt.measure.levels import Boundary

_RESULTS = "hf_ckpt_results"
"""Attribute of a tensor that a block has returned, or of the base of such a view: geometry -> `Result`."""


class Result(NamedTuple):
    """A tensor that a block has returned. Checkpoints of later blocks hold this in its place."""

    run: Run
    """How to make it."""
    place: int
    """Its number among the leaves of what the block returns."""
    version: int
    """Its in-place version."""

    def __reduce__(self) -> tuple[Any, ...]:
        return collections.OrderedDict, ()  # a saved or copied tensor has its values; `torch.load` allows this class


class _Start(NamedTuple):
    """The hidden states of the first block of a segment, as its checkpoint holds them: here, or in host memory."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]
    trained: bool

    def value(self) -> torch.Tensor:
        """Return the hidden states. Raises `InPlaceError` if they were changed."""
        return self.unpack(self.packed)


class Watching:
    """What a measured step is told of segments: how much less it holds, and when hidden states are there again.

    Args:
        mark: called with `MADE` and the name of a block whose results are there.
    """

    def __init__(self, mark: Callable[..., None]) -> None:
        self.mark = mark
        self.runs: list[weakref.ref[Run]] = []
        """The runs of the step."""

    def missing_bytes(self) -> int:
        """Return the bytes that do not exist now, and that checkpoints would hold without segments."""
        return sum(run.missing_bytes() for run in filter(None, (reference() for reference in self.runs)))


class Run:
    """One forward of a block, and how to run it once more for what it has returned.

    Args:
        again: runs the block once more, in the state of its forward.
        args: its positional arguments; tensors as `Result`, `_Start` or `Kept`.
        block: its name, for errors.
    """

    __slots__ = (
        "__weakref__",
        "again",
        "args",
        "autocast",
        "before",
        "block",
        "returned",
        "sizes",
        "tensors",
        "versions",
        "wanted",
        "watching",
    )

    def __init__(self, again: Callable[..., Any], args: list[Any], block: str, device_type: str) -> None:
        self.again = again
        self.args = args
        self.block = block
        self.before: Run | None = next((arg.run for arg in args if type(arg) is Result), None)
        """The run of the block before; None in the first block of a segment."""
        kinds = dict.fromkeys((device_type, "cpu"))
        self.autocast = [(kind, compat.devices.autocast_dtype(kind)) for kind in kinds]
        self.returned: dict[int, Callable[[], torch.Tensor | None]] = {}
        """Place -> what returns the tensor that the block has returned there. It is alive in backward if something else
        holds it, such as the loss."""
        self.versions: dict[int, int] = {}
        """Place -> the in-place version that it had."""
        self.wanted: set[int] = set()
        """The places of results that the checkpoint of the next block does not hold."""
        self.tensors: dict[int, torch.Tensor] = {}
        """Place -> the result, once it was made and while backward still needs it."""
        self.watching: Watching | None = None
        """What the measured step is told; None in other steps."""
        self.sizes: dict[int, int] = {}
        """In a measured step, place -> the bytes of a result that backward did not take yet."""

    def watched_by(self, watching: Watching) -> None:
        """Let a measured step know of its results."""
        self.watching = watching
        for place, returned in self.returned.items():
            tensor = returned()
            self.sizes[place] = 0 if tensor is None else tensor.untyped_storage().nbytes()
        watching.runs.append(weakref.ref(self))

    def missing_bytes(self) -> int:
        """Return the bytes of results that do not exist now, and that backward still takes."""
        left = self.sizes.keys() & self.wanted - self.tensors.keys()
        return sum(self.sizes[place] for place in left if self.returned[place]() is None)

    def take(self, place: int) -> torch.Tensor:
        """Return a result, and let go of it. Those before it in the segment stay until they are taken."""
        tensor = self._find(place)
        if tensor is None:
            tensor = self._make()[place]
        if self.watching is not None:
            self.watching.mark(Boundary.MADE, self.block)
            self.sizes.pop(place, None)
        self.tensors.pop(place, None)
        return tensor

    def _find(self, place: int) -> torch.Tensor | None:
        """Return a result that exists; None if it has to be made."""
        tensor = self.tensors.get(place)
        if tensor is not None:
            return tensor
        returned = self.returned[place]()
        is_same = returned is not None and version_of(returned) == self.versions[place]
        return returned.detach() if returned is not None and is_same else None

    def _make(self) -> dict[int, torch.Tensor]:
        """Return the results that the next block wants, and make them from the last ones that exist."""
        runs = [self]
        results: dict[int, torch.Tensor] = {}
        while (before := runs[-1].before) is not None:
            existing = {place: before._find(place) for place in before.wanted}
            results = {place: tensor for place, tensor in existing.items() if tensor is not None}
            if len(results) == len(existing):
                break
            runs.append(before)
        for run in reversed(runs):
            # Held by its run: the checkpoint of the next block takes it from there.
            results = run.tensors = run._again(results)
        # A backward that ends before the first block of the segment leaves some.
        left = [weakref.ref(run) for run in runs]
        if not compat.autograd.call_after_backward(functools.partial(_let_go, left)):
            _let_go(left)
        return dict(results)

    def _again(self, results: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Run the block on results of the block before, and return its own that the next block wants."""
        args = []
        for arg in self.args:
            if type(arg) is Result:
                args.append(results[arg.place].detach().requires_grad_())
            elif isinstance(arg, (_Start, Kept)):
                args.append(arg.value().detach().requires_grad_(arg.trained))
            else:
                args.append(arg)
        with contextlib.ExitStack() as context:
            for kind, dtype in self.autocast:
                # Without cached casts: a recomputation would find them, and they would outlive this run.
                context.enter_context(compat.devices.autocast_to(kind, dtype, caches=False))
            # With gradients on, as in the forward: kernels for inference may round otherwise. But nothing is saved.
            context.enter_context(torch.enable_grad())
            leaves = compat.torch.tree_leaves(compat.autograd.run_without_saving(self.again, *args))
        tensors = {}
        for place in self.wanted:
            tensor = self._find(place)  # what exists, such as a position bias that later blocks hold, is not held twice
            tensors[place] = leaves[place].detach() if tensor is None else tensor
        return tensors


def result_of(tensor: Any) -> Result | None:
    """Return what a tensor carries that a block has returned; None for all others, and if it was changed since.

    It may also be a view with the same geometry: FSDP2 gives one to the next block.
    """
    if not _has_graph(tensor):  # no block before it has a backward
        return None
    result: Result | None = getattr(_owner_of(tensor), _RESULTS, {}).get(_geometry_of(tensor))
    return result if result is not None and result.version == version_of(tensor) else None


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None and not value.is_nested


def _owner_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _geometry_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def are_others_hooks() -> bool:
    """Whether saved-tensor hooks that are not those of `offload` say where tensors are kept."""
    hooks = compat.autograd.top_saved_tensor_hooks()
    return hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), Group)


def instead_of_results(run: Run) -> contextlib.AbstractContextManager[Any]:
    """Make a context in which a checkpoint holds how to make the results of `run`, instead of these."""
    # The graph holds the hook, so the hook must not hold the tensors.
    return saved_tensors_hooks(functools.partial(_pack, run), _unpack)


def pass_on(
    output: Any,
    again: Callable[..., Any],
    args: tuple[Any, ...],
    run: Run | None,
    others: Iterable[torch.Tensor],
    block: str,
    watching: Watching | None,
) -> None:
    """Let what a block has returned be made again.

    Args:
        output: what it has returned.
        again: runs the block once more, in the state of its forward.
        args: its positional arguments, first its hidden states.
        run: the run whose results its checkpoint does not hold; None if it holds its hidden states.
        others: the tensors that it is given in other ways.
        block: its name.
        watching: what a measured step is told; None in other steps.
    """
    hidden = args[0]
    held = [_held(arg, run, block) for arg in args]
    if run is None:
        pack, unpack = compat.autograd.top_saved_tensor_hooks() or (functools.partial(Kept, block=block), Kept.value)
        held[0] = _Start(pack(hidden), unpack, hidden.requires_grad)
    this_run = Run(again, held, block, hidden.device.type)
    inputs = {id(_owner_of(value)) for value in (*args, *others) if isinstance(value, torch.Tensor)}
    for place, leaf in enumerate(compat.torch.tree_leaves(output)):
        if not _has_graph(leaf):
            continue
        owner = _owner_of(leaf)
        if id(owner) not in inputs:
            this_run.returned[place] = weakref.ref(leaf)
            this_run.versions[place] = version_of(leaf)
            vars(owner).setdefault(_RESULTS, {})[_geometry_of(leaf)] = Result(this_run, place, version_of(leaf))
        # What the block hands on, such as T5's position bias, is older than this run, which holds it: to make it would
        # be a cycle. Later blocks hold it, too, so the run before need not make it.
        elif (result := result_of(leaf)) is not None:
            result.run.returned[result.place] = functools.partial(_same, leaf.detach())
    if watching is not None:
        this_run.watched_by(watching)


def _held(arg: Any, run: Run | None, block: str) -> Any:
    """Return what to hold of an argument of a block, in order to run it again."""
    if not isinstance(arg, torch.Tensor):
        return arg
    result = result_of(arg)
    if run is not None and result is not None and result.run is run:
        return result
    return Kept(without_graph(arg), block)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@compat.torch.untraced
def _pack(run: Run, tensor: torch.Tensor) -> Result | Kept:
    result = result_of(tensor)
    if result is None or result.run is not run:
        return Kept(tensor, run.block)
    run.wanted.add(result.place)
    return result


@compat.torch.untraced
def _unpack(packed: Result | Kept) -> torch.Tensor:
    return packed.run.take(packed.place) if isinstance(packed, Result) else packed.value()


def _let_go(runs: list[weakref.ref[Run]]) -> None:
    for run in filter(None, (reference() for reference in runs)):
        run.tensors = {}
