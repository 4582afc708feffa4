"""Several blocks recomputed as one segment: equal gradients, only the segment's input kept, nothing left open."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.others import other_model
from helpers.steps import assert_same, enable, gradients, step, without_cache
from helpers.toys import each_family
from helpers.unknown import UnknownConfig, WorkingModel, steps_of
from torch.nn import functional

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.segments import SegmentRegion, _open
from hf_ckpt.errors import HfCkptError, PlanMismatchError, SpecError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch, tiny_model


def in_segments(family="llama", segments=2, model=None, **options):
    model = tiny_model(family, **options) if model is None else model
    hf_ckpt.install(model, {"segments": segments})
    enable(model)
    return model


def regions(model):
    return list(installation(model).regions.values())


def ran_once(model, times=1):
    """Check that every block is in a segment and was recomputed `times` times."""
    found = regions(model)
    assert all(type(region) is SegmentRegion for region in found)
    assert [region.recomputed for region in found] == [times] * len(found)


def same_steps(run, family="llama", segments=2, times=1, **options):
    ours = in_segments(family, segments, **options)
    assert_same(run(tiny_model(family, **options)), run(ours), f"{family} {segments}")
    ran_once(ours, times)
    return ours


@each_family
def test_only_the_input_of_a_segment_stays(family):
    """Only a segment's input is kept: bytes after the forward fall with each block that shares a segment."""
    alive = {}
    for spec in ({"policy": "full"}, {"segments": 4}, {"segments": 2}, {"segments": 1}):
        model = tiny_model(family)
        hf_ckpt.install(model, spec)
        enable(model)
        batch = without_cache(model, tiny_batch(family, tokens=64))
        step(model, batch)
        model.zero_grad(set_to_none=True)
        with LiveBytes(model) as live:
            outputs = model(**batch)
            alive[str(spec)] = live.current_bytes - live.start_bytes
            outputs.loss.backward()
    every, four, two, one = alive.values()
    hidden = 2 * 64 * 32 * 4
    stacks = 1.5 if family == "t5" else 1  # its decoder has half as many tokens
    assert four == every  # four blocks a stack: one block per segment
    assert every - two == stacks * 2 * hidden
    if family == "t5":  # later segments also keep the position bias of the first block
        assert two - one > stacks * hidden
    else:
        assert two - one == hidden


def test_where_segments_are_cut():
    def lengths(spec, layers, family="llama"):
        model = tiny_model(family, layers=layers)
        hf_ckpt.install(model, spec)
        plan = installation(model).plan
        assert "full (segment 0) 0" in str(plan)
        return [len(names) for _, names in plan.segments()]

    assert lengths({"segments": 3}, 8) == [3, 3, 2]
    assert lengths({"segments": 1}, 5) == [5]
    assert lengths({"segments": "sqrt"}, 9) == [3, 3, 3]
    assert lengths({"segments": "sqrt"}, 1) == [1]
    assert lengths({"segments": 2}, 3, "t5") == [2, 1, 2, 1]  # each stack by itself
    with pytest.raises(SpecError, match=r"`segments` is 5, but stack 'decoder' has 4 blocks"):
        lengths({"segments": 5}, 4)


def test_a_plan_whose_segment_is_torn_apart_is_refused():
    given = hf_ckpt.describe(in_segments()).plan.to_dict()
    rows = given["stacks"]["decoder"]
    rows[1] = {key: value for key, value in rows[1].items() if key != "segment"} | {"action": "keep"}
    rows[2]["segment"] = 0
    with pytest.raises(PlanMismatchError, match="segment 0 of decoder over blocks that are no neighbours"):
        hf_ckpt.install(tiny_model("llama"), hf_ckpt.Plan.from_dict(given))
    rows[0]["action"] = "selective"
    with pytest.raises(PlanMismatchError, match="goes with `full`"):
        hf_ckpt.Plan.from_dict(given)


# --- unusual uses ---------------------------------------------------------------------------------------------------


class OddModel(WorkingModel):
    """Runs its blocks in an unusual way, with a norm and a product after the last one."""

    def __init__(self, config, run):
        super().__init__(config, lambda block, hidden_states: block.two(block.norm(block.one(hidden_states)).tanh()))
        self.run, self.others = run, copy.deepcopy(self.layers)

    def forward(self, hidden_states):
        found = self.run(self, self.first(hidden_states))
        return functional.layer_norm(found, (16,)) * functional.silu(found)


def skips_the_last(model, hidden):
    for layer in model.layers[:-1]:
        hidden = layer(hidden)
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
    ("run", "times"), [(skips_the_last, [2, 2, 0, 0, 0, 0]), (by_keyword, [2, 2, 2, 0, 0, 0]), (interleaved, [2] * 6)]
)
def test_blocks_that_are_run_in_an_odd_way(run, times):
    """Operations between blocks, or after a skipped last block, are not recomputed with any block."""
    torch.manual_seed(0)
    plain = OddModel(UnknownConfig(), run).train()
    model = copy.deepcopy(plain)
    hf_ckpt.install(model, {"segments": 1})
    enable(model)
    for expected, got in zip(steps_of(plain, 2), steps_of(model, 2), strict=True):
        assert_same(expected, got)
    assert [region.recomputed for region in regions(model)] == times


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_between_blocks_closes_the_segment(error):
    """After an interrupt torch runs no forward hooks, so the next forward closes the segment."""
    model = in_segments(segments=1)
    expected = step(tiny_model("llama"), tiny_batch("llama"))

    def interrupt(module, args):
        raise error

    handle = model.model.layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        step(model, tiny_batch("llama"))
    assert (_open.run is None) == (error is RuntimeError)
    handle.remove()
    assert_same(expected, step(model, tiny_batch("llama")))
    ran_once(model)


def test_blocks_that_are_skipped_at_random():
    """LayerDrop draws random numbers between blocks, and may skip a segment's first or last block."""

    def make():
        return other_model("BartForConditionalGeneration", layers=4, encoder_layerdrop=0.4, decoder_layerdrop=0.4)

    ids = tiny_batch("llama")["input_ids"]
    plain, model = make(), in_segments(model=make())
    counts = set()
    for seed in range(12):
        found = []
        for one in (plain, model):
            one.zero_grad()
            torch.manual_seed(seed)
            loss = one(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            found.append({"loss": loss.detach(), **gradients(one)})
        assert_same(*found, f"seed {seed}")
        counts.add(tuple(region.forwards for region in regions(model)))
    assert len(counts) == 12
    ran = [(region.forwards, region.recomputed) for region in regions(model)]
    assert all(forwards == recomputed for forwards, recomputed in ran)
    assert 0 < min(forwards for forwards, _ in ran) < 12


def test_what_happens_between_two_blocks_is_refused():
    model = in_segments()
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)
    with pytest.raises(HfCkptError, match=r"block 'model.layers.1' is not given what block 'model.layers.0' returned"):
        step(model, tiny_batch("llama"))
    assert _open.run is None


def test_hooks_between_two_segments_are_fine():
    def run(model):
        model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)
        return step(model, tiny_batch("llama"))

    same_steps(run)


def test_parameters_that_come_and_go_are_refused():
    model = in_segments()
    model.model.layers[0]._hf_hook = None  # accelerate's mark on modules that it moves
    with pytest.raises(HfCkptError, match="`segments` recompute several blocks of LlamaModel at once"):
        step(model, tiny_batch("llama"))
