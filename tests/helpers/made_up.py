"""Random but consistent costs to plan with."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import strategies as st

from hf_ckpt.costs.costs import BlockCost, Costs, Phase, StackCosts, Static
from hf_ckpt.costs.timeline import worst_timeline
from hf_ckpt.planner.choose import smallest
from hf_ckpt.spec.actions import FULL, KEEP, Action
from hf_ckpt.spec.plan import Block

LADDERS = {
    2: (KEEP, FULL),
    3: (KEEP, Action("selective", ("linear",)), FULL),
    4: (KEEP, Action("selective", ("linear", "attention")), Action("selective", ("attention",)), FULL),
}
"""Number of actions -> the actions, from most bytes to least."""
DEPTHS = {2: 6, 3: 5, 4: 4}
"""Number of actions -> number of blocks in all, so that every choice can be tried."""


def blocks_of(name, count):
    """Blocks of one kind in a stack."""
    return tuple(Block(f"{name}.layers.{index}", name, index, "SomeLayer") for index in range(count))


def ends_of(costs):
    """The lowest peak, and the peak of keeping everything, or the lowest if that is larger."""
    low, high = (worst_timeline(costs, choice).peak_bytes for choice in (smallest(costs), costs.uniform(0)))
    return low, max(low, high)


def made_up(seed, rows, *, frozen=(), actions=4, accumulation=1, largest=9):
    """Random but consistent costs.

    `rows`: for every stack, the kind of each of its blocks. `frozen`: for every stack, the kinds without a choice.
    """
    rng = random.Random(seed)

    def work(bias=0, gradients=None, nanoseconds=0):
        """A phase: live bytes go up and down, finished gradients only grow."""
        others = [rng.randint(-2, largest) + bias * number for number in range(rng.randint(1, 3))]
        done = sorted(rng.randint(0, gradients or 0) for _ in others)
        if gradients is not None:
            done[-1] = gradients
        return Phase(tuple(zip(others, done, strict=True)), nanoseconds + rng.randint(0, 5))

    def block(kind, action, still, gradients):
        forward = work(bias=(actions - action) * 2, nanoseconds=action)
        backward = Phase() if kind in still else work(gradients=gradients[kind], nanoseconds=action * 3)
        return BlockCost(forward, backward, rng.randint(0, largest // 2))

    stacks, everything = [], 0
    for number, row in enumerate(rows):
        kinds = range(max(row) + 1)
        still = frozen[number] if frozen else ()
        choices = tuple((0,) if kind in still else tuple(range(actions)) for kind in kinds)
        gradients = tuple(0 if kind in still else rng.randint(0, largest) for kind in kinds)
        keys = [(kind, action) for kind in kinds for action in choices[kind]]
        first, inner, last = ({key: block(*key, still, gradients) for key in keys} for _ in range(3))
        before_gradients = rng.randint(0, largest)
        stacks.append(
            StackCosts(
                name=("encoder", "decoder")[number + 2 - len(rows)],
                blocks=blocks_of(("encoder", "decoder")[number + 2 - len(rows)], len(row)),
                kinds=tuple(row),
                choices=choices,
                first=first,
                inner=inner,
                last=last,
                gradients=gradients,
                before=work(),
                before_backward=work(gradients=before_gradients),
                at_backward_bytes=rng.randint(-2, largest),
                shared_bytes=rng.randint(0, largest // 2),
                before_at_backward_bytes=rng.randint(-2, largest),
            )
        )
        everything += before_gradients + sum(gradients[kind] for kind in row)
    behind = rng.randint(0, largest)
    static = Static(
        parameters=rng.randint(0, 50),
        buffers=rng.randint(0, 5),
        optimizer=rng.randint(0, 50),
        gradients=everything + behind,
        batch=rng.randint(0, 5),
        step_bytes=rng.randint(0, largest),
    )
    return Costs(
        family="llama",
        model="SomeModel",
        actions=LADDERS[actions],
        stacks=tuple(stacks),
        head=(work(), work(gradients=behind)),
        static=static,
        tokens=rng.randint(0, 100),
        accumulation=accumulation,
        optimizer_nanoseconds=rng.randint(0, 5),
    )


def as_of_real_blocks(costs, rng, *, lent=0, held=0, most_blocks=None):
    """Costs as of real models: a block costs the same at every place, and recomputes what it does not keep.

    `lent`: most bytes of a block that last until the forward ends; `held`: until the backward ends. `most_blocks`: how
    many blocks may have the second of three or more actions.
    """
    stacks = []
    for stack in costs.stacks:
        one = dict(stack.inner)
        for kind, action in one:
            cost = one[kind, action]
            sizes = sorted((one[kind, other].forward.net for other in stack.choices[kind]), reverse=True)
            net = sizes[stack.choices[kind].index(action)]
            forward = dataclasses.replace(cost.forward, points=(*cost.forward.points, (net, 0)))
            again = [(other + sizes[0] - net, done) for other, done in cost.backward.points]
            backward = dataclasses.replace(cost.backward, points=tuple(again))
            lends = rng.randint(0, lent)
            one[kind, action] = dataclasses.replace(cost, forward=forward, backward=backward, forward_only_bytes=lends)
        stacks.append(
            dataclasses.replace(
                stack,
                first=one,
                inner=one,
                last=one,
                held=tuple(rng.randint(0, held) for _ in stack.gradients) if held else (),
                most_blocks={} if most_blocks is None or len(costs.actions) < 3 else {1: most_blocks},
            )
        )
    return dataclasses.replace(costs, stacks=tuple(stacks))


@st.composite
def some_costs(draw, most=None):
    """One or two stacks of one or two kinds, the first perhaps frozen; few enough blocks to try every choice.

    Some costs are arbitrary, others like those of real blocks.
    """
    actions = draw(st.integers(2, 4))
    depth = draw(st.integers(1, most or DEPTHS[actions]))
    first = draw(st.integers(1, depth))
    rows, frozen = [], []
    for length in [first, depth - first]:
        if length:
            still = draw(st.integers(0, length))  # kind 0, which may be frozen, comes first
            row = [0] * still + draw(st.lists(st.integers(0, 1), min_size=length - still, max_size=length - still))
            is_frozen = still > 0 and draw(st.booleans())
            rows.append([kind or int(is_frozen and place >= still) for place, kind in enumerate(row)])
            frozen.append((0,) if is_frozen else ())
    costs = made_up(
        draw(st.integers(0, 2**20)),
        rows,
        frozen=frozen,
        actions=actions,
        accumulation=draw(st.integers(1, 2)),
        largest=draw(st.sampled_from([2, 9, 40])),
    )
    if not draw(st.booleans()):
        return costs
    rng = random.Random(draw(st.integers(0, 2**20)))
    lent, held = draw(st.sampled_from([0, 5])), draw(st.sampled_from([0, 5]))
    return as_of_real_blocks(costs, rng, lent=lent, held=held, most_blocks=draw(st.sampled_from([None, 1])))
