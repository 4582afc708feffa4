"""What happens before and after the training forwards of a model with a plan.

`PassHook` goes through two lists of small steps before a forward: `STEPS_OF_A_BATCH`, for the outermost module of the
model that the caller runs, and `STEPS_OF_A_STACK`, for a module that runs blocks.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.hooks import WHOLE, ModelHook, is_trained, warn_of_graph
from hf_ckpt.attach.record import Installation
from hf_ckpt.attach.switches import function_of
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.region import Region
from hf_ckpt.engines.settings import Above
from hf_ckpt.errors import HfCkptError, OwnerConflictError, TransformError
from hf_ckpt.logs import warn_once
from hf_ckpt.models.blocks import refuse_other_owner

log = logging.getLogger(__name__)

PACKED = (
    "%s builds no KV cache while blocks are checkpointed, so packed rows (whose `position_ids` restart) do not "
    "attend to each other. With the cache that your call asks for, they do. Pass `use_cache=False`, also without "
    "checkpointing."
)
"""Warning of packed rows, which transformers recognises only without a cache."""


def remind(base: nn.Module, record: Installation) -> None:
    """Warn once that a model trains without its plan, because nobody has enabled it."""
    if record.waits:
        text = "hf_ckpt is installed on %s, but not enabled: call model.%s(), or pass %s=True to TrainingArguments."
        warn_once(log, text, type(base).__name__, compat.transformers.ENABLE_NAMES[-1], compat.transformers.FLAG_NAME)
        record.undo_puts()


class Reminder(ModelHook):
    """Forward pre-hook of the modules that run stacks, until the plan is enabled. `remind` removes it, too."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Remind of the plan in the first training forward."""
        record = None if compat.torch.is_compiling() else self.record
        if record is not None and module.training and torch.is_grad_enabled() and is_trained(module):
            remind(self.base, record)


@dataclasses.dataclass(frozen=True)
class Role:
    """What a module with a `PassHook` is in its model."""

    name: str | None
    """What the session calls it: None for the model itself, or else the name of the stack or module."""
    parameters: list[str]
    """Names of the parameters of its forward, in order."""
    blocks: tuple[str, ...]
    """Names of the blocks that it runs; none for a model around modules that run blocks."""
    is_last: bool
    """Whether the head comes after it."""
    drops_caches: bool
    """Whether its training forwards build no cache."""


