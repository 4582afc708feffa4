"""Measurements of one model during training: the memory and time of its blocks under each action."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hf_ckpt.prediction.costs import Choice, Costs
from hf_ckpt.prediction.measured import Call, CallName, Change, Step, StepCosts, bound_of, changes_of, joined
from hf_ckpt.prediction.timeline import worst_timeline
from hf_ckpt.spec.actions import FULL, FULL_SELECTIVE, KEEP, Action
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
"""How often a block is tried under an action. It may not be called in every step."""
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


def _look_of(module: nn.Module, call: Call, is_last: bool) -> _Look:
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    back = call.backward.peak if call.backward is not None else -1
    place = is_last, call.has_input_graph, call.name[1], back < 0
    exactly = repr(parameters), [type(part) for part in module.modules()], place
    trained = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    weights = sum(parameter.nbytes for parameter in module.parameters()), trained
    return _Look(type(module).__name__, weights, exactly, (call.forward.peak, back))


class Measurements:
    """Measured steps under `full`, and the changes that other actions make to them.

    Args:
        base: the model.
        blocks: name -> block.
        actions: the actions to choose from; those that keep most come first, and `full` is last.
        model: class name of the model.
        head: how its head runs, as in `Plan.head`.
        mlp: how its feed-forwards run, as in `Plan.mlp`.
    """

    def __init__(
        self,
        base: nn.Module,
        blocks: Mapping[str, Block],
        actions: Sequence[Action],
        model: str,
        head: int | str = "full",
        mlp: int | str = "full",
    ) -> None:
        self.modules = {name: module for name, module in base.named_modules(remove_duplicate=False) if name in blocks}
        self.blocks, self.actions, self.model, self.head, self.mlp = blocks, tuple(actions), model, head, mlp
        self.full: dict[Batch, Step] = {}
        """Steps under `full`."""
        self.kinds: dict[CallName, int] = {}
        """Call of a block -> its kind."""
        self._looks: list[_Look] = []
        """What the calls of each kind have in common, by number of the kind."""
        self.changes: dict[Pair, Change] = {}
        self.fastest: dict[int, dict[Pair, int]] = collections.defaultdict(dict)
        """For each batch size, nanoseconds of the fastest call of each kind under each action."""
        self.timed = 0
        """Number of timed steps."""
        self.times: dict[CallName, tuple[int, int, int]] = {}
        """Times of calls under `full`, as in `measured.Times`: the shortest over timed steps with the last one's batch
        size. Plans for batches of any size use them."""
        self._timed_elements = 0
        """Batch size of the last timed step."""
        self._tries: collections.Counter[Pair] = collections.Counter()
        self._no_room: set[Pair] = set()

    # --- measured steps ---

    def learn_full(self, batch: Batch, step: Step) -> None:
        """Store a step in which all blocks ran under `full`. Blocks that it did not call keep their earlier figures."""
        self._sort(step)
        before = self.full.get(batch)
        self.full[batch] = step if before is None else joined(step, before, {}, list(self.blocks)).raised(before)
        self._no_room.clear()

    def learn_trial(self, batch: Batch, step: Step, tried: Mapping[str, Action]) -> None:
        """Store the memory of a step in which the blocks in `tried` had other actions."""
        known, full = self.reference(batch)
        calls = _calls_of(step, tried)
        seen = changes_of(full, step, calls, known == batch).items()
        for name, change in ((name, change) for name, change in seen if name in self.kinds):
            pair = self.kinds[name], calls[name]
            before = self.changes.get(pair)
            self.changes[pair] = change if before is None else change.larger(before)
        if any(full[name] is None and name not in calls for name in step.names):
            self.full[known] = joined(full, step, calls, list(self.blocks))
            self._sort(self.full[known])
        for other, reference in self.full.items():  # the first of them had no optimizer state yet
            if other.resident == batch.resident:
                self.full[other] = reference.raised(step)

    def learn_times(self, batch: Batch, step: Step, tried: Mapping[str, Action]) -> None:
        """Store the times of a step in which the blocks in `tried` had other actions."""
        calls = _calls_of(step, tried)
        fastest = self.fastest[batch.elements]
        for name, (forward, _, backward) in step.times.items():
            if backward and name in self.kinds:
                pair = self.kinds[name], calls.get(name, FULL)
                fastest[pair] = min(forward + backward, fastest.get(pair, forward + backward))
        before = self.times if batch.elements == self._timed_elements else {}
        self._timed_elements = batch.elements
        for name, times in step.times.items():
            if name not in calls:  # noise only makes calls slower
                forward, behind, backward = map(min, times, before.get(name, times))
                self.times[name] = forward, behind, backward

    def _sort(self, step: Step) -> None:
        """Assign a kind to every new call."""
        ends = [call.name for call in step.calls if call.backward is not None][-1:]
        for call in step.calls:
            if call.name in self.kinds:
                continue
            look = _look_of(self.modules[call.name[0]], call, call.name in ends)
            like = (number for number, other in enumerate(self._looks) if look.is_of_kind(other))
            number = self.kinds[call.name] = next(like, len(self._looks))
            if number == len(self._looks):
                self._looks.append(look)

    def begins_at(self, level: int, resident: bool) -> None:
        """Store the bytes alive when a step begins. After the first step, they include the state of the optimizer."""
        for batch, full in self.full.items():
            if batch.resident == resident:
                self.full[batch] = dataclasses.replace(full, start_bytes=max(full.start_bytes, level))

    def reference(self, batch: Batch) -> tuple[Batch, Step]:
        """Return the smallest measured batch that covers this one, and its step under `full`. There must be one."""
        found = [(known, step) for known, step in self.full.items() if known.covers(batch)]
        return min(found, key=lambda pair: pair[0].elements)

    def covers(self, batch: Batch) -> bool:
        """Whether a measured batch covers this one."""
        return any(known.covers(batch) for known in self.full)

    # --- what to try next ---

    def to_try(self, batch: Batch, limit: int) -> dict[str, Action]:
        """Return blocks to run under one action that was not tried on their kind, if they fit into a limit, in bytes;
        none if nothing is left to try.

        A kind with a single block is tried together with kinds of similar modules, if there is room.
        """
        full = self.reference(batch)[1]
        members: dict[int, list[str]] = collections.defaultdict(list)
        for call in full.calls:
            if call.backward is not None:
                members[self.kinds[call.name]].append(call.name[0])
        usual = sorted(members, key=lambda kind: -len(members[kind]))
        for action in self.actions[:-1]:
            chosen: dict[str, Action] = {}
            for place, kind in enumerate(usual):
                pair = kind, action
                alone = len(members[kind]) == 1 and any(self._alike(kind, other) for other in usual[:place])
                if not self._is_pending(pair) or (alone and not chosen):
                    continue
                trying = {**chosen, members[kind][-1]: action}
                if self._guess(full, trying) <= limit:
                    chosen = trying
                    self._tries[pair] += 1
                elif not chosen:
                    self._no_room.add(pair)
            if chosen:
                return chosen | self._without_room(members, chosen)
        return {}

    def _without_room(self, members: Mapping[int, Sequence[str]], taken: Mapping[str, Action]) -> dict[str, Action]:
        """Return further blocks to try under `full+selective`, which keeps no more than `full`."""
        found: dict[str, Action] = {}
        for kind, names in members.items() if FULL_SELECTIVE in self.actions else ():
            if self._is_pending((kind, FULL_SELECTIVE)) and len(names) > 1 and names[0] not in taken:
                found[names[0]] = FULL_SELECTIVE
                self._tries[kind, FULL_SELECTIVE] += 1
        return found

    def _alike(self, kind: int, other: int) -> bool:
        """Whether the modules of two kinds are similar, whatever their positions."""
        mine, its = self._looks[kind], self._looks[other]
        pairs = zip(mine.weights, its.weights, strict=True)
        return mine.name == its.name and all(abs(one - two) <= UNLIKE * max(one, two) for one, two in pairs)

    def _is_pending(self, pair: Pair) -> bool:
        return pair not in self.changes and pair not in self._no_room and self._tries[pair] < MOST_TRIES

    def try_nothing_more(self) -> None:
        """Stop trying actions."""
        self._no_room.update((kind, action) for kind in self.kinds.values() for action in self.actions)

    def _guess(self, full: Step, tried: Mapping[str, Action]) -> int:
        """An upper bound on the peak of a step in which some blocks have unmeasured actions."""
        changes = dict(self.changes)
        for call in full.calls:
            action = tried.get(call.name[0])
            if action is None or (self.kinds[call.name], action) in self.changes:
                continue
            kept = self.changes.get((self.kinds[call.name], KEEP))
            share = 0.5 if action.save and "linear" not in action.save else KEPT_AT_MOST.get(action.kind, 1.0)
            bound = bound_of(call, share) if kept is None else kept.at_most()
            pair = self.kinds[call.name], action
            changes[pair] = bound if pair not in changes else bound.larger(changes[pair])
        return peak_of(self._costs(full, changes, 0), tried)

    def to_time(self, batch: Batch, limit: int) -> dict[str, Action]:
        """Return blocks to run under the least timed actions, as many as fit into a limit, in bytes; none if only
        `full` is known. Some blocks of each kind run under `full`, for comparison.
        """
        full = self.reference(batch)[1]
        self.timed += 1
        known = self._with_unlike(self.changes)
        free: dict[int, list[str]] = collections.defaultdict(list)
        for name, kind in {call.name[0]: self.kinds[call.name] for call in full.calls if call.backward}.items():
            free[kind].append(name)
        pairs = [pair for pair in itertools.product(free, reversed(self.actions)) if pair in known]
        for kind, names in free.items():  # calls at both ends of a step take longer, so the middle is `full`
            count = max(1, len(names) // (1 + sum(pair[0] == kind for pair in pairs)))
            first = (len(names) - count) // 2
            free[kind] = names[:first] + names[first + count :]
        costs = self._costs(full, self.changes, 0)
        chosen: dict[str, Action] = {}
        timed = collections.Counter(pair for found in self.fastest.values() for pair in found if pair in pairs)
        while pairs:
            kind, action = pair = min(pairs, key=timed.__getitem__)
            if free[kind] and peak_of(costs, {**chosen, free[kind][-1]: action}) <= limit:
                chosen[free[kind].pop()] = action
                timed[pair] += 1
            else:
                pairs.remove(pair)
        return chosen

    # --- costs ---

    def costs(self, batch: Batch) -> Costs:
        """Return the costs for a batch that a measured batch covers."""
        return self._costs(self._step_for(batch), self.changes, batch.tokens)

    def _costs(self, full: Step, changes: Mapping[Pair, Change], tokens: int) -> Costs:
        ratios, changes = self._shares_of_time(), self._with_unlike(changes)
        maker = StepCosts(full, self.kinds, changes, ratios, self.actions, self.times)
        return maker.costs([self.blocks[name] for name, _ in full.names], self.model, tokens, self.head, self.mlp)

    def _with_unlike(self, changes: Mapping[Pair, Change]) -> dict[Pair, Change]:
        """Add changes for kinds on which an action was not tried: the largest among kinds of similar modules."""
        found = dict(changes)
        for kind in dict.fromkeys(self.kinds.values()):
            for action in self.actions:
                known = [
                    change for (other, its), change in changes.items() if its == action and self._alike(kind, other)
                ]
                if (kind, action) not in found and known:
                    most = known[0]
                    for change in known[1:]:
                        most = most if most.forward_net * change.scale >= change.forward_net * most.scale else change
                    found[kind, action] = most
        return found

    def _step_for(self, batch: Batch) -> Step:
        """The step under `full` for a batch: measured, interpolated, or that of a larger batch."""
        if batch in self.full:
            return self.full[batch]
        high, most = self.reference(batch)
        lows = [known for known in self.full if batch.covers(known) and known.resident == high.resident]
        low = max(lows, key=lambda known: known.elements, default=high)
        share = batch.share_between(low, high)
        return (None if share is None else self.full[low].between(most, share)) or most

    def _shares_of_time(self) -> dict[Pair, float]:
        """Time of forward and backward as a share of that under `full`.

        An action that recomputes more never counts as faster: if it was measured as faster, both get the mean.
        """
        ratios: dict[Pair, list[float]] = collections.defaultdict(list)
        overall: dict[Action, list[float]] = collections.defaultdict(list)
        for fastest in self.fastest.values():
            for (kind, action), spent in fastest.items():
                if (kind, FULL) in fastest:
                    ratios[kind, action].append(spent / fastest[kind, FULL])
                    overall[action].append(spent / fastest[kind, FULL])
        known: dict[Pair, float] = {}
        for kind in dict.fromkeys(self.kinds.values()):
            samples = {a: ratios.get((kind, a)) or overall.get(a) for a in self.actions if a != FULL}
            times = {action: min(found) for action, found in samples.items() if found}
            others = [action for action in times if action != FULL_SELECTIVE]
            for action, share in zip(others, _rising([times[action] for action in others]), strict=True):
                known[kind, action] = min(1.0, share)
            if FULL_SELECTIVE in times:
                known[kind, FULL_SELECTIVE] = max(1.0, times[FULL_SELECTIVE])
        return known

    def table(self, batch: Batch) -> list[tuple[Action, int, float | None]]:
        """Return (action, bytes saved, time as a share of `full`) for the most frequent kind of block."""
        full = self.reference(batch)[1]
        usual = collections.Counter(self.kinds[call.name] for call in full.calls if call.backward).most_common(1)
        calls = [call for call in full.calls if usual and self.kinds[call.name] == usual[0][0]]
        if not calls:
            return []
        kind, call, shares = usual[0][0], calls[len(calls) // 2], self._shares_of_time()
        changes = self._with_unlike(self.changes)
        rows = []
        for action in self.actions:
            change = Change() if action == FULL else changes.get((kind, action))
            if change is not None:
                kept = call.forward.net + change.at(call).forward_net + change.at(call).later
                rows.append((action, kept, 1.0 if action == FULL else shares.get((kind, action))))
        return rows


def _calls_of(step: Step, tried: Mapping[str, Action]) -> dict[CallName, Action]:
    return {name: tried[name[0]] for name in step.names if name[0] in tried}


def choice_of(costs: Costs, chosen: Mapping[str, Action]) -> Choice:
    """The choice that gives blocks these actions if they may have them, and `full` to all others."""
    full = costs.actions.index(FULL)
    rows = []
    for stack in costs.stacks:
        row = []
        for place, block in enumerate(stack.blocks):
            wanted = costs.actions.index(chosen.get(block.name, FULL))
            here = stack.choices_at(place)
            row.append(next((action for action in (wanted, full) if action in here), here[0]))
        rows.append(tuple(row))
    return tuple(rows)


def peak_of(costs: Costs, chosen: Mapping[str, Action]) -> int:
    """The predicted peak if blocks have these actions, and all others `full`."""
    return worst_timeline(costs, choice_of(costs, chosen)).peak_bytes


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest non-decreasing sequence: decreasing neighbours are replaced by their mean."""
    runs: list[list[float]] = []
    for value in values:
        runs.append([value])
        while len(runs) > 1 and statistics.fmean(runs[-2]) > statistics.fmean(runs[-1]):
            last = runs.pop()
            runs[-1] += last
    return [statistics.fmean(run) for run in runs for _ in run]
