"""Replaced methods of classes, for every model of the process.

They are the enable methods of PreTrainedModel, its constructor and its calls. `hf_ckpt.install()` without a model
replaces them, and `hf_ckpt.uninstall()` restores them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.attach import EnableHook, detach
from hf_ckpt.attach.hooks import Skipped, is_trained
from hf_ckpt.attach.record import RECORD, Installation, record_on
from hf_ckpt.attach.switches import is_on
from hf_ckpt.errors import HfCkptError, NoBlocksError
from hf_ckpt.logs import tell, warn_once
from hf_ckpt.models.blocks import outermost_models

log = logging.getLogger(__name__)


class Replaced(contextlib.ExitStack):
    """Replaced methods of classes or objects, until `close`."""

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a method by `function(original, *args, **kwargs)` until `close`."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        # Afterwards, an owner that had inherited the method inherits it again.
        self.enter_context(mock.patch.object(owner, name, method))


class ProcessHooks(Replaced):
    """The replaced methods of other packages' classes, by which models are enabled.

    Methods whose first argument is `original` take the place of a class's method, which they get there.

    Args:
        install: puts a record on a model; called at the first enable call of each model.
        enable_when_trained: also enable every trainable model when its first training forward begins. Options of an
            enable call replace the spec that `install` has put there, which is said then.
    """

    def __init__(self, install: Callable[[nn.Module], object], *, enable_when_trained: bool) -> None:
        super().__init__()
        EnableHook.calls = 0
        self.install = install
        self.says_what_wins = enable_when_trained
        self.built: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Every PreTrainedModel built since, including those inside other models."""
        self.met: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models that have run a training forward, for which it is decided whether a plan is enabled."""
        for name in compat.transformers.ENABLE_NAMES:
            self.replace(compat.transformers.PreTrainedModel, name, self.enable_method)
        if enable_when_trained:
            self.replace(compat.transformers.PreTrainedModel, "__init__", self.build)
            # Not by global module hooks, with which torch takes the slow path through every module. The wrapper that
            # torch.compile makes calls a compiled function in place of the model.
            for owner in (compat.transformers.PreTrainedModel, compat.compiler.compiled_module_class()):
                self.replace(owner, "__call__", self.call)

    def enable_method(self, original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
        """Handle an enable call of a model. A model without known blocks has its own method called."""
        try:
            self.enable(model, *args, **kwargs)
        except NoBlocksError as error:  # the model may checkpoint in its own forward
            name = type(model).__name__
            warn_once(log, "hf_ckpt does not checkpoint %s, whose own code may do so: %s", name, error)
            options = next((value for value in (*args, *kwargs.values()) if isinstance(value, dict)), {})
            # transformers passes all keys to `torch.utils.checkpoint`, which refuses those of a spec.
            original(model, {key: options[key] for key in compat.transformers.TORCH_OPTIONS if key in options} or None)
            EnableHook.calls += 1

    def build(self, original: Callable[..., None], model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Record a model after its constructor has run."""
        original(model, *args, **kwargs)
        self.built.add(model)

    def call(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Pass forwards with gradients to `meet`, until the model was met in training."""
        # In a graph, the call of the wrapper that torch.compile makes has come here before.
        if not compat.torch.is_compiling() and torch.is_grad_enabled() and model not in self.met:
            self.meet(model, (*args, *kwargs.values()))
        return original(model, *args, **kwargs)

    def enable(self, base: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Handle an enable call of a model: install on it if nothing is installed, then call its enable hook.

        Raises what `install` and the enable hook raise (such as `SpecError`); a model that had no record then has none.
        """
        method = vars(base).get(compat.transformers.ENABLE_NAMES[0])
        if isinstance(method, Skipped) and method.is_in_force:
            return  # a part of a model whose plan is enabled: its own plan would replace functions of that one
        is_new = record_on(base) is None
        if is_new:  # a record that exists was asked for after these hooks
            self.install(base)
        record: Installation = vars(base)[RECORD]
        record.is_of_process |= is_new
        spec = record.spec
        try:
            vars(base)[compat.transformers.ENABLE_NAMES[0]](*args, **kwargs)
        except HfCkptError:
            if is_new:
                detach(base)
            raise
        if is_new and self.says_what_wins and record.spec != spec:
            tell("hf_ckpt: options of the script change --spec: %s, not %s.", record.spec.to_dict(), spec.to_dict())

    def meet(self, module: nn.Module, inputs: Iterable[Any]) -> None:
        """Enable a model whose forward begins with gradients on, if it is trained and nobody has enabled it.

        Args:
            module: a PreTrainedModel, or a model that torch.compile has wrapped.
            inputs: of the forward. If one requires gradients, that is training, too: of prompts, for example.
        """
        bases = list(map(self._outermost_around, outermost_models(module)))
        if not bases:  # a part of a model, which is compiled by itself
            self.met.add(module)
            return
        trained = any(map(is_trained, bases)) or any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
        # Copies of nn.DataParallel have no parameters to plan for, and live for one forward.
        if not (trained and module.training) or compat.torch.is_replica(module):
            return  # it may be trained later
        for base in bases:
            record = record_on(base)
            try:
                if record is None or not record.enabled:
                    self.enable(base)
            except NoBlocksError as error:  # not a reason to end the training of other models
                warn_once(log, "%s is trained without checkpointing: %s", type(base).__name__, error)
        self.met.update([module, *bases])

    def _outermost_around(self, model: nn.Module) -> nn.Module:
        """Return the largest model that holds this one, or the model itself.

        PEFT calls a model's `forward` past all hooks, so that the first call seen is that of a model inside it.
        """
        around = [other for other in list(self.built) if model in set(other.modules())]
        return max((model, *around), key=lambda other: len(list(other.modules())))


def install_on_enabled(install: Callable[[nn.Module], object]) -> None:
    """Install on every model of the process that is enabled already, or that has a plan from an earlier call.

    Models on which the user has installed by `install(model)` keep their plan.
    """
    models = _models()
    parts = {id(part) for model in models for part in model.modules() if part is not model}
    for model in models:
        record = record_on(model)
        is_ours = is_on(*model.modules()) if record is None else record.is_of_process
        if id(model) in parts or not is_ours:
            continue
        try:
            install(model)
        except HfCkptError as error:  # a model of an earlier cell of a notebook, for example
            warn_once(log, "hf_ckpt: %s keeps what it has: %s", type(model).__name__, error)
        else:
            vars(model)[RECORD].is_of_process = True


def detach_everywhere() -> None:
    """Remove hf_ckpt from every model that got its plan without an `install(model)`, and from copies of such models."""
    for model in _models():
        record = record_on(model)
        if record is not None and record.is_of_process:
            detach(model)


def _models() -> list[compat.transformers.PreTrainedModel]:
    """Return every Hugging Face model of the process."""
    # By what refers to their classes. A list of all objects would also refer to the tuples that other threads are
    # filling just then, which fails there. By their types: proxies run code when they are asked for their class.
    base = compat.transformers.PreTrainedModel
    return [value for value in gc.get_referrers(*_classes_of(base)) if issubclass(type(value), base)]


def _classes_of(base: type) -> Iterator[type]:
    """Yield a class and all that derive from it; some of them several times."""
    yield base
    derived: list[type] = base.__subclasses__()
    for kind in derived:
        yield from _classes_of(kind)


everywhere = contextlib.ExitStack()
"""Restores the methods that `hf_ckpt.install()` without a model has replaced."""
