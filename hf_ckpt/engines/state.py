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
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_ckpt import compat
from hf_ckpt.engines.arguments import copied
from hf_ckpt.engines.routers import Choices
from hf_ckpt.engines.seen import NO_TENSORS, Seen, SeenTensors
from hf_ckpt.engines.settings import Place, Settings, is_ignored
from hf_ckpt.errors import ChangedBlockError


class _Stored(NamedTuple):
    """A buffer, or a tensor in an attribute, before a forward."""

    place: Place
    seen: Seen
    values: torch.Tensor | None
    """A copy of its values; None if there is none, because it is large and no forward has changed it so far."""


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
        inputs: SeenTensors = NO_TENSORS,
    ) -> None:
        self.name = name
        self.block = block
        self.settings = settings
        self.keeps_draws = keeps_draws
        self.context = compat.transformers.copied_context()
        self.switches = compat.switches.Switches()
        self.inputs = inputs
        self.names: list[str] = []
        """The names in all dicts of `Settings.tensors`, in order; empty if parameters and buffers are not compared."""
        self.values: list[torch.Tensor | None] = []
        """The parameters and buffers of these names."""
        self.seen = NO_TENSORS
        """The same ones, without None."""
        self.stored: list[_Stored] = []
        self.held: list[_Held] = []
        self.choices = Choices() if settings is not None and settings.chooses else None
        self.draws: compat.random_state.RandomState | None = None
        """Random state before the forward; None if the forward drew nothing."""
        if settings is not None and block is not None:
            if whole:
                self._see_tensors(settings)
            self._record(settings, block)

    def _see_tensors(self, settings: Settings) -> None:
        values = _values(settings.tensors)
        seen = SeenTensors([tensor for tensor in values if tensor is not None], addresses=True)
        # Inference tensors have no version, and a trace on fake tensors may change them freely.
        if seen.tensors and -1 not in seen.versions and not compat.torch.is_fake(seen.tensors[0]):
            self.names = list(chain(*settings.tensors))
            self.values = values
            self.seen = seen

    def _boxes(self, settings: Settings) -> list[dict[str, torch.Tensor | None]]:
        """Return the parameters and buffers by name, for each dict of `Settings.tensors`."""
        items = zip(self.names, self.values, strict=True)
        return [dict(islice(items, size)) for size in settings.sizes[len(settings.attributes) :]]

    def _record(self, settings: Settings, block: nn.Module) -> None:
        """Record what the forward may change in the block."""
        if not settings.state and not settings.containers:
            return
        dicts = settings.dicts(block)
        for place in settings.state:
            tensor = dicts[place[0]].get(place[1])
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                is_copied = settings.written is None or settings.copies_always(place, tensor)
                values = tensor.detach().clone() if is_copied else None
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
        elif settings is not None and self.stored:
            settings.changing.update(each.place for each in self.stored if each.seen.is_overwritten)
        return output

    def _learn(self, settings: Settings, before: compat.random_state.RandomState) -> None:
        """Record what the first forward under these settings has written and drawn."""
        settings.draws_on_host = before.of_host_has_moved()
        settings.changing.update(each.place for each in self.stored if _has_changed(each))
        settings.written = set(self._overwritten(settings))
        # Copies of large buffers that this forward did not change are freed.
        for number, (place, seen, _) in enumerate(self.stored):
            if not settings.copies_always(place, seen.tensor):
                self.stored[number] = _Stored(place, seen, None)

    def refuse_overwritten_inputs(self) -> None:
        """Raise `ChangedBlockError` if a tensor that the block was given has been overwritten since."""
        for tensor, _ in self.inputs.overwritten():
            raise ChangedBlockError(self.name, f"{_described(tensor)} was overwritten")

    def recompute(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the block again, in the context and in the state of its forward.

        Raises `ChangedBlockError` for a value that cannot be restored.
        """
        # A copy, because several threads may do so at once.
        return self.context.copy().run(self.switches.run, self._recompute, fn, args)

    def _recompute(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        is_unchanged = self._is_unchanged()
        if is_unchanged and self.draws is None and self.choices is None:
            return fn(*args)
        with contextlib.ExitStack() as undo:
            if self.draws is not None:
                undo.enter_context(self.draws.restored())
            if not is_unchanged:
                self._put_back(undo)
            if self.choices is not None:
                undo.enter_context(self.choices.running(again=True))
            return fn(*args)

    def _put_back(self, undo: contextlib.ExitStack) -> None:
        """Restore settings and tensors of the forward until `undo` ends, and refuse those that were overwritten.

        Raises `ChangedBlockError` if an adapter was merged since: that overwrites a weight, and neither its address nor
        its version shows it.
        """
        refused = {id(tensor): _described(tensor) for tensor, _ in self.inputs.overwritten()}
        settings = self.settings
        block = self.block
        if settings is not None and block is not None:
            for box, content in self._contents(settings, settings.dicts(block)):
                # DeepSpeed's dicts of parameters have no `copy`.
                found = list(box) if isinstance(box, list) else dict(box)
                undo.callback(_fill, box, found)  # also undoes what the recomputation itself changes
                _fill(box, content)
            for tensor, trained in zip(self.seen.tensors, self.seen.trained, strict=True):
                if tensor.requires_grad != trained:
                    undo.callback(tensor.requires_grad_, tensor.requires_grad)
                    tensor.requires_grad_(trained)
            overwritten = self._overwritten(settings)
            names = {id(tensor): name for name, tensor in chain(block.named_parameters(), block.named_buffers())}
            for place in overwritten.keys() - (settings.written or ()):
                refused[overwritten[place]] = f"`{names.get(overwritten[place], place[1])}`"
        if refused:
            undo.enter_context(_Refused(self.name, refused))

    def _is_unchanged(self) -> bool:
        """Whether a recomputation finds inputs and block as the forward did, and changes nothing in the block."""
        settings, block = self.settings, self.block
        if not self.inputs.are_unchanged():
            return False
        if settings is None or block is None:
            return True
        if settings.changing or not settings.hold(block):
            return False
        if self.names and not self._has_same_tensors(settings):
            return False
        dicts = settings.dicts(block) if self.stored or self.held else []
        for (number, key), seen, _ in self.stored:
            if dicts[number].get(key) is not seen.tensor or seen.is_overwritten:
                return False
        for (number, key), value, content in self.held:
            if dicts[number].get(key) is not value or not _is_same(value, content):
                return False
        return True

    def _has_same_tensors(self, settings: Settings) -> bool:
        """Whether the block has the parameters and buffers of the forward, with their values."""
        return (
            list(chain(*settings.tensors)) == self.names
            and all(map(operator.is_, _values(settings.tensors), self.values))
            and self.seen.are_unchanged()
        )

    def _contents(self, settings: Settings, dicts: list[dict[str, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield each dict or list of the block with its content in the forward, for one recomputation."""
        recorded: list[dict[str, Any]] = [{} for _ in dicts]
        copies: dict[int, Any] = {}
        for (number, key), _, content in self.held:
            recorded[number][key] = copied(content, copies)
        with compat.torch.unseen_by_modes():
            for place, seen, values in self.stored:
                has_changed = values is not None and (place in settings.changing or seen.is_overwritten)
                recorded[place[0]][place[1]] = values.clone() if values is not None and has_changed else seen.tensor
        first = len(settings.attributes)
        boxes = self._boxes(settings)
        for number, box in enumerate(dicts):
            if number < first:
                content = {key: value for key, value in box.items() if key in settings.names[number]}
                content |= settings.attributes[number]
            elif self.names:
                content = boxes[number - first]
            else:
                content = dict(box)
            yield box, content | recorded[number]
        for box, content in zip(settings.boxes, settings.contents, strict=True):
            if box != content and any(box is merged for merged in settings.merged):
                raise ChangedBlockError(self.name, "adapters were merged into its weights, or taken out of them again")
            yield box, copied(content, {})

    def _overwritten(self, settings: Settings) -> dict[Place, int]:
        """Return the tensors of the block that were overwritten since the forward began, and that have no copy.

        Place -> id of the tensor.
        """
        with_copy = {place for place, _, values in self.stored if values is not None}
        overwritten = {place: id(seen.tensor) for place, seen, _ in self.stored if seen.is_overwritten}
        changed = {id(tensor) for tensor, _ in self.seen.overwritten()}
        for number, box in enumerate(self._boxes(settings), len(settings.attributes)):
            overwritten |= {(number, key): id(tensor) for key, tensor in box.items() if id(tensor) in changed}
        return {place: tensor for place, tensor in overwritten.items() if place not in with_copy}


def _values(boxes: list[dict[str, torch.Tensor | None]]) -> list[torch.Tensor | None]:
    return list(chain(*map(_values_of, boxes)))


_values_of = operator.methodcaller("values")


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
    if stored.seen.is_overwritten or stored.values is None or compat.torch.is_fake(stored.values):
        return True
    return not torch.equal(stored.seen.tensor, stored.values)


def _is_same(value: Any, content: Any) -> bool:
    """Whether a container still has the items of its copy. False where that cannot be told."""
    if isinstance(value, dict) and isinstance(content, dict):
        return list(value) == list(content) and all(map(_is_same, value.values(), content.values()))
    if isinstance(value, (list, tuple)) and isinstance(content, (list, tuple)):
        return len(value) == len(content) and all(map(_is_same, value, content))
    return value is content


def _fill(box: Any, content: Any) -> None:
    """Give a dict or list this content, apart from keys that are no settings. Other threads may read it meanwhile."""
    if isinstance(box, list):
        box[:] = content
        return
    for key in [key for key in box if key not in content and not is_ignored(key)]:
        del box[key]
    for key, value in content.items():
        if box.get(key, box) is not value and not is_ignored(key):  # no dict has itself as a value
            box[key] = value
    if [key for key in box if key in content] != [key for key in content if key in box]:  # hooks run in order
        for key in [key for key in content if key in box]:
            box[key] = box.pop(key)


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
        boxes = (vars(part).get("_buffers") for part in module.modules())
        self.boxes = [(box, box.copy()) for box in boxes if isinstance(box, dict)]
        """The dict of each module's buffers, and what it holds. A forward may replace a buffer (`self.ema = ...`)."""

    def restore(self) -> None:
        """Reset the module's buffers and the random state."""
        self.random.restore()
        for box, content in self.boxes:
            box.clear()
            box.update(content)
        with torch.no_grad():
            for buffer, values in self.buffers:  # compared by value: a batch norm does not count its changes
                if not torch.equal(buffer, values):
                    buffer.copy_(values)
