"""Taking turns, with steps whose seconds are made up."""

from __future__ import annotations

import pytest
from turns import fastest, median, ratios, rotated


def taking(log, name, *seconds):
    found = iter(seconds)

    def step():
        log.append(name)
        return next(found)

    return step


def test_ways_alternate_and_the_fastest_step_counts():
    log = []
    found = fastest({"one": taking(log, "one", 3, 1, 2), "other": taking(log, "other", 9, 8, 7)}, steps=3)
    assert found == {"one": 1, "other": 7}
    assert log == ["one", "other"] * 3


def test_a_way_that_fails_has_no_figure():
    assert fastest({"one": taking([], "one", 3, None), "other": taking([], "other", 9, 8)}, steps=2) == {"other": 8}
    assert fastest({"one": taking([], "one", None)}) == {}


@pytest.mark.parametrize(
    ("count", "starts"),
    [(5, [0, 1, 2, 3, 4, 0]), (30, [0, 1, 2, 3, 4, 5]), (2, [0, 3, 0, 3, 0, 3]), (1, [0] * 6)],
)
def test_turns_begin_evenly_spread_over_the_items(count, starts):
    items = ["a", "b", "c", "d", "e", "f"]
    orders = [rotated(items, number % count, count) for number in range(6)]
    assert [order[0] for order in orders] == [items[start] for start in starts]
    assert all(sorted(order) == items for order in orders)
    assert rotated(items, 2, 5) == ["c", "d", "e", "f", "a", "b"]
    assert rotated([], 3, 5) == []


def test_ratios_within_turns_and_their_median():
    assert ratios([2, 9, 8], [1, 3, 2]) == [2, 3, 4]
    assert ratios([2, 9], [1]) == [2]
    assert (median([2, 9, 8]), median([])) == (8, None)
