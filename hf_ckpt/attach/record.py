"""The record that hf_ckpt keeps on a model, and the two attributes by which transformers switches checkpointing.

Every module of transformers that can be checkpointed carries a flag and a function. A planned block gets hf_ckpt's own
function, and a flag that is on while gradients are recorded.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from hf_ckpt.attach.functions import Functions, Regions
from hf_ckpt.engines.differences import Difference
from hf_ckpt.engines.region import Region
from hf_ckpt.engines.rerun import Report
from hf_ckpt.engines.watch import Check
from hf_ckpt.models.blocks import FoundBlocks, base_model, plain_modules
from hf_ckpt.spec.description import Watched
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec

RECORD = "_hf_ckpt"
"""Name of the attribute of the base model that holds its `Installation`."""
FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
"""Names of the two attributes that transformers' modules look at: whether to checkpoint, and the function to call."""


class _Gate(enum.Enum):
    """The value of a planned block's flag. It is true while gradients are recorded, and false under `no_grad`.

    Under `no_grad` a block must run as if it were not checkpointed, or `generate()` in train mode loses its cache and
    returns other tokens. The layer drops the cache before it calls hf_ckpt's function, so the function cannot decide
    this; the flag has to.
    """

    WHILE_GRADIENTS_ARE_ON = "on while gradients are recorded"

    def __bool__(self) -> bool:
        return torch.is_grad_enabled()


class Absent(enum.Enum):
    """Stands for the value of an attribute that an object does not have itself."""

    ABSENT = "no such attribute"


GATE = _Gate.WHILE_GRADIENTS_ARE_ON
"""The only value of `_Gate`, which is put on every planned block."""
Saved = dict[str, dict[str, Any]]
"""Module name -> attribute name -> its value, or `Absent.ABSENT`."""
GIVEN_PLAN = "(given as a Plan object)"
"""What `Spec.plan` says where the plan was given as an object, and so has no path."""


class Session(Protocol):
    """Measures the batches of one run under `budget` and `auto`, and plans for them."""

    def on_batch(self, record: Installation, stack: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put the plan on for the batch that a forward is given, unless the present one will do.

        `stack` names the stack whose forward is called with `args` and `kwargs`; it is None for the forward of the
        whole model.
        """

    @property
    def is_measuring(self) -> bool:
        """Whether the step that runs is measured."""

    def stop(self, record: Installation) -> None:
        """End the measurement that is under way, if one is."""

    def lower(self, record: Installation) -> str | None:
        """Plan for less memory, after a step has run out of it. Returns what was changed; None where nothing can be."""


class Watch(Protocol):
    """Checks one block at a time while a model trains: see `training.watch`."""

    differences: list[Difference]
    """The first difference of each check that found some."""

    def on_forward(self, base: nn.Module, record: Installation | None, running: nn.Module | None = None) -> None:
        """Check a block of the training forward of `running` that is about to begin, if it is time to."""

    def stop(self) -> None:
        """Take a check off that no forward has come to."""

    def report(self) -> Watched:
        """Return what was checked so far."""


class Decider(Protocol):
    """Decides which plan a model gets. The hooks on the model ask it, and it is pickled with them.

    `training.install` has the one implementation; this room knows only what it is asked.
    """

    def asked(self, found: FoundBlocks, record: Installation, asked: Mapping[str, Any]) -> tuple[Spec, Plan] | None:
        """Return the spec and the plan after an enable call with the arguments `asked`; None keeps both as they are."""

    def session(self, base: nn.Module, record: Installation) -> Session:
        """Begin a session, at the first training batch under `budget` and `auto`."""

    def watch(self, record: Installation) -> Watch:
        """Begin to watch, at the first training batch under a plan with `check_every`."""


class Outermost(threading.local):
    """The outermost module of a model whose training forward this thread runs, of those that carry a `CacheHook`.

    Only what that one is given comes from the caller. Caches that inner modules are given may be the model's own.
    """

    module: weakref.ref[nn.Module] | None = None

    def enter(self, module: nn.Module) -> bool:
        """Note that the forward of `module` begins; return whether it is the outermost."""
        running = None if self.module is None else self.module()
        if running is None or running is module:  # itself, where an interrupt (Ctrl-C) has ended its last forward
            self.module = weakref.ref(module)
            return True
        return False

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook that is always called: note that the forward of `module` has ended."""
        if self.module is not None and self.module() is module:
            self.module = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


@dataclasses.dataclass
class ChunkCalls:
    """What has become of a head, or of feed-forwards, that are planned to run in chunks."""

    calls: int = 0
    """Forward calls that ran in chunks, those in recomputations included."""
    in_graph: bool = False
    """Whether one ran as a whole in a graph of torch.compile."""
    missed: int = 0
    """Training forwards of the stack below the head since the head was called last."""
    report: Report | None = None
    """What the next call tells of the gradient of some tokens, if the watch checks it."""

    def take_report(self) -> Report | None:
        """Return `report`, for one call."""
        report, self.report = self.report, None
        return report

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "report": None}


