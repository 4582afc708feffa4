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
its optimizer. In bytes a parameter that is trained with Adam in 16 bits, under N ranks:

              always         from the first backward                in the optimizer's step
    ZeRO-1    2 + 12 / N     gradients: 2 in all at the end         + max(2 + 2 / N, 8 / N)
    ZeRO-2    2 + 12 / N     + 2 / N; of one block whole            + 8 / N
    ZeRO-3    16 / N         of one block whole; a gathered weight  + 6 / N, of one sub-group of parameters

ZeRO-2 allocates all shards of gradients at once; under accumulation, those of the micro-steps before are alive, too.
ZeRO-3 has its shards of gradients from the beginning. For the step, shards are copied into one tensor (2), which is
cast to float32 (4). Left out are buckets, and that a rank of ZeRO-1 or 2 holds the gradients of the first and the last
parameter of its shards as a whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch

from hf_ckpt.costs.costs import CallCosts, Costs, Static
from hf_ckpt.costs.steps import Part
from hf_ckpt.forecast.batches import DTYPES
from hf_ckpt.forecast.model import ShallowModel, TensorSize, nbytes
from hf_ckpt.forecast.question import Question
from hf_ckpt.models.blocks import vocabulary_head
from hf_ckpt.spec.actions import FULL

