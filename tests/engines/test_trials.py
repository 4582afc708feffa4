"""What trials read while a block is recomputed is what a block needs that really has the action."""

import functools

import pytest
import torch
from helpers.adapters import with_lora
from helpers.others import other_model
from helpers.quantised import in_8_bits, scales_of
from helpers.sparing import sparing
from helpers.steps import assert_same, gradients, without_cache
from helpers.tables import keyed, table

from hf_ckpt.attach.boundaries import Boundaries
from hf_ckpt.attach.enable import put_on
from hf_ckpt.attach.for_a_while import temporarily
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.trials import Attempts
from hf_ckpt.measure.levels import Boundary, Levels, step_of
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.planner.policies import in_segments
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE, Action
from hf_ckpt.spec.plan import Plan

ATTENTION = Action("selective", ("attention",))
OTHERS = {KEEP: (SELECTIVE, ATTENTION), SELECTIVE: (KEEP, ATTENTION), ATTENTION: (KEEP, SELECTIVE)}
FEW = 512
"""Bytes of single numbers that an engine may hold."""


TABLE = table(__file__, "trials.yaml")
MODELS = TABLE["models"]
ACTIONS = {"keep": KEEP, "selective": SELECTIVE, "attention": ATTENTION}


def halves_its_gradient(module, args):
    args[0].register_hook(lambda gradient: gradient * 0.5)


def prepared(
    family="llama", autocast=False, adapters=False, dtype="float32", dropout=0.0, hooks=False, eight_bits=False
):
    """A model, a batch, and whether it runs in autocast."""
    torch.manual_seed(0)
    if family == "experts":
        family = "llama"
        model = other_model("MixtralForCausalLM", layers=4, num_local_experts=4, num_key_value_heads=2)
    else:
        sizes = {"layers": 4, "hidden": 64, "attention": "sdpa", "dtype": getattr(torch, dtype)}
        model = tiny_model(family, dropout=dropout, **sizes)
    model = in_8_bits(model) if eight_bits else model
    model = with_lora(model, family) if adapters else model
    for block in find_blocks(model).modules.values() if hooks else ():
        block.input_layernorm.register_forward_pre_hook(halves_its_gradient)
    return model.train(), tiny_batch(family, batch=4, tokens=32), autocast


def one_step(model, batch, autocast):
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**without_cache(model, batch)).loss
    loss.backward()


@functools.cache
def measured(name, actions, shown=(), last=None, segments=None):
    """A step in which blocks have these actions, with trials in the recomputations of the last block but one.

    Perhaps in segments.

    Returns the call of that block, the gradients, and how often each block was recomputed.
    """
    model, batch, autocast = prepared(**MODELS[name])
    parts = find_blocks(model)
    blocks = [block.name for block in parts.blocks]
    tried = blocks[-2]
    chosen = {tried: actions} if isinstance(actions, Action) else {}
    planned = {block: chosen.get(block.name, FULL) for block in parts.blocks}
    if segments is not None:
        planned = in_segments(planned, segments)
    plan = Plan(parts.family, parts.class_name, tuple(planned.items()))
    with temporarily(model, plan):
        record = installation(model)
        for action in {*shown, last, SELECTIVE, ATTENTION} - {KEEP, None}:
            record.functions.function(tried, action)
        put_on(parts, record)
        for _ in range(2):  # nothing is a first call
            one_step(model, batch, autocast)
            model.zero_grad()
        before = {name: region.recomputed for name, region in record.regions.items()}
        live = LiveBytes(model, batch, {"scales": scales_of(model)})
        levels = Levels(live)
        boundaries = Boundaries(parts.modules, levels.mark)
        if shown or last:
            record.set_trials({tried: Attempts(tuple(shown), last)}, levels.mark)
        with live:
            boundaries.begin()
            levels.mark(Boundary.BEGIN)
            one_step(model, batch, autocast)
        boundaries.remove()
        again = {name: region.recomputed - before[name] for name, region in record.regions.items()}
        return step_of(levels.levels())[tried, 0], gradients(model), again


QUICK = ("t5", "lora, autocast, dropout", "bfloat16", "lora on 8 bits")


@sparing("name", MODELS, *QUICK)
@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS.keys())
def test_a_recomputation_shows_what_a_block_needs_under_an_action(name, action):
    """Kept bytes and peaks; the gradients of such a step are those of no checkpointing."""
    model, batch, autocast = prepared(**MODELS[name])
    one_step(model, batch, autocast)
    full, _, _ = measured(name, FULL)
    real, _, _ = measured(name, action)
    call, got, again = measured(name, FULL, OTHERS[action], action)
    assert_same(gradients(model), got)
    assert set(again.values()) == {1}
    tried = call.needs[action]
    assert tried.kept - tried.held == pytest.approx(real.forward.net - full.forward.net, abs=FEW)
    assert tried.forward_peak == pytest.approx(real.forward.peak, abs=FEW)
    assert tried.backward_peak == pytest.approx(real.backward.peak, rel=0.02, abs=FEW)
    for other in OTHERS[action]:
        shown = call.needs[other]
        alone = measured(name, FULL, OTHERS[other], other)[0].needs[other]
        for what in ("kept", "held", "kept_casts", "forward_peak"):
            assert getattr(shown, what) == pytest.approx(getattr(alone, what), abs=FEW)
        assert shown.backward_peak is None
    assert call.backward.net == pytest.approx(full.backward.net, abs=8 * FEW)


@pytest.mark.parametrize(("name", "runs"), [("gpt2, dropout", [2, 2, 2, 1]), ("t5", [2, 2, 2, 1] * 2)])
def test_trials_show_the_same_in_a_block_whose_input_is_made_again(name, runs):
    alone, expected, _ = measured(name, FULL, (KEEP,), SELECTIVE)
    call, got, again = measured(name, FULL, (KEEP,), SELECTIVE, segments=1)
    assert_same(expected, got)
    assert list(again.values()) == runs
    assert call.needs == alone.needs
    assert call.backward.peak == alone.backward.peak


def test_the_backward_of_a_block_that_only_shows_is_that_of_full():
    full, _, _ = measured("llama", FULL)
    call, _, _ = measured("llama", FULL, (SELECTIVE, KEEP))
    assert call.backward == full.backward


@pytest.mark.parametrize(*keyed(TABLE["freed"], "model", "saved", "freed"))
def test_a_trial_finds_what_a_plain_run_would_free(model, saved, freed):
    """A recomputation holds what the block is given: its hidden states, and masks and the like that blocks share."""
    action = ACTIONS[saved]
    call, _, _ = measured(model, FULL, OTHERS[action], action)
    model, batch, _ = prepared(**MODELS[model])
    size = batch["input_ids"].numel() * 64 * model.dtype.itemsize
    parts = call.needs[action].freed
    assert (parts.hidden, parts.rebuilt) == (size * (freed == "hidden"), size * (freed == "rebuilt"))
    assert (parts.shared > 1000) == (freed == "shared")
