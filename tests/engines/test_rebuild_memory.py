"""What the rebuild engine keeps and drops, to the byte; adapters; and no memory left afterwards."""

from __future__ import annotations

import functools
import gc
import weakref

import peft
import pytest
import torch
from helpers.sparing import sparing
from helpers.steps import assert_same, enable, step, without_cache
from helpers.toys import (
    SCALE,
    SELECTIVE,
    each_family,
    each_save,
    plain_and_ours,
    rebuilt,
    same_toys,
)
from torch import nn

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.engines.rebuild.tape import Tape
from hf_ckpt.engines.rebuild.values import MASKS, NO_GRAPH
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("unwatched")


def test_a_parameter_that_is_written_with_a_graph_is_freed():
    """A frozen parameter that a block fills in place, and that gets a graph by that, is freed."""

    def left(run):
        x = torch.randn(4, 16, requires_grad=True)
        slot = nn.Parameter(torch.zeros(4, 16), requires_grad=False)

        def block(x):
            slot.copy_(x)
            return slot.exp_()

        run(block, x * 1)
        return weakref.ref(slot)

    gc.collect()
    gc.disable()
    try:
        assert left(lambda block, x: block(x))() is None
        region = RebuildRegion("toy", save=("linear", "attention"))
        assert left(region)() is None
        assert region.kept
    finally:
        gc.enable()


def held_by(model, batch):
    """Bytes alive at the end of a forward, and the result of a step."""
    with LiveBytes(model) as live:
        loss = model(**without_cache(model, batch)).loss
        held = live.current_bytes - live.start_bytes
        del loss
    return held, step(model, batch)


@pytest.mark.compat
@each_save
@each_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kept_and_dropped_add_up(family, save, dtype):
    """To the byte, a block holds what is kept, and the model holds less by what autograd alone would hold."""
    plain, ours = plain_and_ours(family, save, dtype=dtype, dropout=0.1, attention="eager")
    batch = tiny_batch(family, tokens=64)
    (plainly, expected), (rebuilding, got) = (held_by(model, batch) for model in (plain, ours))
    assert_same(expected, got)
    regions = installation(ours).regions
    alone = sum(autograd_holds(plain, batch, block) for block in find_blocks(plain).modules.values())
    kept = sum(sum(region.kept.values()) for region in regions.values())
    dropped = sum(sum(region.dropped.values()) for region in regions.values())
    assert dropped > 0.2 * plainly
    assert kept < alone <= kept + dropped
    assert abs((plainly - rebuilding) - (alone - kept)) <= 80  # scalars, such as scales of masks, are not counted


def autograd_holds(model, batch, block):
    """Bytes that autograd holds of what a block saves, without parameters."""
    storages, forward = {}, block.forward

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    def watched(*args, **kwargs):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **kwargs)

    block.forward = watched
    step(model, batch)
    del block.forward
    return sum(storage.nbytes() for storage in storages.values())


def test_hidden_states_that_the_user_keeps_hold_nothing_else():
    """Hidden states that the user holds after backward keep no other tensors alive."""
    for family in FAMILIES:
        alive = []
        for model in plain_and_ours(family, layers=4):
            batch = without_cache(model, tiny_batch(family))
            step(model, batch)
            model.zero_grad(set_to_none=True)
            with LiveBytes(model) as live:
                outputs = model(**batch, output_hidden_states=True)
                outputs.loss.backward()
                model.zero_grad(set_to_none=True)
                states = outputs.get("hidden_states") or outputs.get("decoder_hidden_states")
                del outputs
                alive.append(live.current_bytes - live.start_bytes)
                assert states
        assert alive[1] <= alive[0], family


def test_a_float32_upcast_is_kept_as_16_bits():
    """The norm's operations are rebuilt one by one: they are part of the block, not a known module."""

    def block(x):
        x = x.cumsum(-1)  # cannot be rebuilt, and saves nothing
        wide = x.float()
        return (wide.pow(2).mean(-1, keepdim=True).rsqrt() * wide).to(x.dtype) * SCALE

    region = same_toys(block, dtype=torch.bfloat16)
    assert region.kept["cumsum"] == 2 * 8 * 16 * 2


def test_nothing_to_drop_is_said_once(caplog):
    for _ in range(2):
        same_toys(lambda x: torch.cumprod(x, -1), save=["linear"], parameters=(), rebuilds=False)
    assert sum("found nothing in a block that can be rebuilt" in record.message for record in caplog.records) == 1


# --- rebuilding in recomputed blocks --------------------------------------------------------------------------------


def with_shared_weights():
    model = tiny_model("llama", layers=3)
    for layer in model.model.layers[1:]:
        layer.mlp = model.model.layers[0].mlp
    return model


@pytest.mark.parametrize("policy", ["full", "full+selective", "selective"])
def test_blocks_that_share_their_weights(policy):
    """Autocast casts a shared weight once for all blocks in the forward, and once per recomputed block."""
    found = []
    for model in (with_shared_weights(), with_shared_weights()):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(step(model, tiny_batch("llama")))
        hf_ckpt.install(model, {"policy": policy})
        enable(model)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(step(model, tiny_batch("llama")))
        assert rebuilt(model) > 0
    for each in found[1:]:
        assert_same(found[0], each)


