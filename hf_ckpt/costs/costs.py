"""What the calls of a step cost under every action, in bytes and nanoseconds: from a step under `full`, and what each
action changes in it."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence

from hf_ckpt.costs.steps import BEFORE, Call, CallName, Change, Part, Step, Times
from hf_ckpt.spec.actions import Action, offloads
from hf_ckpt.spec.plan import Block

OFFLOADED = offloads()
"""Action -> the action that keeps the same tensors in host memory."""
ON_DEVICE = {moved: kept for kept, moved in OFFLOADED.items()}
"""Action that keeps tensors in host memory -> the action that keeps them on the device."""
Choice = tuple[Action, ...]
"""The action of each call."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a call costs under one action."""

    forward: Part
    """Its forward, and what runs until the next call."""
    backward: Part
    lent_bytes: int = 0
    """How many of the bytes that its forward leaves are freed when the model's forward ends, such as autocast's copies
    of weights."""

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for the backward."""
        return self.forward.net - self.lent_bytes

    @property
    def nanoseconds(self) -> int:
        """Time of forward and backward."""
        return self.forward.nanoseconds + self.backward.nanoseconds


@dataclasses.dataclass(frozen=True)
class CallCosts:
    """What a call costs under every action that it may have."""

    blocks: tuple[Block, ...]
    """The block; or all blocks of a segment, which counts as one call."""
    kind: int
    """Calls of one kind are alike."""
    gradient_bytes: int
    """Bytes that its backward leaves alive, such as gradients."""
    costs: Mapping[Action, Cost]


@dataclasses.dataclass(frozen=True)
class StackEnd:
    """What is freed when the forward of a stack ends, because only its variables held it."""

    first: int
    """Place of its first call."""
    last: int
    """Place of its last call."""
    input_bytes: Mapping[Action, int]
    """Bytes of the stack's input that are freed if the first call has this action."""
    shared_bytes: Mapping[Action, int]
    """Bytes of what all calls share, such as masks, that are freed if all calls have this action. A call with an action
    that frees less keeps the rest."""

    def freed(self, choice: Choice) -> int:
        """Bytes that are freed if the calls of the whole model have these actions."""
        kept = [ON_DEVICE.get(action, action) for action in choice[self.first : self.last + 1]]
        return self.input_bytes[kept[0]] + min(self.shared_bytes[action] for action in kept)


