"""The record that hf_ckpt keeps on a model, and what it knows of `training`: how plans are chosen and checked."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.puts import Row, Weak, undo
from hf_ckpt.attach.switches import Switched
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.host_memory import Mover
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.engines.region import Region, Request, make
from hf_ckpt.engines.segments import Watching
from hf_ckpt.engines.trials import Attempts, Mark, Trial, Trials, unmarked
from hf_ckpt.models.blocks import FoundBlocks, base_model
from hf_ckpt.spec.actions import KEEP, Action
from hf_ckpt.spec.description import Description, Watched
from hf_ckpt.spec.plan import Plan, staying
from hf_ckpt.spec.spec import Spec

RECORD = "_hf_ckpt"
"""Name of the attribute of the base model that holds its `Installation`."""


class RunMeasurer(Protocol):
    """Measures and plans for the batches of a run under `budget` and `auto`: `training.session.Session`."""

    @property
    def measuring(self) -> str | None:
        """Why the current plan is not the plan of the run yet, in words; None if it is, and after giving up."""

    @property
    def measured_bytes(self) -> int | None:
        """The measured peak of the current plan's first step; None if it was not measured."""

    def described(self, description: Description) -> Description:
        """Return a description with the plans of the run, and the measured peak of the current one."""

    def after_forward(self, output: Any) -> None:
        """A training forward has ended with an output, or has raised an error, without one."""

    def before_others(self) -> None:
        """A forward outside of training begins: its peak is that of no step."""

    def lower_limit(self) -> str | None:
        """Memory has run out: try or plan for less. Returns what is done, in words; None if nothing needs less."""

    def stop(self, record: Installation) -> None:
        """Stop measuring."""

    def close(self) -> None:
        """End what a pause does not end."""


class BlockChecker(Protocol):
    """Checks blocks while they train: `training.watch.Watch`."""

    def stop(self) -> None:
        """Remove a check whose forward has not begun."""

    def report(self) -> Watched:
        """Return the results so far."""


class PlanChooser(Protocol):
    """Chooses the plans of a model: `training.install.Decider`."""

    def asked(self, blocks: FoundBlocks, record: Installation, options: Mapping[str, Any]) -> tuple[Spec, Plan] | None:
        """Return the spec and plan after an enable call with these options; None if they do not change."""

    def changed(self, base: nn.Module, record: Installation) -> None:
        """Plan for the layers that a model has now. Some were added, removed or replaced while its plan is enabled."""

    def before_forward(
        self, base: nn.Module, record: Installation, running: nn.Module, stack: str | None, args: Any, kwargs: Any
    ) -> None:
        """Let the session plan for a training forward of `running` that is about to begin, and the watch check it."""


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
        self.made: dict[tuple[str, Action], Region] = {}
        """(name of a block, its action) -> its function, for all plans so far."""
        self.hooked = 0
        """How many of `made` existed when the hooks that their engines need were last registered."""

    @functools.cached_property
    def _mover(self) -> Mover:
        # One for all plans of the model, because it counts the host memory in use against `host_budget`.
        return Mover(self.spec.host_budget)

    def of(self, plan: Plan) -> Regions:
        """Return the function of every block whose action is not `keep`, and make those that do not exist yet."""
        blocks = [block for block, _ in plan.actions]
        stays = staying(blocks)
        # Of a segment, only the first block has something to move.
        moving = [block for block, action in plan.actions if not action.made]
        self._mover.before = {block.name: before.name for before, block in itertools.pairwise(moving)}
        regions: Regions = {}
        for name, action in plan.active().items():
            mover = None if name in stays else self._mover
            regions[name] = self.function(name, action, mover)
        for pairs in plan.stacks().values():
            following = [action.made for _, action in pairs[1:]]
            for (block, action), passes_on in zip(pairs, [*following, False], strict=True):
                region = regions.get(block.name)
                if isinstance(region, FullRegion):
                    region.recomputes_input = action.made
                    region.passes_on = passes_on
        return regions

    def function(self, block: str, action: Action, mover: Mover | None = None) -> Region:
        """Return the function of one block under an action, and make it if it does not exist yet.

        `mover` moves tensors to host memory if the action does.
        """
        key = block, action
        if key not in self.made:
            spec = self.spec
            self.made[key] = make(Request(block, action, spec.preserve_rng_state, spec.determinism_check, mover))
        return self.made[key]

    def trials(self, block: str, attempts: Attempts, mark: Mark = unmarked) -> Trials:
        """Return the trials of one block, see `engines.trials`, and make the functions that do not exist yet."""

        def trial(action: Action) -> Trial:
            if action == KEEP:
                return Trial(action, None)
            region = self.function(block, action)
            assert isinstance(region, RebuildRegion), f"a recomputation cannot run under {action}"
            return Trial(action, region)

        last = None if attempts.last is None else trial(attempts.last)
        return Trials(block, mark, tuple(map(trial, attempts.shown)), last)

    def make_for_trials(self, block: str, attempts: Attempts) -> None:
        """Make the functions that trials of a block call, so that the next `exchange` or `put_on` adds their hooks."""
        self.trials(block, attempts)

    def counts(self, what: str, regions: Regions) -> dict[str, int]:
        """Return a count (`forwards` or `recomputed`) of every block over all functions that it has had.

        Blocks without a function in `regions` are left out if their count is 0.
        """
        counts = Counter(dict.fromkeys(regions, 0))
        for (name, _), region in self.made.items():
            counts[name] += getattr(region, what)
        return {name: count for name, count in counts.items() if count or name in regions}


