"""Measured steps: what a step needs under `full`, and what each call needs under other actions. Pure, without torch.

A step with two calls of blocks, from left to right, and the names of its parts:

    forward    | before | call 0 | until_next | call 1 | head[0]: the head       |
    backward   |          call 0: backward    | call 1 | head[1]: loss, backward |    (from right to left)

Each `Part` has the most bytes alive in it, and the bytes that it leaves; both count from those alive when it begins. So
the bytes alive at any moment are `Step.start_bytes` and the sum of what all parts before it have left.

The step of a plan is that under `full`, plus the differences that the plan's actions make. Bytes add up, so losses,
image towers and routers need no model of their own. Trials show the differences: while a block is recomputed, it runs
under other actions.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hf_ckpt.spec.actions import Action

CallName = tuple[str, int]
"""(name of a block, number of its call in the step, from 0)."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What runs between two boundaries."""

    peak: int = 0
    """Most bytes alive above those at its beginning, at least 0."""
    net: int = 0
    """Bytes alive at its end, above those at its beginning."""
    nanoseconds: int = 0
    """Its time; 0 if it was not timed."""

    def then(self, other: Part) -> Part:
        """This part and the one that follows it, as one."""
        peak = max(self.peak, self.net + other.peak)
        return Part(peak, self.net + other.net, self.nanoseconds + other.nanoseconds)


@dataclasses.dataclass(frozen=True)
class Freed:
    """Bytes that an action does not keep for the backward.

    The first three are of what a call was given. `full` keeps all of it.
    """

    hidden: int = 0
    """Of its hidden states, which are freed when it returns."""
    shared: int = 0
    """Of what all calls of a stack are given, such as masks, which is freed when the stack returns."""
    rebuilt: int = 0
    """Of hidden states that the action rebuilds if the call before has it, too, because each ends with a norm."""
    dropped: int = 0
    """Of what the call computes: results that autograd would save."""


NOTHING = Freed()


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a call keeps and needs under an action. All in bytes, but for the times."""

    forward_peak: int
    """Most bytes alive in the forward, above those at its beginning."""
    kept: int
    """What the forward leaves for the backward, besides its output and autocast's copies of weights."""
    kept_casts: int
    """Autocast's copies of weights that the backward needs; they outlive the model's forward."""
    backward_peak: int | None = None
    """Most bytes alive in the backward, above those when its gradient arrives; None if it was not measured."""
    arrival: int = 0
    """Bytes that are allocated between the arrival of the gradient and the first operation of the backward."""
    freed: Freed = NOTHING
    """What the action does not keep of what the call is given."""
    held: int = 0
    """Of `kept`, what its layers hold under any action, `full` too, because no saved-tensor hook sees it."""
    forward_nanoseconds: int = 0
    """Time of the forward; 0 if it was not timed."""
    backward_nanoseconds: int = 0
    """Time of the backward; 0 if it was not timed."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a block in a step."""

    name: CallName
    has_input_graph: bool
    """Whether its input requires gradients."""
    forward: Part
    until_next: Part
    """What runs between this call and the next one; nothing after the last one."""
    backward: Part | None
    """Its backward, and what runs between it and the next boundary. None for a call without one."""
    needs: Mapping[Action, Needs] = dataclasses.field(default_factory=dict)
    """What it would keep and need under other actions."""
    records_graph: bool = True
    """Whether its output requires gradients. If so, a call without a backward holds what its action keeps."""
    whole_bytes: int = 0
    """Most bytes that its backward would need beyond its own if all were recomputed at once and kept: of a call whose
    feed-forward runs in tiles."""

    @property
    def left(self) -> int:
        """Bytes that its forward leaves for the backward: not autocast's copies of weights, which `full` frees."""
        return self.forward.net - max((need.kept_casts for need in self.needs.values()), default=0)

    def as_it_ran(self) -> Needs:
        """What it keeps and needs as it ran, usually under `full`, beside what `full` keeps."""
        backward = self.backward or Part()
        return Needs(
            forward_peak=self.forward.peak,
            kept=0,
            kept_casts=0,
            backward_peak=backward.peak,
            backward_nanoseconds=backward.nanoseconds,
        )

    def recomputed(self, need: Needs) -> Needs:
        """What it keeps and needs if its recomputation runs under an action whose backward was measured, too."""
        assert need.backward_peak is not None
        # The recomputation is a forward under that action, which begins when the gradient has arrived. Its
        # backward follows while all is alive that this forward has kept.
        peak = max(need.arrival + need.forward_peak, need.kept + need.kept_casts + need.backward_peak)
        # A forward in tiles needs less than one as a whole, which needs at most what it does if it also keeps results.
        forward_peak = need.forward_peak if self.whole_bytes else self.forward.peak
        return dataclasses.replace(
            self.as_it_ran(),
            forward_peak=forward_peak,
            backward_peak=peak,
            backward_nanoseconds=need.forward_nanoseconds + need.backward_nanoseconds,
        )