SUB_GROUP = 10**9
"""Elements of a rank's shards that the optimizer of ZeRO-3 updates together (`sub_group_size`)."""


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
    ranks = training.ranks
    state = -(-costs.static.optimizer // ranks)
    static = dataclasses.replace(costs.static, optimizer=state, step_bytes=-(-costs.static.step_bytes // ranks))
    spent = costs.optimizer_nanoseconds // ranks
    split = Zero(model, training) if training.way.deepspeed else Sharding(model, training)
    return split.costs(dataclasses.replace(costs, static=static, optimizer_nanoseconds=spent))


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
        return dataclasses.replace(costs, static=static, before=before, calls=tuple(calls), head=(forward, backward))

    def _call(self, call: CallCosts, *, is_last: bool) -> CallCosts:
        """What a call costs on a rank. After the last one's backward, the gradients outside the blocks are reduced."""
        block = self._blocks[call.block.name]
        gradients = self._gradients[call.block.name]
        outside = self._outside_gradients if is_last else _Bytes()
        # The head's gradient is whole from its backward to the end. Under accumulation, gradients of the unsharded
        # model are alive before the step, and none arrive; otherwise, all gradients outside the blocks are there when
        # the last backward ends.
        if self._training.accumulation > 1:
            arriving = _Bytes()
            again = self._head
            later = 0
            ending = outside.reducing - self._head
        else:
            arriving = gradients
            again = 0
            later = max(0, outside.whole - self._head)
            ending = outside.reducing - outside.whole
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
        self._way = training.way
        self._ranks = training.ranks
        self._accumulates = training.accumulation > 1
        self._model = model
        self._blocks = dict(zip((block.name for block in model.likes), model.inside, strict=True))
        trained = [tensor for tensor in model.tensors if tensor.trainable]
        self._elements = -(-sum(math.prod(tensor.shape) for tensor in trained) // training.ranks)
        """Trained elements of this rank's shards."""
        self._whole = nbytes(trained)
        """Bytes of all gradients."""
        self._shards = -(-self._whole // training.ranks)
        """Bytes of this rank's shards of them."""

    def costs(self, costs: Costs) -> Costs:
        """The costs on a rank, from those of the unsharded model, whose optimizer is split already."""
        costs = dataclasses.replace(costs, static=self._static(costs.static))
        if not self._way.gradients:
            return costs
        outside = self._largest(self._model.outside)
        forward, backward = costs.head
        backwards = [place for place, call in enumerate(costs.calls) if FULL in call.costs]
        calls = [self._call(call, is_first=place == backwards[-1]) for place, call in enumerate(costs.calls)]
        # Unless gradients of earlier micro-steps are alive, the unsharded model keeps that of the head from here on.
        head = 0 if self._accumulates else _head_gradient_bytes(self._model)
        return dataclasses.replace(
            costs,
            before=_with_peak(costs.before, outside),
            at_backward_bytes=costs.at_backward_bytes - head,
            head=(_with_peak(forward, outside), _with_peak(backward, outside)),
            calls=tuple(calls),
        )

    def _static(self, static: Static) -> Static:
        """What is alive on a rank at every moment, and in the optimizer's step."""
        way = self._way
        weights = -(-static.parameters // self._ranks) if way.weights else static.parameters
        gradients = self._shards if way.gradients else self._whole
        elements = self._elements
        held = self._shards
        if way.weights:
            gradients = held = 0  # they are among what is always alive
            elements = min(elements, SUB_GROUP)
        share = elements / max(1, self._elements)
        # The shards are copied into one tensor, which is cast to float32; both are freed before the optimizer's step.
        copied = 0 if self._shards == 4 * self._elements else round(share * self._shards)
        step = 4 * elements + max(held + copied, round(share * static.step_bytes))
        # ZeRO-1 copies its shards out of all gradients, which are whole until then.
        least = 0 if way.gradients else self._shards
        return dataclasses.replace(
            static,
            parameters=weights,
            master=4 * self._elements,
            gradients=gradients,
            buckets=self._shards if way.weights else 0,
            step_bytes=max(least, step - gradients),
        )

    def _largest(self, tensors: Iterable[TensorSize]) -> int:
        """Bytes of the largest weight where weights are sharded: modules gather their own, and free them at the end."""
        return max((nbytes([tensor]) for tensor in tensors), default=0) if self._way.weights else 0

    def _call(self, call: CallCosts, *, is_first: bool) -> CallCosts:
        """What a call costs on a rank, whose gradients are gone when its backward ends.

        In the `is_first` backward of a step, all shards of gradients are allocated, unless they are there already.
        """
        gradients = [nbytes([tensor]) for tensor in self._blocks[call.block.name] if tensor.trainable]
        largest = self._largest(self._blocks[call.block.name])
        left = self._shards if is_first and not self._way.weights else 0
        # Under accumulation, the unsharded model adds each gradient to an earlier one, which frees it at once. Here it
        # lives until the next one is there.
        waiting = max(gradients, default=0) if self._accumulates else 0
        peak = left + largest + waiting
        left -= 0 if self._accumulates else sum(gradients)
        costs = {}
        for action, cost in call.costs.items():
            backward = cost.backward
            if FULL in call.costs:  # it has a backward
                backward = Part(backward.peak + peak, backward.net + left, backward.nanoseconds)
            costs[action] = dataclasses.replace(cost, forward=_with_peak(cost.forward, largest), backward=backward)
        gradient_bytes = call.gradient_bytes + (left if FULL in call.costs else 0)
        return dataclasses.replace(call, costs=costs, gradient_bytes=gradient_bytes)


class _GatheredProduct(torch.autograd.Function):
    """Like `LinearFunctionForZeroStage3` of DeepSpeed (`runtime/zero/linear.py`)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        product = hidden.matmul(weight.t())
        return product if bias is None else product.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_hidden = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        of_weight = rows.t().matmul(hidden.reshape(-1, hidden.shape[-1])) if ctx.needs_input_grad[1] else None
        return of_hidden, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def gathered_linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What ZeRO-3 puts in the place of `torch.nn.functional.linear`. It keeps its input also if the weight is frozen.

    `hidden` has the shape [..., in_features], and `weight` [out_features, in_features].
    """
    product: torch.Tensor = _GatheredProduct.apply(hidden, weight, bias)  # type: ignore[no-untyped-call]
    return product


def _head_gradient_bytes(model: ShallowModel) -> int:
    """Bytes of the gradient of the language-model head, which is there before those of blocks; 0 if there is none."""
    weight = getattr(vocabulary_head(model.base), "weight", None)
    return weight.nbytes if weight is not None and weight.requires_grad else 0


def _with_peak(part: Part, more: int) -> Part:
    """A part whose peak has so many bytes more."""
    return dataclasses.replace(part, peak=part.peak + more)
