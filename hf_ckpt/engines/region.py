"""The interface of every engine: the function that a block calls instead of its forward, and hooks.

`make` and `hooks_for` look up the engine of an action in `spec.actions.ACTIONS`.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from torch import nn

from hf_ckpt.engines.host_memory import Mover
from hf_ckpt.models.blocks import FoundBlocks
from hf_ckpt.spec.actions import ACTIONS, Action


class Region:
    """The checkpointing function of one block, called as `region(fn, *args)` with the block's own forward `fn`.

    It counts its work. It refers to neither the block nor the model. The block refers to it, so that would be a
    reference cycle, which keeps a deleted model in memory until the garbage collector runs.
    """

    block: str
    """Qualified name of the block."""
    forwards: int = 0
    """Number of calls that were checkpointed."""
    recomputed: int = 0
    """How often the block, or operations and modules inside it, were run again in backward."""
    in_graph: bool = False
    """Whether it was called from a graph of torch.compile, where nothing can be counted."""
    keeps_choices: bool = False
    """Whether routers choose the same experts in a recomputation as in the forward."""
    compiles_block: bool = False
    """Whether it compiles the block by itself."""
    left_to_others: bool = False
    """Whether it should compile the block, but something else compiles a graph around it."""
    runs_block_again: bool = True
    """Whether backward runs the block's own forward again."""
    parameters_stay: bool = False
    """Whether every parameter stays on its device, unsharded, throughout a step, as far as known. The first forward of
    the stack sets it."""
    takes_caches: bool = False
    """Whether the block may get a KV cache, which a second forward would write twice."""
    runs_whole: bool = False
    """Whether no feed-forward of the block runs in tiles, although the action asks for it."""
    holds_input: bool = False
    """Whether the last forward held hidden states that the action makes again."""
    moved_bytes: int = 0
    """Bytes that the last forward moved to host memory."""
    dropped_tensors: int = 0
    """Number of tensors that autograd saved in the last forward, and that backward rebuilds one by one."""
    saved: dict[tuple[str, bool], int] | None = None
    """(name of a tensor, whether it was dropped) -> bytes in the first forward under `selective`; else None."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward, and return its outputs. Every engine implements this."""
        raise TypeError(f"{type(self).__name__} is no engine: it has no __call__ of its own.")


@dataclasses.dataclass(frozen=True)
class Request:
    """What an engine needs to know to make the function of a block."""

    block: str
    """Qualified name of the block."""
    action: Action
    """What to do with its activations."""
    preserve_rng_state: bool = True
    """Whether a recomputation draws the same random numbers; an argument of `torch.utils.checkpoint`."""
    determinism_check: str = "default"
    """How to compare a recomputation with the forward; an argument of `torch.utils.checkpoint`."""
    mover: Mover | None = None
    """Moves tensors to host memory and back. None for the last block of a stack, whose backward comes first."""

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments for `torch.utils.checkpoint`."""
        return {"preserve_rng_state": self.preserve_rng_state, "determinism_check": self.determinism_check}


class Hook(NamedTuple):
    """A forward hook that an engine needs on a module, or what replaces the module's forward."""

    module: nn.Module
    """The module to register the hook on."""
    function: Callable[..., Any]
    """The hook itself."""
    when: str
    """`before` the forward; `after` it, even if it raises an error; or `instead` of it, called as `function(module,
    forward, *args, **kwargs)` with the module's own forward."""
    with_kwargs: bool = False
    """Whether the hook also gets the keyword arguments of the forward."""


def make(request: Request) -> Region:
    """Make the checkpointing function of a block, with the engine of its action."""
    engine: Callable[[Request], Region] = pkgutil.resolve_name(ACTIONS[request.action.kind].engine)
    return engine(request)


def hooks_for(regions: Collection[Region], blocks: FoundBlocks) -> Iterator[Hook]:
    """Yield the hooks that the engines of these regions need on the modules of a model.

    A block may have several regions, of alternating plans. Hooks of a region that is not on its block do nothing.
    """
    for record in ACTIONS.values():
        if record.hooks:
            yield from pkgutil.resolve_name(record.hooks)(regions, blocks)
