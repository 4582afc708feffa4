"""Replaced methods of classes, for every model of the process.

They are the enable methods of PreTrainedModel, its constructor and its calls, and `Trainer.training_step`.

`hf_ckpt.install()` without a model replaces them, and `hf_ckpt.uninstall()` restores them.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import EnableHook, detach
from hf_ckpt.attach.hooks import Skipped, is_trained
from hf_ckpt.attach.record import Absent, installation
from hf_ckpt.errors import HfCkptError, NoBlocksError
from hf_ckpt.logs import tell, warn_once
from hf_ckpt.models.blocks import base_model, outermost_models

log = logging.getLogger(__name__)


class Replaced:
    """Replaced methods of classes or objects, until `undo`."""

    def __init__(self) -> None:
        self.replaced: list[tuple[Any, str, Any]] = []
        """(class or object, method name, its own method or `Absent.ABSENT`) in the order of replacement."""

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a method by `function(own, *args, **kwargs)`, with that method as `own`, until `undo`."""
        own = getattr(owner, name)
        self.replaced.append((owner, name, vars(owner).get(name, Absent.ABSENT)))

        @functools.wraps(own)
        def method(*args: Any, **kwargs: Any) -> Any:
            return function(own, *args, **kwargs)

        setattr(owner, name, method)

    def undo(self) -> None:
        """Restore every method."""
        while self.replaced:
            owner, name, original = self.replaced.pop()
            if original is Absent.ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


class ProcessHooks(Replaced):
    """The replaced methods of other packages' classes, and the models that were enabled through them.

    Methods whose first argument is `own` take the place of a class's method, which they get as `own`.

    Args:
        install: puts a record on a model that has none, so that hf_ckpt handles its enable calls.
        says_what_wins: whether to say that options of an enable call replace the spec that `install` has put there.
    """

    def __init__(self, install: Callable[[nn.Module], object], *, says_what_wins: bool = False) -> None:
        super().__init__()
        self.install = install
        self.says_what_wins = says_what_wins
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Base models that were enabled through these hooks."""
        self.calls_before = EnableHook.calls
        self.built: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Every PreTrainedModel built since, including those inside other models."""
        self.met: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models that have run a training forward, for which it is decided whether a plan is enabled."""

    def undo(self) -> None:
        """Restore every method, and remove hf_ckpt from every model that was enabled through these hooks."""
        super().undo()
        for model in list(self.models):
            detach(model)

    def enable_method(self, own: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
        """Handle an enable call of a model. A model without known blocks has its own method called."""
        try:
            self.enable(model, *args, **kwargs)
        except NoBlocksError as error:  # the model may checkpoint in its own forward
            name = type(model).__name__
            warn_once(log, "hf_ckpt leaves %s to its own code, which may checkpoint by itself: %s", name, error)
            asked = next((value for value in (*args, *kwargs.values()) if isinstance(value, dict)), {})
            own(model, {key: asked[key] for key in compat.transformers.TORCH_OPTIONS if key in asked} or None)

    def build(self, own: Callable[..., None], model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Record a model after its constructor has run."""
        own(model, *args, **kwargs)
        self.built.add(model)

    def call(self, own: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Pass forwards with gradients to `meet`, until the model was met in training."""
        if not compat.torch.is_compiling() and torch.is_grad_enabled() and model not in self.met:
            self.meet(model, (*args, *kwargs.values()))
        return own(model, *args, **kwargs)

    def enable(self, base: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Handle an enable call of a model: install on it if nothing is installed, then call its enable hook.

        Raises what `install` and the enable hook raise (such as `SpecError`); a model that had no record then has none.
        """
        if isinstance(vars(base_model(base)).get(compat.transformers.ENABLE_NAMES[0]), Skipped):
            return  # a part of a model whose plan is enabled
        fresh = installation(base) is None
        if fresh:  # an existing record is the newer request
            self.install(base)
        record: Any = installation(base)
        spec = record.spec
        try:
            vars(base_model(base))[compat.transformers.ENABLE_NAMES[0]](*args, **kwargs)
        except HfCkptError:
            if fresh:
                detach(base)
            raise
        self.models.add(base)
        if fresh and self.says_what_wins and record.spec != spec:
            tell("hf_ckpt: options of the script replace --spec: %s, not %s.", record.spec.to_dict(), spec.to_dict())

    def meet(self, module: nn.Module, inputs: Iterable[Any]) -> None:
        """Enable a model whose forward begins with gradients on, if it is trained and nobody has enabled it.

        Args:
            module: a PreTrainedModel, or a model that torch.compile has wrapped.
            inputs: of the forward. If one requires gradients, that is training, too: of prompts, for example.
        """
        # PEFT calls a model's `forward` past all hooks, so the outermost model that holds it is the one to enable.
        bases = []
        for inner in outermost_models(module):
            around = [other for other in list(self.built) if any(part is inner for part in other.modules())]
            bases.append(max(around, key=lambda other: sum(1 for _ in other.modules()), default=inner))
        if not bases:  # a part of a model, which is compiled by itself
            self.met.add(module)
            return
        trained = any(map(is_trained, bases)) or any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        if not (trained and module.training) or compat.torch.is_replica(module):
            return
        for base in bases:
            record = installation(base)
            try:
                if record is None or not record.enabled:
                    self.enable(base)
            except NoBlocksError as error:  # not a reason to end the training of other models
                warn_once(log, "%s is trained without checkpointing: %s", type(base).__name__, error)
        self.met.update([module, *bases])


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
        enable_when_trained: also enable every trainable model when its first training forward begins.
        around_training_step: replaces every Trainer's `training_step`. It is called with the trainer, that method, and
            the arguments.
    """
    global _everywhere
    unhook_process()
    hooks = ProcessHooks(install, says_what_wins=enable_when_trained)
    for name in compat.transformers.ENABLE_NAMES:
        hooks.replace(compat.transformers.PreTrainedModel, name, hooks.enable_method)
    if enable_when_trained:
        hooks.replace(compat.transformers.PreTrainedModel, "__init__", hooks.build)
        for owner in (compat.transformers.PreTrainedModel, compat.compiler.compiled_module_class()):
            hooks.replace(owner, "__call__", hooks.call)
    if around_training_step is not None:

        def around(own: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
            return around_training_step(trainer, functools.partial(own, trainer), *args, **kwargs)

        from transformers import Trainer  # slow to import

        hooks.replace(Trainer, "training_step", around)
    _everywhere = hooks


def unhook_process() -> None:
    """Undo `hook_process`: restore the methods of every class, and remove hf_ckpt from models enabled through them."""
    global _everywhere
    if _everywhere is not None:
        _everywhere.undo()
        _everywhere = None


def enable_calls_since_hooked() -> int:
    """Return how many enable calls hf_ckpt has handled, on any model, since `hook_process`; 0 without it."""
    return 0 if _everywhere is None else EnableHook.calls - _everywhere.calls_before
