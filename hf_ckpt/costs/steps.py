"""Costs from measured steps: what a step needs under `full`, and what each action changes. Pure, does not import torch.

A step is split at its boundaries into what runs before the blocks, the call of every block, what runs between two
calls, and the backward of every call. The timeline of a plan is that of a step under `full`, plus the differences that
the plan's actions make. Bytes add up, so losses, image towers and routers need no model of their own. A difference is
what one call of a block needs under an action, minus what it needs under `full`:

- most bytes of its forward, and bytes that its forward leaves,
- bytes that it still keeps after the model's forward: autocast frees its copies of weights then, unless the backward
  needs them,
- most bytes of its backward,
- time, as a share of that under `full`.

Differences measured for one batch are scaled for others. They grow with the backward of a `full` block, which holds
everything that the block keeps under `keep`.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from hf_ckpt.costs.costs import BlockCost, Costs, Key, Phase, StackCosts, StackEnd, Static
from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Block

CallName = tuple[str, int]
"""(name of a block, number of its call in the step, from 0)."""


Times = Mapping[CallName, tuple[int, int, int]]
"""Call -> nanoseconds of its forward, of what runs between it and the next call, and of its backward."""
BEFORE: CallName = ("", 0)
"""Key in `Times` for what runs before the first call; only its first number is used."""


@dataclasses.dataclass(frozen=True)
class Level:
    """The readings at one boundary of a step."""

    what: str
    """`begin`, `forward`, `forwarded`, `backward` or `end`: what begins or has ended there."""
    block: str
    """Name of the block; empty for `begin` and `end`."""
    has_graph: bool = True
    """For `forward`: whether the block's input requires gradients. For `forwarded`: whether its output does."""
    bytes: int = 0
    """Bytes alive."""
    peak_bytes: int = 0
    """Most bytes alive since the previous boundary."""
    nanoseconds: int = 0
    """Time since the previous boundary; 0 in a step that was not timed."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What runs between two boundaries."""

    peak: int = 0
    """Most bytes alive above those at its beginning, at least 0."""
    net: int = 0
    """Bytes alive at its end, above those at its beginning."""

    def scaled(self, factor: float) -> Part:
        """All bytes multiplied by a factor, rounded up."""
        return Part(_up(self.peak * factor), _up(self.net * factor))


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
    times: Times = dataclasses.field(default_factory=dict, compare=False)

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
        calls = tuple(
            dataclasses.replace(
                call,
                forward=call.forward.scaled(factor),
                behind=call.behind.scaled(factor),
                backward=call.backward and call.backward.scaled(factor),
            )
            for call in self.calls
        )
        begun = _up(self.at_backward_bytes * factor)
        return dataclasses.replace(self, before=self.before.scaled(factor), calls=calls, at_backward_bytes=begun)


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

    def at_most(self) -> Change:
        """A bound for actions that keep no more than this one: see `bound_of`."""
        kept = max(0, self.forward_net)
        first, later = max(0, self.forward_peak), max(0, self.later)
        return dataclasses.replace(self, forward_peak=first, forward_net=kept, later=later, backward_peak=-kept)

    def at(self, call: Call) -> Change:
        """The change for a call that needs more or less than the one it was measured on."""
        size = call.backward.peak if call.backward is not None else 0
        if not self.scale or (size == self.scale and not self.growth):
            return self
        factor = size / self.scale
        first, kept = _up(self.forward_peak * factor), _up(self.forward_net * factor)
        more = 0
        if self.growth and self.forward_net > 0:
            # Gradients of weights do not grow with the batch, and attention may grow faster. All that grew may be kept.
            grown = max(0.0, size - self.scale * self.growth)
            more = max(0, _up(self.forward_net * self.growth + grown) - kept)
        return Change(
            forward_peak=first + more,
            forward_net=kept + more,
            later=_up(self.later * factor),
            backward_peak=_up(self.backward_peak * factor) - more,
            scale=size,
        )


