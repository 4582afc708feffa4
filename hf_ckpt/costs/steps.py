"""Measured steps: what a step needs under `full`, and what each call needs under other actions. Pure, without torch.

A step consists of what runs before the blocks, the call of every block, what runs between two calls, and the backward
of every call. The step of a plan is that under `full`, plus the differences that the plan's actions make. Bytes add
up, so losses, image towers and routers need no model of their own. Trials show the differences: while a block is
recomputed, it runs under other actions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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
        net, nanoseconds = self.net + other.net, self.nanoseconds + other.nanoseconds
        return Part(max(self.peak, self.net + other.peak), net, nanoseconds)


@dataclasses.dataclass(frozen=True)
class Freed:
    """Bytes that a call was given, and that an action does not keep for the backward. `full` keeps all of them."""

    hidden: int = 0
    """Of its hidden states, which are freed when it returns."""
    shared: int = 0
    """Of what all calls of a stack are given, such as masks, which is freed when the stack returns."""
    rebuilt: int = 0
    """Of hidden states that the action rebuilds if the call before has it, too, because each ends with a norm."""


NOTHING = Freed()


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a call keeps and needs under an action. All in bytes, but for the times."""

    forward_peak: int
    """Most bytes alive in the forward, above those at its beginning."""
    kept: int
    """What the forward leaves for the backward, besides its output and autocast's copies of weights."""
    later: int
    """Autocast's copies of weights that the backward needs; they outlive the model's forward."""
    backward_peak: int | None = None
    """Most bytes alive in the backward, above those when its gradient arrives; None if it was not tried."""
    arrival: int = 0
    """What is allocated between the arrival of the gradient and the first operation of the backward."""
    freed: Freed = NOTHING
    """What the action does not keep of what the call is given."""
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
    behind: Part
    """What runs between this call and the next one; nothing after the last one."""
    backward: Part | None
    """Its backward, and what runs between it and the next boundary. None for a call without one."""
    trials: Mapping[Action, Trial] = dataclasses.field(default_factory=dict)
    """What it would keep and need under other actions."""

    def as_it_ran(self) -> Trial:
        """What it keeps and needs as it ran, usually under `full`, beside what `full` keeps."""
        backward = self.backward or Part()
        return Trial(self.forward.peak, 0, 0, backward.peak, backward_nanoseconds=backward.nanoseconds)

    def recomputed(self, trial: Trial) -> Trial:
        """What it keeps and needs if its recomputation runs as in a trial, which has tried the backward."""
        assert trial.backward_peak is not None
        peak = max(trial.arrival + trial.forward_peak, trial.kept + trial.later + trial.backward_peak)
        spent = trial.forward_nanoseconds + trial.backward_nanoseconds
        return dataclasses.replace(self.as_it_ran(), backward_peak=peak, backward_nanoseconds=spent)


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
        begun = _scaled(self.at_backward_bytes, factor)
        before = _scaled(self.before, factor)
        head = _scaled(self.head, factor)
        calls = _scaled(self.calls, factor)
        return dataclasses.replace(self, before=before, calls=calls, at_backward_bytes=begun, head=head)

    def with_actions(self, other: Step, actions: Mapping[str, Action]) -> Step:
        """The same step with what another step of the same batch has shown, whose blocks had these actions."""
        calls = []
        for call in other.calls:
            full = self[call.name]
            if call.name[0] in actions and full is not None and call.backward is not None:
                trial = dataclasses.replace(call.as_it_ran(), kept=call.forward.net - full.forward.net)
                calls.append(dataclasses.replace(call, trials={actions[call.name[0]]: trial}))
        return self.with_trials(dataclasses.replace(other, calls=tuple(calls)))

    def with_trials(self, other: Step) -> Step:
        """The same step with what another step of the same batch has tried."""
        calls = []
        for call in self.calls:
            tried = other[call.name]
            trials = {} if tried is None else tried.trials
            calls.append(dataclasses.replace(call, trials={**call.trials, **trials}))
        return dataclasses.replace(self, calls=tuple(calls))


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
    calls = [*full.calls, *(dataclasses.replace(call, behind=Part()) for call in added)]
    calls.sort(key=lambda call: (call.name[1], order.index(call.name[0])))
    kept = sum(call.forward.net for call in added)
    return dataclasses.replace(full, calls=tuple(calls), at_backward_bytes=full.at_backward_bytes + kept)


def _scaled(value: Any, factor: float) -> Any:
    """Records of steps that were not timed, with all bytes in them multiplied by a factor and rounded up."""
    if isinstance(value, int) and not isinstance(value, bool):
        return -int(-value * factor // 1)
    if isinstance(value, tuple):
        return tuple(_scaled(part, factor) for part in value)
    if isinstance(value, Mapping):
        return {key: _scaled(part, factor) for key, part in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = [
        field.name for field in dataclasses.fields(value) if field.name != "name"
    ]  # which has a number of its own
    return dataclasses.replace(value, **{name: _scaled(getattr(value, name), factor) for name in fields})
