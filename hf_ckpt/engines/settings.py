"""What decides how a block's forward runs, beside its tensors: attributes, children and hooks of its modules.

`Settings` are collected by a walk over the block, and all forwards share them until one of them changes. What a forward
may write (buffers, tensors in attributes, lists and dicts) is listed here, and recorded by each `ForwardState`.
"""

from __future__ import annotations

import enum
import functools
import operator
import types
from typing import Any

import numpy
import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.copies import CONTAINERS, copied
from hf_ckpt.models.parts import routers

_PLAIN = (type(None), bool, int, float, str, enum.Enum, numpy.generic, torch.dtype, torch.device)
_CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_INDIFFERENT = (nn.Linear, nn.Identity, nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)
"""Types whose forward, if any, reads no plain attribute. Their attributes are not compared, which would take longer."""
_INTERNAL = (frozenset(vars(nn.Module())) - {"training"}) | set(compat.transformers.SWITCHES)
"""Attributes of torch's `Module` that are no settings, or that `Settings` collects by themselves; and those that switch
checkpointing. One of these is the block's checkpointing function, which holds its settings: a reference cycle."""
_SMALL_BYTES = 2**18
"""The largest buffer that is copied although no forward has changed it yet: a copy of it takes microseconds."""

Place = tuple[int, str]
"""Where the block has a value: the number of a dict, and a key in it. The dicts are those of `Settings.dicts`: first
the attributes of each module and config, as many as `Settings.attributes`, and then those of `Settings.tensors`."""


