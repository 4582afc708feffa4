"""Measured steps: what a step needs under `full`, and what each action changes. Pure, does not import torch.

A step consists of what runs before the blocks, the call of every block, what runs between two calls, and the backward
of every call. The step of a plan is that under `full`, plus the differences that the plan's actions make. Bytes add
up, so losses, image towers and routers need no model of their own. Trials show the differences: while a block is
recomputed, it runs under other actions.
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
class Trial:
    """What a call would keep and need under another action. All in bytes."""

    arrival: int
    """What is allocated between the arrival of the gradient and the first operation of the backward."""
    forward_peak: int
    """Most bytes alive in the forward, above those at its beginning."""
    kept: int
    """What the forward leaves for the backward, besides its output and autocast's copies of weights."""
    later: int
    """Autocast's copies of weights that the backward needs; they outlive the model's forward."""
    backward_peak: int | None = None
    """Most bytes alive in the backward, above those when its gradient arrives; None if it was not tried."""

    def scaled(self, factor: float) -> Trial:
        """All bytes multiplied by a factor, rounded up."""
        back = self.backward_peak
        return Trial(
            arrival=_up(self.arrival * factor),
            forward_peak=_up(self.forward_peak * factor),
            kept=_up(self.kept * factor),
            later=self.later,
            backward_peak=None if back is None else _up(back * factor),
        )

    def change(self, call: Call) -> Change:
        """What the action changes in the call that it was tried in.

        Without a trial of the backward, it needs at most as much as under `full`, which holds all that a block keeps.
        """
        assert call.backward is not None
        if self.backward_peak is None:
            backward_peak = -(self.kept + self.later)
        else:
            backward_peak = self.backward_peak - call.backward.peak
        return Change(self.forward_peak - call.forward.peak, self.kept, self.later, backward_peak)

    def recomputed(self, call: Call) -> Change:
        """What it changes to recompute the block in backward, under this action."""
        assert call.backward is not None
        if self.backward_peak is None:
            return Change()
        forward = self.arrival + self.forward_peak
        return Change(backward_peak=max(forward, self.kept + self.later + self.backward_peak) - call.backward.peak)


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
    trials: Mapping[Action, Trial] = dataclasses.field(default_factory=dict)
    """What it would keep and need under other actions."""

    def scaled(self, factor: float) -> Call:
        """All bytes multiplied by a factor, rounded up."""
        return Call(
            self.name,
            self.has_input_graph,
            self.forward.scaled(factor),
            self.behind.scaled(factor),
            self.backward and self.backward.scaled(factor),
            {action: trial.scaled(factor) for action, trial in self.trials.items()},
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
        calls = tuple(call.scaled(factor) for call in self.calls)
        begun = _up(self.at_backward_bytes * factor)
        return dataclasses.replace(self, before=self.before.scaled(factor), calls=calls, at_backward_bytes=begun)

    def with_trials(self, other: Step) -> Step:
        """The same step with what another step of the same batch has tried."""
        calls = []
        for call in self.calls:
            tried = other[call.name]
            trials = {} if tried is None else tried.trials
            calls.append(dataclasses.replace(call, trials={**call.trials, **trials}))
        return dataclasses.replace(self, calls=tuple(calls))


@dataclasses.dataclass(frozen=True)
class Change:
    """What an action changes in one call of a block, compared with `full`. All in bytes."""

    forward_peak: int = 0
    forward_net: int = 0
    later: int = 0
    """What is kept after the model's forward, in addition to `forward_net`."""
    backward_peak: int = 0

    def larger(self, other: Change) -> Change:
        """The larger of both, field by field."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Change(*(max(pair) for pair in pairs))


def joined(full: Step, other: Step, order: Sequence[str]) -> Step:
    """Add calls of another step to a step under `full` that lacks them, for example if blocks are skipped at random.

    Args:
        full: the step.
        other: the other one. Its calls that `full` lacks must have run under `full`.
        order: names of all blocks, in the order in which they run.
    """
    added = [call for call in other.calls if full[call.name] is None]
    if not added:
        return full
    calls = [*full.calls[:-1], *(dataclasses.replace(call, behind=Part()) for call in (full.calls[-1], *added))]
    calls.sort(key=lambda call: (call.name[1], order.index(call.name[0])))
    calls[-1] = dataclasses.replace(calls[-1], behind=full.calls[-1].behind)
    kept = sum(call.forward.net for call in added)
    return dataclasses.replace(full, calls=tuple(calls), at_backward_bytes=full.at_backward_bytes + kept)


def _up(number: float) -> int:
    return -int(-number // 1)
