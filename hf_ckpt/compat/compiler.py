"""torch.compile: one compiled function for many blocks, how much it keeps for backward, and what its errors say."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from hf_ckpt.compat.private import private

_LEAST_SHARE = 1e-9
"""What stands for a share of 0, for which torch does not look at what must be kept."""
_MOST_GRAPHS = 64
"""Graphs that one compiled function may have, for blocks of other kinds, types and shapes."""
MOST_CHOICES = 64
"""How many experts a token is sent to at most; what takes more is no router. Sparse attention takes thousands."""
_NOT_THERE = {
    "InvalidCxxCompiler": "torch finds no C++ compiler (install g++ or clang)",
    "CppCompileError": "the C++ compiler failed (is it whole, with its headers and OpenMP?)",
    "TritonMissing": "Triton is missing (pip install triton)",
}
"""Class name of an error -> what it means."""

Compiled = Callable[..., Any]


def call_parts(function: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the plain function behind a block's forward, and the arguments that come before and beside others.

    The plain function is the same for all blocks of a class, as compiled graphs have to be.
    """
    found: Any = function
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(found, functools.partial):
        found, args, kwargs = found.func, found.args, found.keywords
    if isinstance(found, types.MethodType):
        found, args = found.__func__, (found.__self__, *args)
    return found, args, kwargs


def compiled_copy(function: Any, name: str, backend: Callable[..., Any], *, dynamic: bool | None = None) -> Compiled:
    """Return a compiled copy of a function, which shares no graphs with other copies. It may not break the graph.

    `dynamic` says whether graphs are for tensors of any size: never, always, or from the second size on (None).
    """
    code = function.__code__.replace(co_name=name)
    copied = types.FunctionType(code, function.__globals__, name)
    compile_: Any = torch.compile
    limit = {"recompile_limit": _MOST_GRAPHS} if "recompile_limit" in inspect.signature(compile_).parameters else {}
    compiled: Compiled = compile_(copied, backend=backend, fullgraph=True, dynamic=dynamic, **limit)
    return compiled


def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Compile a graph by torch's default compiler."""
    compiled: Compiled = private("torch._inductor.compile")(graph, inputs)
    return compiled


def cut_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any], each: Callable[..., Any]) -> Compiled:
    """Do what `compile_graph` does up to the graphs of forward and backward, and give these to `each`."""
    with private("torch._functorch.config").patch(enable_autograd_cache=False):
        made: Compiled = private("torch._inductor.compile_fx.compile_fx")(graph, inputs, inner_compile=each)
    return made


def is_fusible(operation: Any) -> bool:
    """Whether torch's compiler writes code of its own for an operation, so that it can be fused with others."""
    return (
        operation in private("torch._inductor.lowering.lowerings")
        and operation not in private("torch._inductor.lowering.fallbacks")
        and getattr(operation, "overloadpacket", None) not in flop_registry
    )


@contextlib.contextmanager
def keeping(share: float) -> Iterator[None]:
    """Compile within a share of what is kept for backward, from 0 to 1.

    Kept whatever the share: random draws, and which experts a router chose, so that backward has those of the forward.
    A pass of the user over graphs of forward and backward (`torch._inductor.config.joint_custom_post_pass`) runs, too.
    """
    settings = private("torch._functorch.config").patch(activation_memory_budget=max(share, _LEAST_SHARE))
    inductor = private("torch._inductor.config")
    given = inductor.joint_custom_post_pass
    users = tuple(given) if isinstance(given, (list, tuple)) else () if given is None else (given,)
    with settings, inductor.patch(joint_custom_post_pass=_keeping_what_may_change()(users)):
        yield


@functools.cache
def _keeping_what_may_change() -> Any:
    """Make the class of the pass over a graph of forward and backward that marks random draws and choices as kept."""
    base: Any = private("torch._inductor.custom_graph_pass.CustomGraphPass")

    class Keeping(base):
        def __init__(self, users: tuple[Any, ...]) -> None:
            self.users = users
            """Passes of the user, which come first: what they add may draw."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            for each in self.users:
                each(graph)
            for node in graph.nodes:
                if _draws(node) or _chooses(node):
                    node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE

        def uuid(self) -> Any:
            """Tell caches of graphs on disk what this pass does; None where the user has a pass, too."""
            return None if self.users else "hf_ckpt: random draws and choices are kept, 2"

    return Keeping


def _draws(node: torch.fx.Node) -> bool:
    """Whether an operation draws random numbers. Attention may do so, but does not without dropout."""
    operation = node.target
    if (
        not isinstance(operation, private("torch._ops.OpOverload"))
        or torch.Tag.nondeterministic_seeded not in operation.tags
    ):
        return False
    names = [argument.name for argument in operation._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


def _chooses(node: torch.fx.Node) -> bool:
    """Whether an operation chooses, as routers of experts do: other kernels may find other scores the largest."""
    aten = torch.ops.aten
    if node.target == aten.topk.default:
        return isinstance(node.args[1], int) and node.args[1] <= MOST_CHOICES
    return node.target == aten.argmax.default


def compiled_module_class() -> Any:
    """Return the class of the module that `torch.compile(model)` puts around a model."""
    return private("torch._dynamo.eval_frame.OptimizedModule")


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile runs a module by itself, rather than as a part of a larger one."""
    return isinstance(module, compiled_module_class()) or module._compiled_call_impl is not None


def is_compile_error(error: Exception) -> bool:
    """Whether torch.compile raised an error because it cannot compile something."""
    kinds = (private("torch._dynamo.exc.TorchDynamoException"), private("torch._inductor.exc.InductorError"))
    return isinstance(error, kinds)


def is_backend_error(error: Exception) -> bool:
    """Whether what a graph is handed to failed, rather than making the graph."""
    return isinstance(error, private("torch._dynamo.exc.BackendCompilerFailed"))


def missing_compiler(error: BaseException) -> str:
    """Say what is missing to compile for the device, where that is why torch.compile failed; else return ""."""
    seen: BaseException | None = error
    while seen is not None:
        for found in (seen, getattr(seen, "inner_exception", None)):
            if type(found).__name__ in _NOT_THERE:
                return _NOT_THERE[type(found).__name__]
        seen = seen.__cause__ or seen.__context__
    return ""
