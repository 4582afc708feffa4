"""Measurements of one model during training: the memory and time of its blocks under each action."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hf_ckpt.costs.costs import Choice, Costs, costs_of_step, timeline
from hf_ckpt.costs.steps import Call, CallName, Change, Step, changes_of, joined
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
        model: class name of the model.
        head: how its head runs, as in `Plan.head`.
        mlp: how its feed-forwards run, as in `Plan.mlp`.
        autocast: the type that autocast computes in; None without autocast.
        before: measurements of the same model when other parameters were trained, or with another autocast. What
            actions change in kinds of blocks that are the same is measured once.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        blocks: Mapping[str, Block],
        actions: Sequence[Action],
        model: str,
        head: int | str = "full",
        mlp: int | str = "full",
        autocast: Any = None,
        before: Measurements | None = None,
    ) -> None:
        self.modules, self._autocast = modules, autocast
        self.blocks, self.actions, self.model, self.head, self.mlp = blocks, tuple(actions), model, head, mlp
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
        self.fastest: dict[int, dict[Pair, int]] = before.fastest if before else collections.defaultdict(dict)
        """For each batch size, nanoseconds of the fastest call of each kind under each action."""
        self.timed: int = before.timed if before else 0
        """Number of timed steps since the last new kind."""
        self.times: dict[int | None, tuple[int, ...]] = dict(before.times) if before else {}
        """Kind -> nanoseconds of its calls under `full`: the forward, what runs until the next call, and the backward;
        None -> nanoseconds of what runs before the first call. The shortest over timed steps with the last one's batch
        size. Plans for batches of any size use them."""
        self._timed_elements = 0
        """Batch size of the last timed step."""

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
        calls = _calls_of(step, tried)
        changes: dict[Pair, Change] = {}
        for name, change in changes_of(full, step, calls, known == batch).items():
            if name in self.kinds:
                pair = self.kinds[name], calls[name]
                changes[pair] = change if pair not in changes else change.larger(changes[pair])
        for pair, change in changes.items():
            before = self._measured_on.get(pair)
            if before is not None and before.elements > batch.elements and not before.is_near(batch):
                continue
            same = before is not None and self.changes[pair].scale and before.is_near(batch)
            self.changes[pair] = change.larger(self.changes[pair]) if same else change
            self._measured_on[pair] = batch
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
        self.timed += 1
        calls = _calls_of(step, tried)
        fastest = self.fastest[batch.elements]
        under_full = collections.defaultdict[int | None, list[tuple[int, ...]]](list)
        under_full[None] = [(step.before.nanoseconds,)]
        for call in (call for call in step.calls if call.name in self.kinds):
            back = call.backward.nanoseconds if call.backward else 0
            times = call.forward.nanoseconds, call.behind.nanoseconds, back
            pair = self.kinds[call.name], calls.get(call.name, self.actions[-1])
            if back:
                fastest[pair] = min(times[0] + back, fastest.get(pair, times[0] + back))
            if call.name not in calls:
                under_full[pair[0]].append(times)
        before = self.times if batch.elements == self._timed_elements else {}
        self._timed_elements = batch.elements
        for kind, rows in under_full.items():
            medians = [round(statistics.median(column)) for column in zip(*rows, strict=True)]
            self.times[kind] = tuple(map(min, medians, before.get(kind, medians)))  # noise only makes calls slower

    def _sort(self, step: Step) -> None:
        """Assign a kind to every new call."""
        ends = [call.name for call in step.calls if call.backward is not None][-1:]
        for call in step.calls:
            if call.name in self.kinds:
                continue
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
        cover = [known for known in near if known.covers(batch)]
        if cover:
            known = min(cover, key=lambda each: each.elements)
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
        full = reference[1]
        members: dict[int, list[str]] = collections.defaultdict(list)
        for call in full.calls:
            if call.backward is not None:
                members[self.kinds[call.name]].append(call.name[0])
        usual = sorted(members, key=lambda kind: -len(members[kind]))
        for action in sorted(
            self.actions[:-1], key=lambda action: (action == FULL_SELECTIVE, -self.actions.index(action))
        ):
            chosen: dict[str, Action] = {}
            for place, kind in enumerate(usual):
                pair = kind, action
                alone = len(members[kind]) == 1 and any(self._alike(kind, other) for other in usual[:place])
                if not self._is_pending(pair, batch) or (alone and not chosen):
                    continue
                trying = {**chosen, members[kind][-1]: action}
                if peak_of(self._costs(full, self._guesses(batch, full, trying), 0), trying) <= limit:
                    chosen = trying
                elif not chosen:
                    self._no_room.add((batch, pair))
            if chosen:
                return chosen | self._without_room(batch, members, chosen)
        return {}

    def pending(self, batch: Batch) -> int:
        """How many actions are still to be tried on a batch, as far as is known."""
        kinds = set(self.kinds.values())
        return sum(any(self._is_pending((kind, action), batch) for kind in kinds) for action in self.actions[:-1])

    def _without_room(
        self, batch: Batch, members: Mapping[int, Sequence[str]], taken: Mapping[str, Action]
    ) -> dict[str, Action]:
        """Return further blocks to try under `full+selective`, which keeps no more than `full`."""
        found: dict[str, Action] = {}
        for kind, names in members.items() if FULL_SELECTIVE in self.actions else ():
            if self._is_pending((kind, FULL_SELECTIVE), batch) and len(names) > 1 and names[0] not in taken:
                found[names[0]] = FULL_SELECTIVE
        return found

    def _alike(self, kind: int, other: int) -> bool:
        """Whether the modules of two kinds are similar, whatever their positions."""
        mine, its = self._looks[kind], self._looks[other]
        pairs = zip(mine.weights, its.weights, strict=True)
        return mine.name == its.name and all(abs(one - two) <= UNLIKE * max(one, two) for one, two in pairs)

    def _is_pending(self, pair: Pair, batch: Batch) -> bool:
        """Whether an action is to be tried on a kind: if it was not measured, or on a much smaller batch only."""
        if self._tries[pair] >= MOST_TRIES or (batch, pair) in self._no_room:
            return False
        measured = self._measured_on.get(pair)
        return measured is None or batch.elements >= AGAIN * measured.elements

    def _guesses(self, batch: Batch, full: Step, tried: Mapping[str, Action]) -> dict[Pair, Change]:
        """The changes that were measured, and bounds for those that are tried."""
        changes = self._changes_for(batch)
        for call in full.calls:
            action = tried.get(call.name[0])
            pair = self.kinds[call.name], action or self.actions[-1]
            if action is None or pair in self.changes:
                continue
            share = 0.5 if action.save and "linear" not in action.save else KEPT_AT_MOST.get(action.kind, 1.0)
            more = self.actions[: self.actions.index(action)] if action != FULL_SELECTIVE else ()
            measured = [changes[pair[0], other].at(call) for other in more if (pair[0], other) in self.changes]
            size = call.backward.peak if call.backward is not None else 0
            keeps = [max(0, change.forward_net) + max(0, change.later) for change in measured]
            # The backward under `full` holds all that the block keeps under `keep`. So with what the forward keeps, the
            # backward under another action needs no more. The forward holds no more than it keeps in addition.
            most = min((math.ceil(size * share), *keeps))
            bound = Change(most, most, backward_peak=-most, scale=size)
            changes[pair] = bound if pair not in changes else bound.larger(changes[pair])
        return changes

    def to_time(self, batch: Batch, limit: int) -> dict[str, Action]:
        """Return blocks to run under the least timed actions, as many as fit into a limit, in bytes; none if only
        `full` is known. Some blocks of each kind run under `full`, for comparison.
        """
        reference = self.reference(batch)
        if reference is None or not self.changes:
            return {}
        full, changes = reference[1], self._changes_for(batch)
        known = self._with_unlike(changes)
        free: dict[int, list[str]] = collections.defaultdict(list)
        for name, kind in {call.name[0]: self.kinds[call.name] for call in full.calls if call.backward}.items():
            free[kind].append(name)
        pairs = [pair for pair in itertools.product(free, reversed(self.actions)) if pair in known]
        for kind, names in free.items():  # calls at both ends of a step take longer, so the middle is `full`
            count = max(1, len(names) // (1 + sum(pair[0] == kind for pair in pairs)))
            first = (len(names) - count) // 2
            free[kind] = names[:first] + names[first + count :]
        costs = self._costs(full, changes, 0)
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
        """Return the costs for a batch, which must have a `reference`."""
        reference = self.reference(batch)
        assert reference is not None
        return self._costs(reference[1], self._changes_for(batch), batch.tokens)

    def _costs(self, full: Step, changes: Mapping[Pair, Change], tokens: int) -> Costs:
        calls = []
        for call in full.calls:
            times = self.times.get(self.kinds[call.name], (0, 0, 0))
            parts = zip((call.forward, call.behind, call.backward), times, strict=True)
            timed: list[Any] = [part and dataclasses.replace(part, nanoseconds=spent) for part, spent in parts]
            calls.append(Call(call.name, call.has_input_graph, *timed))
        before = dataclasses.replace(full.before, nanoseconds=self.times.get(None, (0,))[0])
        full = dataclasses.replace(full, before=before, calls=tuple(calls))
        blocks = [self.blocks[name] for name, _ in full.names]
        changes, ratios = self._with_unlike(changes), self._shares_of_time()
        costs = costs_of_step(full, blocks, self.kinds, changes, ratios, self.actions)
        return dataclasses.replace(
            costs, model=self.model, tokens=tokens, head_tokens=self.head, mlp_tokens=self.mlp, notes=("measured",)
        )

    def _changes_for(self, batch: Batch) -> dict[Pair, Change]:
        """The measured changes for calls with a batch, which may be larger than the measured ones."""
        changes = dict(self.changes)
        batch = dataclasses.replace(batch, resident=True)
        for pair, measured in self._measured_on.items():
            measured = dataclasses.replace(measured, resident=True)
            growth = 0.0 if measured.covers(batch) else batch.growth(measured)
            changes[pair] = dataclasses.replace(changes[pair], growth=growth if growth < math.inf else 0.0)
        return changes

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

    def _shares_of_time(self) -> dict[Pair, float]:
        """Time of forward and backward as a share of that under `full`.

        An action that recomputes more never counts as faster: if it was measured as faster, both get the mean. Compiled
        blocks are an exception, because kernels of a larger share can be slower.
        """
        least = self.actions[-1]
        ratios: dict[Pair, list[float]] = collections.defaultdict(list)
        overall: dict[Action, list[float]] = collections.defaultdict(list)
        for fastest in self.fastest.values():
            for (kind, action), spent in fastest.items():
                if (kind, least) in fastest:
                    ratios[kind, action].append(spent / fastest[kind, least])
                    overall[action].append(spent / fastest[kind, least])
        known: dict[Pair, float] = {}
        for kind in dict.fromkeys(self.kinds.values()):
            samples = {a: ratios.get((kind, a)) or overall.get(a) for a in self.actions if a != least}
            times = {action: min(found) for action, found in samples.items() if found}
            others = [action for action in times if action != FULL_SELECTIVE]
            shares = [times[action] for action in others]
            for action, share in zip(others, _rising(shares) if least == FULL else shares, strict=True):
                known[kind, action] = min(1.0, share)
            if FULL_SELECTIVE in times:
                known[kind, FULL_SELECTIVE] = max(1.0, times[FULL_SELECTIVE])
        return known

    def table(self, batch: Batch) -> list[tuple[Action, int, float | None]]:
        """Return (action, bytes saved, time as a share of `full`) for the most frequent kind of block."""
        reference = self.reference(batch)
        if reference is None:
            return []
        full = reference[1]
        usual = collections.Counter(self.kinds[call.name] for call in full.calls if call.backward).most_common(1)
        calls = [call for call in full.calls if usual and self.kinds[call.name] == usual[0][0]]
        if not calls:
            return []
        kind, call, shares = usual[0][0], calls[len(calls) // 2], self._shares_of_time()
        changes = self._with_unlike(self._changes_for(batch))
        rows = []
        for action in self.actions:
            change = Change() if action == self.actions[-1] else changes.get((kind, action))
            if change is not None:
                kept = call.forward.net + change.at(call).forward_net + change.at(call).later
                rows.append((action, kept, 1.0 if action == self.actions[-1] else shares.get((kind, action))))
        return rows


def _calls_of(step: Step, tried: Mapping[str, Action]) -> dict[CallName, Action]:
    return {name: tried[name[0]] for name in step.names if name[0] in tried}


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


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest non-decreasing sequence: decreasing neighbours are replaced by their mean."""
    runs: list[list[float]] = []
    for value in values:
        runs.append([value])
        while len(runs) > 1 and statistics.fmean(runs[-2]) > statistics.fmean(runs[-1]):
            last = runs.pop()
            runs[-1] += last
    return [statistics.fmean(run) for run in runs for _ in run]
