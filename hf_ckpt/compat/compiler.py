"""torch.compile: one compiled function for many blocks, how much it keeps for backward, and its errors."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt.compat.private import private
from hf_ckpt.errors import HfCkptError

_LEAST_SHARE = 1e-9
"""Replaces a share of 0, for which torch ignores what must be saved."""
_MOST_GRAPHS = 64
"""Most graphs of one compiled function, for blocks of different kinds, types and shapes."""
MOST_CHOICES = 64
"""Most experts per token; a top-k of more is not a router. Sparse attention selects thousands."""


def call_parts(function: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the plain function behind a block's forward, and its bound positional and keyword arguments.

    The plain function is the same for all blocks of a class, so they share compiled graphs.
    """
    bound: Any = function if isinstance(function, functools.partial) else functools.partial(function)
    if isinstance(bound.func, types.MethodType):
        return bound.func.__func__, (bound.func.__self__, *bound.args), bound.keywords
    return bound.func, bound.args, bound.keywords


def compiled_copy(function: Any, name: str, backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled copy of a function, which shares no graphs with other copies. Graph breaks are errors."""
    # torch.compile caches graphs by the code object, so that a copy has graphs of its own.
    code = function.__code__.replace(co_name=name)
    copied = types.FunctionType(code, function.__globals__, name)
    # By default torch makes 8 graphs of a function, and then raises an error. Older torch takes no other number here.
    compile_: Any = torch.compile
    limit = {"recompile_limit": _MOST_GRAPHS} if "recompile_limit" in inspect.signature(compile_).parameters else {}
    compiled: Callable[..., Any] = compile_(copied, backend=backend, fullgraph=True, **limit)
    return compiled


def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph with torch's default compiler."""
    return private("torch._inductor.compile")(graph, inputs)  # type: ignore[no-any-return]


@contextlib.contextmanager
def keeping(share: float) -> Iterator[None]:
    """Limit what graphs compiled in this context keep for backward to a share, from 0 to 1.

    Random draws and routers' choices of experts are always kept, so that backward uses those of the forward. Raises
    `HfCkptError` if a user has set `torch._inductor.config.joint_custom_post_pass`, which this needs.
    """
    inductor = private("torch._inductor.config")
    ours = _keeping_what_may_change()
    if inductor.joint_custom_post_pass not in (None, ours):
        raise HfCkptError("compiled blocks need `torch._inductor.config.joint_custom_post_pass`, which is set already.")
    # Both are read while AOTAutograd splits the graph of forward and backward, so a patch around it is enough.
    budget = private("torch._functorch.config").patch(activation_memory_budget=max(share, _LEAST_SHARE))
    with budget, inductor.patch(joint_custom_post_pass=ours):
        yield


@functools.cache
def _keeping_what_may_change() -> Any:
    """Make the pass over a graph of forward and backward that marks random draws and choices as kept."""
    base: Any = private("torch._inductor.custom_graph_pass.CustomGraphPass")

    class Keeping(base):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.nodes:
                # A draw in backward would be another one; a score may be rounded otherwise, and so rank otherwise.
                if _draws(node) or _chooses(node):
                    node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE

        def uuid(self) -> str:
            """Key of this pass for graph caches on disk. A change of what the pass does needs another number."""
            return "hf_ckpt: random draws and choices are kept, 2"

    return Keeping()


def _draws(node: torch.fx.Node) -> bool:
    """Whether an operation draws random numbers. Attention does so only with dropout."""
    operation: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):  # functions of Python have none
        return False
    names = [argument.name for argument in operation._schema.arguments]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or arguments.get("dropout_p", 0.0) != 0.0


def _chooses(node: torch.fx.Node) -> bool:
    """Whether an operation makes choices, as in a router of experts: another kernel may rank scores differently."""
    aten = torch.ops.aten
    if node.target == aten.topk.default:
        return isinstance(node.args[1], int) and node.args[1] <= MOST_CHOICES
    return node.target == aten.argmax.default


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process. It counts blocks' graphs once a kind and share."""
    return int(private("torch._dynamo.utils.counters")["stats"]["unique_graphs"])


def compiled_module_class() -> Any:
    """Return the class of the wrapper that `torch.compile(model)` returns."""
    return private("torch._dynamo.eval_frame.OptimizedModule")


def outside_graphs(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return each of these modules of a model, or the wrapper that compiles it: its hooks run outside of the graph."""
    wrappers = {each._orig_mod: each for each in model.modules() if isinstance(each, compiled_module_class())}
    return {name: wrappers.get(module, module) for name, module in modules.items()}


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled by itself, rather than as part of a larger one."""
    # `torch.compile(module)` makes a wrapper, and `module.compile()` sets an attribute.
    if isinstance(module, compiled_module_class()) or module._compiled_call_impl is not None:
        return True
    return hasattr(module.forward, "_torchdynamo_orig_callable")  # `module.forward = torch.compile(module.forward)`


def is_compile_error(error: Exception) -> bool:
    """Whether torch.compile raised an error because it cannot compile something."""
    return isinstance(error, private("torch._dynamo.exc.TorchDynamoException"))
