"""What a step costs under every plan: from a step under `full`, and what each action changes in it. Exact integers.

The order of a step: what runs before the blocks; the forward of each call, with what runs until the next one; the head
and the loss, with their backward; the backwards of the calls in reverse; and the optimizer's step. What a forward
leaves alive goes at three different times:

    forward of a call  ->  end of its stack  ->  end of the model's forward  ->  backward of the call
                           `shared_bytes`        `forward_only_bytes`            `kept_bytes`
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Collection, Mapping, Sequence

from hf_ckpt.costs.steps import Call, CallName, Needs, Part, Step
from hf_ckpt.spec.actions import FULL, KEEP, OFFLOADED, SELECTIVE, Action
from hf_ckpt.spec.plan import Block, staying

ON_DEVICE = {moved: kept for kept, moved in OFFLOADED.items()}
"""Action that keeps tensors in host memory -> the action that keeps them on the device."""
RECOMPUTED = {"full": KEEP, "full+selective": SELECTIVE, "full+tiles": SELECTIVE}
"""Kind of an action -> the action under which its recomputation runs."""
Choice = tuple[Action, ...]
"""The action of each call."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a call costs under one action."""

    forward: Part
    """Its forward, and what runs until the next call."""
    backward: Part
    forward_only_bytes: int = 0
    """How many of the bytes that its forward leaves are freed when the model's forward ends, such as autocast's copies
    of weights."""
    shared_bytes: int = 0
    """Bytes that are freed when the stack returns, unless another call of it keeps them, such as masks."""
    rebuilt_bytes: int = 0
    """Bytes of its hidden states that are not kept if the call before has `rebuilt_bytes`, too: see `Freed.rebuilt`."""
    freed_bytes: int = 0
    """How much less its backward needs, if its hidden states are freed as soon as the recomputation has ended: it keeps
    others."""

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for the backward."""
        return self.forward.net - self.forward_only_bytes


@dataclasses.dataclass(frozen=True)
class CallCosts:
    """What a call costs under every action that it may have."""

    block: Block
    gradient_bytes: int
    """Bytes that its backward leaves alive, such as gradients."""
    costs: Mapping[Action, Cost]
    input_bytes: int = 0
    """Bytes of its hidden states."""

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
    """Bytes of buffers and the batch."""
    master: int = 0
    """Bytes of the optimizer's own copy of the weights, in float32."""
    buckets: int = 0
    """Bytes of gradients that are held throughout: DDP's copies in buckets, or this rank's shards under ZeRO-3."""
    gathered: int = 0
    """Bytes that FSDP gathers, where `parameters` counts this rank's shards: the unsharded parameters outside the
    blocks, and the all-gather buffer."""
    step_bytes: int = 0
    """Temporary bytes of the optimizer's step, in addition to its state."""

    @property
    def always(self) -> int:
        """Bytes alive at every moment: everything but gradients and `step_bytes`."""
        return self.parameters + self.optimizer + self.master + self.buffers + self.buckets + self.gathered

    @property
    def optimizer_peak_bytes(self) -> int:
        """Most bytes alive in the optimizer's step, whatever the blocks do."""
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
    """How many more bytes are alive when the first backward of a call begins than all calls keep. `Step` has the same
    moment, but counts from the beginning of the step."""
    head: tuple[Part, Part]
    """The head and the loss: until the model's forward ends, and from there to the first backward of a call. The bytes
    that the first leaves are those at the end of the second, less what calls keep: see `Step.head`."""
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
    head_tokens: int | str = "whole"
    """How the head runs, in the words of `Plan.head`: `whole`, `auto`, or the tokens of a chunk."""
    chunks_help: bool = False
    """Whether the head ran as a whole, and `"head": "auto"` would lower what it needs: see `Boundaries.chunks_help`."""
    divides: bool = True
    """Whether blocks could be recomputed in segments: not where they are already, or where parameters come and go."""
    least: Action = FULL
    """The action that keeps least, of blocks for which nothing else is chosen."""
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

    def restricted(self, actions: Mapping[Block, Action]) -> Costs:
        """The costs in which these blocks have one action only: this one, or what keeps the same on the device."""
        calls = []
        for call in self.calls:
            if call.block in actions:
                action = actions[call.block]
                chosen = call.first_of(action, ON_DEVICE.get(action, action))
                call = dataclasses.replace(call, costs={chosen: call.costs[chosen]})
            calls.append(call)
        return dataclasses.replace(self, calls=tuple(calls))

    def choice(self, chosen: Mapping[str, Action]) -> Choice:
        """The choice that gives blocks, by name, these actions if they may have them; others keep least."""
        return tuple(call.first_of(chosen.get(call.block.name, self.least), self.least) for call in self.calls)

    def peak(self, chosen: Mapping[str, Action]) -> int:
        """The predicted peak of that choice."""
        return timeline(self, self.choice(chosen)).peak_bytes


