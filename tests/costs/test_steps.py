"""Costs from measured steps: a simulated machine needs exactly what a few of its steps predict."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_ckpt.costs.costs import costs_of_step, step_nanoseconds, timeline
from hf_ckpt.costs.steps import Change, changes_of, joined
from hf_ckpt.measure.levels import Level, step_of
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE
from hf_ckpt.spec.plan import Block
from hf_ckpt.training.batches import Batch, Forward
from hf_ckpt.training.measurements import Measurements, choice_of

ACTIONS = (KEEP, SELECTIVE, FULL)
SHARES = {KEEP: 0.5, SELECTIVE: 0.75, FULL: 1.0}
"""Time of forward and backward relative to `full`."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A simulated machine: the bytes that its steps need."""

    blocks: int
    start: int
    hidden: int
    kept: dict
    """Action -> bytes that a block keeps besides its input."""
    work: int
    """Temporary bytes of a forward."""
    again: int
    """Bytes that a block's backward needs besides what it keeps under `keep`."""
    cast: int
    """A block's copies of weights: under `keep` they live until its backward, otherwise until the forward ends."""
    gradients: int
    head: int
    graph_from: int = 0
    """The first block with a graph."""

    def levels(self, plan):
        """The memory levels at the boundaries of a step; `plan` has an action for each block."""
        level, found, peak = self.start, [], self.start

        def mark(what, block="", has_graph=True, nanoseconds=0):
            nonlocal peak
            found.append(Level(what, block, has_graph, level, max(peak, level), nanoseconds))
            peak = level

        def need(size):
            nonlocal peak
            peak = max(peak, level + size)

        mark("begin")
        level += 3
        for number, action in enumerate(plan):
            graph = number >= self.graph_from
            mark("forward", f"b{number}", number > self.graph_from)
            need(self.work + self.kept[KEEP])
            level += (self.hidden + self.kept[action] if graph else 0) + self.cast
            mark("forwarded", f"b{number}", graph, 10)
        need(self.head)
        with_casts = [action == KEEP and number >= self.graph_from for number, action in enumerate(plan)]
        level -= self.cast * (len(plan) - sum(with_casts))
        for number in range(len(plan) - 1, self.graph_from - 1, -1):
            mark("backward", f"b{number}")
            need(self.again + self.kept[KEEP] - self.kept[plan[number]] + self.gradients)
            level += self.gradients - self.hidden - self.kept[plan[number]] - self.cast * with_casts[number]
        mark("end")
        return found


machines = st.builds(
    lambda blocks, start, hidden, most, less, work, again, cast, gradients, head, graph_from: Machine(
        blocks,
        start,
        hidden,
        {KEEP: most + less, SELECTIVE: less, FULL: 0},
        work,
        again,
        cast,
        gradients,
        head,
        min(graph_from, blocks - 3),
    ),
    st.integers(3, 7),
    *[st.integers(0, 1000)] * 9,
    st.integers(0, 2),
)


