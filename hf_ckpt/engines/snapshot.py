"""What a block held when one of its forwards began: parameters, buffers, attributes, containers and hooks.

| what the block has | recorded in | a recomputation |
|---|---|---|
| plain attributes, children, hooks, configs | `Settings`, until one changes | puts them back |
| what its stack and the models around it have, without their children | as its own | as its own |
| parameters and buffers by name | `Snapshot.values` | puts the tensors back |
| their values | versions and addresses in `Snapshot.seen` | refuses to use them |
| buffers and tensors in attributes that a forward writes | copies in `Snapshot.stored` | gets a copy |
| containers in attributes | copies in `Snapshot.held` | gets a copy |
| other objects in attributes | nowhere | finds them as they are then |
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.copies import attributes_of, copied, is_object
from hf_ckpt.engines.seen import NO_TENSORS, Seen, SeenTensors
from hf_ckpt.engines.settings import TENSORS, Kind, Place, Settings, is_ignored, is_small
from hf_ckpt.errors import ChangedBlockError, HfCkptError, OutOfPlansError


class _Stored(NamedTuple):
    """A buffer, or a tensor in an attribute, before a forward."""

    place: Place
    seen: Seen
    values: torch.Tensor | None
    """A copy of its values; None if there is none, because it is large and no forward has changed it so far."""

    def has_changed(self) -> bool:
        """Whether the first forward wrote it: its version or its values moved. A batch norm moves no version."""
        if self.seen.is_overwritten or self.values is None or compat.torch.is_fake(self.values):
            return True
        return not torch.equal(self.seen.tensor, self.values)

    def copy(self) -> torch.Tensor:
        """Return a tensor for one recomputation, which may write to it, with the values that the forward found."""
        assert self.values is not None
        copy = self.values.clone()
        return nn.Parameter(copy, self.seen.trained) if isinstance(self.seen.tensor, nn.Parameter) else copy


class _Held(NamedTuple):
    """An attribute that is a container, before a forward."""

    place: Place
    content: Any
    """A copy of the container, whose tensors have no graph. The container itself may hold the graph of an earlier step,
    which holds the record of that step, and so on."""


class Snapshot:
    """What a block held when one of its forwards began.

    Args:
        name: qualified name of the block.
        block: the block.
        settings: its settings.
        parameters_stay: whether every parameter stays on its device, unsharded, throughout a step. If not, they come
            and go, and are not compared.
        is_step: whether this is the state before a step, of a whole model or a part of it. What has no copy is then
            left out.
        copies_codes: whether large buffers of integers are copied before the first forward. Those of a whole model may
            be its quantised weights.
        may_write_weights: whether the first forward may write to its parameters, so that they are copied or summed up.
    """

    # Most blocks have little of this. Defaults of the class take neither time nor memory.
    names: Sequence[str] = ()
    """The names in all dicts of `Settings.tensors`, in order; empty if parameters and buffers are not compared."""
    values: Sequence[torch.Tensor | None] = ()
    """The parameters and buffers of these names."""
    seen: SeenTensors = NO_TENSORS
    """The same ones, without None."""
    stored: Sequence[_Stored] = ()
    held: Sequence[_Held] = ()
    sums: Mapping[Place, torch.Tensor | None] = {}
    """Checksums of large parameters, while a first forward runs that may write to them."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        settings: Settings,
        *,
        parameters_stay: bool,
        is_step: bool = False,
        copies_codes: bool = True,
        may_write_weights: bool = True,
    ) -> None:
        self.name = name
        self.block = block
        self.settings = settings
        cut: dict[int, torch.Tensor] = {}
        learned = settings.learned
        if learned.state or settings.containers or not learned.has_run:
            dicts = settings.dicts(block)
            places = learned.state
            if not learned.has_run and parameters_stay and may_write_weights:
                places = places + [place for place in settings.weights if _is_small_at(dicts, place)]
                self.sums = {place: _checksum(dicts[place[0]][place[1]]) for place in settings.weights}
            self.stored, cut = self._with_copies(dicts, places, copies_codes=copies_codes)
            self.held = self._containers(dicts, is_step=is_step)
        if parameters_stay:
            self._see_tensors(cut)

    def _with_copies(
        self, dicts: list[dict[str, Any]], places: list[Place], *, copies_codes: bool
    ) -> tuple[list[_Stored], dict[int, torch.Tensor]]:
        """Return the tensors at these places, with copies of those that the forward may write.

        Also returns those that have a graph, without it: id of a tensor -> tensor.
        """
        stored = []
        cut = {}
        for place in places:
            tensor = dicts[place[0]].get(place[1])
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                is_copied = self.settings.copies_always(place, tensor)
                if not self.settings.learned.has_run:  # nobody knows what the forward writes, so all are copied
                    is_copied |= copies_codes or tensor.is_floating_point()
                values = tensor.detach().clone() if is_copied else None
                stored.append(_Stored(place, Seen(without_graph(tensor)), values))
                if tensor.grad_fn is not None:
                    cut[id(tensor)] = stored[-1].seen.tensor
        return stored, cut

    def _containers(self, dicts: list[dict[str, Any]], *, is_step: bool) -> list[_Held]:
        """Return the containers in attributes. Raises `HfCkptError` for one that has no copy; a step leaves it out."""
        # One dict of copies for all containers: two attributes may hold the same one.
        copies: dict[int, Any] = {}
        held = []
        for place in self.settings.containers:
            value = dicts[place[0]].get(place[1])
            try:
                held.append(_Held(place, copied(value, copies, functools.partial(_kept, copies=copies))))
            except TypeError as error:
                if is_step:
                    continue
                raise HfCkptError(
                    f"block {self.name!r} has an attribute `{place[1]}` that cannot be copied for its recomputation "
                    f'({error}). Use a list, a dict or a tensor, or "policy": "selective", which runs no block twice.'
                ) from error
        return held

    def _see_tensors(self, cut: dict[int, torch.Tensor]) -> None:
        """Record the parameters and buffers, and their versions and addresses; `cut` is as from `_with_copies`."""
        # Read from the dicts that the settings hold: a walk over the modules makes a Python call for each of them.
        values = _values(self.settings.tensors)
        if cut:
            values = [cut.get(id(tensor), tensor) for tensor in values]
        seen = SeenTensors([tensor for tensor in values if tensor is not None], addresses=True)
        if -1 in seen.versions:  # inference tensors have none
            seen = SeenTensors([tensor for tensor in seen.tensors if not tensor.is_inference()], addresses=True)
        # A trace on fake tensors may change them freely.
        if seen.tensors and not compat.torch.is_fake(seen.tensors[0]):
            self.names = list(chain(*self.settings.tensors))
            self.values = values
            self.seen = seen

    def forward_has_ended(self) -> None:
        """Learn what the forward has changed in its block."""
        learned = self.settings.learned
        if not learned.has_run:
            self._learn_all()
        elif self.stored or self.held:
            learned.changing.update(each.place for each in self.stored if each.seen.is_overwritten)
            learned.changes_attributes |= bool(self.held) and not self._has_same_attributes()

    def _learn_all(self) -> None:
        """Learn what the first forward under these settings has written."""
        settings = self.settings
        learned = settings.learned
        learned.changes_attributes = not self._has_same_attributes()
        learned.changing.update(each.place for each in self.stored if each.has_changed())
        # Before copies are freed below: what has a copy is restored, and what is written without one is not refused if
        # it was only put in its place again.
        overwritten = set(self._overwritten())
        learned.written = set(filter(self._has_same_bits, overwritten))
        self.sums = {}
        learned.has_run = True
        # From now on, parameters that the forward has written are state; of the others, no copies are needed.
        weights = set(settings.weights)
        learned.state = learned.state + list(weights & (learned.changing | overwritten))
        learned.changing |= overwritten
        stored = (each for each in self.stored if each.place in learned.changing or each.place not in weights)
        self.stored = [
            each if settings.copies_always(each.place, each.seen.tensor) else each._replace(values=None)
            for each in stored
        ]

    def _has_same_bits(self, place: Place) -> bool:
        """Whether what the first forward has written to a large tensor is what was there, as far as is known."""
        before = self.sums.get(place)
        if before is None:
            return True
        after = _checksum(self.settings.dicts(self.block)[place[0]].get(place[1]))
        return after is None or torch.equal(before, after)

    def recomputation_has_stopped(self) -> None:
        """Learn whether recomputations that torch ends early, such as after `self.on = True`, leave attributes so."""
        learned = self.settings.learned
        if not learned.has_stopped:
            learned.has_stopped = True
            learned.changes_attributes |= not self._has_same_attributes()

    def is_unchanged(self) -> bool:
        """Whether a recomputation finds the block as the forward did, and changes nothing in it."""
        settings = self.settings
        learned = settings.learned
        # A block that writes to itself starts from what its forward found, and leaves what it finds now.
        if learned.changing or learned.changes_attributes or not self._has_same_attributes():
            return False
        if self.names and not self._has_same_tensors(settings):
            return False
        dicts = settings.dicts(self.block) if self.stored else []
        for (number, key), seen, _ in self.stored:
            if dicts[number].get(key) is not seen.tensor or seen.is_overwritten:
                return False
        return True

    def _has_same_attributes(self) -> bool:
        """Whether the block has the attributes of the forward, apart from tensors, and the same hooks and children."""
        if not self.settings.still_apply(self.block):
            return False
        if not self.held:
            return True
        dicts = self.settings.dicts(self.block)
        return all(_is_same(dicts[number].get(key), content) for (number, key), content in self.held)

    def _has_same_tensors(self, settings: Settings) -> bool:
        """Whether the block has the parameters and buffers of the forward, with their values."""
        return (
            list(chain(*settings.tensors)) == self.names
            and all(map(operator.is_, _values(settings.tensors), self.values))
            and self.seen.are_unchanged()
        )

    def put_back(self, undo: contextlib.ExitStack) -> dict[int, str]:
        """Restore what the forward found until `undo` ends. Returns the tensors whose values are gone: id -> name.

        Raises `ChangedBlockError` if an adapter was merged since.
        """
        dicts = self.settings.dicts(self.block)
        self._refuse_merged_adapters(dicts)
        for values, content in self._contents(dicts):
            # DeepSpeed's dicts of parameters have no `copy`.
            undo.callback(_fill, values, dict(values))  # also undoes what the recomputation itself changes
            _fill(values, content)
        # What a block saves depends on what is trained: with another set, the recomputation would save other tensors.
        for tensor, trained in zip(self.seen.tensors, self.seen.trained, strict=True):
            if tensor.requires_grad != trained:
                undo.callback(tensor.requires_grad_, tensor.requires_grad)
                tensor.requires_grad_(trained)
        return self._overwritten_names()

    def _refuse_merged_adapters(self, dicts: list[dict[str, Any]]) -> None:
        """Raise `ChangedBlockError` if an adapter was merged into its weight, or taken out of it, since the forward.

        PEFT writes to `weight.data`, which moves neither the version nor the address.
        """
        for number, key in self.settings.merged:
            if dicts[number].get(key) != self.settings.boxes[number].content[key]:
                raise ChangedBlockError(self.name, "adapters were merged into its weights, or taken out of them again")

    def _contents(self, dicts: list[dict[str, Any]]) -> Iterator[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Yield the dict of each box with its content in the forward, for one recomputation."""
        settings = self.settings
        recorded: list[dict[str, Any]] = [{} for _ in dicts]
        copies: dict[int, Any] = {}
        for number, key in settings.plain_containers:
            recorded[number][key] = copied(settings.boxes[number].content[key], copies)
        for (number, key), content in self.held:
            recorded[number][key] = copied(content, copies)
        # Copies are no operations of the block: torch's own selective checkpointing must not count them.
        with compat.modes.unseen_by_modes():
            for each in self.stored:
                number, key = each.place
                has_changed = each.place in settings.learned.changing or each.seen.is_overwritten
                is_copied = each.values is not None and has_changed
                recorded[number][key] = each.copy() if is_copied else each.seen.tensor
        tensors = self._by_name()
        for number, (box, values) in enumerate(zip(settings.boxes, dicts, strict=True)):
            content = box.content
            if box.kind in TENSORS:
                content = tensors.get(number, values)
            elif box.kind is Kind.ATTRIBUTES:
                # An attribute of the forward that is neither plain nor recorded, such as an object, keeps its value.
                # One that is new goes.
                content = {key: value for key, value in values.items() if key in box.names} | box.content
            yield values, {**content, **recorded[number]}

    def _by_name(self) -> dict[int, dict[str, torch.Tensor | None]]:
        """Return the parameters and buffers of the forward by name: number of a box -> its tensors.

        Empty if they are not compared.
        """
        items = zip(self.names, self.values, strict=True)
        boxes = enumerate(self.settings.boxes) if self.names else ()
        return {number: dict(islice(items, len(box.names))) for number, box in boxes if box.kind in TENSORS}

    def restore(self) -> None:
        """Give the block the attributes and the values of buffers that it had, for good.

        Raises `OutOfPlansError` for a tensor that was overwritten and has no copy.
        """
        for each in self.stored:
            if each.values is None and each.seen.is_overwritten:
                raise OutOfPlansError(f"hf_ckpt: no retry: `{each.place[1]}` was overwritten, and has no copy.")
            # Compared by value: a batch norm does not count its changes.
            if each.values is not None and each.has_changed():
                with torch.no_grad():
                    each.seen.tensor.copy_(each.values)
        dicts = self.settings.dicts(self.block)
        for number, (values, content) in enumerate(self._contents(dicts)):
            if self.settings.boxes[number].kind is not Kind.ATTRIBUTES:
                continue
            content |= {place[1]: seen.tensor for place, seen, _ in self.stored if place[0] == number}
            # Functions, and records such as hf_ckpt's own, belong to the plan, which may be another one by now.
            other = {key: value for key, value in values.items() if key not in content and is_object(value)}
            other |= {key: value for key, value in values.items() if callable(value)}
            _fill(values, {key: value for key, value in content.items() if not callable(value)} | other)

    def _overwritten_names(self) -> dict[int, str]:
        """Return the tensors of the block whose values are gone: id -> name.

        Those that the first forward itself wrote to are left out, because every forward does so.
        """
        named = chain(self.block.named_parameters(), self.block.named_buffers())
        names = {id(tensor): name for name, tensor in named}
        return {
            tensor: f"`{names.get(tensor, place[1])}`"
            for place, tensor in self._overwritten().items()
            if place not in self.settings.learned.written
        }

    def _overwritten(self) -> dict[Place, int]:
        """Return the tensors of the block that were overwritten since the forward began, and that have no copy.

        Place -> id of the tensor.
        """
        with_copy = {place for place, _, values in self.stored if values is not None}
        overwritten = {place: id(seen.tensor) for place, seen, _ in self.stored if seen.is_overwritten}
        changed = {id(tensor) for tensor, _ in self.seen.overwritten()}
        for number, tensors in self._by_name().items():
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
    with compat.modes.unseen_by_modes():
        values = tensor.detach().view(-1).view(torch.uint8)
        words = values[: len(values) // 8 * 8]
        return words.view(torch.int64).sum() if words.storage_offset() % 8 == 0 else None


def without_graph(value: Any) -> Any:
    """Return a tensor without its graph, which would keep an earlier step alive; other values as they are.

    A recomputation needs the values only: backward runs through the graph of the forward.
    """
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    with compat.modes.unseen_by_modes():
        return value.detach().requires_grad_()


def _kept(value: Any, copies: dict[int, Any]) -> Any:
    """Return what to keep of an item of a container: a tensor, or an object with tensors, without their graphs."""
    if is_object(value):
        leaves = compat.torch.tree_leaves(list(attributes_of(value).values()))
        if any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves):
            return copied(value, copies, without_graph, objects=True)
    return without_graph(value)


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