def costs_of_step(
    full: Step, blocks: Sequence[Block], needs: Mapping[CallName, Mapping[Action, Needs]], actions: Sequence[Action]
) -> Costs:
    """The costs of all plans, from a step under `full` and what its calls would need under other actions.

    Args:
        full: the step. A block that is called several times occurs several times.
        blocks: the block of each call.
        needs: call -> action that it may have -> what it needs under it.
        actions: those to choose from, those that keep most first. Fixed blocks may have others.
    """
    costs = []
    alive_bytes = full.before.net
    alive_after = []
    """After the forward of each call, the bytes that outlive the model's forward."""
    outputs = collections.defaultdict[str, list[int]](list)
    """Stack -> bytes that calls of it leave under `full`: the hidden states of the next call."""
    last_stack = None
    for call, block in zip(full.calls, blocks, strict=True):
        needs_of_call = needs[call.name]
        # Casts of weights that some action keeps for the backward. Under `full` they go when the forward ends.
        casts = max(need.kept_casts for need in needs_of_call.values())
        is_first = block.stack != last_stack
        last_stack = block.stack
        costs.append(_costs_of_call(call, needs_of_call, casts, is_first))
        alive_bytes += call.forward.net + call.until_next.net - casts
        alive_after.append(alive_bytes)
        if call.backward is not None:  # a frozen block leaves its output, but its input is freed
            outputs[block.stack].append(call.forward.net - casts)
    inputs = {stack: max(0, statistics.median_low(sizes)) for stack, sizes in outputs.items()}
    gradients = _gradient_bytes(full.calls, alive_after)
    rows = zip(blocks, gradients, costs, strict=True)
    calls = [CallCosts(block, left, of_call, inputs.get(block.stack, 0)) for block, left, of_call in rows]
    at_backward_bytes = full.at_backward_bytes - alive_bytes
    forward, backward = full.head
    return Costs(
        actions=tuple(dict.fromkeys(itertools.chain(actions, *costs))),
        calls=tuple(calls),
        before=full.before,
        at_backward_bytes=at_backward_bytes,
        head=(dataclasses.replace(forward, net=at_backward_bytes), dataclasses.replace(backward, net=0)),
        static=Static(full.start_bytes, step_bytes=max(0, full.outside_peak_bytes - full.start_bytes)),
    )


def _costs_of_call(call: Call, needs: Mapping[Action, Needs], casts: int, is_first: bool) -> dict[Action, Cost]:
    """What a call costs under every action that it may have. Arguments are those of `_cost`."""
    costs = {}
    for action, need in needs.items():
        cost = _cost(call, need, casts, is_first)
        inner = needs.get(RECOMPUTED[action.kind]) if action.kind in RECOMPUTED else None
        if inner is not None:
            more = cost.backward.peak - inner.arrival - inner.forward_peak  # than while it is recomputed
            cost = dataclasses.replace(cost, freed_bytes=max(0, min(inner.freed.hidden, more)))
        costs[action] = cost
    return costs


def _gradient_bytes(calls: Sequence[Call], alive_after: Sequence[int]) -> list[int]:
    """For each call, the bytes that its backward leaves alive, such as gradients.

    A backward frees what the forward of its call has left. So from one backward to the next, the bytes alive change by
    what the forwards between the two calls have left, and the rest are gradients.
    """
    gradients = [0] * len(calls)
    nets = {place: call.backward.net for place, call in enumerate(calls) if call.backward is not None}
    # Calls behind that of the first backward have none of their own: what they have left stays alive.
    gradients[-1] += alive_after[-1] - alive_after[max(nets)]
    for place, next_place in itertools.pairwise(reversed(nets)):
        gradients[place] += nets[place] - alive_after[next_place] + alive_after[place]
    # Those of the first call stay 0: only the optimizer's step follows, whose peak is measured as a whole.
    return gradients


def _cost(call: Call, need: Needs, casts: int, is_first: bool) -> Cost:
    """What a call costs under an action, with what runs between it and the next call.

    Args:
        call: as it ran under `full`.
        need: what it needs under the action.
        casts: bytes of casts of weights that are freed when the model's forward ends, unless the action keeps them.
        is_first: whether it is the first call of its stack. The stack itself holds the hidden states that this call is
            given, until it returns.
    """
    kept = need.kept - need.held  # the rest is in the step under `full`, too
    more = kept - need.freed.hidden  # than under `full`, which keeps the hidden states
    held = need.freed.hidden if is_first else 0
    net = call.forward.net + more + held
    forward = Part(max(0, net, need.forward_peak), net, call.forward.nanoseconds)
    backward = Part()
    if call.backward is not None:
        end = call.backward.net - more - need.kept_casts
        peak = need.backward_peak
        if peak is None:
            # At most what it needs under `full`, whose recomputation holds all that a block keeps. Hidden states that
            # the action frees are no difference here: both the peak and the bytes at the beginning are less.
            peak = call.backward.peak + call.whole_bytes - kept - need.kept_casts
        backward = Part(max(0, end, peak), end, need.backward_nanoseconds)
    return Cost(
        forward.then(call.until_next),
        backward,
        forward_only_bytes=casts + held - need.kept_casts,
        shared_bytes=need.freed.shared,
        rebuilt_bytes=need.freed.rebuilt,
    )


