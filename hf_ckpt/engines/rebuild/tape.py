"""The tape of one forward of a block: how to recompute the tensor of each edge of autograd's graph.

An edge is an autograd node and the number of one of its outputs. The tape finds a value for each tensor that autograd
saves, and counts dropped and kept bytes. It ends with the forward.
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.rebuild import masks, norm_outputs
from hf_ckpt.engines.rebuild.names import layer_names, name_of
from hf_ckpt.engines.rebuild.ops import MASK, VIEW, Op
from hf_ckpt.engines.rebuild.values import (
    MASKS,
    NO_GRAPH,
    Inside,
    Kept,
    Rebuilt,
    Replay,
    Stored,
    Value,
    View,
    Work,
    layout_of,
    read,
    warn_nothing_dropped,
)
from hf_ckpt.engines.state import address_of
from hf_ckpt.models.blocks import biases

_next_sequence_number = compat.torch.next_autograd_sequence_number  # called for every tensor
_Edge = tuple[Any, int]
"""An autograd node, and the number of one of its outputs."""


class Running(threading.local):
    """The tape of the block that this thread runs: replicas of a model may run in separate threads."""

    tape: Tape | None = None


running = Running()


def enter_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a small module that may be run again as a whole: record its call on the block's tape."""
    tape = None if compat.torch.is_compiling() else running.tape
    if tape is None or tape.replay or kwargs or len(args) != 1 or not torch.is_grad_enabled():
        return
    # Another hook may change the input or the output, so operations of such a module are rebuilt one by one.
    if len(module._forward_hooks) == 1 and len(module._forward_pre_hooks) == 1 and isinstance(args[0], torch.Tensor):
        tape.enter(module, args[0])


def leave_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a small module that may be run again: from now on its output can be rebuilt."""
    tape = None if compat.torch.is_compiling() else running.tape
    if tape is not None and tape.replay is not None and module is tape.replay.module:
        tape.leave(output)


def hand_to_first_block(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of an embedding's norm: let the first block rebuild the output from the norm's input."""
    if (
        compat.torch.is_compiling() or compat.torch.top_saved_tensor_hooks() is not None
    ):  # hooks may store it in another form
        return
    if running.tape is None and len(args) == 1 and isinstance(output, torch.Tensor) and output.grad_fn is not None:
        work = Work(type(module).__name__)
        replay = Replay(work, module, Kept(args[0], work.block), args[0], checked=False, whole=True)
        norm_outputs.remember(output, lambda: replay)


