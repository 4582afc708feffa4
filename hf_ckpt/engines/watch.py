"""The watch: compare what the backward of a block is given with what its forward saved, bit for bit.

For one forward a `Check` takes the place of the block's checkpointing function, which may be one of hf_ckpt or of
anything else. It calls that function with the block's own forward in a wrapper, whose saved-tensor hooks lie inside
those of the function. Every tensor that autograd saves goes on to the hooks outside, and a reference to it stays here.
When backward asks for the tensor, the one that comes from outside (recomputed, rebuilt, unpacked, or copied back from
host memory) is compared with the reference. The block runs no more often than without the watch.

Reentrant checkpointing saves nothing in the forward. There, what the block returned is compared with what it returns
when it runs again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.models.blocks import routers

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> an integer type of that size, in which bits are compared."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor that backward was given, and that is not the one that the forward saved."""

    block: str
    """Qualified name of the block; or the head, or a feed-forward, in chunks."""
    module: str
    """Name of the module inside the block that made the tensor, or that saved it; empty for the block itself."""
    operation: str
    """What made the tensor: an operation of autograd (`MulBackward0`), `parameter`, `buffer`, `output`, or `input` for
    a tensor without a graph."""
    shape: tuple[int, ...]
    what: str
    """What is different, in words."""
    share: float
    """Norm of the difference over the norm of the original; infinite where they cannot be subtracted."""
    cause: str = ""
    """The likely cause and what to do about it."""

    def __str__(self) -> str:
        where = f"{self.block}.{self.module}" if self.module else self.block
        shape = " x ".join(map(str, self.shape)) or "a number"
        return f"in `{where}`: {self.operation} ({shape}): {self.what}. {self.cause}".rstrip()