def with_offloading(
    costs: Costs,
    host_bandwidth: float,
    launch_nanoseconds: int,
    host_limit: int | None,
    fixed: Collection[str] = (),
) -> list[Costs]:
    """For each action that offloads, `costs` with it for as many calls as fit into host memory.

    No plan mixes these actions, so each may use the whole limit. If nothing can be offloaded, `costs` is returned.

    Args:
        costs: with actions that keep their tensors on the device.
        host_bandwidth: bytes per second of copies to and from pinned host memory; 0 if the device is the host.
        launch_nanoseconds: time to start an operation.
        host_limit: bytes of host memory that may be used. Buffers there are rounded up to powers of two. None for no
            offloading.
        fixed: names of blocks whose action is not chosen.
    """
    if host_limit is None or not host_bandwidth:
        return [costs]
    stays = {*fixed, *staying(costs.blocks or (call.block for call in costs.calls))}
    movable = {place: call for place, call in enumerate(costs.calls) if call.block.name not in stays}
    variants = []
    for base, moved in OFFLOADED.items():
        sizes = {}
        for place, call in movable.items():
            if base in call.costs:
                sizes[place] = call.input_bytes if base == FULL else max(0, call.costs[base].kept_bytes)
        most_calls = host_limit // _buffer_bytes(base, sizes.values())
        calls = list(costs.calls)
        for place in list(sizes)[:most_calls]:
            cost = _with_copies(costs, place, base, sizes, host_bandwidth, launch_nanoseconds)
            calls[place] = dataclasses.replace(calls[place], costs={**calls[place].costs, moved: cost})
        if sizes:
            variants.append(dataclasses.replace(costs, calls=tuple(calls), actions=(*costs.actions, moved)))
    return variants or [costs]


def _buffer_bytes(base: Action, sizes: Collection[int]) -> int:
    """Most bytes of host memory for what a call moves, which torch allocates in powers of two."""
    largest = max(sizes, default=0)
    if base == FULL:  # one tensor
        return 1 << max(0, largest - 1).bit_length()
    return max(1, 2 * largest)  # each of several tensors is rounded up by itself, to less than twice its size


def _with_copies(
    costs: Costs, place: int, base: Action, sizes: Mapping[int, int], host_bandwidth: float, launch_nanoseconds: int
) -> Cost:
    """What a call costs that moves what it keeps under `base` to the host and back. `sizes` has the bytes of calls."""
    call = costs.calls[place]
    cost = call.costs[base]
    size = sizes[place]
    copying = round(size / host_bandwidth * 1e9)
    # The backward prefetches the tensors of the call before, which are none if that one moves nothing.
    ahead = sizes.get(place - 1, 0)
    freed = size
    waits = 2 * launch_nanoseconds
    if place - 1 not in sizes:
        # The last call that moves tensors waits for its own copy; the cost of the first one includes that time.
        waits += copying
    if place == 0 or costs.calls[place - 1].block.stack != call.block.stack:
        # The input of a stack may be held elsewhere, too, and is not freed.
        freed = max(0, size - call.input_bytes)
    peak = cost.forward.peak
    if base != FULL:  # what the call before keeps is freed when its copies end, which is with this call
        peak += ahead
    spent = max(cost.backward.nanoseconds, copying) + waits
    forward_spent = max(cost.forward.nanoseconds, copying) + 2 * launch_nanoseconds
    return dataclasses.replace(
        cost,
        forward=Part(peak, cost.forward.net - freed, forward_spent),
        backward=Part(cost.backward.peak + size + ahead, cost.backward.net + freed, spent),
    )


