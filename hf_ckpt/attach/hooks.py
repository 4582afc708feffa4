"""The hooks and replaced methods on a model while a plan is enabled.

They are classes, not closures, so that they can be pickled, and so that `deepcopy` of a model makes them refer to the
copy.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.functions import Functions
from hf_ckpt.attach.record import ChunkCalls, Outermost, function_of, installation
from hf_ckpt.engines.head.chunked import chunked, has_computed_weights, has_dropout
from hf_ckpt.engines.head.logits import Logits
from hf_ckpt.engines.region import Region
from hf_ckpt.engines.state import ForwardState, Settings
from hf_ckpt.engines.tiles import Tiles, is_watched, mostly_trained, tiled, tokens_per_tile
from hf_ckpt.errors import HfCkptError, OwnerConflictError, TransformError
from hf_ckpt.logs import warn_once
from hf_ckpt.models.blocks import refuse_other_owner
from hf_ckpt.units import format_bytes
from hf_ckpt.versions import LAST_DEEPSPEED_WITH_EMPTY_SHAPES

log = logging.getLogger(__name__)


def hook_calls(
    module: nn.Module, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> list[Any]:
    """Call `before(module, args, kwargs)` and `after(module, args, output)` around every forward of a module.

    Returns handles; each has a method `remove`.
    """
    handles: list[Any] = []
    if before is not None:
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
    if after is not None:
        handles.append(module.register_forward_hook(after))
    return handles


def warn_plain_head(model: str, reason: str) -> None:
    """Warn once that the head of a model (by class name) runs as a whole, although the plan says chunks."""
    warn_once(log, "hf_ckpt: the head of %s is not run in chunks, because %s.", model, reason)


class CacheHook:
    """Forward pre-hook of a model that holds stacks: its training forwards build no cache.

    A recomputed block would write into a cache twice. The hook changes the call, not the user's config.

    Args:
        owner: the module.
        outermost: shared by all such hooks of a model.
        functions: of the installation. If they recompute blocks, a caller's cache that holds tokens is an error.
    """

    def __init__(self, owner: nn.Module, outermost: Outermost, functions: Functions) -> None:
        self.parameters = compat.forward_parameters(owner)
        self.outermost = outermost
        self.functions = functions

    def __call__(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Return the arguments without a cache; None to leave them unchanged.

        Raises `HfCkptError` if the caller passes a cache that is not empty.
        """
        # Without keywords torch calls a hook that was removed after this forward began: see `BatchHook`.
        if kwargs is None or not torch.is_grad_enabled():
            return None
        given = compat.caches_among(self.parameters, args, kwargs)
        if not compat.is_compiling() and self._check(owner, given):
            args = tuple(None if any(arg is cache for cache in given.values()) else arg for arg in args)
            kwargs, given = {name: value for name, value in kwargs.items() if name not in given}, {}
        if not owner.training or given or "use_cache" not in self.parameters:
            return None
        place = self.parameters.index("use_cache")
        if place < len(args):
            return (*args[:place], False, *args[place + 1 :]), kwargs
        return args, {**kwargs, "use_cache": False}

    def _check(self, owner: nn.Module, caches: dict[str, Any]) -> bool:
        """Return whether to leave out the caches of a training forward, all of which are empty.

        Planned blocks would not write into them, but others would, so that the next forward would get a partly filled
        cache. Raises `HfCkptError` for a cache that is not empty.
        """
        if not owner.training or not self.outermost.enter(owner) or not self.functions.active or not caches:
            return False
        filled = next((name for name, cache in caches.items() if compat.is_filled(cache)), None)
        if filled is None:
            return True
        if all(region.takes_caches for region in self.functions.active.values()):
            return False
        self.outermost.leave(owner, (), None)
        raise HfCkptError(
            f"the training forward of {type(owner).__name__} was given {filled}={type(caches[filled]).__name__}, a "
            "cache that is not empty, which blocks that are recomputed cannot see (prefix tuning works this way). "
            'Use "policy": "selective", which runs no block of a known family twice, or another adapter. `with '
            "hf_ckpt.paused(model)` turns the plan off for a while."
        )