class Tape:
    """Records the tensors of one forward of a block, while it runs.

    Args:
        region: the block's function. It gets the counts of dropped and kept bytes at the end.
        fn: the block's own forward.
        args: the block's arguments.
        store: hooks that store kept tensors elsewhere, such as in host memory; None to keep them as they are.
    """

    def __init__(
        self,
        region: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        store: compat.torch.SavedTensorHooks | None = None,
    ) -> None:
        self.region = region
        self.block = compat.transformers.module_of(fn)
        """The block; None if unknown."""
        self.work = region.work
        self.rows = region.rows
        self.store = store
        self.looks_for_biases = True
        """Whether this forward may still look up the biases of the block."""
        self.first = compat.torch.next_autograd_sequence_number()
        """Autograd nodes of this block have this sequence number or a larger one."""
        self.hopeless: set[tuple[int, int, str]] = region.hopeless
        """Results that earlier forwards could not rebuild: (place among the block's nodes, number, name of the node).
        The graph behind them is not walked again, which is slow. At worst a tensor is kept for nothing."""
        self.weights: dict[int, int] = {}
        """Sequence number of a node -> id of a parameter that it saved."""
        self.values: dict[_Edge, Value | None] = {}
        """Value of each edge seen so far; None if it cannot be rebuilt."""
        self.given: dict[_Edge, tuple[torch.Tensor, int]] = {}
        """The block's inputs that have a graph, with their in-place versions at the beginning."""
        self.offered: dict[_Edge, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Inputs of dropouts, with their in-place versions: they can be kept as long as they are alive."""
        self.replay: Replay | None = None
        """The call of the small module that runs now, if any."""
        self.stay: dict[Kept | Stored, Any] = {}
        """Tensors to keep if anything needs them -> the node that made them, or its name. Excludes parameters."""
        self.packed: list[tuple[Any, _Edge | None]] = []
        """What autograd holds: roots of values, and for tensors inside small modules (call of the module, edge)."""
        self.sizes: list[int] = []
        """Bytes of each packed tensor; -1 for parameters."""
        self.packed_at: set[int] = set()
        """Autograd's sequence numbers at the times when this tape packed a tensor. They identify the tensor's node."""
        self.softmax: tuple[torch.Size, compat.frames.PythonCall | None] | None = None
        """Shape of the last packed tensor, and the call that saved it, if it is the softmax of torch's attention."""
        self.masks_hold: bool | None = None
        """Whether all compared masks are masks; None if none was compared."""
        self.fake = any(map(compat.torch.is_fake, filter(torch.is_tensor, args)))
        """Whether the step runs on fake tensors."""
        for arg in args:
            if isinstance(arg, torch.Tensor):
                self._take(arg)

    def _take(self, arg: torch.Tensor) -> None:
        """Record an input of the block, and how to rebuild it if possible."""
        node = arg.grad_fn
        if node is None:
            return
        value: Value | None = None
        if self.region.reaches_back:
            replay = norm_outputs.forget(arg)
            if replay is not None:
                value = Rebuilt(self.work, type(replay.module).__name__, replay, [])
            row = self.rows.get(node.name()) if node.name() == "EmbeddingBackward0" and not arg._version else None
            if row is not None and type(self.resolve(node.next_functions[0])) is Kept:
                value = self._make(row, node, arg.output_nr)
        if value is None:
            self.given[node, arg.output_nr] = arg, arg._version
        else:
            self.values[node, arg.output_nr] = value

    def hand_over(self, outputs: Any) -> None:
        """Let the next block rebuild this block's output, if that is a norm of something that is kept."""
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if not isinstance(output, torch.Tensor) or output._version:  # changed in place since the norm made it
                continue
            rebuilt = self.values.get((output.grad_fn, output.output_nr))
            if type(rebuilt) is Rebuilt and type(rebuilt.operation) is Replay:
                replay = rebuilt.operation
                if type(replay.source.root) is not Rebuilt:
                    norm_outputs.remember(output, weakref.ref(replay))

    def close(self) -> None:
        """End the tape: report dropped and kept bytes to the region, and forget every node.

        Autograd holds the hooks, and they hold the tape, so a tape with nodes would be a reference cycle.
        """
        region, seen = self.region, (self.sizes, len(self.stay))
        if len(self.sizes) != len(region.seen[0]) and region.seen[0]:  # a different forward than the previous one
            self.hopeless.clear()
        if seen != region.seen:  # else the counts are those of the previous forward
            region.seen = seen
            self._count()
        for value in self.stay if self.store is not None else ():
            if type(value) is Stored:
                value.original = None
        region.masks_hold |= bool(self.masks_hold)
        if not region.dropped and not self.fake and region.kept.keys() - {NO_GRAPH}:
            warn_nothing_dropped(region.save, self.block is not None and compat.compiler.is_compiled(self.block))
        for found in (self.values, self.given, self.offered, self.stay, self.packed_at, self.packed):
            found.clear()
        self.softmax = self.replay = self.block = None

    def _count(self) -> None:
        """Write dropped bytes, by class of the operation or module, and kept bytes, by name, to the region."""
        dropped: collections.Counter[str] = collections.Counter()
        kept: collections.Counter[str] = collections.Counter()
        counted: set[Any] = set()
        needed: list[Any] = []
        """Roots that must be kept or rebuilt."""
        for (root, edge), nbytes in zip(self.packed, (nbytes for nbytes in self.sizes if nbytes >= 0), strict=True):
            if edge is not None:  # inside a small module, of which `root` is the call
                needed.append(root.source.root)
                known = self.values.get(edge)
                if known is None or (type(known) is Rebuilt and known.operation is root):
                    if nbytes and (edge[0] is None or edge not in counted):
                        counted.add(edge)
                        dropped[type(root.module).__name__] += nbytes
                    continue
                root = known.root
            if root not in counted:
                counted.add(root)
                needed.append(root)
                if type(root) is Rebuilt:
                    dropped[root.op_class] += nbytes
        names = self._names()
        while needed:
            root = needed.pop()
            if type(root) is Rebuilt:
                needed += [root.operation.source.root] if type(root.operation) is Replay else []
                needed += [operand.root for operand in root.operands]
            elif root in self.stay:
                storage, nbytes = root.storage()
                if storage not in counted:
                    counted.add(storage)
                    kept[names[self.stay[root]]] += nbytes
        self.region.dropped, self.region.kept = dict(dropped), dict(kept)

    def _names(self) -> dict[Any, str]:
        """Return the names of what made the kept tensors. They are looked up in the graph of the first forward only."""
        known: list[tuple[str, str]] = self.region.named
        layers: dict[int, str] | None = None
        names: dict[Any, str] = {}
        for place, made in enumerate(made for made in self.stay.values() if type(made) is not str):
            kind = made.name()
            if place >= len(known) or known[place][0] != kind:
                if layers is None:
                    layers = {} if self.block is None else layer_names(self.block)
                known[place:] = [(kind, name_of(made, layers, self.weights, self.first))]
            names[made] = known[place][1]
        return names | {NO_GRAPH: NO_GRAPH, MASKS: MASKS}

    @compat.torch.untraced  # compiled parts of a block call it
    def pack(self, tensor: torch.Tensor) -> Value | Inside:
        """Saved-tensor hook: return what autograd holds in place of `tensor`, and count it."""
        replay = self.replay
        if replay is not None:
            return self._inside(tensor, replay)
        number = _next_sequence_number()
        self.packed_at.add(number)
        leaf = tensor if type(tensor) is nn.Parameter else tensor._base
        if type(leaf) is nn.Parameter and leaf.is_leaf:
            self.sizes.append(-1)
            self.weights[number - 1] = id(leaf)
            return Kept(tensor, self.work.block, with_graph=True)
        if tensor.layout is not torch.strided:  # sparse: it has no storage to be counted by
            return Kept(tensor, self.work.block)
        value = self.value_of(tensor)
        made_by = type(tensor.grad_fn).__name__
        self.softmax = (tensor.shape, compat.frames.python_call()) if made_by == "SafeSoftmaxBackward0" else None
        root: Any = value.root if type(value) is View else value
        if type(value) is Rebuilt:
            value.layout = layout_of(tensor)
        self.packed.append((root, None))
        self.sizes.append(tensor.nbytes)
        if type(root) is not Kept:
            root.expect()
        return value

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor: a known one, an operation that rebuilds it, or else the kept tensor itself."""
        node, version = tensor.grad_fn, tensor._version
        base = tensor._base
        if base is not None and not version:
            known = self._of_base(base, tensor)
            if known is not None:
                return known
        if node is None:
            return self._mask(tensor) or self._constant(tensor)
        edge = node, tensor.output_nr
        if version and edge not in self.values and edge not in self.given:
            return self._keep(edge, tensor)  # changed in place: the graph may not show all changes
        value = self.resolve(edge) or self._small(edge, tensor) or self._small_view(edge, tensor)
        if value is None:
            return self._keep(edge, tensor)
        root = value.root
        if isinstance(root, Rebuilt):
            if version:
                return self._keep(edge, tensor)
        elif not root.copied:
            if value is root:
                if root.version != version:  # changed in place without a graph since it was first seen
                    return self._keep(edge, tensor)
            elif type(root) is Kept:  # a view of a kept tensor needs no operation
                value = self.values[edge] = self._another(root, tensor)
        return value

    def _of_base(self, base: torch.Tensor, tensor: torch.Tensor) -> Value | None:
        """Return the value of a view whose `base` already has a value, without walking the graph; else None."""
        node = base.grad_fn
        value = self.values.get((node, base.output_nr)) if node is not None else None
        if type(value) is Kept:
            return None if value.copied else self._another(value, tensor)
        if type(value) is not Rebuilt or not base.is_contiguous():
            return None
        if tensor.dtype is not base.dtype or tensor.is_conj() or tensor.is_neg():  # `as_strided` cannot make these
            return None
        value.layout = value.layout or layout_of(base)
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset() - base.storage_offset()
        return View(value, lambda x: x.as_strided(size, stride, x.storage_offset() + offset))

    def _another(self, kept: Kept, tensor: torch.Tensor) -> Kept:
        """Return the value of another view of a kept tensor."""
        view = Kept(tensor, self.work.block)
        made_by = self.stay.get(kept)
        if made_by is not None:  # it is None for parameters
            self.stay[view] = made_by
        return view

    def resolve(self, edge: _Edge) -> Value | None:
        """Return the value of an edge: a known one, or an operation that rebuilds it; None if neither exists."""
        values = self.values
        if edge in values:
            return values[edge]
        if edge in self.given:
            arg, version = self.given[edge]
            return self._keep(edge, arg) if arg._version == version else None
        node, number = edge
        name = node.name()
        row = self.rows.get(name)
        value: Value | None = None
        if row is not None:
            place = node._sequence_nr() - self.first, number, name
            if place not in self.hopeless:
                if self.is_here(node) and (not row.reads or self.may_read(node)):
                    value = self._make(row, node, number)
                if value is None:
                    self.hopeless.add(place)
        elif name == "torch::autograd::AccumulateGrad":
            value = self._parameter(node.variable)
        if value is None and edge in self.offered:
            value = self._take_offer(edge)
        values[edge] = value
        return value

    def is_here(self, node: Any) -> bool:
        """Whether a node belongs to this forward: nothing from before this block is run again."""
        return bool(node._sequence_nr() >= self.first)

    def may_read(self, node: Any) -> bool:
        """Whether this tape packed what a node saved, so that it may be read.

        If other hooks inside the block packed it, such as those of a checkpoint, reading it would run the checkpoint's
        function again in the middle of the forward.
        """
        return node._sequence_nr() + 1 in self.packed_at

    def _make(self, row: Op, node: Any, number: int) -> Value | None:
        """Return the value that rebuilds output `number` of a node by its row; None if an operand is unknown."""
        values, operands = self.values, []
        sources = node.next_functions
        for place, source in enumerate(sources if row.operands is None else sources[: row.operands]):
            if source in values:
                operand = values[source]
            elif source[0] is not None:
                operand = self.resolve(source)
            else:
                operand = self._constant_operand(row, node, place)
            if operand is None:
                return None
            operands.append(operand)
        for name in row.saved:
            operand = self._saved_operand(node, name)
            if operand is None:
                return None
            operands.append(operand)
        metadata = node._input_metadata[number]
        operation = row.prepare(node, metadata, number) if row.several else row.prepare(node, metadata)
        if operation is None:
            return None
        if row.op_class == VIEW:
            return View(operands[0], operation)
        return Rebuilt(self.work, row.op_class, operation, operands)

    def _constant_operand(self, row: Op, node: Any, place: int) -> Value | None:
        """Return the value of an operand that needs no gradient, if the node has saved it; else None."""
        name = row.constants[place] if place < len(row.constants) else ""
        if not name:  # the row names no saved operand
            return self._frozen_bias(row, node) if row.bias_of and not place else None
        return self._saved_operand(node, name)

    def _saved_operand(self, node: Any, name: str) -> Value | None:
        """Return the value of a tensor without a graph that a node has saved under a name; None if there is none."""
        readable = self.may_read(node) or not compat.torch.is_held_by_hooks(
            node, name
        )  # hooks do not get plain numbers
        found = read(node, name) if readable else None
        if isinstance(found, (Rebuilt, View)):
            return found
        if not isinstance(found, torch.Tensor):
            return None
        return self._constant(found) if found.dim() else Kept(found, self.work.block)  # numbers are not counted

    def _frozen_bias(self, row: Op, node: Any) -> Value | None:
        """Return the value of the bias that belongs to the weight that a node saved; None if unknown."""
        weight = getattr(node, f"_saved_{row.bias_of}") if self.may_read(node) else None
        if not isinstance(weight, torch.Tensor):  # the node has not saved it: its input needs no gradient
            return None
        whole = weight if weight._base is None else weight._base
        known, bias = self.region.biases.get(id(whole), (None, None))
        if known is not whole and self.block is not None and self.looks_for_biases:
            self.looks_for_biases = False  # once a forward: FSDP2 runs a block on other parameters than it lists
            self.region.biases = biases(self.block)
            known, bias = self.region.biases.get(id(whole), (None, None))
        return Kept(bias, self.work.block) if bias is not None and known is whole else None

    def _small(self, edge: _Edge, tensor: torch.Tensor) -> Value | None:
        """If a float32 tensor was cast up from 16 bits, keep those bits: exact, and half the size. Else return None."""
        node, _ = edge
        if tensor.dtype != torch.float32 or node.name() != "ToCopyBackward0" or not tensor.is_contiguous():
            return None
        (source,) = node.next_functions
        if source[0] is None or not self.is_here(node) or tensor._version:
            return None
        dtype = source[0]._input_metadata[source[1]].dtype
        if dtype not in (torch.bfloat16, torch.float16):
            return None
        with torch.no_grad():
            small = self._stays(tensor.detach().to(dtype), node, copied=True)
        self.values[source] = small
        value = self.values[edge] = self._make(self.rows[node.name()], node, 0)
        return value

    def _small_view(self, edge: _Edge, tensor: torch.Tensor) -> Value | None:
        """Return the value of a view of a float32 tensor that can be kept as 16 bits, such as an adapter's input."""
        base = tensor._base
        if base is None or base.grad_fn is None or self._small((base.grad_fn, base.output_nr), base) is None:
            return None
        value = self.values[edge] = self._of_base(base, tensor)
        return value

    def _keep(self, edge: _Edge, tensor: torch.Tensor) -> Kept | Stored:
        """Keep the tensor of an edge as it is."""
        value = self.values[edge] = self._stays(tensor, edge[0])
        return value

    def _stays(self, tensor: torch.Tensor, made_by: Any, *, copied: bool = False) -> Kept | Stored:
        """Return the value of a kept activation, packed by the user's hooks if there are any.

        `made_by` is the node that made it, or a name.
        """
        is_moved = self.store is not None and not copied and tensor.grad_fn is not None
        value: Kept | Stored = Kept(tensor, self.work.block, copied=copied)
        if is_moved and self.store is not None:
            value = Stored(tensor, self.store)
        self.stay[value] = made_by
        return value

    def _mask(self, tensor: torch.Tensor) -> Value | None:
        """If a tensor without a graph is a dropout mask, keep its bits and return its value. Else return None.

        A mask is recognised by the call that produced it: `functional.dropout`, which saves nothing else, or torch's
        own attention, which saves its softmax and then the mask in one call. The first forward also checks its values.
        """
        made_by_steps = 0 if tensor.dtype is torch.bool else 2  # noise is drawn and then divided, in place
        if tensor._version != made_by_steps or not masks.can_pack(tensor):
            return None
        given = compat.frames.input_of_dropout()
        if given is not None:
            self._offer(given)
        elif not self._is_of_attention(tensor):
            return None
        with torch.no_grad():
            scale = masks.scale_of(tensor)
            if not self.region.masks_hold and scale is not None and not self.fake:
                holds = masks.holds(tensor, scale)
                self.masks_hold = holds and self.masks_hold is not False
                if not holds:
                    return None
            bits = self._stays(masks.pack(tensor), MASKS, copied=True)
        unpack = functools.partial(masks.unpack, size=tensor.size(), stride=tensor.stride(), scale=scale)
        return Rebuilt(self.work, MASK, unpack, [bits])

    def _is_of_attention(self, tensor: torch.Tensor) -> bool:
        """Whether one call of torch saved a softmax and then this tensor, with the same shape."""
        if self.softmax is None:
            return False
        shape, call = self.softmax
        return call is not None and shape == tensor.shape and call == compat.frames.python_call()

    def _offer(self, tensor: torch.Tensor) -> None:
        """Record the input of a dropout, if it has no value, so that the dropout's result can be recomputed from it.

        An example is the adapter of a frozen linear layer: of the layer's input, autograd saves only the adapter's
        float32 copy after dropout.
        """
        edge = tensor.grad_fn, tensor.output_nr
        if tensor.grad_fn is not None and self.values.get(edge) is None:
            self.values.pop(edge, None)
            self.offered[edge] = weakref.ref(tensor), tensor._version

    def _take_offer(self, edge: _Edge) -> Value | None:
        """Keep the recorded dropout input of an edge, as 16 bits if it was cast up from them; None if it is gone."""
        offered, version = self.offered.pop(edge)
        tensor = offered()
        if tensor is None or tensor._version != version:
            return None
        return self._small(edge, tensor) or self._keep(edge, tensor)

    def _constant(self, tensor: torch.Tensor) -> Kept | Stored:
        """Keep a tensor without a graph, such as a mask or a parameter, and return its value."""
        if tensor.layout is not torch.strided:
            return Kept(tensor, self.work.block)
        whole = tensor if tensor._base is None else tensor._base
        if type(whole) is not torch.Tensor and isinstance(whole, nn.Parameter):  # `isinstance` alone is slow
            return self._parameter(tensor)
        return self._stays(tensor, NO_GRAPH)

    def _parameter(self, tensor: torch.Tensor) -> Kept:
        """Return the value of a parameter that is an operand of a rebuilt tensor, and so must not change."""
        return Kept(tensor, self.work.block, address=address_of(tensor) if self.region.reaches_back else 0)

    def enter(self, module: nn.Module, tensor: torch.Tensor) -> None:
        """Record that a small module begins, with the input `tensor`."""
        value = self.value_of(tensor)
        self.replay = Replay(self.work, module, value, tensor, whole=self.region.reaches_back)

    def leave(self, output: Any) -> None:
        """Record that the small module has ended with this output, which can be rebuilt from now on."""
        replay, self.replay = self.replay, None
        if replay is None or not isinstance(output, torch.Tensor):
            return
        rebuilt = Rebuilt(self.work, type(replay.module).__name__, replay, [])
        # If it saved nothing, other hooks packed what it saved, and it would save more when it is run again.
        if output.grad_fn is not None and replay.saved:
            self.values[output.grad_fn, output.output_nr] = rebuilt

    def _inside(self, tensor: torch.Tensor, replay: Replay) -> Inside:
        """Record a tensor that autograd saves inside a small module, and return what replaces it."""
        node = tensor.grad_fn
        is_parameter = node is None and type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter)
        self.packed.append((replay, (node, tensor.output_nr)))
        self.sizes.append(0 if is_parameter else tensor.nbytes)
        return Inside(replay)
