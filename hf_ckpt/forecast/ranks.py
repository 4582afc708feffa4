"""What one rank holds if ranks share a model, in terms of the step of an unsharded model.

**FSDP2.** `fully_shard` is applied to every block, and to the rest of the model. On a rank, the following is alive in
addition to activations (`torch/distributed/fsdp/_fully_shard`, PyTorch 2.6 to 2.13):

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

**FSDP1**, without prefetching, has neither the buffer nor gradients of another block on their way. At the end of a
block's backward, its gradients are copied into a flat one, while its weights are still whole (`_flat_param.py`):

    always             parameter shards + optimizer's state + P(outside)
    a block's forward  + P + its activations
    its backward       + P + its activations + its unsharded gradients so far; at its end P + 2 R, then S

**ZeRO.** DeepSpeed (`runtime/zero/stage_1_and_2.py` and `stage3.py`, 0.19) keeps float32 copies of trained weights for
its optimizer, and casts all gradients to float32 for a step. Its estimators count, in bytes a parameter with Adam in 16
bits under N ranks (https://deepspeed.readthedocs.io/en/latest/memory.html):

    ZeRO-2   2 + 18 / N                     weights; gradients 2 + 4, copies 4 and state 8 in shards
    ZeRO-3   18 / N + 4 x largest layer     all in shards; the layer that runs, and its gradient

Here the whole gradients are those that exist: a block's until its backward ends, and those outside the blocks until the
end. ZeRO-3 also keeps shards of gradients in 16 bits, which its estimator leaves out. Buckets are left out.
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
from hf_ckpt.models.blocks import vocabulary_head
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

    Gradients are reduced, which sends (ranks - 1) / ranks of them: once a step, or where ranks keep shards, in each
    micro-step. DDP and ZeRO up to 2 then gather sums or weights, which sends as much, once a step. FSDP and ZeRO-3
    gather weights before each forward and each backward.
    """
    share = (training.ranks - 1) / training.ranks
    gradients = nbytes(tensor for tensor in model.tensors if tensor.trainable)
    reduced = gradients * (training.accumulation if training.way.gradients else 1)
    gathered = 2 * nbytes(model.tensors) * training.accumulation if training.sharded else gradients
    return round(share * (reduced + gathered))


