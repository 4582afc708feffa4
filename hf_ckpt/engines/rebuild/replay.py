"""Small modules, such as norms, that are run again as a whole: for their output, and for what autograd saved inside.

    forward     a `Replay` records the call, and each tensor that autograd saves inside is replaced by its place
    backward    the first place, or the module's output, that is needed runs the module: the run fills all places
                each place is taken once, and then dropped

The output of the module is a `Rebuilt` value with the `Replay` as its operation. One run serves both, so it is the
`Replay` that uses the module's input: from the first place on, until it has run.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.rebuild.layouts import Strides
from hf_ckpt.engines.rebuild.values import Rebuilt, Value, Work, sources_of
from hf_ckpt.engines.seen import Seen, refuse
from hf_ckpt.errors import RebuildError


class Replay:
    """One call of a small module that is run again as a whole.

    It runs with the parameters and attributes that the module had in the forward, such as the `eps` of a norm.

    Args:
        work: counts the run.
        module: the module.
        source: the value of its input.
        module_input: its input in the forward.
        stay: whether its parameters stay on their device, unsharded, throughout a step, and so keep their addresses.
    """

    def __init__(self, work: Work, module: nn.Module, source: Value, module_input: torch.Tensor, stay: bool) -> None:
        self.work = work
        self.module = module
        self.source = source
        self.sources = sources_of([source])
        """What each run uses."""
        self.needs_gradient = module_input.requires_grad
        self.device_type = module_input.device.type
        self.autocast: torch.dtype | None = None
        """The type to which autocast casts in the forward; None while it is off."""
        if compat.devices.autocast_is_on():
            self.autocast = compat.devices.autocast_dtype(self.device_type)
        self.saved = 0
        """Number of tensors that autograd saved inside the module in the forward."""
        self.inside: list[torch.Tensor | None] = []
        """The same tensors after the module was run again; None for one that was already taken."""
        self.attributes = vars(module).copy()
        """The module's attributes in its forward."""
        self.parameters = {
            name: Seen(parameter, address=stay)
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        """Name -> parameter of the module in its forward."""

    def output(self, tensor: torch.Tensor) -> Rebuilt:
        """Return the value of the module's output, which is `tensor` in the forward."""
        output = Rebuilt(self.work, self, [], Strides.of(tensor))  # no operands: the run itself uses the input
        output.depth = self.source.depth + 1
        return output

    def __call__(self) -> torch.Tensor:
        """Run the module again, and return its output without a graph. Raises errors as `run` does."""
        return self.run()[0]

    def run(self) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Run the module again and fill `inside`. Returns its output without a graph, and what autograd saved inside.

        Raises `InPlaceError` or `ChangedBlockError` if one of its parameters has changed since the forward, and
        `RebuildError` if it saves a different number of tensors.
        """
        forward = self.module.forward if self._is_as_in_the_forward() else self._forward_as_it_was()
        inside: list[torch.Tensor | None] = []
        # The module saves other tensors if its input requires gradients, so it must be as in the forward.
        source = self.source.value().detach().requires_grad_(self.needs_gradient)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(inside.append, never):
            if self.autocast is None:
                output: torch.Tensor = forward(source)
            else:
                with torch.autocast(self.device_type, self.autocast):
                    output = forward(source)
        for source_in_use in self.sources:
            source_in_use.end_use()
        filled = inside.copy()
        inside.clear()  # else a cycle: this run's graph holds the list through its hook, and the tensors hold the graph
        if len(filled) != self.saved:
            raise RebuildError(
                self.work.block,
                f"{type(self.module).__name__} saved {self.saved} tensors in the forward and "
                f"{len(filled)} when backward recomputed it.",
            )
        self.inside = filled.copy()
        return output.detach(), filled

    def _is_as_in_the_forward(self) -> bool:
        """Whether the module has the attributes and parameters of its forward. Raises errors as `refuse` does."""
        attributes = vars(self.module)
        current = attributes["_parameters"]
        unchanged = list(attributes) == list(self.attributes)  # names, before values are compared in pairs
        # Compared by identity: values may be tensors or arrays, and equal numbers do no harm.
        unchanged = unchanged and all(map(operator.is_, attributes.values(), self.attributes.values()))
        for name, seen in self.parameters.items():
            if seen.is_overwritten:
                refuse(seen, self.work.block, f"`{name}` of {type(self.module).__name__}")
            # torch.func.functional_call replaced it in the forward, or it has been frozen or unfrozen since.
            if current.get(name) is not seen.tensor or seen.tensor.requires_grad != seen.trained:
                unchanged = False
        return unchanged

    def _forward_as_it_was(self) -> Callable[[torch.Tensor], Any]:
        """Return the forward of a twin of the module, which has the attributes and parameters of the forward."""
        # Not the module itself with other attributes for a while: another thread may run it.
        twin = object.__new__(type(self.module))
        # Detached, so that the run does not touch the gradients of the parameters.
        as_before = {name: seen.tensor.detach().requires_grad_(seen.trained) for name, seen in self.parameters.items()}
        names = dict.fromkeys(self.module._parameters)
        vars(twin).update(self.attributes, _parameters=names | as_before)
        forward = self.attributes.get("forward")
        if isinstance(forward, types.MethodType) and forward.__self__ is self.module:  # a patch of this module only
            vars(twin)["forward"] = types.MethodType(forward.__func__, twin)
        run: Callable[[torch.Tensor], Any] = twin.forward
        return run


@final
class Inside:
    """Replaces a tensor that autograd saved inside a module that is run again: the next one of `replay`."""

    __slots__ = ("index", "replay")

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.index = replay.saved
        replay.saved += 1
        if not self.index:
            for source in replay.sources:
                source.begin_use()

    def value(self) -> torch.Tensor:
        """Return the tensor; run the module again if necessary."""
        inside = self.replay.inside
        tensor = inside[self.index] if inside else None
        if tensor is None:  # the first place, or another backward
            # From the run's own list: a backward in another thread may take what `inside` holds.
            tensor = self.replay.run()[1][self.index]
            assert tensor is not None
            self.replay.work.rebuilt += 1
            inside = self.replay.inside
        inside[self.index] = None
        return tensor


def never(value: Any) -> torch.Tensor:
    """Replaces `unpack` in a graph that no backward uses. Raises `AssertionError`."""
    raise AssertionError("a replayed module's own graph was asked for a saved tensor")