class Check:
    """The check of one forward of one block, and of the backward that belongs to it.

    Args:
        block: qualified name of the block.
        module: the block.
        function: its checkpointing function, called as `function(fn, *args)`.
        room_bytes: the most bytes of tensors to keep. Tensors beyond are not compared.
        put_back: called with the check when the forward begins; gives the block its function again.
        on_gradient: has a function called with the gradient of a tensor; a check by a second run needs it.
        whole: whether all parameters lie whole on their device throughout a step. If not, they are not compared.
        done: called with the check when the backward has ended; or already when the forward has, if that has saved
            nothing, as the forward of a frozen block does.
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
        """Tensors that were compared."""
        self.left_out = 0
        """Tensors that were saved, but could not be compared: there was no room, or they were changed in place."""
        self.saved = 0
        """Tensors that the forward saved."""
        self.found: list[tuple[int, Difference]] = []
        """The differences, each with the place of the tensor among those that were saved."""
        self.kept_bytes = 0
        """Bytes of the tensors that were kept to be compared, parameters left out."""
        self.room_bytes = room_bytes
        self.put_back, self.on_gradient, self.done = put_back, on_gradient, done
        self._first_call = threading.Lock()
        self._storages: set[int] = set()
        self._names: dict[int, str] = {}
        self._outer: compat.SavedTensorHooks | None = None
        """The hooks outside while the forward runs. They hold the inputs of the block."""
        self._run: Callable[[], Any] | None = None
        """Runs the block once more, on the same inputs, to find the cause of a difference."""
        self._reentrant = False
        """Whether the block ran without gradients, to run again in backward."""
        self._ends = False
        """Whether `_end` was asked for, or has come."""
        self._before: _State | None = None

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `function(fn, *args)` for `fn`, the block's own forward."""
        self.put_back(self)
        if not self.is_first_call():
            return self.function(fn, *args)
        unusual = compat.is_compiling() or compat.is_capturing() or compat.transforms()
        if not torch.is_grad_enabled() or unusual or any(map(_has_no_values, args)):
            return self.function(fn, *args)
        self._names = {id(module): name for name, module in self.module.named_modules()}
        if isinstance(fn, functools.partial):
            watched = functools.partial(_Forward(self, fn.func), *fn.args, **fn.keywords)
        else:
            watched = functools.partial(_Forward(self, fn))
        inputs = [*args, *watched.keywords.values()]
        tensors = [leaf for leaf in compat.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        if all(self._take_room_for(tensor, is_input=True) for tensor in tensors):
            self._run = functools.partial(fn, *args)
        self._before = _State(self.module, inputs if self._run is not None else [])
        try:
            output = self.function(watched, *args)
        finally:
            self._outer = None
        self._before.forward_has_ended()
        trained = any(parameter.requires_grad for parameter in self.module.parameters())
        if trained and not any(_has_graph(value) for value in compat.tree_leaves(output)):
            self.note(0, "gradient", (), "none reaches the block, although it is trained", 1.0)
            self._end()
        elif not (self.saved or self._reentrant):
            self._run = None
            self.done(self)
        return output

    def is_first_call(self) -> bool:
        """Whether this is the first call: another thread may run the same block at the same moment."""
        return self._first_call.acquire(blocking=False)

    # --- the forward ---

    def begins(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> _State:
        """Note how the block is about to run for the first time."""
        assert self._before is not None
        with torch.no_grad(), compat.unseen_by_modes():
            self._before.first_run(args, keywords, self._take_room_for)
        return self._before

    @compat.untraced  # compiled parts of a block call it
    def pack(self, tensor: torch.Tensor) -> Any:
        """Saved-tensor hook: pass a tensor on to the hooks outside, and keep a reference to it."""
        assert self._outer is not None
        held = _Held(self._outer[0](tensor), self._outer[1])
        self.saved += 1
        if not _is_plain(tensor):
            self.left_out += 1
            return held
        parameter = _parameter_of(tensor)
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
        """Whether there is room to keep a tensor; if so, it is taken. Inputs are kept by most actions anyway."""
        if not _is_plain(tensor):
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
        """Saved-tensor hook: return what the hooks outside return, after it was compared with the original."""
        if self._before is None or self._before.running:  # a second backward, or an engine reads what a node has saved
            return held.load(held.value)
        self._end_later()
        tensor = held.load(held.value)
        original, held.original = held.original, None
        if original is not None:
            with torch.no_grad(), compat.unseen_by_modes():
                self._compare(original, tensor)
        return tensor

    def _compare(self, original: _Original, tensor: torch.Tensor) -> None:
        if original.parameter is not None:
            if original.is_unchanged_parameter(tensor):
                self.compared += 1
                return
            if original.parameter_has_changed():
                name = next((n for n, p in self.module.named_parameters() if p is original.parameter), "")
                text = "changed in place, or replaced, between the forward and the backward"
                self.note(original.place, "parameter", original.shape, f"`{name}` was {text}", 1.0)
                return
        elif original.has_changed():  # without checkpointing torch refuses this backward
            self.left_out += 1
            return
        self.compared += 1
        found = _difference_of(original.tensor, tensor)
        if found is not None:
            self.note(original.place, original.operation, original.shape, *found, module=original.module)

    def compare_outputs(self, first: list[torch.Tensor], again: list[torch.Tensor]) -> None:
        """Compare what the block returned with what it returns when it is run again."""
        with torch.no_grad(), compat.unseen_by_modes():
            if len(first) != len(again):
                text = f"{len(again)} tensors come out of the recomputation, {len(first)} came out of the forward"
                self.note(1, "output", (), text, float("inf"))
                return
            for place, (one, other) in enumerate(zip(first, again, strict=True), 1):
                self.compared += 1
                found = _difference_of(one, other)
                if found is not None:
                    self.note(place, "output", tuple(one.shape), *found)

    def note(self, place: int, operation: str, shape: tuple[int, ...], what: str, share: float, **more: str) -> None:
        """Note a difference of the tensor that was saved at a place; `more` are further fields of `Difference`."""
        self.found.append(
            (place, Difference(self.block, more.pop("module", ""), operation, shape, what, share, **more))
        )

    def _end_later(self) -> None:
        """Have `_end` called when the backward that runs now has ended."""
        if not self._ends:
            self._ends = True
            assert self._before is not None
            self._before.backward_begins()
            compat.call_after_backward(self._end)

    def _end(self) -> None:
        """Find the cause of what is different, and tell that the check has ended."""
        self._ends = True
        before, self._before = self._before, None
        assert before is not None
        for name in before.updated_again():
            text = f"`{name}` was updated once more by the recomputation"
            self.note(self.saved + 1, "buffer", (), text, 1.0)
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
    """The forward of a block: the first call saves tensors under the hooks of a check, later calls are left alone."""

    def __init__(self, check: Check, function: Callable[..., Any]) -> None:
        self.function = function
        self.check: Check | None = check
        """None once it is not needed: the hooks outside may hold this forward, and the check holds the hooks."""
        self.before: _State | None = None
        """To be compared with how the block runs again."""
        self.ran = False
        self.first: list[torch.Tensor] | None = None
        """What the first call returned, where nothing was saved because gradients were off."""
        self.__self__ = getattr(function, "__self__", None)  # until transformers 5.17 engines find the block by it

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
    """What autograd holds in the place of a tensor."""

    __slots__ = ("load", "original", "value")

    def __init__(self, value: Any, load: Callable[[Any], torch.Tensor]) -> None:
        self.value, self.load = value, load
        """What the hooks outside hold in its place, and their function that returns the tensor."""
        self.original: _Original | None = None


class _Original:
    """A tensor that autograd has saved."""

    __slots__ = ("address", "module", "operation", "parameter", "place", "shape", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, parameter: nn.Parameter | None, place: int, module: str) -> None:
        self.parameter, self.place, self.module = parameter, place, module
        self.operation = "input" if tensor.grad_fn is None else tensor.grad_fn.name()
        self.shape = tuple(tensor.shape)
        self.tensor = tensor.detach()  # its graph would hold it, and so be a cycle
        self.version = _version(tensor)
        self.address = 0 if parameter is None else parameter.data_ptr()

    def has_changed(self) -> bool:
        return self.version >= 0 and self.tensor._version != self.version

    def is_unchanged_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the parameter that was saved, with the same values."""
        return _parameter_of(tensor) is self.parameter and not self.parameter_has_changed()

    def parameter_has_changed(self) -> bool:
        assert self.parameter is not None
        return self.has_changed() or self.parameter.data_ptr() != self.address


class _State:
    """How a block ran for the first time and again, from which the cause of a difference is told.

    Args:
        module: the block.
        inputs: what its checkpointing function was given for it.
    """

    def __init__(self, module: nn.Module, inputs: list[Any]) -> None:
        self.module, self.inputs = module, inputs
        self.running = True
        """Whether the forward is still running."""
        self.versions = _versions(inputs)
        self.settings: dict[str, dict[str, Any]] = {}
        self.parameters = _parameters(module)
        self.buffers: list[tuple[str, int, int]] = []
        self.changed: list[tuple[str, str]] = []
        """What is set otherwise when the backward begins: (setting, qualified name of the module)."""
        self.replaced = False
        """Whether other tensors are in the places of the parameters when the backward begins."""
        self.changes_input = False
        self.autocast = _autocast()
        self.given: dict[tuple[int | str, int], tuple[torch.Tensor, int]] = {}
        """The tensors that the block was given for the first run, with their versions, as far as there was room."""
        self.names: set[int | str] = set()
        self.random: compat.RandomState | None = None
        self.ran_again = False
        self.missing: list[str] = []
        """Names of arguments that the block was not given again."""
        self.given_others: list[str] = []
        """Arguments that had other values when the block ran again."""
        self.other_autocast = self.other_random = self.other_host = False
        """Whether autocast and random state were others when the block ran again."""

    def first_run(
        self, args: tuple[Any, ...], keywords: dict[str, Any], take_room_for: Callable[[torch.Tensor], bool]
    ) -> None:
        """Note what the block is given, and the random state."""
        given = {key: value for key, value in _tensors(args, keywords).items() if take_room_for(value)}
        self.given = {key: (value.detach(), _version(value)) for key, value in given.items()}
        self.names = {*range(len(args)), *keywords}
        self.random = compat.RandomState(compat.all_devices())

    def forward_has_ended(self) -> None:
        self.running = False
        self.changes_input = _versions(self.inputs) != self.versions
        self.inputs = []  # their graph may hold what holds this: a cycle
        self.settings = _settings(self.module)

    def backward_begins(self) -> None:
        self.buffers = _buffers(self.module)
        now = _settings(self.module)
        self.changed = [
            (key, name)
            for name, before in self.settings.items()
            for key, value in before.items()
            if now.get(name, before).get(key, value) != value
        ]
        self.replaced = _parameters(self.module) != self.parameters

    def next_run(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Compare with `first_run`, the first time that the block runs again."""
        assert self.random is not None
        self.ran_again = True
        again = _tensors(args, keywords)
        self.missing = [str(name) for name in self.names - {*range(len(args)), *keywords}]
        self.given_others = [
            f"`{self._name_of(name, args)}`"
            for (name, place), (value, version) in self.given.items()
            if (name, place) in again
            and (_version(value) != version or _difference_of(value, again[name, place]) is not None)
        ]
        self.given = {}
        self.other_autocast = _autocast() != self.autocast
        self.other_random, self.other_host = self.random.of_torch_has_moved(), self.random.of_host_may_have_moved()

    def _name_of(self, place: int | str, args: tuple[Any, ...]) -> str:
        """The name of an argument of the block's forward."""
        if isinstance(place, str):
            return place
        names = list(inspect.signature(self.module.forward).parameters)  # without the block itself
        place -= any(arg is self.module for arg in args)
        return names[place] if place < len(names) else f"argument {place}"

    def updated_again(self) -> list[str]:
        """Names of the buffers that were changed during the backward."""
        now = set(_buffers(self.module))
        return [name for name, *mark in self.buffers if (name, *mark) not in now]

    def cause(self, run: Callable[[], Any] | None, first: Difference, rebuilds: bool) -> str:
        """The likely cause of the first difference, and what to do about it.

        `run` runs the block once more, if that is possible. `rebuilds` says whether the engine is one of hf_ckpt that
        rebuilds single tensors.
        """
        known = self._cause_told_by_state(run is not None, first, rebuilds)
        if known:
            return known
        drawn = None if run is None else _draws(self.module, run, self.autocast)
        if drawn is not None and drawn.differs:
            return (
                "Run twice from the same random state, the block gives other results by itself: a nondeterministic "
                "kernel (torch.use_deterministic_algorithms(True) names it) or a random generator of its own."
            )
        experts = " So tokens may go to other experts." if routers(self.module) else ""
        if self.other_random and (drawn is None or drawn.from_torch):
            return f"Random numbers are drawn anew: set preserve_rng_state to True.{experts}"
        if self.other_host and drawn is not None and drawn.from_host:
            return (
                "The block draws from Python's `random` or numpy, whose state the recomputation does not restore."
                f"{experts}"
            )
        if first.operation != "buffer" and (updated := self.updated_again()):
            return f"The block reads `{updated[0]}`, a buffer that it updates itself in every run.{experts}"
        if self.changed:
            return f"Unknown; {self._changes()} changed between forward and backward.{experts}"
        if self.other_random:
            return f"Unknown: something that the block reads has changed between forward and backward.{experts}"
        return (
            "Unknown: the inputs, settings, random state and autocast of the recomputation were those of the forward. "
            f"The block reads something else, or saves memory that is not written yet.{experts}"
        )

    def _cause_told_by_state(self, whole: bool, first: Difference, rebuilds: bool) -> str:
        """The cause, where it can be told without running the block once more; else nothing."""
        if first.operation == "parameter":
            return "Change parameters after the backward only (optimizers do), or copy the model for the change."
        if first.operation == "buffer":
            return (
                "The block updates it in every run: hf_ckpt's `full` puts it back, and `selective` runs no block twice."
            )
        if first.operation == "gradient":
            return "Reentrant checkpointing needs an input that requires gradients: set use_reentrant to False."
        if any(key in SETTINGS for key, _ in self.changed):
            return f"Between forward and backward {self._changes()} changed. Do that after the backward."
        if self.replaced and whole:
            return (
                "Between forward and backward the parameters were exchanged for others, as `functional_call` does. "
                "Call backward before it ends, or use hf_ckpt's `full`."
            )
        if self.changes_input:
            return "The block changes its input in place, and is recomputed from the changed input."
        if rebuilds:
            return "An operation was rebuilt from wrong inputs. Please report it; `policy: full` recomputes the block."
        if not self.ran_again:
            return (
                "The block did not run again: what stores or moves its tensors has changed them, by a buffer that is "
                "used again too early, a copy that has not ended, or a smaller type."
            )
        if self.missing:
            return f"The recomputation leaves out {', '.join(f'`{name}`' for name in sorted(self.missing))}."
        if self.given_others:
            return (
                f"The block is recomputed from other inputs than it had: {', '.join(self.given_others[:3])}. They were "
                "changed in place, or what stores them, such as offloading, has changed them."
            )
        if self.other_autocast or "type" in first.what:
            return "The recomputation ran under another autocast: enter autocast around the forward in the same way."
        return ""

    def _changes(self) -> str:
        known = [(SETTINGS[key], name) for key, name in self.changed if key in SETTINGS]
        of = known or [(f"`{key}`", name) for key, name in self.changed]
        names = dict.fromkeys(f"{what} of {f'`{name}`' if name else 'the block'}" for what, name in of)
        return ", ".join(list(names)[:4])


@dataclasses.dataclass(frozen=True)
class _Draws:
    """What two further runs of a block, from the same random state, have shown."""

    differs: bool
    from_host: bool
    """Whether numbers were drawn from Python's `random` or from numpy."""
    from_torch: bool


def _draws(module: nn.Module, run: Callable[[], Any], autocast: dict[str, torch.dtype | None]) -> _Draws | None:
    """Run a block twice without gradients; None where it cannot run. Random state and buffers stay as they are."""
    state = compat.RandomState(compat.all_devices())
    outputs: list[list[torch.Tensor]] = []
    from_host = from_torch = False
    with contextlib.ExitStack() as around:
        around.enter_context(torch.no_grad())
        around.enter_context(compat.unseen_by_modes())
        for kind, dtype in autocast.items():
            around.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
        try:
            for _ in range(2):
                with state.kept(), _buffers_put_back(module):
                    outputs.append([v.clone() for v in compat.tree_leaves(run()) if torch.is_tensor(v)])
                    from_host, from_torch = state.of_host_may_have_moved(), state.of_torch_has_moved()
        except RuntimeError:  # its inputs were changed, or their memory is in use again
            return None
    one, other = outputs
    differs = len(one) != len(other) or any(_difference_of(*pair) for pair in zip(one, other, strict=True))
    return _Draws(differs, from_host, from_torch)


@contextlib.contextmanager
def _buffers_put_back(module: nn.Module) -> Iterator[None]:
    copies = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_inference()]
    try:
        yield
    finally:
        for buffer, copied in copies:
            if _difference_of(buffer, copied) is not None:
                buffer.copy_(copied)


SETTINGS = {
    "training": "train or eval mode",
    "_active_adapter": "the active adapter",
    "_disable_adapters": "whether adapters are on,",
    "_forward_hooks": "hooks",
    "_forward_pre_hooks": "hooks",
}
"""Attributes of modules that decide how they run -> what to call them."""


def _settings(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Of every module below: its mode, adapters and hooks, and other attributes that are plain values."""
    found: dict[str, dict[str, Any]] = {}
    for name, inner in module.named_modules():
        settings: dict[str, Any] = {}
        for key, value in vars(inner).items():
            if isinstance(value, bool | int | float | str | None):
                settings[key] = value
            elif key in SETTINGS:
                settings[key] = list(value) if "hooks" in key else str(value)
        found[name] = settings
    return found


def _buffers(module: nn.Module) -> list[tuple[str, int, int]]:
    return [(name, id(buffer), _version(buffer)) for name, buffer in module.named_buffers()]


def _parameters(module: nn.Module) -> list[int]:
    """What is in the places of the parameters of a block, to be compared."""
    return [id(value) for inner in module.modules() for value in vars(inner)["_parameters"].values()]


def _versions(inputs: list[Any]) -> list[int]:
    return [_version(leaf) for leaf in compat.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; -1 for an inference tensor, which does not count that."""
    return -1 if tensor.is_inference() else tensor._version


def _tensors(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[tuple[int | str, int], torch.Tensor]:
    """(place or name of an argument, number of the tensor in it) -> tensor, for those whose values can be compared."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *keywords.items()]
    return {
        (name, place): leaf
        for name, value in named
        for place, leaf in enumerate(compat.tree_leaves(value))
        if isinstance(leaf, torch.Tensor) and _is_plain(leaf)
    }


def _autocast() -> dict[str, torch.dtype | None]:
    return {kind: compat.autocast_dtype(kind) for kind in {"cpu", compat.accelerator_type() or "cpu"}}


def _parameter_of(tensor: torch.Tensor) -> nn.Parameter | None:
    """The parameter that a tensor is, or is a view of."""
    leaf = tensor if isinstance(tensor, nn.Parameter) else tensor._base
    return leaf if isinstance(leaf, nn.Parameter) and leaf.is_leaf else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values that can be compared here."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not _has_no_values(tensor) and not compat.is_compiling()


def _has_no_values(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (compat.is_fake(value) or value.is_meta)


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _difference_of(one: torch.Tensor, other: torch.Tensor) -> tuple[str, float] | None:
    """What is different between two tensors, in words, and the norm of the difference over that of `one`.

    None where they have the same shape, type and bits.
    """
    if one.shape != other.shape:
        return f"shape {tuple(other.shape)} instead of {tuple(one.shape)}", float("inf")
    if one.dtype != other.dtype:
        return f"type {other.dtype} instead of {one.dtype}", float("inf")
    if one.device != other.device:
        return f"on {other.device} instead of {one.device}", float("inf")
    if one.layout is not torch.strided or torch.equal(_bits(one), _bits(other)):
        return None
    count = int((_bits(one) != _bits(other)).sum())
    share = share_of_difference(one, other)
    numbers = one.numel() * (2 if one.is_complex() else 1)
    return f"{count:,} of {numbers:,} values differ, by {share:.2g} of their norm", share


def share_of_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference of two tensors of one shape, over the norm of `one`."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    exact = one.to(wide)
    norm, gap = float(exact.norm()), float((other.to(wide) - exact).norm())
    return gap / norm if norm else (float("inf") if gap else 0.0)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor as integers of the same bits, conjugate and negative views resolved."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.element_size()])
