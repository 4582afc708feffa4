"""The tape of one forward of a block: how to recompute the tensor of each edge of autograd's graph.

An edge is an autograd node and the number of one of its outputs. Autograd calls `Tape.pack` with each tensor that it
saves, and `value_of` finds a value for it: from the edge of the tensor, the tape walks back through the graph, along
operations that `ops.OPS` can run again, until it meets values that are kept. The tape ends with the forward.

    hidden (kept) --> linear (kept) --> silu (rebuilt from the linear) --> product (rebuilt from both)
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.rebuild import masks
from hf_ckpt.engines.rebuild.ops import (
    ATTENTION,
    LINEAR,
    VIEW,
    Op,
    has_one_layout,
    rounds_by_strides,
    strides_of_result,
)
from hf_ckpt.engines.rebuild.values import (
    Inside,
    Layout,
    Rebuilt,
    Replay,
    Stored,
    Strides,
    Value,
    View,
    Work,
    fix_strides,
    read,
    strides_of,
)
from hf_ckpt.engines.running import running
from hf_ckpt.engines.seen import Kept, Seen, version_of
from hf_ckpt.logs import warn_once

log = logging.getLogger(__name__)

_next_sequence_number = compat.torch.next_autograd_sequence_number  # called for every tensor
_Edge = tuple[Any, int]
"""An autograd node, and the number of one of its outputs."""
_Name = tuple[int, int]
"""Id of a tensor, and its in-place version: while the tape holds the tensor, no other one has the same."""


class Rebuilds(Protocol):
    """What a tape needs of the function of its block: see `RebuildRegion`, which keeps it between forwards."""

    block: str
    work: Work
    rows: dict[str, Op]
    save: tuple[str, ...]
    hopeless: set[tuple[int, int, str]]
    parameters_stay: bool
    parts_are_sharded: bool | None


class NormOutput(NamedTuple):
    """The output of a block, which a norm at its end computed."""

    output: weakref.ref[torch.Tensor]
    replay: weakref.ref[Replay]
    """The call of the norm. It is gone with the graph that holds its input."""


def enter_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a small module that may be run again as a whole: record its call on the block's tape."""
    tape: Tape | None = None if compat.torch.is_compiling() else running.tape
    if tape is None or tape.replay or kwargs or len(args) != 1 or not torch.is_grad_enabled():
        return
    if module._modules:  # `parametrize` has put modules into it, which are gone when it would run again
        return
    # Another hook may change the input or the output, and accelerate's may fetch the weights for as long as the forward
    # runs, so operations of such a module are rebuilt one by one. Global ones run between it and `leave_module`.
    alone = len(module._forward_hooks) == 1 and len(module._forward_pre_hooks) == 1
    alone = alone and not compat.torch.global_forward_hooks
    if tape.region.parts_are_sharded:
        tape.see_freed(_next_sequence_number())
        tape.gathered += [weight.untyped_storage() for weight in module._parameters.values() if weight is not None]
    if alone and compat.distributed.ACCELERATES_HOOK not in vars(module) and isinstance(args[0], torch.Tensor):
        source = tape.value_of(args[0])
        if tape.has_unknown:
            fix_strides(source, args[0])
        tape.replay = Replay(tape.work, module, source, args[0], stay=tape.region.parameters_stay)


