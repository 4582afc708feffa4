"""Turns the costs of a model that is whole on every rank into those of one whose parameters FSDP2 splits over ranks.

What is alive on a rank besides activations (`torch/distributed/fsdp/_fully_shard`, PyTorch 2.6 to 2.13):

* always: its parts of all parameters, and of the optimizer's state;
* while the model runs: the whole parameters outside the blocks, and one buffer in which whole parameters arrive. In the
  forward it is the running block's, which is freed only when the next block's parameters have arrived and been copied
  out of their own buffer; in the backward it is that of the block before, which is fetched ahead;
* while a block runs, forward or backward: its whole parameters, in the type that they compute in. Recomputing and
  rebuilding find them there, so that no plan gathers anything once more;
* in the backward of a block: its whole gradients, as they are made, and the gradients that the block behind it has sent
  to be summed up; then those that it sends itself, and its parts of the gradients, which stay;
* from the head's backward to the end: whole gradients of what lies outside the blocks.

P, R and S are the bytes of a block's whole parameters, of the gradients that it sends, and of this rank's part of its
gradients; `max` is the largest of all blocks. A step that reduces its gradients is planned for as

    always             parts + optimizer's state + P(outside) + max P
    a block's forward  + 2 P for a moment, then + P + its activations
    its backward       + P + max R + its activations + its whole gradients so far; at its end whole gradients + R, then
                       R + S, then S

Where gradients are held back (`set_requires_gradient_sync(False)` while they are accumulated), they stay whole.
Parameters that stay gathered after the forward, and those of blocks without a `fully_shard` of their own, count as
outside. Free of torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from hf_ckpt.prediction.costs import BlockCost, Costs, Key, Phase, StackCosts


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Bytes of parameters that are gathered together, and of their gradients, which are reduced together."""

    whole: int = 0
    """The whole parameters, in the type that they compute in."""
    cast: int = 0
    """A copy of this rank's part of the parameters in that type, while it is sent; 0 where no copy is made."""
    sent: int = 0
    """The whole gradients, in the type that they are summed up in."""
    converted: int = 0
    """A second copy of the whole gradients, while they are converted to that type; 0 where they have it already."""
    kept: int = 0
    """This rank's part of the gradients, which stays until the optimizer's step."""
    summed: int = 0
    """This rank's part in the type that gradients are summed up in, for a moment; 0 where it stays in that type."""

    def __add__(self, other: Gathered) -> Gathered:
        return Gathered(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def largest(self, other: Gathered) -> Gathered:
        """The larger of the two in every field."""
        return Gathered(*map(max, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass(frozen=True)
class Layout:
    """How FSDP2 splits a model, as one rank sees it."""

    parameters: int
    """Bytes of this rank's parts of the parameters."""
    optimizer: int
    """Bytes of the optimizer's state on this rank."""
    blocks: Mapping[str, Gathered]
    """Qualified name of a block -> what is gathered for it."""
    outside: Gathered
    """What is gathered outside the blocks, for the whole step."""
    held_back: bool = False
    """Whether gradients stay whole from one micro-step to the next."""
    widened: int = 1
    """How many times larger whole gradients are when they are held back, in the type that they are summed up in, than
    when the backward makes them."""

    def largest(self, other: Layout) -> Layout:
        """A layout with room for both. Ranks have parts of different sizes where a parameter does not divide evenly."""
        nothing = Gathered()
        return Layout(
            parameters=max(self.parameters, other.parameters),
            optimizer=max(self.optimizer, other.optimizer),
            blocks={
                name: self.blocks.get(name, nothing).largest(other.blocks.get(name, nothing))
                for name in {**self.blocks, **other.blocks}
            },
            outside=self.outside.largest(other.outside),
            held_back=self.held_back or other.held_back,
            widened=max(self.widened, other.widened),
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
    head = {key: (forward, split.head_backward(backward)) for key, (forward, backward) in costs.head.items()}
    if layout.held_back:
        gradients = layout.widened * costs.static.gradients
    else:
        gradients = layout.outside.kept + sum(stack.gradients[kind] for stack in stacks for kind in stack.kinds)
    static = dataclasses.replace(
        costs.static,
        parameters=layout.parameters,
        optimizer=layout.optimizer,
        gradients=gradients,
        gathered=layout.outside.whole + split.buffer,
    )
    time = costs.optimizer_nanoseconds * layout.parameters // max(1, costs.static.parameters)
    return dataclasses.replace(costs, stacks=stacks, head=head, static=static, optimizer_nanoseconds=time)


class _Split:
    """Changes the phases of `costs` to what they are under `layout`."""

    def __init__(self, costs: Costs, layout: Layout) -> None:
        self.costs, self.layout = costs, layout
        self.buffer = max((block.whole for block in layout.blocks.values()), default=0)
        """Bytes of the buffer in which a block's parameters arrive: max P."""
        self.sent = max((block.sent for block in layout.blocks.values()), default=0)
        """Bytes of the gradients that the block behind has sent: max R."""
        self.above = max(0, layout.outside.whole - self.buffer)
        """By how many bytes the buffer is larger while parameters outside the blocks arrive in it."""

    def stack(self, number: int) -> StackCosts:
        """The costs of a stack, by its position in the model."""
        stack = self.costs.stacks[number]
        kinds = [Gathered() for _ in stack.gradients]
        for block, kind in zip(stack.blocks, stack.kinds, strict=True):
            kinds[kind] = kinds[kind].largest(self.layout.blocks.get(block.name, Gathered()))
        before, before_backward = stack.before, self._taken(stack.before_backward)
        if not number:
            before, before_backward = self._embedding(stack, kinds[stack.kinds[0]])
        later = (self._outside_gradients(other) for other in range(number + 1, len(self.costs.stacks) + 1))
        there = 0 if self.layout.held_back else sum(later)
        return dataclasses.replace(
            stack,
            costs={pair: self._block(cost, kinds[pair[1][0]]) for pair, cost in stack.costs.items()},
            last_backward={key: self._backward(phase, kinds[key[0]]) for key, phase in stack.last_backward.items()},
            gradients=tuple(
                self.layout.widened * size if self.layout.held_back else kind.kept
                for size, kind in zip(stack.gradients, kinds, strict=True)
            ),
            before=before,
            before_backward=before_backward,
            before_gradients=before_backward.gradients,
            turn_bytes=stack.turn_bytes + there,
            before_turn_bytes=stack.before_turn_bytes + there,
        )

    def _embedding(self, stack: StackCosts, first: Gathered) -> tuple[Mapping[Key | None, Phase], Phase]:
        """Forward and backward of what runs before the first stack; its first block's parameters are fetched ahead."""
        outside = self.layout.outside
        before = {
            key: _phase(
                phase,
                [(self.above + outside.cast, 0)],
                _raised(phase.points, self.above),
                [(phase.net + self.above + 2 * first.whole, 0), (phase.net, 0)],
            )
            for key, phase in stack.before.items()
        }
        before_backward = self._taken(stack.before_backward)
        if not self.layout.held_back:
            points = _raised(before_backward.points, self.sent)
            before_backward = _phase(before_backward, points, self._end(stack.before_backward, outside))
        return before, before_backward

    def head_backward(self, phase: Phase) -> Phase:
        """The head's backward, before which parameters outside the blocks arrive again if they were freed."""
        return _phase(phase, [(self.above + self.layout.outside.cast, 0)], self._taken(phase).points)

    def _outside_gradients(self, number: int) -> int:
        """Bytes of the gradients of what runs before stack `number`; behind the last stack, of the head."""
        if number < len(self.costs.stacks):
            return self.costs.stacks[number].before_backward.gradients
        return next(iter(self.costs.head.values()))[1].gradients

    def _block(self, cost: BlockCost, block: Gathered) -> BlockCost:
        forward = _phase(
            cost.forward,
            [(2 * block.whole, 0)],
            _raised(cost.forward.points, block.whole),
            [(cost.forward.net, 0)],
        )
        return dataclasses.replace(cost, forward=forward, backward=self._backward(cost.backward, block))

    def _backward(self, phase: Phase, block: Gathered) -> Phase:
        if not phase.points:  # neither this block nor anything before it is trained
            return phase
        running = _raised(self._taken(phase).points, block.whole + self.sent)
        return _phase(phase, [(block.whole + self.sent + block.cast, 0)], running, self._end(phase, block))

    def _taken(self, phase: Phase) -> Phase:
        """The phase with its finished gradients counted as live bytes that do not stay, unless they are held back."""
        if self.layout.held_back:
            return _phase(phase, ((other, self.layout.widened * done) for other, done in phase.points))
        return _phase(phase, ((other + done, 0) for other, done in phase.points))

    def _end(self, phase: Phase, unit: Gathered) -> list[tuple[int, int]]:
        """The points at the end of a backward, where its gradients are copied and reduced."""
        net, whole = phase.net, phase.gradients
        if self.layout.held_back:
            done = self.layout.widened * whole
            return [(net + unit.sent + unit.converted, done), (net, done)]
        return [
            (net + whole + unit.sent + unit.converted, 0),
            (net + unit.sent + unit.kept + unit.summed, 0),
            (net, unit.kept),
        ]


def _raised(points: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The points with so many bytes more alive."""
    return [(other + size, done) for other, done in points]


def _phase(phase: Phase, *points: Iterable[tuple[int, int]]) -> Phase:
    """`phase` with other points and the same time."""
    return dataclasses.replace(phase, points=tuple(point for part in points for point in part))
