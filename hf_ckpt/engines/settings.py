"""What decides how a block's forward runs, beside its tensors: attributes, children and hooks of its modules.

`Settings` are collected by a walk over the block, and all forwards share them until one of them changes. The attributes
of the models around the block belong to them: blocks may extend a list of their model, one after the other. What a
forward may write (buffers, tensors in attributes, lists and dicts) is listed here, and recorded by each `Snapshot`.
"""

from __future__ import annotations

import dataclasses
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
_PLAINEST = (
    nn.Linear(1, 1, device="meta"),
    compat.transformers.Conv1D(1, 1),
    *(nn.Identity(), nn.ModuleDict(), nn.ModuleList(), nn.ParameterDict(), nn.ParameterList()),
)
_INDIFFERENT: dict[type, set[str]] = {
    type(module): {*vars(module), compat.transformers.INITIALISED} for module in _PLAINEST
}
"""Types whose forward, if any, reads no attribute that changes -> the attributes that their constructor and
transformers give them. These are not compared, which would take longer."""
_INTERNAL = frozenset(
    (vars(nn.Module()).keys() - {"training"}) | {*compat.transformers.SWITCHES, compat.transformers.INITIALISED}
)
"""Attributes of torch's `Module` that are no settings, or that `Settings` collects by themselves; and those of
transformers that no forward reads, or that switch checkpointing. One of these is the block's checkpointing function,
which holds its settings: a reference cycle."""
_SMALL_BYTES = 2**18
"""The largest buffer that is copied although no forward has changed it yet: a copy of it takes microseconds."""

Place = tuple[int, str]
"""Where the block has a value: the number of a box in `Settings.boxes`, and a key in it."""


class Kind(enum.Enum):
    """What a box holds, and what a recomputation finds in it."""

    ATTRIBUTES = "attributes of a module or a config"
    """Plain ones are as in `Box.content`. Tensors and containers are as each `Snapshot` has recorded them."""
    PARAMETERS = "parameters of a module"
    """As each `Snapshot` has recorded them."""
    BUFFERS = "buffers of a module"
    """The same."""
    STRUCTURE = "children or hooks of a module"
    """As in `Box.content`. A block's own hooks are none where transformers runs them outside of what is recomputed."""
    OPTIONS = "how torch calls the hooks of a module"
    """The same. Without hooks, there are none."""


TENSORS = (Kind.PARAMETERS, Kind.BUFFERS)
"""Kinds of boxes whose values are tensors. A tuple, because the hash of an enum's member is a Python call."""


@dataclasses.dataclass(eq=False)
class Box:
    """A dict in which a block, or a module above it, has values.

    Args:
        kind: what it holds.
        values: the dict; None for the attributes of the block and of the modules above it, which must not be held.
        content: what it held when the settings were collected, as far as `kind` says so. Plain containers, such as the
            scaling of adapters, are copies: a container itself may get tensors later, and would then keep the graph
            that these settings belong to.
        names: all its keys.
    """

    kind: Kind
    values: dict[Any, Any] | None
    content: dict[Any, Any]
    names: frozenset[Any]


@dataclasses.dataclass(eq=False)
class Learned:
    """What the forwards and recomputations of a block have shown under the same settings."""

    state: list[Place]
    """Buffers, tensors in attributes, and parameters that the first forward has written: each forward records them."""
    has_run: bool = False
    """Whether a forward has run, and has shown all but `has_stopped`."""
    has_stopped: bool = False
    """Whether a recomputation has shown what it leaves when torch ends it early."""
    changing: set[Place] = dataclasses.field(default_factory=set)
    """Those of `state` that a forward has changed in place."""
    changes_attributes: bool = False
    """Whether a forward has changed other attributes, so that each recomputation would, too."""
    written: set[Place] = dataclasses.field(default_factory=set)
    """Parameters that the first forward itself wrote to with the same values, such as a router's weight that PEFT
    adapts: in that forward, a write to them does not count as a change."""
    draws_on_host: bool = True
    """Whether the forward may draw from Python's `random` or from numpy, whose states take long to read."""


Above = tuple[nn.Module, ...]
"""The modules above a block that run it: its stack and the models around it. In `Settings`, proxies of them: the block
must not keep them alive, because they hold the block."""


