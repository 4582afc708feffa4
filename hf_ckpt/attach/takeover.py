"""Blocks that something else compiles one by one, although the plan has hf_ckpt compile them.

accelerate's regional compilation does, and so may the user. Only one compiler can decide what a block keeps, so the
outer one is put aside from the first training forward on, until the plan is taken off. The head and what else lies
outside the blocks is left to it.
"""

from __future__ import annotations

import logging

from torch import nn

from hf_ckpt import compat
from hf_ckpt.attach.record import FUNCTION, TakenOver
from hf_ckpt.engines.region import Region
from hf_ckpt.logs import warn_once
from hf_ckpt.models.blocks import plain_name

log = logging.getLogger(__name__)


def take_over(owner: nn.Module, taken_over: TakenOver) -> None:
    """Let nobody but hf_ckpt compile the blocks of a stack, which `owner` runs, where the plan has it compile them."""
    around: dict[str, list[nn.Module]] = {}
    for name, module in owner.named_modules():
        around.setdefault(plain_name(name), []).append(module)
    blocks = 0
    for modules in around.values():
        region = vars(modules[-1]).get(FUNCTION)  # what wraps a block comes before it
        if isinstance(region, Region) and region.compiles_block:
            blocks += sum(_run_eagerly(module, taken_over) for module in modules) > 0
    if blocks:
        warn_once(
            log,
            "hf_ckpt: %d blocks in %s are compiled by hf_ckpt, with the shares of its plan, and no longer by what has "
            "compiled them one by one (accelerate's regional compilation, or module.compile()), whose options do not "
            "count for them. What lies outside the blocks stays as it is.",
            blocks,
            compat.plain_class(owner).__name__,
        )


def _run_eagerly(module: nn.Module, taken_over: TakenOver) -> bool:
    """Have a module run in eager mode, if it is compiled by itself; return whether it was."""
    attributes = compat.eager_call(module)
    if attributes:
        taken_over.before.append((module, {name: vars(module)[name] for name in attributes}))
        vars(module).update(attributes)
    return bool(attributes)
