"""Measurements of one model during training: the memory and time of its blocks under each action.

A batch is measured in stages. Each has a method that says what its step does with blocks, and one that stores it:

| stage | in its step | what it does | stored by |
|---|---|---|---|
| forwards | recomputations run the forward under every action | `forwards_to_try` | `learn_forwards` |
| backwards | recomputations run under an action, and so does their backward | `backwards_to_try` | `learn_backwards` |
| actions | some blocks are compiled with another share | `actions_to_run` | `learn_actions` |
| times | some blocks have other actions; only times are read | `actions_to_time` | `learn_times` |

The step of the first stage is the reference: all blocks keep least in it, and all others are differences from it. If
feed-forwards run in tiles, it shows only for which trials there is room.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hf_ckpt import compat
from hf_ckpt.costs.costs import Costs, costs_of_step
from hf_ckpt.costs.steps import Call, CallName, Needs, Step, needs_between, step_between
from hf_ckpt.engines.trials import Attempts
from hf_ckpt.models.blocks import FoundBlocks
from hf_ckpt.spec.actions import COMPILED, FULL, FULL_SELECTIVE, KEEP, SELECTIVE, Action
from hf_ckpt.training.batches import NEAR, Batch

TIMED_STEPS = 2
"""Steps whose times are read. Blocks take turns with the actions in them, so that no action is timed in one place of
the step only."""


RECOMPUTED_UNDER = {FULL: KEEP, FULL_SELECTIVE: SELECTIVE}
"""Action -> the one under which its recomputation runs: see `Call.recomputed`."""
LENGTHS = 3
"""Lengths that are measured: bytes at all others follow from them, see `steps.step_between`."""
APART = 0.95
"""Lengths of at least this share of another one are not measured to tell more than it."""


class CallKind(NamedTuple):
    """What calls have in common that need the same under each action."""

    modules: int
    """A number for all blocks with equal modules."""
    has_input_graph: bool
    call_number: int
    """How many calls of the block come before it in the step."""
    has_backward: bool


Pair = tuple[CallKind, Action]


class Times(NamedTuple):
    """Nanoseconds of a call; or of what runs before and between the calls, and of the head with its backward."""

    forward: int = 0
    backward: int = 0

    def scaled(self, factor: float) -> Times:
        """These times for a batch that is larger by a factor."""
        return Times(round(self.forward * factor), round(self.backward * factor))


class Measurements:
    """Measured steps under the action that keeps least, with what trials of others have shown in them, and times.

    Args:
        model_blocks: the blocks of the model.
        actions: the actions to choose from; those that keep most come first. The last one keeps least: steps are
            measured under `full`, `full+tiles`, or share 0 of compiled blocks.
        fixed: block -> the action that it always has. Steps are measured under it, too.
        skips: whether steps skip blocks at random. Then each is stored as if it had skipped none.
    """

    def __init__(
        self, model_blocks: FoundBlocks, actions: Sequence[Action], fixed: Mapping[str, Action], skips: bool = False
    ) -> None:
        self.skips = skips
        self.modules = model_blocks.modules
        self.actions = tuple(actions)
        self.least = self.actions[-1]
        """The action that keeps least."""
        self.fixed = fixed
        self.blocks = {block.name: block for block in model_blocks.blocks}
        """Name -> block."""
        self.references: dict[Batch, Step] = {}
        """Steps in which all blocks had the action that keeps least."""
        self.with_backwards: dict[Batch, Step] = {}
        """Steps that have tried backwards under other actions. Only their trials count."""
        self._by_length = all(action.tile is None and action != COMPILED for action in self.actions)
        """Whether bytes follow from other lengths: not if blocks must run under an action, which is one more step, nor
        with tiles, whose number is no polynomial of the length."""
        self._tries_forwards = self.least.tile is None
        """Whether the first step of a batch tries forwards. Feed-forwards in tiles may need too little for trials to
        have room."""
        self._tries_backwards = True
        self.kinds: dict[Any, dict[CallName, CallKind]] = collections.defaultdict(dict)
        """State of the model -> call of a block -> its kind."""
        self._numbers: dict[Any, int] = {}
        """What equal modules have in common -> a number."""
        self.timed = 0
        """Number of timed steps since the last new kind."""
        self._call_times: dict[Pair, list[Times]] = collections.defaultdict(list)
        """Times of the calls of each kind under each action, as if all timed steps had one batch size. Plans for
        batches of any size use them: times grow as batches do, and a `Race` corrects what they predict."""
        self._other_times: list[Times] = []
        """Times of what is no call of a block, in the same steps."""
        self._timed_elements = 0
        """That batch size; 0 before the first timed step."""

    # --- measured steps ---

    def learn_forwards(self, batch: Batch, step: Step) -> None:
        """Store a step in which all blocks were recomputed."""
        step = self._completed(batch, step)
        self._add_kinds(batch, step)
        self.references[batch] = step
        self.learn_start(batch, step.start_bytes, step.outside_peak_bytes)

    def learn_backwards(self, batch: Batch, step: Step) -> None:
        """Store what the backwards of a step have shown."""
        self.with_backwards[batch] = self._completed(batch, step)

    def learn_actions(self, batch: Batch, step: Step, actions: Mapping[str, Action]) -> None:
        """Store what blocks needed that had these actions in their forward: for the `nearest` batch, whose step is the
        reference. What a smaller batch needed is scaled as in `step_of`."""
        nearest = self.nearest(batch)
        assert nearest is not None
        if nearest.covers(batch):
            step = step.scaled(nearest.growth(batch) ** 2)
        self.references[nearest] = self.references[nearest].with_actions(step, actions)

    def learn_start(self, batch: Batch, start_bytes: int, outside_peak_bytes: int = 0) -> None:
        """Store the bytes alive when steps with such a batch begin: all that stays, such as the buckets of DDP.

        They may fall again: a variable may have held the logits of an evaluation. The peak outside of steps is the
        highest that was seen, because not every step is followed by one of the optimizer.
        """
        for other, step in self.references.items():
            if (other.has_gradients, other.state) == (batch.has_gradients, batch.state):
                outside = max(step.outside_peak_bytes, outside_peak_bytes)
                self.references[other] = dataclasses.replace(step, start_bytes=start_bytes, outside_peak_bytes=outside)

    def learn_times(self, batch: Batch, step: Step, actions: Mapping[str, Action]) -> None:
        """Store the times of a step in which some blocks had these actions."""
        self._timed_elements = self._timed_elements or max(1, batch.elements)
        factor = 1 / self._growth(batch)
        self.timed += 1
        between = sum(call.until_next.nanoseconds for call in step.calls)
        head = sum(part.nanoseconds for part in step.head)
        self._other_times.append(Times(step.before.nanoseconds + between, head).scaled(factor))
        for call in step.calls:
            kind = self.kinds[batch.state].get(call.name)
            if kind is not None:
                backward = 0 if call.backward is None else call.backward.nanoseconds
                action = actions.get(call.name[0], self.least)
                self._call_times[kind, action].append(Times(call.forward.nanoseconds, backward).scaled(factor))

    def try_less(self, in_forwards: bool) -> str:
        """Memory has run out in a step that tried forwards, or also backwards. Returns what follows, in words.

        Without forwards, recomputations still show for which trials of the next step there is room. Without backwards,
        that under the action that keeps least is a bound.
        """
        if in_forwards:
            self._tries_forwards = False
            return "fewer trials of other actions"
        self._tries_backwards = False
        return "no trials of other actions"

    def forget_steps(self) -> None:
        """Forget all measured steps, but not the times: more is alive beside them from now on."""
        self.references.clear()
        self.with_backwards.clear()

    def _completed(self, batch: Batch, step: Step) -> Step:
        """The step with the blocks that it skipped."""
        if not self.skips:
            return step
        keys = {name: (block.stack, self._number_of_modules(name, batch)) for name, block in self.blocks.items()}
        return step.completed(keys)

    def _add_kinds(self, batch: Batch, step: Step) -> None:
        """Assign a kind to every new call."""
        kinds = self.kinds[batch.state]
        for call in step.calls:
            if call.name not in kinds:
                number = self._number_of_modules(call.name[0], batch)
                kind = CallKind(number, call.has_input_graph, call.name[1], call.backward is not None)
                if kind not in self._all_kinds():
                    self.timed = 0
                kinds[call.name] = kind

    def _all_kinds(self) -> set[CallKind]:
        """The kinds of all calls in all states of the model."""
        return {kind for kinds in self.kinds.values() for kind in kinds.values()}

    def _number_of_modules(self, block: str, batch: Batch) -> int:
        """The number of all blocks whose modules equal those of this one."""
        module = self.modules[block]
        # A frozen weight saves other tensors than a trained one. The types of modules also tell activations apart.
        parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters())
        # A copy of a layer has a config of its own, which later changes of the model's attention do not reach.
        configs = [vars(part).get("config") for part in module.modules()]
        attention = frozenset(getattr(config, compat.transformers.ATTENTION_KEY, None) for config in configs)
        kinds = tuple(map(type, module.modules()))
        # Blocks in eval mode run as they are, whatever their action is.
        same = parameters, kinds, attention, batch.state[0], self.fixed.get(block), module.training
        return self._numbers.setdefault(same, len(self._numbers))

    # --- measured batches that are like others ---

    def nearest(self, batch: Batch) -> Batch | None:
        """Return the measured batch that tells most about this one; None if none is near.

        That is the smallest of those that cover it, or else the largest.
        """
        near = [other for other in self.references if other.is_near(batch)]
        covering = [other for other in near if other.covers(batch)]
        if covering:
            return min(covering, key=lambda other: other.elements)
        return max(near, key=lambda other: other.elements, default=None)

    def step_of(self, batch: Batch) -> Step:
        """Return the step of a batch that has a `nearest` one: as it was measured, or as it follows from others.

        Without a step that differs only in its length, it is a bound, from the nearest batch: what a smaller one needs
        is scaled as attention grows, with the square of its length. Everything else in a block grows less.
        """
        like = batch
        factor = 1.0
        if not self._beside(batch, self.references):
            nearest = self.nearest(batch)
            assert nearest is not None
            like = nearest
            factor = 1.0 if nearest.covers(batch) else batch.growth(nearest)
        step = step_between(_shorter(self._beside(like, self.references), factor))
        tried = [_shorter(self._beside(like, steps), factor) for steps in (self.references, self.with_backwards)]
        calls = []
        for call in step.calls:
            needs = collections.defaultdict[Action, dict[float, Needs]](dict)
            for length, other in itertools.chain.from_iterable(steps.items() for steps in tried):
                same_call = other[call.name]
                for action, need in () if same_call is None else same_call.needs.items():
                    needs[action][length] = need
            shown = {action: needs_between(of_action) for action, of_action in needs.items()}
            calls.append(dataclasses.replace(call, needs=shown))
        return dataclasses.replace(step, calls=tuple(calls))

    def _beside(self, batch: Batch, steps: Mapping[Batch, Step]) -> dict[float, Step]:
        """Measured steps that tell what a batch needs: their length, as a multiple of that of the batch -> the step.

        All of them have the calls of the one whose length is nearest.
        """
        if not self._by_length:
            return {1.0: steps[batch]} if batch in steps else {}
        measured = {length: step for other, step in steps.items() if (length := batch.length_of(other)) is not None}
        if not measured:
            return {}
        form = _form(measured[min(measured, key=lambda length: abs(math.log(length)))])
        return {length: step for length, step in measured.items() if _form(step) == form}

    def knows(self, batch: Batch) -> bool:
        """Whether there are costs for a batch, or a bound for them."""
        return bool(self._beside(batch, self.references)) or self.nearest(batch) is not None

    def lacks_forwards(self, batch: Batch) -> bool:
        """Whether the step of a batch must be measured: the first ones of a length, and those much longer or shorter
        than all others."""
        lengths = self._beside(batch, self.references)
        if not lengths:
            return self.nearest(batch) is None
        return _tells_more(lengths) or not NEAR * min(lengths) <= 1 <= max(lengths) / NEAR

    def lacks_backwards(self, batch: Batch) -> bool:
        """Whether backwards must be tried at the length of the batch, whose forwards are known."""
        if not (self._tries_backwards and self._beside(batch, self.references)):
            return False
        return _tells_more(self._beside(batch, self.with_backwards))

    def follows(self, batch: Batch) -> bool:
        """Whether the step of a batch follows from enough others, as exactly as if it had been measured."""
        return len(self._beside(batch, self.references)) >= LENGTHS and not self.lacks_forwards(batch)

    @staticmethod
    def blocks_with_backward(step: Step) -> list[str]:
        """The blocks of which a call has a backward, in the order of their forwards."""
        return [call.name[0] for call in step.calls if call.backward is not None]

    # --- what to measure next ---

    def forwards_to_try(self, batch: Batch) -> dict[str, Attempts]:
        """Return trials of the forward under every action, for the first step of a batch. After memory has run
        out in one, or with tiles, there are none, and recomputations show how much these need.

        Blocks with equal modules share the actions. The last of them take them first, because what comes before the
        first trainable parameter is not recomputed. If steps skip blocks, each tries all: any of them may be skipped.
        """
        if not self._tries_forwards:
            return {block: Attempts() for block in self.blocks if block not in self.fixed}
        groups = collections.defaultdict[int, list[str]](list)
        for block in reversed(self.blocks):
            if block not in self.fixed:
                # Not by kind, which is known only when the first step has run.
                groups[self._number_of_modules(block, batch)].append(block)
        attempts: dict[str, Attempts] = {}
        for blocks in groups.values():
            if self.skips:
                attempts.update(dict.fromkeys(blocks, Attempts(self._tried_actions)))
                continue
            for place, action in enumerate(self._tried_actions):
                block = blocks[place % len(blocks)]
                attempts[block] = Attempts((*attempts.get(block, Attempts()).shown, action))
        return attempts

    def backwards_to_try(self, batch: Batch, limit: int) -> dict[str, Attempts]:
        """Return trials of the backward, for the second step of a batch; and what was not shown of a kind so far. None
        for kinds that may need more than a limit, in bytes.

        The last blocks of each kind get an action each. If there are fewer than actions, those that keep least come
        first: for the others the backward under the action that keeps least is a bound, since it holds all that a block
        keeps.
        """
        attempts: dict[str, Attempts] = {}
        room = limit - self.costs(batch).peak({})
        for calls in self._calls_of_kinds(batch, self.step_of(batch)).values():
            if max(call.whole_bytes for call in calls) > room:
                continue
            blocks = list(dict.fromkeys(call.name[0] for call in reversed(calls)))
            shown = {action for call in calls for action in call.needs}
            missing = tuple(action for action in self._tried_actions if action not in shown)
            lasts: Iterable[Action] = reversed(self._tried_actions)
            if self.skips:  # any of them may be skipped
                lasts = itertools.cycle(lasts)
            for block, last in zip(blocks, lasts, strict=False):
                attempts.setdefault(block, Attempts(missing, last))
                missing = ()  # the first block has shown them
        return attempts

    @property
    def _tried_actions(self) -> tuple[Action, ...]:
        """The actions that recomputations try.

        Others follow from them: see `RECOMPUTED_UNDER`.
        """
        return tuple(action for action in self.actions[:-1] if action not in RECOMPUTED_UNDER)

    def actions_to_run(self, batch: Batch, limit: int) -> dict[str, Action]:
        """Return blocks to run under an action that was not measured, if they fit into a limit, in bytes.

        This is for compiled blocks, which are not recomputed as a whole. Blocks of all kinds have the same action,
        because the step has one difference from the reference. Those that keep least come first. A block keeps no more
        than its backward holds under the action that keeps least.
        """
        step = self.step_of(batch)
        room = limit - self.costs(batch).peak({})
        for action in reversed(self._tried_actions):
            chosen: dict[str, Action] = {}
            for calls in self._calls_of_kinds(batch, step).values():
                last = calls[-1]
                assert last.backward is not None
                if last.backward.peak <= room and not any(action in call.needs for call in calls):
                    chosen[last.name[0]] = action
                    room -= last.backward.peak
            if chosen:
                return chosen
        return {}

    def actions_to_time(self, batch: Batch, limit: int) -> dict[str, Action]:
        """Return blocks to run under other actions than the one that keeps least, as many as fit into a limit, in
        bytes; none if only that one is known. The batch must have a `nearest` one.

        Neighbours of a kind take turns, and another action begins in the next step. So calls at both ends of a step,
        which take longer, are not those of one action.
        """
        step = self.step_of(batch)
        needs = self._needs_of_kinds(batch, step)
        costs = self.costs(batch)
        chosen: dict[str, Action] = {}
        for kind, calls in self._calls_of_kinds(batch, step).items():
            actions = [self.least, *(action for action in self.actions[:-1] if (kind, action) in needs)]
            # In another order in each timed step: see `TIMED_STEPS`.
            turns = itertools.islice(itertools.cycle(actions), self.timed, None)
            blocks = dict.fromkeys(call.name[0] for call in calls)
            for block, action in zip(reversed(blocks), turns, strict=False):
                # A single block has another action in each step, and so the one that keeps least in one of them.
                shows = action != self.least or len(blocks) == 1 < len(actions)
                if shows and costs.peak({**chosen, block: action}) <= limit:
                    chosen[block] = action
        return chosen

    def _calls_of_kinds(self, batch: Batch, step: Step) -> dict[CallKind, list[Call]]:
        """The calls with a backward whose action may be chosen: kind -> its calls."""
        calls = collections.defaultdict[CallKind, list[Call]](list)
        for call in step.calls:
            if call.backward is not None and call.name[0] not in self.fixed:
                calls[self.kinds[batch.state][call.name]].append(call)
        return calls

    # --- costs ---

    def costs(self, batch: Batch, actions: Collection[Action] | None = None) -> Costs:
        """Return the costs for a batch, which must have a `nearest` one.

        `actions` are those that blocks may have, by default all. A block that may have none of them keeps least.
        """
        allowed = self.actions if actions is None else actions
        step = self._timed(batch, self.step_of(batch))
        shown = self._needs_of_kinds(batch, step)
        with_backward = set(self.blocks_with_backward(step))
        needs = {}
        for call in step.calls:
            kind = self.kinds[batch.state][call.name]
            of_kind = {action: shown[kind, action] for action in allowed if (kind, action) in shown}
            has_backward = call.name[0] in with_backward
            needs[call.name] = self._choices(call, of_kind, self.least in allowed, has_backward)
        costs = costs_of_step(step, [self.blocks[name] for name, _ in step.names], needs, self.actions)
        return dataclasses.replace(
            costs,
            least=self.least,
            tokens=sum(math.prod(forward.rows_and_tokens) for forward in batch.forwards),
            sequences=max(forward.rows_and_tokens[0] for forward in batch.forwards),
        )

    def _timed(self, batch: Batch, step: Step) -> Step:
        """A step with the times of such calls in timed steps; all that runs between calls counts before them."""
        growth = self._growth(batch)
        calls = []
        for call in step.calls:
            spent = self._times_of(self.kinds[batch.state][call.name], self.least).scaled(growth)
            forward = dataclasses.replace(call.forward, nanoseconds=spent.forward)
            backward = call.backward and dataclasses.replace(call.backward, nanoseconds=spent.backward)
            until_next = dataclasses.replace(call.until_next, nanoseconds=0)
            calls.append(dataclasses.replace(call, forward=forward, until_next=until_next, backward=backward))
        others = _median(self._other_times).scaled(growth)
        before = dataclasses.replace(step.before, nanoseconds=others.forward)
        forward, backward = step.head
        head = dataclasses.replace(forward, nanoseconds=0), dataclasses.replace(backward, nanoseconds=others.backward)
        return dataclasses.replace(step, before=before, calls=tuple(calls), head=head)

    def _growth(self, batch: Batch) -> float:
        """How many times as large a batch is as the one whose times are stored."""
        return max(1, batch.elements) / self._timed_elements if self._timed_elements else 1.0

    def _choices(
        self, call: Call, shown: dict[Action, Needs], may_keep_least: bool, has_backward: bool
    ) -> dict[Action, Needs]:
        """What a call needs under every action that it may have, of those that trials have shown and the least.
        `has_backward` tells whether any call of its block has one, since all of them get the same action."""
        block = call.name[0]
        if block in self.fixed or not (call.backward or call.records_graph):  # nothing is saved: that is `keep`
            return {self.fixed.get(block, self.actions[0]): call.as_it_ran()}
        if call.backward is None and not has_backward:  # it holds what it keeps, and is never recomputed
            return {self.least: call.as_it_ran()}
        if may_keep_least or not shown:
            return {**shown, self.least: call.as_it_ran()}
        return shown

    def _needs_of_kinds(self, batch: Batch, step: Step) -> dict[Pair, Needs]:
        """What calls of each kind need under every action that trials have shown.

        A kind on which an action was not tried has what kinds of equal modules need; so has one of which no backward
        was tried, for that.
        """
        of_kinds = collections.defaultdict[Pair, list[Needs]](list)
        of_modules = collections.defaultdict[tuple[int, Action], list[Needs]](list)
        for kind, calls in self._calls_of_kinds(batch, step).items():
            for call in calls:
                for action, need in self._needs_of(call).items():
                    of_kinds[kind, action].append(need)
                    of_modules[kind.modules, action].append(need)
        shares = self._shares_of_time()
        shown: dict[Pair, Needs] = {}
        for kind, action in itertools.product(set(self.kinds[batch.state].values()), self.actions):
            if (kind.modules, action) in of_modules:
                of_equal = max(of_modules[kind.modules, action], key=_certainty)
                need = max(of_kinds.get((kind, action), [of_equal]), key=_certainty)
                if need.backward_peak is None:
                    need = dataclasses.replace(need, backward_peak=of_equal.backward_peak)
                # Forwards have the same time under every action. Only sums matter to a plan, so the backward has the
                # difference.
                least = self._times_of(kind, self.least).scaled(self._growth(batch))
                backward = round(shares.get((kind, action), 1.0) * sum(least)) - least.forward
                shown[kind, action] = dataclasses.replace(need, backward_nanoseconds=max(0, backward))
        return shown

    def _needs_of(self, call: Call) -> dict[Action, Needs]:
        """What a call has shown of every action, also of those whose recomputation is like another one."""
        needs = dict(call.needs)
        for action, inner in RECOMPUTED_UNDER.items():
            need = call.needs.get(inner)
            if need is not None and need.backward_peak is not None and action in self.actions[:-1]:
                needs[action] = call.recomputed(need)
        return needs

    def _times_of(self, kind: CallKind, action: Action) -> Times:
        """The median time of a call of this kind; 0 if none was timed."""
        return _median(self._call_times.get((kind, action), ()))

    def _shares_of_time(self) -> dict[Pair, float]:
        """Time of forward and backward as a share of that under the action that keeps least.

        A kind without a time under an action has the mean share of the others.
        """
        shares: dict[Pair, float] = {}
        for kind, action in self._call_times:
            least = self._times_of(kind, self.least)
            if least.backward:  # else that action was not timed, in the same steps, on a block of this kind
                shares[kind, action] = sum(self._times_of(kind, action)) / sum(least)
        for action in self.actions[:-1]:
            others = [share for (_, other), share in shares.items() if other == action]
            if others:
                for kind in self._all_kinds():
                    shares.setdefault((kind, action), statistics.fmean(others))
        return shares


def _shorter(steps: Mapping[float, Step], factor: float) -> dict[float, Step]:
    """Steps by their lengths, as multiples of a batch that is longer by a factor."""
    return {length / factor: step for length, step in steps.items()}


def _form(step: Step) -> list[tuple[CallName, bool]]:
    """The calls of a step, and which of them have a backward."""
    return [(call.name, call.backward is None) for call in step.calls]


def _tells_more(lengths: Collection[float]) -> bool:
    """Whether to measure the length 1, too, for what is known of these lengths."""
    return len(lengths) < LENGTHS and not any(APART <= length <= 1 / APART for length in lengths)


def _median(times: Collection[Times]) -> Times:
    """The median of each time; of two, the shorter, because a stall only makes a time longer."""
    if not times:
        return Times()
    return Times(*(statistics.median_low(column) for column in zip(*times, strict=True)))


def _certainty(need: Needs) -> tuple[bool, int]:
    """The order of trials of the same thing: one of the backward is surer than one of the forward only; of others, the
    one that keeps most is safe."""
    return need.backward_peak is not None, need.kept
