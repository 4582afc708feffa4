"""What a forward saw, and how to restore it: for recomputed blocks, for checks, and for steps that run again.

A block may change between its forward and its backward: the user sets another adapter, calls `eval()` or removes a
hook, or `torch.func.functional_call` ends and takes its parameters with it. A `ForwardState` records what the forward
saw. If the block differs when it is recomputed, the modes, adapters, hooks and tensors of the forward are put back, and
taken off again afterwards. If the block uses a value that is gone, because a parameter was overwritten or an adapter
was merged, it raises `ChangedBlockError`.

A recomputation runs in the context of the forward: context variables have the values that they had then, even in
autograd's own threads. Other things that a block reads, such as thread-local values, are not restored.

Buffers that a forward changes (running statistics) are copied before the forward. The recomputation updates copies, so
each forward updates the statistics once. Routers choose the same experts again, see `routers`. torch draws the same
numbers again. So do Python's `random` and `numpy.random` for a block that draws from them in its first forward.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_ckpt import compat
from hf_ckpt.engines.routers import Choices
from hf_ckpt.errors import ChangedBlockError
from hf_ckpt.models.blocks import routers

_SIMPLE = (bool, int, float, str)
_INDIFFERENT = (nn.Linear, nn.Identity, nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)
"""Types whose forward, if any, reads no plain attribute. Their attributes are not compared, which would take longer."""


class Settings:
    """Everything beside its tensors that decides what a block's forward does: plain attributes, children and hooks.

    They are collected by a walk over the block, and all forwards share them until one of them changes. They refer to
    everything below the block but not to the block itself, which would be a reference cycle.
    """

    def __init__(self, block: nn.Module) -> None:
        owners: list[dict[str, Any]] = []
        self.attributes: list[dict[str, Any]] = []
        """The plain attributes of each module and of its config. The block comes first."""
        self.boxes: list[Any] = []
        """Dicts of children, of hooks or of plain values, such as the scaling of adapters; and PEFT's lists of merged
        adapters."""
        self.tensors: list[dict[str, Any]] = []
        """The dicts of parameters and of buffers that are not empty."""
        self.changing: list[tuple[dict[str, Any], str]] = []
        """The buffers that a forward may change; after the first forward, those that it has changed."""
        for module in block.modules():
            own = vars(module)
            if not isinstance(own.get("_parameters"), dict):
                continue
            if type(module) not in _INDIFFERENT or module is block:
                owners.append(own)
                self.attributes.append({key: value for key, value in own.items() if _is_plain(key, value)})
            config = compat.transformers.config_of(module)
            if config is not None and not any(vars(config) is owner for owner in owners):
                owners.append(vars(config))
                is_implementation = compat.transformers.is_implementation
                self.attributes.append({k: value for k, value in vars(config).items() if is_implementation(k, value)})
            self.tensors += [box for box in (own["_parameters"], own["_buffers"]) if box]
            self.changing += [(own["_buffers"], key) for key in own["_buffers"]]
            self.boxes += [box for key, box in own.items() if _is_box(key, box)]
        self.contents = [box.copy() for box in self.boxes]
        self.keys = [tuple(box) for box in self.tensors]
        self.sizes = [len(box) for box in (*owners, *self.tensors)]
        self.parameters = vars(block)["_parameters"]
        """The dict of the block's own parameters, which identifies the block."""
        self.inner = owners[1:]
        """The dicts that `attributes` are from, without the block's own."""
        self.getters = [operator.itemgetter(*attributes) for attributes in self.attributes]
        self.values = [getter(owner) for getter, owner in zip(self.getters, owners, strict=True)]
        self.written: set[int] | None = None
        """Places of the tensors that the forward itself writes to, such as a router's weight that PEFT adapts: a write
        to them does not count as a change. None before the first forward."""
        self.draws_on_host = True
        """Whether the forward may draw from Python's `random` or from numpy, whose states take long to read. The first
        forward shows it."""
        self.chooses = bool(routers(block))
        """Whether the block sends tokens to experts."""

    def hold(self, block: nn.Module) -> bool:
        """Whether `block` is the block of these settings and still has them."""
        own = vars(block)
        owners = [own, *self.inner]
        try:
            return (
                own["_parameters"] is self.parameters
                and self.boxes == self.contents
                and self.sizes == [*map(len, owners), *map(len, self.tensors)]
                and self.values == [getter(owner) for getter, owner in zip(self.getters, owners, strict=True)]
            )
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or is now a tensor or an array
            return False


def _is_plain(key: str, value: Any) -> bool:
    """Whether an attribute is a number, a flag or a string, or a list of strings such as names of adapters.

    Other attributes may hold what a forward stored, and to keep them would keep its activations alive. DeepSpeed's
    counters do not count either: they go on during a recomputation.
    """
    if compat.distributed.counted_by_deepspeed(key):
        return False
    return type(value) in _SIMPLE or (type(value) is list and bool(value) and all(type(item) is str for item in value))


def _is_box(key: str, value: Any) -> bool:
    """Whether an attribute is one of `Settings.boxes`. Empty dicts count if they may get hooks."""
    if key in ("_forward_pre_hooks", "_forward_hooks") or compat.peft.is_merged(key, value):
        return True
    if not isinstance(value, dict) or not value:
        return False
    return key == "_modules" or all(type(item) in _SIMPLE for item in value.values())


def _lend(box: dict[Any, Any], content: dict[Any, Any], undo: contextlib.ExitStack) -> None:
    """Replace the content of a dict until `undo` ends, unless it already has that content, in the same order."""
    if list(box) != list(content) or not all(map(operator.is_, box.values(), content.values())):
        undo.callback(_fill, box, dict(box))
        _fill(box, content)


