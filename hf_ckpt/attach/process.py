"""Hooks on classes, for every model of the process: PreTrainedModel, `Accelerator.prepare`, `Trainer.training_step`.

`hf_ckpt.install()` without a model sets them, and `hf_ckpt.uninstall()` gives every class its own methods back.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import detach, driven_by_the_whole
from hf_ckpt.attach.hooks import is_trained, say_part
from hf_ckpt.attach.record import enable_calls, installation
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import base_model, find_blocks


class ProcessHooks:
    """The methods of other packages' classes that were replaced, and the models that were enabled through them."""

    def __init__(self, install: Callable[[nn.Module], object]) -> None:
        self.install = install
        """Puts a record on a model that has none, so that hf_ckpt answers its enable calls."""
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Base models that were enabled through these hooks."""
        self.calls_before = enable_calls()
        """How many enable calls had been answered in this process before."""
        self.replaced: list[tuple[type, str, Any]] = []
        """(class, method name, the method that was there) in the order of replacing."""

    def replace(self, owner: type, name: str, function: Callable[..., Any]) -> None:
        """Put `function` in the place of a class's method, until `undo`."""
        self.replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, functools.wraps(vars(owner)[name])(function))

    def undo(self) -> None:
        """Put every method back, and take hf_ckpt off every model that was enabled through these hooks."""
        for owner, name, original in reversed(self.replaced):
            setattr(owner, name, original)
        for model in list(self.models):
            detach(model)

    def enable(self, base: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Answer an enable call of a model: install on it if nothing is installed, then call its own enable hook.

        A part of a model whose plan is enabled is left alone. Raises what `install` and the enable hook raise
        (`SpecError`, for one); a model that had no record is then left without one.
        """
        if driven_by_the_whole(find_blocks(base)):
            say_part(base)
            return
        fresh = installation(base) is None
        if fresh:  # a record that is there already is the newer request
            self.install(base)
        try:
            vars(base_model(base))[compat.ENABLE_NAMES[0]](*args, **kwargs)
        except HfCkptError:
            if fresh:
                detach(base)
            raise
        self.models.add(base)


_everywhere: ProcessHooks | None = None


def hook_process(
    install: Callable[[nn.Module], object],
    *,
    enable_when_prepared: bool = False,
    around_training_step: Callable[..., Any] | None = None,
) -> None:
    """Let hf_ckpt answer the enable calls of every model of the process, until `unhook_process`.

    Args:
        install: puts a record on the model that it is given; called at the first enable call of each model.
        enable_when_prepared: also enable every trainable model that `Accelerator.prepare` gets.
        around_training_step: what every Trainer runs in the place of its `training_step`, called with the trainer, that
            method, and the arguments.
    """
    global _everywhere
    unhook_process()
    hooks = ProcessHooks(install)

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


def unhook_process() -> None:
    """Undo `hook_process`: give every class its methods back, and take hf_ckpt off the models enabled through them."""
    global _everywhere
    if _everywhere is not None:
        _everywhere.undo()
        _everywhere = None


def enable_calls_since_hooked() -> int:
    """Return how many enable calls hf_ckpt has answered, on any model, since `hook_process`; 0 without it."""
    return 0 if _everywhere is None else enable_calls() - _everywhere.calls_before


def _enabling(hooks: ProcessHooks, prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that enables hf_ckpt on every model among its arguments, and then calls `prepare`."""

    def enable_and_prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        for model in () if kwargs.get("evaluation_mode") else (*args, *kwargs.values()):
            if isinstance(model, nn.Module) and _can_enable(model):
                hooks.enable(base_model(model))
        return prepare(self, *args, **kwargs)

    return enable_and_prepare


def _around(function: Callable[..., Any], training_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `function` with the trainer, its own `training_step`, and the arguments."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, functools.partial(training_step, self), *args, **kwargs)

    return run


def _can_enable(model: nn.Module) -> bool:
    """Return whether this is a trainable Hugging Face model, plain or wrapped, that is not enabled yet."""
    if not any(isinstance(module, compat.PreTrainedModel) for module in model.modules()):
        return False
    record = installation(model)
    return (record is None or not record.enabled) and is_trained(model)
