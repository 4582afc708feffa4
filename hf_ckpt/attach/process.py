"""Replaced methods of classes, for every model of the process.

They are the enable methods of PreTrainedModel, its constructor and its calls, `Accelerator.prepare`, and
`Trainer.training_step`.

`hf_ckpt.install()` without a model replaces them, and `hf_ckpt.uninstall()` restores them.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import detach, driven_by_the_whole
from hf_ckpt.attach.hooks import is_trained, say_part
from hf_ckpt.attach.record import Absent, enable_calls, installation
from hf_ckpt.errors import HfCkptError, NoBlocksError
from hf_ckpt.logs import warn_once
from hf_ckpt.models.blocks import base_model, find_blocks, outermost_models

log = logging.getLogger(__name__)


class ProcessHooks:
    """The replaced methods of other packages' classes, and the models that were enabled through them."""

    def __init__(self, install: Callable[[nn.Module], object]) -> None:
        self.install = install
        """Puts a record on a model that has none, so that hf_ckpt handles its enable calls."""
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Base models that were enabled through these hooks."""
        self.calls_before = enable_calls()
        """How many enable calls hf_ckpt had handled in this process before."""
        self.replaced: list[tuple[type, str, Any]] = []
        """(class, method name, the class's own method or `Absent.ABSENT`) in the order of replacement."""
        self.built: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Every PreTrainedModel built since, including those inside other models."""
        self.met: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models that have run a training forward, for which it is decided whether a plan is enabled."""
        self.missed: str | None = None
        """Why a model that seemed to train was left alone, and what to do about it."""

    def replace(self, owner: type, name: str, function: Callable[..., Any]) -> None:
        """Replace a class's method by `function`, until `undo`."""
        self.replaced.append((owner, name, vars(owner).get(name, Absent.ABSENT)))
        setattr(owner, name, function)

    def undo(self) -> None:
        """Restore every method, and remove hf_ckpt from every model that was enabled through these hooks."""
        for owner, name, original in reversed(self.replaced):
            if original is Absent.ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        for model in list(self.models):
            detach(model)

    def enable(self, base: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Handle an enable call of a model: install on it if nothing is installed, then call its enable hook.

        A part of a model whose plan is enabled is left alone. Raises what `install` and the enable hook raise (such as
        `SpecError`); a model that had no record then has none.
        """
        if driven_by_the_whole(find_blocks(base)):
            say_part(base)
            return
        fresh = installation(base) is None
        if fresh:  # an existing record is the newer request
            self.install(base)
        try:
            vars(base_model(base))[compat.ENABLE_NAMES[0]](*args, **kwargs)
        except HfCkptError:
            if fresh:
                detach(base)
            raise
        self.models.add(base)

    def enable_unasked(self, model: nn.Module) -> None:
        """Enable every Hugging Face model in `model`, except those that are already enabled or have no blocks.

        Raises as `enable` does.
        """
        for base in outermost_models(model):
            record = installation(base)
            if record is not None and record.enabled:
                continue
            try:
                self.enable(base)
            except NoBlocksError as error:  # not a reason to end the training of other models
                warn_once(log, "%s is trained without checkpointing: %s", type(base).__name__, error)

    def meet(self, module: nn.Module, inputs: Iterable[Any]) -> None:
        """Enable a model whose forward begins with gradients on, if it is trained and nobody has enabled it.

        Args:
            module: a PreTrainedModel, or a model that torch.compile has wrapped.
            inputs: of the forward. If one requires gradients, that is training, too: of prompts, for example.
        """
        bases = [self._whole(inner) for inner in outermost_models(module)]
        if not bases:  # a part of a model, which is compiled by itself
            self.met.add(module)
            return
        trained = any(map(is_trained, bases)) or any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        if not trained:
            return
        name = ", ".join(type(base).__name__ for base in bases)
        if compat.is_replica(module):
            self.missed = f"{name} is copied by nn.DataParallel for every step; train with DistributedDataParallel"
        elif not module.training:
            self.missed = (
                f"{name} ran with gradients in eval mode, in which no block is checkpointed; call `model.train()` "
                "before training (`from_pretrained` returns models in eval mode)"
            )
        else:
            for base in bases:
                self.enable_unasked(base)
            self.met.update([module, *bases])

    def _whole(self, model: nn.Module) -> nn.Module:
        """Return the outermost model that holds `model`: PEFT calls that model's `forward` past all hooks."""
        around = [other for other in list(self.built) if any(part is model for part in other.modules())]
        return max(around, key=lambda other: sum(1 for _ in other.modules()), default=model)


_everywhere: ProcessHooks | None = None


def hook_process(
    install: Callable[[nn.Module], object],
    *,
    enable_when_trained: bool = False,
    around_training_step: Callable[..., Any] | None = None,
) -> None:
    """Let hf_ckpt handle the enable calls of every model of the process, until `unhook_process`.

    Args:
        install: puts a record on a model; called at the first enable call of each model.
        enable_when_trained: also enable every trainable model that `Accelerator.prepare` gets, and every other one when
            its first training forward begins.
        around_training_step: replaces every Trainer's `training_step`. It is called with the trainer, that method, and
            the arguments.
    """
    global _everywhere
    unhook_process()
    hooks = ProcessHooks(install)

    for name in compat.ENABLE_NAMES:
        hooks.replace(compat.PreTrainedModel, name, _answering(hooks, vars(compat.PreTrainedModel)[name]))
    if enable_when_trained:
        accelerator = compat.accelerator_class()
        for name in ("prepare", "prepare_model"):
            hooks.replace(accelerator, name, _enabling(hooks, getattr(accelerator, name)))
        hooks.replace(compat.PreTrainedModel, "__init__", _noting(hooks, compat.PreTrainedModel.__init__))
        for owner in (compat.PreTrainedModel, compat.compiled_module_class()):
            hooks.replace(owner, "__call__", _meeting(hooks, owner.__call__))
    if around_training_step is not None:
        trainer = compat.trainer_class()
        hooks.replace(trainer, "training_step", _around(around_training_step, trainer.training_step))
    _everywhere = hooks


def unhook_process() -> None:
    """Undo `hook_process`: restore the methods of every class, and remove hf_ckpt from models enabled through them."""
    global _everywhere
    if _everywhere is not None:
        _everywhere.undo()
        _everywhere = None


def enable_calls_since_hooked() -> int:
    """Return how many enable calls hf_ckpt has handled, on any model, since `hook_process`; 0 without it."""
    return 0 if _everywhere is None else enable_calls() - _everywhere.calls_before


def missed_since_hooked() -> str | None:
    """Return why a model that was trained since `hook_process` was left alone, and what to do; None if none was."""
    return None if _everywhere is None else _everywhere.missed


def _answering(hooks: ProcessHooks, own: Callable[..., None]) -> Callable[..., None]:
    """Return an enable method that lets `hooks` handle the call, and calls `own` for a model without known blocks."""

    @functools.wraps(own)
    def enable(
        self: Any,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool | str = False,
        *,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        asked = gradient_checkpointing_kwargs or activation_checkpointing_kwargs or {}
        try:
            hooks.enable(self, asked, every_n_layers, offload)
        except NoBlocksError as error:  # the model may checkpoint in its own forward
            name = type(self).__name__
            warn_once(log, "hf_ckpt leaves %s to its own code, which may checkpoint by itself: %s", name, error)
            own(self, {key: asked[key] for key in compat.TORCH_OPTIONS if key in asked} or None)

    return enable


def _enabling(hooks: ProcessHooks, prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that enables hf_ckpt on every model among its arguments, and then calls `prepare`."""

    @functools.wraps(prepare)
    def enable_and_prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            compat.remember_optimizer(given)
        for model in () if kwargs.get("evaluation_mode") else (*args, *kwargs.values()):
            if isinstance(model, nn.Module) and is_trained(model):
                hooks.enable_unasked(model)
        return prepare(self, *args, **kwargs)

    return enable_and_prepare


def _noting(hooks: ProcessHooks, build: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of models that calls `build` and then records the model."""

    @functools.wraps(build)
    def build_and_note(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        hooks.built.add(self)

    return build_and_note


def _meeting(hooks: ProcessHooks, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `__call__` of models that passes forwards with gradients to `meet` until a model was met in training."""

    def meet_and_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not compat.is_compiling() and torch.is_grad_enabled() and self not in hooks.met:
            hooks.meet(self, (*args, *kwargs.values()))
        return call(self, *args, **kwargs)

    return meet_and_call


def _around(function: Callable[..., Any], training_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `function` with the trainer, its own `training_step`, and the arguments."""

    @functools.wraps(training_step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, functools.partial(training_step, self), *args, **kwargs)

    return run