@dataclasses.dataclass
class ChunkCalls:
    """How a head ran that is planned to run in chunks."""

    calls: int = 0
    """Calls that ran in chunks."""
    last: str = ""
    """How the last call ran, in words; empty before the first."""
    is_in_graph: bool = False
    """Whether it ran in a graph of torch.compile."""
    is_whole_by_choice: bool = False
    """Whether `auto` ran it as a whole, because chunks would save nothing."""
    missed: int = 0
    """Training forwards of the stack below the head since the last call of the head."""

    def note(self, how: str, *, is_in_graph: bool = False, is_whole_by_choice: bool = False) -> None:
        """Note how a call runs, in words."""
        self.last = how
        self.is_in_graph = is_in_graph
        self.is_whole_by_choice = is_whole_by_choice

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
    is_of_process: bool = False
    """Whether `install()` without a model has put it there, also on the model that this is a copy of."""
    tightened: Spec | None = None
    """The user's spec, if the guard has enabled a plan that needs less. An enable call with its options keeps that."""
    logged: tuple[Spec, str] | None = None
    """The spec and the plan that were last logged, the plan in words."""

    # How to restore the model.
    installed: list[Row] = dataclasses.field(default_factory=list)
    """What is on the model until the record is removed, in order."""
    puts: list[Row] = dataclasses.field(default_factory=list)
    """What is on the model while the plan is enabled, in order; before that, the hooks that remind of it. Another list
    for each time that the plan was put on."""
    switched: dict[str, Switched] = dataclasses.field(default_factory=dict)
    """Name of a module with a checkpointing flag -> its row in `puts`."""
    modules: Weak = dataclasses.field(default_factory=Weak)
    """The modules that the model had when the plan was put on. What others hold came with them: see `enable`."""

    # On the blocks. A copy of the model gets copies of these functions, so that its counts are its own.
    functions: Functions = dataclasses.field(default_factory=lambda: Functions(Spec()))
    """All functions that plans of this spec have put on blocks so far."""
    regions: Regions = dataclasses.field(default_factory=dict)
    """Block name -> its checkpointing function, for every block whose action is not `keep`."""
    blocks: dict[str, nn.Module] = dataclasses.field(default_factory=dict)
    """Block name -> the module that the plan is on; empty while nothing is enabled."""
    children: list[dict[str, nn.Module | None]] = dataclasses.field(default_factory=list)
    """The children of each module around blocks: the dicts of the modules themselves."""
    children_before: list[dict[str, nn.Module | None]] = dataclasses.field(default_factory=list)
    """Copies of these from when the plan was put on. They differ once a layer was added, removed or replaced."""
    made_for: list[weakref.ref[nn.Module]] | None = None
    """The blocks that `functions` were made for, in order; None if not known."""

    # Of the run. A copy of the model begins a run of its own: see `__getstate__`.
    decider: PlanChooser | None = None
    """Whom enable calls and training forwards ask for plans; None if the plan is fixed."""
    session: RunMeasurer | None = None
    """The session of this run; None before the first batch."""
    watch: BlockChecker | None = None
    """The watch of this run; None before the first batch, and if nothing is checked."""
    avoided: dict[str, Action] = dataclasses.field(default_factory=dict)
    """Block that the watch has found wrong -> the action that it has in all plans since, with `on_mismatch: avoid`."""
    unchecked: bool = False
    """Whether blocks are not checked: while a plan is enabled only for a comparison, and once memory has run out."""

    # Of the forwards so far.
    outermost: weakref.ref[nn.Module] | None = None
    """The outermost module with a `PassHook` whose training forward runs. Only its arguments come from the caller:
    caches that inner modules get may be the model's own. The plan may change in the middle of the forward."""
    thread: int = 0
    """The thread that has called it."""
    other_forwards: int = 0
    """How many forwards the model has run outside training."""
    heads: ChunkCalls = dataclasses.field(default_factory=ChunkCalls)
    """How the head ran, if it is planned to run in chunks."""

    @property
    def measuring(self) -> str | None:
        """Why `plan` is not the plan of the run yet under `budget` and `auto`; None if it is."""
        if not self.spec.is_planned:
            return None
        if self.session is None:
            return f"`{self.spec.policy}` measures the first training steps, and then plans"
        return self.session.measuring

    def avoiding(self, plan: Plan) -> Plan:
        """Return a plan in which the blocks in `avoided` have their actions."""
        if not self.avoided:
            return plan
        actions = tuple((block, self.avoided.get(block.name, action)) for block, action in plan.actions)
        return dataclasses.replace(plan, actions=actions)

    @property
    def waits(self) -> bool:
        """Whether the plan would do something, but was never enabled, and nobody was told so far."""
        return bool(self.puts) and not self.enabled and (self.plan.head != "whole" or bool(self.plan.active()))

    def enter(self, module: nn.Module) -> bool:
        """Record that the training forward of `module` begins. Returns whether it is the outermost."""
        running = None if self.outermost is None else self.outermost()
        # torch calls no hook after a KeyboardInterrupt, so that its call may have ended without `leave`.
        if running in (None, module) or not compat.frames.is_calling(self.thread, running):
            self.outermost = weakref.ref(module)
            self.thread = threading.get_ident()
            return True
        return False

    def leave(self, module: nn.Module) -> bool:
        """Record that the training forward of `module` has ended. Returns whether it was the outermost."""
        was_outermost = self.outermost is not None and self.outermost() is module
        if was_outermost:
            self.outermost = None
        return was_outermost

    def undo_puts(self) -> None:
        """Remove from the model what is on it while the plan is enabled. The plan is off then."""
        taken = [row.module for row in self.switched.values() if row.is_taken]
        parts = {part for module in taken if module is not None for part in module.modules()}
        undo(row for row in self.puts if row.module not in parts)  # whoever takes a block undoes what is on it
        self.puts = []
        self.switched = {}
        self.enabled = False
        self.blocks = {}
        self.children = []
        self.children_before = []

    def adopt(self, spec: Spec, plan: Plan) -> None:
        """Make `plan` the one that is enabled next, with new functions that count from 0.

        If a plan is enabled, this one must be put on before the next forward.
        """
        self.end_session()
        self.spec = spec
        self.plan = self.avoiding(plan)
        self.tightened = None
        self.begin_anew()

    def end_session(self) -> None:
        """End the measurements and checks of this run."""
        if self.session is not None:
            self.session.stop(self)
            self.session.close()
        self.session = None
        self.watch = None

    def begin_anew(self) -> None:
        """Forget what was measured, found and counted under another spec, or on other blocks."""
        self.end_session()
        self.heads = ChunkCalls()
        self.functions = Functions(self.spec)
        self.regions = self.functions.of(self.plan)

    def set_trials(
        self, attempts: Mapping[str, Attempts], mark: Mark = unmarked, watching: Watching | None = None
    ) -> None:
        """From the next forward on, let the recomputations of these blocks try actions, and those of others none.

        `watching` is told of segments.
        """
        for name, region in self.regions.items():
            if isinstance(region, FullRegion):
                region.watching = watching
                wanted = attempts.get(name)
                region.trials = None if wanted is None else self.functions.trials(name, wanted, mark)

    def end_watch(self) -> None:
        """Stop all checks: a step has run out of memory, so there is no room for them."""
        if self.watch is not None:
            self.watch.stop()
        self.unchecked = True

    def compiled_by_others(self) -> tuple[str, ...]:
        """Return the blocks that hf_ckpt should compile, but that are in a graph that something else compiles."""
        return tuple(name for name, region in self.regions.items() if region.left_to_others)

    def __getstate__(self) -> dict[str, object]:
        # What was planned for a batch depends on this process and its memory.
        return {**vars(self), "session": None, "watch": None, "outermost": None, "made_for": None}


def record_on(base: nn.Module) -> Installation | None:
    """Return the record on a base model, or None if nothing is installed."""
    record: Installation | None = vars(base).get(RECORD)
    return record


def installation(model: nn.Module) -> Installation | None:
    """As `record_on`, for a model in its wrappers. Raises `NoBlocksError` as `base_model` does."""
    return record_on(base_model(model))
