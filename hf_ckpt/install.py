"""The only module that changes a model.

`install` puts a small record and callable hooks on the base PreTrainedModel; the hooks apply the plan on every enable
call and take it off on every disable call. Everything put on a model pickles, deep-copies with it, and comes off again.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.autoplan import Planned, Situation, Sizes, plan_for, tightened
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.head import Logits, chunked, has_dropout
from hf_ckpt.engines.offload import EndOfStack, Mover, OffloadRegion, lane_of
from hf_ckpt.engines.rebuild import RebuildRegion, enter_module, hand_to_first_block, leave_module
from hf_ckpt.engines.sac import SacRegion
from hf_ckpt.engines.segments import Segment, SegmentRegion, StartOfStack, end_of_stack
from hf_ckpt.errors import HfCkptError, OwnerConflictError, SpecError
from hf_ckpt.families import (
    GENERIC,
    FoundBlocks,
    base_model,
    blocks_of_known_code,
    cheap_modules,
    embedding_norms,
    find_blocks,
    frozen_prefix,
    plain_modules,
    refuse_other_owner,
    vocabulary_head,
)
from hf_ckpt.plan import Action, Description, Plan
from hf_ckpt.planner import PLANNING_POLICIES, fit_plan, make_plan, tighter_plan
from hf_ckpt.spec import Spec, SpecLike
from hf_ckpt.units import format_bytes, parse_bytes

log = logging.getLogger(__name__)

RECORD = "_hf_ckpt"  # where the record lies in vars(base model)
GIVEN_PLAN = "(given as a Plan object)"  # what the spec says for a plan that has no file
_FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
_INPUT_GRADIENT_NAMES = ("enable_input_require_grads", "disable_input_require_grads")


class _Gate(enum.Enum):
    """The flag of a planned block: true while gradients are recorded.

    Under `no_grad` a block must run as if it were not checkpointed, or `generate()` in train mode loses its cache and
    returns other tokens. The layer drops the cache before it calls our function, so the flag itself has to know.
    """

    WHILE_GRADIENTS_ARE_ON = "on while gradients are recorded"

    def __bool__(self) -> bool:
        return torch.is_grad_enabled()


class _Absent(enum.Enum):
    ABSENT = "no such attribute"


GATE = _Gate.WHILE_GRADIENTS_ARE_ON
_Saved = dict[str, dict[str, Any]]
Region = FullRegion | RebuildRegion


@dataclasses.dataclass
class HeadCalls:
    """How often a head ran in chunks."""

    calls: int = 0
    in_graph: bool = False
    """Whether it ran as a whole in a graph of torch.compile."""
    missed: int = 0
    """Training forwards of the stack below it since it was called last."""


@dataclasses.dataclass
class Installation:
    """What hf_ckpt keeps on a model."""

    spec: Spec
    plan: Plan
    enabled: bool = False
    regions: dict[str, Region] = dataclasses.field(default_factory=dict)
    """Block name -> its function, for planned blocks."""
    before: _Saved = dataclasses.field(default_factory=dict)
    """Module name -> the two attributes as they were before installation."""
    input_gradient_hooks: int = 0
    """How many embedding hooks were there when the plan was enabled."""
    handles: list[Any] = dataclasses.field(default_factory=list)
    planned: Planned | None = None
    """What `budget` or `auto` planned for, once the first batch was seen."""
    heads: HeadCalls = dataclasses.field(default_factory=lambda: HeadCalls())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "planned": None}  # of this process and its memory


def install(
    model: nn.Module | None = None,
    spec: SpecLike | Plan = None,
    *,
    enable_when_prepared: bool = False,
    around_training_step: Callable[..., Any] | None = None,
) -> Description | None:
    """Let hf_ckpt answer `gradient_checkpointing_enable` (and its new name) of a model, or of every model.

        hf_ckpt.install(model)                                     # a bare enable call then means `full`
        hf_ckpt.install(model, {"policy": "full", "layers": "0-15"})
        hf_ckpt.install(spec="full")                               # every PreTrainedModel of the process

    Args:
        model: a PreTrainedModel, plain or wrapped by PEFT, DDP or torch.compile. None hooks every PreTrainedModel of
            the process from now on, until `uninstall()`.
        spec: what an enable call without a policy of its own applies; any form `Spec.parse` takes, or a saved `Plan`.
            Without it `full` (or the plan already installed).
        enable_when_prepared: only without a model: also enable on every model that `Accelerator.prepare` gets, for
            scripts that never ask for checkpointing.
        around_training_step: only without a model: what every Trainer runs in place of its `training_step`, called with
            the trainer, that method, and the arguments.

    Nothing is enabled yet, unless the model already had checkpointing on; then the plan takes over at once.

    Raises:
        SpecError: the spec is refused; whatever was installed before stays as it was.
        NoBlocksError, PlanMismatchError, OwnerConflictError: as their names say.
    """
    if model is None:
        _install_everywhere(spec, enable_when_prepared, around_training_step)
        return None
    _install_one(model, spec)
    return describe(model)


def uninstall(model: nn.Module | None = None) -> None:
    """Take everything off a model (attributes, hooks, flags: exactly as before), or undo `install()` of the process.

    A model on which nothing is installed is left alone.
    """
    if model is None:
        _uninstall_everywhere()
        return
    base = base_model(model)
    record = installation(base)
    if record is None:
        return
    _take_off(base, record)
    modules = dict(plain_modules(base))
    for name, attributes in record.before.items():
        if name in modules:
            _write(modules[name], attributes)
    for name in (*compat.ENABLE_NAMES, *compat.DISABLE_NAMES, RECORD):
        vars(base).pop(name, None)


def installation(model: nn.Module) -> Installation | None:
    """The record on a model, or None."""
    found: Installation | None = vars(base_model(model)).get(RECORD)
    return found


def describe(model: nn.Module) -> Description:
    """The installed plan and what has become of it; print it or `.save(path)` it.

    Raises `HfCkptError` when nothing is installed.
    """
    record = installation(model)
    if record is None:
        raise HfCkptError("nothing is installed on this model; call hf_ckpt.install(model) first.")
    planned = record.plan.active()
    rebuilding = [region for region in record.regions.values() if isinstance(region, RebuildRegion)]
    return Description(
        plan=record.plan,
        spec=record.spec.to_dict(),
        enabled=record.enabled,
        frozen=tuple(name for name in frozen_prefix(model, find_blocks(model)) if name in planned),
        forwards={name: region.forwards for name, region in record.regions.items()},
        recomputed={name: region.recomputed for name, region in record.regions.items()},
        dropped=_total(region.dropped for region in rebuilding),
        kept=_total(region.kept for region in rebuilding),
        kept_to_rebuild=_total(region.kept_to_rebuild for region in rebuilding),
        chunked_heads=record.heads.calls,
        in_graphs=tuple(name for name, region in record.regions.items() if region.in_graph),
        head_in_graph=record.heads.in_graph,
        moved=_total([{name: size} for name, region in record.regions.items() if (size := _moved_bytes(region))]),
    )


def _moved_bytes(region: Region) -> int:
    return region.moved_bytes if isinstance(region, (OffloadRegion, RebuildRegion)) else 0


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Bytes by name over all blocks, the largest first."""
    total: collections.Counter[str] = collections.Counter()
    for count in counts:
        total.update(count)
    return dict(total.most_common())


