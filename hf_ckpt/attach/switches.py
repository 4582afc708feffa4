"""The attributes by which transformers switches checkpointing on a module: a flag, and the function to call.

hf_ckpt gives each planned block its own function, and a flag that is on while gradients are recorded. A block is
restored by `write`, with what `read` returned before.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.check import Check
from hf_ckpt.engines.region import Region

FLAG, FUNCTION = compat.transformers.SWITCHES
"""Names of the attributes that say whether to checkpoint, and which function to call."""
KEEPS_CACHE = "_can_checkpoint_with_cache"
"""Name of the attribute by which a block says that it may get a cache while it is checkpointed."""


class _Gate(enum.Enum):
    """The value of a planned block's flag. It is true while gradients are recorded, and false under `no_grad`.

    Under `no_grad` a block must run without checkpointing, or `generate()` in train mode loses its cache and returns
    other tokens. The layer drops the cache before it calls hf_ckpt's function, so the flag has to decide this, not the
    function. (The layer itself asks whether gradients are recorded only in recent versions.)
    """

    # A member of an enum is the same object in copies and pickles of a model, so that `is` recognises it.
    WHILE_GRADIENTS_ARE_ON = "on while gradients are recorded"

    def __bool__(self) -> bool:
        return torch.is_grad_enabled()


GATE = _Gate.WHILE_GRADIENTS_ARE_ON
"""The only value of `_Gate`: the flag of every planned block."""
Values = Mapping[str, object]
"""Name -> value, for those of `FLAG`, `FUNCTION` and `KEEPS_CACHE` that a module has itself, not by its class."""


def carriers(named: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return those of some modules that have a checkpointing flag: blocks, and also stacks and T5's attentions."""
    return {name: module for name, module in named.items() if hasattr(module, FLAG)}


def function_of(module: nn.Module) -> object:
    """Return a block's own checkpointing function, even while a check replaces it; None if it has none."""
    function = vars(module).get(FUNCTION)
    return function.function if isinstance(function, Check) else function


def is_on(module: nn.Module) -> bool:
    """Return whether a module's flag is on in a training forward."""
    with torch.enable_grad():  # hf_ckpt's flag is true only then
        return bool(getattr(module, FLAG))


def read(module: nn.Module) -> dict[str, object]:
    """Return the module's own `FLAG`, `FUNCTION` and `KEEPS_CACHE`, without those of its class."""
    return {name: vars(module)[name] for name in (FLAG, FUNCTION, KEEPS_CACHE) if name in vars(module)}


def original(module: nn.Module) -> Values:
    """Return what `read` returns for a module that is not planned yet."""
    # A copy of a planned block has the values that hf_ckpt has set on the block.
    return {} if isinstance(function_of(module), Region) else read(module)


def write(module: nn.Module, values: Values) -> None:
    """Set a module's attributes to what `read` returned; delete those that were absent."""
    # nn.Module's own `__setattr__` looks for parameters, buffers and modules, and takes ten times as long. Plans may
    # alternate in every step. A class with a method of its own may do anything with an attribute, so it is called.
    plain = type(module).__setattr__ is nn.Module.__setattr__
    set_attribute: Any = object.__setattr__ if plain else setattr
    for name in (FLAG, FUNCTION, KEEPS_CACHE):
        if name in values:
            set_attribute(module, name, values[name])
        else:
            vars(module).pop(name, None)


def switch(module: nn.Module, region: Region | None, before: Values) -> None:
    """Let a block call `region` while gradients are recorded; without one, `switch_off`."""
    if region is None:
        switch_off(module, before)
        return
    values = {**before, FLAG: GATE, FUNCTION: region}
    if region.takes_caches:  # the layer drops caches before it calls the function, unless the block may keep them
        values[KEEPS_CACHE] = True
    write(module, values)


def switch_off(module: nn.Module, before: Values) -> None:
    """Restore a module's attributes from `before`, and then switch the flag off if it is still on."""
    write(module, before)
    if getattr(module, FLAG):  # something had enabled checkpointing before hf_ckpt was installed
        setattr(module, FLAG, False)
