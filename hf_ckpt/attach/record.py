"""The record that hf_ckpt keeps on a model, the functions that its plans put on blocks, and the two attributes with
which transformers switches checkpointing.

Every module of transformers that can be checkpointed has a flag and a function. hf_ckpt gives a planned block its own
function, and a flag that is on while gradients are recorded.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.check import Check
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.offload import Mover
from hf_ckpt.engines.region import Region, Request, make
from hf_ckpt.engines.trials import Mark, Trial, Trials, Tries, unmarked
from hf_ckpt.models.blocks import base_model, plain_modules
from hf_ckpt.spec.actions import KEEP, Action
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec

RECORD = "_hf_ckpt"
"""Name of the attribute of the base model that holds its `Installation`."""
FLAG, FUNCTION = compat.transformers.SWITCHES
"""Names of the attributes that say whether to checkpoint, and which function to call."""
KEEPS_CACHE = "_can_checkpoint_with_cache"
"""Name of the attribute by which a block says that it may get a cache while it is checkpointed."""


class _Gate(enum.Enum):
    """The value of a planned block's flag. It is true while gradients are recorded, and false under `no_grad`.

    Under `no_grad` a block must run without checkpointing, or `generate()` in train mode loses its cache and returns
    other tokens. The layer drops the cache before it calls hf_ckpt's function, so the flag has to decide this, not the
    function.
    """

    WHILE_GRADIENTS_ARE_ON = "on while gradients are recorded"

    def __bool__(self) -> bool:
        return torch.is_grad_enabled()


class Absent(enum.Enum):
    """Marks an attribute that an object does not have itself."""

    ABSENT = "no such attribute"


GATE = _Gate.WHILE_GRADIENTS_ARE_ON
"""The only value of `_Gate`: the flag of every planned block."""
Saved = dict[str, dict[str, Any]]
"""Module name -> attribute name -> its value, or `Absent.ABSENT`."""
GIVEN_PLAN = "(given as a Plan object)"
"""The value of `Spec.plan` for a plan that was passed as an object, and so has no path."""


def spec_of(plan: Plan, options: Spec) -> Spec:
    """Return the spec of a plan that was passed as an object, with what `options` says about how it runs."""
    keys = ("preserve_rng_state", "determinism_check", "host_budget", "check_every", "on_mismatch")
    return Spec(plan=GIVEN_PLAN, head=plan.head, **{key: getattr(options, key) for key in keys})


Regions = dict[str, Region]
"""Block name -> its checkpointing function."""


class Functions:
    """The checkpointing functions of the plans of one spec. Their counts start at 0.

    Plans that treat a block alike share its function. Under `budget` and `auto` a model has a plan for each bucket of
    batch shapes, and switching plans changes only the functions of blocks that the two plans treat differently.

    Args:
        spec: the user's spec.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.made: dict[tuple[str, Action, tuple[str, ...]], Region] = {}
        """(name of a block, its action, names of the blocks in its segment) -> its function, for all plans so far."""
        self._mover = Mover(spec.host_budget)

    def of(self, plan: Plan) -> Regions:
        """Return the function of every block whose action is not `keep`, and make those that do not exist yet."""
        segments = {name: tuple(names) for _, names in plan.segments() for name in names}
        # Backward begins with the last block of a stack, so moving what that block keeps would gain nothing.
        last = {pairs[-1][0].name for pairs in plan.stacks().values()}
        regions: Regions = {}
        for name, action in plan.active().items():
            mover = None if name in last else self._mover
            regions[name] = self.function(name, action, segments.get(name, ()), mover)
        return regions

    def function(self, block: str, action: Action, segment: tuple[str, ...] = (), mover: Mover | None = None) -> Any:
        """Return the function of one block under an action, and make it if it does not exist yet.

        `segment` names the blocks of its segment. `mover` moves tensors to host memory if the action does.
        """
        key = block, action, segment
        if key not in self.made:
            self.made[key] = make(
                Request(
                    block,
                    action,
                    preserve_rng_state=self.spec.preserve_rng_state,
                    determinism_check=self.spec.determinism_check,
                    segment=segment,
                    mover=mover,
                )
            )
        return self.made[key]

    def trials(self, block: str, tries: Tries, mark: Mark = unmarked) -> Trials:
        """Return the trials of one block, see `engines.trials`, and make the functions that do not exist yet."""

        def trial(action: Action) -> Trial:
            return Trial(action, None if action == KEEP else self.function(block, action))

        last = None if tries.last is None else trial(tries.last)
        return Trials(block, mark, tuple(map(trial, tries.shown)), last)

    def counts(self, what: str, regions: Regions) -> dict[str, int]:
        """Return a count (`forwards` or `recomputed`) of every block over all functions that it has had.

        Blocks without a function in `regions` are left out if their count is 0.
        """
        found = dict.fromkeys(regions, 0)
        for (name, *_), region in self.made.items():
            if getattr(region, what):
                found[name] = found.get(name, 0) + getattr(region, what)
        return found


