"""Measured steps: what a step needs under `full`, and what each action changes. Pure, does not import torch.

A step consists of what runs before the blocks, the call of every block, what runs between two calls, and the backward
of every call. The step of a plan is that under `full`, plus the differences that the plan's actions make. Bytes add
up, so losses, image towers and routers need no model of their own. Differences measured for one batch are scaled for
others: they grow with the backward of a `full` block, which holds everything that the block keeps under `keep`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

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
        net, nanoseconds = self.net + other.net, self.nanoseconds + other.nanoseconds
        return Part(max(self.peak, self.net + other.peak), net, nanoseconds)

    def scaled(self, factor: float) -> Part:
        """All bytes multiplied by a factor, rounded up."""
        return Part(_up(self.peak * factor), _up(self.net * factor), self.nanoseconds)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a block in a step."""

    name: CallName
    has_input_graph: bool
    """Whether its input requires gradients."""
    forward: Part
    behind: Part
    """What runs between this call and the next one; after the last one, the head and the loss with their backward."""
    backward: Part | None
    """Its backward, and what runs between it and the next boundary. None for a call without one."""


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

    def raised(self, other: Step) -> Step:
        """The same step with the larger of both steps' memory outside the step."""
        start = max(self.start_bytes, other.start_bytes)
        outside = max(self.outside_peak_bytes, other.outside_peak_bytes)
        return dataclasses.replace(self, start_bytes=start, outside_peak_bytes=outside)

    def scaled(self, factor: float) -> Step:
        """A bound for the step of a batch that is larger by this factor. What is alive outside the step stays."""
        calls = []
        for call in self.calls:
            backward = call.backward and call.backward.scaled(factor)
            parts = call.forward.scaled(factor), call.behind.scaled(factor), backward
            calls.append(Call(call.name, call.has_input_graph, *parts))
        before, begun = self.before.scaled(factor), _up(self.at_backward_bytes * factor)
        return dataclasses.replace(self, before=before, calls=tuple(calls), at_backward_bytes=begun)


@dataclasses.dataclass(frozen=True)
class Change:
    """What an action changes in one call of a block, compared with `full`."""

    forward_peak: int = 0
    forward_net: int = 0
    later: int = 0
    """Further bytes that are kept after the model's forward, in addition to `forward_net`."""
    backward_peak: int = 0
    scale: int = 0
    """Most bytes of the call's backward under `full`, when this was measured."""
    growth: float = 0.0
    """How many times as large the batch is as the measured one, if some dimension of it is larger; 0 otherwise."""

    def larger(self, other: Change) -> Change:
        """The larger of both, field by field. Both must come from calls that need the same."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Change(*(max(pair) for pair in pairs))

    def at(self, call: Call) -> Change:
        """The change for a call that needs more or less than the one it was measured on."""
        size = call.backward.peak if call.backward is not None else 0
        if not self.scale or (size == self.scale and not self.growth):
            return self
        factor = size / self.scale
        kept = _up(self.forward_net * factor)
        # Gradients of weights do not grow with the batch, and attention may grow faster. All that grew may be kept.
        grown = self.forward_net * self.growth + max(0.0, size - self.scale * self.growth)
        more = max(0, _up(grown) - kept) if self.growth and self.forward_net > 0 else 0
        first, later, back = (_up(n * factor) for n in (self.forward_peak, self.later, self.backward_peak))
        return Change(first + more, kept + more, later, back - more, scale=size)


def changes_of(full: Step, seen: Step, tried: Mapping[CallName, Action], alike: bool) -> dict[CallName, Change]:
    """What actions changed in the calls that had them.

    Args:
        full: a step under `full`.
        seen: the step in which the calls in `tried` had these actions, and all others `full`.
        tried: calls of blocks, with their actions.
        alike: whether both batches had the same shape.
    """
    before = {call.name: call.backward.peak for call in full.calls if call.backward and call.name not in tried}
    after = {call.name: call.backward.peak for call in seen.calls if call.backward and call.name in before}
    ratio = sum(after.values()) / max(1, sum(before[name] for name in after)) if after else 1.0
    """What calls need in `seen`, relative to `full`, measured on those that ran under `full` in both."""
    found: dict[CallName, Change] = {}
    for name in tried:
        mine, its = full[name], seen[name]
        if mine and its and mine.backward and its.backward:
            backward_peak = round(mine.backward.peak * ratio)
            found[name] = Change(
                forward_peak=its.forward.peak - round(mine.forward.peak * ratio),
                forward_net=its.forward.net - round(mine.forward.net * ratio),
                backward_peak=its.backward.peak - backward_peak,
                scale=backward_peak,
            )
    if alike and found and full.names == seen.names:  # further kept bytes show when the backward begins
        kept = sum(change.forward_net for change in found.values())
        extra = seen.at_backward_bytes - full.at_backward_bytes - kept
        weights = {name: max(0, change.forward_net) for name, change in found.items()}
        whole = sum(weights.values())
        for name, weight in weights.items() if whole else ():
            found[name] = dataclasses.replace(found[name], later=_up(extra * weight / whole))
    return found


def joined(full: Step, seen: Step, without: Mapping[CallName, Action], order: Sequence[str]) -> Step:
    """Add calls of another step to a step under `full` that lacks them, for example if blocks are skipped at random.

    Args:
        full: the step.
        seen: the other one.
        without: calls of `seen` that did not run under `full`.
        order: names of all blocks, in the order in which they run.
    """
    added = [call for call in seen.calls if full[call.name] is None and call.name not in without]
    if not added:
        return full
    calls = [*full.calls[:-1], *(dataclasses.replace(call, behind=Part()) for call in (full.calls[-1], *added))]
    calls.sort(key=lambda call: (call.name[1], order.index(call.name[0])))
    calls[-1] = dataclasses.replace(calls[-1], behind=full.calls[-1].behind)
    kept = sum(call.forward.net for call in added)
    return dataclasses.replace(full, calls=tuple(calls), at_backward_bytes=full.at_backward_bytes + kept)


def _up(number: float) -> int:
    return -int(-number // 1)