def leave_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a small module that may be run again: from now on its output can be rebuilt."""
    tape: Tape | None = None if compat.torch.is_compiling() else running.tape
    if tape is None or tape.replay is None or module is not tape.replay.module:
        return
    replay = tape.replay
    tape.replay = None
    # If it saved nothing, other hooks packed what it saved, and it would save more when it is run again.
    if isinstance(output, torch.Tensor) and output.grad_fn is not None and replay.saved:
        strides = Strides.CONTIGUOUS if output.is_contiguous() else Strides.SAME
        tape.values[output.grad_fn, output.output_nr] = Rebuilt(tape.work, replay, [], strides)


class Tape:
    """Records the tensors of one forward of a block, while it runs.

    Args:
        region: the block's function, with what is known from earlier forwards.
        args: the block's arguments.
        store: hooks that store kept tensors elsewhere, such as in host memory; None to keep them as they are.
        versions: id of a parameter -> its in-place version at the beginning.
    """

    def __init__(
        self,
        region: Rebuilds,
        args: tuple[Any, ...],
        store: compat.torch.SavedTensorHooks | None,
        versions: dict[int, int],
    ) -> None:
        self.region = region
        self.versions = versions
        self.work = region.work
        self.rows = region.rows
        self.hopeless = region.hopeless
        self.needs_biases = LINEAR not in region.save
        """Whether linear layers are rebuilt."""
        self.biases: dict[int, torch.Tensor] = {}
        """Autograd's sequence number, as in `packed_at` -> bias of the linear layer that ran then. Autograd holds no
        frozen bias."""
        self.stored: dict[_Name, Stored] = {}
        """The values of kept tensors that hooks store elsewhere."""
        self.kept: Callable[[torch.Tensor], Kept | Stored] = functools.partial(Kept, block=region.block)
        """Returns the value of a tensor that is kept."""
        if store is not None:
            # One `Stored` for all nodes that save the tensor, so that a user's hooks get it once. A `Kept` is cheap.
            make = functools.partial(Stored, hooks=store, block=region.block)
            self.kept = functools.partial(_once, self.stored, make)
        self.first = _next_sequence_number()
        """Autograd nodes of this block have this sequence number or a larger one."""
        self.rebuilds_from = self.first
        """Nodes of this number or a larger one can run again. It grows if parts of the block are sharded one by one."""
        self.gathered: list[torch.UntypedStorage] = []
        """The memory of the weights in such parts, as far as they have run."""
        self.values: dict[_Edge, Value | None] = {}
        """Value of each edge seen so far; None if it cannot be rebuilt."""
        self.inputs: dict[_Edge, Seen] = {}
        """The block's inputs that have a graph, as they were at the beginning."""
        self.offered: dict[_Edge, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Inputs of dropouts, with their in-place versions: they can be kept as long as they are alive."""
        self.has_unknown = False
        """Whether a value has been made whose strides are unknown. Most blocks have none, and skip all checks of it."""
        self.replay: Replay | None = None
        """The call of the small module that runs now, if any."""
        self.packed_at: set[int] = set()
        """Autograd's sequence numbers at the times when this tape packed a tensor. They identify the tensor's node."""
        self.softmax: torch.Size | None = None
        """Shape of the last packed tensor, if it is the softmax inside torch's attention."""
        self.saved = 0
        """Number of tensors that autograd saved."""
        self.dropped = 0
        """Number of those that can be rebuilt."""
        self._see_inputs(args)

    def _see_inputs(self, args: tuple[Any, ...]) -> None:
        """Record the block's inputs: how to rebuild them, if the block before ends with a norm, or their versions."""
        norm_output: NormOutput | None = running.norm_output
        running.norm_output = None
        for arg in args:
            if not isinstance(arg, torch.Tensor) or arg.grad_fn is None:
                continue
            edge = arg.grad_fn, arg.output_nr
            is_of_norm = norm_output is not None and norm_output.output() is arg
            replay = norm_output.replay() if norm_output is not None and is_of_norm else None
            # BERT's blocks end with a norm, whose input the block before keeps. So its output, the input of this block,
            # need not be kept, too. Unless a hook has changed it since, or parameters are sharded: the backward of this
            # block finds none of the norm.
            if self.region.parameters_stay and replay is not None and not arg._version:
                strides = Strides.CONTIGUOUS if arg.is_contiguous() else Strides.SAME
                self.values[edge] = Rebuilt(self.work, replay, [], strides)
            else:
                self.inputs[edge] = Seen(arg)

    def close(self, outputs: Any) -> None:
        """End the tape: forget every node.

        Autograd holds the hooks, and they hold the tape, so a tape with nodes would be a reference cycle. If `outputs`
        ends with a norm of something that is kept, the next block may rebuild it.
        """
        output = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
        if isinstance(output, torch.Tensor) and not output._version:
            rebuilt = self.values.get((output.grad_fn, output.output_nr))
            if type(rebuilt) is Rebuilt and type(rebuilt.operation) is Replay:
                replay = rebuilt.operation
                # Its backward comes first. A chain of operations would fill the caches of this block's values, until
                # the backward of this block has used them, too.
                if type(replay.source.root) is not Rebuilt:
                    running.norm_output = NormOutput(weakref.ref(output), weakref.ref(replay))
        for stored in self.stored.values():
            stored.original = None
        for collection in (self.values, self.inputs, self.offered, self.packed_at, self.biases, self.stored):
            collection.clear()
        self.gathered = []
        self.replay = None

    @compat.torch.untraced  # compiled parts of a block call it
    def pack(self, tensor: torch.Tensor) -> Value | Inside:
        """Saved-tensor hook: return what autograd holds in place of `tensor`."""
        self.saved += 1
        if self.replay is not None:  # a small module runs, and will run again as a whole
            self.dropped += 1
            return Inside(self.replay)
        # Autograd has just made the node that saves this tensor. Its number is the one before this, see `may_read`.
        number = _next_sequence_number()
        self.packed_at.add(number)
        # A parameter, or a view of one, such as the transposed weight of a linear layer.
        weight = tensor if type(tensor) is nn.Parameter else tensor._base
        if type(weight) is nn.Parameter and weight.is_leaf:
            bias = compat.frames.bias_of_linear() if self.needs_biases and weight.dim() == 2 else None
            if bias is not None:
                self.biases[number] = bias
            if self.region.parts_are_sharded and (self.needs_biases or weight.dim() != 2):
                self.gathered.append(weight.untyped_storage())
            value: Value = self.kept(tensor)
        elif tensor.layout is not torch.strided:  # sparse tensors have neither strides nor a storage to compare
            return Kept(tensor, self.work.block)
        else:
            if self.gathered:
                self.see_freed(number - 1)
            value = self.value_of(tensor)
            # torch's own attention saves its softmax, and right after that the mask of its dropout, of the same shape.
            self.softmax = tensor.shape if type(tensor.grad_fn).__name__ == "SafeSoftmaxBackward0" else None
        if type(value) is Kept:
            return value
        root = value.root
        if root is not None:
            root.add_use()
        if type(root) is Rebuilt:
            self.dropped += 1
            if value is root:
                root.layout = Layout(tensor.size(), tensor.stride(), tensor.dtype)
            elif self.has_unknown:
                fix_strides(value, tensor)
        return value

    def see_freed(self, following: int) -> None:
        """If a part has freed its weights since, keep what is needed of its results from node `following` on.

        FSDP2 frees the weights of a module that is sharded by itself after its forward, and gathers them again only for
        the backward of that module: when a later one runs backward, nothing can be rebuilt from them.
        """
        if 0 not in map(torch.UntypedStorage.nbytes, self.gathered):
            return
        self.gathered = [storage for storage in self.gathered if storage.nbytes()]
        self.values = {edge: value for edge, value in self.values.items() if isinstance(value, (Kept, Stored))}
        self.rebuilds_from = following
        warn_once(
            log,
            "hf_ckpt: parts of blocks are sharded one by one (FSDP), so `selective` keeps what a part returns. Shard "
            "whole blocks if that needs too much memory.",
        )

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor. The first of these ways that applies:

        1. Without a graph, it is a mask, whose bits are kept, or it is kept.
        2. Changed in place, it is kept: the graph may not show the change, so nothing could rebuild it.
        3. A view of a tensor with a value is a view of that value.
        4. Operations rebuild it.
        5. If it, or what it is a view of, was cast up from 16 bits, these are kept.
        6. It is kept.
        """
        node = tensor.grad_fn
        if node is None:
            return self._mask(tensor) or self.kept(tensor)
        edge = node, tensor.output_nr
        base = tensor._base
        version = tensor._version
        if version:
            earlier = self.values.get(edge)
            if isinstance(earlier, (Kept, Stored)) and earlier.version == version:
                return earlier
            return self._keep(edge, tensor)
        value = self._view_of(base, tensor) if base is not None else None
        if value is not None:
            # The graph may not lead to the base: FSDP2 puts a function around the inputs of a module.
            self.values[edge] = value
            return value
        value = self.resolve(edge) or self._small(edge, tensor)
        if self.has_unknown and base is not None and base.grad_fn is not None:
            whole = self.values.get((base.grad_fn, base.output_nr))
            if whole is not None:
                fix_strides(whole, base)
        if value is None and base is not None and base.grad_fn is not None:
            # An adapter's input, for example: a view, in float32, of hidden states in 16 bits.
            small = self._small((base.grad_fn, base.output_nr), base)
            value = self.values[edge] = None if small is None else self._view_of(base, tensor)
        if value is None:
            return self._keep(edge, tensor)
        # A view of a kept tensor shares its memory, so it needs no operation, and no count of its uses.
        if type(value) is View and value.root is None:
            value = self.values[edge] = self.kept(tensor)
        return value

    def _view_of(self, base: torch.Tensor, tensor: torch.Tensor) -> Value | None:
        """Return the value of a view whose `base` already has a value, without walking the graph; else None."""
        node = base.grad_fn
        if node is None:
            return None
        value = self.values.get((node, base.output_nr))
        if type(value) is Kept:
            return self.kept(tensor)
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

    def resolve(self, edge: _Edge) -> Value | None:
        """Return the value of an edge: the one in `values`, or an operation that rebuilds it; None if neither
        exists."""
        values = self.values
        if edge in values:
            return values[edge]
        if edge in self.inputs:
            seen = self.inputs[edge]
            return None if seen.is_overwritten else self._keep(edge, seen.tensor)
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
                if node._sequence_nr() >= self.rebuilds_from and (not row.reads_tensors or self.may_read(node)):
                    value = self._make(row, node, number)
                if value is None:
                    self.hopeless.add(place)
        elif name == "torch::autograd::AccumulateGrad":
            value = self._leaf(node.variable)
        if value is None and edge in self.offered:
            value = self._take_offer(edge)
        values[edge] = value
        return value

    def may_read(self, node: Any) -> bool:
        """Whether this tape packed what a node saved, so that it may be read.

        If other hooks inside the block packed it, such as those of a checkpoint, reading it would run the checkpoint's
        function again in the middle of the forward.
        """
        return node._sequence_nr() + 1 in self.packed_at

    def _make(self, row: Op, node: Any, number: int) -> Value | None:
        """Return the value that rebuilds output `number` of a node by its row; None if an operand is unknown."""
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
                operand = self._frozen_bias(node)
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
        strides = row.strides
        if self.has_unknown or strides is Strides.UNKNOWN:
            strides = strides_of_result(row, node, number, operands)
            self.has_unknown |= strides is Strides.UNKNOWN
            is_unknown = Strides.UNKNOWN in map(strides_of, operands) and rounds_by_strides(row, node, number)
            if is_unknown and not (row.op_class == LINEAR and all(map(has_one_layout, operands))):
                return None
        metadata = node._input_metadata[number]
        # Constants are read now, because a value must not hold the node: it may be saved by that very node.
        operation = row.prepare(node, metadata, number) if row.several else row.prepare(node, metadata)
        if operation is None:
            return None
        if row.op_class == VIEW:
            return View(operands[0], operation, strides)  # takes no memory, so it is not cached
        if row.op_class in (LINEAR, ATTENTION):  # switches of the process choose their kernels
            operation = functools.partial(compat.process_state.Switches().run, operation)
        return Rebuilt(self.work, operation, operands, strides)

    def _saved_operand(self, node: Any, name: str) -> Value | None:
        """Return the value of a tensor without a graph that a node has saved under a name; None if there is none."""
        # A number, such as the 3.3 of `x / 3.3`, is saved as a tensor that hooks do not get. So it may be read even
        # where other hooks packed the tensors of the node. It is kept as it is: a copy would no longer be a number,
        # and would turn a result without dimensions into float64.
        readable = self.may_read(node) or not compat.torch.is_held_by_hooks(node, name)
        operand = read(node, name) if readable else None
        if isinstance(operand, (Rebuilt, View, Stored)):
            return operand
        return Kept(operand, self.work.block) if isinstance(operand, torch.Tensor) else None

    def _frozen_bias(self, node: Any) -> Value | None:
        """Return the value of the bias of the linear layer that made a node; None if unknown."""
        bias = self.biases.get(node._sequence_nr() + 1)
        return None if bias is None else self._leaf(bias)

    def _leaf(self, leaf: torch.Tensor) -> Kept | None:
        """Return the value of a parameter; None if the block has written to it, perhaps after an operation used it."""
        value = Kept(leaf, self.work.block, address=self.region.parameters_stay)
        return value if value.version == self.versions.get(id(leaf), value.version) else None

    def _small(self, edge: _Edge, tensor: torch.Tensor) -> Value | None:
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
            small = self.kept(tensor.detach().to(dtype))
        # Not `small` itself: a view of what is kept is kept as it is (`_view_of`), and that would hold the memory of
        # the tensor before the cast, which is free to go.
        self.has_unknown = True
        self.values[source] = Rebuilt(self.work, torch.Tensor.detach, [small], Strides.UNKNOWN)
        value = self.values[edge] = self._make(self.rows[node.name()], node, 0)
        return value

    def _keep(self, edge: _Edge, tensor: torch.Tensor) -> Kept | Stored:
        """Keep the tensor of an edge as it is, in the store if there is one."""
        value = self.kept(tensor)
        self.values[edge] = value
        return value

    def _mask(self, tensor: torch.Tensor) -> Value | None:
        """If a tensor without a graph is a dropout mask, keep its bits and return its value. Else return None.

        A mask is recognised by the call that produced it: `functional.dropout`, which saves nothing else, or torch's
        own attention, which saves its softmax just before.
        """
        is_noise = tensor.dtype is not torch.bool
        # Noise is drawn and then divided, in place: two changes. A mask of truth values is the result of an operation.
        if tensor._version != (2 if is_noise else 0) or not masks.can_pack(tensor):
            return None
        dropout_input = compat.frames.input_of_dropout()
        if dropout_input is not None:
            self._offer(dropout_input)
        elif tensor.shape != self.softmax:
            return None
        if is_noise:  # of a CPU
            return None
        with torch.no_grad():
            bits = self.kept(masks.to_bits(tensor))
        from_bits = functools.partial(masks.from_bits, size=tensor.size(), stride=tensor.stride())
        return Rebuilt(self.work, from_bits, [bits])

    def _offer(self, tensor: torch.Tensor) -> None:
        """Record the input of a dropout, if it has no value, so that the dropout's result can be recomputed from it.

        An example is the adapter of a frozen linear layer: of the layer's input, autograd saves only the adapter's
        float32 copy after dropout.
        """
        edge = tensor.grad_fn, tensor.output_nr
        if tensor.grad_fn is not None and self.values.get(edge) is None:
            self.values.pop(edge, None)  # it was found to have none, and `resolve` would not look again
            # Weakly: nobody may need it, and then the tape would hold what no checkpointing would free.
            self.offered[edge] = weakref.ref(tensor), tensor._version

    def _take_offer(self, edge: _Edge) -> Value | None:
        """Keep the recorded dropout input of an edge, as 16 bits if it was cast up from them; None if it is gone."""
        offered, version = self.offered.pop(edge)
        tensor = offered()
        if tensor is None or tensor._version != version:
            return None
        return self._small(edge, tensor) or self._keep(edge, tensor)


def _once(stored: dict[_Name, Stored], make: Callable[[torch.Tensor], Stored], tensor: torch.Tensor) -> Stored:
    """Return the value of a kept tensor that hooks store elsewhere: the same one, however often autograd saves it."""
    return stored.setdefault((id(tensor), version_of(tensor)), make(tensor))