class Outermost(threading.local):
    """The outermost module with a `PassHook` whose training forward this thread runs.

    Only its arguments come from the caller: caches that inner modules get may be the model's own.
    """

    module: weakref.ref[nn.Module] | None = None

    def enter(self, module: nn.Module) -> bool:
        """Record that the forward of `module` begins. Returns whether it is the outermost."""
        running = None if self.module is None else self.module()
        if running is None:
            self.module = weakref.ref(module)
        return running is None or running is module  # itself, if an interrupt (Ctrl-C) ended its last forward

    def leave(self, module: nn.Module) -> bool:
        """Record that the forward of `module` has ended. Returns whether it was the outermost."""
        was_outermost = self.module is not None and self.module() is module
        if was_outermost:
            self.module = None
        return was_outermost

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


IN_GRAPH = "as a whole, in a graph of torch.compile"
"""How a head ran there; see `ChunkCalls.last`."""


@dataclasses.dataclass
class ChunkCalls:
    """How a head ran that is planned to run in chunks."""

    calls: int = 0
    """Calls that ran in chunks."""
    last: str = ""
    """How the last call ran, in words; empty before the first."""
    missed: int = 0
    """Training forwards of the stack below the head since the last call of the head."""

    def read_whole(self, function: str) -> None:
        """Note that a function has read all logits of the last call."""
        self.last += f", computed as a whole for `{function}`"