def lost_blocks(model: nn.Module) -> tuple[str, ...]:
    """Planned blocks of an enabled plan that no longer carry its function, because someone else set their flags.

    Raises `OwnerConflictError` when torch's checkpoint wrapper was put around a block since.
    """
    record = installation(model)
    if record is None or not record.enabled:
        return ()
    modules = find_blocks(model).modules
    return tuple(
        name
        for name, region in record.regions.items()
        if name not in modules or vars(modules[name]).get(_FUNCTION) is not region or not _is_on(modules[name])
    )


@contextlib.contextmanager
def paused(model: nn.Module) -> Iterator[None]:
    """Turn the plan off for a while (generation, scoring), and on again as it was."""
    base = base_model(model)
    record = installation(base)
    if record is None or not record.enabled:
        yield
        return
    _take_off(base, record)
    try:
        yield
    finally:
        if installation(base) is record:
            _put_on(base, record)


@contextlib.contextmanager
def trial(model: nn.Module, spec: SpecLike | Plan = None) -> Iterator[None]:
    """Enable a plan for a while; afterwards model, installation and counts are as they were.

    Without a spec the installed plan is enabled, or else `full`. Raises what `install` raises, before anything changes.
    """
    base = base_model(model)
    record = installation(base)
    before = dataclasses.replace(record) if record is not None else None
    _install_one(model, spec)
    trying = installation(base)
    assert trying is not None
    trying.planned = None
    _adopt(base, trying, trying.spec, trying.plan)  # counts of its own
    try:
        _put_on(base, trying)
        yield
    finally:
        if before is None:
            uninstall(base)
        else:
            _take_off(base, trying)
            trying.spec, trying.plan, trying.regions = before.spec, before.plan, before.regions
            trying.planned = before.planned
            if before.enabled:
                _put_on(base, trying)


