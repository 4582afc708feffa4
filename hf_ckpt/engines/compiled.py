"""`compiled`: torch.compile runs the block, and its partitioner keeps as many results as a share allows.

Blocks of one class in one stack share their graphs, so that the time to compile does not grow with depth. The share is
the partitioner's `activation_memory_budget`: 0 keeps only the inputs, 1 keeps whatever makes the step fastest.
https://docs.pytorch.org/docs/stable/torch.compiler.html

A graph contains the hooks that modules inside the block had when it was compiled. torch does not check whether hooks
were added or removed later, and blocks that share a graph may have different hooks. So hooks inside are an error.

By default the partitioner may run an operation that draws random numbers again in backward, where it draws different
ones: with a share below 1, a block with dropout got the gradients of another mask (seen in torch 2.8, 2.13 and 2.15).
hf_ckpt always keeps random draws, or their seeds, and the experts that routers choose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.region import Region, Request
from hf_ckpt.errors import HfCkptError, reason_of


class CompiledRegion(Region):
    """The function of a block that is compiled by itself.

    While a dispatch mode has to see every operation, such as torch's counter of operations, it runs as `full`.
    """

    compiles_block = True
    keeps_choices = FullRegion.keeps_choices  # while it runs as `full`

    def __init__(self, block: str, share: float, **options: Any) -> None:
        self.block = block
        self.share = share
        self.without_hooks = -1
        """The process's count of registered hooks when the block was last seen to have none inside."""
        self.eager = FullRegion(block, **options)
        """Runs the block under dispatch modes."""

    @property
    def recomputed(self) -> int:  # type: ignore[override]
        """How often the block was recomputed in eager mode. Recomputation inside graphs is not counted."""
        return self.eager.recomputed

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward, compiled.

        Raises `HfCkptError` if there is a hook on a module inside the block, or if the block does not compile.
        """
        if not torch.is_grad_enabled():
            return fn(*args)
        if compat.torch.is_compiling():
            # Something compiles a graph around the block, for example the whole model. Its partitioner decides then.
            self.in_graph = True
            self.left_to_others = True
            return fn(*args)
        fn, args = compat.transformers.block_call(fn, args)
        module = compat.transformers.module_of(fn)
        self.forwards += 1
        # A mode that sees every operation, such as a count of them, would see none inside a graph.
        if compat.modes.is_seen_by_modes():
            return self.eager(fn, *args)
        if module is not None:
            self._refuse_hooks(fn, module)
        kind: Any = None if module is None else type(module)
        try:
            run = _compiled(self.block.rpartition(".")[0], kind, self.share)
            output = run(*compat.compiler.call_parts(fn), args)
        except Exception as error:
            if not compat.compiler.is_compile_error(error):  # the block's own error, such as out of memory
                raise
            cause = getattr(error, "inner_exception", error)  # says which compiler is missing, for example
            why = reason_of(cause)
            raise HfCkptError(f"block {self.block!r} does not compile ({why}). Leave `compile` out.") from error
        self.in_graph = True
        return output

    def _refuse_hooks(self, fn: Callable[..., Any], module: nn.Module) -> None:
        """Raise `HfCkptError` for a hook inside the block. Searched again only after some hook was registered."""
        # A walk over all modules in each forward would take longer than the call of the graph.
        registered = compat.hooks.registered_hooks()
        if registered == self.without_hooks:
            return
        # The block is called with its own hooks until transformers 5.17.
        called_whole = compat.compiler.call_parts(fn)[0].__name__ != "forward"
        inside = (part for part in module.modules() if called_whole or part is not module)
        hooked = next((f"a `{type(part).__name__}` inside" for part in inside if _is_watched(part)), "")
        if hooked or compat.hooks.has_global_hooks():
            refused = f"block {self.block!r} is compiled, and would not call the hook on {hooked or 'all modules'}."
            raise HfCkptError(f"{refused} Remove the hook, or leave `compile` out.")
        self.without_hooks = registered

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "without_hooks": -1}  # another process counts its own


def _is_watched(module: nn.Module) -> bool:
    """Whether a module has forward or backward hooks that do not belong to hf_ckpt."""
    boxes = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    hooks = (hook for box in boxes if box for hook in box.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("hf_ckpt.") for hook in hooks)


def make(request: Request) -> Region:
    """Make the function of a compiled block."""
    share = request.action.share
    assert share is not None, "a compiled block without a share is refused when the plan is read"
    return CompiledRegion(request.block, share, **request.options)


@functools.cache
def _compiled(stack: str, kind: type | None, share: float) -> Callable[..., Any]:
    """Return the compiled function for all blocks of one class in a stack. It has its own cache of graphs.

    Each stack has its own, because encoders and decoders run different lengths. The share limits which results it keeps
    beside the graph's inputs.
    """
    # A unique name: torch remembers by name which lengths have changed.
    name = f"{stack}: {'block' if kind is None else kind.__name__} at {share:g}"
    return compat.compiler.compiled_copy(_run, name, functools.partial(_compile, share))


def _run(function: Callable[..., Any], first: Sequence[Any], kwargs: dict[str, Any], args: Sequence[Any]) -> Any:
    return function(*first, *args, **kwargs)


def _compile(share: float, graph: Any, inputs: Any) -> Any:
    """Compile a graph with this share, and keep random draws and the experts that routers choose."""
    with compat.compiler.keeping(share):
        return compat.compiler.compile_graph(graph, inputs)
