"""Compare the tensors that a block's backward gets with those that its forward saved, bit for bit.

For one forward, a `Check` replaces the block's checkpointing function, which may belong to hf_ckpt or to anything else.
It calls that function with a wrapper of the block's own forward, whose saved-tensor hooks nest inside the function's.
The inner hooks pass every tensor that autograd saves to the outer hooks, and keep a reference to it. When backward asks
for the tensor, they compare what the outer hooks return (recomputed, rebuilt, unpacked, or copied back from host
memory) with the reference. The block runs no more often than without the check. If a tensor differs, what else changed
between forward and backward tells the cause: see `CAUSES`.

Reentrant checkpointing saves nothing in the forward. There, the outputs of the forward are compared with those of the
recomputation.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.arguments import copied
from hf_ckpt.engines.seen import Seen, version_of
from hf_ckpt.engines.settings import Settings, is_setting

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> an integer type of that size, in which bits are compared."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor that backward got, and that differs from the one that the forward saved."""

    block: str
    """Qualified name of the block."""
    module: str
    """Name of the module inside the block that produced or saved the tensor; empty for the block itself."""
    operation: str
    """What produced the tensor: an autograd node (`MulBackward0`), or `input` for a tensor without a graph, `weight`,
    `parameter` for a weight that was changed in place, `buffer` for what the block itself overwrites, `output` or
    `gradient`."""
    shape: tuple[int, ...]
    what: str
    """What is different, in words."""
    place: int = 0
    """The number of the tensor among those that the forward saved."""
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
    if one.layout is not torch.strided or torch.equal(_bits(one), _bits(other)):
        return None
    count = int((_bits(one) != _bits(other)).sum())
    return f"{count:,} of {_bits(one).numel():,} values differ, by {share_of_difference(one, other):.2g} of their norm"


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def share_of_difference(one: torch.Tensor, other: torch.Tensor, least: float = 0.0) -> float:
    """Return the norm of the difference of two tensors of the same shape, over the norm of `one`, or `least` if larger.

    It is computed in host memory: some devices, such as `mps`, have no float64, and others have little free memory.
    """
    wide = torch.complex128 if one.is_complex() else torch.float64
    exact = one.detach().cpu().to(wide)
    norm, gap = max(least, float(exact.norm())), float((other.detach().cpu().to(wide) - exact).norm())
    return gap / norm if norm else (float("inf") if gap else 0.0)


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


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor can be compared."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not (
        tensor.is_nested or tensor.is_quantized or _has_no_values(tensor) or compat.torch.is_compiling()
    )