class StackHook(CacheHook):
    """Forward pre-hook of a module that runs a stack.

    Like a `CacheHook`, and it warns if the plan has no effect because the module is in eval mode. At the first training
    forward of a module it also tells all functions of the stack where parameters are, and raises an error for another
    owner of checkpointing that came after the plan was enabled, a DeepSpeed that cannot recompute, or another compiler
    of blocks.

    Args:
        owner: the module.
        outermost: as for `CacheHook`.
        functions: as for `CacheHook`.
        blocks: names of the blocks in the stack.
        asked_reentrant: whether the user asked for reentrant checkpointing.
    """

    def __init__(
        self,
        owner: nn.Module,
        outermost: Outermost,
        functions: Functions,
        blocks: Collection[str],
        asked_reentrant: bool = False,
    ) -> None:
        super().__init__(owner, outermost, functions)
        self.asked_reentrant = asked_reentrant
        self.blocks = frozenset(blocks)
        self._checked: weakref.ref[nn.Module] | None = None
        """The module of the last training forward. accelerate makes a second one, which has the hooks of the first."""

    def _check(self, owner: nn.Module, caches: dict[str, Any]) -> bool:
        """Also raise `HfCkptError` for a training forward that cannot be recomputed, and warn about eval mode."""
        if not owner.training:
            if self.functions.active and is_trained(owner):
                _warn_eval_mode(type(owner).__name__)
            return False
        leave_out = super()._check(owner, caches)
        active = compat.transforms()
        if active:
            _refuse_transforms(owner, active)
        if self._checked is None or self._checked() is not owner:
            refuse_other_owner(owner)
            stay = compat.parameters_stay(owner)
            empty = None if stay else compat.deepspeed_with_empty_shapes(owner)
            for region in self.functions.made.values():  # also those of alternating plans
                if region.block not in self.blocks:
                    continue
                if empty is not None and region.runs_block_again:
                    _refuse_deepspeed(empty, self.asked_reentrant)
                region.told_of_parameters(stay, type(owner).__name__)
            _refuse_other_compiler(owner)
            self._checked = weakref.ref(owner)
        return leave_out

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_checked": None}


def _refuse_deepspeed(version: str, asked_reentrant: bool) -> None:
    """Raise `HfCkptError` for a DeepSpeed that cannot recompute frozen parameters non-reentrantly under ZeRO-3."""
    who = "which TRL has set by itself" if compat.trl_trains() else "which was asked for"
    reentrant = f" With `use_reentrant=True`, {who}, transformers' own checkpointing works there, without hf_ckpt."
    raise HfCkptError(
        f"DeepSpeed {version} cannot recompute blocks with frozen parameters non-reentrantly under ZeRO-3, as hf_ckpt "
        "does (training would stop with a CheckpointError: recomputed shape [0]). Install a DeepSpeed after "
        f"{LAST_DEEPSPEED_WITH_EMPTY_SHAPES}, use ZeRO-2, or train without checkpointing."
        f"{reentrant if asked_reentrant else ''}"
    )


def _refuse_other_compiler(owner: nn.Module) -> None:
    """Raise `OwnerConflictError` for a block that hf_ckpt should compile, but that something else compiles."""
    for name, module in owner.named_modules():
        region = function_of(getattr(module, "_orig_mod", module))
        if isinstance(region, Region) and region.compiles_block and compat.is_compiled(module):
            raise OwnerConflictError(
                f"block {name!r} of {type(owner).__name__} is compiled by something else (accelerate's regional "
                "compilation, or `module.compile()`), which would decide what is kept. Leave that out, or leave "
                "`compile` out of hf_ckpt's spec: compilation needs one owner."
            )


def _refuse_transforms(owner: nn.Module, active: set[str]) -> None:
    """Raise `TransformError` for a block in `owner` that does not work under one of these transforms."""
    for module in owner.modules():
        region = function_of(module)
        if isinstance(region, Region) and not active <= region.transforms:
            raise TransformError(region.block, sorted(active - region.transforms))


def is_trained(owner: nn.Module) -> bool:
    """Return whether any parameter of a module requires gradients."""
    return any(parameter.requires_grad for parameter in owner.parameters())


def _warn_eval_mode(owner: str) -> None:
    warn_once(
        log,
        "%s runs in eval mode with gradients on: blocks are checkpointed in train mode only, so every activation is "
        "kept. Call model.train() to train, or use torch.no_grad() to evaluate.",
        owner,
    )


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
        base = self._arguments()[0]
        if base is None:
            raise HfCkptError("the model this hook belonged to no longer exists.")
        return base

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(
            *(memo.get(id(v), v) if isinstance(v, nn.Module) else copy.deepcopy(v, memo) for v in self._arguments())
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self._arguments())


