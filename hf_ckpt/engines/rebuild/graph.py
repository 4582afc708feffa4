"""The values of the edges of autograd's graph, while the forward of a block runs.

An edge is an autograd node and the number of one of its outputs. From the edge of a tensor, `Graph` walks back along
operations that `ops.OPS` can run again, until it meets values that are kept.

    hidden (kept) --> linear (kept) --> silu (rebuilt from the linear) --> product (rebuilt from both)
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch

from hf_ckpt import compat
from hf_ckpt.engines.rebuild.dropouts import Dropouts, Edge
from hf_ckpt.engines.rebuild.keeping import Keep
from hf_ckpt.engines.rebuild.layouts import Layout, Strides
from hf_ckpt.engines.rebuild.ops import (
    ATTENTION,
    LINEAR,
    VIEW,
    Function,
    Op,
    has_one_layout,
    rounds_by_strides,
    strides_of_result,
)
from hf_ckpt.engines.rebuild.parameters import Parameters
from hf_ckpt.engines.rebuild.unpacking import read_saved
from hf_ckpt.engines.rebuild.values import DEEPEST, Rebuilt, Stored, Value, View, Work, fix_strides, strides_of
from hf_ckpt.engines.seen import Kept, Seen

next_sequence_number = compat.autograd.next_autograd_sequence_number  # called for every tensor


class Rebuilds(Protocol):
    """What a graph needs of the function of its block: see `RebuildRegion`, which keeps it between forwards."""

    work: Work
    rows: dict[str, Op]
    hopeless: set[tuple[int, int, str]]


class Graph:
    """Finds values for the tensors of one forward of a block.

    Args:
        region: the block's function, with what is known from earlier forwards.
        keep: keeps a tensor.
        parameters: the parameters of the block.
    """

    def __init__(self, region: Rebuilds, keep: Keep, parameters: Parameters) -> None:
        self.work = region.work
        self.rows = region.rows
        self.hopeless = region.hopeless
        self.keep = keep
        self.parameters = parameters
        self.first = next_sequence_number()
        """Autograd nodes of this block have this sequence number or a larger one."""
        self.rebuilds_from = self.first
        """Nodes of this number or a larger one can run again. It grows if parts of the block are sharded one by one."""
        self.values: dict[Edge, Value | None] = {}
        """Value of each edge seen so far; None if it cannot be rebuilt."""
        self.inputs: dict[Edge, Seen] = {}
        """The block's inputs that have a graph, as they were at the beginning."""
        self.dropouts = Dropouts(region.work, keep, self.values)
        self.packed_at: set[int] = set()
        """Autograd's sequence numbers at the times when the tape packed a tensor. They identify the tensor's node."""
        self.steps = 0
        """How far `resolve` has walked from the tensor that is looked at."""
        self.has_unknown = False
        """Whether a value has been made whose strides are unknown. Most blocks have none, and skip all checks of it."""

    def close(self) -> None:
        """Forget every node."""
        for collection in (self.values, self.inputs, self.dropouts.offered, self.packed_at, self.parameters.biases):
            collection.clear()

    def forget_rebuilt(self, following: int) -> None:
        """Rebuild nothing that nodes before `following` have computed. What is kept of them stays."""
        rebuilt = [edge for edge, value in self.values.items() if not isinstance(value, (Kept, Stored))]
        for edge in rebuilt:
            del self.values[edge]
        self.rebuilds_from = following

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor. The first of these ways that applies:

        1. Without a graph, it is a mask, whose bits are kept, or it is kept.
        2. Changed in place, it is kept: the graph may not show the change, so nothing could rebuild it.
        3. A view of a kept tensor is kept. One of a contiguous tensor that operations rebuild is a view of its value.
        4. Operations rebuild it.
        5. If it, or what it is a view of, was cast up from 16 bits, these are kept.
        6. It is kept.
        """
        node = tensor.grad_fn
        if node is None:
            return self.dropouts.mask(tensor) or self.keep(tensor)
        edge = node, tensor.output_nr
        base = tensor._base
        version = tensor._version
        if version:
            earlier = self.values.get(edge)
            if not isinstance(earlier, (Kept, Stored)) or earlier.version != version:
                earlier = self.values[edge] = self.keep(tensor)
            return earlier
        value = self._view_of(base, tensor) if base is not None else None
        if value is not None:
            # The graph may not lead to the base: FSDP2 puts a function around the inputs of a module.
            self.values[edge] = value
            return value
        value = self.resolve(edge)
        if value is None and tensor.dtype is torch.float32:
            value = self._small(edge, tensor)
        if self.has_unknown and base is not None and base.grad_fn is not None:
            whole = self.values.get((base.grad_fn, base.output_nr))
            if whole is not None:
                fix_strides(whole, base)
        if value is None and base is not None and base.grad_fn is not None:
            # An adapter's input, for example: a view, in float32, of hidden states in 16 bits.
            small = self._small((base.grad_fn, base.output_nr), base)
            value = self.values[edge] = None if small is None else self._view_of(base, tensor)
        # A view of a kept tensor shares its memory, so it needs no operation, and no count of its uses.
        if value is None or (type(value) is View and value.root is None):
            value = self.values[edge] = self.keep(tensor)
        return value

    def _view_of(self, base: torch.Tensor, tensor: torch.Tensor) -> Value | None:
        """Return the value of a view whose `base` already has a value, without walking the graph; else None."""
        node = base.grad_fn
        if node is None:
            return None
        value = self.values.get((node, base.output_nr))
        if type(value) is Kept:
            return self.keep(tensor)
        if type(value) is not Rebuilt or not base.is_contiguous():
            return None
        if tensor.dtype is not base.dtype or tensor.is_conj() or tensor.is_neg():  # `as_strided` cannot make these
            return None
        # The view is taken by strides, so the rebuilt base must have those of the forward.
        value.layout = value.layout or Layout(base.size(), base.stride(), base.dtype)
        size = tensor.size()
        stride = tensor.stride()
        offset = tensor.storage_offset() - base.storage_offset()
        return View(value, lambda x: x.as_strided(size, stride, x.storage_offset() + offset))

    def resolve(self, edge: Edge) -> Value | None:
        """Return the value of an edge: the one in `values`, or an operation that rebuilds it; None if neither
        exists."""
        values = self.values
        if edge in values:
            return values[edge]
        if edge in self.inputs:
            seen = self.inputs[edge]
            if seen.is_overwritten:
                return None
            kept = values[edge] = self.keep(seen.tensor)
            return kept
        node, number = edge
        name = node.name()
        row = self.rows.get(name)
        value: Value | None = None
        if row is not None:
            # Counted from the block's first node, which makes it the same place in each forward of the block.
            place = node._sequence_nr() - self.first, number, name
            if place not in self.hopeless:
                # Nothing from before this block is run again: each block would do so by itself for what they share,
                # such as rotary embeddings.
                is_of_block = node._sequence_nr() >= self.rebuilds_from and self.steps < DEEPEST
                if is_of_block and (not row.reads_tensors or self.may_read(node)):
                    self.steps += 1
                    value = self.make(row, node, number)
                    self.steps -= 1
                if value is None:
                    self.hopeless.add(place)
        elif name == "torch::autograd::AccumulateGrad":
            value = self.parameters.value(node.variable)
        if value is None and edge in self.dropouts.offered:
            offered = self.dropouts.take(edge)
            if offered is not None:
                value = self._small(edge, offered) or self.keep(offered)
        values[edge] = value
        return value

    def may_read(self, node: Any) -> bool:
        """Whether the tape packed what a node saved, so that it may be read.

        If other hooks inside the block packed it, such as those of a checkpoint, reading it would run the checkpoint's
        function again in the middle of the forward.
        """
        return node._sequence_nr() + 1 in self.packed_at

    def make(self, row: Op, node: Any, number: int) -> Value | None:
        """Return the value that rebuilds output `number` of a node by its row; None if an operand is unknown."""
        operands = self._operands(row, node)
        if operands is None:
            return None
        strides = row.strides
        if self.has_unknown or strides is Strides.UNKNOWN:
            of_operands = min(map(strides_of, operands))
            strides = strides_of_result(row, node, number, of_operands)
            self.has_unknown |= strides is Strides.UNKNOWN
            may_differ = of_operands is Strides.UNKNOWN and rounds_by_strides(row, node, number)
            if may_differ and not (row.op_class == LINEAR and all(map(has_one_layout, operands))):
                return None
        metadata = node._input_metadata[number]
        # Constants are read now, because a value must not hold the node: it may be saved by that very node.
        operation: Function | None
        if row.several:
            operation = row.prepare(node, metadata, number)
        elif row.reads_tensors:
            operation = row.prepare(node, metadata, self.work.block)
        else:
            operation = row.prepare(node, metadata)
        if operation is None:
            return None
        if row.op_class in (LINEAR, ATTENTION):  # switches of the process choose their kernels
            operation = functools.partial(compat.process_state.Switches().run, operation)
        value: Value
        if row.op_class == VIEW:
            value = View(operands[0], operation, strides)  # takes no memory, so it is not cached
        else:
            value = Rebuilt(self.work, operation, operands, strides)
        return value if value.depth <= DEEPEST else None

    def _operands(self, row: Op, node: Any) -> list[Value] | None:
        """Return the values of the operands of a node; None if one is unknown."""
        values = self.values
        operands = []
        # `[:None]` are all of them.
        for place, source in enumerate(node.next_functions[: row.inputs]):
            operand: Value | None = None
            if source in values:
                operand = values[source]
            elif source[0] is not None:
                operand = self.resolve(source)
            elif row.has_bias and not place:
                operand = self.parameters.bias_of(node)
            elif place < len(row.saved_as):  # it needs no gradient, so the graph has no edge to it
                operand = self._saved_operand(node, row.saved_as[place])
            if operand is None:
                return None
            operands.append(operand)
        for name in row.extra:
            operand = self._saved_operand(node, name)
            if operand is None:
                return None
            operands.append(operand)
        return operands

    def _saved_operand(self, node: Any, name: str) -> Value | None:
        """Return the value of a tensor without a graph that a node has saved under a name; None if there is none."""
        # A number, such as the 3.3 of `x / 3.3`, is saved as a tensor that hooks do not get. So it may be read even
        # where other hooks packed the tensors of the node. It is kept as it is: a copy would no longer be a number,
        # and would turn a result without dimensions into float64.
        readable = self.may_read(node) or not compat.autograd.is_held_by_hooks(node, name)
        operand = read_saved(node, name) if readable else None
        if isinstance(operand, (Rebuilt, View, Stored)):
            return operand
        return Kept(operand, self.work.block) if isinstance(operand, torch.Tensor) else None

    def _small(self, edge: Edge, tensor: torch.Tensor) -> Value | None:
        """If a float32 tensor was cast up from 16 bits, keep those bits: exact, and half the size. Else return None."""
        node = edge[0]
        if tensor.dtype != torch.float32 or node.name() != "ToCopyBackward0" or not tensor.is_contiguous():
            return None
        (source,) = node.next_functions
        if source[0] is None or node._sequence_nr() < self.first or tensor._version:
            return None
        dtype = source[0]._input_metadata[source[1]].dtype
        if dtype not in (torch.bfloat16, torch.float16):
            return None
        with torch.no_grad():
            small = self.keep(tensor.detach().to(dtype))
        # Not `small` itself: a view of what is kept is kept as it is (`_view_of`), and that would hold the memory of
        # the tensor before the cast, which is free to go.
        self.has_unknown = True
        self.values[source] = Rebuilt(self.work, torch.Tensor.detach, [small], Strides.UNKNOWN)
        value = self.values[edge] = self.make(self.rows[node.name()], node, 0)
        return value