@dataclasses.dataclass
class Installation:
    """The record that hf_ckpt keeps on a model: what was asked, what is planned, and how to undo it."""

    spec: Spec
    """What was asked for."""
    plan: Plan
    """The plan that is applied, or will be when checkpointing is enabled."""
    enabled: bool = False
    """Whether the plan is on the blocks now."""
    functions: Functions = dataclasses.field(default_factory=lambda: Functions(Spec()))
    """All functions that plans of this spec have put on blocks so far."""
    regions: Regions = dataclasses.field(default_factory=dict)
    """Block name -> its checkpointing function, for every block whose action is not `keep`."""
    blocks: dict[str, nn.Module] = dataclasses.field(default_factory=dict)
    """Block name -> the module that the plan was put on; empty while nothing is enabled."""
    hooked: set[Region] = dataclasses.field(default_factory=set)
    """The functions whose hooks are on the model; a plan that needs no others goes on without further ones."""
    asked_reentrant: bool = False
    """Whether the last enable call asked for `use_reentrant=True`, which changes nothing."""
    before: Saved = dataclasses.field(default_factory=dict)
    """Module name -> the values of `FLAG` and `FUNCTION` before installation."""
    input_gradient_hooks: int = 0
    """How many hooks that make the embeddings' output require gradients were taken off when the plan was enabled."""
    handles: list[Any] = dataclasses.field(default_factory=list)
    """Handles of the hooks that were registered with torch when the plan was enabled."""
    decider: Decider | None = None
    """Asked by enable calls, and by forwards under `budget` and `auto`; None where the plan is fixed."""
    planned: Any = None
    """The decider's own record of the batch it has planned for, once it has seen one. It has the attributes `plan`;
    `plans`, which has every plan by what it was made for, in words; `costs`, what each action costs; and
    `measured_bytes`, the real peak of a step under the plan."""
    optimizer_watch: Any = None
    """Call it to no longer remember optimizers that step, which plans for batches need; None while nobody does."""
    session: Session | None = None
    """What measures and plans for the batches of this run under `budget` and `auto`; None before the first one."""
    watch: Watch | None = None
    """What checks blocks while they train; None before the first batch, and where nothing is checked."""
    unchecked: bool = False
    """Whether blocks are not checked: while a plan is on for a comparison only, and once memory has run out."""
    running: Outermost = dataclasses.field(default_factory=Outermost)
    """The forward whose batch was looked at last."""
    passes: int = 0
    """How many forwards the model has run that were no training."""
    heads: ChunkCalls = dataclasses.field(default_factory=ChunkCalls)
    """What has become of the head, where the plan has it run in chunks."""
    tiles: ChunkCalls = dataclasses.field(default_factory=ChunkCalls)
    """What has become of the feed-forwards, where the plan has them run in chunks."""
    outermost: Outermost = dataclasses.field(default_factory=Outermost)
    """The forward that runs now; a plan may be exchanged in the middle of it."""

    told: tuple[Spec, Plan] | None = None
    """The spec and the plan that were last logged as what the model got."""

    def compiled_by_others(self) -> tuple[str, ...]:
        """Return the blocks that were to be compiled, but lie in a graph that something else compiles."""
        return tuple(name for name, region in self.regions.items() if region.left_to_others)

    def __getstate__(self) -> dict[str, Any]:
        # What was planned for a batch depends on this process and its memory.
        process = dict.fromkeys(("planned", "optimizer_watch", "session", "watch"))
        return {**vars(self), **process, "blocks": {}, "hooked": set()}


def installation(model: nn.Module) -> Installation | None:
    """Return the record on a model, or None where nothing is installed. Raises `NoBlocksError` as `base_model` does."""
    found: Installation | None = vars(base_model(model)).get(RECORD)
    return found


def carriers(base: nn.Module) -> dict[str, nn.Module]:
    """Return every module with a checkpointing flag, by name: blocks, but also stacks and T5's attention modules."""
    return {name: module for name, module in plain_modules(base) if hasattr(module, FLAG)}


def function_of(module: nn.Module) -> Any:
    """Return the checkpointing function of a block, also while it is checked; None without one of its own."""
    found = vars(module).get(FUNCTION)
    return found.function if isinstance(found, Check) else found


def is_on(module: nn.Module) -> bool:
    """Return whether a module's flag is on in a training forward."""
    with torch.enable_grad():  # our own flag is true only then
        return bool(getattr(module, FLAG))


def read_switches(module: nn.Module) -> dict[str, Any]:
    """Return the module's own `FLAG` and `FUNCTION`, with `Absent.ABSENT` for one that only its class has."""
    return {name: vars(module).get(name, Absent.ABSENT) for name in (FLAG, FUNCTION)}


def write_switches(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Set a module's `FLAG` and `FUNCTION` to what `read_switches` returned; delete those that were absent."""
    # That of modules looks for parameters, which these are not, in ten times the time.
    write = object.__setattr__ if type(module).__setattr__ is nn.Module.__setattr__ else setattr
    for name, value in attributes.items():
        if value is Absent.ABSENT:
            vars(module).pop(name, None)
        else:
            write(module, name, value)


def switch_off(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Restore a module's `FLAG` and `FUNCTION` from `before`, and then switch the flag off if that has left it on."""
    write_switches(module, before)
    if getattr(module, FLAG):
        setattr(module, FLAG, False)


_enable_calls = 0


def count_enable_call() -> None:
    """Count one more enable call that hf_ckpt has answered, on any model of this process."""
    global _enable_calls
    _enable_calls += 1


def enable_calls() -> int:
    """Return how many enable calls hf_ckpt has answered in this process, over all models."""
    return _enable_calls