def step_of(levels: Sequence[Level], outside_peak_bytes: int = 0) -> Step | None:
    """Split a step at its boundaries.

    None if it has no end, no call, or a repeated backward, or if backwards do not follow all forwards in reverse
    order, which plans rely on.
    """
    if not levels or levels[0].what != "begin" or levels[-1].what != "end":
        return None
    begin = levels[0].bytes
    forwards: list[tuple[CallName, int]] = []
    backwards: dict[CallName, int] = {}
    seen: collections.Counter[str] = collections.Counter()
    open_calls: dict[str, list[CallName]] = {}
    for place, level in enumerate(levels):
        if level.what == "forward":
            name = level.block, seen[level.block]
            seen[level.block] += 1
            forwards.append((name, place))
            if place + 1 == len(levels) or levels[place + 1].what != "forwarded":
                return None
            if levels[place + 1].has_graph:
                open_calls.setdefault(level.block, []).append(name)
        elif level.what == "backward":
            waiting = open_calls.get(level.block, [])
            if not waiting:
                return None
            backwards[waiting.pop()] = place
    if not forwards or not backwards:
        return None
    firsts = [place for _, place in forwards]
    first_backward = min(backwards.values())
    in_reverse = sorted(backwards, key=backwards.__getitem__) == [n for n, _ in reversed(forwards) if n in backwards]
    if max(firsts) > first_backward or not in_reverse:
        return None
    calls, times = [], {BEFORE: (time_of(levels, 0, firsts[0]), 0, 0)}
    for (name, place), following in zip(forwards, [*firsts[1:], first_backward], strict=True):
        end = backwards.get(name)
        forward, behind = part_of(levels, place, place + 1), part_of(levels, place + 1, following)
        backward = None if end is None else part_of(levels, end, end + 1)
        calls.append(Call(name, levels[place].has_graph, forward, behind, backward))
        spent = time_of(levels, place, place + 1), time_of(levels, place + 1, following)
        times[name] = (*spent, 0 if end is None else time_of(levels, end, end + 1))
    return Step(
        start_bytes=begin,
        before=part_of(levels, 0, firsts[0]),
        calls=tuple(calls),
        at_backward_bytes=levels[first_backward].bytes - begin,
        outside_peak_bytes=outside_peak_bytes,
        peak_bytes=max(level.peak_bytes for level in levels[1:]),
        times=times,
    )


def part_of(levels: Sequence[Level], first: int, last: int) -> Part:
    """What runs between two levels, by their positions."""
    start = levels[first].bytes
    peak = max((level.peak_bytes for level in levels[first + 1 : last + 1]), default=start)
    return Part(max(0, peak - start), levels[last].bytes - start)


def time_of(levels: Sequence[Level], first: int, last: int) -> int:
    """Nanoseconds between two levels, by their positions."""
    return sum(level.nanoseconds for level in levels[first + 1 : last + 1])


def changes_of(full: Step, seen: Step, tried: Mapping[CallName, Action], alike: bool) -> dict[CallName, Change]:
    """What actions changed in the calls that had them.

    Args:
        full: a step under `full`.
        seen: the step in which the calls in `tried` had these actions, and all others `full`.
        tried: calls of blocks, with their actions.
        alike: whether both batches had the same shape.
    """
    ratio = 1.0
    """What calls need in `seen`, relative to `full`, measured on those that ran under `full` in both."""
    if full.names == seen.names:
        pairs = [
            (mine.backward.peak, its.backward.peak)
            for mine, its in zip(full.calls, seen.calls, strict=True)
            if mine.name not in tried and mine.backward is not None and its.backward is not None
        ]
        ratio = sum(its for _, its in pairs) / max(1, sum(mine for mine, _ in pairs)) if pairs else 1.0
    found: dict[CallName, Change] = {}
    for name in tried:
        mine, its = full[name], seen[name]
        if mine is None or its is None or mine.backward is None or its.backward is None:
            continue
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


