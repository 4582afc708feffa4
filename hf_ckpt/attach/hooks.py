"""The callables on a model while a plan is enabled: what all have in common, and those that replace methods.

They are classes, not closures, so that they can be pickled, and so that `deepcopy` of a model makes them refer to the
copy.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.puts import Weak, is_part
from hf_ckpt.attach.record import RECORD, Installation
from hf_ckpt.engines.head.chunked import chunked, why_head_stays_whole
from hf_ckpt.engines.head.logits import Logits
from hf_ckpt.logs import warn_once

log = logging.getLogger(__name__)


def is_trained(module: nn.Module) -> bool:
    """Return whether any parameter of a module requires gradients."""
    return any(parameter.requires_grad for parameter in module.parameters())


class ModelHook(Weak):
    """Base of the callables that are attributes or hooks of a model. The first of its arguments is the model."""

    @property
    def base(self) -> compat.transformers.PreTrainedModel:
        """The model, as long as it exists."""
        base: compat.transformers.PreTrainedModel = self._held[0]()
        return base

    @property
    def record(self) -> Installation | None:
        """The record on the model; None without one, or if the model no longer exists, although a part of it does."""
        # Not by `installation`, which looks for the model in its wrappers.
        record: Installation | None = getattr(self._held[0](), RECORD, None)
        return record


class Instead(ModelHook):
    """The `forward` of a module that an engine replaces.

    Args:
        base: the model.
        module: the module.
        function: called as `function(module, forward, *args, **kwargs)` with the module's own forward.
        before: what something else had put in the forward's place before, such as Liger's kernels; None if nothing.
    """

    @property
    def before(self) -> Any:
        """What was in its place before; None if nothing."""
        return self.arguments()[3]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        _, module, function, before = self.arguments()
        return function(module, before or functools.partial(type(module).forward, module), *args, **kwargs)


INPUT_GRADIENTS = ("enable_input_require_grads", "disable_input_require_grads")
"""Methods of a model that add hooks to its embeddings, and remove them."""


class Skipped(ModelHook):
    """Replaces a method while a plan is enabled, and does nothing.

    Such methods are `enable_input_require_grads` and its counterpart, because non-reentrant checkpointing needs no
    input that requires gradients; and the enable methods of models inside the planned one, which would replace the
    functions of its blocks. sentence-transformers, for example, calls the enable method of every module of a model.

    Args:
        base: the model with the plan.
        module: the model whose method it is: `base`, or one inside it.
        name: the name of the method.
    """

    @property
    def is_in_force(self) -> bool:
        """Whether the plan is enabled, and the model is still a part of the planned one; a copy of a part is none."""
        base, module, _ = self.arguments()
        record = self.record
        return record is not None and record.enabled and is_part(module, base)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Log that nothing is done."""
        _, module, name = self.arguments()
        if self.is_in_force:
            log.info("%s() does nothing while a plan of hf_ckpt is enabled.", name)
        else:
            getattr(type(module), name)(module, *args, **kwargs)


class SwitchesOff(Skipped):
    """Replaces a disable method of a model inside the planned one while a plan is enabled: it says what it does."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Switch the blocks of the inner model off, as its class does."""
        base, module, name = self.arguments()
        if self.is_in_force:
            text = (
                "hf_ckpt: %s was disabled, and with it blocks of %s: its plan has no effect there until it is enabled."
            )
            warn_once(log, text, type(module).__name__, type(base).__name__)
        getattr(type(module), name)(module, *args, **kwargs)


# --- the head ---------------------------------------------------------------------------------------------------------

WHOLE = "hf_ckpt: the head of %s is not run in chunks, because %s."
"""Warning of a head that runs as a whole, although its plan says chunks: the class of the model, and why."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def warn_of_graph() -> bool:
    """Warn once of a part of a plan that has no effect in a graph. torch.compile calls this when it traces a call."""
    warn_once(
        log,
        "hf_ckpt: part of the plan has no effect, because torch.compile compiles the model or head: remove "
        '`torch_compile` (or accelerate\'s dynamo), or compile blocks with `compile: "blocks"`.',
    )
    return True


class HeadForward(ModelHook):
    """The `forward` of the head while a plan that chunks it is enabled.

    It runs the head in chunks in training forwards. Otherwise, and if chunks are not possible, it runs it as a whole.

    Args:
        base: the model.
        head: its head.
    """

    stays: bool | None = None
    """Whether the model's parameters stay on their device, unsharded; None before the first training forward."""

    def serves_another(self, base: nn.Module, module: nn.Module) -> bool:
        """Whether the head is shared with another model than `base`, whose plan is enabled."""
        if self.base is base or self.record is None or not self.record.enabled:
            return False
        return is_part(module, self.base)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the logits [..., vocabulary] of hidden states [..., hidden size]."""
        _, head = self.arguments()
        record = self.record
        # Of the class: the instance's `forward` is this hook.
        run = functools.partial(type(head).forward, head)
        if (
            record is None or not record.enabled
        ):  # something else has put this hook inside its own, and outlives the plan
            return run(*args, **kwargs)
        if not (torch.is_grad_enabled() and head.training) or kwargs or len(args) != 1:
            return run(*args, **kwargs)
        if compat.torch.is_compiling():  # the compiler decides what its graph keeps
            record.heads.note("as a whole, in a graph of torch.compile", is_in_graph=True)
            warn_of_graph()
            return run(*args)
        record.heads.missed = 0
        if self.stays is None:  # not when the plan is enabled: FSDP and ZeRO-3 shard parameters after that
            self.stays = compat.distributed.parameters_stay(self.base)
        # Chunks read the weight when the loss is computed, after the head's forward. By then, it may be freed again.
        sharded = "its parameters are sharded or moved (FSDP, ZeRO-3, tensor parallelism, device maps)"
        reason = why_head_stays_whole(head) if self.stays else sharded
        if reason is not None:
            warn_once(log, WHOLE, type(self.base).__name__, reason)
            return run(*args)
        result = chunked(head, run, *args, record.plan.head)
        if isinstance(result, Logits):
            record.heads.calls += 1
            record.heads.note(f"chunks of {result.call.tokens} tokens")
            result.call.when_read_whole = record.heads.read_whole
        else:
            few = "as a whole, because with so few tokens, chunks would save nothing"
            record.heads.note(few, is_whole_by_choice=record.plan.head == "auto")
        return result


# --- copies -----------------------------------------------------------------------------------------------------------


def remove_methods(base: nn.Module, module: nn.Module) -> None:
    """Give a module of a model its own methods back, if it has come with those of a plan."""
    attributes = vars(module)
    forward = attributes.get("forward")
    if isinstance(forward, Instead):
        del attributes["forward"]
        if forward.before is not None:
            attributes["forward"] = forward.before
    elif isinstance(forward, HeadForward) and not forward.serves_another(base, module):
        del attributes["forward"]
    for name in (*compat.transformers.ENABLE_NAMES, *compat.transformers.DISABLE_NAMES, *INPUT_GRADIENTS):
        if isinstance(attributes.get(name), Skipped):
            del attributes[name]
