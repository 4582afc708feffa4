"""The tape of one forward of a block: what autograd holds in place of each tensor that it saves.

Autograd calls `Tape.pack` with each tensor. The tape ends with the forward, and puts these together:

| part | finds |
|---|---|
| `graph.Graph` | the value of a tensor, from the edges of autograd's graph |
| `replay.Replay` | the places of what a small module saves, which runs again as a whole (`modules`) |
| `dropouts.Dropouts` | masks of dropout, and the inputs of dropouts |
| `parameters.Parameters` | whether a parameter is as it was at the beginning, and the biases of linear layers |
| `parameters.Parts` | whether a part of the block has freed its weights |
| `keeping.Keeping` | what is kept, and where it is stored |
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.rebuild.graph import Graph, Rebuilds, next_sequence_number
from hf_ckpt.engines.rebuild.keeping import Keeping
from hf_ckpt.engines.rebuild.layouts import Layout
from hf_ckpt.engines.rebuild.ops import LINEAR
from hf_ckpt.engines.rebuild.parameters import Parameters, Parts
from hf_ckpt.engines.rebuild.replay import Inside, Replay
from hf_ckpt.engines.rebuild.values import Rebuilt, Value, View, fix_strides
from hf_ckpt.engines.running import running
from hf_ckpt.engines.seen import Kept, Seen


class RecordsTape(Rebuilds, Protocol):
    """What a tape needs of the function of its block: see `RebuildRegion`, which keeps it between forwards."""

    block: str
    save: tuple[str, ...]
    parameters_stay: bool
    parts_are_sharded: bool | None


class NormOutput(NamedTuple):
    """The output of a block, which a norm at its end computed."""

    output: weakref.ref[torch.Tensor]
    replay: weakref.ref[Replay]
    """The call of the norm. It is gone with the graph that holds its input."""


class Tape:
    """Records the tensors of one forward of a block, while it runs.

    Args:
        region: the block's function, with what is known from earlier forwards.
        args: the block's arguments.
        store: hooks that store kept tensors elsewhere, such as in host memory; None to keep them as they are.
        versions: id of a parameter -> its in-place version at the beginning; None if nobody looked.
    """

    def __init__(
        self,
        region: RecordsTape,
        args: tuple[Any, ...],
        store: compat.autograd.SavedTensorHooks | None,
        versions: dict[int, int] | None,
    ) -> None:
        self.region = region
        self.keeping = Keeping(region.block, store)
        self.parameters = Parameters(region.block, versions, stay=region.parameters_stay)
        self.graph = Graph(region, self.keeping.keep, self.parameters)
        self.rebuilds_linears = LINEAR not in region.save
        self.parts = Parts() if region.parts_are_sharded else None
        self.replay: Replay | None = None
        """The call of the small module that runs now, if any."""
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
                self.graph.values[edge] = replay.output(arg)
            else:
                self.graph.inputs[edge] = Seen(arg)

    def close(self, outputs: Any) -> None:
        """End the tape: forget every node.

        Autograd holds the hooks, and they hold the tape, so a tape with nodes would be a reference cycle. If `outputs`
        ends with a norm of something that is kept, the next block may rebuild it.
        """
        output = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
        if isinstance(output, torch.Tensor) and not output._version:
            rebuilt = self.graph.values.get((output.grad_fn, output.output_nr))
            if type(rebuilt) is Rebuilt and type(rebuilt.operation) is Replay:
                replay = rebuilt.operation
                # Its backward comes first. A chain of operations would fill the caches of this block's values, until
                # the backward of this block has used them, too.
                if not any(type(source) is Rebuilt for source in replay.sources):
                    running.norm_output = NormOutput(weakref.ref(output), weakref.ref(replay))
        self.keeping.close()
        self.graph.close()
        if self.parts is not None:
            self.parts.gathered = []
        self.replay = None

    @compat.torch.untraced  # compiled parts of a block call it
    def pack(self, tensor: torch.Tensor) -> Value | Inside:
        """Saved-tensor hook: return what autograd holds in place of `tensor`, and begin its use; see `values`."""
        self.saved += 1
        if self.replay is not None:  # a small module runs, and will run again as a whole
            self.dropped += 1
            return Inside(self.replay)
        # Autograd has just made the node that saves this tensor. Its number is the one before this, see `may_read`.
        number = next_sequence_number()
        self.graph.packed_at.add(number)
        # A parameter, or a view of one, such as the transposed weight of a linear layer.
        weight = tensor if type(tensor) is nn.Parameter else tensor._base
        if type(weight) is nn.Parameter and weight.is_leaf:
            if self.rebuilds_linears or self.parts is not None:
                self._see_weight(weight, number)
            value: Value = self.keeping.keep(tensor)
        elif tensor.layout is not torch.strided:  # sparse tensors have neither strides nor a storage to compare
            return Kept(tensor, self.region.block)
        else:
            if self.parts is not None:
                self.forget_freed(number - 1)
            value = self.graph.value_of(tensor)
            # torch's own attention saves its softmax, and right after that the mask of its dropout, of the same shape.
            is_softmax = type(tensor.grad_fn).__name__ == "SafeSoftmaxBackward0"
            self.graph.dropouts.softmax = tensor.shape if is_softmax else None
        if type(value) is Kept:
            return value
        root = value.root if type(value) is View else value
        if root is not None:
            root.begin_use()
        if type(root) is Rebuilt:
            self.dropped += 1
            if value is root:
                root.layout = Layout(tensor.size(), tensor.stride(), tensor.dtype)
            elif self.graph.has_unknown:
                fix_strides(value, tensor)
        return value

    def _see_weight(self, weight: torch.Tensor, number: int) -> None:
        """Note the bias and the memory of a weight that an operation has saved, for what is rebuilt from them."""
        is_linear = weight.dim() == 2
        bias = compat.frames.bias_of_linear() if self.rebuilds_linears and is_linear else None
        if bias is not None:
            self.parameters.biases[number] = bias
        if self.parts is not None and (self.rebuilds_linears or not is_linear):
            self.parts.add(weight)

    def forget_freed(self, following: int) -> None:
        """If a part has freed its weights since, keep what is needed of its results from node `following` on."""
        if self.parts is not None and self.parts.have_freed():
            self.graph.forget_rebuilt(following)
