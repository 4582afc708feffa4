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

from hf_ckpt.costs.costs import Costs, costs_of_step
from hf_ckpt.costs.steps import Call, CallName, Change, Part, Step, changes_of, joined
from hf_ckpt.models.blocks import FoundBlocks
from hf_ckpt.spec.actions import FULL, FULL_SELECTIVE, Action
from hf_ckpt.training.batches import Batch

KEPT_AT_MOST = {"keep": 1.0, "selective": 0.8}
"""The most that an action keeps, as a share of what the backward of a `full` block needs; 0.5 if linears are not saved.
"""
MOST_TRIES = 2
"""How often an action is tried on a kind without a result: blocks may not be called in every step."""
AGAIN = 2.0
"""An action is measured again on a batch that is larger by this factor than the measured one."""
Pair = tuple[int, Action]
"""(kind of a block, action)."""


class Measurements:
    """Measured steps under `full`, and the changes that other actions make to them.

    Calls are of one kind if their blocks have equal modules, and equivalent positions in the step. Actions change all
    calls of one kind alike, in proportion to what the backward of each needs under `full`.

    Args:
        found: the blocks of the model.
        actions: the actions to choose from; those that keep most come first. The last one keeps least: steps are
            measured under `full`, or with compiled blocks under share 0.
        fixed: block -> the action that it always has. Steps are measured under it, too.
    """

    def __init__(self, found: FoundBlocks, actions: Sequence[Action], fixed: Mapping[str, Action]) -> None:
        self.modules, self.actions, self.fixed = found.modules, tuple(actions), fixed
        self.blocks = {block.name: block for block in found.blocks}
        """Name -> block."""
        self.full: dict[Batch, Step] = {}
        """Steps under `full`."""
        self.kinds: dict[Any, dict[CallName, int]] = collections.defaultdict(dict)
        """State of the model -> call of a block -> its kind."""
        self._modules: dict[Any, int] = {}
        """What equal modules have in common -> a number."""
        self._numbers: dict[tuple[int, ...], int] = {}
        """(number of the modules of a kind, its place in the step) -> number of the kind."""
        self.changes: dict[Pair, Change] = {}
        self._measured_on: dict[Pair, Batch] = {}
        """The batch on which each change was measured."""
        self._tries: collections.Counter[Pair] = collections.Counter()
        """How often a step tried an action on a kind and did not measure it."""
        self.timed = 0
        """Number of timed steps since the last new kind."""
        self.times: dict[Pair | None, tuple[int, int, int]] = {}
        """(kind, action) -> nanoseconds of a call: its forward, what runs until the next call, its backward. None ->
        nanoseconds of what runs before the first call. Each is the shortest over timed steps with the last one's batch
        size, because noise only makes calls slower. Plans for batches of any size use them."""
        self._timed_elements = 0
        """Batch size of the last timed step."""
        self.ratios: dict[Pair, float] = {}
        """(kind, action) -> time of forward and backward as a share of that under `full`."""

    # --- measured steps ---

    def learn_full(self, batch: Batch, step: Step) -> None:
        """Store a step in which all blocks ran under `full`. Blocks that it did not call keep their earlier figures."""
        self._sort(batch, step)
        before = self.full.get(batch)
        self.full[batch] = step if before is None else joined(step, before, {}, list(self.blocks)).raised(before)

    def learn_trial(self, batch: Batch, step: Step, tried: Mapping[str, Action]) -> bool:
        """Store the memory of a step in which the blocks in `tried` had other actions. Returns whether it told
        anything."""
        reference = self.reference(batch)
        if reference is None:  # it was another step than was expected
            return False
        known, full = reference
        kinds = self.kinds[batch.state]
        calls = {name: tried[name[0]] for name in step.names if name[0] in tried}
        changes: dict[Pair, Change] = {}
        for name, change in changes_of(full, step, calls, known == batch).items():
            if name in kinds:
                pair = kinds[name], calls[name]
                changes[pair] = change if pair not in changes else change.larger(changes[pair])
        self.changes.update(changes)
        self._measured_on.update(dict.fromkeys(changes, batch))
        for call in full.calls:
            pair = kinds[call.name], tried.get(call.name[0], self.actions[-1])
            self._tries[pair] += call.name[0] in tried and pair not in changes
        if known in self.full and any(full[name] is None and name not in calls for name in step.names):
            self.full[known] = joined(full, step, calls, list(self.blocks))
            self._sort(known, self.full[known])
        self._raise(batch, step)
        return True

    def begins_at(self, batch: Batch, level: int) -> None:
        """Store the bytes alive when a step with a batch begins: all that stays, such as the buckets of DDP."""
        self._raise(batch, Step(level, Part(), (), 0))

    def _raise(self, batch: Batch, step: Step) -> None:
        """Raise what is alive outside of steps like one with this batch: it may grow in the first steps of a run."""
        for other, full in self.full.items():
            if (other.resident, other.state) == (batch.resident, batch.state):
                self.full[other] = full.raised(step)

    def learn_times(self, batch: Batch, step: Step, tried: Mapping[str, Action]) -> None:
        """Store the times of a step in which the blocks in `tried` had other actions."""
        if batch.elements != self._timed_elements:
            self.times.clear()
        self._timed_elements = batch.elements
        self.timed += 1
        rows = collections.defaultdict[Pair | None, list[tuple[int, int, int]]](list)
        rows[None] = [(step.before.nanoseconds, 0, 0)]
        for call in step.calls:
            kind = self.kinds[batch.state].get(call.name)
            if kind is not None:
                back = (call.backward or Part()).nanoseconds
                row = call.forward.nanoseconds, call.behind.nanoseconds, back
                rows[kind, tried.get(call.name[0], self.actions[-1])].append(row)
        for key, times in rows.items():
            medians = [round(statistics.median(column)) for column in zip(*times, strict=True)]
            forward, behind, back = map(min, medians, self.times.get(key, medians))
            self.times[key] = forward, behind, back
        for key, (forward, _, backward) in self.times.items():
            under_full = self.times.get((key[0], self.actions[-1])) if key is not None and backward else None
            if key is not None and under_full is not None:
                self.ratios[key] = (forward + backward) / max(1, under_full[0] + under_full[-1])

    def _sort(self, batch: Batch, step: Step) -> None:
        """Assign a kind to every new call."""
        kinds = self.kinds[batch.state]
        last = next((call.name for call in reversed(step.calls) if call.backward is not None), None)
        for call in step.calls:
            if call.name not in kinds:
                module = self.modules[call.name[0]]
                parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters())
                look = parameters, tuple(map(type, module.modules())), batch.state[0], self.fixed.get(call.name[0])
                number = self._modules.setdefault(look, len(self._modules))
                kind = number, call.name == last, call.has_input_graph, call.name[1], call.backward is None
                if kind not in self._numbers:
                    self._numbers[kind] = len(self._numbers)
                    self.timed = 0
                kinds[call.name] = self._numbers[kind]

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

    def _under_full(self, batch: Batch) -> Step:
        """Return a bound for the step of a batch under `full`. The batch must have a `reference`."""
        reference = self.reference(batch)
        assert reference is not None
        return reference[1]

    # --- what to try next ---

    def to_try(self, batch: Batch, limit: int) -> dict[str, Action]:
        """Return blocks to run under one action that was not tried on their kind, if they fit into a limit, in bytes;
        none if nothing is left to try. The batch must have a `reference`. Actions that keep least come first.
        """
        calls = self._under_full(batch).calls
        kinds = self.kinds[batch.state]
        free = [call.name for call in calls if call.backward and call.name[0] not in self.fixed]
        usual = collections.Counter(map(kinds.__getitem__, free))
        last = {kinds[call.name]: call.name[0] for call in calls}
        for action in sorted(self.actions[:-1], key=lambda a: (a == FULL_SELECTIVE, -self.actions.index(a))):
            chosen: dict[str, Action] = {}
            for kind, _ in usual.most_common():
                trying = {**chosen, last[kind]: action}
                if self._is_pending((kind, action), batch) and self.costs(batch, trying).peak(trying) <= limit:
                    chosen = trying
            if chosen:
                return chosen
        return {}

    def _is_pending(self, pair: Pair, batch: Batch) -> bool:
        """Whether an action is to be tried on a kind: if it was not measured, or on a much smaller batch only."""
        measured = self._measured_on.get(pair)
        return self._tries[pair] < MOST_TRIES and (measured is None or batch.elements >= AGAIN * measured.elements)

    def to_time(self, batch: Batch, limit: int) -> dict[str, Action]:
        """Return blocks to run under the least timed actions, as many as fit into a limit, in bytes; none if only
        `full` is known. Some blocks of each kind run under `full`, for comparison. The batch must have a `reference`.
        """
        full, costs = self._under_full(batch), self.costs(batch)
        free: dict[int, list[str]] = collections.defaultdict(list)
        for name, kind in {c.name[0]: self.kinds[batch.state][c.name] for c in full.calls if c.backward}.items():
            if name not in self.fixed:
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
            if free[kind] and costs.peak({**chosen, free[kind][-1]: action}) <= limit:
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
        full, kinds, calls = self._under_full(batch), self.kinds[batch.state], []
        for call in full.calls:
            times = self.times.get((kinds[call.name], self.actions[-1]), (0, 0, 0))
            parts = zip((call.forward, call.behind, call.backward), times, strict=True)
            timed: list[Any] = [part and dataclasses.replace(part, nanoseconds=spent) for part, spent in parts]
            calls.append(Call(call.name, call.has_input_graph, *timed))
        before = dataclasses.replace(full.before, nanoseconds=self.times.get(None, (0,))[0])
        step = dataclasses.replace(full, before=before, calls=tuple(calls))
        blocks = [self.blocks[name] for name, _ in full.names]
        changes = self._changes(batch, full, guessed)
        costs = costs_of_step(step, blocks, kinds, changes, self._shares_of_time(), self.actions)
        tokens = sum(math.prod(forward.text) for forward in batch.forwards)
        sequences = max(forward.text[0] for forward in batch.forwards)
        return dataclasses.replace(costs.fixing(self.fixed), tokens=tokens, sequences=sequences)

    def _changes(self, batch: Batch, full: Step, guessed: Mapping[str, Action]) -> dict[Pair, Change]:
        """What actions change in calls with a batch: what was measured, and bounds for those in `guessed`.

        A kind on which an action was not tried has the largest change among kinds of equal modules.
        """
        changes: dict[Pair, Change] = {}
        for pair, change in self.changes.items():
            measured = self._measured_on[pair]
            covers = Batch(measured.forwards, True).covers(Batch(batch.forwards, True))
            growth = 0.0 if covers else batch.growth(measured)
            scale = round(change.scale * self._backward_ratio(measured, batch.resident))
            changes[pair] = dataclasses.replace(change, growth=growth, scale=scale)
        for call in full.calls if guessed else ():
            action, kind = guessed.get(call.name[0]), self.kinds[batch.state][call.name]
            if action is None or (kind, action) in self.changes:
                continue
            # The backward under `full` holds all that the block keeps under `keep`. So with what the forward keeps, the
            # backward under another action needs no more. The forward holds no more than it keeps in addition.
            share = 0.5 if action.save and "linear" not in action.save else KEPT_AT_MOST.get(action.kind, 1.0)
            size = call.backward.peak if call.backward is not None else 0
            most = math.ceil(size * share)
            bound = Change(most, most, backward_peak=-most, scale=size)
            changes[kind, action] = bound.larger(changes.get((kind, action), bound))
        modules = {kind: number for (number, *_), kind in self._numbers.items()}
        for kind, action in itertools.product(set(self.kinds[batch.state].values()), self.actions):
            like = [change for (k, its), change in changes.items() if its == action and modules[k] == modules[kind]]
            if like and (kind, action) not in changes:
                changes[kind, action] = max(like, key=lambda change: change.forward_net / max(1, change.scale))
        return changes

    def _backward_ratio(self, measured: Batch, resident: bool) -> float:
        """What the backwards of a measured batch need in a step that begins with or without gradients, relative to the
        measured step; 1 if that is not known.

        The first micro-step allocates gradients in its backward, and later ones add to them. Blocks keep the same in
        both, so a change that was measured in one sort must not be scaled by that difference in the other.
        """
        known, step = self.reference(measured) or (measured, None)
        other = self.full.get(dataclasses.replace(known, resident=resident))
        if step is None or other is None:
            return 1.0
        sizes = [sum(call.backward.peak for call in each.calls if call.backward) for each in (step, other)]
        return sizes[1] / max(1, sizes[0])

    def _shares_of_time(self) -> dict[Pair, float]:
        """Time of forward and backward as a share of that under `full`; a kind without a time has the shortest of all.

        An action that recomputes more never counts as faster than one that keeps more: noise only makes calls slower.
        Compiled blocks are an exception, because kernels of a larger share can be slower.
        """
        shares: dict[Pair, float] = {}
        for kind in self._numbers.values():
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
