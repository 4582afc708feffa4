"""What a forward saw, and how to restore it: for recomputed blocks, for checks, and for steps that run again.

A block may change between its forward and its backward: the user sets another adapter, calls `eval()` or removes a
hook, or `torch.func.functional_call` ends and takes its parameters with it. A `ForwardState` records what the forward
saw. If the block differs when it is recomputed, the modes, adapters, hooks, attributes and tensors of the forward are
put back, and taken off again afterwards. If the block uses a value that is gone, because a tensor was overwritten or an
adapter was merged, it raises `ChangedBlockError`.

A recomputation runs in the context of the forward: context variables have the values that they had then, even in
autograd's own threads, and torch chooses kernels by the same switches. Other things that a block reads, such as
thread-local values, are not restored.

What a forward changes in the block itself (running statistics, a counter, a recurrent state) is recorded before the
forward. The recomputation starts from the recorded values and leaves the block as it found it, so each forward counts
once. Routers choose the same experts again, see `routers`. torch draws the same numbers again. So do Python's `random`
and `numpy.random` for a block that draws from them in its first forward.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_ckpt import compat
from hf_ckpt.engines.arguments import copied
from hf_ckpt.engines.routers import Choices
from hf_ckpt.engines.seen import Seen
from hf_ckpt.engines.settings import Place, is_ignored
from hf_ckpt.engines.settings import Settings as Settings
from hf_ckpt.errors import ChangedBlockError

_MISSING = object()


class _Stored(NamedTuple):
    """A buffer, or a tensor in an attribute, before a forward."""

    place: Place
    seen: Seen
    values: torch.Tensor | None
    """A copy of its values; None if there is none, because no forward has changed it so far."""


class _Held(NamedTuple):
    """An attribute that is a container, before a forward."""

    place: Place
    value: Any
    content: Any
    """A copy of the container."""


class ForwardState:
    """The state of a block before one of its forwards.

    Args:
        name: qualified name of the block.
        block: the block; None if unknown.
        settings: its settings; None if unknown.
        whole: whether its parameters stay on their device, unsharded, throughout a step. If not, they come and go, and
            are not compared.
        keeps_draws: whether a recomputation draws torch's random numbers again.
        inputs: tensors that the block is given, and that a recomputation gets as they are then.
    """

    def __init__(
        self,
        name: str,
        block: nn.Module | None,
        settings: Settings | None,
        *,
        whole: bool,
        keeps_draws: bool,
        inputs: Iterable[torch.Tensor] = (),
    ) -> None:
        self.name = name
        self.block = block
        self.settings = settings
        self.keeps_draws = keeps_draws
        self.context = compat.transformers.copied_context()
        self.switches = compat.switches.Switches()
        self.inputs = list(map(Seen, inputs))
        self.tensors: list[dict[str, torch.Tensor | None]] | None = None
        """Parameters and buffers by name, for each dict of `Settings.tensors`; None if they are not compared."""
        self.seen: list[Seen] = []
        """The same in one list, without those that are not set."""
        self.stored: list[_Stored] = []
        self.held: list[_Held] = []
        self.choices = Choices() if settings is not None and settings.chooses else None
        self.draws: compat.random_state.RandomState | None = None
        """Random state before the forward; None if the forward drew nothing."""
        if settings is not None and block is not None:
            if whole:
                self._see_tensors(settings)
            self._record(settings, settings.dicts(block))

    def _see_tensors(self, settings: Settings) -> None:
        seen = [Seen(tensor, address=True) for box in settings.tensors for tensor in box.values() if tensor is not None]
        # Inference tensors have no version, and a trace on fake tensors may change them freely.
        if any(each.version < 0 for each in seen) or (seen and compat.torch.is_fake(seen[0].tensor)):
            return
        self.seen = seen
        self.tensors = [box.copy() for box in settings.tensors]

    def _record(self, settings: Settings, dicts: list[dict[str, Any]]) -> None:
        """Record what the forward may change in the block."""
        for place in settings.state:
            tensor = dicts[place[0]].get(place[1])
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                values = settings.copy_before(place, tensor)
                self.stored.append(_Stored(place, Seen(_without_graph(tensor)), values))
        copies: dict[int, Any] = {}
        for place in settings.containers:
            value = dicts[place[0]].get(place[1])
            self.held.append(_Held(place, value, copied(value, copies, _without_graph)))

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the block for the first time, and record what a recomputation needs to run it in the same way."""
        settings = self.settings
        before = compat.random_state.RandomState(
            compat.random_state.devices_of(args),
            of_torch=self.keeps_draws,
            of_host=settings is None or settings.draws_on_host,
        )
        if self.choices is None:
            output = fn(*args)
        else:
            with self.choices.running():
                output = fn(*args)
        if before.may_have_moved():
            self.draws = before
        if settings is not None and settings.written is None:
            self._learn(settings, before)
        elif settings is not None:
            settings.changing.update(each.place for each in self.stored if each.seen.is_overwritten)
        return output

    def _learn(self, settings: Settings, before: compat.random_state.RandomState) -> None:
        """Record what the first forward under these settings has written and drawn."""
        settings.draws_on_host = before.of_host_has_moved()
        kept = []
        for each in self.stored:
            if _has_changed(each):
                settings.changing.add(each.place)
                kept.append(each)
        settings.written = {place for place, _ in self._overwritten()}
        # Copies of large buffers that this forward did not change are freed.
        for each in self.stored:
            if each.place not in settings.changing:
                kept.append(each._replace(values=settings.copy_before(each.place, each.seen.tensor)))
        self.stored = kept

    def refuse_overwritten_inputs(self) -> None:
        """Raise `ChangedBlockError` if a tensor that the block was given has been overwritten since."""
        for each in self.inputs:
            if each.is_overwritten:
                raise ChangedBlockError(self.name, f"{_described(each.tensor)} was overwritten")

    def recompute(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the block again, in the context and in the state of its forward.

        Raises `ChangedBlockError` for a value that cannot be restored.
        """
        return self.context.copy().run(self._recompute, fn, args)  # a copy: several threads may do so at once

    def _recompute(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with contextlib.ExitStack() as undo:
            undo.enter_context(self.switches.restored())
            if self.draws is not None:
                undo.enter_context(self.draws.restored())
            self._put_back(undo)
            if self.choices is not None:
                undo.enter_context(self.choices.running(again=True))
            return fn(*args)

    def _put_back(self, undo: contextlib.ExitStack) -> None:
        """Restore settings and tensors of the forward until `undo` ends, and refuse those that were overwritten.

        Raises `ChangedBlockError` if an adapter was merged since: that overwrites a weight, and neither its address nor
        its version shows it.
        """
        refused = {id(each.tensor): _described(each.tensor) for each in self.inputs if each.is_overwritten}
        settings = self.settings
        block = self.block
        if settings is not None and block is not None and not self._is_unchanged(settings, block):
            dicts = settings.dicts(block)
            self._put_back_attributes(settings, dicts, undo)
            self._put_back_boxes(settings, dicts, undo)
            for each in self.seen:
                if each.tensor.requires_grad != each.trained:
                    undo.callback(each.tensor.requires_grad_, each.tensor.requires_grad)
                    each.tensor.requires_grad_(each.trained)
            overwritten = {id(tensor) for place, tensor in self._overwritten() if place not in (settings.written or ())}
            if overwritten:
                named = {id(tensor): name for name, tensor in chain(block.named_parameters(), block.named_buffers())}
                refused |= {key: f"`{named[key]}`" if key in named else "a tensor of it" for key in overwritten}
        if refused:
            undo.enter_context(_Refused(self.name, refused))

    def _is_unchanged(self, settings: Settings, block: nn.Module) -> bool:
        """Whether a recomputation finds the block as the forward did, and changes nothing in it."""
        if settings.changing or not settings.hold(block):
            return False
        dicts = settings.dicts(block)
        if any(
            dicts[number].get(key) is not seen.tensor or seen.is_overwritten for (number, key), seen, _ in self.stored
        ):
            return False
        if not all(_is_same(dicts[number].get(key), value, content) for (number, key), value, content in self.held):
            return False
        if self.tensors is None:
            return True
        recorded = chain.from_iterable(map(dict.values, self.tensors))
        current = chain.from_iterable(map(dict.values, settings.tensors))
        if not all(map(operator.is_, recorded, current)):
            return False
        return not any(each.is_overwritten or each.tensor.requires_grad != each.trained for each in self.seen)

    def _restored_tensors(self) -> dict[Place, torch.Tensor]:
        """Return the buffers and tensors in attributes as they were before the forward, for one recomputation."""
        settings = self.settings
        assert settings is not None
        tensors = {}
        with compat.torch.unseen_by_modes():
            for place, seen, values in self.stored:
                changes = place in settings.changing or seen.is_overwritten
                tensors[place] = seen.tensor if values is None or not changes else values.clone()
        return tensors

    def _put_back_attributes(self, settings: Settings, dicts: list[dict[str, Any]], undo: contextlib.ExitStack) -> None:
        """Give every module the attributes of the forward, and undo what the recomputation does to them."""
        copies: dict[int, Any] = {}
        changeable = {place: copied(content, copies) for place, _, content in self.held}
        changeable |= self._restored_tensors()
        for number, plain in enumerate(settings.attributes):
            attributes = dicts[number]
            before = dict(attributes)
            wanted = {key: value for key, value in before.items() if key in settings.names[number]}
            wanted |= plain
            wanted |= {key: value for (owner, key), value in changeable.items() if owner == number}
            undo.callback(_become, attributes, before)
            _become(attributes, wanted)

    def _put_back_boxes(self, settings: Settings, dicts: list[dict[str, Any]], undo: contextlib.ExitStack) -> None:
        """Give every module the children, hooks, parameters and buffers of the forward."""
        for box, content in zip(settings.boxes, settings.contents, strict=True):
            if isinstance(box, dict):
                _lend(box, content, undo)
            elif box != content:
                raise ChangedBlockError(self.name, "adapters were merged into its weights, or taken out of them again")
        first = len(settings.attributes)
        restored = self._restored_tensors()
        for number, box in enumerate(settings.tensors):
            content = dict(box if self.tensors is None else self.tensors[number])
            content |= {key: tensor for (owner, key), tensor in restored.items() if owner == first + number}
            _lend(box, content, undo)

    def _overwritten(self) -> list[tuple[Place, torch.Tensor]]:
        """Return the parameters and buffers that were overwritten since the forward began, and that have no copy."""
        settings = self.settings
        if settings is None or self.tensors is None:
            return []
        first = len(settings.attributes)
        places = [
            (number, key)
            for number, box in enumerate(self.tensors, first)
            for key, tensor in box.items()
            if tensor is not None
        ]
        copied_places = {place for place, _, values in self.stored if values is not None}
        return [
            (place, each.tensor)
            for place, each in zip(places, self.seen, strict=True)
            if each.is_overwritten and place not in copied_places
        ]


def _without_graph(value: Any) -> Any:
    """Return a tensor without its graph, which would keep an earlier step alive; other values as they are.

    A recomputation needs the values only: backward runs through the graph of the forward.
    """
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    with compat.torch.unseen_by_modes():
        return value.detach().requires_grad_()


def _has_changed(stored: _Stored) -> bool:
    """Whether the first forward wrote a tensor: its version or its values moved. A batch norm moves no version."""
    seen, values = stored.seen, stored.values
    if seen.is_overwritten or values is None or compat.torch.is_fake(values):
        return True
    return not torch.equal(seen.tensor, values)


def _is_same(current: Any, value: Any, content: Any) -> bool:
    """Whether an attribute is still the same container with the same items. False where that cannot be told."""
    if current is not value or type(value) not in (list, dict, tuple) or len(value) != len(content):
        return False
    if isinstance(value, dict):
        return list(value) == list(content) and all(map(operator.is_, value.values(), content.values()))
    return all(map(operator.is_, value, content))


def _become(attributes: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Change attributes to those that are wanted, except for those that are none of the settings."""
    for key in [key for key in attributes if key not in wanted and not is_ignored(key)]:
        del attributes[key]
    for key, value in wanted.items():
        if attributes.get(key, _MISSING) is not value and not is_ignored(key):
            attributes[key] = value


def _lend(box: dict[Any, Any], content: dict[Any, Any], undo: contextlib.ExitStack) -> None:
    """Replace the content of a dict until `undo` ends."""
    undo.callback(_fill, box, dict(box))
    _fill(box, content)


def _fill(box: dict[Any, Any], content: dict[Any, Any]) -> None:
    """Give a dict this content, in this order. Other threads may read one that has it already."""
    if list(box) != list(content) or not all(map(operator.is_, box.values(), content.values())):
        box.clear()
        box.update(content)


def _described(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {list(tensor.shape)} that it was given"


class _Refused(TorchFunctionMode):
    """Raises `ChangedBlockError` when an operation uses one of some tensors.

    Only use counts: a block may hold tensors that it does not use, such as those of inactive adapters.

    Args:
        name: name of the block.
        tensors: id of a tensor -> its description.
    """

    def __init__(self, name: str, tensors: dict[int, str]) -> None:
        super().__init__()
        self.name = name
        self.tensors = tensors

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") == "__get__":  # of a type or a shape, or of a tensor, such as `.data`
            value = function(*args)
            if not isinstance(value, torch.Tensor):
                return value
        for value in compat.torch.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and id(value) in self.tensors:
                raise ChangedBlockError(self.name, f"{self.tensors[id(value)]} was overwritten")
        return function(*args, **(kwargs or {}))


class StepState:
    """What a step changes in a module beside gradients, for code that runs a step again: buffers and random state.

    Args:
        module: the module.
        devices: the devices whose random state to include besides the CPU's.
    """

    def __init__(self, module: nn.Module, devices: Iterable[torch.device]) -> None:
        self.random = compat.random_state.RandomState(devices)
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers() if not buffer.is_inference()]

    def restore(self) -> None:
        """Reset the module's buffers and the random state."""
        self.random.restore()
        with torch.no_grad():
            for buffer, values in self.buffers:  # compared by value: a batch norm does not count its changes
                if not torch.equal(buffer, values):
                    buffer.copy_(values)
