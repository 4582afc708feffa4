"""What a step is for, and which plan wins a race."""

import itertools

import pytest
import torch
from helpers.tables import table

from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE
from hf_ckpt.spec.plan import Block, Plan, Prediction
from hf_ckpt.training.budget import BudgetWatch
from hf_ckpt.training.phases import MEASURED, MOST_FAILURES, RACE_STEPS, Entrant, Phase, Race, phases_for

PHASES = table(__file__, "phases.yaml")


DONE = {Phase.MEASURE: "has_bytes", Phase.TIME: "has_times", Phase.RACE: "has_raced"}
"""What is known once nothing is left to do in a phase."""


def first_of(phases, known):
    """The first of these phases in which something is left to do."""
    return next(phase for phase in phases if not known.get(DONE.get(phase)))


def phases_in_order(known):
    return phases_for(**{key: value for key, value in known.items() if key not in DONE.values()})


@pytest.mark.parametrize("name", PHASES)
def test_each_step_is_for_what_is_still_to_be_done(name):
    known, expected = PHASES[name]
    assert first_of(phases_in_order(known), known) is Phase(expected)


@pytest.mark.parametrize("swapped", list(itertools.pairwise(phases_for())))
def test_another_order_of_phases_gives_some_steps_another_phase(swapped):
    """So the table lists enough."""
    first, second = swapped
    other = {first: second, second: first}
    phases = [
        (first_of([other.get(phase, phase) for phase in phases_in_order(known)], known), Phase(expected))
        for known, expected in PHASES.values()
    ]
    assert any(phase is not expected for phase, expected in phases)


def test_the_table_is_for_this_number_of_failures():
    assert MOST_FAILURES == 8


def test_only_some_phases_are_measured():
    unmeasured = [phase for phase in Phase if phase not in MEASURED]
    assert unmeasured == [Phase.WARM_UP, Phase.PLAN, Phase.GIVEN_UP, Phase.PAUSED]


def entrant(action, seconds, way, tokens=0):
    actions = ((Block("b0", "decoder", 0, "Made"), action),)
    return Entrant(way, Plan("llama", "Some", actions, Prediction(2**20, seconds, tokens, ())), seconds)


def raced(entrants, spent):
    """A race with these entrants, whose steps take `spent` nanoseconds, in turn; and the actions of each step."""
    race, steps = Race(), []
    while (chosen := race.next(entrants)) is not None:
        action = chosen.plan.actions[0][1]
        steps.append(action)
        race.learn(chosen.plan, entrants, spent[action].pop(0))
    return race, steps


@pytest.mark.parametrize("wait", [0, 7])
def test_whole_steps_decide_whatever_was_predicted(wait):
    """Each plan runs in turn. One slow step decides nothing; and what the winner is said to take is what it took. A
    rank that waits some seconds for a slower one in each step has the same winner as without it."""
    entrants = [entrant(SELECTIVE, 1.0, (KEEP, SELECTIVE, FULL)), entrant(FULL, 2.0, (KEEP, FULL))]
    spent = {SELECTIVE: [3.0, 3.0, 3.0], FULL: [9.0, 2.5, 2.5]}
    race, steps = raced(entrants, {way: [int((wait + own) * 1e9) for own in times] for way, times in spent.items()})
    assert steps == [SELECTIVE, FULL] * RACE_STEPS
    winner = race.winner(entrants)
    assert (winner.plan, winner.seconds) == (entrants[1].plan, wait + 2.5)


def test_where_nothing_was_predicted_the_seconds_of_steps_decide():
    entrants = [entrant(KEEP, 0.0, (KEEP, SELECTIVE, FULL)), entrant(FULL, 0.0, (KEEP, FULL))]
    race, _ = raced(entrants, {KEEP: [2_000_000_000] * 3, FULL: [1_000_000_000] * 3})
    winner = race.winner(entrants)
    assert (winner.plan, winner.seconds) == (entrants[1].plan, 1.0)


def test_where_nothing_was_predicted_a_shorter_batch_takes_less_time():
    def entrants(tokens):
        return [entrant(KEEP, 0.0, (KEEP, FULL), tokens), entrant(FULL, 0.0, (FULL,), tokens)]

    race, _ = raced(entrants(80), {KEEP: [2_000_000_000] * 3, FULL: [1_000_000_000] * 3})
    assert [race.winner(entrants(tokens)).seconds for tokens in (80, 20)] == [1.0, 0.25]


def test_a_batch_of_another_shape_needs_no_race_of_its_own():
    """What was raced says how predictions of a way relate to real steps."""
    entrants = [entrant(SELECTIVE, 1.0, (KEEP, SELECTIVE)), entrant(FULL, 2.0, (KEEP, FULL))]
    race, _ = raced(entrants, {SELECTIVE: [3_000_000_000] * 3, FULL: [2_000_000_000] * 3})
    shorter = [entrant(SELECTIVE, 0.5, (KEEP, SELECTIVE)), entrant(FULL, 1.4, (KEEP, FULL))]
    assert race.next(shorter) is None
    assert race.winner(shorter).plan == shorter[1].plan


def test_equal_plans_run_no_race():
    entrants = [entrant(KEEP, 1.0, (KEEP, FULL)), entrant(KEEP, 1.0, (KEEP,))]
    assert Race().next(entrants) is None
    assert Race().winner(entrants) is entrants[0]


def test_ways_that_make_the_same_plan_share_its_steps():
    entrants = [entrant(KEEP, 1.0, (KEEP, FULL)), entrant(KEEP, 1.0, (KEEP,)), entrant(FULL, 2.0, (FULL,))]
    _, steps = raced(entrants, {KEEP: [1_000_000_000] * 3, FULL: [1_000_000_000] * 3})
    assert steps == [KEEP, FULL] * RACE_STEPS


@pytest.mark.parametrize(
    ("check_every", "noticed", "due"),
    [(5, False, [4, 9, 14]), (5, True, [4, 9, 14]), (1, False, [1, 3, 5]), (100, True, [9, 19]), (0, True, [])],
)
def test_every_n_th_step_is_a_check_and_something_unusual_brings_it_near(check_every, noticed, due):
    watch = BudgetWatch([torch.device("cpu")], check_every)
    checks = []
    for step in range(20):
        if watch.is_due:
            watch.checked()
            checks.append(step)
            continue
        if noticed:
            watch.notice()
        watch.begin()
    assert checks[: len(due)] == due
    assert bool(checks) == bool(due)
