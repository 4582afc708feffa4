"""Parameters sharded over ranks: a step's memory worked out by hand, and exact planning."""

from __future__ import annotations

import itertools
import random

import pytest
from helpers.made_up import blocks_of, made_up

from hf_ckpt.costs.costs import BlockCost, Costs, Phase, StackCosts, Static
from hf_ckpt.costs.timeline import timeline, worst_timeline
from hf_ckpt.planner.choose import fastest, smallest
from hf_ckpt.prediction.fsdp2 import Gathered, Layout, with_shards
from hf_ckpt.spec.actions import KEEP, Action

BLOCK = Gathered(whole=100, cast=50, sent=200, kept=400, summed=100)
OUTSIDE = Gathered(whole=30, cast=15, sent=60, kept=120, summed=30)


def two_blocks():
    """Each block saves 7 and finishes gradients of 80; the head finishes 10, the embedding 20."""
    forward, backward = Phase(((9, 0), (7, 0))), Phase(((5, 0), (-1, 30), (-7, 80)))
    key, cost = (0, 0), BlockCost(forward, backward, output_bytes=2)
    stack = StackCosts(
        name="decoder",
        blocks=blocks_of("decoder", 2),
        kinds=(0, 0),
        choices=((0,),),
        first={key: cost},
        inner={key: cost},
        last={key: cost},
        gradients=(80,),
        before=Phase(((3, 0),)),
        before_backward=Phase(((1, 0), (-3, 20))),
        at_backward_bytes=2,
        shared_bytes=0,
        before_at_backward_bytes=2,
    )
    head = Phase(((6, 0), (4, 0))), Phase(((8, 0), (0, 10)))
    static = Static(parameters=190, buffers=1, optimizer=380, gradients=190, batch=2)
    return Costs(
        "llama", "SomeModel", (KEEP, Action("full")), (stack,), head, static, tokens=1, optimizer_nanoseconds=8
    )


def layout(**changes):
    return Layout(**{"parameters": 95, "optimizer": 190, "kinds": ((BLOCK,),), "outside": OUTSIDE, **changes})


def test_a_step_by_hand():
    costs = with_shards(two_blocks(), layout())
    always = 95 + 190 + 1 + 2 + 30 + 100  # shards, state, buffers, batch, outside parameters, a buffer
    assert costs.static.always == always
    assert costs.static.gradients == 2 * 400 + 120
    found = {moment.label: moment for moment in timeline(costs, ((0, 0),)).moments}
    peaks = {label: moment.peak_bytes - always for label, moment in found.items()}
    assert peaks["embedding"] == 3 + 200  # the first block arrives, which frees the previous buffer
    assert peaks["forward of decoder 0"] == 3 + 200
    assert peaks["forward of decoder 1"] == 3 + 7 + 200
    assert peaks["head and loss"] == 3 + 14 + 6
    head = 3 + 14 + 4
    assert peaks["head and loss, backward"] == head + 15  # outside parameters are gathered and cast again
    # Alive: activations and the head's gradients; at the end also what is sent, and this rank's shard in two dtypes.
    last = 3 + 14 + 10
    assert found["backward of decoder 1"].start_bytes - always == last
    assert peaks["backward of decoder 1"] == last - 7 + 200 + 400 + 100
    assert found["backward of decoder 0"].gradient_bytes == 400
    assert peaks["backward of decoder 0"] == 400 + 3 + 7 + 10 - 7 + 200 + 400 + 100
    assert peaks["embedding, backward"] == 800 + 3 + 2 + 10 - 3 + 20 + 200  # what the first block sent
    assert found["optimizer step"].gradient_bytes == costs.static.gradients
    assert costs.optimizer_nanoseconds == 4


def test_more_outside_than_in_any_block_comes_in_a_larger_buffer():
    costs = two_blocks()
    small, large = (with_shards(costs, layout(outside=Gathered(whole=size))) for size in (100, 170))
    for name in ("embedding", "head and loss, backward"):
        peaks = [
            next(moment.peak_bytes for moment in timeline(found, ((0, 0),)).moments if moment.label == name)
            for found in (small, large)
        ]
        assert peaks[1] - peaks[0] >= 70 + (70 if name == "embedding" else 0)


@pytest.mark.parametrize("seed", range(6))
def test_planning_stays_exact(seed):
    """Planning agrees with trying every plan, and gradients add up to those at the end."""
    rng = random.Random(seed)
    plain = made_up(seed, [[0, 0, 1], [0, 0]] if seed % 2 else [[0, 1, 1, 1]], actions=3, accumulation=1 + seed % 3)
    kinds = [Gathered(*(rng.randint(0, 9) for _ in range(5))) for _ in range(4)]
    costs = with_shards(plain, Layout(rng.randint(0, 20), 5, (tuple(kinds[:2]), tuple(kinds[2:])), kinds[0]))
    stacks = [itertools.product(*(stack.choices[kind] for kind in stack.kinds)) for stack in costs.stacks]
    found = {choice: worst_timeline(costs, choice) for choice in itertools.product(*(list(rows) for rows in stacks))}
    lowest = min(step.peak_bytes for step in found.values())
    assert worst_timeline(costs, smallest(costs)).peak_bytes == lowest
    highest = max(step.peak_bytes for step in found.values())
    for limit in (lowest, (lowest + highest) // 2, highest):
        best = min(step.nanoseconds for step in found.values() if step.peak_bytes <= limit)
        chosen = worst_timeline(costs, fastest(costs, limit))
        assert (chosen.nanoseconds, chosen.peak_bytes <= limit) == (best, True)
    assert fastest(costs, lowest - 1) is None
    one = timeline(costs, smallest(costs)).moments
    assert one[-1].gradient_bytes == one[-2].gradient_bytes + costs.stacks[0].before_backward.gradients
