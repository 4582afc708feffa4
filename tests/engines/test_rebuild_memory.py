"""What the rebuild engine keeps and drops, to the byte, and that a graph without a backward frees everything."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from helpers.steps import assert_same, step, without_cache
from helpers.toys import (
    LAYERS,
    SCALE,
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
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch


def test_an_exception_frees_everything():
    """The user may catch an error inside a block, as when memory runs out, and go on."""
    _, model = plain_and_ours()
    batch = without_cache(model, tiny_batch("llama"))
    expected = step(model, batch)
    original = model.model.layers[1].mlp.down_proj.forward

    def broken(x):
        raise RuntimeError("out of memory")

    gc.collect()
    gc.disable()
    try:
        with LiveBytes(model) as live:
            model.model.layers[1].mlp.down_proj.forward = broken
            with contextlib.suppress(RuntimeError):
                model(**batch)
            model.model.layers[1].mlp.down_proj.forward = original
            assert live.current_bytes - live.start_bytes <= 256
    finally:
        gc.enable()
    before = rebuilt(model)
    assert_same(expected, step(model, batch))
    assert rebuilt(model) == 2 * before > 0


def test_a_parameter_that_is_written_with_a_graph_is_freed():
    """A block may fill a frozen memory slot: that parameter has a graph then."""

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
    """Bytes alive at the end of a forward, and then a step."""
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
    """Without hf_ckpt autograd holds, to the byte, what is dropped and kept, less what is kept to rebuild from."""
    plain, ours = plain_and_ours(family, save, dtype=dtype, dropout=0.1, attention="eager")
    batch = tiny_batch(family, tokens=64)
    (plainly, expected), (rebuilding, got) = (held_by(model, batch) for model in (plain, ours))
    assert_same(expected, got)
    regions = installation(ours).regions
    saved = sum(sum(each.dropped.values()) - sum(each.kept_to_rebuild.values()) for each in regions.values())
    assert 0 <= saved - (plainly - rebuilding) <= 80  # single numbers, such as scales of masks, are not counted
    assert saved > 0.2 * plainly
    name, block = next((name, one) for name, one in find_blocks(plain).modules.items() if name.endswith("1"))
    storages, forward, region = {}, block.forward, regions[name]

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    def watched(*args, **kwargs):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **kwargs)

    block.forward = watched
    step(plain, batch)
    kept, dropped, instead = (sum(each.values()) for each in (region.kept, region.dropped, region.kept_to_rebuild))
    assert dropped
    assert kept + dropped - instead == sum(storage.nbytes() for storage in storages.values())


def test_hidden_states_that_the_user_keeps_hold_nothing_else():
    """Hidden states that the model returns and the user holds after the backward hold no other tensors."""
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


def test_describe_tells_bytes_by_class():
    _, model = plain_and_ours()
    step(model, tiny_batch("llama"))
    found = hf_ckpt.describe(model)
    tokens, hidden, inner = 2 * 16, 32, 64
    assert found.dropped["activation"] == LAYERS * tokens * inner * 4  # silu's result
    assert found.dropped["pointwise"] == LAYERS * tokens * inner * 4  # the product that goes into the last linear
    assert found.kept["gate_proj"] == found.kept["up_proj"] == LAYERS * tokens * inner * 4
    assert found.dropped["LlamaRMSNorm"] >= LAYERS * 2 * tokens * hidden * 4
    assert found.kept.keys() >= {"q_proj", "k_proj", "v_proj", "block input + o_proj", "block input"}
    assert not [name for name in found.kept if "Backward" in name]
    assert "dropped, to be rebuilt in the last forward" in str(found)


def test_a_float32_upcast_is_kept_as_16_bits():
    """The norm stands inside the block, of no known class, so its operations are rebuilt one by one."""

    def block(x):
        x = x.cumsum(-1)  # has no row, and saves nothing
        wide = x.float()
        return (wide.pow(2).mean(-1, keepdim=True).rsqrt() * wide).to(x.dtype) * SCALE

    region = same_toys(block, dtype=torch.bfloat16)
    assert region.kept["cumsum(block input)"] == 2 * 8 * 16 * 2


def test_nothing_to_drop_is_said_once(caplog):
    for _ in range(2):
        same_toys(lambda x: torch.cumprod(x, -1), save=["linear"], parameters=(), rebuilds=False)
    assert sum("found nothing in a block that can be rebuilt" in record.message for record in caplog.records) == 1
