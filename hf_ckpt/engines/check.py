"""Compare the tensors that a block's backward gets with those that its forward saved, bit for bit.

For one forward, a `Check` replaces the block's checkpointing function, which may belong to hf_ckpt or to anything else.
It calls that function with a wrapper of the block's own forward, whose saved-tensor hooks nest inside the function's.
The inner hooks pass every tensor that autograd saves to the outer hooks, and keep a reference to it. When backward asks
for the tensor, they compare what the outer hooks return (recomputed, rebuilt, unpacked, or copied back from host
memory) with the reference. The block runs no more often than without the check. If a tensor differs, what else changed
between forward and backward tells the cause: see `CAUSES`.

Under reentrant checkpointing, which no plan of hf_ckpt uses, autograd saves nothing in the forward, so nothing is
compared.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.runs import FirstThenAgain
from hf_ckpt.engines.seen import Seen
from hf_ckpt.engines.settings import Settings

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> an integer type of that size, in which bits are compared."""
CAUSES = {
    "settings": "Between forward and backward, parameters or settings of the block (train or eval mode, adapters, "
    "hooks, attributes) changed. Change them after the backward only, or copy the model for the change.",
    "inputs": "The block is recomputed from other inputs than it had. They were left out, the block changes them in "
    "place, or what stores them, such as offloading, has changed them.",
    "random": "The recomputation draws other random numbers: set preserve_rng_state to True. hf_ckpt also restores the "
    "states of Python's `random` and numpy, which other checkpointing does not.",
    "unknown": "Unknown: inputs, settings and random state were those of the forward. It may be a "
    "nondeterministic kernel (torch.use_deterministic_algorithms(True) names it), a random generator of its own, "
    "memory that is not written yet (RReLU as the last operation of a block: "
    "https://github.com/pytorch/pytorch/issues/193671), what stores or moves saved tensors, such as offloading, "
    "a value that it updates in every run, or what only the forward finds, such as a patched function or state of the "
    "process. `selective` runs no block twice.",
}
"""What changed between forward and backward -> what to do about it. The first row that applies is the likely cause: the
changes of the later ones may follow from it."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor that backward got, and that differs from the one that the forward saved."""

    block: str
    """Qualified name of the block."""
    module: str
    """Name of the module inside the block that produced or saved the tensor; empty for the block itself."""
    operation: str
    """What produced the tensor: an autograd node (`MulBackward0`), or `input` for a tensor without a graph, or
    `weight`."""
    shape: tuple[int, ...]
    place: int
    """The number of the tensor among those that the forward saved."""
    what: str = ""
    """What is different, in words."""
    cause: str = ""
    """The likely cause and what to do about it."""

    def __str__(self) -> str:
        where = f"{self.block}.{self.module}" if self.module else self.block
        shape = " x ".join(map(str, self.shape)) or "a number"
        return f"in `{where}`: {self.operation} ({shape}): {self.what}. {self.cause}".rstrip()


def difference_of(one: torch.Tensor, other: torch.Tensor) -> str | None:
    """Return what differs between two tensors, in words; None if they have the same shape, type and bits."""
    if _kind_of(one) != _kind_of(other):
        return f"{_kind_of(other)} instead of {_kind_of(one)}"
    if one.layout is not torch.strided:
        return None
    # As bits, because NaN differs from itself, and 0.0 equals -0.0.
    is_other = _bits(one) != _bits(other)
    count = int(is_other.sum())
    if not count:
        return None
    return f"{count:,} of {is_other.numel():,} values differ, by {share_of_difference(one, other):.2g} of their norm"


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def share_of_difference(one: torch.Tensor, other: torch.Tensor, least: float = 0.0) -> float:
    """Return the norm of the difference of two tensors of the same shape, over the norm of `one`, or `least` if larger.

    It is computed in host memory: some devices, such as `mps`, have no float64, and others have little free memory.
    """
    wide = torch.complex128 if one.is_complex() else torch.float64
    exact = one.detach().cpu().to(wide)  # in float32, the norm of many numbers would itself be rounded
    norm = max(least, float(exact.norm()))
    gap = float((other.detach().cpu().to(wide) - exact).norm())
    if not norm:
        return float("inf") if gap else 0.0
    return gap / norm


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor's numbers as integers, with conjugate and negative views resolved."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.element_size()])


