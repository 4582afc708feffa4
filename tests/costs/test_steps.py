"""Costs from measured steps: a simulated machine needs exactly what two of its steps predict."""

import dataclasses
import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_ckpt.costs.costs import step_nanoseconds, timeline
from hf_ckpt.costs.steps import Call, Needs, Part, Step, needs_between
from hf_ckpt.engines.trials import Attempts
from hf_ckpt.measure.levels import Boundary, Level, step_of
from hf_ckpt.models.blocks import FoundBlocks
from hf_ckpt.planner.planner import Planner
from hf_ckpt.spec.actions import FULL, FULL_SELECTIVE, KEEP, SELECTIVE
from hf_ckpt.spec.plan import Block
from hf_ckpt.training.batches import Batch, Forward
from hf_ckpt.training.measurements import TIMED_STEPS, Measurements

ACTIONS = (KEEP, SELECTIVE, FULL_SELECTIVE, FULL)
SHARES = {KEEP: 0.5, SELECTIVE: 0.75, FULL_SELECTIVE: 1.25, FULL: 1.0}
"""Time of forward and backward relative to `full`."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A simulated machine: the bytes that its steps need."""

    blocks: int = 4
    start: int = 10
    hidden: int = 3
    selective: int = 50  # bytes that a block keeps under `selective` besides its input
    more: int = 50  # further bytes that it keeps under `keep`
    work: int = 1  # temporary bytes of a forward
    again: int = 20  # bytes that a block's backward needs besides what it keeps under `keep`
    cast: int = 0  # a block's copies of weights: they live until its backward under `keep`, else until the forward ends
    gradients: int = 2
    head: int = 30
    loss: int = 25  # bytes that the head's backward needs
    frozen: int = 0  # the number of first blocks without a graph, at most all but three

    def levels(self, plan, attempts=()):
        """The memory levels at the boundaries of a step; `plan` has an action for each block.

        `tries` has for each block the actions that its recomputation tries, and the one whose backward it tries.
        """
        kept = {KEEP: self.selective + self.more, SELECTIVE: self.selective, FULL_SELECTIVE: 0, FULL: 0}
        frozen = min(self.frozen, self.blocks - 3)
        level, found, peak, spent = self.start, [], self.start, 0

        def mark(what, block="", has_graph=True, action=None):
            nonlocal peak, spent
            found.append(Level(what, block, has_graph, level, max(peak, level), spent, action))
            peak, spent = level, 0

        def need(size, nanoseconds=0):
            nonlocal peak, spent
            peak, spent = max(peak, level + size), nanoseconds

        def trial(block, action, ends_with):
            nonlocal level
            level += self.cast
            mark(Boundary.CAST, block, action=action)
            level -= self.cast
            mark(Boundary.TRIAL, block, action=action)
            need(self.work + self.cast + kept[action])
            level += self.cast + kept[action]
            mark(Boundary.TRIED, block, action=action)
            level -= 0 if action == KEEP else self.cast
            mark(ends_with, block, action=action)

        def backward_of(action):
            """Most bytes of the backward of a block that has kept what it keeps under the action."""
            return self.again + kept[KEEP] - kept[action] + self.gradients

        mark(Boundary.BEGIN)
        need(3, 7)
        level += 3
        for number, action in enumerate(plan):
            graph = number >= frozen
            mark(Boundary.FORWARD, f"b{number}", number > frozen)
            need(self.work + self.cast + (kept[action] if graph else 0), 100)
            level += (self.hidden + kept[action] if graph else 0) + self.cast
            mark(Boundary.FORWARDED, f"b{number}", graph)
            need(0, 10)
        need(self.head, 30)
        with_casts = [action == KEEP and number >= frozen for number, action in enumerate(plan)]
        level -= self.cast * (len(plan) - sum(with_casts))
        mark(Boundary.RETURNED)
        need(self.loss, 20)
        for number in range(len(plan) - 1, frozen - 1, -1):
            name = f"b{number}"
            mark(Boundary.BACKWARD, name)
            shown, last = attempts[number] if attempts else ((), None)
            before = level
            for action in shown:
                trial(name, action, Boundary.SHOWN)
                level = before
            if last is None:
                # Recomputed, a block holds what it keeps in the forward and in the backward.
                again = {FULL: KEEP, FULL_SELECTIVE: SELECTIVE}.get(plan[number])
                size = backward_of(plan[number])
                if again is not None:
                    casts = self.cast if again == KEEP else 0
                    size = max(self.work + self.cast, casts + backward_of(again)) + kept[again]
                need(size, round(300 * SHARES[plan[number]]) - 100)
            else:
                trial(name, last, Boundary.KEPT)
                need(backward_of(last))
                level = before
            level += self.gradients - self.hidden - kept[plan[number]] - self.cast * with_casts[number]
        mark(Boundary.END)
        return found


