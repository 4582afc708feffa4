"""The hooks and replaced methods on a model while a plan is enabled.

They are classes, not closures, so that they can be pickled, and so that `deepcopy` of a model makes them refer to the
copy.
"""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.record import IN_GRAPH, RECORD, ChunkCalls, Installation, function_of
from hf_ckpt.engines.head.logits import Logits, chunked, why_whole
from hf_ckpt.engines.region import Region
from hf_ckpt.errors import HfCkptError, OwnerConflictError, TransformError
from hf_ckpt.logs import warn_once
from hf_ckpt.models.blocks import refuse_other_owner

log = logging.getLogger(__name__)

PACKED = (
    "%s builds no cache while blocks are checkpointed, so packed rows (their `position_ids` begin anew) do not see "
    "each other. With the cache that your call asks for, they do. Pass `use_cache=False`, also without checkpointing."
)
"""Warning of packed rows, which transformers recognises only without a cache."""


def is_trained(module: nn.Module) -> bool:
    """Return whether any parameter of a module requires gradients."""
    return any(parameter.requires_grad for parameter in module.parameters())


def warn_plain(part: str, reason: str) -> None:
    """Warn once that the head or a feed-forward runs as a whole, although the plan says chunks."""
    warn_once(log, "hf_ckpt: %s is not run in chunks, because %s.", part, reason)


class ModelHook:
    """Base of the callables that are attributes or hooks of a model.

    It refers to modules weakly, so that the model can be freed. A copied or unpickled model gets a copy of the hook
    that refers to the new model.

    Args:
        arguments: arguments of the hook. The first one is the model.
    """

    def __init__(self, *arguments: Any) -> None:
        self._held = tuple(weakref.ref(value) if isinstance(value, nn.Module) else value for value in arguments)

    def _arguments(self) -> list[Any]:
        return [value() if isinstance(value, weakref.ref) else value for value in self._held]

    @property
    def base(self) -> Any:
        """The model. Raises `HfCkptError` if it no longer exists."""
        base = self._held[0]()
        if base is None:
            raise HfCkptError("the model this hook belonged to no longer exists.")
        return base

    def _record(self) -> Installation | None:
        base = self._held[0]()
        return None if base is None else vars(base).get(RECORD)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(
            *(memo.get(id(v), v) if isinstance(v, nn.Module) else copy.deepcopy(v, memo) for v in self._arguments())
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self._arguments())


def remind(base: nn.Module, record: Installation) -> None:
    """Warn once that a model trains without its plan, because nobody has enabled it."""
    if record.waits:
        text = "hf_ckpt is installed on %s, but not enabled: call model.%s(), or pass %s=True to TrainingArguments."
        warn_once(log, text, type(base).__name__, compat.transformers.ENABLE_NAMES[-1], compat.transformers.FLAG_NAME)
        record.remove_hooks()


class Reminder(ModelHook):
    """Forward pre-hook of the modules that run stacks, until the plan is enabled. `remind` removes it, too."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Remind of the plan in the first training forward."""
        record = None if compat.torch.is_compiling() else self._record()
        if record is not None and module.training and torch.is_grad_enabled() and is_trained(module):
            remind(self.base, record)