def _has_no_values(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (compat.torch.is_fake(value) or value.is_meta)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same numbers in memory, so that they cannot differ."""
    placed = [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in (one, other)]
    return placed[0] == placed[1]


def _is_plain(tensor: Any) -> bool:
    """Whether this is a tensor whose values can be compared."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_nested or tensor.is_quantized or _has_no_values(tensor) or compat.torch.is_compiling())


# --- what changed meanwhile -------------------------------------------------------------------------------------------


class _Changes:
    """What has changed between one forward of a block and its backward: the rows of `CAUSES` that apply.

    Args:
        module: the block, before its forward.
        args: the positional arguments of its forward, whose devices may draw random numbers.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.module = module
        self.forward_runs = True
        self.ran_again = False
        """Whether a recomputation has begun."""
        self.tensors = {id(tensor): Seen(tensor) for tensor in (*module.parameters(), *module.buffers())}
        """The parameters and buffers of the block, as they were before its forward."""
        self.inputs: list[Seen | None] = []
        """The input tensors of the block in its forward, until it runs again; None for those that found no room."""
        self.random = compat.process_state.RandomState(compat.process_state.devices_of([*module.parameters(), *args]))
        self.causes: set[str] = set()
        """Rows of `CAUSES` that apply."""

    def forward_has_ended(self) -> None:
        """Record the block's settings, and the generators that the forward drew from."""
        self.forward_runs = False
        self.settings = Settings(self.module)
        generators = (self.random.of_torch_has_moved, self.random.of_host_has_moved)
        self.drawn_from = [has_moved for has_moved in generators if has_moved()]
        """Whether each generator that the forward drew from has moved since it began."""

    def backward_begins(self, whole: bool) -> None:
        """Compare with the block's settings at the beginning of its backward, and with its parameters if `whole`."""
        are_others = whole and any(id(parameter) not in self.tensors for parameter in self.module.parameters())
        # Other parameters, as after `torch.func.functional_call`; and settings, as after `eval()`.
        if are_others or not self.settings.still_apply(self.module):
            self.causes.add("settings")

    def runs_again(self, again: list[torch.Tensor]) -> None:
        """Compare the first recomputation of the block, with the inputs `again`, with the forward."""
        if self.ran_again or self.forward_runs:
            return
        self.ran_again = True
        pairs = [(seen, tensor) for seen, tensor in zip(self.inputs, again, strict=False) if seen is not None]
        changed = (seen.is_overwritten or difference_of(seen.tensor, tensor) is not None for seen, tensor in pairs)
        if len(self.inputs) != len(again) or any(changed):
            self.causes.add("inputs")
        self.inputs = []
        if any(has_moved() for has_moved in self.drawn_from):
            self.causes.add("random")

    def likely_cause(self) -> str:
        """Return the first row of `CAUSES` that applies, in words."""
        return next(text for cause, text in CAUSES.items() if cause in self.causes or cause == "unknown")


# --- one forward of one block -----------------------------------------------------------------------------------------


class _Reference(NamedTuple):
    """A tensor that the forward saved, to compare with what backward gets."""

    seen: Seen
    """The tensor without its graph, which would hold it: a reference cycle."""
    values: torch.Tensor
    """A copy, if the recomputation overwrites the tensor; else the tensor itself."""
    difference: Difference
    """The difference, should there be one, without what is different."""


@dataclasses.dataclass(slots=True)
class CheckedTensor:
    """What the hooks of the check hold in place of a saved tensor: what the hooks around it hold, and a reference."""

    packed: Any
    load: Callable[[Any], torch.Tensor]
    reference: _Reference | None = None
    """None if the tensor is not compared, or was."""


@dataclasses.dataclass(eq=False)
class Check:
    """The check of one forward of one block, and of its backward.

    Args:
        block: qualified name of the block.
        module: the block.
        function: its checkpointing function, called as `function(fn, *args)`.
        room_bytes: the most bytes of tensors to keep. Tensors that do not fit are not compared.
        put_back: called with the check when the forward begins; restores the block's function.
        whole: whether every parameter stays on its device, unsharded, throughout a step. If not, they are not compared.
        done: called with the check when the backward ends, or when the forward ends if it saved nothing, such as the
            forward of a frozen block.
    """

    block: str
    module: nn.Module
    function: Callable[..., Any]
    _: dataclasses.KW_ONLY
    room_bytes: int
    put_back: Callable[[Check], None]
    done: Callable[[Check], None]
    whole: bool = True
    compared: int = 0
    """Number of tensors that were compared, without those that are the same memory on both sides."""
    saved: int = 0
    """Number of tensors that the forward saved."""
    differences: list[Difference] = dataclasses.field(default_factory=list)
    """The differences, in the order in which the forward saved the tensors once the check has ended."""
    ends: bool = False
    """Whether the end of the check is scheduled or has come."""
    has_ended: bool = False
    changes: _Changes = dataclasses.field(init=False, repr=False)
    """What may be the cause of a difference, from the beginning of the forward to the end of the check."""

    def __post_init__(self) -> None:
        self._first_call = threading.Lock()
        self._storages: set[int] = set()
        self._names = {id(inner): name for name, inner in self.module.named_modules()}

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `function(fn, *args)`, where `fn` is the block's own forward."""
        self.put_back(self)
        # Without gradients nothing is saved. Graphs and fake tensors have no values to compare, and torch.func allows
        # no hooks.
        in_graph = compat.torch.is_compiling() or compat.devices.is_capturing()
        unusual = in_graph or not torch.is_grad_enabled() or any(map(_has_no_values, args))
        if unusual or not self._first_call.acquire(blocking=False):  # another thread may run the same block now
            return self.function(fn, *args)
        bound = fn if isinstance(fn, functools.partial) else functools.partial(fn)
        # torch's own selective checkpointing, or a count of operations, must not see what only the check does. So it is
        # wherever `unseen_by_modes` stands below.
        with compat.modes.unseen_by_modes():
            self.changes = _Changes(self.module, args)
        # Only the first call runs under the hooks of this check.
        first = functools.partial(self._run, bound.func)
        again = functools.partial(self._run_again, bound.func)
        forward = FirstThenAgain(first, again, owner=getattr(bound.func, "__self__", None))
        output = self.function(functools.partial(forward, *bound.args, **bound.keywords), *args)
        self.changes.forward_has_ended()
        if not self.saved:
            self.done(self)
        return output

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward, and see what autograd saves."""
        with torch.no_grad(), compat.modes.unseen_by_modes():
            inputs = _plain_among(args, kwargs)
            self.changes.inputs = [Seen(tensor.detach()) if self.reserve(tensor) else None for tensor in inputs]
        outer = compat.autograd.top_saved_tensor_hooks()
        if outer is None:
            return function(*args, **kwargs)
        # The graph refers to `unpack` only, so not to the outer hooks, which hold the inputs of the block.
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(self.pack, outer), self.unpack):
            return function(*args, **kwargs)

    def _run_again(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Recompute the block, and compare its inputs with those of the forward until the check has ended."""
        if not self.has_ended:
            with torch.no_grad(), compat.modes.unseen_by_modes():
                self.changes.runs_again(_plain_among(args, kwargs))
        return function(*args, **kwargs)

    @compat.torch.untraced  # compiled parts of a block call it
    def pack(self, outer: compat.autograd.SavedTensorHooks, tensor: torch.Tensor) -> CheckedTensor:
        """Saved-tensor hook: pass a tensor to the `outer` hooks, and keep a reference to it."""
        outer_pack, outer_unpack = outer
        saved = CheckedTensor(outer_pack(tensor), outer_unpack)
        self.saved += 1
        before = self.changes.tensors.get(id(tensor)) or self.changes.tensors.get(id(tensor._base))
        is_written = before is not None and before.is_overwritten  # the recomputation will write to it again
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        operation = "input" if tensor.grad_fn is None else tensor.grad_fn.name()
        if is_weight:
            operation = "weight"
        if not _is_plain(tensor) or (is_weight and not self.whole):
            return saved
        # A kernel may write to a buffer without counting that as a change, as batch norm does. It makes no use of the
        # buffer in backward, where it would find the values of the last forward without checkpointing.
        if before is not None and not (is_weight or is_written):
            return saved
        is_held = is_weight and not is_written  # by the model
        if is_held or self.reserve(tensor, copied=is_written):
            seen = Seen(tensor.detach())
            with compat.modes.unseen_by_modes():
                values = seen.tensor.clone() if is_written else seen.tensor
            modules = map(id, compat.frames.calling_objects(nn.Module))
            name = next((self._names[module] for module in modules if module in self._names), "")
            difference = Difference(self.block, name, operation, tuple(tensor.shape), self.saved)
            saved.reference = _Reference(seen, values, difference)
        return saved

    def reserve(self, tensor: torch.Tensor, *, copied: bool = False) -> bool:
        """Reserve room to keep a tensor, or a copy of it; return False if there is none."""
        # Views share their storage, so it is counted once.
        storage = tensor.untyped_storage()
        if copied or storage._cdata not in self._storages:
            if storage.nbytes() > self.room_bytes:
                return False
            self.room_bytes -= storage.nbytes()
            self._storages.add(storage._cdata)
        return True

    @compat.torch.untraced
    def unpack(self, saved: CheckedTensor) -> torch.Tensor:
        """Saved-tensor hook: return what the outer hooks return, after comparing it with the reference."""
        # Compare nothing in a second backward, or when an engine or other code reads what a node has saved.
        if self.has_ended or self.changes.forward_runs or not self.schedule_end():
            return saved.load(saved.packed)
        tensor = saved.load(saved.packed)
        if saved.reference is not None and not compat.autograd.is_unused_random_state(tensor):
            with torch.no_grad(), compat.modes.unseen_by_modes():
                self._compare(saved.reference, tensor)
        saved.reference = None
        return tensor

    def _compare(self, reference: _Reference, tensor: torch.Tensor) -> None:
        """Compare a tensor that backward is given with the one that was saved."""
        if reference.seen.is_overwritten and reference.values is reference.seen.tensor:
            if reference.difference.operation != "weight":
                return  # without checkpointing, torch raises an error in this backward
            what: str | None = "it was changed in place before the backward"
            self.changes.causes.add("settings")
        elif _is_same_memory(reference.values, tensor):
            return
        else:
            what = difference_of(reference.values, tensor)
        self.compared += 1
        if what is not None:
            self.differences.append(dataclasses.replace(reference.difference, what=what))

    def schedule_end(self) -> bool:
        """Schedule the end of the check for the end of the running backward; return False if none is running."""
        if not self.ends and compat.autograd.call_after_backward(self._end):
            self.ends = True
            self.changes.backward_begins(self.whole)
        return self.ends

    def _end(self) -> None:
        """End the check: find the cause of the differences, and call `done`."""
        self.has_ended = True
        cause = self.changes.likely_cause()
        del self.changes  # the graph, which may live until the next step, holds the check
        # Backward finds the last tensors first. What differs first in the forward is nearest to the cause.
        self.differences.sort(key=lambda difference: difference.place)
        self.differences = [dataclasses.replace(difference, cause=cause) for difference in self.differences]
        self.done(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _the_same, (self.function,)  # a copy of the model has the block's function in the check's place


def _plain_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments whose values can be compared."""
    return [leaf for leaf in compat.torch.tree_leaves((args, kwargs)) if _is_plain(leaf)]


def _the_same(function: Any) -> Any:
    return function
