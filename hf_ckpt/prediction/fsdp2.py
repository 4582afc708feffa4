"""Turns the costs of a model that is whole on every rank into those of one whose parameters FSDP2 splits over ranks.

Every block and the rest of the model have a `fully_shard` of their own. Alive on a rank besides activations are
(`torch/distributed/fsdp/_fully_shard`, PyTorch 2.6 to 2.13):

* always: its parts of all parameters, and of the optimizer's state;
* while the model runs: the whole parameters outside the blocks, and one buffer in which whole parameters arrive. In the
  forward it is the running block's, which is freed only when the next block's parameters have arrived and been copied
  out of their own buffer; in the backward it is that of the block before, which is fetched ahead;
* while a block runs, forward or backward: its whole parameters, in the type that they compute in. Recomputing finds
  them there, so that no plan gathers anything once more;
* in the backward of a block: its whole gradients, as they are made, and the gradients that the block behind it has sent
  to be summed up; then those that it sends itself, and its parts of the gradients, which stay;
* from the head's backward to the end: whole gradients of what lies outside the blocks.

P, R and S are the bytes of a block's whole parameters, of the gradients that it sends, and of this rank's part of its
gradients; `max` is the largest of all blocks:

    always             parts + optimizer's state + P(outside) + max P
    a block's forward  + 2 P for a moment, then + P + its activations
    its backward       + P + max R + its activations + its whole gradients so far; at its end whole gradients + R, then
                       R + S, then S
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from hf_ckpt.prediction.costs import BlockCost, Costs, Key, Phase, StackCosts
from hf_ckpt.prediction.optimizers import OptimizerBytes
from hf_ckpt.prediction.skeleton import Skeleton, Weights


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Bytes of parameters that are gathered together, and of their gradients, which are reduced together."""

    whole: int = 0
    """The whole parameters, in the type that they compute in."""
    cast: int = 0
    """A copy of this rank's part of the parameters in that type, while it is sent; 0 where no copy is made."""
    sent: int = 0
    """The whole gradients."""
    kept: int = 0
    """This rank's part of the gradients, which stays until the optimizer's step."""
    summed: int = 0
    """This rank's part in the type that gradients are summed up in, for a moment; 0 where it stays in that type."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How FSDP2 splits a model, as one rank sees it."""

    parameters: int
    """Bytes of this rank's parts of the parameters."""
    optimizer: int
    """Bytes of the optimizer's state on this rank."""
    kinds: tuple[tuple[Gathered, ...], ...]
    """For each stack, what is gathered for a block of each kind."""
    outside: Gathered
    """What is gathered outside the blocks, for the whole step."""


def layout_for(skeleton: Skeleton, ranks: int, own: int, optimizer: OptimizerBytes, parameters: int) -> Layout:
    """How FSDP2 will split a model.

    Args:
        skeleton: of the whole model, in the type that it computes in.
        ranks: that it is split over.
        own: bytes of an element of the parts, which stay in the type of the weights.
        optimizer: what the optimizer needs for all parts together.
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
    """The costs on a rank that holds a part of the model, from those on a rank that holds all of it.

    Args:
        costs: traced with whole parameters.
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
    """Changes the phases of `costs` to what they are under `layout`."""

    def __init__(self, costs: Costs, layout: Layout) -> None:
        self.costs, self.layout = costs, layout
        blocks = [block for kinds in layout.kinds for block in kinds]
        self.buffer = max(block.whole for block in blocks)
        """Bytes of the buffer in which a block's parameters arrive: max P."""
        self.sent = max(block.sent for block in blocks)
        """Bytes of the gradients that the block behind has sent: max R."""
        self.above = max(0, layout.outside.whole - self.buffer)
        """By how many bytes the buffer is larger while parameters outside the blocks arrive in it."""

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
        """Forward and backward of what runs before the first stack; its first block's parameters are fetched ahead."""
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
        """The head's backward, before which parameters outside the blocks arrive again if they were freed."""
        return _phase(phase, [(self.above + self.layout.outside.cast, 0)], _taken(phase).points)

    def _outside_gradients(self, number: int) -> int:
        """Bytes of the gradients of what runs before stack `number`; behind the last stack, of the head."""
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
        if not phase.points:  # neither this block nor anything before it is trained
            return phase
        running = _raised(_taken(phase).points, block.whole + self.sent)
        return _phase(phase, [(block.whole + self.sent + block.cast, 0)], running, _end(phase, block))


def _taken(phase: Phase) -> Phase:
    """The phase with its finished gradients counted as live bytes that do not stay."""
    return _phase(phase, ((other + done, 0) for other, done in phase.points))


def _end(phase: Phase, unit: Gathered) -> list[tuple[int, int]]:
    """The points at the end of a backward, where its gradients are copied and reduced."""
    return [
        (phase.net + phase.gradients + unit.sent, 0),
        (phase.net + unit.sent + unit.kept + unit.summed, 0),
        (phase.net, unit.kept),
    ]


def _raised(points: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The points with so many bytes more alive."""
    return [(other + size, done) for other, done in points]


def _phase(phase: Phase, *points: Iterable[tuple[int, int]]) -> Phase:
    """`phase` with other points and the same time."""
    return dataclasses.replace(phase, points=tuple(point for part in points for point in part))
