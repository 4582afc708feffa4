"""What the calls of a step cost under every action, in bytes and nanoseconds: from a step under `full`, and what each
action changes in it."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence

from hf_ckpt.costs.steps import CallName, Change, Part, Step
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
    ends: tuple[StackEnd, ...] = ()
    """What is freed at the ends of stacks, if that is known. `Cost` does not contain it."""
    family: str = ""
    model: str = ""
    tokens: int = 0
    """Tokens of one micro-step."""
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


def costs_of_step(
    full: Step,
    blocks: Sequence[Block],
    kinds: Mapping[CallName, int],
    changes: Mapping[tuple[int, Action], Change],
    ratios: Mapping[tuple[int, Action], float],
    actions: Sequence[Action],
    freed: Mapping[int, int] | None = None,
    ends: tuple[StackEnd, ...] = (),
) -> Costs:
    """The costs of all plans, from a step under `full` and what other actions change in it.

    Args:
        full: the step. A block that is called several times occurs several times.
        blocks: the block of each call.
        kinds: call -> number of its kind; actions change all calls of one kind alike.
        changes: (kind, action) -> what it changes. Actions without an entry are not chosen for the kind.
        ratios: (kind, action) -> time of forward and backward as a share of that under `full`; 1 if missing.
        actions: to choose from. The first keeps most; the last is that of `full`.
        freed: kind -> bytes that a call under `full` frees at the end of the forward; None if only changes are known.
        ends: what is freed at the ends of stacks. The calls do not contain it.
    """
    last, least = full.calls[-1], actions[-1]
    lent = dict(freed or {})
    """Kind -> bytes that a call frees at the end of the forward under `full`, but not under some other action."""
    possible: list[dict[Action, Change]] = []
    for call in full.calls:
        kind = kinds[call.name]
        if call.backward is None:
            found = {actions[0]: Change()}
        else:
            found = {action: changes[kind, action].at(call) for action in actions[:-1] if (kind, action) in changes}
            found[least] = Change()
        if freed is None:
            lent[kind] = max(lent.get(kind, 0), *(change.later for change in found.values()))
        possible.append(found)
    level, levels = full.before.net, []
    """Bytes after each forward that outlive the model's forward."""
    under_full = (least,) * len(full.calls)
    for place, call in enumerate(full.calls):
        behind = call.behind if call is not last else Part()  # what runs after the last call is the head
        ended = sum(end.freed(under_full) for end in ends if end.last == place)
        level += call.forward.net + behind.net - lent[kinds[call.name]] - ended
        levels.append(level)
    # What a backward leaves alive, such as gradients, is the part of the level's change from this backward to the next
    # that forwards do not explain.
    places = [place for place, call in enumerate(full.calls) if call.backward is not None][::-1]
    gradients = [0] * len(full.calls)
    gradients[-1] += level - levels[places[0]]
    for place, before in itertools.pairwise(places):
        back = full.calls[place].backward
        gradients[place] += (back.net if back else 0) - levels[before] + levels[place]
    rows = []
    for call, block, found, left in zip(full.calls, blocks, possible, gradients, strict=True):
        kind, back = kinds[call.name], call.backward
        spent = call.forward.nanoseconds + (back.nanoseconds if back else 0)
        costs = {}
        for action, change in found.items():
            net, nanoseconds = call.forward.net + change.forward_net, call.forward.nanoseconds
            forward = Part(max(0, net, call.forward.peak + change.forward_peak), net, nanoseconds)
            backward = Part()
            if back is not None:
                nanoseconds = round(spent * ratios.get((kind, action), 1.0)) - nanoseconds
                end = back.net - change.forward_net - change.later
                backward = Part(max(0, end, back.peak + change.backward_peak), end, max(0, nanoseconds))
            behind = call.behind if call is not last else Part()
            costs[action] = Cost(forward.then(behind), backward, lent[kind] - change.later)
        rows.append(CallCosts((block,), kind, left, costs))
    return Costs(
        actions=tuple(actions),
        calls=tuple(rows),
        before=full.before,
        at_backward_bytes=full.at_backward_bytes - level,
        head=(Part(last.behind.peak, 0, last.behind.nanoseconds), Part()),
        input_bytes=max(0, round(statistics.median(call.forward.net for call in full.calls))),
        static=Static(full.start_bytes, step_bytes=max(0, full.outside_peak_bytes - full.start_bytes)),
        ends=ends,
    )