@dataclasses.dataclass(frozen=True)
class Static:
    """Bytes that do not depend on the actions of the blocks."""

    parameters: int
    buffers: int = 0
    optimizer: int = 0
    gradients: int = 0
    """Bytes of the gradients of all trainable parameters."""
    batch: int = 0
    step_bytes: int = 0
    """Temporary bytes of the optimizer's step, in addition to its state."""
    gathered: int = 0
    """Under FSDP2, where `parameters` counts this rank's shards: the unsharded parameters outside the blocks, and the
    all-gather buffer."""

    @property
    def always(self) -> int:
        """Bytes alive at every moment: everything but gradients and `step_bytes`."""
        return self.parameters + self.gathered + self.buffers + self.optimizer + self.batch

    @property
    def beside(self) -> int:
        """Most bytes alive before and after the micro-steps, whatever the blocks do."""
        return self.always + self.gradients + self.step_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Costs:
    """What a step costs under every plan, for one batch shape."""

    family: str
    model: str
    actions: tuple[Action, ...]
    calls: tuple[CallCosts, ...]
    """In the order of their forwards."""
    before: Part
    """What runs before the first call."""
    at_backward_bytes: int
    """How many more bytes are alive when the first backward of a call begins than all calls keep."""
    head: tuple[Part, Part]
    """Forward and backward of the head and the loss. The forward does not include freeing `lent_bytes`."""
    input_bytes: int
    """Bytes of a block's hidden states."""
    static: Static
    tokens: int
    """Tokens of one micro-step."""
    ends: tuple[StackEnd, ...] = ()
    """What is freed at the ends of stacks, if that is known. `Cost` does not contain it."""
    blocks: tuple[Block, ...] = ()
    """All blocks of the model, if a step may not call some of them; these keep nothing and get the action `keep`."""
    accumulation: int = 1
    """Micro-steps of one optimizer step. If there are several, gradients are alive from the beginning."""
    optimizer_nanoseconds: int = 0
    head_tokens: int | str = "full"
    """How the head runs, in the words of `Plan.head`: `full`, `auto`, or the tokens of a chunk."""
    mlp_tokens: int | str = "full"
    """How the feed-forward of each block runs, in the words of `Plan.mlp`."""
    notes: tuple[str, ...] = ()
    """Remarks on the origin of the figures, for example that times were measured."""

    @property
    def resident_bytes(self) -> int:
        """Bytes alive throughout a micro-step."""
        return self.static.always + (self.static.gradients if self.accumulation > 1 else 0)

    def uniform(self, action: Action) -> Choice:
        """The choice that gives `action` to every call that may have it.

        Others get the action that keeps the same tensors on the device, or else the first of their own actions.
        """
        near = (action, ON_DEVICE.get(action, action))
        return tuple(next((a for a in near if a in call.costs), next(iter(call.costs))) for call in self.calls)


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Creates `Costs` from a step under `full` and the changes that actions make.

    A block that is called several times occurs several times.
    """

    full: Step
    """The step under `full`."""
    kinds: Mapping[CallName, int]
    """Call -> number of its kind; actions change all calls of one kind alike."""
    changes: Mapping[tuple[int, Action], Change]
    """(kind, action) -> what it changes. Actions without an entry are not chosen for the kind."""
    ratios: Mapping[tuple[int, Action], float]
    """(kind, action) -> time of forward and backward as a share of that under `full`; 1 if missing."""
    actions: Sequence[Action]
    """The actions to choose from. The first keeps most; the last is that of `full`."""
    times: Times
    """Times under `full`, as far as known."""
    freed: Mapping[int, int] | None = None
    """Kind -> bytes that a call under `full` frees at the end of the forward; None if only changes are known."""
    ends: tuple[StackEnd, ...] = ()
    """What is freed at the ends of stacks. The calls do not contain it."""

    def costs(
        self, blocks: Sequence[Block], model: str, tokens: int, head: int | str = "full", mlp: int | str = "full"
    ) -> Costs:
        """The costs of all plans for one batch shape.

        Args:
            blocks: the block of each call.
            model: class name of the model.
            tokens: of the batch.
            head: how the head runs, as in `Costs.head_tokens`.
            mlp: how feed-forwards run, as in `Costs.mlp_tokens`.
        """
        full, last = self.full, self.full.calls[-1]
        changes = [self._changes(call) for call in full.calls]
        lent = dict(self.freed or {})
        """Kind -> bytes that a call frees at the end of the forward under `full`, but not under some other action."""
        for call, of_call in zip(full.calls, changes if self.freed is None else [], strict=False):
            kind = self.kinds[call.name]
            lent[kind] = max(lent.get(kind, 0), *(change.later for change in of_call.values()))
        levels = [full.before.net]
        """Bytes before each forward, and after the last, that outlive the model's forward."""
        under_full = (self.actions[-1],) * len(full.calls)
        for place, call in enumerate(full.calls):
            behind = call.behind.net if call is not last else 0
            ended = sum(end.freed(under_full) for end in self.ends if end.last == place)
            levels.append(levels[-1] + call.forward.net + behind - lent[self.kinds[call.name]] - ended)
        rows, times, gradients = [], self._times(), self._gradients(levels[1:])
        for call, block, of_call, left in zip(full.calls, blocks, changes, gradients, strict=True):
            kind = self.kinds[call.name]
            costs = {
                action: self._cost(call, change, action, times[kind], lent[kind]) for action, change in of_call.items()
            }
            rows.append(CallCosts((block,), kind, left, costs))
        return Costs(
            family="",
            model=model,
            actions=tuple(self.actions),
            calls=tuple(rows),
            before=dataclasses.replace(full.before, nanoseconds=self.times.get(BEFORE, (0,))[0]),
            at_backward_bytes=full.at_backward_bytes - levels[-1],
            head=(Part(last.behind.peak, 0, self.times.get(last.name, (0, 0))[1]), Part()),
            input_bytes=max(0, round(statistics.median(call.forward.net for call in full.calls))),
            static=Static(full.start_bytes, step_bytes=max(0, full.outside_peak_bytes - full.start_bytes)),
            tokens=tokens,
            ends=self.ends,
            head_tokens=head,
            mlp_tokens=mlp,
            notes=("measured",),
        )

    def _changes(self, call: Call) -> dict[Action, Change]:
        """What each action that a call may have changes."""
        if call.backward is None:
            return {self.actions[0]: Change()}
        changes = {action: self.changes.get((self.kinds[call.name], action)) for action in self.actions}
        changes[self.actions[-1]] = Change()
        return {action: change.at(call) for action, change in changes.items() if change is not None}

    def _times(self) -> dict[int, tuple[int, int, int]]:
        """Kind -> median times of its calls, as in `Times`; a kind without times gets those of all kinds."""
        timed: dict[int, list[tuple[int, int, int]]] = collections.defaultdict(list)
        for call in self.full.calls:
            if any(spent := self.times.get(call.name, (0, 0, 0))):
                timed[self.kinds[call.name]].append(spent)
        usual = [spent for of_kind in timed.values() for spent in of_kind] or [(0, 0, 0)]
        columns = {kind: zip(*timed.get(kind, usual), strict=True) for kind in self.kinds.values()}
        medians = {kind: tuple(round(statistics.median(column)) for column in of) for kind, of in columns.items()}
        return {kind: (forward, behind, backward) for kind, (forward, behind, backward) in medians.items()}

    def _gradients(self, levels: Sequence[int]) -> list[int]:
        """For each call, the bytes that its backward leaves alive, such as gradients.

        They are the part of the level's change, from this call's backward to the next, that forwards do not explain.
        """
        calls = self.full.calls
        places = [place for place, call in enumerate(calls) if call.backward is not None][::-1]
        gradients = [0] * len(calls)
        gradients[-1] += levels[-1] - levels[places[0]]
        for place, before in itertools.pairwise(places):
            back = calls[place].backward
            assert back is not None
            gradients[place] += (back.net - levels[before]) + levels[place]
        return gradients

    def _cost(self, call: Call, change: Change, action: Action, times: tuple[int, int, int], lent: int) -> Cost:
        whole, _, back = times
        # What runs after the last call is the head.
        behind = call.behind if call is not self.full.calls[-1] else Part()
        between = self.times.get(call.name, times)[1] if behind is call.behind else 0
        net = call.forward.net + change.forward_net
        peak = max(0, call.forward.peak + change.forward_peak, net + behind.peak, net + behind.net, net)
        spent = round((whole + back) * self.ratios.get((self.kinds[call.name], action), 1.0)) - whole
        needed = left = 0
        if call.backward is not None:
            left = call.backward.net - change.forward_net - change.later
            needed = max(0, left, call.backward.peak + change.backward_peak)
        forward = Part(peak, net + behind.net, whole + between)
        return Cost(forward, Part(needed, left, max(0, spent)), lent - change.later)