class PassHook(ModelHook):
    """The forward hooks of a module that runs a stack, or of a model around such modules: one before, one after.

    The one before shows each training batch to the session and the watch, refuses what blocks cannot be recomputed
    under, and keeps caches away from blocks: a recomputed block would write into a cache twice. It changes the call,
    not the user's config. PEFT calls a model's `forward` past its hooks, so models inside and the modules that run
    the stacks have hooks, too. Of nested forwards only the outermost has the caller's arguments.

    Args:
        base: the model.
        place: what the module is to the session: None for the model itself, or else the name of the stack or module.
        parameters: names of the parameters of the module's forward, in order.
        blocks: names of the blocks that it runs; none for a model around.
        drops_caches: whether its training forwards build no cache.
        runs_last: whether the head comes after it.
    """

    def __init__(
        self,
        base: nn.Module,
        place: str | None,
        parameters: list[str],
        blocks: tuple[str, ...],
        drops_caches: bool,
        runs_last: bool,
    ) -> None:
        super().__init__(base, place, parameters, blocks, drops_caches, runs_last)
        self.place, self.parameters, self.blocks = place, parameters, blocks
        self.drops_caches, self.runs_last = drops_caches, runs_last
        self._checked: weakref.ref[nn.Module] | None = None
        """The module of the last training forward. accelerate makes a second one, which has the hooks of the first."""
        self._looked_for_packing = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Forward pre-hook. Returns the arguments without a cache; None to leave them unchanged.

        Raises `HfCkptError` for a forward that cannot be recomputed, and what planning for the batch raises.
        """
        if kwargs is None:  # how torch calls a hook that another hook of this forward removed
            return None
        if compat.torch.is_compiling():
            return self._without_cache(module, args, kwargs) if torch.is_grad_enabled() else None
        record = self._record()
        if record is None or not record.enabled:
            return None
        if not (torch.is_grad_enabled() and module.training):
            record.passes += 1
            if self.blocks and torch.is_grad_enabled() and record.regions and is_trained(module):
                warn_once(
                    log,
                    "%s runs in eval mode with gradients on: blocks are checkpointed in train mode only, so every "
                    "activation is kept. Call model.train() to train, or use torch.no_grad() to evaluate.",
                    type(module).__name__,
                )
            return None
        outermost = record.outermost.enter(module)
        if outermost and record.decider is not None:
            if record.spec.is_planned:
                if record.session is None:
                    record.session = record.decider.session(self.base, record)
                record.session.on_batch(record, module, self.place, args, kwargs)
            if record.spec.check_every and not record.unchecked:
                if record.watch is None:
                    record.watch = record.decider.watch(record)
                record.watch.on_forward(self.base, record, module)
        # TRL and Lightning redirect: they put a loss in the place of a model's forward, for one call.
        own = "forward" not in vars(module) or compat.transformers.forward_parameters(module) == self.parameters
        if outermost and record.regions and self.drops_caches:
            caches = compat.transformers.caches_among(self.parameters, args if own else (), kwargs)
            filled = next((name for name, cache in caches.items() if compat.transformers.is_filled(cache)), None)
            if filled is None:
                # Planned blocks would not write into them, but others would, for the next forward to find them.
                args = tuple(None if any(arg is cache for cache in caches.values()) else arg for arg in args)
                kwargs = {name: value for name, value in kwargs.items() if name not in caches}
            elif not all(region.takes_caches for region in record.regions.values()):
                record.outermost.leave(module)
                raise HfCkptError(
                    f"the training forward of {type(module).__name__} was given "
                    f"{filled}={type(caches[filled]).__name__}, a cache that is not empty, which blocks that are "
                    'recomputed cannot see (prefix tuning works this way). Use "policy": "selective", which runs no '
                    "block twice, or another adapter. `with hf_ckpt.paused(model)` turns the plan "
                    "off for a while."
                )
        if outermost and not self._looked_for_packing:
            self._looked_for_packing = True  # once, because the host waits for the device
            if self.drops_caches and compat.transformers.cache_hides_packing(self.base, kwargs):
                warn_once(log, f"hf_ckpt: {PACKED}", type(module).__name__)
        if self.blocks:
            self._check(module, record)
        return self._without_cache(module, args, kwargs) if own else (args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook, called even after an error; then `output` is None."""
        record = None if compat.torch.is_compiling() else self._record()
        if record is not None and record.outermost.leave(module) and record.session is not None:
            record.session.after_forward(output)

    def _without_cache(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with `use_cache=False`; None if that is not needed, or if they contain a cache."""
        if not (self.drops_caches and module.training) or compat.transformers.caches_among(
            self.parameters, args, kwargs
        ):
            return None
        if "use_cache" not in self.parameters:
            return args, kwargs
        place = self.parameters.index("use_cache")
        if place < len(args):
            return (*args[:place], False, *args[place + 1 :]), kwargs
        return args, {**kwargs, "use_cache": False}

    def _check(self, module: nn.Module, record: Installation) -> None:
        """Refuse what blocks of a stack cannot be recomputed under, and tell their functions where parameters are.

        Another owner of checkpointing that came after the plan was enabled, a DeepSpeed that cannot recompute and
        another compiler of blocks are looked for in the first forward of a module only.
        """
        active = compat.torch.transforms()
        for name, region in record.regions.items() if active else ():
            if name in self.blocks and not active <= region.transforms:
                transforms = " and ".join(sorted(active - region.transforms))
                raise TransformError(
                    name, f"it cannot be checkpointed under {transforms} of torch.func (forward-mode AD is jvp, too)."
                )
        in_parts = record.plan.head != "full" or any(action.tile is not None for _, action in record.plan.actions)
        if in_parts and compat.torch.is_replica(module):
            raise HfCkptError(
                "neither the head nor feed-forwards can run in parts in copies of a model, whose weights are no "
                "parameters, as nn.DataParallel makes them. Use DistributedDataParallel (torchrun or accelerate "
                "launch), or leave `head` and `mlp` out."
            )
        if self.runs_last and record.plan.head != "full":
            if record.heads.missed == 2:  # not the first: a forward may have failed on its way to the head
                why = "nobody calls it: the loss is computed from its weight somewhere else (TRL does, in own tiles)"
                warn_plain(f"the head of {type(self.base).__name__}", why)
                record.heads.last = "none, because nobody calls it"
            record.heads.missed += 1
        if not record.functions.made or (self._checked is not None and self._checked() is module):
            return
        refuse_other_owner(module)
        stay = compat.distributed.parameters_stay(module)
        empty_shapes = None if stay else compat.distributed.deepspeed_with_empty_shapes(module)
        for region in record.functions.made.values():  # also those of alternating plans
            if region.block in self.blocks:
                if empty_shapes is not None and region.runs_block_again:
                    raise HfCkptError(
                        f"DeepSpeed {empty_shapes} cannot recompute blocks with frozen parameters non-reentrantly "
                        "under ZeRO-3, as hf_ckpt does (training would stop with a CheckpointError: recomputed shape "
                        f"[0]). Install a DeepSpeed after {compat.distributed.LAST_DEEPSPEED_WITH_EMPTY_SHAPES}, use "
                        "ZeRO-2, or train without hf_ckpt: transformers' own checkpointing with `use_reentrant=True`, "
                        "which TRL asks for by itself, works there."
                    )
                region.told_of_parameters(stay, type(module).__name__)
        for name, block in module.named_modules():
            found = function_of(getattr(block, "_orig_mod", block))
            if isinstance(found, Region) and found.compiles_block and compat.compiler.is_compiled(block):
                raise OwnerConflictError(
                    f"block {name!r} of {type(module).__name__} is compiled by something else (accelerate's regional "
                    "compilation, or `module.compile()`), which would decide what is kept. Leave that out, or leave "
                    "`compile` out of hf_ckpt's spec: compilation needs one owner."
                )
        self._checked = weakref.ref(module)


class HeadForward(ModelHook):
    """The `forward` of the head while a plan that chunks it is enabled.

    It runs the head in chunks in training forwards. Otherwise, and if chunks are not possible, it runs it as a whole.
    """

    def __init__(self, base: nn.Module, head: nn.Module, asked: int | str, counter: ChunkCalls) -> None:
        super().__init__(base, head, asked, counter)
        self.asked, self.counter = asked, counter
        self.stays: bool | None = None
        """Whether the model's parameters stay on their device, unsharded; None before the first training forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the logits [..., vocabulary] of hidden states [..., hidden size]."""
        head: Any = self._arguments()[1]
        run = functools.partial(type(head).forward, head)
        if not (torch.is_grad_enabled() and head.training) or kwargs or len(args) != 1:
            return run(*args, **kwargs)
        if compat.torch.is_compiling():
            self.counter.last = IN_GRAPH
            return run(*args)
        self.counter.missed = 0
        if self.stays is None:
            self.stays = compat.distributed.parameters_stay(self.base)
        sharded = "its parameters are sharded or moved (FSDP, ZeRO-3, tensor parallelism, device maps)"
        reason = why_whole(head) if self.stays else sharded
        if reason is not None:
            warn_plain(f"the head of {type(self.base).__name__}", reason)
            return run(*args)
        result = chunked(head, run, *args, self.asked)
        if isinstance(result, Logits):
            self.counter.calls += 1
            self.counter.last = f"chunks of {result.call.tokens} tokens"
            result.call.when_read_whole = self.counter.read_whole
        else:
            self.counter.last = "as a whole, because chunks of so few tokens would need no less"
        return result


class Instead(ModelHook):
    """The `forward` of a module that an engine replaces.

    Args:
        base: the model.
        module: the module.
        function: called as `function(module, forward, *args, **kwargs)` with the module's own forward.
        before: what something else had put in the forward's place before, such as Liger's kernels; None if nothing.
    """

    def __init__(self, base: nn.Module, module: nn.Module, function: Any, before: Any) -> None:
        super().__init__(base, module, function, before)
        self.function, self.before = function, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        module: Any = self._arguments()[1]
        return self.function(module, self.before or functools.partial(type(module).forward, module), *args, **kwargs)


class Skipped:
    """Replaces a method while a plan is enabled, and does nothing.

    Such methods are `enable_input_require_grads` and its counterpart, because non-reentrant checkpointing needs no
    input that requires gradients; and the enable methods of models inside the planned one, which would replace the
    functions of its blocks. sentence-transformers, for example, calls the enable method of every module of a model.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Log that nothing is done."""
        log.info("%s() does nothing while a plan of hf_ckpt is enabled.", self.name)