class PartHook(ModelHook):
    """The enable methods of a model that is part of another one, whose plan is enabled.

    They leave that plan alone. Otherwise transformers would replace hf_ckpt's functions on the blocks:
    sentence-transformers, for example, calls the enable method of every module of a model.
    """

    def __init__(self, part: nn.Module, whole: nn.Module | None, name: str) -> None:
        super().__init__(part, whole, name)
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        part, whole, _ = self._arguments()
        record = None if whole is None else installation(whole)
        if whole is not None and record is not None and record.enabled and part in set(whole.modules()):
            say_part(part)
            return
        for name in compat.ENABLE_NAMES:
            if isinstance(vars(part).get(name), PartHook):
                del vars(part)[name]
        getattr(part, self.name)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartHook:
        part, whole, name = self._arguments()
        return PartHook(memo.get(id(part), part), memo.get(id(whole)), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.base, None, self.name)  # a part may be pickled by itself


def say_part(part: nn.Module) -> None:
    """Log that an enable call of `part` changes nothing, because a plan of the whole model is enabled."""
    log.info("%s is part of a model whose plan is enabled already; that plan stays.", type(part).__name__)


class _Replica(threading.local):
    """The copy of a head by `nn.DataParallel` that this thread is calling, if any."""

    head: nn.Module | None = None


_replica = _Replica()