def on_a_rank(costs: Costs, model: ShallowModel, training: Question) -> Costs:
    """The costs on a rank, from those of the unsharded model."""
    if not training.way.states:
        return costs
    static = costs.static
    ranks = training.ranks
    costs = dataclasses.replace(
        costs,
        static=dataclasses.replace(
            static, optimizer=-(-static.optimizer // ranks), step_bytes=-(-static.step_bytes // ranks)
        ),
        optimizer_nanoseconds=costs.optimizer_nanoseconds // ranks,
    )
    return Zero(model, training).costs(costs) if training.way.deepspeed else Sharding(model, training).costs(costs)


class Sharding:
    """How FSDP splits a model, which is in its compute type. Shards have the type of the weights.

    Args:
        model: the unsharded model.
        training: the training, with the number of ranks.
    """

    def __init__(self, model: ShallowModel, training: Question) -> None:
        self._training = training
        self._whole = nbytes(model.tensors)
        self._outside = self._bytes_of(model.outside)
        self._outside_gradients = self._gradients_of(model.outside)
        names = [block.name for block in model.likes]
        self._blocks = dict(zip(names, map(self._bytes_of, model.inside), strict=True))
        self._gradients = dict(zip(names, map(self._gradients_of, model.inside), strict=True))
        self._head = _head_gradient_bytes(model)
        self._flat = training.way.flat
        self._buffer = 0 if self._flat else max(block.whole for block in self._blocks.values())
        self._sent = 0 if self._flat else max(gradients.whole for gradients in self._gradients.values())

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

    def _gathering(self, block: _Bytes) -> int:
        """Most bytes while a block is gathered: with FSDP2's buffer, or with FSDP1's cast shards."""
        return block.whole + (block.cast if self._flat else block.whole)

    def _gradients_of(self, tensors: Iterable[TensorSize]) -> _Bytes:
        return self._bytes_of(tensor for tensor in tensors if tensor.trainable)

    def costs(self, costs: Costs) -> Costs:
        """The costs on a rank, from those of the unsharded model, whose optimizer is split already."""
        outside = self._outside
        reference = -(-(costs.static.parameters - self._whole) // self._training.ranks)  # TRL shards DPO's, too
        static = dataclasses.replace(
            costs.static,
            parameters=outside.shards + sum(block.shards for block in self._blocks.values()) + reference,
            gradients=self._outside_gradients.shards + sum(block.shards for block in self._gradients.values()),
            gathered=outside.whole + self._buffer,
        )
        # The all-gather buffer counts as always alive. It is larger while it gathers the parameters outside the blocks.
        above = max(0, outside.whole - self._buffer)
        before = costs.before
        first = self._gathering(self._blocks[costs.calls[0].block.name])
        peak = max(above + outside.cast, before.peak + above, before.net + above + first)
        before = dataclasses.replace(before, peak=peak)
        forward, backward = costs.head
        # Before the head's backward, parameters outside the blocks are gathered again if they were freed.
        backward = dataclasses.replace(backward, peak=max(above + outside.cast, backward.peak))
        last = min(place for place, call in enumerate(costs.calls) if FULL in call.costs)  # backward is in reverse
        calls = [self._call(call, is_last=place == last) for place, call in enumerate(costs.calls)]
        return dataclasses.replace(
            costs,
            static=static,
            before=before,
            calls=tuple(calls),
            head=(forward, backward),
        )

    def _call(self, call: CallCosts, *, is_last: bool) -> CallCosts:
        """What a call costs on a rank. After the last one's backward, the gradients outside the blocks are reduced."""
        block = self._blocks[call.block.name]
        gradients = self._gradients[call.block.name]
        # Under accumulation, gradients of the unsharded model are alive before its backward, and none arrive.
        arriving = _Bytes() if self._training.accumulation > 1 else gradients
        # The head's gradient is whole from its backward to the end. The unsharded model has it before the step under
        # accumulation; otherwise all gradients outside the blocks are there when the last backward ends.
        alone = self._training.accumulation > 1
        again = self._head if alone else 0
        outside = self._outside_gradients if is_last else _Bytes()
        later = 0 if alone else max(0, outside.whole - self._head)
        ending = outside.reducing - (self._head if alone else outside.whole)
        costs = {}
        for action, cost in call.costs.items():
            forward_peak = max(self._gathering(block), cost.forward.peak + block.whole)
            forward = dataclasses.replace(cost.forward, peak=forward_peak)
            backward = cost.backward
            if FULL in call.costs:  # it has a backward, in which gradients arrive
                gathered = block.whole + self._sent
                left = backward.net - arriving.whole
                net = left + arriving.shards
                work = backward.peak - arriving.whole + gradients.whole
                reducing = block.whole + 2 * gradients.whole + gradients.cast if self._flat else gradients.reducing
                peak = max(gathered + max(block.cast, work), left - later + reducing, net + ending)
                backward = Part(peak + again, net, backward.nanoseconds)
            costs[action] = dataclasses.replace(cost, forward=forward, backward=backward)
        gradient_bytes = call.gradient_bytes
        if FULL in call.costs:
            gradient_bytes += arriving.shards - arriving.whole
        return dataclasses.replace(call, costs=costs, gradient_bytes=gradient_bytes)


class Zero:
    """How DeepSpeed splits a model. Weights, gradients and their shards have the type of the weights.

    Args:
        model: the unsharded model.
        training: the training, with the number of ranks.
    """

    def __init__(self, model: ShallowModel, training: Question) -> None:
        self._training = training
        self._model = model
        self._blocks = dict(zip((block.name for block in model.likes), model.inside, strict=True))

    def _sizes(self, tensors: Iterable[TensorSize]) -> tuple[int, int, int]:
        """Bytes of the whole gradients of parameters, of this rank's shards, and of the largest weight, which counts
        only where weights are sharded: modules gather their own weights, and free them when they have run."""
        sizes = [(nbytes([tensor]), tensor.trainable) for tensor in tensors]
        whole = sum(size for size, trainable in sizes if trainable)
        largest = max((size for size, _ in sizes), default=0) if self._training.sharded else 0
        return whole, -(-whole // self._training.ranks), largest

    def costs(self, costs: Costs) -> Costs:
        """The costs on a rank, from those of the unsharded model, whose optimizer is split already."""
        training = self._training
        tensors = self._model.tensors
        trained = sum(math.prod(tensor.shape) for tensor in tensors if tensor.trainable)
        copies = 4 * -(-trained // training.ranks)
        weights = costs.static.parameters
        whole, shards, _ = self._sizes(tensors)
        static = dataclasses.replace(
            costs.static,
            parameters=-(-weights // training.ranks) if training.sharded else weights,
            master=copies,
            gradients=shards if training.way.gradients else whole,
            step_bytes=costs.static.step_bytes + copies,  # gradients in float32
        )
        costs = dataclasses.replace(costs, static=static)
        if not training.way.gradients:
            return costs
        _, _, outside = self._sizes(self._model.outside)
        forward, backward = costs.head
        return dataclasses.replace(
            costs,
            before=_with_peak(costs.before, outside),
            head=(_with_peak(forward, outside), _with_peak(backward, outside)),
            calls=tuple(map(self._call, costs.calls)),
        )

    def _call(self, call: CallCosts) -> CallCosts:
        """What a call costs on a rank, whose gradients are whole until its backward ends."""
        whole, shards, largest = self._sizes(self._blocks[call.block.name])
        # Under accumulation, gradients of the unsharded model are alive before, and shards of them are on a rank.
        alone = self._training.accumulation > 1
        less = 0 if alone else whole - shards
        head = _head_gradient_bytes(self._model)
        costs = {}
        for action, cost in call.costs.items():
            backward = cost.backward
            if FULL in call.costs:  # it has a backward
                peak = backward.peak + largest + (whole + head if alone else 0)
                backward = Part(peak, backward.net - less, backward.nanoseconds)
            costs[action] = dataclasses.replace(cost, forward=_with_peak(cost.forward, largest), backward=backward)
        gradient_bytes = call.gradient_bytes - (less if FULL in call.costs else 0)
        return dataclasses.replace(call, costs=costs, gradient_bytes=gradient_bytes)


def _head_gradient_bytes(model: ShallowModel) -> int:
    """Bytes of the gradient of the language-model head, which is there before those of blocks; 0 if there is none."""
    weight = getattr(vocabulary_head(model.base), "weight", None)
    return weight.nbytes if weight is not None and weight.requires_grad else 0


def _with_peak(part: Part, more: int) -> Part:
    """A part whose peak has so many bytes more."""
    return dataclasses.replace(part, peak=part.peak + more)
