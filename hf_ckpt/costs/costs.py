"""What a step costs under every plan: from a step under `full`, and what each action changes in it. Exact integers.

A step consists of what runs before the blocks, the forwards of the calls, the head and the loss with their backward,
the backwards of the calls in reverse, and the optimizer's step.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence

from hf_ckpt.costs.steps import Call, CallName, Part, Step, Trial
from hf_ckpt.spec.actions import COMPILED, FULL, Action, offloads
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
    shared_bytes: int = 0
    """Bytes that are freed when the stack returns, unless another call of it keeps them, such as masks."""
    rebuilt_bytes: int = 0
    """Bytes that are not kept if this is so under the action of the call before, too: see `Freed.rebuilt`."""

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for the backward."""
        return self.forward.net - self.lent_bytes


@dataclasses.dataclass(frozen=True)
class CallCosts:
    """What a call costs under every action that it may have."""

    block: Block
    gradient_bytes: int
    """Bytes that its backward leaves alive, such as gradients."""
    costs: Mapping[Action, Cost]

    def first_of(self, *actions: Action) -> Action:
        """The first of these actions that the call may have; its first action if it may have none of them."""
        return next((action for action in actions if action in self.costs), next(iter(self.costs)))


@dataclasses.dataclass(frozen=True)
class Static:
    """Bytes that do not depend on the actions of the blocks."""

    parameters: int
    optimizer: int = 0
    gradients: int = 0
    """Bytes of the gradients of all trainable parameters."""
    buffers: int = 0
    """Bytes of buffers and the batch. Under FSDP2, where `parameters` counts this rank's shards, also of the unsharded
    parameters outside the blocks and the all-gather buffer; under DDP, of the copies of gradients in its buckets."""
    step_bytes: int = 0
    """Temporary bytes of the optimizer's step, in addition to its state."""

    @property
    def always(self) -> int:
        """Bytes alive at every moment: everything but gradients and `step_bytes`."""
        return self.parameters + self.optimizer + self.buffers

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
    """The head and the loss: until the model's forward ends, and from there to the first backward of a call. The bytes
    that the first leaves are those at the end of the second, less what calls keep: see `Step.head`."""
    input_bytes: int
    """Bytes of a block's hidden states."""
    static: Static
    family: str = ""
    model: str = ""
    tokens: int = 0
    """Tokens of one micro-step."""
    sequences: int = 0
    """Sequences of one micro-step; 0 if that is unknown."""
    has_host: bool = True
    """Whether there is host memory apart from the device's, to which blocks could offload."""
    blocks: tuple[Block, ...] = ()
    """All blocks of the model, if a step may not call some of them; these keep nothing and get the action `keep`."""
    accumulation: int = 1
    """Micro-steps of one optimizer step. If there are several, gradients are alive from the beginning."""
    optimizer_nanoseconds: int = 0
    head_tokens: int | str = "full"
    """How the head runs, in the words of `Plan.head`: `full`, `auto`, or the tokens of a chunk."""
    chunks_help: bool = False
    """Whether the head ran as a whole, and `"head": "auto"` would lower what it needs: see `Boundaries.chunks_help`."""
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
        return tuple(call.first_of(action, ON_DEVICE.get(action, action)) for call in self.calls)

    def choice(self, chosen: Mapping[str, Action]) -> Choice:
        """The choice that gives blocks, by name, these actions if they may have them; others keep least."""
        least = FULL if FULL in self.actions else COMPILED
        return tuple(call.first_of(chosen.get(call.block.name, least), least) for call in self.calls)

    def peak(self, chosen: Mapping[str, Action]) -> int:
        """The predicted peak of that choice."""
        return timeline(self, self.choice(chosen)).peak_bytes


