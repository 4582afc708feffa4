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

| what the block has | recorded in | a recomputation |
|---|---|---|
| plain attributes, children, hooks, configs | `Settings`, until one changes | puts them back |
| what its stack and the models around it have, without their children | as its own | as its own |
| parameters and buffers by name | `ForwardState.values` | puts the tensors back |
| their values, and those of inputs | versions and addresses in `ForwardState.seen`, `inputs` | refuses to use them |
| buffers and tensors in attributes that a forward writes | copies in `ForwardState.stored` | gets a copy |
| containers in attributes | copies in `ForwardState.held` | gets a copy |
| other objects in attributes | nowhere | finds them as they are then |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_ckpt import compat
from hf_ckpt.engines.copies import attributes_of, copied, is_object
from hf_ckpt.engines.routers import Choices
from hf_ckpt.engines.seen import NO_TENSORS, Seen, SeenTensors
from hf_ckpt.engines.settings import TENSORS, Kind, Place, Settings, is_ignored, is_small
from hf_ckpt.errors import ChangedBlockError, HfCkptError, OutOfPlansError


class _Stored(NamedTuple):
    """A buffer, or a tensor in an attribute, before a forward."""

    place: Place
    seen: Seen
    values: torch.Tensor | None
    """A copy of its values; None if there is none, because it is large and no forward has changed it so far."""


class _Held(NamedTuple):
    """An attribute that is a container, before a forward."""

    place: Place
    content: Any
    """A copy of the container, whose tensors have no graph. The container itself may hold the graph of an earlier step,
    which holds the record of that step, and so on."""


