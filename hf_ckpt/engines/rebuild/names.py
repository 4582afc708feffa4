"""What a forward under `selective` kept and dropped, by names that a reader of the model's code knows.

Only the first forward of a block is recorded, so that later ones do not pay for it.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_ckpt import compat
from hf_ckpt.engines.rebuild.graph import Graph
from hf_ckpt.engines.rebuild.ops import ATTENTION, OPS, VIEW
from hf_ckpt.engines.rebuild.replay import Inside, Replay
from hf_ckpt.engines.rebuild.unpacking import read_saved
from hf_ckpt.engines.rebuild.values import DEEPEST, Rebuilt, Stored, View
from hf_ckpt.engines.seen import Kept
from hf_ckpt.logs import warn_once

log = logging.getLogger(__name__)

_SIGNS = {"mul": " * ", "add": " + ", "sub": " - ", "div": " / "}
_PASSED = {"cast", "copy", VIEW}
"""Classes of operations whose result has the name of their operand."""
_WRAPPERS = re.compile(r"\.(base_layer|default)\b")
"""Parts of the names of modules that an adapter adds, and nobody writes."""
_ADAPTER = re.compile(r"\.lora_[AB]$")
SavedSizes = dict[tuple[str, bool], int]
"""(name, whether it was dropped) -> bytes."""


class Names:
    """Names of the tensors of a block, by autograd's graph while the forward runs.

    Args:
        block: the block.
        graph: the values that the forward finds.
        hidden: the block's input hidden states.
    """

    def __init__(self, block: nn.Module | None, graph: Graph, hidden: Any) -> None:
        self._graph = graph
        self._hidden = getattr(hidden, "grad_fn", None)
        modules = [] if block is None else [(name, module) for name, module in block.named_modules() if name]
        paths = {_WRAPPERS.sub("", name): module for name, module in modules if not module._modules}
        shortest = {path: _shortest(path, paths) for path in paths}
        self._of_module = {id(module): shortest[path] for path, module in paths.items()}
        self.weights: dict[int, str] = {}
        """Memory of a parameter -> name of its module. By memory, because autograd returns another tensor object."""
        for module in paths.values():
            for parameter in [each for each in module._parameters.values() if each is not None]:
                self.weights[_memory(parameter)] = self._of_module[id(module)]
        self._known: dict[Any, list[str]] = {}
        self._steps = 0
        """How far `_sources` has walked from the node that is named."""

    def values(self) -> Iterable[tuple[tuple[Any, int], Any]]:
        """Yield the edges of the graph that have been seen, and their values."""
        return self._graph.values.items()

    def of_module(self, module: nn.Module) -> str:
        """Return the name of a module of the block."""
        return self._of_module.get(id(module), type(module).__name__)

    def of(self, node: Any) -> str:
        """Return the name of the result of an autograd node."""
        owner = self._source(node)
        if owner is not None:
            return owner
        row = OPS.get(node.name())
        function = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2]).lower()
        operands = self._operands(node)
        sources = list(dict.fromkeys(source for operand in operands for source in self._sources(operand)))
        if row is not None and row.op_class in _PASSED and operands:
            return self.of(operands[0])
        if len(sources) == 1 and function == "add":  # an adapter's result and that of its linear layer
            return sources[0]
        text = _SIGNS[function].join(sources) if function in _SIGNS and len(sources) > 1 else ""
        return text or f"{function}({', '.join(sources)})"

    def _sources(self, node: Any) -> list[str]:
        """Return the names of the modules, inputs and attention kernels from which a node's result is computed."""
        if node not in self._known:
            self._known[node] = []
            owner = self._source(node)
            is_far = self._steps >= DEEPEST  # such as the first of many steps of a loop over tokens
            operands = [] if owner is not None or is_far else self._operands(node)
            self._steps += 1
            names = [owner] if owner else [name for operand in operands for name in self._sources(operand)]
            self._steps -= 1
            self._known[node] = list(dict.fromkeys(_ADAPTER.sub("", name) for name in names))
        return self._known[node]

    def _operands(self, node: Any) -> list[Any]:
        return [source for source, _ in node.next_functions if source is not None and not _is_leaf(source)]

    def _source(self, node: Any) -> str | None:
        """Return the name of a node's result, if names of others are made from it; else None."""
        if node._sequence_nr() < self._graph.first:
            return "hidden_states" if node is self._hidden else "another input"
        row = OPS.get(node.name())
        owner = self._owner(node)
        if owner is None and row is not None and row.op_class == ATTENTION:
            return "softmax" if "Softmax" in node.name() else "matmul" if "mm" in node.name().lower() else "attention"
        return owner

    def _owner(self, node: Any) -> str | None:
        """Return the name of the module whose parameter is an operand of a node; None if there is none."""
        for source, _ in node.next_functions:
            inner = source
            while inner is not None and not _is_leaf(inner) and len(inner.next_functions) == 1:
                if OPS.get(inner.name()) is None or OPS[inner.name()].op_class not in _PASSED:
                    break
                inner = inner.next_functions[0][0]
            if inner is not None and _is_leaf(inner) and self.of_weight(inner.variable):
                return self.of_weight(inner.variable)
        row = OPS.get(node.name())
        for name in () if row is None or not self._graph.may_read(node) else row.saved_as:
            value = read_saved(node, name) if name else None
            if isinstance(value, torch.Tensor) and self.of_weight(value):  # a frozen weight has no edge
                return self.of_weight(value)
        return None

    def of_weight(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the module whose parameter has the memory of a tensor; None if it is none of the block."""
        return self.weights.get(_memory(tensor))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _is_leaf(node: Any) -> bool:
    return bool(node.name() == "torch::autograd::AccumulateGrad")


def _shortest(path: str, paths: Iterable[str]) -> str:
    """Return the shortest end of a module's path that no other one has."""
    parts = path.split(".")
    for length in range(1, len(parts)):
        end = ".".join(parts[-length:])
        if sum(other == end or other.endswith(f".{end}") for other in paths) == 1:
            return end
    return path


class Recording:
    """Records what one forward of a block saves, from `pack` to the end of the tape."""

    def __init__(self, names: Names) -> None:
        self.names: Names | None = names
        self._packed: list[tuple[StorageWeakRef, int, str, Any]] = []
        """For each saved tensor its memory, that memory's bytes, its name, and what replaces it."""

    def of(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Return a saved-tensor hook that records what `pack` returns."""

        @compat.torch.untraced
        def pack_and_record(tensor: torch.Tensor) -> Any:
            value = pack(tensor)
            if self.names is not None:
                with self._naming():
                    self._add(self.names, tensor, value)
            return value

        return pack_and_record

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Make a context for the naming of tensors. If it fails, nothing of the block is named, and a warning says so.

        Names are for people only, and may not end a run.
        """
        try:
            with compat.modes.without_torch_functions():
                yield
        except Exception as error:  # of all kinds: tensors of users' own types run their code
            warn_once(
                log,
                "hf_ckpt: `describe` cannot name what `selective` keeps in some blocks: %s: %s. Nothing else changes.",
                type(error).__name__,
                error,
            )
            self.close()

    def _add(self, names: Names, tensor: torch.Tensor, value: Any) -> None:
        """Record a tensor that autograd saves, and what is held in its place."""
        if tensor.layout is not torch.strided or names.of_weight(tensor):
            return
        replay = value.replay if isinstance(value, Inside) else getattr(value, "operation", None)
        if isinstance(replay, Replay):
            name = names.of_module(replay.module)
        elif tensor.grad_fn is not None:
            name = names.of(tensor.grad_fn)
        elif isinstance(value, Rebuilt):
            name = "dropout mask"
        else:  # noise of a dropout on a CPU was drawn, and then divided in place
            name = "dropout noise" if tensor.is_floating_point() and tensor._version == 2 else ""
        storage = tensor.untyped_storage()
        self._packed.append((StorageWeakRef(storage), storage.nbytes(), name, value))  # type: ignore[no-untyped-call]

    def saved(self) -> SavedSizes:
        """Return the bytes that were kept and dropped, by name; each storage counts once.

        Empty if a tensor could not be named.
        """
        if self.names is not None:
            with self._naming():
                return self._sizes(self.names)
        return {}

    def _sizes(self, names: Names) -> SavedSizes:
        """As `saved`, with the names of the forward."""
        names_by_memory = {
            _memory(value.tensor): names.of(node) for (node, _), value in names.values() if isinstance(value, Kept)
        }
        names_by_memory |= {
            ref.cdata: name for ref, _, name, value in self._packed if isinstance(value, (Kept, Stored))
        }
        kept: dict[int, tuple[str, int]] = {}
        for _, _, name, value in self._packed:
            for tensor in _held_by(value, set()):
                storage = tensor.untyped_storage()
                # What is kept only to rebuild a tensor from it, such as its 16 bits, has the name of that one.
                kept.setdefault(storage._cdata, (names_by_memory.get(storage._cdata, name), storage.nbytes()))
        dropped = {ref.cdata: (name, size) for ref, size, name, _ in reversed(self._packed) if ref.cdata not in kept}
        saved: Counter[tuple[str, bool]] = Counter()
        for tensors, is_dropped in ((kept, False), (dropped, True)):
            for memory, (name, size) in tensors.items():
                # Without a name: what several blocks share, such as attention masks.
                if name and memory not in names.weights:
                    saved[name, is_dropped] += size
        return dict(saved)

    def close(self) -> None:
        """Forget all tensors and nodes: autograd holds the hook that records, and so this."""
        self._packed.clear()
        self.names = None


def _held_by(value: Any, visited: set[int]) -> Iterable[torch.Tensor]:
    """Yield the tensors that a value holds on the device."""
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, Kept):
        yield value.tensor
    elif isinstance(value, View):
        yield from _held_by(value.of, visited)
    elif isinstance(value, Inside):
        yield from _held_by(value.replay.source, visited)
    elif isinstance(value, Rebuilt):
        for operand in value.operands:
            yield from _held_by(operand, visited)
        source = getattr(value.operation, "source", None)  # of the module that is run again
        if source is not None:
            yield from _held_by(source, visited)
    elif isinstance(value, Stored) and value.original is not None:
        yield value.original.tensor