def costs_of_step(
    full: Step, blocks: Sequence[Block], trials: Mapping[CallName, Mapping[Action, Trial]], actions: Sequence[Action]
) -> Costs:
    """The costs of all plans, from a step under `full` and what its calls would need under other actions.

    Args:
        full: the step. A block that is called several times occurs several times.
        blocks: the block of each call.
        trials: call -> action that it may have -> what it needs under it.
        actions: all of these, those that keep most first.
    """
    level = full.before.net
    levels = []
    """After each forward, the bytes that outlive the model's forward."""
    costs = []
    stacks = [None, *(block.stack for block in blocks)]
    for call, (earlier, stack) in zip(full.calls, itertools.pairwise(stacks), strict=True):
        # What a call frees at the end of the forward under `full`, but not under some other action.
        lent = max(trial.later for trial in trials[call.name].values())
        is_first = earlier != stack
        costs.append({action: _cost(call, trial, lent, is_first) for action, trial in trials[call.name].items()})
        level += call.forward.net + call.behind.net - lent
        levels.append(level)
    # What a backward leaves alive, such as gradients, is the part of the level's change from this backward to the next
    # that forwards do not explain.
    places = [(place, call.backward.net) for place, call in enumerate(full.calls) if call.backward][::-1]
    gradients = [0] * len(full.calls)
    gradients[-1] += level - levels[places[0][0]]
    for (place, net), (before, _) in itertools.pairwise(places):
        gradients[place] += net - levels[before] + levels[place]
    calls = (CallCosts(block, left, of_call) for block, left, of_call in zip(blocks, gradients, costs, strict=True))
    at_backward_bytes = full.at_backward_bytes - level
    forward, backward = full.head
    return Costs(
        actions=tuple(actions),
        calls=tuple(calls),
        before=full.before,
        at_backward_bytes=at_backward_bytes,
        head=(dataclasses.replace(forward, net=at_backward_bytes), dataclasses.replace(backward, net=0)),
        input_bytes=max(0, round(statistics.median(call.forward.net for call in full.calls))),
        static=Static(full.start_bytes, step_bytes=max(0, full.outside_peak_bytes - full.start_bytes)),
    )


def _cost(call: Call, trial: Trial, lent: int, is_first: bool) -> Cost:
    """What a call costs as a trial has shown, with what runs between it and the next call.

    The stack itself holds the hidden states that its first call is given, until it returns.
    """
    kept = trial.kept - trial.freed.hidden
    held = trial.freed.hidden if is_first else 0
    net = call.forward.net + kept + held
    forward = Part(max(0, net, trial.forward_peak), net, call.forward.nanoseconds)
    backward = Part()
    if call.backward is not None:
        end = call.backward.net - kept - trial.later
        peak = trial.backward_peak
        if peak is None:  # it needs at most as much as under `full`, which holds all that a block keeps
            peak = call.backward.peak - trial.kept - trial.later
        backward = Part(max(0, end, peak), end, trial.backward_nanoseconds)
    lent += held - trial.later
    return Cost(forward.then(call.behind), backward, lent, trial.freed.shared, trial.freed.rebuilt)


