"""Which of many actions a plan is given to choose from."""

from __future__ import annotations

import pytest

from hf_ckpt.prediction.ladder import LEAST_GAIN, MOST, rungs

KEEP, FULL = (1, 100, 1000), (1, 0, 2000)


def with_finer(*finer):
    return [[KEEP, FULL, *finer]]


def test_only_what_lies_below_the_others_is_added():
    """Half of the bytes take 1500 by a mixture of both ends."""
    assert rungs(with_finer((1, 50, 1400)), 2) == [0, 2, 1]
    assert rungs(with_finer((1, 50, 1500)), 2) == [0, 1]
    assert rungs(with_finer((1, 50, 1600)), 2) == [0, 1]
    assert rungs(with_finer((1, 100, 1000)), 2) == [0, 1]  # what keeps all as `keep` does
    assert rungs(with_finer((1, 0, 1900)), 2) == [0, 1, 2]  # as little as `full`, and faster


def test_a_small_gain_does_not_pay():
    least = round(1000 * LEAST_GAIN)
    assert rungs(with_finer((1, 50, 1500 - least)), 2) == [0, 2, 1]
    assert rungs(with_finer((1, 50, 1500 - least + 1)), 2) == [0, 1]


def test_what_gains_most_comes_first_and_then_what_still_gains():
    """Beside the action with 1100, that with 1350 lies above the line to `keep`, and is worth nothing any more."""
    assert rungs(with_finer((1, 25, 1700), (1, 50, 1100), (1, 25, 1350)), 2) == [0, 3, 4, 1]
    assert rungs(with_finer((1, 40, 1350), (1, 50, 1100)), 2) == [0, 3, 1]
    assert rungs(with_finer((1, 20, 1100), (1, 40, 1060), (1, 60, 1030), (1, 80, 1010)), 2)[1:-1] != []


def test_no_more_than_a_few_are_added():
    curve = [(1, size, 1000 + (100 - size) ** 2 // 10) for size in range(10, 100, 10)]
    found = rungs(with_finer(*curve), 2)
    assert len(found) == 2 + MOST
    kept = [[KEEP, FULL, *curve][number][1] for number in found]
    assert kept == sorted(kept, reverse=True)


@pytest.mark.parametrize("blocks", [1, 12])
def test_stacks_count_by_their_blocks(blocks):
    """The second action pays in one stack only, whose share of the time decides."""
    flat = [(100, 100, 1000), (100, 0, 2000), (100, 50, 1500)]
    gains = [(blocks, 100, 1000), (blocks, 0, 2000), (blocks, 50, 1400)]
    assert rungs([flat, gains], 2) == ([0, 2, 1] if blocks == 12 else [0, 1])


def test_without_a_stack_that_saves_anything():
    assert rungs([], 4) == [0, 1, 2, 3]
