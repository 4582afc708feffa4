"""Imitate on fake tensors what compiled graphs allocate, read and write, with fused groups of operations.

Nothing is compiled. torch's compiler passes the graphs of a forward and its backward as its partitioner has cut them.
Each graph runs on fake tensors, so that counters of live bytes and time see what compiled code would do.

Memory follows simplified rules of the compiler's lowering. Library kernels, such as matrix products, read and write
tensors. The operations between two of them form one group, which writes only the results that are read outside it.
Other results are recomputed by each group that reads them.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from hf_ckpt import compat

_LIBRARY: Any = torch.library.Library("hf_ckpt", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("fused(Tensor[] reads, Tensor(a!)[] writes) -> ()")
_LIBRARY.impl("fused", lambda reads, writes: None, "CompositeExplicitAutograd")

_modes: contextvars.ContextVar[Callable[[], contextlib.AbstractContextManager[Any]]] = contextvars.ContextVar(
    "modes", default=contextlib.nullcontext
)


@contextlib.contextmanager
def seen_by(modes: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Run graphs inside the context that `modes` makes, so that dispatch modes see what they allocate."""
    token = _modes.set(modes)
    try:
        yield
    finally:
        _modes.reset(token)


def stand_in(graph: fx.GraphModule, inputs: Any, **options: Any) -> Callable[[list[Any]], list[Any]]:
    """Replace torch's compiler for one graph; see `FakeGraph`."""
    return FakeGraph(graph)


