"""Measurements of one model during training: the memory and time of its blocks under each action."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from hf_ckpt.costs.costs import Choice, Costs, costs_of_step, timeline
from hf_ckpt.costs.steps import Call, CallName, Change, Part, Step, changes_of, joined
from hf_ckpt.spec.actions import COMPILED, FULL, FULL_SELECTIVE, Action
from hf_ckpt.spec.plan import Block
from hf_ckpt.training.batches import Batch

ALIKE = 0.01
"""Share by which the memory of two blocks of one kind may differ."""
KEPT_AT_MOST = {"keep": 1.0, "selective": 0.8}
"""The most that an action keeps, as a share of what the backward of a `full` block needs; 0.5 if linears are not saved.
"""
UNLIKE = 0.1
"""Share by which the parameters of two kinds may differ if one uses the other's measurements."""
MOST_TRIES = 2
"""How often an action is tried on a kind without a result: blocks may not be called in every step."""
AGAIN = 2.0
"""An action is measured again on a batch that is larger by this factor than the measured one."""
Pair = tuple[int, Action]
"""(kind of a block, action)."""


@dataclasses.dataclass(frozen=True)
class _Look:
    """What calls of one kind of block have in common."""

    name: str
    """Class of the block."""
    weights: tuple[int, int]
    """Bytes of its parameters, and of the trainable ones."""
    exactly: Any
    """Everything else that must be equal."""
    needs: tuple[int, int]
    """Most bytes of forward and backward under `full`."""

    def is_of_kind(self, other: _Look) -> bool:
        """Whether calls are of one kind: equal modules at equivalent positions, with similar needs."""
        pairs = zip(self.needs, other.needs, strict=True)
        like = all(abs(mine - its) <= ALIKE * max(mine, its) for mine, its in pairs)
        return self.exactly == other.exactly and like


def _look_of(module: nn.Module, call: Call, is_last: bool, autocast: Any) -> _Look:
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    back = call.backward.peak if call.backward is not None else -1
    place = is_last, call.has_input_graph, call.name[1], back < 0
    exactly = repr(parameters), [type(part) for part in module.modules()], place, autocast
    trained = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    weights = sum(parameter.nbytes for parameter in module.parameters()), trained
    return _Look(type(module).__name__, weights, exactly, (call.forward.peak, back))