@contextlib.contextmanager
def own_trial(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Transformers' own checkpointing for a while, of the blocks that `plan` gives an action; nothing may be installed.

    For comparisons: what that costs differs from `full` where transformers' switch does more than run blocks again.
    """
    modules = find_blocks(model).modules
    with compat.own_checkpointing(base_model(model), only={modules[name] for name in plan.active()}):
        yield


# --- one model ------------------------------------------------------------------------------------------------------


def _install_one(model: nn.Module, given: SpecLike | Plan) -> None:
    found = find_blocks(model)
    record = installation(found.base)
    if given is None and record is not None:
        return
    if _driven_by_the_whole(found):
        raise OwnerConflictError(
            f"{found.model} is part (or a copy of a part) of a larger model whose plan is enabled on the same blocks; "
            "install on that one, or uninstall it first; call gradient_checkpointing_disable() on a copy."
        )
    spec, plan = _plan(found, given)
    # One owner: an inner model that was enabled by itself gives way.
    inner = [module for module in found.base.modules() if module is not found.base and RECORD in vars(module)]
    inner_was_on = any(vars(module)[RECORD].enabled for module in inner)
    for module in inner:
        uninstall(module)
    if found.family == GENERIC and record is None:
        log.warning(
            "%s is of no known family; %d checkpointable blocks found, used as family `generic`.",
            found.model,
            len(found.blocks),
        )
    if record is None:
        record = Installation(spec, plan)
        record.before = {name: _read(module) for name, module in _carriers(found.base).items()}
        vars(found.base)[RECORD] = record
        for name in compat.ENABLE_NAMES:
            vars(found.base)[name] = EnableHook(found.base)
        for name in compat.DISABLE_NAMES:
            vars(found.base)[name] = DisableHook(found.base)
        was_on = any(_is_on(module) for module in _carriers(found.base).values())
    else:
        was_on = record.enabled
    _adopt(found.base, record, spec, plan)
    if was_on or inner_was_on:
        _put_on(found.base, record)


def _driven_by_the_whole(found: FoundBlocks) -> bool:
    """Whether the blocks carry functions of hf_ckpt that are not this model's own: of a model it is a part of."""
    records: list[Installation] = [vars(module)[RECORD] for module in found.base.modules() if RECORD in vars(module)]
    owned = {id(region) for record in records for region in record.regions.values()}
    functions = [vars(module).get(_FUNCTION) for module in found.modules.values()]
    return any(isinstance(function, Region) and id(function) not in owned for function in functions)


def _plan(found: FoundBlocks, given: SpecLike | Plan) -> tuple[Spec, Plan]:
    if isinstance(given, Plan):
        return Spec(plan=GIVEN_PLAN), fit_plan(given, found.blocks, found.family, found.model)
    spec = Spec.parse(given)
    return spec, make_plan(spec, found.blocks, found.family, found.model)


def _adopt(base: nn.Module, record: Installation, spec: Spec, plan: Plan) -> None:
    """Make `plan` the one to apply; what is on the blocks comes off."""
    if record.enabled:
        _take_off(base, record)
    if record.planned is not None and plan != record.planned.plan:
        record.planned = None
    record.spec, record.plan, record.heads.in_graph = spec, plan, False
    segments: dict[str, Segment] = {}
    for _, names in plan.segments():
        segments.update(dict.fromkeys(names, Segment(tuple(names))))
    mover = Mover(None if spec.host_budget is None else parse_bytes(spec.host_budget))
    # The backward begins with the last block of a stack: nothing would be gained by moving what it needs.
    last = {pairs[-1][0].name for pairs in plan.stacks().values()}
    known = blocks_of_known_code(find_blocks(base))
    record.regions = {
        name: _region(name, action, spec, segments.get(name), None if name in last else mover, name in known)
        for name, action in plan.active().items()
    }


def _region(
    block: str, action: Action, spec: Spec, segment: Segment | None, mover: Mover | None, known: bool
) -> Region:
    """The function that carries out a block's action.

    Args:
        mover: None where nothing is to be moved.
        known: whether it is known what the block's own code does.
    """
    # `auto` preserves always: on the CPU keeping the state is lost in the noise of a recomputation, while looking for
    # an active dropout takes 12 (plain) to 160 us (LoRA) a block.
    options: dict[str, Any] = {
        "preserve_rng_state": spec.preserve_rng_state is not False,
        "determinism_check": spec.determinism_check,
    }
    if action.kind == "offload" and mover is not None:
        return OffloadRegion(block, mover, known=known, **options)
    if action.kind in ("full", "offload"):
        return SegmentRegion(block, segment, **options) if segment else FullRegion(block, **options)
    sac = SacRegion(block, save=action.save, **options)
    if spec.engine == "sac":
        return sac
    moving = mover if action.moved else None
    compiled = sac if spec.engine == "auto" else None
    fallback = None if known else FullRegion(block, **options)
    return RebuildRegion(block, save=action.save, compiled=compiled, mover=moving, fallback=fallback)


def _enable(base: compat.PreTrainedModel, asked: Mapping[str, Any]) -> None:
    """An enable call: adopt what it asks for, if it asks for anything, and put the plan on."""
    record = installation(base)
    assert record is not None, "the hook outlived its record"
    if compat.accelerate_owns_checkpointing():
        raise OwnerConflictError(
            "accelerate's FSDP plugin is set to checkpoint activations too (`fsdp_activation_checkpointing: true`), "
            "and it recomputes without preserving random state. Set it to false: checkpointing needs one owner."
        )
    found = find_blocks(base)
    spec = record.spec.updated(asked)
    changed = {block.name for block, _ in record.plan.actions} != found.modules.keys()  # layers were added or dropped
    if spec != record.spec or changed:
        # A plan that was loaded or given once stays; its file may be gone by now.
        same = spec.plan is not None and spec.plan == record.spec.plan
        plan = _plan(found, record.plan if same else spec)[1]
        _adopt(base, record, spec, dataclasses.replace(plan, head=spec.head) if same and "head" in asked else plan)
    _put_on(base, record)
    if _everywhere is not None:
        _everywhere.enabled += 1


def _disable(base: compat.PreTrainedModel) -> None:
    record = installation(base)
    assert record is not None, "the hook outlived its record"
    _take_off(base, record)


def _put_on(base: compat.PreTrainedModel, record: Installation) -> None:
    if record.enabled:
        _take_off(base, record)
    for name, module in _carriers(base).items():
        record.before.setdefault(name, _read(module))
        if name in record.regions:
            _write(module, {_FLAG: GATE, _FUNCTION: record.regions[name]})
        else:
            _switch_off(module, record.before[name])
    found = find_blocks(base)
    if record.spec.policy in PLANNING_POLICIES:
        watch = PlanningHook(base, None)
        record.handles.append(base.register_forward_pre_hook(watch, with_kwargs=True))
        stacks = dict(zip(dict.fromkeys(block.stack for block in found.blocks), found.owners, strict=True))
        for stack, owner in stacks.items():
            if owner is not base:
                watch = PlanningHook(base, stack)
                record.handles.append(owner.register_forward_pre_hook(watch, with_kwargs=True))
    if record.plan.head != "full":
        _put_on_head(found, record)
    _put_on_parts(found)
    if record.regions:
        _drop_input_gradients(base, record)
        owners = {id(owner): owner for owner in found.owners}.values()
        record.handles += [owner.register_forward_pre_hook(StackHook(owner), with_kwargs=True) for owner in owners]
        segments = {region.segment for region in record.regions.values() if isinstance(region, SegmentRegion)}
        for owner in owners if segments else ():
            record.handles.append(owner.register_forward_pre_hook(StartOfStack(segments)))
            record.handles.append(_always_after(owner, end_of_stack))
        movers = {region.mover for region in record.regions.values() if isinstance(region, RebuildRegion)}
        for mover, owner in itertools.product(filter(None, movers), owners):
            record.handles.append(_always_after(owner, EndOfStack(mover)))
        rebuilt = {name for name, region in record.regions.items() if isinstance(region, RebuildRegion)}
        for module in cheap_modules(found, rebuilt):
            record.handles.append(module.register_forward_pre_hook(enter_module, with_kwargs=True))
            record.handles.append(_always_after(module, leave_module))
        if rebuilt:
            for norm in embedding_norms(found):
                record.handles.append(norm.register_forward_hook(hand_to_first_block))
    record.enabled = True


def _always_after(module: nn.Module, hook: Callable[..., Any]) -> Any:
    """Register a forward hook that is also called when the module raises an error."""
    with compat.same_hook_number(module._forward_hooks):
        return module.register_forward_hook(hook, always_call=True)


def _take_off(base: compat.PreTrainedModel, record: Installation) -> None:
    for name, module in _carriers(base).items():
        _switch_off(module, record.before.get(name, {}))
    for handle in record.handles:
        handle.remove()
    record.handles = []
    for module in base.modules():  # adapters may have come around the head since
        if isinstance(vars(module).get("forward"), HeadForward):
            del vars(module)["forward"]
        for name in compat.ENABLE_NAMES:
            if isinstance(vars(module).get(name), PartHook):
                del vars(module)[name]
    for name in _INPUT_GRADIENT_NAMES:
        if isinstance(vars(base).get(name), SkippedHook):
            del vars(base)[name]
    for _ in range(record.input_gradient_hooks):
        base.enable_input_require_grads()
    record.input_gradient_hooks = 0
    record.enabled = False


def _put_on_parts(found: FoundBlocks) -> None:
    blocks = set(found.modules.values())
    for part in found.base.modules():
        inner = isinstance(part, compat.PreTrainedModel) and part is not found.base
        for name in compat.ENABLE_NAMES if inner and not blocks.isdisjoint(part.modules()) else ():
            vars(part).setdefault(name, PartHook(part, found.base, name))


def _put_on_head(found: FoundBlocks, record: Installation) -> None:
    base = found.base
    head = vocabulary_head(base)
    if head is None:
        _warn_plain_head(type(base).__name__, "it has no projection onto a vocabulary")
    elif "forward" in vars(head):
        _warn_plain_head(type(base).__name__, "something else has replaced its forward")
    else:
        vars(head)["forward"] = HeadForward(base, head, record.plan.head, record.heads)
        record.handles.append(found.owners[-1].register_forward_pre_hook(MissedHead(base, record.heads)))


@functools.lru_cache(maxsize=32)  # once
def _warn_plain_head(model: str, reason: str) -> None:
    log.warning("hf_ckpt: the head of %s is not run in chunks, because %s.", model, reason)


def _drop_input_gradients(base: compat.PreTrainedModel, record: Installation) -> None:
    """Take the embedding hook off, and keep PEFT and TRL from putting it (back) on while the plan is enabled.

    It exists for reentrant checkpointing. Non-reentrant needs no input that requires gradients, and the hook makes
    frozen blocks below the first adapter save, recompute and run backward. https://github.com/huggingface/transformers/issues/21381
    """
    for module in base.modules():
        found = [key for key, hook in module._forward_hooks.items() if compat.makes_inputs_require_gradients(hook)]
        for key in found:  # not by handle: a second enable call loses the handle of the first
            del module._forward_hooks[key]
        record.input_gradient_hooks = max(record.input_gradient_hooks, len(found))
    for name in _INPUT_GRADIENT_NAMES:
        if hasattr(base, name):
            vars(base)[name] = SkippedHook(name)


def _carriers(base: nn.Module) -> dict[str, nn.Module]:
    """Every module with a checkpointing flag: blocks, but also stacks and T5's attention modules."""
    return {name: module for name, module in plain_modules(base) if hasattr(module, _FLAG)}


def _is_on(module: nn.Module) -> bool:
    with torch.enable_grad():  # our own flag is true only then
        return bool(getattr(module, _FLAG))


def _read(module: nn.Module) -> dict[str, Any]:
    return {name: vars(module).get(name, _Absent.ABSENT) for name in (_FLAG, _FUNCTION)}


def _write(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        if value is _Absent.ABSENT:
            vars(module).pop(name, None)
        else:
            setattr(module, name, value)


def _switch_off(module: nn.Module, before: Mapping[str, Any]) -> None:
    """As before installation, but off even if it was on then."""
    _write(module, before)
    if getattr(module, _FLAG):
        setattr(module, _FLAG, False)


class StackHook:
    """Forward pre-hook of whatever runs a stack.

    It says when the plan cannot act, refuses a second owner that came after enabling (once, at the first forward), and
    keeps a stack from building a cache in a forward that will be recomputed: for that call only, the config keeps what
    the user wrote.
    """

    def __init__(self, owner: nn.Module) -> None:
        self.takes_use_cache = compat.wants_use_cache(owner)
        self.checked = False

    def __call__(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None
        if not compat.is_compiling():
            self._check(owner, kwargs)
        if self.takes_use_cache and owner.training and kwargs.get("past_key_values") is None:
            return args, {**kwargs, "use_cache": False}
        return None

    def _check(self, owner: nn.Module, kwargs: dict[str, Any]) -> None:
        if not owner.training:
            if _is_trained(owner):
                _warn_eval_mode(type(owner).__name__)
            return
        cached = compat.cached_tokens(kwargs.get("past_key_values"))
        if cached:
            raise HfCkptError(
                f"the training forward of {type(owner).__name__} was given past_key_values that hold {cached} tokens, "
                "which blocks that are recomputed cannot see (prefix tuning works this way). Train without "
                "checkpointing, or use another adapter: `with hf_ckpt.paused(model)` turns the plan off for a while."
            )
        if not self.checked:
            refuse_other_owner(owner)
            stay = compat.parameters_stay(owner)
            empty = None if stay else compat.deepspeed_with_empty_shapes(owner)
            for module in owner.modules():
                region = vars(module).get(_FUNCTION)
                if empty is not None and isinstance(region, FullRegion):
                    raise HfCkptError(
                        f"DeepSpeed {empty} cannot recompute blocks with frozen parameters under ZeRO-3 (training "
                        "would stop with a CheckpointError: recomputed shape [0]). Install a DeepSpeed after "
                        f"{compat.LAST_DEEPSPEED_WITH_EMPTY_SHAPES}, use ZeRO-2, or train without checkpointing."
                    )
                if isinstance(region, RebuildRegion):
                    region.reaches_back = stay
                elif isinstance(region, SegmentRegion) and not stay:
                    raise HfCkptError(
                        f"`segments` recompute several blocks of {type(owner).__name__} at once, but its parameters "
                        "are sharded or moved block by block (FSDP, ZeRO-3, device maps), so those of the others are "
                        "away then. Use `policy: full` without `segments`."
                    )
            self.checked = True


def _is_trained(owner: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in owner.parameters())


@functools.lru_cache(maxsize=32)  # once a class
def _warn_eval_mode(owner: str) -> None:
    log.warning(
        "%s runs in eval mode with gradients on: blocks are checkpointed in train mode only, so every activation is "
        "kept. Call model.train() to train, or use torch.no_grad() to evaluate.",
        owner,
    )


# --- hooks that live on a model -------------------------------------------------------------------------------------


class _ModelHook:
    """A callable attribute of a model that refers to it weakly, and to the right one after a copy."""

    def __init__(self, base: nn.Module) -> None:
        self._base = weakref.ref(base)

    @property
    def base(self) -> Any:
        base = self._base()
        if base is None:
            raise HfCkptError("the model this hook belonged to no longer exists.")
        return base

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModelHook:
        return type(self)(memo.get(id(self.base), self.base))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.base,)


class EnableHook(_ModelHook):
    """`model.gradient_checkpointing_enable` and `model.activation_checkpointing_enable` of an installed model."""

    # PEFT looks for a parameter of exactly this name before it passes its keyword arguments.
    def __call__(
        self,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool | str = False,
        *,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Apply the plan. Keys of the spec replace it; none of them (None, {}, only other options) keep it."""
        asked = gradient_checkpointing_kwargs or activation_checkpointing_kwargs or {}
        if not isinstance(asked, Mapping):
            raise SpecError([f"the checkpointing kwargs must be a dict, but are {asked!r} instead"])
        # transformers takes these two out of the kwargs and passes them beside.
        _enable(self.base, {"every_n_layers": every_n_layers, "offload": offload, **asked})


class DisableHook(_ModelHook):
    """`model.gradient_checkpointing_disable` and its new name: the plan comes off, and is remembered."""

    def __call__(self) -> None:
        _disable(self.base)


class PartHook(_ModelHook):
    """An enable call of a model inside another one, whose plan is enabled: that plan stays.

    sentence-transformers enables every module of a model, and transformers would take the blocks over.
    """

    def __init__(self, part: nn.Module, whole: nn.Module | None, name: str) -> None:
        super().__init__(part)
        self._whole = None if whole is None else weakref.ref(whole)
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        part = self.base
        whole = None if self._whole is None else self._whole()
        record = None if whole is None else installation(whole)
        if whole is not None and record is not None and record.enabled and part in set(whole.modules()):
            _say_part(part)
            return
        for name in compat.ENABLE_NAMES:
            if isinstance(vars(part).get(name), PartHook):
                del vars(part)[name]
        getattr(part, self.name)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartHook:
        whole = None if self._whole is None else self._whole()
        return type(self)(memo.get(id(self.base), self.base), memo.get(id(whole)), self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.base, None, self.name)  # a part may be pickled by itself


def _say_part(part: nn.Module) -> None:
    log.info("%s is part of a model whose plan is enabled already; that plan stays.", type(part).__name__)


class HeadForward(_ModelHook):
    """`forward` of the head while its plan is enabled: in chunks, where gradients will be wanted."""

    def __init__(self, base: nn.Module, head: nn.Module, asked: int | str, counter: HeadCalls) -> None:
        super().__init__(base)
        self._head = weakref.ref(head)
        self.asked, self.counter = asked, counter
        self.plain: str | None = None
        """Why it is not run in chunks, if so."""
        self.checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """[..., hidden size] -> [..., vocabulary]."""
        head = self._head()
        assert head is not None, "the forward of a module outlived it"
        run = functools.partial(type(head).forward, head)
        if not (torch.is_grad_enabled() and head.training) or kwargs or len(args) != 1:
            return run(*args, **kwargs)
        if compat.is_compiling():
            self.counter.in_graph = True
            return run(*args)
        self.counter.missed = 0
        if not self.checked:
            self.checked = True
            if not compat.parameters_stay(self.base):
                self.plain = "its parameters are sharded or moved (FSDP, ZeRO-3, tensor parallelism, device maps)"
        plain = self.plain or ("it has an active dropout, whose draws would be others" if has_dropout(head) else None)
        if plain is not None:
            _warn_plain_head(type(self.base).__name__, plain)
            return run(*args)
        result = chunked(head, run, *args, self.asked)
        self.counter.calls += isinstance(result, Logits)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadForward:
        head: Any = self._head()
        base = memo.get(id(self.base), self.base)
        return HeadForward(base, memo.get(id(head), head), self.asked, copy.deepcopy(self.counter, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.base, self._head(), self.asked, self.counter)


class MissedHead(_ModelHook):
    """Forward pre-hook of what runs the last stack: says so when nobody calls the head that was to run in chunks."""

    def __init__(self, base: nn.Module, counter: HeadCalls) -> None:
        super().__init__(base)
        self.counter = counter

    def __call__(self, owner: nn.Module, args: tuple[Any, ...]) -> None:
        if compat.is_compiling() or not (torch.is_grad_enabled() and owner.training) or compat.is_replica(owner):
            return
        if self.counter.missed == 2:  # not the first: a forward may have failed on its way to the head
            _warn_plain_head(
                type(self.base).__name__,
                "nobody calls it: the loss is computed from its weight somewhere else (TRL does, in tiles of its own)",
            )
        self.counter.missed += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> MissedHead:
        return type(self)(memo.get(id(self.base), self.base), copy.deepcopy(self.counter, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.base, self.counter)


class PlanningHook(_ModelHook):
    """Forward pre-hook of the model, and of whatever runs a stack: plans for the first training batch that comes, and
    again for one that the plan has no room for.

    Both, because PEFT calls the forward of the model itself, past its hooks; and the model sees all sizes at once.
    """

    def __init__(self, base: nn.Module, stack: str | None) -> None:
        super().__init__(base)
        self.stack = stack

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if compat.is_compiling() or not (torch.is_grad_enabled() and module.training):
            return
        base = self.base
        record = installation(base)
        if record is None or not record.enabled:
            return
        stacks = list(dict.fromkeys(block.stack for block, _ in record.plan.actions))
        sizes = _sizes(stacks, self.stack, args, kwargs)
        if not sizes:
            return
        held_back = compat.holds_gradients_back(base)
        micro_steps = 2 if held_back else _micro_steps(base)
        seen = Situation(sizes, _is_padded(kwargs, record.planned), micro_steps, _autocast(base), held_back)
        before = record.planned
        if before is not None:
            if before.situation.covers(seen):
                return
            seen = before.situation.with_room_for(seen)
        else:
            first = next(iter(sizes.values()))
            seen = dataclasses.replace(seen, sizes={stack: sizes.get(stack, first) for stack in stacks})
        with paused(base):
            planned = plan_for(base, record.spec, seen, trial, before)
        _carry_out(base, record, planned)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanningHook:
        return type(self)(memo.get(id(self.base), self.base), self.stack)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.base, self.stack)


def _carry_out(base: compat.PreTrainedModel, record: Installation, planned: Planned) -> None:
    """Put a plan on that was made for a batch."""
    blocks = [block for block, _ in record.plan.actions]
    record.planned = planned
    _exchange(base, record, record.spec, fit_plan(planned.plan, blocks, record.plan.family, record.plan.model))


def _exchange(base: compat.PreTrainedModel, record: Installation, spec: Spec, plan: Plan) -> None:
    """Put another plan on in the middle of a training; who watches goes on watching."""
    observers = {name: region.observer for name, region in record.regions.items()}
    watched = next(iter(observers.values()), None)
    _adopt(base, record, spec, plan)
    for name, region in record.regions.items():
        region.observer = observers.get(name, watched)
    _put_on(base, record)


def tighten(model: nn.Module, excess_bytes: int) -> Plan | None:
    """Plan again with so many bytes less to use; None where no plan of `budget` or `auto` is enabled.

    For the time between two steps. A later, larger batch is planned for within what is left.
    """
    base = base_model(model)
    record = installation(base)
    if record is None or record.planned is None or not record.enabled:
        return None
    _carry_out(base, record, tightened(record.planned, excess_bytes))
    return record.plan


SMALLER = 0.1
"""Share of its predicted peak by which a planned policy is tightened after running out of memory."""


def step_down(model: nn.Module, *, exact: bool = False) -> str | None:
    """Put the next plan on that needs less memory, for the time between two attempts at a step.

    A plan of `budget` or `auto` is made again for less; then, as for every other plan, what is kept becomes
    `selective`, that `full`, and that `offload`, on a device with host memory beside it; the head goes into chunks
    where that is possible. A plan that is
    installed but not enabled is enabled first; with nothing installed, `selective` comes first, or what follows
    transformers' own checkpointing where that was on.

    Args:
        model: a PreTrainedModel, plain or wrapped.
        exact: leave out the chunked head, whose gradients are not bit-equal.

    Returns what was changed, or None when no plan is tighter, and the present one stays.
    """
    base = base_model(model)
    record = installation(base)
    if record is None:
        kept = not any(_is_on(module) for module in _carriers(base).values())
        _install_one(base, "none" if kept else "full")
        record = installation(base)
        assert record is not None
    elif not record.enabled and (record.plan.active() or record.plan.head != "full"):
        _put_on(base, record)
        return f"the installed plan (`{record.spec.policy}`)"
    if record.planned is not None and record.planned.plan.prediction is not None:
        peak = record.planned.plan.prediction.peak_bytes
        less = tightened(record.planned, record.planned.limit_bytes - round(peak * (1 - SMALLER)))
        if less.plan != record.planned.plan:
            _carry_out(base, record, less)
            fits = less.plan.prediction is not None and less.plan.prediction.peak_bytes <= less.limit_bytes
            return (
                f"a plan for {format_bytes(less.limit_bytes)}" if fits else "the plan that is predicted to need least"
            )
    head = None if exact else vocabulary_head(base)
    chunks = head is not None and "forward" not in vars(head) and compat.parameters_stay(base)
    offload = lane_of(next(base.parameters()).device) is not None
    head_first = head is not None and _head_weighs_more(head, record)
    tighter = tighter_plan(record.plan, chunks=chunks, offload=offload, head_first=head_first)
    if tighter is None:
        return None
    plan, name = tighter
    keys = ("engine", "preserve_rng_state", "determinism_check", "host_budget")
    spec = Spec(plan=GIVEN_PLAN, head=plan.head, **{key: getattr(record.spec, key) for key in keys})
    _exchange(base, record, spec, plan)
    return name


def _head_weighs_more(head: nn.Module, record: Installation) -> bool:
    """Whether the logits of a token, their float32 copy and its gradient are more than its hidden states of all
    blocks."""
    weight: Any = head.weight
    vocabulary, hidden = weight.shape
    return bool(3 * vocabulary > len(record.plan.actions) * hidden)


@contextlib.contextmanager
def watching(model: nn.Module) -> Iterator[list[Situation]]:
    """What the training forwards of a model in this context are given, in a list that grows."""
    base = base_model(model)
    found = find_blocks(base)
    stacks = list(dict.fromkeys(block.stack for block in found.blocks))
    seen: list[Situation] = []

    def note(stack: str | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sizes = _sizes(stacks, stack, args, kwargs)
        if sizes and torch.is_grad_enabled() and not compat.is_compiling():
            known = seen[-1].sizes if stack is not None and seen else {}
            first = next(iter(sizes.values()))
            whole = {name: sizes.get(name, known.get(name, first)) for name in stacks}
            seen.append(Situation(whole, _is_padded(kwargs, None), _micro_steps(base), _autocast(base)))

    places = {id(base): (base, None)} | {
        id(owner): (owner, stack) for stack, owner in zip(stacks, found.owners, strict=True) if owner is not base
    }
    handles = [
        module.register_forward_pre_hook(functools.partial(note, stack), with_kwargs=True)
        for module, stack in places.values()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _sizes(stacks: Sequence[str], stack: str | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sizes:
    """(sequences, tokens) that go into each stack, as far as a forward's arguments tell."""
    found: Sizes = {}

    def take(name: str, *values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.dim() >= 2:
                found[name] = value.shape[0], value.shape[1]
                return

    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
    take(stack or stacks[0], *given, kwargs.get("hidden_states"))
    if stack is None and len(stacks) > 1:
        names = ("labels", "decoder_input_ids", "decoder_inputs_embeds")
        take(stacks[-1], *(kwargs.get(name) for name in names))
    return found


def _is_padded(kwargs: Mapping[str, Any], planned: Planned | None) -> bool:
    """Whether the attention mask masks anything. Once a plan has room for masks that is not asked any more."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, torch.Tensor):
        return False
    if planned is not None and planned.situation.padded:
        return True
    return mask.dim() > 2 or not bool((mask != 0).all())


def _micro_steps(base: nn.Module) -> int:
    """2 stands for any number of them: what matters is whether gradients of earlier ones are there."""
    there = any(parameter.grad is not None for parameter in base.parameters() if parameter.requires_grad)
    return 2 if there or compat.accumulated_steps() > 1 else 1


def _autocast(base: nn.Module) -> torch.dtype | None:
    parameter = next(base.parameters())
    return compat.autocast_dtype(parameter.device.type)


class SkippedHook:
    """Stands in for `enable_input_require_grads` and its undoing while a plan is enabled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> None:
        log.info("%s skipped: non-reentrant checkpointing needs no input that requires gradients.", self.name)


# --- every model of the process -------------------------------------------------------------------------------------


class _Everywhere:
    """Class-level hooks on PreTrainedModel (and Accelerator.prepare), with what they replaced."""

    def __init__(self, given: SpecLike | Plan) -> None:
        self.given = given
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.enabled = 0
        self.replaced: list[tuple[type, str, Any]] = []

    def replace(self, owner: type, name: str, function: Callable[..., Any]) -> None:
        self.replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, functools.wraps(vars(owner)[name])(function))

    def undo(self) -> None:
        for owner, name, original in reversed(self.replaced):
            setattr(owner, name, original)
        for model in list(self.models):
            uninstall(model)

    def enable(self, base: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Install on this model, then let its own hook answer. A refused request leaves the model untouched."""
        if _driven_by_the_whole(find_blocks(base)):
            _say_part(base)
            return
        fresh = installation(base) is None
        if fresh:  # a plan that is there already is the newer request
            _install_one(base, self.given)
        try:
            vars(base_model(base))[compat.ENABLE_NAMES[0]](*args, **kwargs)
        except HfCkptError:
            if fresh:
                uninstall(base)
            raise
        self.models.add(base)


_everywhere: _Everywhere | None = None


def _install_everywhere(
    given: SpecLike | Plan, enable_when_prepared: bool, around_training_step: Callable[..., Any] | None = None
) -> None:
    global _everywhere
    if not isinstance(given, Plan):
        given = Spec.parse(given)
        if given.plan is not None:
            Plan.load(given.plan)
    _uninstall_everywhere()
    hooks = _Everywhere(given)

    def enable(
        self: Any,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool | str = False,
        *,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        hooks.enable(
            self,
            gradient_checkpointing_kwargs,
            every_n_layers,
            offload,
            activation_checkpointing_kwargs=activation_checkpointing_kwargs,
        )

    for name in compat.ENABLE_NAMES:
        hooks.replace(compat.PreTrainedModel, name, enable)
    if enable_when_prepared:
        accelerator = compat.accelerator_class()
        for name in ("prepare", "prepare_model"):
            hooks.replace(accelerator, name, _enabling(hooks, getattr(accelerator, name)))
    if around_training_step is not None:
        trainer = compat.trainer_class()
        hooks.replace(trainer, "training_step", _around(around_training_step, trainer.training_step))
    _everywhere = hooks


def _enabling(hooks: _Everywhere, prepare: Callable[..., Any]) -> Callable[..., Any]:
    """`prepare`, with hf_ckpt enabled first on every model among its arguments."""

    def enable_and_prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        for model in () if kwargs.get("evaluation_mode") else (*args, *kwargs.values()):
            if isinstance(model, nn.Module) and _can_enable(model):
                hooks.enable(base_model(model))
        return prepare(self, *args, **kwargs)

    return enable_and_prepare


def _around(function: Callable[..., Any], training_step: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, functools.partial(training_step, self), *args, **kwargs)

    return run


def _can_enable(model: nn.Module) -> bool:
    """A trainable Hugging Face model that nobody has enabled yet."""
    if not any(isinstance(module, compat.PreTrainedModel) for module in model.modules()):
        return False
    record = installation(model)
    return (record is None or not record.enabled) and _is_trained(model)


def _uninstall_everywhere() -> None:
    global _everywhere
    if _everywhere is not None:
        _everywhere.undo()
        _everywhere = None


def enable_calls() -> int:
    """How many enable calls hf_ckpt has answered, on any model, since `install()` of the process."""
    return 0 if _everywhere is None else _everywhere.enabled
