"""Which short models are traced, so that every action is seen behind every other."""

from __future__ import annotations

import copy
import itertools

import pytest
from helpers.sparing import sparing
from helpers.tracing import CPU, within
from hypothesis import given
from hypothesis import strategies as st

from hf_ckpt.attach.attach import trial
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.prediction.skeleton import skeleton_from_config
from hf_ckpt.prediction.trace import Step, trace_costs
from hf_ckpt.prediction.walks import walks_of
from hf_ckpt.spec.actions import FULL, KEEP


@st.composite
def rows(draw):
    """(kind of every block, kind -> its actions). Kinds are numbered as they first come."""
    given_kinds = draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(given_kinds))}
    actions = st.sampled_from([(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)])
    return [numbers[kind] for kind in given_kinds], draw(
        st.lists(actions, min_size=len(numbers), max_size=len(numbers))
    )


def keys_of(kind, choices):
    return {(kind, action) for action in choices[kind]}


def assert_shows_everything(row, choices):
    with within(2):
        walks = walks_of(row, choices)
    pairs = set(itertools.pairwise(row))
    steps = {pair for walk in walks for pair in itertools.pairwise(walk)}
    assert {walk[0] for walk in walks} == keys_of(row[0], choices)
    assert {walk[-1] for walk in walks} == keys_of(row[-1], choices)
    assert all((here[0], there[0]) in pairs for here, there in steps)
    assert {key for walk in walks for key in walk} == {key for kind in row for key in keys_of(kind, choices)}
    assert len(row) == 1 or all(len(walk) > 1 for walk in walks)
    for kind, following in pairs:
        here, there = keys_of(kind, choices), keys_of(following, choices)
        seen = {(a, b) for a, b in steps if (a[0], b[0]) == (kind, following)}
        if kind == following:
            assert seen == set(itertools.product(here, there))
        assert {a for a, _ in seen} == here
        assert {b for _, b in seen} == there
    return walks


@given(rows())
def test_walks_show_everything(found):
    assert_shows_everything(*found)


FOUR = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("row", "choices"),
    [
        ([0], [FOUR]),
        ([0, 0], [FOUR]),
        ([0, 1], [FOUR, FOUR]),  # T5 of two blocks
        ([0, 1, 1], [FOUR, FOUR]),
        ([0, 0, 1], [FOUR, FOUR]),  # adapters on the last block only
        ([0, 1, 1], [(0, 1), FOUR]),
        ([0, 0, 1, 1], [(0,), FOUR]),  # frozen below
        ([0, 0, 1], [(0,), FOUR]),
        ([0, 1, 0, 1], [FOUR, FOUR]),  # sliding and full attention
        ([0, 0, 0, 1, 0, 0], [FOUR, FOUR]),
        ([0, 1, 2], [(0,), FOUR, FOUR]),
        ([0, 1, 0, 2], [FOUR, FOUR, FOUR]),
    ],
    ids=str,
)
def test_walks_of_common_models(row, choices):
    assert_shows_everything(row, choices)


@given(rows(), st.integers(1, 50))
def test_walks_do_not_grow_with_depth(found, more):
    """More blocks of a kind that follows itself already change nothing."""
    row, choices = found
    row = [row[0], *row]
    with within(2):
        walks = walks_of(row, choices)
    with within(2):
        assert walks_of([row[0]] * more + row, choices) == walks


@pytest.mark.slow
@pytest.mark.compat
@sparing("family", FAMILIES, "llama", "bert")
def test_as_many_blocks_are_traced_at_any_depth(family):
    """What planning takes does not depend on how deep a model is."""
    counts, lasts = [], []
    for depth in (32, 128):
        traced = []

        def counting(model, plan, traced=traced):
            traced.append(len(plan.actions))
            return trial(model, plan)

        config = copy.deepcopy(tiny_model(family, layers=1).config)
        config.update({name: depth for name in ("num_hidden_layers", "n_layer", "num_layers") if hasattr(config, name)})
        if family == "t5":
            config.update({"num_decoder_layers": depth})
        model_class = type(tiny_model(family, layers=1))
        skeleton = skeleton_from_config(config, model_class._from_config)
        costs = trace_costs(skeleton, Step(tiny_batch(family)), CPU, put_on=counting, actions=(KEEP, FULL))
        assert [len(stack.blocks) for stack in costs.stacks] == [depth] * len(costs.stacks)
        counts.append(traced)
        lasts.append([(stack.costs, stack.last_backward) for stack in costs.stacks])
        walks = [walks_of(stack.row, [(0, 1)] * len(stack.kinds)) for stack in skeleton.stacks]
        longest = max(map(len, walks))
        padded = [[*found, *[found[-1]] * (longest - len(found))] for found in walks]
        assert traced == [sum(map(len, together)) for together in zip(*padded, strict=True)]
    assert counts[0] == counts[1]
    assert lasts[0] == lasts[1]
    assert sum(counts[0]) <= 40