def note_replica(head: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook of the head: record a copy by `nn.DataParallel`. The copy has the `HeadForward` of the original,
    which does not know that it is called for the copy."""
    if compat.is_replica(head):
        _replica.head = head


class HeadForward(ModelHook):
    """The `forward` of the head while a plan that chunks it is enabled.

    It runs the head in chunks in training forwards. Otherwise, and if chunks are not possible, it runs it as a whole.
    """

    def __init__(self, base: nn.Module, head: nn.Module, asked: int | str, counter: ChunkCalls) -> None:
        super().__init__(base, head, asked, counter)
        self.asked, self.counter = asked, counter
        self.plain: str | None = None
        """Why the head cannot run in chunks; None if it can."""
        self.checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the logits [..., vocabulary] of hidden states [..., hidden size]."""
        head: Any = self._arguments()[1]
        if _replica.head is not None:
            head, _replica.head = _replica.head, None
            warn_plain_head(type(head).__name__, "it is a copy by nn.DataParallel, whose weights are no parameters")
            return type(head).forward(head, *args, **kwargs)
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
        plain = plain or ("a transform of torch.func or forward-mode AD is active" if compat.transforms() else None)
        if plain is not None:
            warn_plain_head(type(self.base).__name__, plain)
            return run(*args)
        result = chunked(head, run, *args, self.asked, self.counter.take_report())
        self.counter.calls += isinstance(result, Logits)
        if isinstance(result, Logits):
            self.counter.last = f"chunks of {result.source.tokens} tokens"
        else:
            size, tokens = format_bytes(result.nbytes), result.shape[:-1].numel()
            why = "its weights are computed" if has_computed_weights(head) else "they are one chunk"
            self.counter.last = f"as a whole, with {size} of logits ({tokens} tokens), because {why}"
        return result


class MissedHead(ModelHook):
    """Forward pre-hook of the module that runs the last stack.

    It warns if the head is planned to run in chunks, but training forwards do not call it.
    """

    def __init__(self, base: nn.Module, counter: ChunkCalls) -> None:
        super().__init__(base, counter)
        self.counter = counter

    def __call__(self, owner: nn.Module, args: tuple[Any, ...]) -> None:
        if compat.is_compiling() or not (torch.is_grad_enabled() and owner.training) or compat.is_replica(owner):
            return
        if self.counter.missed == 2:  # not the first: a forward may have failed on its way to the head
            warn_plain_head(
                type(self.base).__name__,
                "nobody calls it: the loss is computed from its weight somewhere else (TRL does, in tiles of its own)",
            )
        self.counter.missed += 1


def warn_plain_mlp(name: str, reason: str) -> None:
    """Warn once that a feed-forward runs as a whole, although the plan says chunks."""
    warn_once(log, "hf_ckpt: the feed-forward %s is not run in chunks, because %s.", name, reason)


def refuse_replica(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook of a module with a `TiledForward`, which would run the original instead of a copy.

    Raises `HfCkptError` in a copy by `nn.DataParallel`.
    """
    if compat.is_replica(module):
        raise HfCkptError(
            "the feed-forward cannot run in chunks in copies of a model, whose weights are no parameters, as "
            "nn.DataParallel makes them. Use DistributedDataParallel (torchrun or accelerate launch), or leave `mlp` "
            "out."
        )


class TiledForward(ModelHook):
    """The method that computes a feed-forward, while a plan that chunks it is enabled.

    It runs in chunks in training forwards. Otherwise, and if chunks are not possible, it runs as a whole.

    Args:
        base: the model.
        owner: the module whose method it is.
        where: qualified name of the owner, name of the method, and names inside the owner of the modules that it uses.
        asked: tokens per chunk, or `auto`.
        counter: counts the calls.
        keeps_draws: whether backward draws the random numbers of the forward again.
    """

    def __init__(
        self,
        base: nn.Module,
        owner: nn.Module,
        where: tuple[str, str, tuple[str, ...]],
        asked: int | str,
        counter: ChunkCalls,
        keeps_draws: bool,
    ) -> None:
        super().__init__(base, owner, where, asked, counter, keeps_draws)
        self.where = where
        # `apply_chunking_to_forward` of transformers counts the parameters of BERT's method.
        self.__signature__ = inspect.signature(functools.partial(getattr(type(owner), where[1]), owner))
        self.asked, self.counter, self.keeps_draws = asked, counter, keeps_draws
        self.whole: bool | None = None
        """Whether the model's parameters stay on their device, unsharded; None before the first training forward."""
        self.settings: Settings | None = None
        """The settings of the owner in its last forward; None before the first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the feed-forward for hidden states [sequences, tokens, hidden size]."""
        owner: Any = self._arguments()[1]
        name, method, inside = self.where
        run = functools.partial(getattr(type(owner), method), owner)
        if not (torch.is_grad_enabled() and owner.training) or kwargs or len(args) != 1:
            return run(*args, **kwargs)
        if compat.is_compiling():
            self.counter.in_graph = True
            return run(*args)
        parts = [owner.get_submodule(part) for part in inside]
        plain = self._reason(owner, parts)
        if plain is not None:
            warn_plain_mlp(name, plain)
            return run(*args)
        if self.whole is None:
            self.whole = compat.parameters_stay(self.base)
        if self.settings is None or not self.settings.hold(owner):
            self.settings = Settings(owner)
        tokens = tokens_per_tile(self.asked, args[0].shape[:-1].numel(), trained=mostly_trained(parts))
        state = ForwardState(name, owner, self.settings, whole=self.whole, keeps_draws=self.keeps_draws)
        tiles = Tiles(state, parts, run, tokens)
        tiles.report = self.counter.take_report()
        output = tiled(tiles, *args)
        self.counter.calls += 1
        self.counter.last = f"chunks of {tokens} tokens"
        return output

    def _reason(self, owner: nn.Module, parts: list[nn.Module]) -> str | None:
        """Return why the feed-forward cannot run in chunks now; None if it can."""
        if not all(any(True for _ in part.parameters()) and compat.parameters_stay(part) for part in parts):
            return "its parameters are sharded or moved (FSDP1, ZeRO-3, tensor parallelism, device maps)"
        if compat.transforms():
            return "a transform of torch.func or forward-mode AD is active"
        if self.keeps_draws and compat.is_capturing():
            return "a CUDA graph is captured, where random state cannot be read"
        if any(is_watched(module) for part in parts for module in part.modules() if module is not owner):
            return "a hook lies on one of its modules, which would see each chunk by itself"
        return None


class SkippedHook:
    """Replaces `enable_input_require_grads` and its counterpart while a plan is enabled, and does nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> None:
        """Log that nothing is done, and warn if a script called it: libraries call it only for checkpointing."""
        log.info("%s skipped: non-reentrant checkpointing needs no input that requires gradients.", self.name)
        if self.name.startswith("enable") and not compat.is_called_by_a_library():
            warn_once(
                log,
                "%s() does nothing while a plan of hf_ckpt is enabled: non-reentrant checkpointing needs no input that "
                "requires gradients. If other code needs the embeddings' output to require them, register a forward "
                "hook of your own.",
                self.name,
            )
