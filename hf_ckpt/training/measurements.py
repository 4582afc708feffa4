"""Measurements of one model during training: the memory and time of its blocks under each action."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from hf_ckpt.costs.costs import Costs, costs_of_step
from hf_ckpt.costs.steps import Call, CallName, Part, Step, Trial, joined
from hf_ckpt.engines.trials import Tries
from hf_ckpt.models.blocks import FoundBlocks
from hf_ckpt.spec.actions import FULL_SELECTIVE, SELECTIVE, Action
from hf_ckpt.training.batches import Batch

TIMED_STEPS = 2
Pair = tuple[int, Action]
"""(kind of a block, action)."""


class Times(NamedTuple):
    """Nanoseconds of a call; or of what runs before and between the calls, and of the head with its backward."""

    forward: int = 0
    backward: int = 0


class Measurements:
    """Measured steps under the action that keeps least, with what trials of others have shown in them, and times.

    Calls are of one kind if their blocks have equal modules, and equivalent positions in the step. Actions change all
    calls of one kind alike.

    Args:
        found: the blocks of the model.
        actions: the actions to choose from; those that keep most come first. The last one keeps least: steps are
            measured under `full`, or with compiled blocks under share 0.
        fixed: block -> the action that it always has. Steps are measured under it, too.
    """

    def __init__(self, found: FoundBlocks, actions: Sequence[Action], fixed: Mapping[str, Action]) -> None:
        self.modules = found.modules
        self.actions = tuple(actions)
        self.fixed = fixed
        self.blocks = {block.name: block for block in found.blocks}
        """Name -> block."""
        self.full: dict[Batch, Step] = {}
        """Steps under the action that keeps least."""
        self.tried: set[Batch] = set()
        """Batches whose backwards under other actions were measured, too."""
        self.kinds: dict[Any, dict[CallName, int]] = collections.defaultdict(dict)
        """State of the model -> call of a block -> its kind."""
        self._modules: dict[Any, int] = {}
        """What equal modules have in common -> a number."""
        self._numbers: dict[tuple[int, ...], int] = {}
        """(number of the modules of a kind, its place in the step) -> number of the kind."""
        self.timed = 0
        """Number of timed steps since the last new kind."""
        self._rows: dict[Pair | None, list[Times]] = collections.defaultdict(list)
        """(kind, action) -> times of its calls in timed steps of one batch size. None -> of what is no call. Plans for
        batches of any size use them."""
        self._timed_elements = 0
        """Batch size of the last timed step."""

    # --- measured steps ---

    def learn(self, batch: Batch, step: Step) -> None:
        """Store a step in which all blocks were recomputed. Blocks that it did not call keep their earlier figures."""
        self._sort(batch, step)
        before = self.full.get(batch)
        if before is not None:
            step = joined(step, before, list(self.blocks))
        self.full[batch] = step
        self._begins_at(batch, step)

    def learn_trials(self, batch: Batch, step: Step) -> None:
        """Store what a step has tried that is like a stored one."""
        self.tried.add(batch)
        full = self.full.get(batch)
        if full is not None:
            self.full[batch] = joined(full.with_trials(step), step, list(self.blocks))
            self._sort(batch, self.full[batch])

    def learn_actions(self, batch: Batch, step: Step, actions: Mapping[str, Action]) -> None:
        """Store what blocks needed that had these actions in their forward: see `to_run`."""
        self.full[batch] = self.full[batch].with_actions(step, actions)

    def forget_steps(self) -> None:
        """Forget all measured steps, but not the times: more is alive beside them from now on."""
        self.full.clear()
        self.tried.clear()

    def _begins_at(self, batch: Batch, step: Step) -> None:
        """Other steps begin where this one does: what is alive outside of steps may have grown, or shrunk."""
        for other, full in self.full.items():
            if (other.resident, other.state) == (batch.resident, batch.state):
                outside = max(full.outside_peak_bytes, step.outside_peak_bytes)
                self.full[other] = dataclasses.replace(full, start_bytes=step.start_bytes, outside_peak_bytes=outside)

    def begins_at(self, batch: Batch, level: int) -> None:
        """Store the bytes alive when a step with a batch begins: all that stays, such as the buckets of DDP."""
        self._begins_at(batch, Step(level, Part(), (), 0))

    def learn_times(self, batch: Batch, step: Step, actions: Mapping[str, Action]) -> None:
        """Store the times of a step in which some blocks had these actions."""
        if batch.elements != self._timed_elements:
            self._rows.clear()
        self._timed_elements = batch.elements
        self.timed += 1
        between = sum(call.behind.nanoseconds for call in step.calls)
        head = sum(part.nanoseconds for part in step.head)
        self._rows[None].append(Times(step.before.nanoseconds + between, head))
        for call in step.calls:
            kind = self.kinds[batch.state].get(call.name)
            if kind is not None:
                backward = 0 if call.backward is None else call.backward.nanoseconds
                row = Times(call.forward.nanoseconds, backward)
                self._rows[kind, actions.get(call.name[0], self.actions[-1])].append(row)

    def _sort(self, batch: Batch, step: Step) -> None:
        """Assign a kind to every new call."""
        kinds = self.kinds[batch.state]
        for call in step.calls:
            if call.name not in kinds:
                kind = self._look(call.name[0], batch), call.has_input_graph, call.name[1], call.backward is None
                if kind not in self._numbers:
                    self._numbers[kind] = len(self._numbers)
                    self.timed = 0
                kinds[call.name] = self._numbers[kind]

    def _look(self, block: str, batch: Batch) -> int:
        """The number of all blocks whose modules equal those of this one."""
        module = self.modules[block]
        parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters())
        look = parameters, tuple(map(type, module.modules())), batch.state[0], self.fixed.get(block)
        return self._modules.setdefault(look, len(self._modules))

    def reference(self, batch: Batch) -> tuple[Batch, Step] | None:
        """Return a measured batch that is near this one, and a bound for this one's step; None if none was measured.

        The smallest of those that cover it comes first. The step of a smaller one is scaled as attention grows, with
        the square of its length.
        """
        near = [other for other in self.full if other.is_near(batch)]
        covering = [other for other in near if other.covers(batch)]
        if covering:
            smallest = min(covering, key=lambda other: other.elements)
            return smallest, self.full[smallest]
        if not near:
            return None
        largest = max(near, key=lambda other: other.elements)
        return batch, self.full[largest].scaled(batch.growth(largest) ** 2)

    def _bound(self, batch: Batch) -> Step:
        """Return a bound for the step of a batch, which must have a `reference`."""
        reference = self.reference(batch)
        assert reference is not None
        return reference[1]

    # --- what to measure next ---

    def to_show(self, batch: Batch) -> dict[str, Tries]:
        """Return trials of the forward under every action, for the first step of a batch.

        Blocks with equal modules share the actions. The last of them take them first, because what comes before the
        first trainable parameter is not recomputed.
        """
        groups = collections.defaultdict[int, list[str]](list)
        for block in reversed(self.blocks):
            if block not in self.fixed:
                groups[self._look(block, batch)].append(block)
        tries: dict[str, Tries] = {}
        for blocks in groups.values():
            for place, action in enumerate(self._tried_actions):
                block = blocks[place % len(blocks)]
                tries[block] = Tries((*tries.get(block, Tries()).shown, action))
        return tries

    def to_try(self, batch: Batch) -> dict[str, Tries]:
        """Return trials of the backward, for the second step of a batch; and what was not shown of a kind so far.

        The last blocks of each kind get an action each. If there are fewer than actions, the bound of the others stays.
        """
        step = self.full[batch]
        tries: dict[str, Tries] = {}
        for calls in self._calls_of_kinds(batch, step).values():
            blocks = list(dict.fromkeys(call.name[0] for call in reversed(calls)))
            seen = {action for call in calls for action in call.trials}
            missing = tuple(action for action in self._tried_actions if action not in seen)
            for place, (block, last) in enumerate(zip(blocks, reversed(self._tried_actions), strict=False)):
                tries.setdefault(block, Tries(() if place else missing, last))
        return tries

    @property
    def _tried_actions(self) -> tuple[Action, ...]:
        """The actions that trials show, from which the others follow."""
        return tuple(action for action in self.actions[:-1] if action != FULL_SELECTIVE and action.tile is None)

    def to_run(self, batch: Batch, limit: int, *, everything: bool) -> dict[str, Action]:
        """Return blocks to run under an action that was not measured, if they fit into a limit, in bytes.

        With `everything`, for blocks whose recomputation can try nothing; else for feed-forwards in tiles, which run so
        in the forward, too. A block keeps no more than its backward holds under the action that keeps least.
        """
        step = self._bound(batch)
        room = limit - self.costs(batch).peak({})
        tiled = tuple(action for action in self.actions if action.tile is not None)
        for action in reversed(self._tried_actions) if everything else tiled:
            chosen: dict[str, Action] = {}
            for calls in self._calls_of_kinds(batch, step).values():
                last = calls[-1]
                assert last.backward is not None
                needed = 0 if action in tiled else last.backward.peak
                if needed <= room and not any(action in call.trials for call in calls):
                    chosen[last.name[0]] = action
                    room -= needed
            if chosen:
                return chosen
        return {}

    def to_time(self, batch: Batch, limit: int) -> dict[str, Action]:
        """Return blocks to run under other actions than the one that keeps least, as many as fit into a limit, in
        bytes; none if only that one is known. The batch must have a `reference`.

        Neighbours of a kind take turns, and another action begins in the next step. So calls at both ends of a step,
        which take longer, are not those of one action.
        """
        step = self._bound(batch)
        shown = self._shown(batch, step)
        costs = self.costs(batch)
        chosen: dict[str, Action] = {}
        for kind, calls in self._calls_of_kinds(batch, step).items():
            least = self.actions[-1]
            actions = [least, *(action for action in self.actions[:-1] if (kind, action) in shown)]
            turns = itertools.islice(itertools.cycle(actions), self.timed, None)
            for block, action in zip(reversed(dict.fromkeys(call.name[0] for call in calls)), turns, strict=False):
                if action != least and costs.peak({**chosen, block: action}) <= limit:
                    chosen[block] = action
        return chosen

    def _calls_of_kinds(self, batch: Batch, step: Step) -> dict[int, list[Call]]:
        """The calls with a backward whose action may be chosen: kind -> its calls."""
        calls = collections.defaultdict[int, list[Call]](list)
        for call in step.calls:
            if call.backward is not None and call.name[0] not in self.fixed:
                calls[self.kinds[batch.state][call.name]].append(call)
        return calls

    # --- costs ---

    def costs(self, batch: Batch, actions: Collection[Action] | None = None) -> Costs:
        """Return the costs for a batch, which must have a `reference`.

        `actions` are those that blocks may have, by default all. A block that may have none of them keeps least.
        """
        allowed = self.actions if actions is None else actions
        full = self._bound(batch)
        times = self._times()
        shown = self._shown(batch, full)
        shares = self._shares_of_time(times)
        calls = []
        trials: dict[CallName, dict[Action, Trial]] = {}
        for call in full.calls:
            kind = self.kinds[batch.state][call.name]
            spent = times.get((kind, self.actions[-1]), Times())
            calls.append(_timed(call, spent))
            least = calls[-1].as_it_ran()
            if call.name[0] in self.fixed or call.backward is None:
                trials[call.name] = {self.fixed.get(call.name[0], self.actions[0]): least}
                continue
            of_call = trials[call.name] = {}
            for action in self.actions[:-1]:
                if (kind, action) in shown and action in allowed:
                    rest = round(shares.get((kind, action), 1.0) * sum(spent)) - spent.forward
                    of_call[action] = dataclasses.replace(shown[kind, action], backward_nanoseconds=max(0, rest))
            if self.actions[-1] in allowed or not of_call:
                of_call[self.actions[-1]] = least
        outside = times.get(None, Times())
        before = dataclasses.replace(full.before, nanoseconds=outside.forward)
        forward, backward = full.head
        head = dataclasses.replace(forward, nanoseconds=0), dataclasses.replace(backward, nanoseconds=outside.backward)
        step = dataclasses.replace(full, before=before, calls=tuple(calls), head=head)
        costs = costs_of_step(step, [self.blocks[name] for name, _ in full.names], trials, self.actions)
        return dataclasses.replace(
            costs,
            tokens=sum(math.prod(forward.text) for forward in batch.forwards),
            sequences=max(forward.text[0] for forward in batch.forwards),
        )

    def _shown(self, batch: Batch, full: Step) -> dict[Pair, Trial]:
        """What calls of each kind need under every action that trials have shown.

        A kind on which an action was not tried has what kinds of equal modules need; so has one of which no backward
        was tried, for that.
        """
        trials = collections.defaultdict[Pair, list[Trial]](list)
        for kind, calls in self._calls_of_kinds(batch, full).items():
            for call in calls:
                for action, trial in call.trials.items():
                    trials[kind, action].append(trial)
                selective = call.trials.get(SELECTIVE)
                if selective is not None and selective.backward_peak is not None and FULL_SELECTIVE in self.actions:
                    trials[kind, FULL_SELECTIVE].append(call.recomputed(selective))
        modules = {kind: number for (number, *_), kind in self._numbers.items()}
        shown: dict[Pair, Trial] = {}
        for kind, action in itertools.product(set(self.kinds[batch.state].values()), self.actions):
            like = [pair for pair in trials if pair[1] == action and modules[pair[0]] == modules[kind]]
            if like:
                most = max(itertools.chain(*map(trials.__getitem__, like)), key=_tells)
                trial = max(trials.get((kind, action), [most]), key=_tells)
                if trial.backward_peak is None:
                    trial = dataclasses.replace(trial, backward_peak=most.backward_peak)
                shown[kind, action] = trial
        return shown

    def _times(self) -> dict[Pair | None, Times]:
        """The median time of a call of each kind under each action; of two, the shorter."""
        return {
            pair: Times(*(round(statistics.median_low(column)) for column in zip(*rows, strict=True)))
            for pair, rows in self._rows.items()
        }

    def _shares_of_time(self, times: Mapping[Pair | None, Times]) -> dict[Pair, float]:
        """Time of forward and backward as a share of that under the action that keeps least.

        A kind without a time under an action has the mean share of the others.
        """
        shares: dict[Pair, float] = {}
        for pair, spent in times.items():
            least = None if pair is None else times.get((pair[0], self.actions[-1]))
            if pair is not None and least is not None and least.backward:
                shares[pair] = sum(spent) / max(1, sum(least))
        for action in self.actions[:-1]:
            others = [share for (_, other), share in shares.items() if other == action]
            for kind in self._numbers.values() if others else ():
                shares.setdefault((kind, action), statistics.fmean(others))
        return shares


def _timed(call: Call, spent: Times) -> Call:
    """A call with the times of such calls; what runs between calls counts as a whole, beside them."""
    forward = dataclasses.replace(call.forward, nanoseconds=spent.forward)
    behind = dataclasses.replace(call.behind, nanoseconds=0)
    backward = call.backward and dataclasses.replace(call.backward, nanoseconds=spent.backward)
    return dataclasses.replace(call, forward=forward, behind=behind, backward=backward)


def _tells(trial: Trial) -> tuple[bool, int]:
    """How much a trial tells: one of the backward tells more than one of the forward only; one that keeps most is
    safe."""
    return trial.backward_peak is not None, trial.kept