@dataclasses.dataclass
class Installation:
    """The record that hf_ckpt keeps on a model: the spec, the plan, and how to undo it."""

    spec: Spec
    """The user's spec."""
    plan: Plan
    """The plan that is applied, or will be when checkpointing is enabled."""
    enabled: bool = False
    """Whether the plan is on the blocks now."""
    functions: Functions = dataclasses.field(default_factory=lambda: Functions(Spec()))
    """All functions that plans of this spec have put on blocks so far."""
    regions: Regions = dataclasses.field(default_factory=dict)
    """Block name -> its checkpointing function, for every block whose action is not `keep`."""
    hooked: int = 0
    """How many of `functions` existed when the hooks that engines need were last registered."""
    blocks: dict[str, nn.Module] = dataclasses.field(default_factory=dict)
    """Block name -> the module that the plan is on; empty while nothing is enabled."""
    before: Saved = dataclasses.field(default_factory=dict)
    """Module name -> the values of `FLAG` and `FUNCTION` before installation."""
    input_gradient_hooks: int = 0
    """How many hooks that make the embeddings' output require gradients were removed when the plan was enabled."""
    handles: list[Any] = dataclasses.field(default_factory=list)
    """Handles of the hooks that were registered with torch when the plan was enabled; before that, of `Reminder`s."""
    decider: Any = None
    """The `training.install.Decider`, which enable calls and training forwards ask; None if the plan is fixed."""
    planned: Any = None
    """The decider's own record of the batch that it last planned for; None before the first. Its attributes are `plan`,
    `measures` and `measuring`, see `training.session.Planned`; `plans`, every plan by a description of its batch; and
    `measured_bytes`, the real peak of a step under the plan."""
    session: Any = None
    """The decider's `training.session.Session`, which measures and plans for the batches of this run under `budget` and
    `auto`; None before the first batch."""
    watch: Any = None
    """The decider's `training.watch.Watch`, which checks blocks while they train; None before the first batch, and if
    nothing is checked."""
    unchecked: bool = False
    """Whether blocks are not checked: while a plan is enabled only for a comparison, and once memory has run out."""
    outermost: Outermost = dataclasses.field(default_factory=Outermost)
    """The running training forward. The plan may change in the middle of it."""
    passes: int = 0
    """How many forwards the model has run outside training."""
    heads: ChunkCalls = dataclasses.field(default_factory=ChunkCalls)
    """How the head ran, if it is planned to run in chunks."""
    told: tuple[Spec, Plan] | None = None
    """The spec and the plan that were last logged."""

    @property
    def measuring(self) -> str | None:
        """Why `plan` is not the plan of the run yet under `budget` and `auto`; None if it is."""
        if not self.spec.is_planned:
            return None
        if self.planned is None:
            return f"`{self.spec.policy}` measures the first training steps, and then plans"
        why: str | None = self.planned.measuring
        return why

    @property
    def waits(self) -> bool:
        """Whether the plan would do something, but was never enabled, and nobody was told so far."""
        return bool(self.handles) and not self.enabled and (self.plan.head != "full" or bool(self.plan.active()))

    def remove_hooks(self) -> None:
        """Remove all hooks that were registered with torch."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def begin_trials(self, tries: Mapping[str, Tries], mark: Mark) -> None:
        """From the next forward on, the recomputations of blocks under `full` try actions: block -> which."""
        for name, region in self.regions.items():
            if isinstance(region, FullRegion) and tries.get(name, Tries()) != Tries():
                region.trials = self.functions.trials(name, tries[name], mark)

    def end_trials(self) -> None:
        """End what `begin_trials` began."""
        for region in self.regions.values():
            if isinstance(region, FullRegion):
                region.trials = None

    def end_watch(self) -> None:
        """Stop all checks: a step has run out of memory, so there is no room for them."""
        if self.watch is not None:
            self.watch.stop()
        self.unchecked = True

    def compiled_by_others(self) -> tuple[str, ...]:
        """Return the blocks that hf_ckpt should compile, but that are in a graph that something else compiles."""
        return tuple(name for name, region in self.regions.items() if region.left_to_others)

    def __getstate__(self) -> dict[str, Any]:
        # What was planned for a batch depends on this process and its memory.
        process = dict.fromkeys(("planned", "session", "watch"))
        return {**vars(self), **process}


def installation(model: nn.Module) -> Installation | None:
    """Return the record on a model, or None if nothing is installed. Raises `NoBlocksError` as `base_model` does."""
    found: Installation | None = vars(base_model(model)).get(RECORD)
    return found


def carriers(base: nn.Module) -> dict[str, nn.Module]:
    """Return every module with a checkpointing flag, by name: blocks, and also stacks and T5's attention modules."""
    return {name: module for name, module in plain_modules(base) if hasattr(module, FLAG)}


def function_of(module: nn.Module) -> Any:
    """Return a block's own checkpointing function, even while a check replaces it; None if it has none."""
    found = vars(module).get(FUNCTION)
    return found.function if isinstance(found, Check) else found


def is_on(module: nn.Module) -> bool:
    """Return whether a module's flag is on in a training forward."""
    with torch.enable_grad():  # hf_ckpt's flag is true only then
        return bool(getattr(module, FLAG))


def read_switches(module: nn.Module) -> dict[str, Any]:
    """Return the module's own `FLAG`, `FUNCTION` and `KEEPS_CACHE`, with `Absent.ABSENT` for one of its class only."""
    return {name: vars(module).get(name, Absent.ABSENT) for name in (FLAG, FUNCTION, KEEPS_CACHE)}


def write_switches(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Set a module's attributes to what `read_switches` returned; delete those that were absent."""
    # A module's own `__setattr__` checks for parameters, and takes ten times as long.
    write = object.__setattr__ if type(module).__setattr__ is nn.Module.__setattr__ else setattr
    for name, value in attributes.items():
        if value is Absent.ABSENT:
            vars(module).pop(name, None)
        else:
            write(module, name, value)


def switch_off(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Restore a module's attributes from `before`, and then switch the flag off if it is still on."""
    write_switches(module, before)
    if getattr(module, FLAG):
        setattr(module, FLAG, False)