@dataclasses.dataclass(frozen=True)
class Step:
    """One measured step."""

    start_bytes: int
    """Bytes alive when it begins."""
    before: Part
    """What runs before the first block."""
    calls: tuple[Call, ...]
    """In the order of their forwards."""
    at_backward_bytes: int
    """Bytes alive when the first backward of a block begins, above those at the beginning."""
    head: tuple[Part, Part] = (Part(), Part())
    """What runs after the last call: until the model's forward ends, and from there to the first backward of a block.
    The peak of the second part is above the bytes at its end, where autocast's copies of weights are gone."""
    outside_peak_bytes: int = 0
    """Most bytes alive from the end of its backward to the beginning of the next step."""
    peak_bytes: int = 0
    """Most bytes alive from its beginning to the end of its backward."""

    @property
    def names(self) -> tuple[CallName, ...]:
        """The names of its calls."""
        return tuple(call.name for call in self.calls)

    def __getitem__(self, name: CallName) -> Call | None:
        return next((call for call in self.calls if call.name == name), None)

    def scaled(self, factor: float) -> Step:
        """A bound for the step of a batch that is larger by this factor. What is alive outside the step stays."""
        return _combined_steps([self], [factor])

    def completed(self, blocks: Mapping[str, Any]) -> Step:
        """The same step as if it had skipped no block (LayerDrop): one that it skipped is like the nearest equal one.

        Args:
            blocks: all blocks in the order of their forwards -> a key that equal blocks of a stack share.
        """
        order = {block: place for place, block in enumerate(blocks)}
        passes: list[dict[str, Call]] = []
        """The calls of each forward of the model, which calls no block twice."""
        for call in self.calls:
            if not passes or order[call.name[0]] <= order[next(reversed(passes[-1]))]:
                passes.append({})
            passes[-1][call.name[0]] = call
        calls: list[Call] = []
        for ran in passes:
            calls += _completed(ran, blocks, order)
        numbers: collections.Counter[str] = collections.Counter()
        for place, call in enumerate(calls):
            block = call.name[0]
            calls[place] = dataclasses.replace(call, name=(block, numbers[block]))
            numbers[block] += 1
        more_bytes = sum(call.left for call in calls) - sum(call.left for call in self.calls)
        return dataclasses.replace(self, calls=tuple(calls), at_backward_bytes=self.at_backward_bytes + more_bytes)

    def with_actions(self, other: Step, actions: Mapping[str, Action]) -> Step:
        """The same step with what another step of the same batch has shown, whose blocks had these actions."""
        calls = []
        for call in other.calls:
            # Both ran forwards; what the action keeps is how much more is left by this one.
            full = self[call.name]
            if call.name[0] in actions and full is not None and call.backward is not None:
                need = dataclasses.replace(call.as_it_ran(), kept=call.forward.net - full.forward.net)
                calls.append(dataclasses.replace(call, needs={actions[call.name[0]]: need}))
        return self.with_needs(dataclasses.replace(other, calls=tuple(calls)))

    def with_needs(self, other: Step) -> Step:
        """The same step with what another step of the same batch has shown of further actions."""
        shown = {call.name: call.needs for call in other.calls}
        calls = [dataclasses.replace(call, needs={**call.needs, **shown.get(call.name, {})}) for call in self.calls]
        return dataclasses.replace(self, calls=tuple(calls))