class Settings:
    """Everything beside its tensors that decides what a block's forward does.

    They refer to everything below the block but not to the block itself, which would be a reference cycle.

    Args:
        block: the block.
        above: the modules above it. Of these, what they hold themselves belongs to the settings, without their
            children: plain attributes, tensors and buffers, and containers of these, which the block may read and
            extend within a step.
    """

    def __init__(self, block: nn.Module, above: Above = ()) -> None:
        self.boxes: list[Box] = []
        """The attributes of the block, of the modules in it and of their configs, and of the modules above it; then
        parameters and buffers, as far as there are any; then children and hooks."""
        self.plain_containers: list[Place] = []
        """Dicts, lists and sets of plain values."""
        self.merged: list[Place] = []
        """Those of them that list the merged adapters of a layer."""
        self.containers: list[Place] = []
        """Containers of tensors or of other objects."""
        self.state: list[Place] = []
        """Buffers, and tensors that are attributes: a forward may replace them or change them in place."""
        self.chooses = bool(routers(block))
        """Whether the block sends tokens to experts."""
        self.parameters = vars(block)["_parameters"]
        """The dict of the block's own parameters, which identifies the block."""
        copies: dict[int, Any] = {}  # two modules may share a container
        parts: list[Box] = []
        """Of `boxes`, those that come last: tensors and structure."""
        for module in block.modules():
            # Scripted modules have wrappers of C++ objects in place of these dicts, see torch/jit/_script.py.
            if isinstance(vars(module).get("_parameters"), dict):
                self._collect(module, parts, copies, is_block=module is block)
        self.inner = [box.values for box in self.boxes[1:] if box.values is not None]
        """The dicts of the attributes of modules and configs, without the block's own and those above it."""
        self.above = above
        self.shared: set[Place] = set()
        """Those of `state` that are above the block. They are copied once a forward of the block has changed them."""
        has_below = len(self.state)
        for module in above:
            self._collect_above(module, parts, copies)
        self.shared.update(self.state[has_below:])
        parts.sort(key=lambda box: box.kind not in TENSORS)
        self.boxes += parts
        self.weights: list[Place] = []
        """Parameters. Those that the first forward writes are state, too."""
        self._list_tensors()
        self.learned = Learned(self.state)
        self._prepare_comparison()

    def _list_tensors(self) -> None:
        """Add the buffers of the block, and of the modules above it, to `state`, and its parameters to `weights`."""
        buffers_above = {id(vars(module)["_buffers"]) for module in self.above}
        for number, box in enumerate(self.boxes):
            places = [(number, key) for key in box.values or ()]
            if box.kind is Kind.PARAMETERS:
                self.weights += places
            elif box.kind is Kind.BUFFERS:
                self.state += places
                if id(box.values) in buffers_above:
                    self.shared.update(places)

    def _prepare_comparison(self) -> None:
        """Make the lists that `still_apply` and each `Snapshot` compare, without a Python call for each value."""
        of_parts = [box for box in self.boxes if box.kind is not Kind.ATTRIBUTES]
        self.parts = [box.values for box in of_parts if box.values is not None]
        """The dicts of tensors and of structure."""
        self.tensors = [box.values for box in of_parts if box.kind in TENSORS and box.values is not None]
        """The dicts of parameters and of buffers."""
        structure = [box for box in of_parts if box.kind not in TENSORS]
        # Nine of ten are empty, and a look at their sizes touches a fourth of the memory that comparing them does.
        self.empty = [box.values for box in structure if not box.content and box.kind is Kind.STRUCTURE]
        self.filled = [box.values for box in structure if box.content]
        self.contents = [box.content for box in structure if box.content]
        self.sizes = [len(box.names) for box in self.boxes if box.kind is Kind.ATTRIBUTES or box.kind in TENSORS]
        # One `itemgetter` for all plain attributes of a module reads them without a Python call each.
        plain = [
            (number, box.content)
            for number, box in enumerate(self.boxes)
            if box.kind is Kind.ATTRIBUTES and box.content
        ]
        self.getters = [(number, _getter(tuple(content))) for number, content in plain]
        self.values = [getter(self.boxes[number].content) for number, getter in self.getters]

    def _collect(self, module: nn.Module, parts: list[Box], copies: dict[int, Any], *, is_block: bool) -> None:
        """Collect what one module and its config have: a box for each dict of attributes, and `parts`."""
        attributes = vars(module)
        box = Box(Kind.ATTRIBUTES, None if is_block else attributes, {}, frozenset(attributes))
        self.boxes.append(box)
        if is_block or not _is_indifferent(module):
            self._sort(attributes, box.content, copies)
        for kind, tensors in ((Kind.PARAMETERS, attributes["_parameters"]), (Kind.BUFFERS, attributes["_buffers"])):
            if tensors:
                parts.append(Box(kind, tensors, {}, frozenset(tensors)))
        is_outside = is_block and compat.transformers.HOOKS_STAY_OUTSIDE
        for key, value in attributes.items():
            is_hooks = key in _INTERNAL and key.startswith(("_forward", "_backward"))  # or how torch calls them
            if key == "_modules" or (is_hooks and not is_outside):
                kind = Kind.OPTIONS if key.endswith(("_with_kwargs", "_always_called")) else Kind.STRUCTURE
                parts.append(Box(kind, value, dict(value), frozenset(value)))
        config = compat.transformers.config_of(module)
        if config is not None and not any(vars(config) is box.values for box in self.boxes):  # modules share configs
            content = {key: value for key, value in vars(config).items() if _is_plain(value)}
            self.boxes.append(Box(Kind.ATTRIBUTES, vars(config), content, frozenset(vars(config))))

    def _collect_above(self, module: nn.Module, parts: list[Box], copies: dict[int, Any]) -> None:
        """Collect what a module above the block holds itself."""
        box = Box(Kind.ATTRIBUTES, None, {}, frozenset(vars(module)))
        self.boxes.append(box)
        # Not what transformers declares for every model, such as plans for parallelism, nor methods that were replaced,
        # such as hf_ckpt's own, nor objects in containers, such as adapters' configs.
        names = [key for key in vars(module) if not hasattr(compat.transformers.PreTrainedModel, key)]
        items = {key: vars(module)[key] for key in names}
        items = {key: item for key, item in items.items() if not (callable(item) or _has_only_objects(item))}
        self._sort(items, box.content, copies)
        if vars(module)["_buffers"]:
            buffers = vars(module)["_buffers"]
            parts.append(Box(Kind.BUFFERS, buffers, {}, frozenset(buffers)))

    def _sort(self, attributes: dict[str, Any], content: dict[str, Any], copies: dict[int, Any]) -> None:
        """Sort the attributes of the last box by what a forward may do to them, and add plain ones to its `content`."""
        number = len(self.boxes) - 1
        for key, value in attributes.items():
            if is_ignored(key):
                continue
            if isinstance(value, torch.Tensor):
                if not compat.distributed.is_part_of_flat(value):  # a parameter, which comes and goes
                    self.state.append((number, key))
            # `forward` is an attribute where something, such as accelerate, has replaced the method.
            elif _is_plain(value) or key == "forward":
                content[key] = value
            elif _is_plain_container(value):
                content[key] = copied(value, copies)
                self.plain_containers.append((number, key))
                if compat.peft.is_merged(key, value):
                    self.merged.append((number, key))
            elif _holds_tensors_or_changes(value):
                self.containers.append((number, key))

    def dicts(self, block: nn.Module) -> list[dict[str, Any]]:
        """Return the dict of each box."""
        return [vars(block), *self.inner, *map(_attributes_if_alive, self.above), *self.parts]

    def still_apply(self, block: nn.Module) -> bool:
        """Whether `block` is the block of these settings and still has them."""
        try:
            # As `dicts`, without a call, and without structure.
            dicts = [vars(block), *self.inner, *map(_attributes_of, self.above), *self.tensors]
            return (
                dicts[0]["_parameters"] is self.parameters  # not a copy of the block, nor another block
                and not any(self.empty)
                and self.filled == self.contents
                and self.sizes == list(map(len, dicts))
                and self.values == [getter(dicts[number]) for number, getter in self.getters]
            )
        # An attribute is gone, or is now a tensor or an array; or the model is gone.
        except (KeyError, RuntimeError, ValueError, ReferenceError):
            return False

    def copies_always(self, place: Place, tensor: torch.Tensor) -> bool:
        """Whether each forward copies a tensor of `state`: it is small, or a forward has changed it before.

        Masks are copied in the first forward only, because no module is known that changes one.
        """
        is_copied = is_small(tensor) and tensor.dtype is not torch.bool
        return place in self.learned.changing or (is_copied and place not in self.shared)