class FakeGraph:
    """Runs the graph of a forward or backward on fake tensors, and allocates what its compiled form would.

    Args:
        graph: ATen operations, with the value of every node in its `meta["val"]`.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self._boxed_call = True  # tells torch to pass the arguments as one list, which this empties
        self._graph = graph
        self._inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        (self._output,) = (node for node in graph.graph.nodes if node.op == "output")
        kept = set(_memory_of(self._output))
        self._steps = in_order(list(units_of(graph.graph)))
        last = {node: place for place, unit in enumerate(self._steps) for node in (*unit.reads, *unit.writes)}
        self._freed: list[list[fx.Node]] = [[] for _ in self._steps]
        for node, place in last.items():
            if node not in kept:
                self._freed[place].append(node)
        self._unused = [node for node in self._inputs if node not in last and node not in kept]

    def __call__(self, args: list[Any]) -> list[Any]:
        with _modes.get()():
            return self._run(args)

    def _run(self, args: list[Any]) -> list[Any]:
        values: dict[fx.Node, Any] = dict(zip(self._inputs, args, strict=True))
        args.clear()
        for node in self._unused:
            del values[node]
        for node in self._graph.graph.nodes:
            if node.op == "get_attr":
                values[node] = _empty(node.meta["val"]) if "val" in node.meta else getattr(self._graph, node.target)
        for unit, freed in zip(self._steps, self._freed, strict=True):
            if unit.operation is None:
                _run_fused(unit, values, freed)
            else:
                _run_alone(unit.operation, values)
            for node in freed:
                values.pop(node, None)
        return list(fx.map_arg(self._output.args[0], functools.partial(_value, values=values)))


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """One operation by itself, or a group of fused ones."""

    place: int
    """Its position in the graph."""
    operation: fx.Node | None
    """The operation; None for a group."""
    reads: tuple[fx.Node, ...]
    """Inputs and results in memory that it reads."""
    writes: tuple[fx.Node, ...]
    """Results that it writes to memory."""
    over: dict[fx.Node, fx.Node]
    """Result of a group -> a tensor that no other result of it reads, whose memory this result may overwrite."""


def units_of(graph: fx.Graph) -> Iterator[Unit]:
    """Yield the units of a graph, in the order of their operations."""
    found = _Lowered(graph)
    group = _Fusion(found).groups()
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in found.reads:
        members.setdefault(group.get(node, node), []).append(node)
    read = {(source, group.get(node)) for node, sources in found.reads.items() for source in sources}
    readers: dict[fx.Node, set[fx.Node | None]] = {}
    for source, reader in read:
        readers.setdefault(source, set()).add(reader)
    for place, (first, inside) in enumerate(members.items()):
        if first not in group:
            yield Unit(place, first, found.reads[first], tuple(filter(_is_part, first.users)) or (first,), {})
            continue
        sources = dict.fromkeys(source for node in inside for source in found.reads[node] if source not in inside)
        outside = [node for node in inside if node in found.demanded or readers.get(node, set()) - {group[first]}]
        only = {source: [node for node in inside if source in found.reads[node]] for source in sources}
        over = {node: source for source, nodes in only.items() for node in nodes if len(nodes) == 1}
        if outside:
            yield Unit(place, None, tuple(sources), tuple(outside), over)


class _Lowered:
    """Which operations of a graph get a tensor of their own. Each reader of another operation recomputes it."""

    def __init__(self, graph: fx.Graph) -> None:
        self.reads: dict[fx.Node, tuple[fx.Node, ...]] = {}
        """Operation with a tensor of its own -> the tensors that it reads: inputs, or other operations listed here."""
        nodes = [node for node in graph.nodes if node.op in ("call_function", "output") and not _is_view(node)]
        self.demanded = {
            source for node in nodes if not is_fused(node) and not _is_part(node) for source in _memory_of(node)
        }
        """Results that must be in memory, because a library kernel reads them or the graph returns them."""
        self._within: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for node in nodes:
            if node.op == "output":
                continue
            if not is_fused(node):
                if not _is_part(node):
                    self.reads[node] = self._expanded(node)
                continue
            place = self.reads if node in self.demanded or _is_apart(node) else self._within
            place[node] = self._expanded(node)

    def _expanded(self, node: fx.Node) -> tuple[fx.Node, ...]:
        found: dict[fx.Node, None] = {}
        for source in _memory_of(node):
            found |= dict.fromkeys(self._within.get(source, (source,)))
        return tuple(found)


class _Fusion:
    """Joins operations to groups that are computed at once.

    An operation joins the group of its inputs, or of operations with the same inputs, unless an operation outside the
    groups lies between them. Sums over tokens read memory in another order than their inputs, and are computed apart.
    """

    def __init__(self, lowered: _Lowered) -> None:
        self._reads = lowered.reads
        self._group = {node: node for node in self._reads if is_fused(node)}
        self._members = {node: [node] for node in self._group}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        for node, sources in self._reads.items():
            for source in sources:
                self._readers.setdefault(_parent(source) if _is_alone_part(source) else source, []).append(node)

    def groups(self) -> dict[fx.Node, fx.Node]:
        """Return operation -> the operation that represents its group."""
        for node in list(self._group):
            for source in self._reads[node]:
                if source in self._group and not _sums_tokens(node) and not _sums_tokens(source):
                    self._join(source, node)
        for readers in self._readers.values():
            fused = [node for node in readers if node in self._group]
            for first, second in itertools.pairwise(fused):
                if _sums_tokens(first) == _sums_tokens(second):
                    self._join(first, second)
        return self._group

    def _join(self, first: fx.Node, second: fx.Node) -> None:
        new, old = self._group[first], self._group[second]
        if new is old or self._follows(new, old) or self._follows(old, new):
            return
        self._members[new] += self._members.pop(old)
        self._group |= dict.fromkeys(self._members[new], new)

    def _follows(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether the second group depends on the first through an operation outside both."""
        both = {first, second}
        left = [user for user in self._after(first) if self._group.get(user, user) not in both]
        seen = set(left)
        while left:
            for user in self._after(left.pop()):
                group = self._group.get(user, user)
                if group is second:
                    return True
                if user not in seen and group is not first:
                    seen.add(user)
                    left.append(user)
        return False

    def _after(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the operations that read a result of this operation, or of its group."""
        for member in self._members.get(self._group.get(node, node), [node]):
            yield from self._readers.get(member, ())


def in_order(units: Sequence[Unit]) -> list[Unit]:
    """Return the units in the order of the graph, but each after the units that it reads from."""
    made_by = {node: unit for unit in units for node in unit.writes}
    done: dict[Unit, None] = {}

    def add(unit: Unit) -> None:
        if unit not in done:
            before = {made_by[node] for node in unit.reads if node in made_by}
            for other in sorted(before, key=lambda found: found.place):
                add(other)
            done[unit] = None

    for unit in units:
        add(unit)
    return list(done)


# --- running ---


def _run_alone(node: fx.Node, values: dict[fx.Node, Any]) -> None:
    args, kwargs = fx.map_arg((node.args, node.kwargs), functools.partial(_value, values=values))
    result = node.target(*args, **kwargs)  # type: ignore[operator]
    parts = [user for user in node.users if _is_part(user)]
    values.update({part: result[part.args[1]] for part in parts} if parts else {node: result})


def _run_fused(unit: Unit, values: dict[fx.Node, Any], freed: Sequence[fx.Node]) -> None:
    reads = [values[node] for node in unit.reads if isinstance(values[node], torch.Tensor)]
    for node in unit.writes:
        old, like = unit.over.get(node), node.meta["val"]
        if old is not None and old in freed and old.op == "call_function" and _fits(values[old], like):
            values[node] = values[old].as_strided(like.size(), like.stride())
        else:
            values[node] = _empty(like)
    torch.ops.hf_ckpt.fused(reads, [values[node] for node in unit.writes])


def _fits(old: Any, like: torch.Tensor) -> bool:
    """Whether a tensor's memory has the type and size that another one needs."""
    same = isinstance(old, torch.Tensor) and old.dtype == like.dtype
    return same and old.untyped_storage().nbytes() == like.untyped_storage().nbytes()


def _empty(like: Any) -> Any:
    if not isinstance(like, torch.Tensor):
        return like
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return the value of a node. Views are computed from their base."""
    if not _is_view(node):
        return values[node]
    args, kwargs = fx.map_arg((node.args, node.kwargs), functools.partial(_value, values=values))
    return node.target(*args, **kwargs)  # type: ignore[operator]


# --- nodes ---


def is_fused(node: fx.Node) -> bool:
    """Whether an operation is computed in a group, rather than by a kernel of its own."""
    if _is_part(node):
        return is_fused(_parent(node))
    return node.op == "call_function" and not _is_view(node) and compat.is_fusible(node.target)


def _is_part(node: fx.Node) -> bool:
    """Whether a node is one of several results of an operation, each with its own memory."""
    return node.target is operator.getitem and not _is_view(_parent(node))


def _parent(node: fx.Node) -> fx.Node:
    (parent,) = node.all_input_nodes
    return parent


@functools.cache
def _is_view_of_input(operation: Any) -> bool:
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.returns:
        return False
    seen = (result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    return schema.name == "aten::_unsafe_view" or all(seen)


def _is_view(node: fx.Node) -> bool:
    """Whether a result shares memory with its input."""
    if node.target is operator.getitem:
        return _is_view(_parent(node))
    return node.op == "call_function" and _is_view_of_input(node.target)


def _is_alone_part(node: fx.Node) -> bool:
    """Whether a node is one of several results of a kernel."""
    return _is_part(node) and not is_fused(node)


def _name(node: fx.Node) -> str:
    return getattr(getattr(node.target, "_schema", None), "name", "")


def _is_apart(node: fx.Node) -> bool:
    """Whether an operation always has its own tensor, such as a reduction."""
    schema = getattr(node.target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return _is_part(node) or _name(node) in _OWN or any(argument.name == "keepdim" for argument in arguments)


_OWN = frozenset(
    ("prims::inductor_random", *(f"aten::{name}" for name in ("sum", "mean", "cat", "index_put", "scatter_add")))
)


def _sums_tokens(node: fx.Node) -> bool:
    """Whether an operation reduces dimensions other than the last."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(argument.name == "keepdim" for argument in schema.arguments):
        return False
    value, dims = node.all_input_nodes[0].meta["val"], node.args[1] if len(node.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    return not isinstance(dims, (list, tuple)) or not {-1, value.dim() - 1}.intersection(dims)


def _memory_of(node: fx.Node) -> list[fx.Node]:
    """Return the inputs and results that hold the memory of a node's arguments, seen through views."""
    found: list[fx.Node] = []
    for source in node.all_input_nodes:
        found += _memory_of(source) if _is_view(source) else [source]
    return found
