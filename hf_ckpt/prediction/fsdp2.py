"""Converts the costs of an unsharded model into those of one rank under FSDP2.

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
from collections.abc import Iterable, Mapping, Sequence

from hf_ckpt.costs.costs import BlockCost, Costs, Key, Phase, StackCosts
from hf_ckpt.prediction.optimizers import OptimizerBytes
from hf_ckpt.prediction.skeleton import Skeleton, Weights


@dataclasses.dataclass(frozen=True)
class Gathered:
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


@dataclasses.dataclass(frozen=True)
class Layout:
    """How FSDP2 splits a model, as one rank sees it."""

    parameters: int
    """Bytes of this rank's parameter shards."""
    optimizer: int
    """Bytes of the optimizer's state on this rank."""
    kinds: tuple[tuple[Gathered, ...], ...]
    """For each stack, what is gathered for a block of each kind."""
    outside: Gathered
    """What is gathered outside the blocks, for the whole step."""


def layout_for(skeleton: Skeleton, ranks: int, own: int, optimizer: OptimizerBytes, parameters: int) -> Layout:
    """How FSDP2 will split a model.

    Args:
        skeleton: of the unsharded model, in its compute type.
        ranks: how many ranks share it.
        own: bytes per element of the shards, which have the type of the weights.
        optimizer: what the optimizer needs for all shards together.
        parameters: how many elements all parameters have.
    """

    def gathered(weights: Weights) -> Gathered:
        rows = [(0, 0, 0, 0, 0)]
        for shape, size, trained in weights.tensors:
            part = -(-math.prod(shape) // ranks)
            whole, cast = part * ranks * size, part * size if size != own else 0
            rows.append((whole, cast, *((whole, part * own, cast) if trained else (0, 0, 0))))
        return Gathered(*map(sum, zip(*rows, strict=True)))

    return Layout(
        parameters=-(-parameters // ranks) * own,
        optimizer=-(-optimizer.state // ranks),
        kinds=tuple(tuple(gathered(kind.weights) for kind in stack.kinds) for stack in skeleton.stacks),
        outside=gathered(skeleton.outside),
    )


def with_shards(costs: Costs, layout: Layout) -> Costs:
    """The costs on one rank of a sharded model, from those of the unsharded model.

    Args:
        costs: traced with unsharded parameters.
        layout: how the model is split.

    The formulas are at the top of this module.
    """
    split = _Split(costs, layout)
    stacks = tuple(split.stack(number) for number in range(len(costs.stacks)))
    head = costs.head[0], split.head_backward(costs.head[1])
    static = dataclasses.replace(
        costs.static,
        parameters=layout.parameters,
        optimizer=layout.optimizer,
        gradients=layout.outside.kept + sum(stack.gradients[kind] for stack in stacks for kind in stack.kinds),
        gathered=layout.outside.whole + split.buffer,
    )
    time = costs.optimizer_nanoseconds * layout.parameters // max(1, costs.static.parameters)
    return dataclasses.replace(costs, stacks=stacks, head=head, static=static, optimizer_nanoseconds=time)


class _Split:
    """Converts the phases of `costs` to those under `layout`."""

    def __init__(self, costs: Costs, layout: Layout) -> None:
        self.costs, self.layout = costs, layout
        blocks = [block for kinds in layout.kinds for block in kinds]
        self.buffer = max(block.whole for block in blocks)
        """Bytes of a block's all-gather buffer: max P."""
        self.sent = max(block.sent for block in blocks)
        """Bytes of the gradients that the following block has sent: max R."""
        self.above = max(0, layout.outside.whole - self.buffer)
        """By how many bytes the buffer is larger while it gathers the parameters outside the blocks."""

    def stack(self, number: int) -> StackCosts:
        """The costs of a stack, by its position in the model."""
        stack, kinds = self.costs.stacks[number], self.layout.kinds[number]
        before, before_backward = stack.before, _taken(stack.before_backward)
        if not number:
            before, before_backward = self._embedding(stack, kinds[stack.kinds[0]])
        there = sum(self._outside_gradients(other) for other in range(number + 1, len(self.costs.stacks) + 1))
        return dataclasses.replace(
            stack,
            first=self._blocks(stack.first, kinds),
            inner=self._blocks(stack.inner, kinds),
            last=self._blocks(stack.last, kinds),
            gradients=tuple(kind.kept for kind in kinds),
            before=before,
            before_backward=before_backward,
            at_backward_bytes=stack.at_backward_bytes + there,
            before_at_backward_bytes=stack.before_at_backward_bytes + there,
        )

    def _embedding(self, stack: StackCosts, first: Gathered) -> tuple[Phase, Phase]:
        """Forward and backward of what runs before the first stack; its first block's parameters are prefetched."""
        outside, phase = self.layout.outside, stack.before
        before = _phase(
            phase,
            [(self.above + outside.cast, 0)],
            _raised(phase.points, self.above),
            [(phase.net + self.above + 2 * first.whole, 0), (phase.net, 0)],
        )
        points = _raised(_taken(stack.before_backward).points, self.sent)
        return before, _phase(stack.before_backward, points, _end(stack.before_backward, outside))

    def head_backward(self, phase: Phase) -> Phase:
        """The head's backward, before which parameters outside the blocks are gathered again if they were freed."""
        return _phase(phase, [(self.above + self.layout.outside.cast, 0)], _taken(phase).points)

    def _outside_gradients(self, number: int) -> int:
        """Bytes of the gradients of what runs before stack `number`; after the last stack, of the head."""
        if number < len(self.costs.stacks):
            return self.costs.stacks[number].before_backward.gradients
        return self.costs.head[1].gradients

    def _blocks(self, costs: Mapping[Key, BlockCost], kinds: Sequence[Gathered]) -> dict[Key, BlockCost]:
        return {key: self._block(cost, kinds[key[0]]) for key, cost in costs.items()}

    def _block(self, cost: BlockCost, block: Gathered) -> BlockCost:
        points = _raised(cost.forward.points, block.whole)
        forward = _phase(cost.forward, [(2 * block.whole, 0)], points, [(cost.forward.net, 0)])
        return dataclasses.replace(cost, forward=forward, backward=self._backward(cost.backward, block))

    def _backward(self, phase: Phase, block: Gathered) -> Phase:
        if not phase.points:  # neither this block nor anything before it is trainable
            return phase
        running = _raised(_taken(phase).points, block.whole + self.sent)
        return _phase(phase, [(block.whole + self.sent + block.cast, 0)], running, _end(phase, block))


def _taken(phase: Phase) -> Phase:
    """The phase with its finished gradients counted as temporary bytes."""
    return _phase(phase, ((other + done, 0) for other, done in phase.points))


def _end(phase: Phase, unit: Gathered) -> list[tuple[int, int]]:
    """The points at the end of a backward, where its gradients are copied and reduced."""
    return [
        (phase.net + phase.gradients + unit.sent, 0),
        (phase.net + unit.sent + unit.kept + unit.summed, 0),
        (phase.net, unit.kept),
    ]


def _raised(points: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The points with `size` more bytes alive."""
    return [(other + size, done) for other, done in points]


def _phase(phase: Phase, *points: Iterable[tuple[int, int]]) -> Phase:
    """`phase` with other points and the same time."""
    return dataclasses.replace(phase, points=tuple(point for part in points for point in part))
