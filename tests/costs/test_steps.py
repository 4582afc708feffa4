"""Costs from measured steps: a simulated machine needs exactly what a few of its steps predict."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_ckpt.costs.costs import costs_of_step, step_nanoseconds, timeline
from hf_ckpt.costs.steps import Call, Change, Part, changes_of, joined
from hf_ckpt.measure.levels import Level, step_of
from hf_ckpt.models.blocks import FoundBlocks
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE
from hf_ckpt.spec.plan import Block
from hf_ckpt.training.batches import Batch, Forward
from hf_ckpt.training.measurements import Measurements

ACTIONS = (KEEP, SELECTIVE, FULL)
SHARES = {KEEP: 0.5, SELECTIVE: 0.75, FULL: 1.0}
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
    frozen: int = 0  # the number of first blocks without a graph, at most all but three

    def levels(self, plan):
        """The memory levels at the boundaries of a step; `plan` has an action for each block."""
        kept = {KEEP: self.selective + self.more, SELECTIVE: self.selective, FULL: 0}
        frozen = min(self.frozen, self.blocks - 3)
        level, found, peak, spent = self.start, [], self.start, 0

        def mark(what, block="", has_graph=True):
            nonlocal peak, spent
            found.append(Level(what, block, has_graph, level, max(peak, level), spent))
            peak, spent = level, 0

        def need(size, nanoseconds):
            nonlocal peak, spent
            peak, spent = max(peak, level + size), nanoseconds

        mark("begin")
        need(3, 7)
        level += 3
        for number, action in enumerate(plan):
            graph = number >= frozen
            mark("forward", f"b{number}", number > frozen)
            need(self.work + (kept[action] if graph else 0), 100)
            level += (self.hidden + kept[action] if graph else 0) + self.cast
            mark("forwarded", f"b{number}", graph)
            need(0, 10)
        need(self.head, 50)
        with_casts = [action == KEEP and number >= frozen for number, action in enumerate(plan)]
        level -= self.cast * (len(plan) - sum(with_casts))
        for number in range(len(plan) - 1, frozen - 1, -1):
            mark("backward", f"b{number}")
            size = self.again + kept[KEEP] - kept[plan[number]] + self.gradients
            need(size, round(300 * SHARES[plan[number]]) - 100)
            level += self.gradients - self.hidden - kept[plan[number]] - self.cast * with_casts[number]
        mark("end")
        return found


@given(st.builds(Machine, st.integers(3, 7), *[st.integers(0, 1000)] * 9, st.integers(0, 2)), st.data())
def test_every_plan_needs_what_three_steps_have_shown(machine, data):
    """One step under `full` and one per other action predict the peak of every plan to the byte, and its time.

    This includes frozen blocks, gradients that grow as activations are freed, and copies of weights that live as long
    as autocast or the graph.
    """
    depth = machine.blocks
    full = step_of(machine.levels([FULL] * depth))
    tried = depth - 2
    changes = {}
    for action in (KEEP, SELECTIVE):
        plan = [action if number == tried else FULL for number in range(depth)]
        (change,) = changes_of(full, step_of(machine.levels(plan)), {(f"b{tried}", 0): action}, alike=True).values()
        changes[0, action] = change
    kinds, ratios = dict.fromkeys(full.names, 0), {(0, action): share for action, share in SHARES.items()}
    blocks = [Block(f"b{number}", "decoder", number, "Made") for number in range(depth)]
    costs = costs_of_step(full, blocks, kinds, changes, ratios, ACTIONS)
    plan = [data.draw(st.sampled_from(ACTIONS)) for _ in range(depth)]
    real = step_of(machine.levels(plan)).peak_bytes
    choice = costs.choice({f"b{number}": action for number, action in enumerate(plan)})
    assert timeline(costs, choice).peak_bytes == max(real, full.start_bytes)
    assert step_nanoseconds(costs, choice) == sum(level.nanoseconds for level in machine.levels(plan))


def test_steps_that_tell_nothing():
    """Steps without an end, with a repeated backward, with a forward between backwards, or with swapped backwards."""
    levels = Machine(3).levels([FULL] * 3)
    first = next(place for place, level in enumerate(levels) if level.what == "backward")
    until, later = levels[: first + 1], levels[first + 1 :]
    between = [Level("forward", "b0"), Level("forwarded", "b0")]
    swapped = [later[1], later[0], *later[2:]]
    assert step_of(levels) is not None
    for rest in (later[:-1], [until[-1], *later], [*between, *later], swapped):
        assert step_of([*until, *rest]) is None
    assert step_of([]) is None


def test_blocks_that_are_skipped_at_random_count_once_they_were_seen():
    machine = Machine()
    whole = step_of(machine.levels([FULL] * 4))
    some, others = (
        dataclasses.replace(whole, calls=tuple(whole.calls[n] for n in kept)) for kept in ((0, 3), (1, 2, 3))
    )
    some = dataclasses.replace(some, at_backward_bytes=whole.at_backward_bytes - 2 * machine.hidden)
    found = joined(some, others, {}, ["b0", "b1", "b2", "b3"])
    assert (found.names, found.at_backward_bytes) == (whole.names, whole.at_backward_bytes)
    assert found.calls[-1].behind == whole.calls[-1].behind
    assert joined(some, others, dict.fromkeys(others.names, KEEP), ["b0", "b1", "b2", "b3"]) is some


@pytest.mark.parametrize(
    ("size", "growth", "expected"),
    [
        pytest.param(100, 0.0, Change(10, 20, 3, -30), id="the same"),
        pytest.param(200, 0.0, Change(20, 40, 6, -60), id="twice as large"),
        # All that the backward needs in addition may be kept.
        pytest.param(140, 1.0, Change(46, 60, 5, -74), id="longer, with as many tokens"),
        pytest.param(180, 2.0, Change(22, 40, 6, -58), id="gradients of weights do not grow"),
    ],
)
def test_changes_grow_with_what_a_block_needs(size, growth, expected):
    call = Call(("b0", 0), True, Part(), Part(), Part(size))
    change = Change(10, 20, 3, -30, scale=100, growth=growth)
    assert change.at(call) == dataclasses.replace(expected, scale=size)


def test_a_smaller_batch_tells_what_a_larger_one_needs():
    """Its step is scaled; a trial on it is compared with what it needs under `full`."""
    small, large = (Machine(4, 10, 4 * n, 40 * n, 40 * n, 8 * n, 20 * n, gradients=0, head=30 * n) for n in (4, 5))
    full, scaled = step_of(large.levels([FULL] * 4)), step_of(small.levels([FULL] * 4)).scaled(1.25)
    assert scaled.calls == full.calls
    assert scaled.at_backward_bytes >= full.at_backward_bytes
    assert scaled.start_bytes == full.start_bytes
    plan, tried = [FULL, KEEP, FULL, FULL], {("b1", 0): KEEP}
    (same,) = changes_of(full, step_of(large.levels(plan)), tried, alike=True).values()
    (other,) = changes_of(full, step_of(small.levels(plan)), tried, alike=False).values()
    assert dataclasses.replace(other.at(full.calls[1]), later=same.later) == same


def nothing_measured():
    """The measurements of a model of four blocks, before the first."""
    blocks = tuple(Block(f"b{number}", "decoder", number, "Made") for number in range(4))
    modules = {block.name: nn.Identity() for block in blocks}
    return Measurements(FoundBlocks(nn.Identity(), "generic", blocks, modules, ()), ACTIONS, {})


def batch_of(tokens, resident=False):
    return Batch((Forward("decoder", (("input_ids", (2, tokens)),), False),), resident)


@pytest.mark.parametrize("tried_on", [False, True])
def test_what_a_micro_step_shows_holds_for_the_others(tried_on):
    """The first micro-step allocates gradients in its backward, and later ones begin with them; blocks keep the same.

    `tried_on` says which of them shows it: whether it begins with gradients.
    """
    known = nothing_measured()
    machines = {False: Machine(gradients=40), True: Machine(start=170, gradients=0)}
    for resident, machine in machines.items():
        known.learn_full(batch_of(8, resident), step_of(machine.levels([FULL] * 4)))
    trial = step_of(machines[tried_on].levels([FULL, FULL, KEEP, FULL]))
    assert known.learn_trial(batch_of(8, tried_on), trial, {"b2": KEEP})
    for resident, machine in machines.items():
        predicted = known.costs(batch_of(8, resident)).peak(dict.fromkeys(known.blocks, KEEP))
        assert predicted == step_of(machine.levels([KEEP] * 4)).peak_bytes


def test_of_several_timed_steps_the_shortest_times_count():
    """A stall of three seconds changes nothing. Times of a shorter batch are forgotten."""
    levels, known = Machine().levels([FULL] * 4), nothing_measured()

    def learn(tokens, nanoseconds, stalled=None):
        batch = batch_of(tokens)
        times = [3 * 10**9 if place == stalled else nanoseconds for place in range(len(levels))]
        pairs = zip(levels, times, strict=True)
        step = step_of([dataclasses.replace(level, nanoseconds=spent) for level, spent in pairs])
        known.learn_full(batch, step)
        known.learn_times(batch, step, {"b2": KEEP})
        costs = known.costs(batch)
        return step_nanoseconds(costs, costs.uniform(FULL))

    parts = len(levels) - 1
    before_blocks, behind_them = 1, parts - 4
    assert [learn(8, 100, stalled) for stalled in (None, before_blocks, behind_them)] == [100 * parts] * 3
    assert learn(8, 90, behind_them) < 100 * parts
    assert learn(16, 200) == 200 * parts