def _fill(box: dict[Any, Any], content: dict[Any, Any]) -> None:
    box.clear()
    box.update(content)


class ForwardState:
    """The state of a block before one of its forwards.

    Args:
        name: qualified name of the block.
        block: the block; None if unknown.
        settings: its settings; None if unknown.
        whole: whether its parameters stay on their device, unsharded, throughout a step. If not, they come and go, and
            are not compared.
        keeps_draws: whether a recomputation draws torch's random numbers again.
    """

    def __init__(
        self, name: str, block: nn.Module | None, settings: Settings | None, *, whole: bool, keeps_draws: bool
    ) -> None:
        self.name, self.block, self.settings, self.keeps_draws = name, block, settings, keeps_draws
        self.context = compat.transformers.copied_context()
        tensors = tuple(chain.from_iterable(map(dict.values, settings.tensors))) if settings and whole else ()
        # A trace on fake tensors may change them freely.
        self.tensors = () if tensors and tensors[0] is not None and compat.torch.is_fake(tensors[0]) else tensors
        """Parameters and buffers; None for one that is not set."""
        try:
            self.marks = _marks(self.tensors)
        except RuntimeError:  # inference tensors have no version
            self.tensors, self.marks = (), []
        self.choices = Choices() if settings is not None and settings.chooses else None
        self.draws: compat.random_state.RandomState | None = None
        """Random state before the forward; None if the forward drew nothing."""
        buffers = [(box, key, box[key]) for box, key in settings.changing] if settings is not None else []
        self.copies: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
            (box, key, buffer, buffer.detach().clone())
            for box, key, buffer in buffers
            if buffer is not None and not buffer.is_inference()
        ]
        """(dict, name, buffer, its values before the forward) for each buffer that the forward may change."""

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
            settings.written, settings.draws_on_host = set(self._overwritten()), before.of_host_has_moved()
            self.copies = [  # compared by value: a batch norm does not count its changes
                row for row in self.copies if compat.torch.is_fake(row[2]) or not torch.equal(row[2], row[3])
            ]
            settings.changing = [(box, key) for box, key, *_ in self.copies]
        return output

    def recompute(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the block again, in the context and in the state of its forward.

        Raises `ChangedBlockError` for a value that cannot be restored.
        """
        return self.context.copy().run(self._recompute, fn, args)  # a copy: several threads may do so at once

    def _recompute(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with contextlib.ExitStack() as undo:
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
        settings, block = self.settings, self.block
        if settings is None or block is None:
            return
        now = chain.from_iterable(map(dict.values, settings.tensors)) if self.tensors else ()
        is_unchanged = not self.copies and settings.hold(block) and all(map(operator.is_, self.tensors, now))
        if is_unchanged and self.marks == _marks(self.tensors):
            return
        for attributes, owner in zip(settings.attributes, [vars(block), *settings.inner], strict=True):
            undo.callback(owner.update, {key: owner[key] for key in attributes if key in owner})
            owner.update(attributes)
        for box, content in zip(settings.boxes, settings.contents, strict=True):
            if isinstance(box, dict):
                _lend(box, content, undo)
            elif box != content:
                raise ChangedBlockError(self.name, "adapters were merged into its weights, or taken out of them again")
        tensors = iter(self.tensors)
        for keys, box in zip(settings.keys, settings.tensors, strict=True):
            content = {key: next(tensors) for key in keys} if self.tensors else dict(box)
            with compat.torch.unseen_by_modes():
                content |= {key: values.clone() for of, key, _, values in self.copies if of is box}
            _lend(box, content, undo)
        there = [tensor for tensor in self.tensors if tensor is not None]
        for tensor, (flag, *_) in zip(there, self.marks, strict=True):
            if tensor.requires_grad != flag:
                undo.callback(tensor.requires_grad_, tensor.requires_grad)
                tensor.requires_grad_(flag)
        if overwritten := self._overwritten():
            undo.enter_context(_Refused(self.name, block, set(map(id, overwritten.values()))))

    def _overwritten(self) -> dict[int, torch.Tensor]:
        """Return the tensors that were overwritten since the forward began, by place; not those that have a copy."""
        known = self.settings.written or () if self.settings is not None else ()
        copied = {id(buffer) for _, _, buffer, _ in self.copies}
        there = [tensor for tensor in self.tensors if tensor is not None]
        return {
            place: tensor
            for place, (tensor, before, now) in enumerate(zip(there, self.marks, _marks(self.tensors), strict=True))
            if before[1:] != now[1:] and place not in known and id(tensor) not in copied
        }


class _Refused(TorchFunctionMode):
    """Raises `ChangedBlockError` when an operation uses one of the tensors with these ids.

    Only use counts: a block may hold tensors that it does not use, such as those of inactive adapters.
    """

    def __init__(self, name: str, block: nn.Module, ids: set[int]) -> None:
        super().__init__()
        self.name = name
        named = chain(block.named_parameters(), block.named_buffers())
        self.tensors = dict.fromkeys(ids, "a tensor of it") | {id(t): f"`{of}`" for of, t in named if id(t) in ids}

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


def _marks(tensors: tuple[torch.Tensor | None, ...]) -> list[tuple[bool, int, int]]:
    """Return (requires gradients, in-place version, address of the values) for each tensor.

    Version and address show whether a tensor was overwritten. Only parameters are sure to have an address.
    """
    parameter = nn.Parameter  # a local name: this runs twice for every block in every step
    return [
        (tensor.requires_grad, tensor._version, tensor.data_ptr() if type(tensor) is parameter else 0)
        for tensor in tensors
        if tensor is not None
    ]


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