def _completed(ran: Mapping[str, Call], blocks: Mapping[str, Any], order: Mapping[str, int]) -> list[Call]:
    """The calls of one forward, with those of blocks that it skipped: see `Step.completed`."""
    calls = []
    records_graph = set()
    """The keys of blocks whose output requires gradients, so that the input of later ones does."""
    for block, key in blocks.items():
        equal = [name for name in ran if blocks[name] == key]
        if key in records_graph:  # one that ran without is not like it: only a block before it was skipped
            equal = [name for name in equal if ran[name].has_input_graph] or equal
        if not equal:  # nothing like it ran, such as the blocks of another stack
            continue
        call = ran[min(equal, key=lambda name: abs(order[name] - order[block]))]
        if call.records_graph:
            records_graph.add(key)
        # What runs between two calls was measured, whichever calls these were.
        until_next = ran[block].until_next if block in ran else Part()
        calls.append(dataclasses.replace(call, name=(block, 0), until_next=until_next))
    return calls


def step_between(steps: Mapping[float, Step]) -> Step:
    """The step of a batch, from steps of batches that differ from it in one length only.

    Args:
        steps: their length, as a multiple of that of the batch -> the step. All have the same calls.
    """
    weights = _weights(steps)
    return _combined_steps([steps[length] for length in weights], [*weights.values()])


def needs_between(needs: Mapping[float, Needs]) -> Needs:
    """The same for what a call needs. Its backward follows from those in which it was measured."""
    weights = _weights(needs)
    need: Needs = _combined([needs[length] for length in weights], [*weights.values()])
    with_backward = {length: other for length, other in needs.items() if other.backward_peak is not None}
    if not with_backward or len(with_backward) == len(needs):
        return need
    return dataclasses.replace(need, backward_peak=needs_between(with_backward).backward_peak)


def _weights(lengths: Collection[float]) -> dict[float, float]:
    """How much what was measured at some lengths counts for the length 1.

    Bytes are polynomials of the length: linear, and quadratic where attention keeps its scores. So they follow from
    three lengths, and nearly from two. From a single one follows a bound: nothing grows more than with the square.
    """
    if len(lengths) == 1:
        return {length: max(1.0, 1 / length) ** 2 for length in lengths}
    # Outside of the measured lengths, these are the last of them and the one at the other end.
    shorter = max((length for length in lengths if length <= 1), default=max(lengths))
    longer = min((length for length in lengths if length >= 1), default=min(lengths))
    if shorter == longer:
        return {1.0: 1.0}
    others = set(lengths) - {shorter, longer}
    chosen = [shorter, longer, *sorted(others, key=lambda other: -abs((other - shorter) * (other - longer)))[:1]]
    return {
        length: math.prod((1 - other) / (length - other) for other in chosen if other != length) for length in chosen
    }


def _combined_steps(steps: Sequence[Step], weights: Sequence[float]) -> Step:
    """The weighted sum of steps. What is alive outside of them does not depend on the batch."""
    names = ("before", "calls", "at_backward_bytes", "head")
    parts = {name: _combined([getattr(step, name) for step in steps], weights) for name in names}
    return dataclasses.replace(steps[0], **parts)


def _combined(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """The weighted sums of the bytes in records of the same form, rounded up; None where a record has none."""
    first = values[0]
    if any(value is None for value in values):
        return None
    if type(first) is int:  # but no `bool`
        total = sum(weight * value for weight, value in zip(weights, values, strict=True))
        return math.ceil(round(total, 3))
    if isinstance(first, tuple):
        return tuple(_combined(parts, weights) for parts in zip(*values, strict=True))
    if isinstance(first, Mapping):
        common = [key for key in first if all(key in value for value in values)]
        return {key: _combined([value[key] for value in values], weights) for key in common}
    if not dataclasses.is_dataclass(first) or isinstance(first, type):
        return first
    names = {field.name for field in dataclasses.fields(first)} - {"name"}  # whose number counts calls, not bytes
    parts = {name: _combined([getattr(value, name) for value in values], weights) for name in names}
    return dataclasses.replace(first, **parts)
