"""`full+selective`: blocks that run again in backward, and rebuild their cheap results after that."""

from __future__ import annotations

import pytest
import torch
from helpers.steps import assert_same, enable, step, without_cache
from helpers.toys import each_family
from helpers.tracing import CPU, PEAK, model_of, real_peaks
from helpers.unknown import working

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.rebuild.full_selective import FullSelectiveRegion
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.planner.budgets import peak_of_least, plan_within
from hf_ckpt.prediction.skeleton import skeleton_of
from hf_ckpt.prediction.trace import Step, trace_costs
from hf_ckpt.spec.actions import FULL, FULL_SELECTIVE, KEEP, SELECTIVE

SAVES = (["linear", "attention"], ["attention"], ["linear"])
each_save = pytest.mark.parametrize("save", SAVES, ids="+".join)
LAYERS = 2


def regions(model):
    """The functions of all blocks."""
    return list(installation(model).regions.values())


def ours(model, save=SAVES[0]):
    """The model with the action on every block."""
    hf_ckpt.install(model, {"policy": "full+selective", "save": save})
    enable(model)
    assert all(type(region) is FullSelectiveRegion for region in regions(model))
    return model


def did_both(model, times=1):
    """Every block was run again as a whole, so often, and rebuilt something beside that."""
    found = regions(model)
    assert [region.recomputed for region in found] == [times] * len(found)
    assert all(region.rebuilding.recomputed > 0 for region in found)


def autocast_step(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return step(model, batch)


def test_blocks_that_share_their_weights():
    """Autocast casts a weight once for all blocks in the forward, and once more for each that runs again."""

    def shared():
        model = tiny_model("llama", layers=3)
        for layer in model.model.layers[1:]:
            layer.mlp = model.model.layers[0].mlp
        return model

    batch, plain, model = tiny_batch("llama"), shared(), ours(shared())
    assert_same(autocast_step(plain, batch), autocast_step(model, batch))
    did_both(model)


@each_family
def test_what_the_forward_leaves_is_what_full_leaves(family):
    """But for a few bytes of single numbers; and the peak of the backward is lower."""
    batch = tiny_batch(family, batch=2, tokens=64)
    held, peaks = {}, {}
    for name in ("full", "full+selective"):
        model = tiny_model(family, layers=3, hidden=64, attention="sdpa", dropout=0.1, dtype=torch.bfloat16)
        hf_ckpt.install(model, {"policy": name})
        enable(model)
        step(model, batch)
        with LiveBytes(model, batch) as live:
            loss = model(**without_cache(model, batch)).loss
            held[name] = live.current_bytes - live.start_bytes
            live.peak_bytes = live.current_bytes
            loss.backward()
        peaks[name] = live.peak_bytes - live.start_bytes
    assert 0 <= held["full+selective"] - held["full"] < 100 < held["full"]
    assert peaks["full+selective"] < peaks["full"]


def test_blocks_of_unknown_code_are_recomputed_as_full():
    """What such a block does in place is not known, so that nothing of it is rebuilt."""
    model = working(lambda block, hidden: hidden + block.two(torch.tanh(block.one(block.norm(hidden)))))
    hf_ckpt.install(model, {"policy": "full+selective"})
    enable(model)
    assert {type(region) for region in regions(model)} == {FullRegion}


def test_hooks_of_the_user_s_are_given_what_full_gives_them():
    """As under `save_on_cpu` around the model: inputs of blocks, and nothing of what runs again."""
    shapes = {}
    batch, expected = tiny_batch("llama"), step(tiny_model("llama", layers=LAYERS), tiny_batch("llama"))
    for policy in ("full", "full+selective"):
        found = shapes.setdefault(policy, [])
        model = tiny_model("llama", layers=LAYERS)
        hf_ckpt.install(model, {"policy": policy})
        enable(model)
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=found: to.append(x.shape) or x, lambda x: x):
            assert_same(expected, step(model, batch))
    assert shapes["full+selective"] == shapes["full"]
    did_both(model)


def test_a_plan_below_what_full_needs_takes_it_and_keeps_its_budget():
    model, batch = model_of("llama", "everything", **PEAK), tiny_batch("llama", batch=4, tokens=128)
    given, skeleton = Step(batch, accumulation=2, optimizer="sgd"), skeleton_of(model)
    floor = peak_of_least(trace_costs(skeleton, given, CPU, actions=(KEEP, SELECTIVE, FULL)))
    costs = trace_costs(skeleton, given, CPU)
    limit = (floor + peak_of_least(costs)) // 2
    assert limit < 0.985 * floor
    actions = [action for _, action in plan_within(costs, limit).actions]
    assert FULL_SELECTIVE in actions
    assert max(real_peaks(model, actions, batch)) <= limit