def blocks_of(machine, skips=False):
    """The measurements of a model of such blocks, before the first."""
    blocks = tuple(Block(f"b{number}", "decoder", number, "Made") for number in range(machine.blocks))
    modules = {block.name: nn.Identity() for block in blocks}
    base = nn.Identity()
    return Measurements(FoundBlocks(base, "generic", blocks, modules, {}, {}, base), ACTIONS, {}, skips)


def batch_of(tokens, resident=False):
    return Batch((Forward("decoder", (("input_ids", (2, tokens)),), False),), resident)


def in_order(machine, attempts):
    """What `levels` takes: for each block, actions to try."""
    return [attempts.get(f"b{number}", Attempts()) for number in range(machine.blocks)]


def measured(machine, batch, known=None):
    """The measurements after the two steps of a batch: one that shows forwards, and one that tries backwards."""
    known = known or blocks_of(machine)
    full = [FULL] * machine.blocks
    known.learn_forwards(batch, step_of(machine.levels(full, in_order(machine, known.forwards_to_try(batch)))))
    attempts = known.backwards_to_try(batch, limit=1 << 40)
    known.learn_backwards(batch, step_of(machine.levels(full, in_order(machine, attempts))))
    return known


@given(st.builds(Machine, st.integers(5, 7), *[st.integers(0, 1000)] * 10, st.integers(0, 2)), st.data())
def test_every_plan_needs_what_two_steps_have_shown(machine, data):
    """Two steps under `full` predict the peak of every plan to the byte, and timed ones its time.

    This includes frozen blocks, gradients that grow as activations are freed, and copies of weights that live as long
    as autocast or the graph.
    """
    batch = batch_of(8)
    known = measured(machine, batch)
    for action in ACTIONS:
        known.learn_times(
            batch, step_of(machine.levels([action] * machine.blocks)), dict.fromkeys(known.blocks, action)
        )
    costs = known.costs(batch)
    plan = [data.draw(st.sampled_from(ACTIONS)) for _ in range(machine.blocks)]
    choice = costs.choice({f"b{number}": action for number, action in enumerate(plan)})
    real = step_of(machine.levels(plan))
    assert timeline(costs, choice).peak_bytes == max(real.peak_bytes, real.start_bytes)
    assert step_nanoseconds(costs, choice) == sum(level.nanoseconds for level in machine.levels(plan))


@given(st.builds(Machine, st.just(5), *[st.integers(0, 1000)] * 10, st.just(2)), st.sampled_from(ACTIONS))
def test_a_kind_of_one_block_learns_from_equal_modules(machine, action):
    """Of one block, one step shows every forward, and the next one backward; other kinds show the rest."""
    costs = measured(machine, batch_of(8)).costs(batch_of(8))
    real = step_of(machine.levels([FULL, FULL, action, FULL, FULL])).peak_bytes
    assert costs.peak({"b2": action}) == max(real, machine.start)


@given(
    st.builds(Machine, st.just(6), *[st.integers(0, 1000)] * 10, st.just(0)),
    st.lists(st.sets(st.integers(0, 5), min_size=3), min_size=2, max_size=2),
    st.sampled_from(ACTIONS),
)
def test_steps_that_skip_blocks_tell_what_one_that_skips_none_needs(machine, called, action):
    """LayerDrop: three blocks are enough, whichever they are, and whether or not they are the same in both steps."""
    known = blocks_of(machine, skips=True)
    batch = batch_of(8)
    backwards_to_try = functools.partial(known.backwards_to_try, limit=1 << 40)
    stages = (known.learn_forwards, known.forwards_to_try), (known.learn_backwards, backwards_to_try)
    for blocks, (learn, to_try) in zip(called, stages, strict=True):
        names = {f"b{place}": f"b{number}" for place, number in enumerate(sorted(blocks))}
        attempts = to_try(batch)
        fewer = dataclasses.replace(machine, blocks=len(blocks))
        levels = fewer.levels([FULL] * len(blocks), [attempts.get(name, Attempts()) for name in names.values()])
        learn(batch, step_of([dataclasses.replace(level, block=names.get(level.block, "")) for level in levels]))
    real = step_of(machine.levels([FULL, action, FULL, action, FULL, FULL])).peak_bytes
    peak_bytes = known.costs(batch).peak({"b1": action, "b3": action})
    assert peak_bytes >= max(real, machine.start)
    if {KEEP, SELECTIVE} <= {action for call in known.with_backwards[batch].calls for action in call.needs}:
        assert peak_bytes == max(real, machine.start)


NOTHING = Part()
SOME = Part(9)