class Measurements:
    """Measured steps under `full`, and the changes that other actions make to them.

    Args:
        modules: name of a block -> its module.
        blocks: name -> block.
        actions: the actions to choose from; those that keep most come first. The last one keeps least: steps are
            measured under `full`, or with compiled blocks under share 0.
        autocast: the type that autocast computes in; None without autocast.
        before: measurements of the same model when other parameters were trained, or with another autocast. What
            actions change in kinds of blocks that are the same is measured once.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        blocks: Mapping[str, Block],
        actions: Sequence[Action],
        autocast: Any = None,
        before: Measurements | None = None,
    ) -> None:
        self.modules, self.blocks, self.actions, self._autocast = modules, blocks, tuple(actions), autocast
        self.full: dict[Batch, Step] = {}
        """Steps under `full`."""
        self.kinds: dict[CallName, int] = {}
        """Call of a block -> its kind."""
        self._looks: list[_Look] = before._looks if before else []
        """What the calls of each kind have in common, by number of the kind."""
        self.changes: dict[Pair, Change] = before.changes if before else {}
        self._measured_on: dict[Pair, Batch] = before._measured_on if before else {}
        """The batch on which each change was measured."""
        self._tries: collections.Counter[Pair] = before._tries if before else collections.Counter()
        """How often a step tried an action on a kind and did not measure it."""
        self._no_room: set[tuple[Batch, Pair]] = set()
        """What does not fit beside a step with a batch, as far as is known."""
        self.timed: int = before.timed if before else 0
        """Number of timed steps since the last new kind."""
        self.times: dict[Pair | None, tuple[int, int, int]] = dict(before.times) if before else {}
        """(kind, action) -> nanoseconds of a call: its forward, what runs until the next call, its backward. None ->
        nanoseconds of what runs before the first call. Each is the shortest over timed steps with the last one's batch
        size, because noise only makes calls slower. Plans for batches of any size use them."""
        self._timed_elements = 0
        """Batch size of the last timed step."""
        self.ratios: dict[Pair, float] = before.ratios if before else {}
        """(kind, action) -> time of forward and backward as a share of that under `full`."""

    # --- measured steps ---

    def learn_full(self, batch: Batch, step: Step) -> None:
        """Store a step in which all blocks ran under `full`. Blocks that it did not call keep their earlier figures."""
        self._sort(step)
        before = self.full.get(batch)
        self.full[batch] = step if before is None else joined(step, before, {}, list(self.blocks)).raised(before)
        self._no_room.clear()

    def learn_trial(self, batch: Batch, step: Step, tried: Mapping[str, Action]) -> bool:
        """Store the memory of a step in which the blocks in `tried` had other actions. Returns whether it told
        anything."""
        reference = self.reference(batch)
        if reference is None:  # it was another step than was expected
            return False
        known, full = reference
        calls = {name: tried[name[0]] for name in step.names if name[0] in tried}
        changes: dict[Pair, Change] = {}
        for name, change in changes_of(full, step, calls, known == batch).items():
            if name in self.kinds:
                pair = self.kinds[name], calls[name]
                changes[pair] = change if pair not in changes else change.larger(changes[pair])
        self.changes.update(changes)
        self._measured_on.update(dict.fromkeys(changes, batch))
        for call in full.calls:
            pair = self.kinds[call.name], tried.get(call.name[0], self.actions[-1])
            self._tries[pair] += call.name[0] in tried and pair not in changes
        if known in self.full and any(full[name] is None and name not in calls for name in step.names):
            self.full[known] = joined(full, step, calls, list(self.blocks))
            self._sort(self.full[known])
        for other, reference_step in self.full.items():  # the first of them had no optimizer state yet
            if other.resident == batch.resident:
                self.full[other] = reference_step.raised(step)
        self._no_room.clear()
        return True

    def learn_times(self, batch: Batch, step: Step, tried: Mapping[str, Action]) -> None:
        """Store the times of a step in which the blocks in `tried` had other actions."""
        if batch.elements != self._timed_elements:
            self.times.clear()
        self._timed_elements = batch.elements
        self.timed += 1
        rows = collections.defaultdict[Pair | None, list[tuple[int, int, int]]](list)
        rows[None] = [(step.before.nanoseconds, 0, 0)]
        for call in step.calls:
            if call.name in self.kinds:
                pair = self.kinds[call.name], tried.get(call.name[0], self.actions[-1])
                back = (call.backward or Part()).nanoseconds
                rows[pair].append((call.forward.nanoseconds, call.behind.nanoseconds, back))
        for key, times in rows.items():
            medians = [round(statistics.median(column)) for column in zip(*times, strict=True)]
            forward, behind, back = map(min, medians, self.times.get(key, medians))
            self.times[key] = forward, behind, back
        for key, (forward, _, backward) in self.times.items():
            under_full = self.times.get((key[0], self.actions[-1])) if key is not None and backward else None
            if key is not None and under_full is not None:
                self.ratios[key] = (forward + backward) / max(1, under_full[0] + under_full[-1])

    def _sort(self, step: Step) -> None:
        """Assign a kind to every new call."""
        ends = [call.name for call in step.calls if call.backward is not None][-1:]
        for call in step.calls:
            if call.name not in self.kinds:
                look = _look_of(self.modules[call.name[0]], call, call.name in ends, self._autocast)
                like = (number for number, other in enumerate(self._looks) if look.is_of_kind(other))
                number = self.kinds[call.name] = next(like, len(self._looks))
                if number == len(self._looks):
                    self._looks.append(look)
                    self.timed = 0

    def begins_at(self, level: int, resident: bool) -> None:
        """Store the bytes alive when a step begins. After the first step, they include the state of the optimizer."""
        for batch, full in self.full.items():
            if batch.resident == resident:
                self.full[batch] = dataclasses.replace(full, start_bytes=max(full.start_bytes, level))

    def grow(self, size: int) -> None:
        """Add bytes that are alive from now on, such as an optimizer's state, to all steps."""
        for batch, full in self.full.items():
            self.full[batch] = dataclasses.replace(full, start_bytes=full.start_bytes + size)

    def reference(self, batch: Batch) -> tuple[Batch, Step] | None:
        """Return a measured batch that is near this one, and a bound for this one's step under `full`; None if none
        was measured.

        The smallest of those that cover it comes first. The step of a smaller one is scaled as attention grows, with
        the square of its length.
        """
        near = [known for known in self.full if known.is_near(batch)]
        covering = [known for known in near if known.covers(batch)]
        if covering:
            known = min(covering, key=lambda each: each.elements)
            return known, self.full[known]
        if not near:
            return None
        known = max(near, key=lambda each: each.elements)
        return batch, self.full[known].scaled(batch.growth(known) ** 2)

    # --- what to try next ---

    def to_try(self, batch: Batch, limit: int) -> dict[str, Action]:
        """Return blocks to run under one action that was not tried on their kind, if they fit into a limit, in bytes;
        none if nothing is left to try. Actions that keep least come first.

        A kind with a single block is tried together with kinds of similar modules, if there is room.
        """
        reference = self.reference(batch)
        if reference is None or not self.pending(batch):
            return {}
        members: dict[int, list[str]] = collections.defaultdict(list)
        for call in reference[1].calls:
            if call.backward is not None:
                members[self.kinds[call.name]].append(call.name[0])
        usual = sorted(members, key=lambda kind: -len(members[kind]))
        for action in sorted(self.actions[:-1], key=lambda a: (a == FULL_SELECTIVE, -self.actions.index(a))):
            chosen: dict[str, Action] = {}
            for place, kind in enumerate(usual):
                alone = len(members[kind]) == 1 and any(self._alike(kind, other) for other in usual[:place])
                if not self._is_pending((kind, action), batch) or (alone and not chosen):
                    continue
                trying = {**chosen, members[kind][-1]: action}
                if peak_of(self.costs(batch, trying), trying) <= limit:
                    chosen = trying
                elif not chosen:
                    self._no_room.add((batch, (kind, action)))
            if chosen:
                return chosen
        return {}

    def pending(self, batch: Batch) -> int:
        """How many actions are still to be tried on a batch, as far as is known."""
        kinds = set(self.kinds.values())
        return sum(any(self._is_pending((kind, action), batch) for kind in kinds) for action in self.actions[:-1])

    def _is_pending(self, pair: Pair, batch: Batch) -> bool:
        """Whether an action is to be tried on a kind: if it was not measured, or on a much smaller batch only."""
        if self._tries[pair] >= MOST_TRIES or (batch, pair) in self._no_room:
            return False
        measured = self._measured_on.get(pair)
        return measured is None or batch.elements >= AGAIN * measured.elements

    def _alike(self, kind: int, other: int) -> bool:
        """Whether the modules of two kinds are similar, whatever their positions."""
        mine, its = self._looks[kind], self._looks[other]
        pairs = zip(mine.weights, its.weights, strict=True)
        return mine.name == its.name and all(abs(one - two) <= UNLIKE * max(one, two) for one, two in pairs)

    def to_time(self, batch: Batch, limit: int) -> dict[str, Action]:
        """Return blocks to run under the least timed actions, as many as fit into a limit, in bytes; none if only
        `full` is known. Some blocks of each kind run under `full`, for comparison.
        """
        reference = self.reference(batch)
        if reference is None or not self.changes:
            return {}
        full, costs = reference[1], self.costs(batch)
        free: dict[int, list[str]] = collections.defaultdict(list)
        for name, kind in {call.name[0]: self.kinds[call.name] for call in full.calls if call.backward}.items():
            free[kind].append(name)
        changes = self._changes(batch, full, {})
        pairs = [pair for pair in itertools.product(free, reversed(self.actions)) if pair in changes]
        for kind, names in free.items():  # calls at both ends of a step take longer, so the middle is `full`
            count = max(1, len(names) // (1 + sum(pair[0] == kind for pair in pairs)))
            first = (len(names) - count) // 2
            free[kind] = names[:first] + names[first + count :]
        chosen: dict[str, Action] = {}
        timed = collections.Counter(pair for pair in self.ratios if pair in pairs)
        while pairs:
            kind, action = pair = min(pairs, key=timed.__getitem__)
            if free[kind] and peak_of(costs, {**chosen, free[kind][-1]: action}) <= limit:
                chosen[free[kind].pop()] = action
                timed[pair] += 1
            else:
                pairs.remove(pair)
        return chosen

    # --- costs ---

    def costs(self, batch: Batch, guessed: Mapping[str, Action] = MappingProxyType({})) -> Costs:
        """Return the costs for a batch, which must have a `reference`.

        Args:
            batch: the batch.
            guessed: blocks, each with an action for which there shall be a bound if it was not measured.
        """
        reference = self.reference(batch)
        assert reference is not None
        full, calls = reference[1], []
        for call in full.calls:
            times = self.times.get((self.kinds[call.name], self.actions[-1]), (0, 0, 0))
            parts = zip((call.forward, call.behind, call.backward), times, strict=True)
            timed: list[Any] = [part and dataclasses.replace(part, nanoseconds=spent) for part, spent in parts]
            calls.append(Call(call.name, call.has_input_graph, *timed))
        before = dataclasses.replace(full.before, nanoseconds=self.times.get(None, (0,))[0])
        step = dataclasses.replace(full, before=before, calls=tuple(calls))
        blocks = [self.blocks[name] for name, _ in full.names]
        changes = self._changes(batch, full, guessed)
        costs = costs_of_step(step, blocks, self.kinds, changes, self._shares_of_time(), self.actions)
        return dataclasses.replace(costs, tokens=batch.tokens)

    def _changes(self, batch: Batch, full: Step, guessed: Mapping[str, Action]) -> dict[Pair, Change]:
        """What actions change in calls with a batch: what was measured, and bounds for those in `guessed`.

        A kind on which an action was not tried has the largest change among kinds of similar modules.
        """
        changes: dict[Pair, Change] = {}
        for pair, change in self.changes.items():
            measured = self._measured_on[pair]
            covers = Batch(measured.forwards, True).covers(Batch(batch.forwards, True))
            growth = 0.0 if covers else batch.growth(measured)
            changes[pair] = dataclasses.replace(change, growth=growth if growth < math.inf else 0.0)
        for call in full.calls if guessed else ():
            action, kind = guessed.get(call.name[0]), self.kinds[call.name]
            if action is None or (kind, action) in self.changes:
                continue
            share = 0.5 if action.save and "linear" not in action.save else KEPT_AT_MOST.get(action.kind, 1.0)
            more = self.actions[: self.actions.index(action)] if action != FULL_SELECTIVE else ()
            measured_ones = [changes[kind, other].at(call) for other in more if (kind, other) in self.changes]
            size = call.backward.peak if call.backward is not None else 0
            keeps = [max(0, change.forward_net) + max(0, change.later) for change in measured_ones]
            # The backward under `full` holds all that the block keeps under `keep`. So with what the forward keeps, the
            # backward under another action needs no more. The forward holds no more than it keeps in addition.
            most = min((math.ceil(size * share), *keeps))
            bound = Change(most, most, backward_peak=-most, scale=size)
            changes[kind, action] = bound.larger(changes.get((kind, action), bound))
        for kind, action in itertools.product(dict.fromkeys(self.kinds.values()), self.actions):
            like = [change for (k, its), change in changes.items() if its == action and self._alike(kind, k)]
            if like and (kind, action) not in changes:
                changes[kind, action] = max(like, key=lambda change: change.forward_net / max(1, change.scale))
        return changes

    def _shares_of_time(self) -> dict[Pair, float]:
        """Time of forward and backward as a share of that under `full`; a kind without a time has the shortest of all.

        An action that recomputes more never counts as faster than one that keeps more: noise only makes calls slower.
        Compiled blocks are an exception, because kernels of a larger share can be slower.
        """
        shares: dict[Pair, float] = {}
        for kind in dict.fromkeys(self.kinds.values()):
            least = 1.0
            for action in reversed(self.actions[:-1]):
                others = [ratio for (_, its), ratio in self.ratios.items() if its == action]
                ratio = self.ratios.get((kind, action), min(others, default=None))
                if ratio is not None and action == FULL_SELECTIVE:
                    shares[kind, action] = max(1.0, ratio)
                elif ratio is not None:
                    shares[kind, action] = min(least, ratio)
                    least = shares[kind, action] if self.actions[-1] == FULL else 1.0
        return shares

    def table(self, batch: Batch) -> list[tuple[Action, int, float | None]]:
        """Return (action, bytes saved, time as a share of `full`) for the most frequent kind of block."""
        reference = self.reference(batch)
        calls = [call for call in reference[1].calls if call.backward] if reference is not None else []
        if reference is None or not calls:
            return []
        kind = collections.Counter(self.kinds[call.name] for call in calls).most_common(1)[0][0]
        calls = [call for call in calls if self.kinds[call.name] == kind]
        call, shares = calls[len(calls) // 2], self._shares_of_time()
        changes = {**self._changes(batch, reference[1], {}), (kind, self.actions[-1]): Change()}
        rows = []
        for action in self.actions:
            if (kind, action) in changes:
                change = changes[kind, action].at(call)
                time = 1.0 if action == self.actions[-1] else shares.get((kind, action))
                rows.append((action, call.forward.net + change.forward_net + change.later, time))
        return rows


def choice_of(costs: Costs, chosen: Mapping[str, Action]) -> Choice:
    """The choice that gives blocks these actions if they may have them, and to all others the one that keeps least."""
    least = FULL if FULL in costs.actions else COMPILED
    choice = []
    for call in costs.calls:
        wanted = chosen.get(call.blocks[0].name, least)
        choice.append(next((action for action in (wanted, least) if action in call.costs), next(iter(call.costs))))
    return tuple(choice)


def peak_of(costs: Costs, chosen: Mapping[str, Action]) -> int:
    """The predicted peak if blocks have these actions, and all others the one that keeps least."""
    return timeline(costs, choice_of(costs, chosen)).peak_bytes
