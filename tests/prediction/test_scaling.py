"""Costs of batch shapes between two that were traced, against costs that were traced for these shapes."""

from __future__ import annotations

import pytest
from helpers.sparing import sparing
from helpers.tracing import CPU, model_of

from hf_ckpt.planner.budgets import peak_of_least
from hf_ckpt.prediction.batches import batch_for, loss_for
from hf_ckpt.prediction.scaling import UnlikeError, bend, between
from hf_ckpt.prediction.skeleton import skeleton_of
from hf_ckpt.prediction.timeline import worst_timeline
from hf_ckpt.prediction.trace import Step, chunked_head, trace_costs
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE

ACTIONS = (KEEP, SELECTIVE, FULL)


def tracer_of(family, attention="sdpa", *, padded=False, **options):
    """Traces the costs of a small model for a number of tokens, and of sequences."""
    skeleton = skeleton_of(model_of(family, attention=attention, **{"layers": 2, "hidden": 64, **options}))

    def costs(tokens, sequences=4, head="full"):
        sizes = {stack.name: (sequences, tokens) for stack in skeleton.stacks}
        step = Step(batch_for(skeleton.base, sizes), padded=padded, loss=loss_for(skeleton.base))
        found = trace_costs(skeleton, step, CPU, actions=ACTIONS)
        return found if head == "full" else chunked_head(found, skeleton, step, CPU, head)

    return costs


def peaks(costs):
    return [worst_timeline(costs, costs.uniform(action)).peak_bytes for action in range(len(costs.actions))]


@pytest.mark.long
def test_where_everything_grows_with_the_tokens_the_line_is_exact():
    costs = tracer_of("llama")
    low, middle, high = costs(36), costs(84), costs(132)
    (found,) = between([low], [high], 48, 96)
    assert peaks(low)[0] < peaks(middle)[0] < peaks(high)[0]
    assert peaks(found) == peaks(middle)
    assert peak_of_least(found) == peak_of_least(middle)
    assert found.tokens == middle.tokens
    assert found.static == middle.static
    assert found.actions == middle.actions
    assert bend(low, high) == 0
    assert between([low], [high], 0, 96)[0] == low
    assert between([low], [high], 96, 96)[0] == high


@sparing(
    ("family", "attention", "padded"),
    [
        ("llama", "eager", False),
        ("llama", "sdpa", True),
        ("gpt2", "sdpa", True),
        ("bert", "eager", True),
        ("t5", "sdpa", True),
    ],
    ("llama", "eager", False),
)
def test_where_tensors_grow_faster_the_line_lies_above_and_says_so(family, attention, padded):
    costs = tracer_of(family, attention, padded=padded, **({} if family == "llama" else {"dropout": 0.1}))
    low, middle, high = costs(36), costs(84), costs(132)
    (found,) = between([low], [high], 48, 96)
    over = [mine / true for mine, true in zip(peaks(found), peaks(middle), strict=True)]
    assert min(over) >= 1
    assert max(over) > 1
    assert max(over) - 1 <= 1.25 * bend(low, high)


def test_nothing_is_known_between_steps_that_differ():
    costs = tracer_of("llama", vocab_size=2000)
    low, high = costs(32, head=64), costs(128, head=64)
    with pytest.raises(UnlikeError):
        between([low], [high], 1, 2)
