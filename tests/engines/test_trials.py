"""What trials read while a block is recomputed is what a block needs that really has the action."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.adapters import with_lora
from helpers.others import other_model
from helpers.steps import assert_same, gradients, without_cache

from hf_ckpt.attach.attach import put_on, trial
from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.trials import Tries
from hf_ckpt.measure.levels import Levels, step_of
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE, Action
from hf_ckpt.spec.plan import Plan

ATTENTION = Action("selective", ("attention",))
OTHERS = {KEEP: (SELECTIVE, ATTENTION), SELECTIVE: (KEEP, ATTENTION), ATTENTION: (KEEP, SELECTIVE)}
FEW = 512
"""Bytes of single numbers that an engine may hold."""


def mixture():
    return other_model("MixtralForCausalLM", layers=4, num_local_experts=4, num_key_value_heads=2)


MODELS = {
    "llama": (functools.partial(tiny_model, "llama"), "llama", False),
    "gpt2, dropout": (functools.partial(tiny_model, "gpt2", dropout=0.1), "gpt2", False),
    "bert": (functools.partial(tiny_model, "bert"), "bert", False),
    "t5": (functools.partial(tiny_model, "t5"), "t5", False),
    "experts": (mixture, "llama", False),
    "autocast": (functools.partial(tiny_model, "llama"), "llama", True),
    "bfloat16": (lambda **sizes: tiny_model("llama", **sizes).to(torch.bfloat16), "llama", False),
    "lora, autocast, dropout": (lambda **sizes: with_lora(tiny_model("llama", **sizes), "llama"), "llama", True),
}
"""Name -> (makes the model, family of its batches, whether it runs in autocast)."""


def made(name):
    make, family, autocast = MODELS[name]
    torch.manual_seed(0)
    model = make() if name == "experts" else make(layers=4, hidden=64, attention="sdpa")
    return model.train(), tiny_batch(family, batch=4, tokens=32), autocast


def one_step(model, batch, autocast):
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**without_cache(model, batch)).loss
    loss.backward()


@functools.cache
def measured(name, actions, shown=(), last=None):
    """A step in which blocks have these actions, with trials in the recomputations of the last block but one.

    Returns the call of that block, the gradients, and how often each block was recomputed.
    """
    model, batch, autocast = made(name)
    found = find_blocks(model)
    blocks = [block.name for block in found.blocks]
    tried = blocks[-2]
    chosen = {tried: actions} if isinstance(actions, Action) else {}
    plan = Plan(found.family, found.model, tuple((block, chosen.get(block.name, FULL)) for block in found.blocks))
    with trial(model, plan):
        record = installation(model)
        for action in {*shown, last, SELECTIVE, ATTENTION} - {KEEP, None}:
            record.functions.function(tried, action)
        put_on(found, record)
        for _ in range(2):  # nothing is a first call
            one_step(model, batch, autocast)
            model.zero_grad()
        before = {name: region.recomputed for name, region in record.regions.items()}
        live = LiveBytes(model, batch)
        levels = Levels(live)
        boundaries = Boundaries(found.modules, levels.mark)
        if shown or last:
            record.begin_trials({tried: Tries(tuple(shown), last)}, levels.mark)
        with live:
            boundaries.begin()
            levels.mark("begin")
            one_step(model, batch, autocast)
        boundaries.remove()
        again = {name: region.recomputed - before[name] for name, region in record.regions.items()}
        return step_of(levels.levels())[tried, 0], gradients(model), again


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("action", [KEEP, SELECTIVE, ATTENTION], ids=["keep", "selective", "attention"])
def test_a_recomputation_shows_what_a_block_needs_under_an_action(name, action):
    """Kept bytes and peaks; the gradients of such a step are those of no checkpointing."""
    model, batch, autocast = made(name)
    one_step(model, batch, autocast)
    full, _, _ = measured(name, FULL)
    real, _, _ = measured(name, action)
    call, got, again = measured(name, FULL, OTHERS[action], action)
    assert_same(gradients(model), got)
    assert set(again.values()) == {1}
    tried = call.trials[action]
    assert tried.kept == pytest.approx(real.forward.net - full.forward.net, abs=FEW)
    assert tried.forward_peak == pytest.approx(real.forward.peak, abs=FEW)
    assert tried.backward_peak == pytest.approx(real.backward.peak, rel=0.02, abs=FEW)
    for other in OTHERS[action]:
        shown = call.trials[other]
        alone = measured(name, FULL, OTHERS[other], other)[0].trials[other]
        for what in ("kept", "later", "forward_peak"):
            assert getattr(shown, what) == pytest.approx(getattr(alone, what), abs=FEW)
        assert shown.backward_peak is None
    assert call.backward.net == pytest.approx(full.backward.net, abs=8 * FEW)


def test_the_backward_of_a_block_that_only_shows_is_that_of_full():
    full, _, _ = measured("llama", FULL)
    call, _, _ = measured("llama", FULL, (SELECTIVE, KEEP))
    assert call.backward == full.backward


@pytest.mark.parametrize(
    ("name", "action", "freed"),
    [
        ("llama", KEEP, ""),  # its norm saves them
        ("bfloat16", KEEP, "hidden"),  # its norm saves a copy in float32
        ("bfloat16", SELECTIVE, ""),  # which is rebuilt from them
        ("bert", KEEP, ""),
        ("bert", SELECTIVE, "rebuilt"),  # the block before ends with a norm
        ("t5", KEEP, "shared"),  # adding the position bias saves nothing
    ],
)
def test_a_trial_finds_what_a_plain_run_would_free(name, action, freed):
    """A recomputation holds what the block is given: its hidden states, and masks and the like that blocks share."""
    call, _, _ = measured(name, FULL, OTHERS[action], action)
    model, batch, _ = made(name)
    size = batch["input_ids"].numel() * 64 * model.dtype.itemsize
    found = call.trials[action].freed
    assert (found.hidden, found.rebuilt) == (size if freed == "hidden" else 0, size if freed == "rebuilt" else 0)
    assert (found.shared > 1000) == (freed == "shared")
