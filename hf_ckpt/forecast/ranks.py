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
from collections.abc import Iterable

from hf_ckpt.costs.costs import CallCosts, Costs
from hf_ckpt.costs.steps import Part
from hf_ckpt.forecast.batches import DTYPES
from hf_ckpt.forecast.model import ShallowModel, TensorSize, nbytes
from hf_ckpt.forecast.question import Question
from hf_ckpt.spec.actions import FULL


@dataclasses.dataclass(frozen=True)
class _Bytes:
    """Bytes of parameters that are gathered together, or of their gradients, which are reduced together."""

    whole: int = 0
    """Unsharded, in their compute type."""
    shards: int = 0
    """This rank's shards, in the type of the weights."""
    cast: int = 0
    """A copy of these in the compute type, while it is sent or received; 0 if both types are the same."""

    @property
    def reducing(self) -> int:
        """Most bytes while these gradients are reduced: they are copied to be sent, then shards arrive."""
        return self.whole + max(self.whole, self.shards + self.cast)


def sent_bytes(model: ShallowModel, training: Question) -> int:
    """Bytes that one rank sends in a step, with collectives in rings (https://arxiv.org/abs/1910.02054, section 7).

    Gradients are reduced, which sends (ranks - 1) / ranks of them. DDP then gathers the sums, which sends as much, once
    a step. FSDP2 gathers weights before each forward and each backward.
    """
    share = (training.ranks - 1) / training.ranks
    gradients = nbytes(tensor for tensor in model.tensors if tensor.trainable)
    if not training.sharded:
        return round(share * 2 * gradients)
    return round(share * training.accumulation * (2 * nbytes(model.tensors) + gradients))


class Sharding:
    """How FSDP2 splits a model, which is in its compute type. Shards have the type of the weights.

    Args:
        model: the unsharded model.
        training: the training, with the number of ranks.
    """

    def __init__(self, model: ShallowModel, training: Question) -> None:
        self._training = training
        self._outside = self._bytes_of(model.outside)
        self._outside_gradients = self._gradients_of(model.outside)
        names = [block.name for block in model.likes]
        self._blocks = dict(zip(names, map(self._bytes_of, model.inside), strict=True))
        self._gradients = dict(zip(names, map(self._gradients_of, model.inside), strict=True))
        self._buffer = max(block.whole for block in self._blocks.values())
        self._sent = max(gradients.whole for gradients in self._gradients.values())

    def _bytes_of(self, tensors: Iterable[TensorSize]) -> _Bytes:
        # FSDP2 splits whole rows, so a rank may hold up to one row more of each parameter. That is left out.
        ranks = self._training.ranks
        shard_element = DTYPES[self._training.dtype].itemsize
        sizes = [(-(-math.prod(shape) // ranks), element) for shape, element, _ in tensors]  # of a rank's part
        return _Bytes(
            whole=sum(elements * ranks * element for elements, element in sizes),
            shards=sum(elements * shard_element for elements, _ in sizes),
            cast=sum(elements * element for elements, element in sizes if element != shard_element),
        )

    def _gradients_of(self, tensors: Iterable[TensorSize]) -> _Bytes:
        return self._bytes_of(tensor for tensor in tensors if tensor.trainable)

    def costs(self, costs: Costs) -> Costs:
        """The costs on a rank, from those of the unsharded model whose optimizer has all shards."""
        outside = self._outside
        static = dataclasses.replace(
            costs.static,
            parameters=outside.shards + sum(block.shards for block in self._blocks.values()),
            optimizer=-(-costs.static.optimizer // self._training.ranks),
            step_bytes=-(-costs.static.step_bytes // self._training.ranks),
            gradients=self._outside_gradients.shards + sum(block.shards for block in self._gradients.values()),
            gathered=outside.whole + self._buffer,
        )
        # The all-gather buffer counts as always alive. It is larger while it gathers the parameters outside the blocks.
        above = max(0, outside.whole - self._buffer)
        before = costs.before
        first = 2 * self._blocks[costs.calls[0].block.name].whole
        peak = max(above + outside.cast, before.peak + above, before.net + above + first)
        before = dataclasses.replace(before, peak=peak)
        forward, backward = costs.head
        # Before the head's backward, parameters outside the blocks are gathered again if they were freed.
        backward = dataclasses.replace(backward, peak=max(above + outside.cast, backward.peak))
        last = max(place for place, call in enumerate(costs.calls) if FULL in call.costs)
        calls = [self._call(call, is_last=place == last) for place, call in enumerate(costs.calls)]
        return dataclasses.replace(
            costs,
            static=static,
            before=before,
            calls=tuple(calls),
            head=(forward, backward),
            optimizer_nanoseconds=costs.optimizer_nanoseconds // self._training.ranks,
        )

    def _call(self, call: CallCosts, *, is_last: bool) -> CallCosts:
        """What a call costs on a rank. After the last one's backward, the gradients outside the blocks are reduced."""
        block = self._blocks[call.block.name]
        gradients = self._gradients[call.block.name]
        # Under accumulation, gradients of the unsharded model are alive before its backward, and none arrive.
        arriving = _Bytes() if self._training.accumulation > 1 else gradients
        outside = self._outside_gradients if is_last else _Bytes()
        costs = {}
        for action, cost in call.costs.items():
            forward = dataclasses.replace(cost.forward, peak=max(2 * block.whole, cost.forward.peak + block.whole))
            backward = cost.backward
            if FULL in call.costs:  # it has a backward, in which gradients arrive
                gathered = block.whole + self._sent
                left = backward.net - arriving.whole
                net = left + arriving.shards
                work = backward.peak - arriving.whole + gradients.whole
                peak = max(gathered + max(block.cast, work), left + gradients.reducing, net + outside.reducing)
                backward = Part(peak, net, backward.nanoseconds)
            costs[action] = dataclasses.replace(cost, forward=forward, backward=backward)
        gradient_bytes = call.gradient_bytes
        if FULL in call.costs:
            gradient_bytes += arriving.shards - arriving.whole
        return dataclasses.replace(call, costs=costs, gradient_bytes=gradient_bytes)