def with_offloading(
    costs: Costs, host_bandwidth: float, launch_nanoseconds: int, host_limit: int | None
) -> list[Costs]:
    """For each action that offloads, `costs` with it for as many calls as fit into host memory.

    No plan mixes these actions, so each may use the whole limit. The last call never offloads, because its backward
    follows at once. If nothing can be offloaded, returns `costs` unchanged.

    Args:
        costs: with actions that keep their tensors on the device.
        host_bandwidth: bytes per second of copies to and from pinned host memory; 0 if the device is the host.
        launch_nanoseconds: time to start an operation.
        host_limit: bytes of host memory that may be used. Buffers there are rounded up to powers of two. None for no
            offloading.
    """
    if host_limit is None or not host_bandwidth:
        return [costs]
    moving = []
    for base, moved in OFFLOADED.items():
        places = [place for place, call in enumerate(costs.calls[:-1]) if base in call.costs]
        keeps = {place: costs.calls[place].costs[base].kept_bytes for place in places}
        sizes = {place: costs.input_bytes if base == FULL else max(0, kept) for place, kept in keeps.items()}
        largest = max(sizes.values(), default=0)
        # Each of several tensors is rounded up by itself, to less than twice its size.
        buffer = 1 << max(0, largest - 1).bit_length() if base == FULL else 2 * largest
        calls = list(costs.calls)
        for place in [place for place in places if place < host_limit // max(1, buffer)]:
            cost, size = costs.calls[place].costs[base], sizes[place]
            copying, overhead = round(size / host_bandwidth * 1e9), 2 * launch_nanoseconds
            # The backward prefetches the tensors of the call before. This assumes that that call moves as much, and
            # that the calls that move tensors are the first ones of the step. The last of them waits for its own copy;
            # the first call's cost includes that time. The step's input may be held elsewhere, too, and is not freed.
            ahead, freed, waits = size, size, overhead
            if place == 0:
                ahead, freed, waits = 0, max(0, size - costs.input_bytes), overhead + copying
            peak = cost.forward.peak + (0 if base == FULL else ahead)  # the previous call's copies end with this one
            forward = Part(peak, cost.forward.net - freed, max(cost.forward.nanoseconds, copying) + overhead)
            spent = max(cost.backward.nanoseconds, copying) + waits
            backward = Part(cost.backward.peak + size + ahead, cost.backward.net + freed, spent)
            cost = dataclasses.replace(cost, forward=forward, backward=backward)
            calls[place] = dataclasses.replace(calls[place], costs={**calls[place].costs, moved: cost})
        if places:
            moving.append(dataclasses.replace(costs, calls=tuple(calls), actions=(*costs.actions, moved)))
    return moving or [costs]


# --- the memory of a plan, moment by moment ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Moment:
    """One part of a timeline."""

    label: str
    """What runs, in words: `embedding`, `forward of decoder 3`, `head and loss, backward`."""
    start_bytes: int
    """Bytes alive when it begins."""
    static_bytes: int
    """How many of these are alive all the time: weights, buffers, optimizer state and batch."""
    gradient_bytes: int
    """How many of these are finished gradients."""
    kept_bytes: int
    """How many of these are kept for the backward; in the head, those that everything before it keeps."""
    part: Part

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive while it runs."""
        return self.start_bytes + self.part.peak

    def parts(self) -> dict[str, int]:
        """What fills its peak: name -> bytes. The bytes add up to `peak_bytes`."""
        work = self.peak_bytes - self.static_bytes - self.gradient_bytes
        kept = max(0, min(self.kept_bytes, work))  # some of it may be freed by then
        return {
            "weights and optimizer state": self.static_bytes,
            "gradients": self.gradient_bytes,
            "kept for backward": kept,
            f"temporary in {self.label}": work - kept,
        }


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The memory of one micro-step under a choice of actions, and of the optimizer's step."""

    moments: tuple[Moment, ...]
    """In order of time."""

    @property
    def worst(self) -> Moment:
        """The moment with the peak."""
        return max(self.moments, key=lambda moment: moment.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at any moment."""
        return self.worst.peak_bytes

    @property
    def is_heads(self) -> bool:
        """Whether the peak is in the head and its loss, whose own memory no action of a block reduces."""
        return self.worst.label.startswith("head")


def step_nanoseconds(costs: Costs, choice: Choice) -> int:
    """Predicted nanoseconds of one optimizer step with all its micro-steps."""
    calls = [call.costs[action] for call, action in zip(costs.calls, choice, strict=True)]
    parts = costs.before, *costs.head, *(part for cost in calls for part in (cost.forward, cost.backward))
    return sum(part.nanoseconds for part in parts) * costs.accumulation + costs.optimizer_nanoseconds


def timeline(costs: Costs, choice: Choice) -> Timeline:
    """The timeline of the micro-step with the largest peak, and of the optimizer's step.

    Args:
        costs: of the step.
        choice: the action of every call.
    """
    static, gradients = costs.static.always, costs.resident_bytes - costs.static.always
    moments: list[Moment] = []

    def add(label: str, part: Part, kept: int, beside: int = 0) -> None:
        """Add what runs while calls keep some bytes and others are alive beside them."""
        moments.append(Moment(label, static + gradients + kept + beside, static, gradients, kept, part))

    add("embedding", costs.before, 0)
    level = costs.before.net
    lent = 0
    calls = []
    rebuilt: dict[str, int] = {}
    """Stack -> `rebuilt_bytes` of its last call so far."""
    for call, action in zip(costs.calls, choice, strict=True):
        cost = call.costs[action]
        add(f"forward of {call.block.stack} {call.block.index}", cost.forward, level)
        level += cost.forward.net - min(cost.rebuilt_bytes, rebuilt.get(call.block.stack, 0))
        lent += cost.lent_bytes
        rebuilt[call.block.stack] = cost.rebuilt_bytes
        calls.append((call, cost, level - lent))
    forward, backward = costs.head
    shared = _freed_with_stacks(costs, choice)
    add("head and loss", forward, level - shared)
    add("head and loss, backward", backward, level - shared - lent, forward.net)
    for call, cost, level in reversed(calls):
        label = f"backward of {call.block.stack} {call.block.index}"
        add(label, cost.backward, level + costs.at_backward_bytes - shared)
        gradients += call.gradient_bytes
    gradients = costs.static.gradients
    add("optimizer step", Part(costs.static.step_bytes, 0, costs.optimizer_nanoseconds), 0)
    return Timeline(tuple(moments))


def _freed_with_stacks(costs: Costs, choice: Choice) -> int:
    """Bytes that all calls of a stack are given, and that are freed when it returns because none of them keeps them."""
    of_stacks = collections.defaultdict[str, list[int]](list)
    for call, action in zip(costs.calls, choice, strict=True):
        of_stacks[call.block.stack].append(call.costs[action].shared_bytes)
    return sum(map(min, of_stacks.values()))
