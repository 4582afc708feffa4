"""Random costs to plan with."""

import random

from hypothesis import strategies as st

from hf_ckpt.costs.costs import CallCosts, Cost, Costs, Static, timeline
from hf_ckpt.costs.steps import Part
from hf_ckpt.planner.planner import Planner
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE, Action
from hf_ckpt.spec.plan import Block

ATTENTION = Action("selective", ("attention",))
LADDERS = {2: (KEEP, FULL), 3: (KEEP, SELECTIVE, FULL), 4: (KEEP, SELECTIVE, ATTENTION, FULL)}
"""Number of actions -> the actions, from most bytes to least."""
DEPTHS = {2: 6, 3: 5, 4: 4}
"""Number of actions -> number of blocks in all, so that every choice can be tried."""


def blocks_of(name, count):
    """Blocks of one kind in a stack."""
    return tuple(Block(f"{name}.layers.{index}", name, index, "SomeLayer") for index in range(count))


def ends_of(costs):
    """The lowest peak, and the peak of keeping everything, or the lowest if that is larger."""
    low = Planner([costs]).lowest_peak
    return low, max(low, timeline(costs, costs.uniform(KEEP)).peak_bytes)


def made_up(seed, kinds, *, frozen=0, decoder=0, actions=4, accumulation=1, largest=9, lent=0, freed=0, rebuilt=0):
    """Random costs.

    `kinds`: the kind of each call. The first `frozen` have no choice, the last `decoder` are of another stack. `lent`:
    most bytes of a call that last until the forward ends. `freed`: bytes that the end of a stack may free. `rebuilt`:
    bytes that a call may rebuild from the one before.
    """
    rng = random.Random(seed)

    def part(net=0, nanoseconds=0):
        net += rng.randint(0, largest)
        return Part(max(0, net) + rng.randint(0, largest), net, nanoseconds + rng.randint(0, 5))

    def cost(number):
        kept, lends = (actions - number) * largest // 2, rng.randint(0, lent)
        return Cost(
            part(kept + lends, number), part(-kept, 3 * number), lends, rng.choice((0, freed)), rng.choice((0, rebuilt))
        )

    ladder = LADDERS[actions]
    rows = {kind: {action: cost(number) for number, action in enumerate(ladder)} for kind in sorted({*kinds})}
    still = {KEEP: Cost(part(), Part())}
    blocks = (*blocks_of("encoder", len(kinds) - decoder), *blocks_of("decoder", decoder))
    gradients = {kind: rng.randint(0, largest) for kind in sorted({*kinds})}
    hidden = rng.randint(0, largest)
    return Costs(
        family="llama",
        model="SomeModel",
        actions=ladder,
        calls=tuple(
            CallCosts(block, gradients[kind], still if place < frozen else rows[kind], hidden)
            for place, (block, kind) in enumerate(zip(blocks, kinds, strict=True))
        ),
        before=part(),
        at_backward_bytes=rng.randint(0, largest),
        head=(part(), part()),
        static=Static(rng.randint(0, 50), 40, sum(gradients[kind] for kind in kinds), 8, rng.randint(0, largest)),
        tokens=rng.randint(0, 100),
        accumulation=accumulation,
        optimizer_nanoseconds=rng.randint(0, 5),
    )


@st.composite
def some_costs(draw, most=None, freed=0, rebuilt=0):
    """Up to three kinds of calls, the first ones perhaps frozen; few enough to try every choice."""
    actions = draw(st.integers(2, 4))
    kinds = draw(st.lists(st.integers(0, 2), min_size=1, max_size=most or DEPTHS[actions]))
    return made_up(
        draw(st.integers(0, 2**20)),
        kinds,
        frozen=draw(st.integers(0, len(kinds))),
        decoder=draw(st.integers(0, len(kinds))),
        actions=actions,
        accumulation=draw(st.integers(1, 2)),
        largest=draw(st.sampled_from([2, 9, 40])),
        lent=draw(st.sampled_from([0, 0, 5, 40])),
        freed=draw(st.integers(0, freed)),
        rebuilt=draw(st.integers(0, rebuilt)),
    )