@given(machines, st.data())
def test_every_plan_needs_what_three_steps_have_shown(machine, data):
    """One step under `full` and one per other action predict the peak of every plan to the byte.

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
    kinds = dict.fromkeys(full.names, 0)
    blocks = [Block(f"b{number}", "decoder", number, "Made") for number in range(depth)]
    costs = costs_of_step(full, blocks, kinds, changes, {}, ACTIONS)
    plan = [data.draw(st.sampled_from(ACTIONS)) for _ in range(depth)]
    real = step_of(machine.levels(plan)).peak_bytes
    choice = choice_of(costs, {f"b{number}": action for number, action in enumerate(plan)})
    assert timeline(costs, choice).peak_bytes == max(real, full.start_bytes)


def test_steps_that_tell_nothing():
    """Steps without an end, with a repeated backward, or with a forward between backwards are not used."""
    machine = Machine(3, 10, 1, {KEEP: 5, SELECTIVE: 2, FULL: 0}, 1, 1, 0, 1, 1)
    levels = machine.levels([FULL] * 3)
    assert step_of(levels) is not None
    assert step_of(levels[:-1]) is None
    backward = next(place for place, level in enumerate(levels) if level.what == "backward")
    assert step_of([*levels[: backward + 1], levels[backward], *levels[backward + 1 :]]) is None
    between = [Level("forward", "b0"), Level("forwarded", "b0")]
    assert step_of([*levels[: backward + 1], *between, *levels[backward + 1 :]]) is None
    assert step_of([]) is None
    first, second = (
        place
        for place, level in enumerate(levels)
        if (level.block == "b1" and level.what == "backward") or (level.block == "b0" and level.what == "backward")
    )
    swapped = [*levels]
    swapped[first], swapped[second] = levels[second], levels[first]
    assert step_of(swapped) is None  # backwards not in the reverse order of forwards


def test_blocks_that_are_skipped_at_random_count_once_they_were_seen():
    machine = Machine(4, 10, 3, {KEEP: 100, SELECTIVE: 50, FULL: 0}, 1, 20, 0, 2, 30)
    whole = step_of(machine.levels([FULL] * 4))
    some, others = (
        dataclasses.replace(whole, calls=tuple(whole.calls[n] for n in kept)) for kept in ((0, 3), (1, 2, 3))
    )
    some = dataclasses.replace(some, at_backward_bytes=whole.at_backward_bytes - 2 * machine.hidden)
    found = joined(some, others, {}, ["b0", "b1", "b2", "b3"])
    assert found.names == whole.names
    assert found.at_backward_bytes == whole.at_backward_bytes
    assert found.calls[-1].behind == whole.calls[-1].behind
    assert joined(some, others, dict.fromkeys(others.names, KEEP), ["b0", "b1", "b2", "b3"]) is some


def test_changes_grow_with_what_a_block_needs():
    machine = Machine(4, 10, 1, {KEEP: 100, SELECTIVE: 50, FULL: 0}, 1, 20, 0, 1, 1)
    call = step_of(machine.levels([FULL] * 4)).calls[1]
    change = Change(10, 20, 3, -30, scale=call.backward.peak)
    assert change.at(call) is change
    twice = dataclasses.replace(call, backward=dataclasses.replace(call.backward, peak=2 * call.backward.peak))
    assert change.at(twice) == Change(20, 40, 6, -60, scale=2 * call.backward.peak)


def test_changes_take_what_grows_beyond_the_batch():
    """On a longer batch of as many tokens, all that the backward needs in addition may be kept."""
    machine = Machine(4, 10, 1, {KEEP: 100, SELECTIVE: 50, FULL: 0}, 1, 20, 0, 1, 1)
    call = step_of(machine.levels([FULL] * 4)).calls[1]
    size = call.backward.peak
    longer = dataclasses.replace(call, backward=dataclasses.replace(call.backward, peak=size + 40))
    grown = Change(10, 20, 0, -20, scale=size, growth=1.0).at(longer)
    assert grown.forward_net == 60
    assert grown.backward_peak + grown.forward_net <= 1  # rounded up


def test_a_scaled_step_bounds_that_of_a_larger_batch():
    small = step_of(Machine(3, 10, 10, {KEEP: 50, SELECTIVE: 20, FULL: 0}, 4, 8, 0, 2, 30).levels([FULL] * 3))
    large = step_of(Machine(3, 10, 12, {KEEP: 60, SELECTIVE: 24, FULL: 0}, 5, 10, 0, 2, 36).levels([FULL] * 3))
    found = small.scaled(1.25)
    pairs = zip(found.calls, large.calls, strict=True)
    assert all(mine.backward.peak >= its.backward.peak and mine.forward.peak >= its.forward.peak for mine, its in pairs)
    assert found.at_backward_bytes >= large.at_backward_bytes
    assert found.start_bytes == small.start_bytes


def test_times_are_those_under_full_and_shares_of_them():
    machine = Machine(4, 10, 1, {KEEP: 5, SELECTIVE: 2, FULL: 0}, 1, 1, 0, 1, 1)
    levels = [dataclasses.replace(level, nanoseconds=100) for level in machine.levels([FULL] * 4)]
    full = step_of(levels)
    kinds = dict.fromkeys(full.names, 0)
    blocks = [Block(f"b{number}", "decoder", number, "Made") for number in range(4)]
    changes = {(0, action): Change() for action in ACTIONS}
    ratios = {(0, action): share for action, share in SHARES.items()}
    costs = costs_of_step(full, blocks, kinds, changes, ratios, ACTIONS)
    chosen = {action: {block.name: action for block in blocks} for action in ACTIONS}
    spent = {action: step_nanoseconds(costs, choice_of(costs, chosen[action])) for action in ACTIONS}
    assert spent[FULL] == sum(level.nanoseconds for level in levels[1:])
    assert spent[FULL] - spent[KEEP] == 4 * 200 * (1 - SHARES[KEEP])
    assert spent[FULL] - spent[SELECTIVE] == 4 * 200 * (1 - SHARES[SELECTIVE])


def test_of_several_timed_steps_the_shortest_times_count():
    """Of several timed steps, the shortest times count, so a stall of three seconds changes nothing."""
    levels = Machine(4, 10, 1, {KEEP: 5, SELECTIVE: 2, FULL: 0}, 1, 1, 0, 1, 1).levels([FULL] * 4)
    blocks = {f"b{number}": Block(f"b{number}", "decoder", number, "Made") for number in range(4)}
    base = nn.ModuleDict({name: nn.Identity() for name in blocks})
    known = Measurements(base, blocks, ACTIONS, "Made")
    batch, longer = (Batch((Forward("decoder", (("input_ids", (2, tokens)),), False),), False) for tokens in (8, 16))

    def learn(batch, nanoseconds, stalled):
        step = step_of(
            [
                dataclasses.replace(level, nanoseconds=3 * 10**9 if stalled == place else nanoseconds)
                for place, level in enumerate(levels)
            ]
        )
        if batch not in known.full:
            known.learn_full(batch, step)
        known.learn_times(batch, step, {"b2": KEEP})
        costs = known.costs(batch)
        return step_nanoseconds(costs, choice_of(costs, dict.fromkeys(blocks, FULL)))

    took = learn(batch, 100, None)
    assert took == 100 * (len(levels) - 1)
    ahead_of_blocks, behind_them = 1, len(levels) - 1 - 4
    assert [learn(batch, 100, place) for place in (ahead_of_blocks, behind_them)] == [took, took]
    assert learn(batch, 90, behind_them) < took
    assert learn(longer, 200, None) == 2 * took  # times of shorter batches are forgotten