def call_of(block, number=0, *, net=0, has_input_graph=True, until_next=NOTHING, backward=SOME):
    """A call whose forward leaves so many bytes."""
    return Call((block, number), has_input_graph, Part(net, net), until_next, backward)


def step_of_calls(*calls):
    """A step with these calls, whose backward begins with all that their forwards leave."""
    return Step(0, Part(), calls, sum(call.forward.net for call in calls))


def test_skipped_blocks_are_like_the_nearest_equal_ones_of_their_forward():
    """The first call has no graph at its input. It stands for no later block, although it is the nearest to one."""
    beside = Part(3, 2)
    first = [call_of("a", net=1, has_input_graph=False, until_next=beside), call_of("c", net=5), call_of("g", net=9)]
    second = [call_of("g", 1, net=2)]  # which the first forward ended with
    blocks = {**dict.fromkeys("abcdefg", "decoder"), "other": "tower"}
    step = step_of_calls(*first, *second)
    full = step.completed(blocks)
    assert full.names == tuple((block, number) for number in (0, 1) for block in "abcdefg")
    assert [call.forward.net for call in full.calls] == [1, 5, 5, 5, 5, 9, 9, *[2] * 7]
    assert [call.until_next for call in full.calls] == [beside, *[Part()] * 13]
    assert full.at_backward_bytes == sum(call.forward.net for call in full.calls)
    assert full.completed(blocks) == full


def test_what_tiles_keep_is_how_much_more_their_step_leaves():
    """Only of calls that both steps have, with a backward, and of blocks that had the action."""
    full = step_of_calls(call_of("a", net=20), call_of("b", net=20), call_of("c", net=20))
    nets = {"a": 50, "b": 60, "c": 70, "d": 80}
    tiled = step_of_calls(
        *(call_of(name, net=net, backward=None if name == "b" else Part(7)) for name, net in nets.items())
    )
    shown = full.with_actions(tiled, {"a": SELECTIVE, "b": SELECTIVE, "d": SELECTIVE})
    assert [call.needs for call in shown.calls] == [{SELECTIVE: Needs(50, 30, 0, 7)}, {}, {}]
    assert [dataclasses.replace(call, needs={}) for call in shown.calls] == [*full.calls]


def test_steps_that_tell_nothing():
    """Steps without an end, with a repeated backward, with a forward between backwards, or with swapped backwards."""
    levels = Machine(3).levels([FULL] * 3)
    first = next(place for place, level in enumerate(levels) if level.what is Boundary.BACKWARD)
    until, later = levels[: first + 1], levels[first + 1 :]
    between = [Level(Boundary.FORWARD, "b0"), Level(Boundary.FORWARDED, "b0")]
    swapped = [later[1], later[0], *later[2:]]
    assert step_of(levels) is not None
    for rest in (later[:-1], [until[-1], *later], [*between, *later], swapped):
        assert step_of([*until, *rest]) is None
    assert step_of([]) is None


def test_what_a_recomputation_under_an_action_needs():
    """Its forward, or what that keeps and its backward."""
    call = Call(("b0", 0), True, Part(5), Part(), Part(100, 0, 9))
    trial = Needs(forward_peak=30, kept=20, kept_casts=4, arrival=3, forward_nanoseconds=2, backward_nanoseconds=7)
    assert call.as_it_ran() == Needs(5, 0, 0, 100, backward_nanoseconds=9)
    for backward_peak, peak in ((60, 84), (2, 33)):
        tried = dataclasses.replace(trial, backward_peak=backward_peak)
        assert call.recomputed(tried) == Needs(5, 0, 0, peak, backward_nanoseconds=9)


def test_a_smaller_batch_tells_what_a_larger_one_needs():
    """Its step is scaled, and so is what was tried in it."""
    small, large = (
        Machine(4, 10, 4 * n, 40 * n, 40 * n, 8 * n, 20 * n, gradients=0, head=30 * n, loss=25 * n) for n in (4, 5)
    )
    full, smaller = (
        step_of([dataclasses.replace(level, nanoseconds=0) for level in machine.levels([FULL] * 4)])
        for machine in (large, small)
    )
    scaled = smaller.scaled(1.25)
    assert scaled.calls == full.calls
    assert scaled.at_backward_bytes >= full.at_backward_bytes
    assert scaled.start_bytes == full.start_bytes
    known = measured(small, batch_of(80))
    real = step_of(large.levels([FULL, KEEP, FULL, FULL])).peak_bytes
    assert real <= known.costs(batch_of(100)).peak({"b1": KEEP}) <= 1.3 * real