@functools.lru_cache(maxsize=1024)
def _getter(names: tuple[str, ...]) -> operator.itemgetter[Any]:
    """Return what reads these items of a dict. Blocks share it, so that each finds it in the cache of the processor."""
    return operator.itemgetter(*names)


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a copy of a tensor takes next to no time and memory."""
    return tensor.nbytes <= _SMALL_BYTES


def is_ignored(key: Any) -> bool:
    """Whether an attribute is none of the settings. DeepSpeed's counters go on during a recomputation."""
    return key in _INTERNAL or (isinstance(key, str) and compat.distributed.counted_by_deepspeed(key))


def _is_indifferent(module: nn.Module) -> bool:
    """Whether a module is of a type in `_INDIFFERENT`, and nothing was put on it that may read attributes."""
    usual = _INDIFFERENT.get(type(module), set())
    return vars(module).keys() <= usual and not (module._forward_hooks or module._forward_pre_hooks)


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


def _has_only_objects(value: Any) -> bool:
    """Whether a value is a container of objects, modules or the like, without tensors."""
    leaves = compat.torch.tree_leaves(value) if isinstance(value, (dict, list, tuple)) else []
    return not all(map(_is_plain, leaves)) and not any(isinstance(leaf, torch.Tensor) for leaf in leaves)


_attributes_of = operator.attrgetter("__dict__")


def _attributes_if_alive(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of the module of a proxy; none if it is gone."""
    try:
        return module.__dict__
    except ReferenceError:
        return {}


def _is_plain_container(value: Any) -> bool:
    """Whether a value is a dict, list or set of plain values, also nested. Such containers compare fast."""
    if type(value) not in (dict, list, set):
        return False
    items = value.values() if type(value) is dict else value
    return all(item is not value and (_is_plain(item) or _is_plain_container(item)) for item in items)
