"""Find modules inside blocks that engines treat by themselves."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any

from torch import nn

from hf_ckpt import compat
from hf_ckpt.models.blocks import FoundBlocks, outermost
from hf_ckpt.models.families import CHEAP_EVERYWHERE, FAMILIES, GENERIC


def cheap_modules(blocks: FoundBlocks, names: Collection[str]) -> tuple[nn.Module, ...]:
    """Return the small modules inside the named blocks that `selective` may run again as a whole, each once."""
    inside = (module for name in names for module in blocks.modules[name].modules())
    return tuple(dict.fromkeys(module for module in inside if _is_cheap(module, blocks.family)))


def _is_cheap(module: nn.Module, family: str) -> bool:
    """Whether a module may be run again, in a model of this family.

    Beside named modules, these are transformers' own norms that hold nothing but parameters.
    """
    row = FAMILIES.get(family, GENERIC)
    kind = compat.distributed.plain_class(module)
    if kind.__name__ in {*CHEAP_EVERYWHERE, *row.cheap}:
        return True
    # Only code of transformers is trusted by its name. A norm with buffers, such as a batch norm, may update them in
    # each forward; one with children may be anything.
    is_norm = kind.__name__.lower().endswith("norm") and kind.__module__.startswith("transformers.models.")
    return is_norm and not list(module.children()) and not list(module.buffers(recurse=False))


def routers(block: nn.Module) -> tuple[nn.Module, ...]:
    """Return the outermost modules inside a block whose code calls `topk` or `argmax`: they choose experts.

    Adapters call it to choose among their own weights.
    """
    return tuple(module for _, module in outermost(block, _is_router))


def _is_router(module: nn.Module) -> bool:
    kind: Any = type(module)
    return not compat.peft.is_adapter(kind) and _chooses(kind)


@functools.cache
def _chooses(kind: Any) -> bool:
    """Whether a class has a method that calls `topk` or `argmax`."""
    # By their code, because each family has a router class of its own, and new ones come with every release.
    methods = [value for base in kind.__mro__ for value in vars(base).values() if inspect.isfunction(value)]
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]
    return any({"topk", "argmax"} & {*code.co_names} for code in codes if code is not None)


def feed_forwards(block: nn.Module) -> tuple[str, ...]:
    """Return the names of the outermost modules inside a block that may be feed-forwards.

    They take one tensor and nothing else, and have several matrices. Attention takes more, and norms have no matrix.
    Experts are left out, with everything in the same child of the block, because a router sends tokens to them.
    """
    all_routers = set(routers(block))
    with_experts = [child for child in block.children() if not all_routers.isdisjoint(child.modules())]
    left_out = {inner for child in with_experts for inner in child.modules()}

    def is_one(module: nn.Module) -> bool:
        if module in left_out or type(module).forward is nn.Module.forward:  # a list of modules has no forward
            return False
        matrices = sum(parameter.dim() > 1 for parameter in module.parameters())
        return matrices > 1 and len(compat.transformers.forward_parameters(module)) == 1

    return tuple(name for name, _ in outermost(block, is_one))