def bound_of(call: Call, share: float = 1.0) -> Change:
    """A bound for an action that keeps at most this share of what the backward needs under `full`.

    The backward under `full` holds everything that the block keeps under `keep`. So with what the forward keeps, the
    backward under another action needs no more than that. The forward holds no more than what it keeps in addition.
    """
    size = call.backward.peak if call.backward is not None else 0
    kept = _up(size * share)
    return Change(forward_peak=kept, forward_net=kept, backward_peak=-kept, scale=size)


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
    end = full.calls[-1].behind
    calls = [dataclasses.replace(call, behind=Part()) for call in added]
    calls += [*full.calls[:-1], dataclasses.replace(full.calls[-1], behind=Part())]
    calls.sort(key=lambda call: (call.name[1], order.index(call.name[0])))
    calls[-1] = dataclasses.replace(calls[-1], behind=end)
    kept = sum(call.forward.net for call in added)
    return dataclasses.replace(full, calls=tuple(calls), at_backward_bytes=full.at_backward_bytes + kept)


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Creates `Costs` from a step under `full` and the changes that actions make.

    Calls of blocks form one stack, in the order of their forwards; a block that is called several times occurs several
    times.
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
    """The actions to choose from; the last one is that of `full`."""
    times: Times
    """Times under `full`, as far as known."""
    freed: Mapping[int, int] | None = None
    """Kind -> bytes that a call under `full` frees at the end of the forward; None if only changes are known."""
    ends: Sequence[StackEnd] = ()
    """What is freed at the ends of stacks. The calls do not contain it."""

    def _times(self) -> dict[int, tuple[int, int]]:
        """Kind -> median nanoseconds of forward and backward under `full`; an untimed kind gets those of all kinds."""
        found: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        for call in self.full.calls:
            forward, _, backward = self._spent(call)
            if forward:
                found[self.kinds[call.name]].append((forward, backward))
        usual = [pair for pairs in found.values() for pair in pairs] or [(0, 0)]
        medians = {}
        for kind in self.kinds.values():
            forwards, backwards = zip(*found.get(kind, usual), strict=True)
            medians[kind] = round(statistics.median(forwards)), round(statistics.median(backwards))
        return medians

    def _spent(self, call: Call) -> tuple[int, int, int]:
        return self.times.get(call.name, (0, 0, 0))

    def _change(self, call: Call, action: Action) -> Change | None:
        if action == self.actions[-1]:
            return Change()
        change = self.changes.get((self.kinds[call.name], action))
        return None if change is None else change.at(call)

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
        calls, full, medians = self.full.calls, self.full, self._times()
        lent = self._lent()
        level = full.before.net
        """Bytes after the forwards so far that outlive the model's forward."""
        levels = []
        under_full = [len(self.actions) - 1] * len(calls)
        for place, call in enumerate(calls):
            level += call.forward.net + (call.behind.net if call is not calls[-1] else 0) - lent[self.kinds[call.name]]
            level -= sum(end.freed(under_full) for end in self.ends if end.last == place)
            levels.append(level)
        hidden = max(0, round(statistics.median(call.forward.net for call in calls)))
        gradients = self._gradients(levels)
        profiles: dict[object, int] = {}
        numbers: list[int] = []
        rows: list[tuple[Call, Part, int]] = []
        for call, drift, last in zip(calls, gradients, [*[False] * (len(calls) - 1), True], strict=True):
            kind = self.kinds[call.name]
            behind = Part() if last else call.behind
            bytes_of = [(part.peak, part.net) for part in (call.forward, behind)]
            profile = kind, tuple(bytes_of), call.backward and call.backward.peak, drift, lent[kind], last
            number = profiles.setdefault(profile, len(profiles))
            if number == len(rows):
                rows.append((call, behind, drift))
            numbers.append(number)
        choices = tuple(self._choices(call) for call, _, _ in rows)
        alone: dict[Key, BlockCost] = {}
        for number, (call, behind, _) in enumerate(rows):
            for action in choices[number]:
                kind = self.kinds[call.name]
                alone[number, action] = self._cost(call, behind, action, medians[kind], lent[kind], hidden)
        end = calls[-1].behind
        names = dict.fromkeys(block.stack for block in blocks)
        stack = StackCosts(
            name=" and ".join(names),
            blocks=tuple(blocks),
            kinds=tuple(numbers),
            choices=choices,
            first=alone,
            inner=alone,
            last=alone,
            gradients=tuple(drift for _, _, drift in rows),
            before=Phase(((full.before.peak, 0), (full.before.net, 0)), self.times.get(BEFORE, (0, 0, 0))[0]),
            before_backward=Phase(),
            at_backward_bytes=full.at_backward_bytes - levels[-1] + hidden,
            shared_bytes=0,
            before_at_backward_bytes=0,
            ends=tuple(self.ends),
        )
        static = Static(
            parameters=full.start_bytes,
            buffers=0,
            optimizer=0,
            gradients=0,
            batch=0,
            step_bytes=max(0, full.outside_peak_bytes - full.start_bytes),
        )
        ending = Phase(((end.peak, 0), (0, 0)), self._spent(calls[-1])[1])
        return Costs(
            family="",
            model=model,
            actions=tuple(self.actions),
            stacks=(stack,),
            head=(ending, Phase()),
            static=static,
            tokens=tokens,
            head_tokens=head,
            mlp_tokens=mlp,
            notes=("measured",),
        )

    def _choices(self, call: Call) -> tuple[int, ...]:
        """The actions available to a call, as positions."""
        if call.backward is None:
            return (0,)
        return tuple(number for number, action in enumerate(self.actions) if self._change(call, action) is not None)

    def _lent(self) -> dict[int, int]:
        """Kind -> bytes that a call frees at the end of the forward under `full`, but not under some other action."""
        if self.freed is not None:
            return dict(self.freed)
        found = dict.fromkeys(self.kinds.values(), 0)
        for call in self.full.calls:
            changes = (self._change(call, action) for action in self.actions)
            kind = self.kinds[call.name]
            found[kind] = max(found[kind], *(change.later for change in changes if change is not None))
        return found

    def _gradients(self, levels: Sequence[int]) -> list[int]:
        """For each call, the bytes that its backward leaves alive, such as gradients.

        They are the part of the level's change, from this call's backward to the next, that forwards do not explain.
        """
        begun = self.full.at_backward_bytes
        found = [0] * len(levels)
        calls = self.full.calls
        last = max(place for place, call in enumerate(calls) if call.backward is not None)
        found[-1] += levels[-1] - levels[last]
        for place in range(len(calls) - 1, -1, -1):
            back = calls[place].backward
            if back is None:
                continue
            following = begun + back.net
            before = next((n for n in range(place - 1, -1, -1) if calls[n].backward is not None), None)
            if before is not None:
                found[place] += (following - levels[before]) - (begun - levels[place])
            begun = following
        return found

    def _cost(self, call: Call, behind: Part, action: int, times: tuple[int, int], lent: int, hidden: int) -> BlockCost:
        asked, (whole, back) = self.actions[action], times
        change = self._change(call, asked) or Change()
        first = call.forward.peak + change.forward_peak
        net = call.forward.net + change.forward_net
        points = ((max(0, first), 0), (net, 0), (net + behind.peak, 0), (net + behind.net, 0))
        ratio = self.ratios.get((self.kinds[call.name], asked), 1.0)
        spent = round((whole + back) * ratio) - whole
        needed = left = 0
        if call.backward is not None:
            needed = max(0, call.backward.peak + change.backward_peak)
            left = call.backward.net - change.forward_net - change.later
        return BlockCost(
            forward=Phase(points, whole + (self._spent(call)[1] if behind is call.behind else 0)),
            backward=Phase(((needed, 0), (left, 0)), max(0, spent)),
            output_bytes=hidden,
            forward_only_bytes=lent - change.later,
        )


def _up(number: float) -> int:
    return -int(-number // 1)
