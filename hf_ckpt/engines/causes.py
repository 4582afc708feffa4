"""Why the backward of a block got other tensors than its forward saved: what differed in the recomputation."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.differences import Difference, difference_of, is_plain, version_of
from hf_ckpt.models.blocks import routers


class BlockState:
    """The state of a block in its forward and in its recomputation. What changed shows the cause of a difference.

    Args:
        module: the block.
        inputs: the arguments that its checkpointing function got for it.
    """

    def __init__(self, module: nn.Module, inputs: list[Any]) -> None:
        self.module, self.inputs = module, inputs
        self.running = True
        """Whether the forward is still running."""
        self.versions = _versions(inputs)
        self.settings: dict[str, dict[str, Any]] = {}
        self.parameters = _parameters(module)
        self.buffers: list[tuple[str, int, int]] = []
        self.attributes: list[dict[str, str]] = []
        """Plain attributes of the modules before the first run, after it, and when the backward begins."""
        self.changed: list[tuple[str, str]] = []
        """Settings that differ when the backward begins: (setting, qualified name of the module)."""
        self.replaced = False
        """Whether parameters have been replaced by other tensors when the backward begins."""
        self.changes_input = False
        self.autocast = compat.autocast_now()
        self.given: dict[tuple[int | str, int], tuple[torch.Tensor, int]] = {}
        """The block's input tensors in the first run, with their versions, as far as there was room."""
        self.names: set[int | str] = set()
        self.random: compat.RandomState | None = None
        self.ran_again = False
        self.missing: list[str] = []
        """Names of arguments that the recomputation left out."""
        self.given_others: list[str] = []
        """Arguments that had other values in the recomputation."""
        self.other_autocast = self.other_random = self.other_host = False
        """Whether autocast, torch's and the host's random state differed in the recomputation."""

    def first_run(
        self, args: tuple[Any, ...], keywords: dict[str, Any], take_room_for: Callable[[torch.Tensor], bool]
    ) -> None:
        """Record the block's inputs and the random state."""
        given = {key: value for key, value in _tensors(args, keywords).items() if take_room_for(value)}
        self.given = {key: (value.detach(), version_of(value)) for key, value in given.items()}
        self.names = {*range(len(args)), *keywords}
        there = [*self.module.parameters(), *compat.tree_leaves((args, keywords))]
        self.random = compat.RandomState(compat.devices_of(there))
        self.attributes.append(_attributes(self.module))

    def forward_has_ended(self) -> None:
        """Record the block's settings at the end of its forward."""
        self.running = False
        self.changes_input = _versions(self.inputs) != self.versions
        self.inputs = []  # their graph may refer back to this: a cycle
        self.settings = _settings(self.module)
        self.attributes.append(_attributes(self.module))

    def backward_begins(self) -> None:
        """Compare with the block's settings at the beginning of its backward."""
        self.buffers = _buffers(self.module)
        self.attributes.append(_attributes(self.module))
        now = _settings(self.module)
        self.changed = [
            (key, name)
            for name, before in self.settings.items()
            for key, value in before.items()
            if now.get(name, before).get(key, value) != value
        ]
        self.replaced = _parameters(self.module) != self.parameters

    def next_run(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Compare the first recomputation of the block with `first_run`."""
        assert self.random is not None
        self.ran_again = True
        again = _tensors(args, keywords)
        self.missing = [str(name) for name in self.names - {*range(len(args)), *keywords}]
        self.given_others = [
            f"`{self._name_of(name, args)}`"
            for (name, place), (value, version) in self.given.items()
            if (name, place) in again
            and (version_of(value) != version or difference_of(value, again[name, place]) is not None)
        ]
        self.given = {}
        self.other_autocast = compat.autocast_now() != self.autocast
        self.other_random, self.other_host = self.random.of_torch_has_moved(), self.random.of_host_may_have_moved()

    def _name_of(self, place: int | str, args: tuple[Any, ...]) -> str:
        """Return the name of an argument of the block's forward."""
        if isinstance(place, str):
            return place
        names = list(inspect.signature(self.module.forward).parameters)  # without the block itself
        place -= any(arg is self.module for arg in args)
        return names[place] if place < len(names) else f"argument {place}"

    def updated_again(self) -> dict[str, str]:
        """Return names -> kinds of the buffers, and the attributes, that changed in the first run and the backward."""
        now = set(_buffers(self.module))
        updated = {name: "buffer" for name, *mark in self.buffers if (name, *mark) not in now}
        if len(self.attributes) == 3:
            before, after, later = self.attributes
            for name, value in _attributes(self.module).items():
                if before.get(name) != after.get(name) and later.get(name) != value:
                    updated[name] = "attribute"
        return updated

    def cause(self, run: Callable[[], Any] | None, first: Difference, rebuilds: bool) -> str:
        """Return the likely cause of the first difference, and what to do about it.

        `run` runs the block again; None if that is not possible. `rebuilds` says whether the block has an engine of
        hf_ckpt that rebuilds single tensors.
        """
        known = self._cause_told_by_state(run is not None, first, rebuilds)
        if known:
            return known
        drawn = None if run is None else _draws(self.module, run, self.autocast, self.random)
        if drawn is not None and drawn.differs:
            return (
                "Run twice from the same random state, the block gives other results by itself: a nondeterministic "
                "kernel (torch.use_deterministic_algorithms(True) names it) or a random generator of its own."
            )
        experts = " So tokens may go to other experts." if routers(self.module) else ""
        if self.other_random and (drawn is None or drawn.from_torch):
            return f"Random numbers are drawn anew: set preserve_rng_state to True.{experts}"
        if self.other_host and drawn is not None and drawn.from_host:
            return (
                "The block draws from Python's `random` or numpy, whose state the recomputation does not restore."
                f"{experts}"
            )
        if updated := self.updated_again():
            name, kind = next(iter(updated.items()))
            return f"The block reads `{name}`, {KINDS[kind]} that it updates itself in every run.{experts}"
        if self.changed:
            return f"Unknown; {self._changes()} changed between forward and backward.{experts}"
        if self.other_random:
            return f"Unknown: something that the block reads has changed between forward and backward.{experts}"
        return (
            "Unknown: the inputs, settings, random state and autocast of the recomputation were those of the forward. "
            f"The block reads something else, or saves memory that is not written yet.{experts}"
        )

    def _cause_told_by_state(self, whole: bool, first: Difference, rebuilds: bool) -> str:
        """Return the cause if it is clear without running the block again; else an empty string."""
        if first.operation == "parameter":
            return "Change parameters after the backward only (optimizers do), or copy the model for the change."
        if first.operation == "buffer":
            return (
                "The block updates it in every run: hf_ckpt's `full` puts it back, and `selective` runs no block twice."
            )
        if first.operation == "attribute":
            return "The block changes it in every run, and `full` runs it twice; `selective` runs no block twice."
        if first.operation == "gradient":
            return "Reentrant checkpointing needs an input that requires gradients: set use_reentrant to False."
        if any(key in SETTINGS for key, _ in self.changed):
            return f"Between forward and backward {self._changes()} changed. Do that after the backward."
        if self.replaced and whole:
            return (
                "Between forward and backward the parameters were exchanged for others, as `functional_call` does. "
                "Call backward before it ends, or use hf_ckpt's `full`."
            )
        if self.changes_input:
            return "The block changes its input in place, and is recomputed from the changed input."
        if rebuilds:
            return "An operation was rebuilt from wrong inputs. Please report it; `policy: full` recomputes the block."
        if not self.ran_again:
            return (
                "The block did not run again: what stores or moves its tensors has changed them, by a buffer that is "
                "used again too early, a copy that has not ended, or a smaller type."
            )
        if self.missing:
            return f"The recomputation leaves out {', '.join(f'`{name}`' for name in sorted(self.missing))}."
        if self.given_others:
            return (
                f"The block is recomputed from other inputs than it had: {', '.join(self.given_others[:3])}. They were "
                "changed in place, or what stores them, such as offloading, has changed them."
            )
        if self.other_autocast or "type" in first.what:
            return "The recomputation ran under another autocast: enter autocast around the forward in the same way."
        return ""

    def _changes(self) -> str:
        known = [(SETTINGS[key], name) for key, name in self.changed if key in SETTINGS]
        of = known or [(f"`{key}`", name) for key, name in self.changed]
        names = dict.fromkeys(f"{what} of {f'`{name}`' if name else 'the block'}" for what, name in of)
        return ", ".join(list(names)[:4])


@dataclasses.dataclass(frozen=True)
class _Draws:
    """The result of two further runs of a block from the same random state."""

    differs: bool
    from_host: bool
    """Whether numbers were drawn from Python's `random` or from numpy."""
    from_torch: bool


def _draws(
    module: nn.Module, run: Callable[[], Any], autocast: compat.Autocast, of: compat.RandomState | None
) -> _Draws | None:
    """Run a block twice without gradients; None if it cannot run. Buffers and random state (`of`) are restored."""
    state = compat.RandomState([] if of is None else [device for device, _ in of.devices])
    outputs: list[list[torch.Tensor]] = []
    from_host = from_torch = False
    with contextlib.ExitStack() as around:
        around.enter_context(torch.no_grad())
        around.enter_context(compat.unseen_by_modes())
        around.enter_context(compat.autocast_as(autocast))
        try:
            for _ in range(2):
                with state.kept(), buffers_put_back(module):
                    outputs.append([v.clone() for v in compat.tree_leaves(run()) if torch.is_tensor(v)])
                    from_host, from_torch = state.of_host_may_have_moved(), state.of_torch_has_moved()
        except Exception:  # its inputs were changed, their memory is in use again, or what it reads is gone
            return None
    one, other = outputs
    differs = len(one) != len(other) or any(difference_of(*pair) for pair in zip(one, other, strict=True))
    return _Draws(differs, from_host, from_torch)


@contextlib.contextmanager
def buffers_put_back(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of a module to their current values at the end of this context."""
    copies = [(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_inference()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copied in copies:
                if difference_of(buffer, copied) is not None:
                    buffer.copy_(copied)


SETTINGS = {
    "training": "train or eval mode",
    "_active_adapter": "the active adapter",
    "_disable_adapters": "whether adapters are on,",
    "_forward_hooks": "hooks",
    "_forward_pre_hooks": "hooks",
}
"""Attributes that decide how a module runs -> their names in messages."""

KINDS = {"buffer": "a buffer", "attribute": "an attribute"}
"""What a block may update itself -> its name in messages."""


def _settings(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the mode, adapters, hooks and other plain attributes of every module below."""
    found: dict[str, dict[str, Any]] = {}
    for name, inner in module.named_modules():
        settings: dict[str, Any] = {}
        for key, value in vars(inner).items():
            if isinstance(value, bool | int | float | str | None):
                settings[key] = value
            elif key in SETTINGS:
                settings[key] = list(value) if "hooks" in key else str(value)
        found[name] = settings
    return found


def _attributes(module: nn.Module) -> dict[str, str]:
    """Return the plain values, and the lists, tuples and dicts of them, of every module below, as text."""
    return {
        f"{name}.{key}" if name else key: repr(value)
        for name, inner in module.named_modules()
        for key, value in vars(inner).items()
        if all(isinstance(leaf, bool | int | float | str | None) for leaf in _leaves(value))
    }


def _leaves(value: Any) -> list[Any]:
    if type(value) is dict:
        return [*value, *value.values()]
    return [*value] if type(value) in (list, tuple) else [value]


def _buffers(module: nn.Module) -> list[tuple[str, int, int]]:
    return [(name, id(buffer), version_of(buffer)) for name, buffer in module.named_buffers()]


def _parameters(module: nn.Module) -> list[int]:
    """Return the ids of a block's parameters, to compare them."""
    return [id(value) for inner in module.modules() for value in vars(inner)["_parameters"].values()]


def _versions(inputs: list[Any]) -> list[int]:
    return [version_of(leaf) for leaf in compat.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]


def _tensors(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[tuple[int | str, int], torch.Tensor]:
    """Return (place or name of an argument, number of the tensor in it) -> tensor, for tensors that can be compared."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *keywords.items()]
    return {
        (name, place): leaf
        for name, value in named
        for place, leaf in enumerate(compat.tree_leaves(value))
        if isinstance(leaf, torch.Tensor) and is_plain(leaf)
    }
