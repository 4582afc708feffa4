"""What plans depend on beside batches: the states of the model and of its optimizers."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.measure.live import held_bytes


class ModelState:
    """Which parameters are trained, their bytes, and autocast's type.

    Measurements and plans hold in one state only, because each `Batch` has the number of its state. So a new number is
    all that it takes to measure a changed model again.

    The state is read for every batch, so this walks over the model only when modules or parameters were added, removed
    or replaced.
    """

    def __init__(self, base: nn.Module, devices: Collection[torch.device]) -> None:
        self._base = weakref.ref(base)  # the session that holds this must not keep the model alive
        self._device_type = next((device.type for device in compat.devices.accelerators(devices)), "cpu")
        self.parameters_stay = compat.distributed.parameters_stay(base)
        """Whether every parameter stays on its device, unsharded. Others come only when they are used."""
        self._modules: list[nn.Module] = []
        self._boxes: list[dict[str, Any]] = []
        """The dicts of children and of parameters of each module."""
        self._addresses: list[int] = []
        """The addresses of what is in them."""
        self._parameters: list[nn.Parameter] = []
        self._configs: list[Any] = []
        """The configs of its modules, each once."""
        self._versions: list[int] = []
        """The versions of gradients when the step began."""
        self._numbers: dict[Any, int] = {}
        """The states that were seen, and their numbers."""
        self.present: tuple[Any, int] = (None, 0)
        """The type that autocast computes in, and the number of the state."""

    def has_changed(self) -> bool:
        """Read the present state. Returns whether it is one that the model was never in, other than the first."""
        if self._read_addresses() != self._addresses or not self._boxes:
            self._walk()
        # Sharded parameters are gathered and freed in every step. `attrgetter` and `map` run without Python calls.
        names = ("requires_grad", "nbytes") if self.parameters_stay else ("requires_grad",)
        autocast_dtype = compat.devices.autocast_dtype(self._device_type)
        # Blocks in eval mode are not checkpointed, and eager attention saves more than others.
        modes = tuple(map(operator.attrgetter("training"), self._modules))
        attention = tuple(map(operator.attrgetter(compat.transformers.ATTENTION_KEY), self._configs))
        state = autocast_dtype, tuple(map(operator.attrgetter(*names), self._parameters)), modes, attention
        is_new = bool(self._numbers) and state not in self._numbers
        self.present = autocast_dtype, self._numbers.setdefault(state, len(self._numbers))
        return is_new

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient when a step begins."""
        self._versions = self._read_versions()
        return bool(self._versions)

    def have_new_gradients(self) -> bool:
        """Whether gradients came, went or changed since `has_gradients` was last called."""
        return self._read_versions() != self._versions

    def _read_versions(self) -> list[int]:
        gradients = map(operator.attrgetter("grad"), self._parameters)
        there = filter(functools.partial(operator.is_not, None), gradients)
        return list(map(operator.attrgetter("_version"), there))

    def _read_addresses(self) -> list[int]:
        # A parameter that is cast in place keeps its address, which is why `has_changed` also reads its bytes.
        return list(map(id, itertools.chain.from_iterable(map(dict.values, self._boxes))))

    def _walk(self) -> None:
        base = self._base()
        assert base is not None
        modules = list(base.modules())
        self._modules = modules[1:]  # held, so that no new module gets the address of one that was removed
        self._boxes = [vars(module)[box] for module in modules for box in ("_modules", "_parameters")]
        self._addresses = self._read_addresses()
        self._parameters = list(base.parameters())
        configs = [vars(module).get("config") for module in modules]
        configs = [config for config in configs if hasattr(config, compat.transformers.ATTENTION_KEY)]
        self._configs = list({id(config): config for config in configs}.values())


class OptimizerStates:
    """Notices when an optimizer steps for the first time, and has made its state.

    It sees the optimizers of the whole process, because a model does not refer to its own.
    """

    def __init__(self) -> None:
        # Not a WeakSet, which takes nine Python calls in every step.
        self._stepped: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        """The optimizers that have stepped since `have_grown` was last called, by their `id`."""
        self._sizes: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizer -> the size of its state when `have_grown` last saw it."""
        self.has_stepped = False
        """Whether an optimizer has stepped since this was last set."""
        self._bytes = 0
        """Bytes of the state of the model's optimizers when one of them last had another size."""

    def have_grown(self, base: nn.Module, devices: Collection[torch.device]) -> bool:
        """Whether optimizers of the model hold more than when this was last asked: from now on steps hold it, too."""
        # An optimizer makes its state in its first step. Later ones may add to it, too: of a group that was added, or
        # once `momentum` is set.
        stepped = [reference() for reference in self._stepped.values()]
        sizes = {optimizer: len(optimizer.state) for optimizer in stepped if optimizer is not None}
        self._stepped.clear()
        if all(self._sizes.get(optimizer) == size for optimizer, size in sizes.items()):
            return False
        optimizers = compat.optimizers.of_model(base)
        # A new one may take the place of another, whose state is gone, so that its own is no more than that was.
        new = sizes.keys() - self._sizes.keys()
        older = held_bytes(devices, *(optimizer for optimizer in optimizers if optimizer not in new))
        before = min(self._bytes, older)
        self._sizes.update(sizes)
        self._bytes = held_bytes(devices, *optimizers)
        return self._bytes > before

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer is about to step."""
        # The step that follows may make the state. It is too early to read it, so the next batch does.
        self.has_stepped = True
        self._stepped[id(optimizer)] = weakref.ref(optimizer)
        compat.optimizers.remember(optimizer)
