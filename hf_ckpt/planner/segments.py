"""The costs of blocks that are recomputed in segments, from those of single blocks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from hf_ckpt.costs.costs import CallCosts, Cost, Costs
from hf_ckpt.costs.steps import Part
from hf_ckpt.spec.actions import FULL, KEEP
from hf_ckpt.spec.plan import run_lengths


def in_segments(costs: Costs) -> Iterator[Costs]:
    """`costs` with the blocks of each stack in segments, for every number of segments that can be best. A segment is
    one call under `full`.

    Of all numbers for which the longest segment has the same length, the smallest keeps least. Yields nothing if a
    block is called twice, or may not have the actions `full` and `keep`: a segment runs again under `keep`.
    """
    stacks = [tuple(calls) for _, calls in itertools.groupby(costs.calls, lambda call: call.blocks[0].stack)]
    names = {call.blocks[0].name for call in costs.calls}
    if len(names) < len(costs.calls) or any({KEEP, FULL} - {*call.costs} for call in costs.calls):
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
    """A run of calls as one call: it keeps the first one's input. Its backward first runs all of them under `keep`."""
    alone, again = [call.costs[FULL] for call in calls], [call.costs[KEEP] for call in calls]
    forward = alone[0].forward
    for cost in alone[1:]:
        # The output of each further call takes the place of its input, which is freed.
        net = cost.forward.net - max(0, cost.kept_bytes)
        forward = forward.then(dataclasses.replace(cost.forward, net=net))
    backward = Part()
    for part in (*(cost.forward for cost in again), *(cost.backward for cost in reversed(again))):
        backward = backward.then(part)
    backward = dataclasses.replace(backward, nanoseconds=sum(cost.backward.nanoseconds for cost in alone))
    cost = Cost(forward, backward, sum(cost.lent_bytes for cost in alone))
    blocks = tuple(block for call in calls for block in call.blocks)
    return CallCosts(blocks, sum(call.gradient_bytes for call in calls), {FULL: cost})