@dataclasses.dataclass(eq=False)
class ForwardState:
    """The state of a block before one of its forwards.

    Args:
        name: qualified name of the block.
        block: the block; None if unknown.
        settings: its settings; None if unknown.
        inputs: tensors that the block is given, and that a recomputation gets as they are then.
        parameters_stay: whether every parameter stays on its device, unsharded, throughout a step. If not, they come
            and go, and are not compared.
        keeps_draws: whether a recomputation draws torch's random numbers again.
        is_step: whether this is the state before a step, of a whole model or a part of it. What has no copy is then
            left out.
        copies_codes: whether large buffers of integers are copied before the first forward. Those of a whole model may
            be its quantised weights.
        may_write_weights: whether the first forward may write to its parameters, so that they are copied or summed up.
    """

    name: str
    block: nn.Module | None
    settings: Settings | None
    inputs: SeenTensors = NO_TENSORS
    _: dataclasses.KW_ONLY
    parameters_stay: bool
    keeps_draws: bool
    is_step: bool = False
    copies_codes: bool = True
    may_write_weights: bool = True
    names: list[str] = dataclasses.field(default_factory=list)
    """The names in all dicts of `Settings.tensors`, in order; empty if parameters and buffers are not compared."""
    values: list[torch.Tensor | None] = dataclasses.field(default_factory=list)
    """The parameters and buffers of these names."""
    seen: SeenTensors = NO_TENSORS
    """The same ones, without None."""
    stored: list[_Stored] = dataclasses.field(default_factory=list)
    held: list[_Held] = dataclasses.field(default_factory=list)
    sums: dict[Place, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    """Checksums of large parameters, while a first forward runs that may write to them."""
    choices: Choices | None = None
    """The experts that the block chooses; None for a block without experts."""
    draws: compat.process_state.RandomState | None = None
    """Random state before the forward; None if the forward drew nothing."""

    def __post_init__(self) -> None:
        self.context = compat.transformers.copied_context()
        self.switches = compat.process_state.Switches()
        settings = self.settings
        if settings is None or self.block is None:
            return
        if settings.chooses:
            self.choices = Choices()
        cut: dict[int, torch.Tensor] = {}
        if settings.state or settings.containers or not settings.has_run:
            cut = self._record(settings, self.block)
        if self.parameters_stay:
            self._see_tensors(settings, cut)

    def _see_tensors(self, settings: Settings, cut: dict[int, torch.Tensor]) -> None:
        """Record the parameters and buffers, and their versions and addresses. `cut` is what `_record` returned."""
        # Read from the dicts that the settings hold: a walk over the modules makes a Python call for each of them.
        values = _values(settings.tensors)
        if cut:
            values = [cut.get(id(tensor), tensor) for tensor in values]
        seen = SeenTensors([tensor for tensor in values if tensor is not None], addresses=True)
        if -1 in seen.versions:  # inference tensors have none
            seen = SeenTensors([tensor for tensor in seen.tensors if not tensor.is_inference()], addresses=True)
        # A trace on fake tensors may change them freely.
        if seen.tensors and not compat.torch.is_fake(seen.tensors[0]):
            self.names = list(chain(*settings.tensors))
            self.values = values
            self.seen = seen

    def _by_name(self, settings: Settings) -> dict[int, dict[str, torch.Tensor | None]]:
        """Return the parameters and buffers of the forward by name: number of a box -> its tensors.

        Empty if they are not compared.
        """
        items = zip(self.names, self.values, strict=True)
        boxes = enumerate(settings.boxes) if self.names else ()
        return {number: dict(islice(items, len(box.names))) for number, box in boxes if box.kind in TENSORS}

    def _record(self, settings: Settings, block: nn.Module) -> dict[int, torch.Tensor]:
        """Record what the forward may change in the block.

        Returns the buffers and tensors that have a graph, without it: id of a tensor -> tensor.
        """
        dicts = settings.dicts(block)
        cut = {}
        places = settings.state
        if not settings.has_run and self.parameters_stay and self.may_write_weights:
            places = places + [place for place in settings.weights if _is_small_at(dicts, place)]
            self.sums = {place: _checksum(dicts[place[0]][place[1]]) for place in settings.weights}
        for place in places:
            tensor = dicts[place[0]].get(place[1])
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                # Before the first forward, nobody knows what it writes, so all are copied.
                is_copied = settings.copies_always(place, tensor)
                if not settings.has_run:
                    is_copied |= self.copies_codes or tensor.is_floating_point()
                values = tensor.detach().clone() if is_copied else None
                self.stored.append(_Stored(place, Seen(without_graph(tensor)), values))
                if tensor.grad_fn is not None:
                    cut[id(tensor)] = self.stored[-1].seen.tensor
        # One dict of copies for all containers: two attributes may hold the same one.
        copies: dict[int, Any] = {}
        for place in settings.containers:
            value = dicts[place[0]].get(place[1])
            try:
                self.held.append(_Held(place, copied(value, copies, functools.partial(_kept, copies=copies))))
            except TypeError as error:
                if self.is_step:
                    continue
                raise HfCkptError(
                    f"block {self.name!r} has an attribute `{place[1]}` that cannot be copied for its recomputation "
                    f'({error}). Use a list, a dict or a tensor, or "policy": "selective", which runs no block twice.'
                ) from error
        return cut

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the block for the first time, and record what a recomputation needs to run it in the same way."""
        settings = self.settings
        before = compat.process_state.RandomState(
            compat.process_state.devices_of(args),
            of_torch=self.keeps_draws,
            of_host=settings is None or settings.draws_on_host,
        )
        # From the beginning: a block may run a backward inside its forward, which recomputes what it has run so far.
        self.draws = before
        if self.choices is None:  # no context for the many blocks without experts
            output = fn(*args)
        else:
            with self.choices.of_one_run():
                output = fn(*args)
        if not before.may_have_moved():
            self.draws = None
        if settings is not None and not settings.has_run:
            self._learn(settings, before)
        elif settings is not None and (self.stored or self.held):
            settings.changing.update(each.place for each in self.stored if each.seen.is_overwritten)
            settings.changes_attributes |= bool(self.held) and not self._has_same_attributes(settings)
        return output

    def _learn(self, settings: Settings, before: compat.process_state.RandomState) -> None:
        """Record what the first forward under these settings has written and drawn."""
        settings.draws_on_host = before.of_host_has_moved()
        settings.changes_attributes = not self._has_same_attributes(settings)
        settings.changing.update(each.place for each in self.stored if _has_changed(each))
        # Before copies are freed below: what has a copy is restored, and what is written without one is not refused if
        # it was only put in its place again.
        overwritten = set(self._overwritten(settings))
        settings.written = set(filter(self._has_same_bits, overwritten))
        self.sums = {}
        settings.has_run = True
        # From now on, parameters that the forward has written are state; of the others, no copies are needed.
        weights = set(settings.weights)
        settings.state += weights & (settings.changing | overwritten)
        settings.changing |= overwritten
        self.stored = [each for each in self.stored if each.place in settings.changing or each.place not in weights]
        for number, (place, seen, _) in enumerate(self.stored):
            if not settings.copies_always(place, seen.tensor):
                self.stored[number] = _Stored(place, seen, None)

    def _has_same_bits(self, place: Place) -> bool:
        """Whether what the first forward has written to a large tensor is what was there, as far as is known."""
        before = self.sums.get(place)
        if before is None:
            return True
        assert self.settings is not None
        assert self.block is not None
        after = _checksum(self.settings.dicts(self.block)[place[0]].get(place[1]))
        return after is None or torch.equal(before, after)

    def recompute(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the block again, in the context and in the state of its forward.

        Raises `ChangedBlockError` for a value that cannot be restored.
        """
        # A copy, because several threads may do so at once.
        return self.context.copy().run(self.switches.run, self._recompute, fn, args)

    def _recompute(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        hooks = compat.torch.tensor_hooks(self.seen.tensors)
        try:
            is_unchanged = self._is_unchanged() and (self.settings is None or self.settings.has_stopped)
            if is_unchanged and self.draws is None and self.choices is None:  # most blocks in most steps
                return fn(*args)
            with contextlib.ExitStack() as undo:
                if self.draws is not None:
                    undo.enter_context(self.draws.restored())
                if not is_unchanged:
                    self._put_back(undo)
                if self.choices is not None:
                    undo.enter_context(self.choices.of_one_run(again=True))
                try:
                    return fn(*args)
                except compat.checkpoint.StopRecomputation:
                    self._learn_what_is_left()
                    raise
        finally:
            if compat.torch.restore_tensor_hooks(self.seen.tensors, hooks) and self.settings is not None:
                # The block may keep the handle in an attribute, which is an object that is not compared.
                self.settings.changes_attributes = True

    def _learn_what_is_left(self) -> None:
        """Record whether recomputations that torch ends early, such as after `self.on = True`, leave attributes so."""
        settings = self.settings
        if settings is not None and not settings.has_stopped:
            settings.has_stopped = True
            settings.changes_attributes |= not self._has_same_attributes(settings)

    def _is_unchanged(self) -> bool:
        """Whether a recomputation finds inputs and block as the forward did, and changes nothing in the block."""
        settings = self.settings
        block = self.block
        if not self.inputs.are_unchanged():
            return False
        if settings is None or block is None:
            return True
        # A block that writes to itself starts from what its forward found, and leaves what it finds now.
        if settings.changing or settings.changes_attributes or not self._has_same_attributes(settings):
            return False
        if self.names and not self._has_same_tensors(settings):
            return False
        dicts = settings.dicts(block) if self.stored else []
        for (number, key), seen, _ in self.stored:
            if dicts[number].get(key) is not seen.tensor or seen.is_overwritten:
                return False
        return True

    def _has_same_attributes(self, settings: Settings) -> bool:
        """Whether the block has the attributes of the forward, apart from tensors, and the same hooks and children."""
        assert self.block is not None
        if not settings.still_apply(self.block):
            return False
        if not self.held:
            return True
        dicts = settings.dicts(self.block)
        return all(_is_same(dicts[number].get(key), content) for (number, key), content in self.held)

    def _has_same_tensors(self, settings: Settings) -> bool:
        """Whether the block has the parameters and buffers of the forward, with their values."""
        return (
            list(chain(*settings.tensors)) == self.names
            and all(map(operator.is_, _values(settings.tensors), self.values))
            and self.seen.are_unchanged()
        )

    def _put_back(self, undo: contextlib.ExitStack) -> None:
        """Restore what the forward found until `undo` ends, and refuse each use of a tensor whose values are gone.

        Raises `ChangedBlockError` if an adapter was merged since.
        """
        inputs = self.inputs.overwritten()
        gone = {id(tensor): f"a tensor of shape {list(tensor.shape)} that it was given" for tensor, _ in inputs}
        if self.settings is not None and self.block is not None:
            dicts = self.settings.dicts(self.block)
            self._refuse_merged_adapters(self.settings, dicts)
            for values, content in self._contents(self.settings, dicts):
                # DeepSpeed's dicts of parameters have no `copy`.
                undo.callback(_fill, values, dict(values))  # also undoes what the recomputation itself changes
                _fill(values, content)
            # What a block saves depends on what is trained: with another set, the recomputation would save other
            # tensors.
            for tensor, trained in zip(self.seen.tensors, self.seen.trained, strict=True):
                if tensor.requires_grad != trained:
                    undo.callback(tensor.requires_grad_, tensor.requires_grad)
                    tensor.requires_grad_(trained)
            gone |= self._overwritten_names(self.settings, self.block)
        if gone:
            undo.enter_context(_Refused(self.name, gone))

    def _refuse_merged_adapters(self, settings: Settings, dicts: list[dict[str, Any]]) -> None:
        """Raise `ChangedBlockError` if an adapter was merged into its weight, or taken out of it, since the forward.

        PEFT writes to `weight.data`, which moves neither the version nor the address.
        """
        for number, key in settings.merged:
            if dicts[number].get(key) != settings.boxes[number].content[key]:
                raise ChangedBlockError(self.name, "adapters were merged into its weights, or taken out of them again")

    def _contents(
        self, settings: Settings, dicts: list[dict[str, Any]]
    ) -> Iterator[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Yield the dict of each box with its content in the forward, for one recomputation."""
        recorded: list[dict[str, Any]] = [{} for _ in dicts]
        copies: dict[int, Any] = {}
        for number, key in settings.plain_containers:
            recorded[number][key] = copied(settings.boxes[number].content[key], copies)
        for (number, key), content in self.held:
            recorded[number][key] = copied(content, copies)
        # Copies are no operations of the block: torch's own selective checkpointing must not count them.
        with compat.torch.unseen_by_modes():
            for (number, key), seen, copy in self.stored:
                has_changed = (number, key) in settings.changing or seen.is_overwritten
                recorded[number][key] = _copy_of(seen, copy) if copy is not None and has_changed else seen.tensor
        tensors = self._by_name(settings)
        for number, (box, values) in enumerate(zip(settings.boxes, dicts, strict=True)):
            content = box.content
            if box.kind in TENSORS:
                content = tensors.get(number, values)
            elif box.kind is Kind.ATTRIBUTES:
                # An attribute of the forward that is neither plain nor recorded, such as an object, keeps its value.
                # One that is new goes.
                content = {key: value for key, value in values.items() if key in box.names} | box.content
            yield values, {**content, **recorded[number]}

    def restore(self) -> None:
        """Give the block the attributes and the values of buffers that it had, for good."""
        settings = self.settings
        assert settings is not None
        assert self.block is not None
        for stored in self.stored:
            if stored.values is None and stored.seen.is_overwritten:
                raise OutOfPlansError(f"hf_ckpt: no retry: `{stored.place[1]}` was overwritten, and has no copy.")
            # Compared by value: a batch norm does not count its changes.
            if stored.values is not None and _has_changed(stored):
                with torch.no_grad():
                    stored.seen.tensor.copy_(stored.values)
        dicts = settings.dicts(self.block)
        for number, (values, content) in enumerate(self._contents(settings, dicts)):
            if settings.boxes[number].kind is not Kind.ATTRIBUTES:
                continue
            content |= {place[1]: seen.tensor for place, seen, _ in self.stored if place[0] == number}
            # Functions, and records such as hf_ckpt's own, belong to the plan, which may be another one by now.
            other = {key: value for key, value in values.items() if key not in content and is_object(value)}
            other |= {key: value for key, value in values.items() if callable(value)}
            _fill(values, {key: value for key, value in content.items() if not callable(value)} | other)

    def _overwritten_names(self, settings: Settings, block: nn.Module) -> dict[int, str]:
        """Return the tensors of the block whose values are gone: id -> name.

        Those that the first forward itself wrote to are left out, because every forward does so.
        """
        names = {id(tensor): name for name, tensor in chain(block.named_parameters(), block.named_buffers())}
        overwritten = self._overwritten(settings)
        return {
            tensor: f"`{names.get(tensor, place[1])}`"
            for place, tensor in overwritten.items()
            if place not in settings.written
        }

    def _overwritten(self, settings: Settings) -> dict[Place, int]:
        """Return the tensors of the block that were overwritten since the forward began, and that have no copy.

        Place -> id of the tensor.
        """
        with_copy = {place for place, _, values in self.stored if values is not None}
        overwritten = {place: id(seen.tensor) for place, seen, _ in self.stored if seen.is_overwritten}
        changed = {id(tensor) for tensor, _ in self.seen.overwritten()}
        for number, tensors in self._by_name(settings).items():
            overwritten |= {(number, key): id(tensor) for key, tensor in tensors.items() if id(tensor) in changed}
        return {place: tensor for place, tensor in overwritten.items() if place not in with_copy}


def _values(dicts: list[dict[str, torch.Tensor | None]]) -> list[torch.Tensor | None]:
    return list(chain(*map(_values_of, dicts)))


_values_of = operator.methodcaller("values")


def _is_small_at(dicts: list[dict[str, Any]], place: Place) -> bool:
    tensor = dicts[place[0]].get(place[1])
    # Not those of other types: quantised ones may have no copy, and nobody can tell whether fake ones were written.
    return type(tensor) is nn.Parameter and is_small(tensor)


def _checksum(tensor: Any) -> torch.Tensor | None:
    """Return the sum of the words of a large parameter, read without a copy of it; None for other tensors."""
    if type(tensor) is not nn.Parameter or is_small(tensor) or tensor.is_meta or not tensor.is_contiguous():
        return None
    with compat.torch.unseen_by_modes():
        values = tensor.detach().view(-1).view(torch.uint8)
        words = values[: len(values) // 8 * 8]
        return words.view(torch.int64).sum() if words.storage_offset() % 8 == 0 else None


def _copy_of(seen: Seen, values: torch.Tensor) -> torch.Tensor:
    """Return a tensor for one recomputation, which may write to it, with the values that the forward found."""
    copy = values.clone()
    return nn.Parameter(copy, seen.trained) if isinstance(seen.tensor, nn.Parameter) else copy


def without_graph(value: Any) -> Any:
    """Return a tensor without its graph, which would keep an earlier step alive; other values as they are.

    A recomputation needs the values only: backward runs through the graph of the forward.
    """
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    with compat.torch.unseen_by_modes():
        return value.detach().requires_grad_()


def _kept(value: Any, copies: dict[int, Any]) -> Any:
    """Return what to keep of an item of a container: a tensor, or an object with tensors, without their graphs."""
    if is_object(value):
        leaves = compat.torch.tree_leaves(list(attributes_of(value).values()))
        if any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves):
            return copied(value, copies, without_graph, objects=True)
    return without_graph(value)


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


def _fill(values: dict[Any, Any], content: dict[Any, Any]) -> None:
    """Give a dict this content, apart from keys that are no settings. Other threads may read it meanwhile."""
    for key in [key for key in values if key not in content and not is_ignored(key)]:
        del values[key]
    for key, value in content.items():
        if values.get(key, values) is not value and not is_ignored(key):  # no dict has itself as a value
            values[key] = value  # not `clear` and `update`: another thread would find an empty dict
    # Hooks run in the order of their dict, and `named_parameters` are compared in order.
    if [key for key in values if key in content] != [key for key in content if key in values]:
        for key in [key for key in content if key in values]:
            values[key] = values.pop(key)


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
        self.refused: ChangedBlockError | None = None
        """The error that was raised."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The getter of an attribute. Asking for a type or a shape is no use of values; `.data` and `.T` are.
        if getattr(function, "__name__", "") == "__get__":
            value = function(*args)
            if not isinstance(value, torch.Tensor):
                return value
        for value in compat.torch.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and id(value) in self.tensors:
                self.refused = ChangedBlockError(self.name, f"{self.tensors[id(value)]} was overwritten")
                raise self.refused
        return function(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if self.refused is not None and compat.torch.is_of_script(error):
            raise self.refused from error


class StepState:
    """What a step changes in a module beside gradients, for code that runs a step again: random state, and what
    `ForwardState` records of attributes and buffers.

    Hooks and functions are as they are then, because another plan has others.

    Args:
        module: the module.
        devices: the devices whose random state to include besides the CPU's.
        copies_codes: see `ForwardState`.
        parameters_stay: see `ForwardState`. If not, what the step writes to parameters stays.
        earlier: the state before the last step of this module, if it is known. Large buffers that this step has left
            alone are not copied again.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Iterable[torch.device],
        *,
        copies_codes: bool = True,
        parameters_stay: bool = False,
        earlier: StepState | None = None,
    ) -> None:
        self.random = compat.process_state.RandomState(devices)
        settings = Settings(module) if earlier is None else earlier.settings_now()
        self.before = ForwardState(
            *("", module, settings),
            parameters_stay=parameters_stay,
            keeps_draws=False,
            is_step=True,
            copies_codes=copies_codes,
        )
        dicts = (vars(part).get("_buffers") for part in module.modules())
        self.dicts = [(tensors, tensors.copy()) for tensors in dicts if isinstance(tensors, dict)]
        """The dict of each module's buffers, and what it holds. A forward may replace a buffer (`self.ema = ...`)."""

    def settings_now(self) -> Settings:
        """Return the settings of the module after the step, which know what the step has changed."""
        earlier = self.before.settings
        module = self.before.block
        assert earlier is not None
        assert module is not None
        for each in self.before.stored:
            if each.seen.is_overwritten or (each.values is not None and not earlier.has_run and _has_changed(each)):
                earlier.changing.add(each.place)
        earlier.has_run = True
        if earlier.still_apply(module):
            return earlier
        settings = Settings(module)
        if list(map(id, settings.dicts(module))) == list(map(id, earlier.dicts(module))):  # places mean the same
            settings.changing = earlier.changing
            settings.has_run = True
        return settings

    def restore(self) -> None:
        """Reset the module's attributes and buffers, and the random state.

        Raises `OutOfPlansError` for a large buffer that no step before this one has changed.
        """
        self.random.restore()
        for tensors, content in self.dicts:
            tensors.clear()
            tensors.update(content)
        self.before.restore()
