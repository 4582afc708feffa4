"""The memory of a step whose parameters are split over ranks by FSDP2, from that of the step that has them whole.

What is alive on a rank besides activations (`torch/distributed/fsdp/_fully_shard`, PyTorch 2.6 to 2.13):

* always: its parts of all parameters, and of the optimizer's state;
* while the model runs: parameters outside the blocks, whole, and one buffer that parameters come in. In the forward it
  is the running block's, which is let go only when the next one has come and been copied out of its own; in the
  backward that of the block before it, which is fetched ahead;
* while a block runs, forward or backward: its parameters, whole, in the type they compute in. Recomputing and
  rebuilding find them there, so that no plan gathers anything once more;
* in the backward of a block: its gradients, whole, as they come, and what the block behind it has sent to be summed up;
  then what it sends itself, and its parts of the gradients, which stay;
* from the head's backward to the end: whole gradients of what lies outside the blocks.

With P, R and S the bytes of parameters, of gradients sent and of parts of gradients of a block, and the largest of any
block where it says `max`, a step that reduces its gradients is planned for as

    always             parts + optimizer's state + P(outside) + max P
    a block's forward  + 2 P for a moment, then + P + its activations
    its backward       + P + max R + its activations + its whole gradients so far; at its end whole gradients + R, then
                       R + S, then S

Where gradients are held back (accumulation that does not reduce them), they stay whole. Parameters that stay gathered
after the forward, and those of blocks without a `fully_shard` of their own, count as outside. Free of torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from hf_ckpt.timeline import Costs, Phase, StackCosts


@dataclasses.dataclass(frozen=True)
class Gathered:
    """What is gathered and reduced together, in bytes."""

    whole: int = 0
    """All parameters, whole, in the type that they compute in."""
    cast: int = 0
    """A copy of this rank's part in that type, while it is sent; 0 where none is made."""
    sent: int = 0
    """Gradients, whole, in the type that they are summed up in."""
    converted: int = 0
    """The same once more, while they are converted to that type; 0 where they are of it."""
    kept: int = 0
    """This rank's part of the gradients, as it stays."""
    summed: int = 0
    """The same in the type that they are summed up in, for a moment; 0 where that is no other."""

    def __add__(self, other: Gathered) -> Gathered:
        return Gathered(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def largest(self, other: Gathered) -> Gathered:
        """Number by number."""
        return Gathered(*map(max, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model is split, as one rank sees it."""

    parameters: int
    """Bytes of this rank's parts."""
    optimizer: int
    """Bytes of its optimizer's state."""
    blocks: Mapping[str, Gathered]
    """By qualified name."""
    outside: Gathered
    held_back: bool = False
    """Whether gradients stay whole from one micro-step to the next."""
    widened: int = 1
    """How many times larger those are than they come."""

    def largest(self, other: Layout) -> Layout:
        """With room for both: parts differ between ranks where sizes do not divide."""
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
    """`costs` of a rank that holds the whole model -> those of one that holds a part of it, as the module says."""
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
    def __init__(self, costs: Costs, layout: Layout) -> None:
        self.costs, self.layout = costs, layout
        self.buffer = max((block.whole for block in layout.blocks.values()), default=0)
        self.sent = max((block.sent for block in layout.blocks.values()), default=0)
        self.above = max(0, layout.outside.whole - self.buffer)
        """By how much the buffer is larger while what is outside comes in it."""

    def stack(self, number: int) -> StackCosts:
        stack, outside = self.costs.stacks[number], self.layout.outside
        kinds = [Gathered() for _ in stack.gradients]
        for block, kind in zip(stack.blocks, stack.kinds, strict=True):
            kinds[kind] = kinds[kind].largest(self.layout.blocks.get(block.name, Gathered()))
        before, before_backward = stack.before, self._taken(stack.before_backward)
        if not number:
            coming = kinds[stack.kinds[0]]
            before = {
                key: _phase(
                    phase,
                    [(self.above + outside.cast, 0)],
                    _raised(phase.points, self.above),
                    [(phase.net + self.above + 2 * coming.whole, 0), (phase.net, 0)],
                )
                for key, phase in stack.before.items()
            }
            if not self.layout.held_back:
                points = _raised(before_backward.points, self.sent)
                before_backward = _phase(before_backward, points, self._end(stack.before_backward, outside))
        later = (self._outside_gradients(other) for other in range(number + 1, len(self.costs.stacks) + 1))
        there = 0 if self.layout.held_back else sum(later)
        return dataclasses.replace(
            stack,
            costs={
                ways: dataclasses.replace(
                    cost,
                    forward=_phase(
                        cost.forward,
                        [(2 * kinds[ways[1][0]].whole, 0)],
                        _raised(cost.forward.points, kinds[ways[1][0]].whole),
                        [(cost.forward.net, 0)],
                    ),
                    backward=self._backward(cost.backward, kinds[ways[1][0]]),
                )
                for ways, cost in stack.costs.items()
            },
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

    def head_backward(self, phase: Phase) -> Phase:
        """What is outside comes again, if it was let go."""
        return _phase(phase, [(self.above + self.layout.outside.cast, 0)], self._taken(phase).points)

    def _outside_gradients(self, number: int) -> int:
        """Of what runs before a stack, or in the head, which comes last."""
        if number < len(self.costs.stacks):
            return self.costs.stacks[number].before_backward.gradients
        return next(iter(self.costs.head.values()))[1].gradients

    def _backward(self, phase: Phase, block: Gathered) -> Phase:
        if not phase.points:  # nothing at it or below it is trained
            return phase
        running = _raised(self._taken(phase).points, block.whole + self.sent)
        return _phase(phase, [(block.whole + self.sent + block.cast, 0)], running, self._end(phase, block))

    def _taken(self, phase: Phase) -> Phase:
        """Finished gradients are no part of what stays yet, unless they are held back."""
        if self.layout.held_back:
            return _phase(phase, ((other, self.layout.widened * done) for other, done in phase.points))
        return _phase(phase, ((other + done, 0) for other, done in phase.points))

    def _end(self, phase: Phase, unit: Gathered) -> list[tuple[int, int]]:
        """Gradients are reduced, for which they are copied."""
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
    return [(other + size, done) for other, done in points]


def _phase(phase: Phase, *points: Iterable[tuple[int, int]]) -> Phase:
    """The same work with other bytes."""
    return dataclasses.replace(phase, points=tuple(point for part in points for point in part))
