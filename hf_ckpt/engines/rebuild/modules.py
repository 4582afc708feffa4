"""Hooks on small modules that run again as a whole: they record each call on the tape of the block that runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.rebuild.graph import next_sequence_number
from hf_ckpt.engines.rebuild.replay import Replay
from hf_ckpt.engines.rebuild.tape import Tape
from hf_ckpt.engines.rebuild.values import DEEPEST, fix_strides
from hf_ckpt.engines.running import running


def enter_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a small module that may be run again as a whole: record its call on the block's tape."""
    tape: Tape | None = None if compat.torch.is_compiling() else running.tape
    if tape is None or tape.replay or kwargs or len(args) != 1 or not torch.is_grad_enabled():
        return
    if module._modules:  # `parametrize` has put modules into it, which are gone when it would run again
        return
    # Another hook may change the input or the output, and accelerate's may fetch the weights for as long as the forward
    # runs, so operations of such a module are rebuilt one by one. Global ones run between it and `leave_module`.
    alone = len(module._forward_hooks) == 1 and len(module._forward_pre_hooks) == 1
    alone = alone and not compat.hooks.global_forward_hooks
    if tape.parts is not None:
        tape.forget_freed(next_sequence_number())
        tape.parts.add(*module._parameters.values())
    if alone and compat.distributed.ACCELERATES_HOOK not in vars(module) and isinstance(args[0], torch.Tensor):
        source = tape.graph.value_of(args[0])
        if tape.graph.has_unknown:
            fix_strides(source, args[0])
        tape.replay = Replay(tape.region.work, module, source, args[0], stay=tape.region.parameters_stay)


def leave_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a small module that may be run again: from now on its output can be rebuilt."""
    tape: Tape | None = None if compat.torch.is_compiling() else running.tape
    if tape is None or tape.replay is None or module is not tape.replay.module:
        return
    replay = tape.replay
    tape.replay = None
    # If it saved nothing, other hooks packed what it saved, and it would save more when it is run again.
    has_run = isinstance(output, torch.Tensor) and output.grad_fn is not None and replay.saved
    if has_run and replay.source.depth < DEEPEST:
        tape.graph.values[output.grad_fn, output.output_nr] = replay.output(output)
