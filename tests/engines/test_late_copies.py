"""What moves to host memory, once and with its bits, on a device that copies late and has no pinned pages."""

from __future__ import annotations

import pytest
import torch
from helpers.lanes import HIDDEN, Delayed
from helpers.offloading import OFFLOAD, each_family, moved, mover, ours, said
from helpers.steps import assert_same, step

from hf_ckpt.engines import offload
from hf_ckpt.engines.host import Mover
from hf_ckpt.engines.moved import Group
from hf_ckpt.models.tiny import tiny_batch, tiny_model


@pytest.mark.compat
@each_family
def test_hidden_states_move_once_and_nothing_else(family, lanes):
    """T5 packs 21 tensors for 12 storages; GPT-2 and BERT move 4-D masks with every layer."""
    batch = tiny_batch(family)
    batch["attention_mask"][0, -3:] = 0
    expected = step(tiny_model(family), batch)
    model = ours(family)
    assert_same(expected, step(model, batch))
    sizes = [HIDDEN] * 3 + ([HIDDEN // 2] * 3 if family == "t5" else [])  # never the last block's of a stack
    assert [size for kind, size in lanes[0].log if kind == "out"] == sizes
    assert sorted(size for kind, size in lanes[0].log if kind == "back") == sorted(sizes)
    assert sorted(moved(model).values()) == sorted(sizes)


def test_what_comes_back_has_the_bits_it_left_with():
    """float32 is rounded in silence, through a pool of bfloat16 buffers."""
    lane, pool = Delayed(), Mover(make_lane=Delayed)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32):
        tensor = torch.randn(1024 // dtype.itemsize, generator=generator, dtype=torch.float64).to(dtype)
        expected = tensor.clone()
        group = Group(pool, "block", lane, tensor)
        slot = group.send(tensor)
        group.close()
        tensor.fill_(torch.nan)  # its memory is somebody else's now
        found = slot.fetch()
        assert found.dtype is dtype
        assert torch.equal(found, expected)
        del slot, group
    assert pool.held_bytes == 1024  # one buffer for all of them


@pytest.mark.compat
def test_memory_that_cannot_be_pinned_and_is_rounded_up(lanes, monkeypatch, caplog):
    """The driver has no more pinned pages; and 17 tokens take as much of it as 32."""
    empty, refused = torch.empty, []

    def refusing(*args, **keys):
        if keys.get("pin_memory"):
            refused.append(args[0])
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **keys)

    monkeypatch.setattr(torch, "empty", refusing)
    monkeypatch.setattr(offload.compat, "accelerator_type", lambda: "cuda")
    batch = tiny_batch("llama", tokens=17)
    hidden = 2 * 17 * 32 * 4
    for limit, count in ((3 * 8192, 3), (3 * 8192 - 1, 2), (3 * hidden, 1)):
        model = ours(spec={**OFFLOAD, "host_budget": f"{limit}B"})
        for _ in range(2):
            assert_same(step(tiny_model("llama"), batch), step(model, batch))
            assert list(moved(model).values()) == [hidden] * count
        assert mover(model).held_bytes == count * 8192
    assert refused == [8192] * 3  # asked once a pool
    (message,) = [text for text in said(caplog) if "cannot be pinned" in text]
    assert "CUDA error: out of memory" in message
    assert "unpinned memory is used" in message
