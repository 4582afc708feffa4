"""Blocks in segments: one input kept for each segment, where segments are cut, and blocks run in unusual ways."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from helpers.custom import CustomConfig, CustomModel, steps_of
from helpers.steps import assert_same, gradients, planned, step, without_cache
from helpers.toys import each_family
from torch.nn import functional

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.segments import SegmentRegion
from hf_ckpt.errors import HfCkptError, PlanMismatchError, SpecError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch, tiny_model


def in_segments(model, segments=2):
    return planned(model, {"segments": segments})


def counts(model):
    """How often each block was recomputed: the last one of a segment once, and the others twice."""
    found = list(installation(model).regions.values())
    assert all(type(region) is SegmentRegion for region in found)
    return [region.recomputed for region in found]


@each_family
def test_one_input_a_segment_stays(family):
    """Bytes after the forward fall by one input with each block that shares a segment."""
    alive, batch = [], without_cache(tiny_model(family), tiny_batch(family, tokens=64))
    for segments in (4, 2, 1):
        model = in_segments(tiny_model(family), segments)
        step(model, batch)
        model.zero_grad(set_to_none=True)
        with LiveBytes(model) as live:
            outputs = model(**batch)
            alive.append(live.current_bytes - live.start_bytes)
            outputs.loss.backward()
    hidden = 2 * 64 * 32 * 4 * (1.5 if family == "t5" else 1)  # T5's decoder has half as many tokens
    assert [most - least for most, least in itertools.pairwise(alive)] == [2 * hidden, hidden]


@pytest.mark.parametrize(
    ("segments", "layers", "family", "lengths"),
    [
        (3, 8, "llama", [3, 3, 2]),
        ("sqrt", 9, "llama", [3, 3, 3]),
        ("sqrt", 1, "llama", [1]),
        (2, 3, "t5", [2, 1, 2, 1]),  # each stack by itself
    ],
)
def test_where_segments_are_cut(segments, layers, family, lengths):
    plan = hf_ckpt.describe(in_segments(tiny_model(family, layers=layers), segments)).plan
    assert "full (segment 0) 0" in str(plan)
    assert [len(names) for _, names in plan.segments()] == lengths


def test_more_segments_than_blocks_and_torn_segments_are_refused():
    with pytest.raises(SpecError, match=r"`segments` is 5, but stack 'decoder' has 4 blocks"):
        in_segments(tiny_model("llama"), 5)
    given = hf_ckpt.describe(in_segments(tiny_model("llama"))).plan.to_dict()
    rows = given["stacks"]["decoder"]
    rows[1] = {key: value for key, value in rows[1].items() if key != "segment"} | {"action": "keep"}
    rows[2]["segment"] = 0
    with pytest.raises(PlanMismatchError, match="segment 0 of decoder over blocks that are no neighbours"):
        hf_ckpt.install(tiny_model("llama"), hf_ckpt.Plan.from_dict(given))
    rows[0]["action"] = "selective"
    with pytest.raises(PlanMismatchError, match="goes with `full`"):
        hf_ckpt.Plan.from_dict(given)


def test_parameters_that_come_and_go_are_refused():
    model = in_segments(tiny_model("llama"))
    model.model.layers[0]._hf_hook = None  # accelerate's mark on modules that it moves
    with pytest.raises(HfCkptError, match="`segments` run several blocks of LlamaModel at once"):
        step(model, tiny_batch("llama"))


# --- unusual uses -----------------------------------------------------------------------------------------------------


class OddModel(CustomModel):
    """Runs its blocks in an unusual way, with a norm and a product after the last one."""

    def __init__(self, config, run):
        super().__init__(config)
        self.run, self.others = run, copy.deepcopy(self.layers)

    def forward(self, hidden_states, shift):
        found = self.run(self, self.first(hidden_states))
        return functional.layer_norm(found, (16,)) * functional.silu(found)


def skips_some(model, hidden):
    """As LayerDrop does."""
    return model.layers[2](model.layers[0](hidden))


def scales_between(model, hidden):
    """What a block gets is not the output of the previous one."""
    for layer in model.layers:
        hidden = layer(hidden) * 1.5
    return hidden


def by_keyword(model, hidden):
    for layer in model.layers:
        hidden = layer(hidden_states=hidden)
    return hidden


def interleaved(model, hidden):
    """Each stack's input is computed from the results of both stacks."""
    other = hidden.tanh()
    for layer, of_other in zip(model.layers, model.others, strict=True):
        hidden, other = layer(hidden), of_other(other)
        hidden, other = hidden + functional.silu(other), other * functional.silu(hidden)
    return hidden + other


@pytest.mark.parametrize(
    ("run", "times"),
    [
        (skips_some, [2, 0, 1, 0, 0, 0]),
        (scales_between, [1, 1, 1, 0, 0, 0]),
        (by_keyword, [2, 2, 1, 0, 0, 0]),
        (interleaved, [1] * 6),
    ],
)
def test_blocks_that_are_run_in_an_odd_way(run, times):
    """A block whose input is not the output of the previous one begins a new segment."""
    torch.manual_seed(0)
    plain = OddModel(CustomConfig(), run).train()
    model = in_segments(copy.deepcopy(plain), 1)
    for expected, got in zip(steps_of(plain, 2), steps_of(model, 2), strict=True):
        assert_same(expected, got)
    assert counts(model) == [2 * each for each in times]


def test_a_backward_through_part_of_a_segment():
    found = []
    for model in (tiny_model("llama"), in_segments(tiny_model("llama"), 1)):
        batch = without_cache(model, tiny_batch("llama"))
        model(**batch, output_hidden_states=True).hidden_states[2].square().mean().backward()
        found.append(gradients(model))
    assert_same(*found)
    assert counts(model) == [2, 1, 0, 0]