@each_family
def test_what_full_selective_leaves_is_what_full_leaves(family):
    """`full+selective` keeps what `full` keeps, except for a few scalars, and the peak of its backward is lower."""
    batch = tiny_batch(family, batch=2, tokens=64)
    held, peaks, shapes = {}, {}, {}
    for name in ("full", "full+selective"):
        model = tiny_model(family, layers=3, hidden=64, attention="sdpa", dropout=0.1, dtype=torch.bfloat16)
        hf_ckpt.install(model, {"policy": name})
        enable(model)
        expected, seen = step(model, batch), shapes.setdefault(name, [])
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=seen: to.append(x.shape) or x, lambda x: x):
            assert_same(expected, step(model, batch))
        with LiveBytes(model, batch) as live:
            loss = model(**without_cache(model, batch)).loss
            held[name] = live.current_bytes - live.start_bytes
            live.peak_bytes = live.current_bytes
            loss.backward()
        peaks[name] = live.peak_bytes - live.start_bytes
    assert 0 <= held["full+selective"] - held["full"] < 100 < held["full"]
    assert peaks["full+selective"] < peaks["full"]
    assert shapes["full+selective"] == shapes["full"]


# --- adapters around frozen linear layers ---------------------------------------------------------------------------

ATTENTION = {**SELECTIVE, "save": ["attention"]}
LORA = functools.partial(peft.LoraConfig, r=4, init_lora_weights=False)
ADAPTERS = {
    "LoRA": functools.partial(LORA, lora_dropout=0.1),
    "LoRA, no dropout": LORA,
    "rsLoRA": functools.partial(LORA, lora_dropout=0.1, use_rslora=True),
    "VeRA": functools.partial(peft.VeraConfig, r=4, vera_dropout=0.1, init_weights=False),
}
INPUTS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "bert": ["query", "key", "value", "output.dense", "intermediate.dense"]}
ROWS = 2 * 16  # tokens per batch


def model_of(family, adapters=None):
    model = tiny_model(family, layers=3, dropout=0.1, attention="eager", dtype=torch.bfloat16)
    if adapters is None:
        return model
    torch.manual_seed(1)
    targets = INPUTS.get(family, "all-linear")
    return peft.get_peft_model(model, ADAPTERS[adapters](target_modules=targets, fan_in_fan_out=family == "gpt2"))


def activations(model, family):
    """Bytes of activations, without masks, that the last block keeps; of T5, the last encoder block."""
    enable(model)
    step(model, tiny_batch(family))
    regions = installation(model).regions
    kept = regions[[name for name in regions if "decoder.block" not in name][-1]].kept
    return sum(size for name, size in kept.items() if name not in (MASKS, NO_GRAPH))


CASES = [(adapters, family) for adapters in ADAPTERS for family in FAMILIES]


@sparing(
    "adapters,family",
    CASES,
    ("LoRA", "gpt2"),
    ("LoRA", "bert"),
    ("LoRA, no dropout", "gpt2"),
    ("VeRA", "t5"),
    ("rsLoRA", "llama"),
)
def test_a_block_with_adapters_keeps_no_more_activations(adapters, family):
    plain = model_of(family)
    hf_ckpt.install(plain, ATTENTION)
    expected = step(model_of(family, adapters), tiny_batch(family))
    model = model_of(family, adapters)
    hf_ckpt.install(model, ATTENTION)
    enable(model)
    assert_same(expected, step(model, tiny_batch(family)))
    assert 0 < activations(model, family) <= activations(plain, family)


def test_what_a_frozen_layer_is_given_stays_in_16_bits_once():
    """A frozen layer's input is kept once, in 16 bits; autograd saves the adapter's float32 copy of it."""
    model = model_of("gpt2", "LoRA")
    hf_ckpt.install(model, ATTENTION)
    activations(model, "gpt2")
    last = list(installation(model).regions.values())[-1]
    assert last.kept["attention"] == ROWS * 32 * 2
    assert last.dropped["mask"] > 0


def _counts_of(model):
    return [(region.dropped, region.kept) for region in installation(model).regions.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_learned_of_a_block_ends_with_its_structure(family, monkeypatch):
    """Later forwards do not retry what could not be rebuilt, until the block changes.

    A changed block then drops as much as a fresh one. Counts are of the last forward, even if batch shapes change.
    """

    def changed(model):
        for block in find_blocks(model).modules.values():
            for number, parameter in enumerate(block.parameters()):
                parameter.requires_grad_(number % 2 == 0)

    make, failed = Tape._make, []

    def noting(tape, row, node, number):
        value = make(tape, row, node, number)
        failed[-1] += value is None
        return value

    _, model = plain_and_ours(family)
    monkeypatch.setattr(Tape, "_make", noting)
    for _ in range(3):
        failed.append(0)
        step(model, tiny_batch(family))
    assert failed[0] > 0
    assert failed[1:] == [0, 0]
    for batch in (tiny_batch(family, tokens=24), tiny_batch(family)):
        step(model, batch)
        _, fresh = plain_and_ours(family)
        step(fresh, batch)
        assert _counts_of(model) == _counts_of(fresh)
    changed(model)
    _, fresh = plain_and_ours(family)
    changed(fresh)
    for each in (model, model, fresh):
        step(each, tiny_batch(family))
    for found, wanted in zip(_counts_of(model), _counts_of(fresh), strict=True):
        assert found[0] == wanted[0]
        assert sum(found[1].values()) == sum(wanted[1].values())  # names may differ