def _tensors(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in compat.torch.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


# --- what changed meanwhile -------------------------------------------------------------------------------------------

CAUSES = {
    "gradient": "Reentrant checkpointing needs an input that requires gradients: set use_reentrant to False.",
    "parameter": "Between forward and backward, parameters, settings of the block (train or eval mode, adapters, "
    "hooks, attributes) or autocast changed. Change them after the backward only, or copy the model for the change.",
    "rebuilds": "An operation was rebuilt from wrong inputs. Please report it; `policy: full` recomputes the block.",
    "stored": "The block did not run again: what stores or moves its tensors has changed them, by a buffer that is "
    "used again too early, a copy that has not ended, or a smaller type.",
    "inputs": "The block is recomputed from other inputs than it had: {inputs}. They were left out, the block changes "
    "them in place, or what stores them, such as offloading, has changed them.",
    "random": "Random numbers are drawn anew: set preserve_rng_state to True. hf_ckpt also restores the states of "
    "Python's `random` and numpy, which other checkpointing does not.",
    "updated": "The block updates {updated} in every run: hf_ckpt's `full` puts that back, and `selective` runs no "
    "block twice.",
    "unknown": "Unknown: the inputs, settings, random state and autocast of the recomputation were those of the "
    "forward. It may be a nondeterministic kernel (torch.use_deterministic_algorithms(True) names it), a random "
    "generator of its own, memory that is not written yet (RReLU as the last operation of a block: "
    "https://github.com/pytorch/pytorch/issues/193671), or what only the forward finds, such as a patched function or "
    "state of the process. `selective` runs no block twice.",
}
"""What differs, or what changed between forward and backward -> the cause and what to do about it. The first row whose
fact is known is the likely one."""


class _Facts(dict[str, Any]):
    """The rows of `CAUSES` that apply to one forward of a block and its backward -> their details.

    Args:
        module: the block, before its forward.
        args: the positional arguments of its forward, whose devices may draw random numbers.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        super().__init__(parameter=False, stored=True, unknown=True)
        self.module = module
        self.running = True
        """Whether the forward is still running."""
        self.tensors = {id(tensor): Seen(tensor) for tensor in (*module.parameters(), *module.buffers())}
        """The parameters and buffers of the block, as they were before its forward."""
        self.seen = [_seen_in(module)]
        """Attributes and buffers of the block before its forward, after it, and when its backward begins."""
        self.inputs: dict[tuple[str, int], Seen] = {}
        """(argument, number of the tensor in it) -> an input tensor of the block in its forward."""
        self.autocast = compat.devices.autocast_now()
        self.random = compat.random_state.RandomState(compat.random_state.devices_of([*module.parameters(), *args]))

    def forward_has_ended(self) -> None:
        """Record the block's settings, and what the forward changed."""
        self.running = False
        self.seen.append(_seen_in(self.module))
        self.settings = Settings(self.module)
        generators = (self.random.of_torch_has_moved, self.random.of_host_has_moved)
        self.drawn_from = [has_moved for has_moved in generators if has_moved()]
        """The generators that the forward drew from: whether they have moved since it began."""

    def backward_begins(self, whole: bool) -> None:
        """Compare with the block's settings at the beginning of its backward, and with its parameters if `whole`."""
        self.seen.append(_seen_in(self.module))
        are_others = whole and any(id(parameter) not in self.tensors for parameter in self.module.parameters())
        self["parameter"] |= are_others or not self.settings.hold(self.module)

    def runs_again(self, again: dict[tuple[str, int], torch.Tensor]) -> None:
        """Compare the first recomputation of the block, with the inputs `again`, with the forward."""
        others = [
            f"`{key[0]}`"
            for key, seen in self.inputs.items()
            if key not in again or seen.is_overwritten or difference_of(seen.tensor, again[key]) is not None
        ]
        self["inputs"] = ", ".join(list(dict.fromkeys(others))[:3])
        self["stored"], self.inputs = False, {}
        self["parameter"] |= compat.devices.autocast_now() != self.autocast
        self["random"] = any(has_moved() for has_moved in self.drawn_from)

    def updated_again(self) -> list[str]:
        """Return the names of buffers and attributes that the forward changed, and then the backward, too."""
        if len(self.seen) < 3:
            return []
        before, after, later = self.seen
        updated = [
            name
            for name, value in _seen_in(self.module).items()
            if before.get(name) != after.get(name) and later.get(name) != value
        ]
        self["updated"] = ", ".join(f"`{name}`" for name in updated)
        return updated

    def cause(self, first: Difference) -> str:
        """Return the likely cause of the first difference, and what to do about it."""
        self[first.operation] = True
        return next(text for fact, text in CAUSES.items() if self.get(fact)).format_map(self)


def _seen_in(module: nn.Module) -> dict[str, Any]:
    """Return qualified name -> copies of attributes with plain values, and (id, version) of buffers."""
    seen: dict[str, Any] = {}
    for name, inner in module.named_modules():
        # In lists, values are compared by identity first: NaN does not equal itself.
        values: dict[str, Any] = {k: copied([value], {}) for k, value in vars(inner).items() if is_setting(k, value)}
        values |= {key: (id(b), version_of(b)) for key, b in inner._buffers.items() if b is not None}
        seen |= {f"{name}.{key}" if name else key: value for key, value in values.items()}
    return seen


def _inputs_of(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[tuple[str, int], Any]:
    """Return (name of an argument, number of the tensor in it) -> tensor, for tensors that can be compared."""
    names = inspect.signature(module.forward).parameters
    named = {**dict(zip(names, (arg for arg in args if arg is not module), strict=False)), **keywords}
    return {
        (name, place): tensor
        for name, value in named.items()
        for place, tensor in enumerate(_tensors(value))
        if _is_plain(tensor)
    }


# --- one forward of one block -----------------------------------------------------------------------------------------


class Saved:
    """A tensor that autograd has saved: what the hooks around it hold in its place, and a reference to compare with."""

    __slots__ = ("load", "module", "operation", "packed", "place", "seen", "values")

    def __init__(self, tensor: torch.Tensor, hooks: compat.torch.SavedTensorHooks) -> None:
        self.packed, self.load = hooks[0](tensor), hooks[1]
        self.seen: Seen | None = None
        """The reference; None if the tensor is not compared, or was."""

    def refer_to(self, tensor: torch.Tensor, operation: str, place: int, module: str, *, copied: bool) -> None:
        """Keep the tensor, number `place` of its forward, which `module` saves, to compare it.

        Args:
            tensor: the tensor.
            operation: what produced it: see `Difference.operation`.
            place: its number among those that the forward saves.
            module: the name of the module that saves it.
            copied: whether to keep its values, because the recomputation overwrites the tensor.
        """
        self.operation, self.place, self.module = operation, place, module
        self.seen = Seen(tensor.detach())  # its graph would hold it: a reference cycle
        with compat.torch.unseen_by_modes():
            self.values: Any = self.seen.tensor.clone() if copied else self.seen.tensor
        """What to compare with."""


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

    def __init__(
        self,
        block: str,
        module: nn.Module,
        function: Callable[..., Any],
        *,
        room_bytes: int,
        put_back: Callable[[Check], None],
        done: Callable[[Check], None],
        whole: bool = True,
    ) -> None:
        self.block, self.module, self.function = block, module, function
        self.room_bytes, self.put_back, self.done, self.whole = room_bytes, put_back, done, whole
        self.compared = 0
        """Number of tensors that were compared, without those that are the same memory on both sides."""
        self.saved = 0
        """Number of tensors that the forward saved."""
        self.differences: list[Difference] = []
        """The differences, in the order in which the forward saved the tensors once the check has ended."""
        self.updated: list[str] = []
        """Buffers and attributes that both the forward and the recomputation updated, once the check has ended."""
        self.is_reentrant = False
        """Whether the block ran without gradients, as under reentrant checkpointing."""
        self.ends = False
        """Whether the end of the check is scheduled or has come."""
        self.facts: _Facts | None = None
        """What may be the cause of a difference, while the check runs."""
        self._first_call = threading.Lock()
        self._storages: set[int] = set()
        self._names = {id(inner): name for name, inner in module.named_modules()}

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `function(fn, *args)`, where `fn` is the block's own forward."""
        self.put_back(self)
        unusual = (
            not torch.is_grad_enabled()
            or compat.torch.is_compiling()
            or compat.devices.is_capturing()
            or compat.torch.transforms()
            or any(map(_has_no_values, args))
        )
        if unusual or not self._first_call.acquire(blocking=False):  # another thread may run the same block now
            return self.function(fn, *args)
        bound = fn if isinstance(fn, functools.partial) else functools.partial(fn)
        with compat.torch.unseen_by_modes():
            facts = self.facts = _Facts(self.module, args)
        output = self.function(functools.partial(_Forward(self, bound.func), *bound.args, **bound.keywords), *args)
        facts.forward_has_ended()
        trained = any(parameter.requires_grad for parameter in self.module.parameters())
        if self.is_reentrant and trained and not any(tensor.requires_grad for tensor in _tensors(output)):
            self._note(0, "gradient", (), "none reaches the block, although it is trained")
            self._end()
        elif not (self.saved or self.is_reentrant):
            self.done(self)
        return output

    @compat.torch.untraced  # compiled parts of a block call it
    def pack(self, outer: compat.torch.SavedTensorHooks, tensor: torch.Tensor) -> Saved:
        """Saved-tensor hook: pass a tensor to the `outer` hooks, and keep a reference to it."""
        assert self.facts is not None
        saved = Saved(tensor, outer)
        self.saved += 1
        before = self.facts.tensors.get(id(tensor)) or self.facts.tensors.get(id(tensor._base))
        is_written = before is not None and before.is_overwritten  # the recomputation will write to it again
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        operation = "input" if tensor.grad_fn is None else tensor.grad_fn.name()
        if before is not None:
            operation = "buffer"
        if is_weight and not is_written:
            operation = "weight"
        # A kernel may write to a buffer without counting that as a change, as batch norm does. It makes no use of the
        # buffer in backward, where it would find the values of the last forward without checkpointing.
        stays = self.whole or not is_weight
        can_be_compared = _is_plain(tensor) and stays and (operation != "buffer" or is_written)
        if can_be_compared and (operation == "weight" or self.has_room_for(tensor, copied=is_written)):
            running = (self._names[id(inner)] for inner in compat.frames.running_modules() if id(inner) in self._names)
            saved.refer_to(tensor, operation, self.saved, next(running, ""), copied=is_written)
        return saved

    def has_room_for(self, tensor: torch.Tensor, *, copied: bool = False) -> bool:
        """Whether there is room to keep a tensor, or a copy of it; if so, reserve it."""
        storage = tensor.untyped_storage()
        if copied or storage._cdata not in self._storages:
            if storage.nbytes() > self.room_bytes:
                return False
            self.room_bytes -= storage.nbytes()
            self._storages.add(storage._cdata)
        return True

    @compat.torch.untraced
    def unpack(self, saved: Saved) -> torch.Tensor:
        """Saved-tensor hook: return what the outer hooks return, after comparing it with the reference."""
        # Compare nothing in a second backward, or when an engine or other code reads what a node has saved.
        if self.facts is None or self.facts.running or not self.end_later():
            return saved.load(saved.packed)
        tensor = saved.load(saved.packed)
        if saved.seen is not None and not compat.torch.is_unused_random_state(tensor):
            with torch.no_grad(), compat.torch.unseen_by_modes():
                self._compare(saved, saved.seen, tensor)
        saved.seen = saved.values = None
        return tensor

    def _compare(self, saved: Saved, seen: Seen, tensor: torch.Tensor) -> None:
        """Compare a tensor that backward is given with the one that was saved."""
        is_copied = saved.values is not seen.tensor
        has_changed = seen.is_overwritten and not is_copied
        if has_changed and saved.operation != "weight":
            return  # without checkpointing, torch raises an error in this backward
        if _is_same_memory(saved.values, tensor) and not has_changed:
            return
        what = "it was changed in place before the backward" if has_changed else difference_of(saved.values, tensor)
        self.compared += 1
        if what is not None:
            operation = "parameter" if has_changed else saved.operation
            self._note(saved.place, operation, tuple(seen.tensor.shape), what, saved.module)

    def compare_outputs(self, first: list[torch.Tensor], again: list[torch.Tensor]) -> None:
        """Compare the outputs of the forward with those of the recomputation."""
        if len(first) != len(again):  # torch drops the gradients of those that are missing
            self._note(1, "output", (), f"{len(again)} tensors instead of {len(first)}")
        for place, (one, other) in enumerate(zip(first, again, strict=False), 1):
            self.compared += 1
            found = difference_of(one, other)
            if found is not None:
                self._note(place, "output", tuple(one.shape), found)

    def _note(self, place: int, operation: str, shape: tuple[int, ...], what: str, module: str = "") -> None:
        self.differences.append(Difference(self.block, module, operation, shape, what, place))

    def end_later(self) -> bool:
        """Schedule the end of the check for the end of the running backward; return False if none is running."""
        if not self.ends and compat.torch.call_after_backward(self._end):
            self.ends = True
            assert self.facts is not None
            self.facts.backward_begins(self.whole)
        return self.ends

    def _end(self) -> None:
        """End the check: find the cause of the differences, and call `done`."""
        self.ends = True
        facts, self.facts = self.facts, None
        assert facts is not None
        self.updated = facts.updated_again()
        if self.differences:
            facts["rebuilds"] = not getattr(self.function, "runs_block_again", True)
            self.differences.sort(key=lambda difference: difference.place)
            cause = facts.cause(self.differences[0])
            self.differences = [dataclasses.replace(difference, cause=cause) for difference in self.differences]
        self.done(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _the_same, (self.function,)  # a copy of the model has the block's function in the check's place


def _the_same(function: Any) -> Any:
    return function


class _Forward:
    """The forward of a block. Only its first call runs under the saved-tensor hooks of a check."""

    def __init__(self, check: Check, function: Callable[..., Any]) -> None:
        self.check, self.function = check, function
        self.ran = False
        self.outputs: list[torch.Tensor] | None = None
        """The outputs of the first call, if gradients were off and nothing was saved."""
        self.__self__ = getattr(function, "__self__", None)  # until transformers 5.17, engines find the block by it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check, facts = self.check, self.check.facts
        if facts is None:  # the check has ended
            return self.function(*args, **kwargs)
        with torch.no_grad(), compat.torch.unseen_by_modes():
            if not self.ran:
                inputs = _inputs_of(check.module, args, kwargs)
                facts.inputs = {key: Seen(t.detach()) for key, t in inputs.items() if check.has_room_for(t)}
            elif facts["stored"] and not facts.running:
                facts.runs_again(_inputs_of(check.module, args, kwargs))
        if not self.ran:
            self.ran = True
            return self._run_first(args, kwargs)
        first, self.outputs = self.outputs, None
        if first is not None:
            check.end_later()
        output = self.function(*args, **kwargs)
        if first is not None:
            with torch.no_grad(), compat.torch.unseen_by_modes():
                check.compare_outputs(first, _tensors(output))
        return output

    def _run_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward under the hooks of the check, inside those of the checkpointing function."""
        check = self.check
        if not torch.is_grad_enabled():
            check.is_reentrant = True
            output = self.function(*args, **kwargs)
            self.outputs = [tensor.detach() for tensor in _tensors(output)]
            return output
        outer = compat.torch.top_saved_tensor_hooks()
        if outer is None:
            return self.function(*args, **kwargs)
        # The graph refers to `unpack` only, so not to the outer hooks, which hold the inputs of the block.
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(check.pack, outer), check.unpack):
            return self.function(*args, **kwargs)
