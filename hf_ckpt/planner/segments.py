"""The costs of blocks that are recomputed in segments, from those of single blocks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from hf_ckpt.costs.costs import CallCosts, Cost, Costs
from hf_ckpt.costs.steps import Part
from hf_ckpt.spec.actions import FULL
from hf_ckpt.spec.plan import run_lengths


def in_segments(costs: Costs) -> Iterator[Costs]:
    """`costs` with the blocks of each stack in segments, for every number of segments that can be best. A segment is
    one call under `full`.

    Of all numbers for which the longest segment has the same length, the smallest keeps least. Yields nothing if a
    block is called twice, or may not have the action `full`.
    """
    stacks = [tuple(calls) for _, calls in itertools.groupby(costs.calls, lambda call: call.blocks[0].stack)]
    names = {call.blocks[0].name for call in costs.calls}
    if len(names) < len(costs.calls) or any(FULL not in call.costs for call in costs.calls):
        return
    most = max(map(len, stacks))
    for number in sorted({-(-most // length) for length in range(2, most + 1)}, reverse=True):
        calls: list[CallCosts] = []
        for stack in stacks:
            for length in run_lengths(len(stack), min(number, len(stack))):
                calls.append(_segment(stack[:length]))
                stack = stack[length:]
        places = [place for place, call in enumerate(calls) for _ in call.blocks]
        ends = (dataclasses.replace(end, first=places[end.first], last=places[end.last]) for end in costs.ends)
        yield dataclasses.replace(costs, calls=tuple(calls), ends=tuple(ends), actions=(FULL,))


def _segment(calls: Sequence[CallCosts]) -> CallCosts:
    """A run of calls as one call: it keeps the first one's input. Its backward first makes the inputs of the others."""
    alone = [call.costs[FULL] for call in calls]
    forward, backward = alone[0].forward, Part()
    for cost, before in zip(alone[1:], alone, strict=False):
        input_bytes = max(0, cost.kept_bytes)
        # The output of each further call takes the place of its input, which is freed.
        forward = forward.then(dataclasses.replace(cost.forward, net=cost.forward.net - input_bytes))
        backward = backward.then(dataclasses.replace(before.forward, net=input_bytes))
    for cost in reversed(alone):
        backward = backward.then(cost.backward)
    cost = Cost(forward, backward, sum(cost.lent_bytes for cost in alone))
    blocks = tuple(block for call in calls for block in call.blocks)
    return CallCosts(blocks, sum(call.gradient_bytes for call in calls), {FULL: cost})
