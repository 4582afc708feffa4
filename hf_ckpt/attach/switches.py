"""The attributes by which transformers switches checkpointing on a module: a flag, and the function to call.

hf_ckpt gives each planned block its own function, and a flag that is on while gradients are recorded. A `Switched` is
the row that undoes it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.puts import Weak, is_part
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
"""The only value of `_Gate`: the flag of every planned block, and what it has under `KEEPS_CACHE`."""
Values = Mapping[str, object]
"""Name -> value, for those of `FLAG`, `FUNCTION` and `KEEPS_CACHE` that a module has itself, not by its class."""
_NAMES = (FLAG, FUNCTION, KEEPS_CACHE)


def function_of(module: nn.Module) -> object:
    """Return a block's own checkpointing function, even while a check replaces it; None if it has none."""
    function = vars(module).get(FUNCTION)
    return function.function if isinstance(function, Check) else function


def is_on(*modules: nn.Module) -> bool:
    """Return whether the flag of any of these modules is on in a training forward."""
    with torch.enable_grad():  # hf_ckpt's flag is true only then
        return any(getattr(module, FLAG, False) for module in modules)


def read(module: nn.Module) -> dict[str, object]:
    """Return the module's own `FLAG`, `FUNCTION` and `KEEPS_CACHE`, without those of its class."""
    return {name: vars(module)[name] for name in _NAMES if name in vars(module)}


def write(module: nn.Module, values: Values) -> None:
    """Set a module's attributes to what `read` returned; delete those that were absent."""
    # nn.Module's own `__setattr__` looks for parameters, buffers and modules, and takes ten times as long. Plans may
    # alternate in every step. A class with a method of its own may do anything with an attribute, so it is called.
    plain = type(module).__setattr__ is nn.Module.__setattr__
    set_attribute: Any = object.__setattr__ if plain else setattr
    for name in _NAMES:
        if name in values:
            set_attribute(module, name, values[name])
        else:
            vars(module).pop(name, None)


class Switched(Weak):
    """The attributes of a module: the module, the model, and the function that the module calls while gradients are
    recorded, None without one. After `put`, also its attributes before, switched off, as from `read`."""

    @property
    def is_taken(self) -> bool:
        """Whether the module has the function of another model's plan now, to which it was moved, or with which it is
        shared."""
        module, _, region, *_ = self.arguments()
        function = None if module is None else function_of(module)
        return isinstance(function, Region) and function is not region

    def put(self) -> None:
        """Switch the module off, and let it call the function, if there is one."""
        module, _, region = self.arguments()
        if getattr(module, FLAG):
            setattr(module, FLAG, False)
        # transformers' own disable method leaves what another plan has put there in part.
        before = {name: value for name, value in read(module).items() if value is not GATE}
        self._held += (before,)
        if region is not None:
            self.exchange(region)

    def exchange(self, region: Region | None) -> None:
        """Let the module call another function from now on; none with None."""
        module, base, _, before = self._held
        self._held = (module, base, region, before)
        values = before
        if region is not None:
            values = {**before, FLAG: GATE, FUNCTION: region}
            if region.takes_caches:  # else the layer drops caches before it calls the function
                values[KEEPS_CACHE] = GATE
        write(module(), values)

    def undo(self) -> None:
        """Restore the attributes, also if something else has changed them since.

        A module that was moved elsewhere may have been enabled there.
        """
        module, base, region, *before = self.arguments()
        if module is None or not before or self.is_taken:
            return
        if function_of(module) is region or (base is not None and is_part(module, base)):
            write(module, before[0])