class Settings:
    """Everything beside its tensors that decides what a block's forward does.

    They refer to everything below the block but not to the block itself, which would be a reference cycle.
    """

    def __init__(self, block: nn.Module) -> None:
        self.attributes: list[dict[str, Any]] = []
        """The plain attributes of each module and of its config. The block comes first."""
        self.boxes: list[dict[Any, Any]] = []
        """Dicts of children and of hooks. Each is compared with its content.

        The block's own hooks are none where transformers runs them outside of what is recomputed.
        """
        self.tensors: list[dict[str, torch.Tensor | None]] = []
        """The dicts of parameters and of buffers that are not empty."""
        self.plain_containers: list[Place] = []
        """Dicts, lists and sets of plain values, such as the scaling of adapters. `attributes` has copies of them: a
        container itself may get tensors later, and would then keep the graph that these settings belong to."""
        self.merged: list[Place] = []
        """Those of them that list the merged adapters of a layer."""
        self.containers: list[Place] = []
        """Containers of tensors or of other objects."""
        self.state: list[Place] = []
        """Buffers, and tensors that are attributes: a forward may replace them or change them in place."""
        self.changing: set[Place] = set()
        """Those that a forward has changed in place."""
        self.changes_attributes = False
        """Whether a forward has changed other attributes, so that each recomputation would, too."""
        self.has_run = False
        """Whether a forward has run under these settings, and has shown the following."""
        self.has_stopped = False
        """Whether a recomputation has shown what it leaves when torch ends it early."""
        self.written: set[Place] = set()
        """Parameters that the first forward itself wrote to, such as a router's weight that PEFT adapts: a write to
        them does not count as a change."""
        self.draws_on_host = True
        """Whether the forward may draw from Python's `random` or from numpy, whose states take long to read."""
        self.chooses = bool(routers(block))
        """Whether the block sends tokens to experts."""
        self.parameters = vars(block)["_parameters"]
        """The dict of the block's own parameters, which identifies the block."""
        owners: list[dict[str, Any]] = []
        copies: dict[int, Any] = {}  # two modules may share a container
        for module in block.modules():
            # Scripted modules have wrappers of C++ objects in place of these dicts, see torch/jit/_script.py.
            if isinstance(vars(module).get("_parameters"), dict):
                self._collect(module, owners, copies, is_block=module is block)
        self.inner = owners[1:]
        """The dicts that `attributes` are from, without the block's own."""
        self.names = [frozenset(owner) for owner in owners]
        """The names of all their attributes."""
        buffers = {id(vars(module).get("_buffers")) for module in block.modules()}
        for number, tensors in enumerate(self.tensors, len(owners)):
            if id(tensors) in buffers:
                self.state += [(number, key) for key in tensors]
        # Copies, because a box is changed in place, and is itself the same one afterwards.
        self.contents = [dict(box) for box in self.boxes]
        self.sizes = [len(box) for box in (*owners, *self.tensors)]
        # One `itemgetter` for all plain attributes of a module reads them without a Python call each.
        self.getters = [(number, operator.itemgetter(*plain)) for number, plain in enumerate(self.attributes) if plain]
        self.values = [getter(self.attributes[number]) for number, getter in self.getters]

    def _collect(
        self, module: nn.Module, owners: list[dict[str, Any]], copies: dict[int, Any], *, is_block: bool
    ) -> None:
        """Collect what one module and its config have, and add the dicts of their attributes to `owners`."""
        attributes = vars(module)
        number = len(owners)
        owners.append(attributes)
        self.attributes.append({})
        if type(module) not in _INDIFFERENT or is_block:
            self._sort(attributes, number, copies)
        self.tensors += [tensors for tensors in (attributes["_parameters"], attributes["_buffers"]) if tensors]
        is_outside = is_block and compat.transformers.HOOKS_STAY_OUTSIDE
        for key, value in attributes.items():
            is_hooks = key in _INTERNAL and key.startswith(("_forward", "_backward"))  # or how torch calls them
            if key == "_modules" or (is_hooks and not is_outside):
                self.boxes.append(value)
        config = compat.transformers.config_of(module)
        if config is not None and not any(vars(config) is owner for owner in owners):  # modules share configs
            owners.append(vars(config))
            self.attributes.append({key: value for key, value in vars(config).items() if _is_plain(value)})

    def _sort(self, attributes: dict[str, Any], number: int, copies: dict[int, Any]) -> None:
        """Sort the attributes of one module, dict `number`, by what a forward may do to them."""
        for key, value in attributes.items():
            if is_ignored(key):
                continue
            if isinstance(value, torch.Tensor):
                self.state.append((number, key))
            # `forward` is an attribute where something, such as accelerate, has replaced the method.
            elif _is_plain(value) or key == "forward":
                self.attributes[number][key] = value
            elif _is_plain_container(value):
                self.attributes[number][key] = copied(value, copies)
                self.plain_containers.append((number, key))
                if compat.peft.is_merged(key, value):
                    self.merged.append((number, key))
            elif _holds_tensors_or_changes(value):
                self.containers.append((number, key))

    def dicts(self, block: nn.Module) -> list[dict[str, Any]]:
        """Return the dicts that places refer to: of the attributes of each module and config, then of tensors."""
        return [vars(block), *self.inner, *self.tensors]

    def still_apply(self, block: nn.Module) -> bool:
        """Whether `block` is the block of these settings and still has them."""
        dicts = [vars(block), *self.inner, *self.tensors]  # as `dicts`, without a call
        try:
            return (
                dicts[0]["_parameters"] is self.parameters  # not a copy of the block, nor another block
                and self.boxes == self.contents
                and self.sizes == list(map(len, dicts))
                and self.values == [getter(dicts[number]) for number, getter in self.getters]
            )
        except (KeyError, RuntimeError, ValueError):  # an attribute is gone, or is now a tensor or an array
            return False

    def copies_always(self, place: Place, tensor: torch.Tensor) -> bool:
        """Whether each forward copies a tensor of `state`: it is small, or a forward has changed it before.

        Masks are copied in the first forward only, because no module is known that changes one.
        """
        return place in self.changing or (tensor.nbytes <= _SMALL_BYTES and tensor.dtype is not torch.bool)


def is_ignored(key: Any) -> bool:
    """Whether an attribute is none of the settings. DeepSpeed's counters go on during a recomputation."""
    return key in _INTERNAL or (isinstance(key, str) and compat.distributed.counted_by_deepspeed(key))


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a flag, a string, a function, or a tuple of these.

    Other objects may hold what a forward stored, and to keep them would keep its activations alive.
    """
    if isinstance(value, (tuple, frozenset)):  # they cannot be changed, so their items can be compared
        return all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, *_CODE))


def _holds_tensors_or_changes(value: Any) -> bool:
    """Whether a value is a container, or a tuple with a container or a tensor in it."""
    if isinstance(value, tuple):
        return any(isinstance(item, torch.Tensor) or _holds_tensors_or_changes(item) for item in value)
    return isinstance(value, CONTAINERS)


def _is_plain_container(value: Any) -> bool:
    """Whether a value is a dict, list or set of plain values, also nested. Such containers compare fast."""
    if type(value) not in (dict, list, set):
        return False
    items = value.values() if type(value) is dict else value
    return all(item is not value and (_is_plain(item) or _is_plain_container(item)) for item in items)