@pytest.mark.parametrize("length", [0.5, 0.7, 1.0, 1.1])
def test_bytes_at_a_length_follow_from_three_others(length):
    """Whether they grow with the length or its square. A single length gives a bound."""

    def trial(length, backward=True):
        scores = round(40_000 * length**2)
        return Needs(9000 + scores, round(7000 * length), 50, scores + 30 if backward else None, round(1000 * length))

    known = {other / length: trial(other) for other in (0.6, 0.8, 1.0)}
    assert needs_between(known) == trial(length)
    assert needs_between({**known, 0.9 / length: trial(0.9, backward=False)}) == trial(length)
    for other in (0.6, 1.2):
        bound = needs_between({other / length: trial(other)})
        assert bound.kept >= trial(length).kept
        assert bound.backward_peak >= trial(length).backward_peak


@pytest.mark.parametrize("resident", [False, True])
def test_each_sort_of_micro_step_shows_what_it_needs(resident):
    """The first micro-step allocates gradients in its backward, and later ones begin with them."""
    machines = {False: Machine(gradients=40), True: Machine(start=170, gradients=0)}
    known = blocks_of(machines[False])
    for before, machine in machines.items():
        measured(machine, batch_of(8, before), known)
    predicted = known.costs(batch_of(8, resident)).peak(dict.fromkeys(known.blocks, KEEP))
    assert predicted == step_of(machines[resident].levels([KEEP] * 4)).peak_bytes


def test_what_is_alive_between_steps_may_fall_again():
    """Such as the logits of an evaluation, which a variable held when a step began."""
    known = measured(Machine(start=500), batch_of(8))
    known.learn_start(batch_of(8), 10)
    machine = Machine(start=10)
    assert known.costs(batch_of(8)).peak({}) == step_of(machine.levels([FULL] * 4)).peak_bytes


def test_the_median_of_a_call_counts_in_timed_steps():
    """A stall of three seconds in one call changes nothing. Times of another batch size are forgotten."""
    machine = Machine(6)
    levels, known = machine.levels([FULL] * 6), blocks_of(machine)

    def learn(tokens, nanoseconds, stalled=None):
        batch = batch_of(tokens)
        times = [3 * 10**9 if place == stalled else nanoseconds for place in range(len(levels))]
        pairs = zip(levels, times, strict=True)
        step = step_of([dataclasses.replace(level, nanoseconds=spent) for level, spent in pairs])
        known.learn_forwards(batch, step)
        known.learn_times(batch, step, {"b2": KEEP})
        costs = known.costs(batch)
        return step_nanoseconds(costs, costs.uniform(FULL))

    parts = len(levels) - 1
    a_forward = 2
    assert [learn(8, 100, stalled) for stalled in (None, a_forward, a_forward + 4)] == [100 * parts] * 3
    assert learn(16, 200) == 200 * parts


def test_blocks_take_turns_with_other_actions_in_timed_steps():
    """Each timed step begins with another action, the first with the one that keeps least."""
    known = measured(Machine(6), batch_of(8))
    first = known.actions_to_time(batch_of(8), 10**9)
    known.timed += 1
    second = known.actions_to_time(batch_of(8), 10**9)
    assert "b5" not in first
    assert [first[f"b{number}"] for number in (4, 3, 2)] == [KEEP, SELECTIVE, FULL_SELECTIVE]
    assert [second[f"b{number}"] for number in (5, 4, 3)] == [KEEP, SELECTIVE, FULL_SELECTIVE]
    assert not known.actions_to_time(batch_of(8), 0)


def test_every_action_is_timed_although_few_blocks_can_keep_much():
    """Plans never choose actions without a time."""
    known = measured(Machine(8), batch_of(8))
    limit = known.costs(batch_of(8)).peak({"b5": SELECTIVE})
    assert known.costs(batch_of(8)).peak({"b6": KEEP}) > limit  # only the last block can keep everything
    timed = set()
    for known.timed in range(TIMED_STEPS):
        timed.update(known.actions_to_time(batch_of(8), limit).values())
    assert timed - {known.least} == {KEEP, SELECTIVE, FULL_SELECTIVE}


def test_an_action_that_keeps_more_may_be_slower():
    """Nothing makes it look faster: a host may need longer to rebuild than a device to recompute."""
    machine, batch = Machine(), batch_of(8)
    known = measured(machine, batch)
    for action, nanoseconds in ((FULL, 100), (SELECTIVE, 124), (KEEP, 80)):
        levels = [dataclasses.replace(level, nanoseconds=nanoseconds) for level in machine.levels([action] * 4)]
        known.learn_times(batch, step_of(levels), dict.fromkeys(known.blocks, action))
    costs = known.costs(batch)
    spent = {action: step_nanoseconds(costs, costs.uniform(action)) for action in (KEEP, FULL, SELECTIVE)}
    assert list(spent.values()) == sorted(spent.values())
    limit = costs.peak(dict.fromkeys(known.blocks, SELECTIVE))
    assert Planner([costs]).within(limit).choice != costs.uniform(SELECTIVE)
