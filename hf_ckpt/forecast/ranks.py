"""What one rank holds under FSDP2, in terms of the step of an unsharded model.

`fully_shard` is applied to every block, and to the rest of the model. On a rank, the following is alive in addition to
activations (`torch/distributed/fsdp/_fully_shard`, PyTorch 2.6 to 2.13):

* always: its shards of all parameters, and of the optimizer's state;
* while the model runs: the unsharded parameters outside the blocks, and one all-gather buffer. In the forward it is the
  running block's, which is freed only when the next block's parameters have been gathered and copied out of their own
  buffer; in the backward it is that of the block before, which is prefetched;
* while a block runs, forward or backward: its unsharded parameters, in their compute type. Recomputation uses these, so
  no plan gathers anything once more;
* in the backward of a block: its unsharded gradients, as they are computed, and the gradients that the block after it
  has sent to the reduce-scatter; then those that it sends itself, and its gradient shards, which are kept;
* from the head's backward to the end: unsharded gradients of parameters outside the blocks.

P, R and S are the bytes of a block's unsharded parameters, of the gradients that it sends, and of this rank's gradient
shards; `max` is the largest of all blocks:

    always             parameter shards + optimizer's state + P(outside) + max P
    a block's forward  + 2 P for a moment, then + P + its activations
    its backward       + P + max R + its activations + its unsharded gradients so far; at its end unsharded gradients
                       + R, then R + S, then S
"""

from __future__ import annotations

import dataclasses
import math

from hf_ckpt.costs.costs import CallCosts, Costs, Static
from hf_ckpt.costs.steps import Part
from hf_ckpt.forecast.batches import DTYPES
from hf_ckpt.forecast.model import ShallowModel, Tensors
from hf_ckpt.forecast.question import Question
from hf_ckpt.spec.actions import FULL


@dataclasses.dataclass(frozen=True)
class _Gathered:
    """Bytes of parameters that are gathered together, and of their gradients, which are reduced together."""

    whole: int = 0
    """The unsharded parameters, in their compute type."""
    cast: int = 0
    """A copy of this rank's parameter shards in that type, while it is sent; 0 if no copy is needed."""
    sent: int = 0
    """The unsharded gradients."""
    kept: int = 0
    """This rank's gradient shards, which are kept until the optimizer's step."""
    summed: int = 0
    """This rank's gradient shards in the type of the reduction, temporarily; 0 if they are kept in that type."""


class Sharding:
    """How FSDP2 splits a model, which is in its compute type. Shards have the type of the weights.

    Args:
        model: the unsharded model.
        training: the training, with the number of ranks.
    """

    def __init__(self, model: ShallowModel, training: Question) -> None:
        self.ranks, self.element_bytes = training.ranks, DTYPES[training.dtype].itemsize
        """Bytes of an element of the shards."""
        self._accumulated = training.accumulation > 1
        names = [block.name for stack in model.stacks for block in stack.blocks]
        self._blocks = dict(zip(names, map(self._gathered, model.inside), strict=True))
        self._outside = self._gathered(model.outside)
        self._elements = sum(math.prod(shape) for shape, *_ in model.tensors)
        self._buffer = max(block.whole for block in self._blocks.values())
        self._above = max(0, self._outside.whole - self._buffer)
        """By how many bytes the buffer is larger while it gathers the parameters outside the blocks."""
        self._sent = max(block.sent for block in self._blocks.values())

    def _gathered(self, tensors: Tensors) -> _Gathered:
        rows = [(0, 0, 0, 0, 0)]
        for shape, size, trained in tensors:
            part = -(-math.prod(shape) // self.ranks)
            whole, cast = part * self.ranks * size, part * size if size != self.element_bytes else 0
            rows.append((whole, cast, *((whole, part * self.element_bytes, cast) if trained else (0, 0, 0))))
        return _Gathered(*map(sum, zip(*rows, strict=True)))

    def _static(self, static: Static) -> Static:
        """What is alive on a rank at every moment, from that of the unsharded model whose optimizer has all shards."""
        return dataclasses.replace(
            static,
            parameters=-(-self._elements // self.ranks) * self.element_bytes,
            optimizer=-(-static.optimizer // self.ranks),
            gradients=self._outside.kept + sum(block.kept for block in self._blocks.values()),
            buffers=static.buffers + self._outside.whole + self._buffer,
        )

    def costs(self, costs: Costs) -> Costs:
        """The costs on a rank, from those of the unsharded model."""
        outside = self._outside
        above = self._above
        first = self._blocks[costs.calls[0].block.name].whole
        before = dataclasses.replace(
            costs.before,
            peak=max(above + outside.cast, costs.before.peak + above, costs.before.net + above + 2 * first),
        )
        last = max(place for place, call in enumerate(costs.calls) if FULL in call.costs)
        calls = tuple(self._call(call, is_last=place == last) for place, call in enumerate(costs.calls))
        forward, backward = costs.head
        # Before the head's backward, parameters outside the blocks are gathered again if they were freed.
        backward = dataclasses.replace(backward, peak=max(above + outside.cast, backward.peak))
        static = self._static(costs.static)
        return dataclasses.replace(costs, before=before, calls=calls, head=(forward, backward), static=static)

    def _call(self, call: CallCosts, *, is_last: bool) -> CallCosts:
        """What a call costs on a rank. After the backward of the last one, the gradients outside the blocks are
        reduced."""
        block = self._blocks[call.block.name]
        outside = self._outside
        costs = {}
        for action, cost in call.costs.items():
            forward = dataclasses.replace(cost.forward, peak=max(2 * block.whole, cost.forward.peak + block.whole))
            backward = self._backward(cost.backward, block) if FULL in call.costs else cost.backward
            if is_last:
                left = backward.net
                most = max(left + 2 * outside.sent, left + outside.sent + outside.kept + outside.summed)
                backward = dataclasses.replace(backward, peak=max(backward.peak, most))
            costs[action] = dataclasses.replace(cost, forward=forward, backward=backward)
        gradient_bytes = call.gradient_bytes
        if FULL in call.costs and not self._accumulated:
            gradient_bytes += block.kept - block.sent
        return dataclasses.replace(call, costs=costs, gradient_bytes=gradient_bytes)

    def _backward(self, part: Part, block: _Gathered) -> Part:
        gradients, kept = (0, 0) if self._accumulated else (block.sent, block.kept)
        left = part.net - gradients
        peak = max(
            block.whole + self._sent + block.cast,
            part.peak + block.whole + self._sent + block.sent - gradients,
            left + 2 * block.sent,
            left + block.sent + block.kept + block.summed,
        )
        return Part(peak, left + kept, part.nanoseconds)