class PassHook(ModelHook):
    """The forward hooks of a module that runs a stack, or of a model around such modules: one before, one after.

    PEFT calls a model's `forward` past its hooks, so models inside and the modules that run the stacks have hooks, too.
    Of nested forwards only the outermost has the caller's arguments.
    """

    checked: weakref.ref[nn.Module] | None = None
    """The module of the last training forward. accelerate makes a second one, which has the hooks of the first."""
    looked_for_packing = False
    """Whether a batch was looked at for packed rows."""

    def __init__(self, base: nn.Module, role: Role) -> None:
        super().__init__(base, role)
        self.role = role  # read several times in every forward

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Forward pre-hook. Returns the arguments without a cache; None to leave them unchanged.

        Raises `HfCkptError` for a forward that cannot be recomputed, and what planning for the batch raises.
        """
        if kwargs is None:  # how torch calls a hook that another hook of this forward removed
            return None
        record = self.record
        if compat.torch.is_compiling():
            # torch.compile traces this hook, too. What it reads becomes a guard, and counts change in every step.
            if not torch.is_grad_enabled():
                return None
            if record is not None and module.training and (record.spec.is_planned or record.spec.compile is not None):
                warn_of_graph()
            return self._without_cache(module, args, kwargs)
        if record is None or not record.enabled:
            return None
        puts = record.puts
        # Compared without a call, because it happens in every forward.
        if record.children != record.children_before and record.decider is not None:
            record.decider.changed(self.base, record)
            if not record.enabled:  # no blocks are left
                return None
        if not (torch.is_grad_enabled() and module.training):
            record.other_forwards += 1
            if record.session is not None:
                record.session.before_others()
            self._warn_of_eval_mode(module, record)
            return None
        batch = _Pass(self, record, module, args, kwargs)
        if record.enter(module):
            for step in STEPS_OF_A_BATCH:
                step(batch)
        if record.puts is not puts:  # a plan was put on, and with it another hook in the place of this one
            hooks = module._forward_pre_hooks.values()
            batch.hook = next((hook for hook in hooks if isinstance(hook, PassHook)), self)
        if batch.hook.role.blocks:
            for step in STEPS_OF_A_STACK:
                step(batch)
        if batch.is_redirected:
            return batch.args, batch.kwargs
        return self._without_cache(module, batch.args, batch.kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook, called even after an error; then `output` is None."""
        record = None if compat.torch.is_compiling() else self.record
        if record is not None and record.leave(module) and record.session is not None:
            record.session.after_forward(output)

    def _warn_of_eval_mode(self, module: nn.Module, record: Installation) -> None:
        """Warn once of a forward with gradients in eval mode, in which transformers checkpoints no layer."""
        if self.role.blocks and torch.is_grad_enabled() and record.regions and is_trained(module):
            text = (
                "%s runs in eval mode with gradients on: blocks are checkpointed in train mode only, so every "
                "activation is kept. Call model.train() to train, or use torch.no_grad() to evaluate."
            )
            warn_once(log, text, type(module).__name__)

    def _without_cache(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with `use_cache=False`; None if that is not needed, or if they contain a cache.

        transformers warns in every run that a cache and checkpointing do not go together. This changes the call, and
        not the user's config, which is saved with the model.
        """
        if not (self.role.drops_caches and module.training):
            return None
        if compat.transformers.caches_among(self.role.parameters, args, kwargs):
            return None
        if "use_cache" not in self.role.parameters:
            return args, kwargs
        place = self.role.parameters.index("use_cache")
        if place < len(args):
            return (*args[:place], False, *args[place + 1 :]), kwargs
        return args, {**kwargs, "use_cache": False}


@dataclasses.dataclass
class _Pass:
    """One training forward of a module with a `PassHook`."""

    hook: PassHook
    record: Installation
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def is_redirected(self) -> bool:
        """Whether `args` are for another function than the module's forward.

        TRL and Lightning put a loss in the place of a model's forward, for one call.
        """
        is_replaced = "forward" in vars(self.module)
        return is_replaced and compat.transformers.forward_parameters(self.module) != self.hook.role.parameters


Steps = tuple[Callable[[_Pass], None], ...]

# --- before the forward of the outermost module -----------------------------------------------------------------------


def _show_to_decider(batch: _Pass) -> None:
    """Let `budget` and `auto` enable the plan for this batch, and the watch check a block of this forward."""
    decider = batch.record.decider
    if decider is not None:
        role = batch.hook.role
        decider.before_forward(batch.hook.base, batch.record, batch.module, role.name, batch.args, batch.kwargs)


def _drop_caches(batch: _Pass) -> None:
    """Replace empty caches among the arguments by None, and refuse filled ones: a recomputation would write twice."""
    record = batch.record
    if not (record.regions and batch.hook.role.drops_caches):
        return
    placed = () if batch.is_redirected else batch.args
    caches = compat.transformers.caches_among(batch.hook.role.parameters, placed, batch.kwargs)
    filled = [name for name, cache in caches.items() if compat.transformers.is_filled(cache)]
    if not filled:
        # Planned blocks would not write into them, but others would, for the next forward to find them.
        dropped = set(map(id, caches.values()))
        batch.args = tuple(None if id(arg) in dropped else arg for arg in batch.args)
        batch.kwargs = {name: value for name, value in batch.kwargs.items() if name not in caches}
    elif not all(region.takes_caches for region in record.regions.values()):
        raise HfCkptError(
            f"the training forward of {type(batch.module).__name__} was given "
            f"{filled[0]}={type(caches[filled[0]]).__name__}, a cache that is not empty, which blocks that are "
            'recomputed cannot see (prefix tuning works this way). Use "policy": "selective", which runs no '
            "block twice, or another adapter. `with hf_ckpt.paused(model)` turns the plan "
            "off for a while."
        )


def _warn_of_packing(batch: _Pass) -> None:
    """Warn once of packed rows that transformers would mix if it built the cache that the call asks for."""
    hook = batch.hook
    if hook.looked_for_packing:
        return
    hook.looked_for_packing = True  # only the first batch: reading positions makes the host wait for the device
    if batch.hook.role.drops_caches and compat.transformers.cache_hides_packing(hook.base, batch.kwargs):
        warn_once(log, f"hf_ckpt: {PACKED}", type(batch.module).__name__)


STEPS_OF_A_BATCH: Steps = (_show_to_decider, _drop_caches, _warn_of_packing)
"""What happens before the outermost module runs a training batch. The decider comes first: what follows depends on the
plan that it enables."""


# --- before the forward of a module that runs blocks ------------------------------------------------------------------


def _refuse_transforms(stack: _Pass) -> None:
    """Refuse transforms of torch.func, and forward-mode AD."""
    active = sorted(compat.modes.transforms())
    if active and stack.record.regions:
        names = " and ".join(active)
        text = f"it cannot be checkpointed under {names} of torch.func (forward-mode AD is jvp, too)."
        raise TransformError(next(iter(stack.record.regions)), text)


def _refuse_replicas(stack: _Pass) -> None:
    """Refuse copies of nn.DataParallel in which something runs in parts: the parts look weights up as parameters."""
    plan = stack.record.plan
    runs_in_parts = plan.head != "whole" or any(action.tile is not None for _, action in plan.actions)
    if runs_in_parts and compat.torch.is_replica(stack.module):
        raise HfCkptError(
            "neither the head nor feed-forwards can run in parts in copies of a model, whose weights are no "
            "parameters, as nn.DataParallel makes them. Use DistributedDataParallel (torchrun or accelerate "
            "launch), or leave `head` and `mlp` out."
        )


def _count_missed_head(stack: _Pass) -> None:
    """Warn once if nobody calls the head, so that its plan has no effect."""
    heads = stack.record.heads
    if not stack.hook.role.is_last or stack.record.plan.head == "whole":
        return
    if heads.missed == 2:  # not the first: a forward may have failed on its way to the head
        why = "it is never called: the loss uses its weight directly (as TRL's losses do)"
        warn_once(log, WHOLE, type(stack.hook.base).__name__, why)
        heads.note("none, because it is never called")
    heads.missed += 1


def _check_once(stack: _Pass) -> None:
    """In the first forward of a module, refuse other owners of its blocks, and say where parameters are.

    Whatever shards, wraps or compiles a model does so after the plan was enabled, and before the first forward.
    """
    hook = stack.hook
    module = stack.module
    functions = stack.record.functions.made.values()  # also those of alternating plans
    if not functions or (hook.checked is not None and hook.checked() is module):
        return
    refuse_other_owner(module)
    regions = [region for region in functions if region.block in stack.hook.role.blocks]
    _refuse_deepspeed(module, regions)
    _refuse_parts(stack.record, regions)
    stay = compat.distributed.parameters_stay(module)
    above = _above(hook.base, module)
    for region in regions:
        region.parameters_stay = stay
        if isinstance(region, FullRegion):
            region.above = above
            region.runs_outside = stay or _can_gather(stack.record, region.block)
    _refuse_compiled(module)
    hook.checked = weakref.ref(module)


def _can_gather(record: Installation, block: str) -> bool:
    """Whether FSDP2 can gather the parameters of a block for a run outside of its own forward and backward."""
    # Each rank plans for itself, and gathering takes part of all ranks. Hooks around the recomputation would run again.
    hooks_stay = compat.transformers.HOOKS_STAY_OUTSIDE
    return hooks_stay and not record.spec.is_planned and compat.distributed.can_gather(record.blocks[block])


def _above(base: nn.Module, module: nn.Module) -> Above:
    """Return proxies of a module that runs blocks, and of the models around it up to `base`."""
    path = next((name.split(".") for name, inner in base.named_modules() if inner is module), [""])
    around = dict.fromkeys(base.get_submodule(".".join(path[:length])) for length in range(len(path)))
    # Wrappers in between have attributes of their own for each moment of a step.
    models = [part for part in around if isinstance(part, compat.transformers.PreTrainedModel) and part is not module]
    return tuple(map(weakref.proxy, (*models, module)))


def _refuse_deepspeed(module: nn.Module, regions: list[Region]) -> None:
    """Refuse a DeepSpeed under which no block can be recomputed."""
    version = compat.distributed.deepspeed_with_empty_shapes(module)
    if version is not None and any(region.runs_block_again for region in regions):
        raise HfCkptError(
            f"DeepSpeed {version} cannot recompute blocks with frozen parameters non-reentrantly "
            "under ZeRO-3, as hf_ckpt does (training would stop with a CheckpointError: recomputed shape "
            f"[0]). Install a DeepSpeed after {compat.distributed.LAST_DEEPSPEED_WITH_EMPTY_SHAPES}, use "
            "ZeRO-2, or train without hf_ckpt: transformers' own checkpointing with `use_reentrant=True`, "
            "which TRL asks for by itself, works there."
        )


def _refuse_parts(record: Installation, regions: list[Region]) -> None:
    """Refuse recomputation of blocks whose parts FSDP1 shards one by one, and has freed when the block runs again."""
    for region in regions:
        if region.runs_block_again and compat.distributed.parts_in_fsdp1(record.blocks[region.block]):
            raise HfCkptError(
                f"FSDP1 shards parts of block {region.block!r} one by one, and frees them while the block is "
                "recomputed. Wrap whole blocks only (`fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP` without "
                'classes inside blocks), use FSDP2, or give "policy": "selective".'
            )


def _refuse_compiled(module: nn.Module) -> None:
    """Refuse blocks that both hf_ckpt and something else compile."""
    for name, block in module.named_modules():
        function = function_of(getattr(block, "_orig_mod", block))  # torch.compile wraps a block
        if isinstance(function, Region) and function.compiles_block and compat.compiler.is_compiled(block):
            raise OwnerConflictError(
                f"block {name!r} of {type(module).__name__} is compiled by something else (accelerate's regional "
                "compilation, or `module.compile()`), which would decide what is saved. Remove that, or "
                "remove `compile` from hf_ckpt's spec: compilation needs one owner."
            )


STEPS_OF_A_STACK: Steps = (_refuse_transforms, _refuse_replicas, _count_missed_head, _check_once)
"""What happens before a module runs the blocks of a stack in training."""