def with_segments(costs: Costs, actions: Mapping[Block, Action]) -> Costs:
    """`costs` of a plan with segments only: each of these blocks has one action, or what keeps the same on the device;
    others have the first of their own.

    While a block whose hidden states are made again runs its backward, those of its segment that were made and are not
    used up are alive. The last block of a segment makes them, with the others there.

    Args:
        costs: with the same actions of blocks that hold their hidden states.
        actions: block -> action. Each block is called once.
    """
    held = {block: dataclasses.replace(action, made=False) for block, action in actions.items()}
    fixed = {call.block: next(iter(call.costs)) for call in costs.calls}
    plain = costs.restricted({**fixed, **held})
    calls = []
    before: Cost | None = None
    number = 0
    """How many blocks of the segment come before, whose run makes what this one needs."""
    for call in plain.calls:
        ((action, cost),) = call.costs.items()
        is_planned = call.block in actions and actions[call.block].made
        is_made_again = is_planned and before is not None and call.input_bytes > 0
        number = number + 1 if is_made_again else 0
        if before is not None and is_made_again:
            making = _making(cost, before, number, call.input_bytes)
            call = dataclasses.replace(call, costs={dataclasses.replace(action, made=True): making})
        calls.append(call)
        before = cost
    of_calls = (action for call in calls for action in call.costs)
    all_actions = tuple(dict.fromkeys((*costs.actions, *of_calls)))
    return dataclasses.replace(plain, calls=tuple(calls), actions=all_actions, divides=False)


def _making(cost: Cost, before: Cost, number: int, size: int) -> Cost:
    """What a call costs that does not hold its hidden states.

    Args:
        cost: if it holds them.
        before: what the call before it costs, which runs once more.
        number: how many calls before it are in the same segment.
        size: bytes of the hidden states of each.
    """
    peak = max(cost.backward.peak + number * size - cost.freed_bytes, before.forward.peak + (number - 1) * size)
    spent = cost.backward.nanoseconds + before.forward.nanoseconds
    return dataclasses.replace(
        cost,
        forward=dataclasses.replace(cost.forward, net=cost.forward.net - size),
        backward=Part(peak, cost.backward.net + size, spent),
    )


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
    kept_bytes: Mapping[str, int]
    """Stack -> bytes that its blocks keep for their backwards."""

    @property
    def worst(self) -> Moment:
        """The moment with the peak."""
        return max(self.moments, key=lambda moment: moment.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at any moment."""
        return self.worst.peak_bytes


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
    static = costs.static.always
    gradients = costs.resident_bytes - static  # those of earlier micro-steps; `add` reads what they have grown to
    moments: list[Moment] = []

    def add(label: str, part: Part, kept: int, beside: int = 0) -> None:
        """Add what runs while calls keep some bytes and others are alive beside them."""
        moments.append(Moment(label, static + gradients + kept + beside, static, gradients, kept, part))

    add("embedding", costs.before, 0)
    alive = costs.before.net
    forward_only = 0
    backwards = []
    """Each call, its cost, and the bytes that it and the calls before it keep for their backwards."""
    rebuilt: dict[str, int] = {}
    """Stack -> `rebuilt_bytes` of its last call so far."""
    kept_bytes = collections.Counter[str]()
    for call, action in zip(costs.calls, choice, strict=True):
        cost = call.costs[action]
        stack = call.block.stack
        add(f"forward of {stack} {call.block.index}", cost.forward, alive)
        # What this call can rebuild from the one before, and that one can rebuild as well, is not kept at all.
        not_kept = min(cost.rebuilt_bytes, rebuilt.get(stack, 0))
        alive += cost.forward.net - not_kept
        kept_bytes[stack] += cost.kept_bytes - not_kept
        forward_only += cost.forward_only_bytes
        rebuilt[stack] = cost.rebuilt_bytes
        backwards.append((call, cost, alive - forward_only))
    forward, backward = costs.head
    # What stacks free when they return counts as alive until the head, although an encoder frees it before that.
    freed = _freed_with_stacks(costs, choice)
    kept_bytes.subtract(freed)
    shared = sum(freed.values())
    add("head and loss", forward, alive - shared)
    add("head and loss, backward", backward, alive - shared - forward_only, forward.net)
    for call, cost, kept in reversed(backwards):
        label = f"backward of {call.block.stack} {call.block.index}"
        add(label, cost.backward, kept + costs.at_backward_bytes - shared)
        gradients += call.gradient_bytes
    gradients = costs.static.gradients  # of all parameters, those outside of blocks, too
    add("optimizer step", Part(costs.static.step_bytes, 0, costs.optimizer_nanoseconds), 0)
    return Timeline(tuple(moments), kept_bytes)


def _freed_with_stacks(costs: Costs, choice: Choice) -> dict[str, int]:
    """Stack -> bytes that all of its calls are given, and that are freed when it returns: none of them keeps them."""
    of_stacks = collections.defaultdict[str, list[int]](list)
    for call, action in zip(costs.calls, choice, strict=True):
        of_stacks[call.block.stack].append(call.costs[action].shared_bytes)
    # What a single call keeps is not freed, so the call that frees least decides.
    return {stack: min(sizes) for stack, sizes in of_stacks.items()}
