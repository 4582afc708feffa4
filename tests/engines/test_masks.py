"""Dropout masks are stored as bits: which tensors, how many, their size, and equal gradients."""

from __future__ import annotations

import pytest
import torch
from helpers.adapters import with_lora
from helpers.sparing import sparing
from helpers.steps import assert_same, enable, step
from helpers.toys import SCALE, SELECTIVE, each_family, plain_and_ours, same_toys, toy
from torch import nn
from torch.nn import functional

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.rebuild import masks
from hf_ckpt.engines.rebuild.ops import MASK
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.engines.rebuild.values import MASKS
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model

DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64)
ELEMENTS = 2 * 8 * 16  # of a toy's input


def unpacked(mask):
    return masks.unpack(masks.pack(mask), size=mask.size(), stride=mask.stride(), scale=masks.scale_of(mask))


@pytest.fixture
def counts(monkeypatch):
    """Number of masks packed and unpacked."""
    counts = {"packed": 0, "unpacked": 0}

    def counted(name, function):
        def run(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(masks, "pack", counted("packed", masks.pack))
    monkeypatch.setattr(masks, "unpack", counted("unpacked", masks.unpack))
    return counts


# --- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_comes_back_from_its_bits(dtype):
    """Masks survive packing: all patterns of eight elements, and every number of elements up to three bytes."""
    patterns = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    torch.manual_seed(0)
    for mask in (patterns, patterns.t(), *(torch.rand(1, count) < 0.8 for count in range(1, 25))):
        mask = (
            mask.to(dtype) if dtype is torch.bool else torch.where(mask.bool(), torch.tensor(1 / 0.9, dtype=dtype), 0)
        )
        found = unpacked(mask)
        assert found.dtype is dtype
        assert torch.equal(found, mask)
        assert found.stride() == mask.stride()
        assert masks.pack(mask).nbytes == -(-mask.numel() // 8)


def test_a_part_of_a_mask_is_not_packed():
    """A slice of a mask is not packed: its elements are not contiguous, and dropping it would free nothing."""
    mask = torch.ones(4, 8, dtype=torch.bool)
    assert masks.can_pack(mask)
    assert masks.can_pack(mask.t())
    assert not masks.can_pack(mask[:, :4])


@pytest.mark.parametrize("scale", [float("inf"), 0.0])
def test_a_mask_whose_scale_is_no_plain_number(scale):
    """Masks with an unusual scale survive: 1 / (1 - p) can overflow float16, and a mask can drop everything."""
    mask = torch.tensor([0.0, scale, scale], dtype=torch.float16)
    assert torch.equal(unpacked(mask), mask)


# --- which tensors are masks ------------------------------------------------------------------------------------------

DROPOUTS = {
    "function": lambda x: functional.dropout(x * x, 0.3),
    "module": lambda x: DROPOUT(x * x),
    "in place": lambda x: functional.dropout(x * x, 0.3, inplace=True),
    "of another layout": lambda x: functional.dropout((x * x).transpose(0, 2), 0.3).transpose(0, 2),
}
DROPOUT = nn.Dropout(0.3)


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", DROPOUTS)
def test_a_mask_stays_as_bits(name, dtype, counts):
    """One mask serves the product that saves it and rebuilds the dropout's result; it is unpacked once for both."""
    region = same_toys(lambda x: DROPOUTS[name](x) * SCALE, dtype=dtype)
    assert counts == {"packed": 1, "unpacked": 1}
    assert region.dropped[MASK] == ELEMENTS * dtype.itemsize
    assert region.kept[MASKS] == ELEMENTS / 8


def _noise_behind_a_softmax(x, call):
    """The block's own noise, with the shape of a softmax, changed in place as often as a mask."""
    q = (functional.silu(x) * 0.5).view(2, 8, 4, 4).transpose(1, 2)
    noise = torch.empty(2, 4, 8, 8).uniform_(0.5, 1.0).mul_(2.0)
    return functional.silu(call(q @ q.transpose(-1, -2), noise))


def _by_one_call(y, noise):
    """Run softmax and product from one Python instruction, like torch's attention: only values rule out a mask."""
    for function, *rest in ((torch._safe_softmax, -1), (torch.mul, noise)):
        y = function(y, *rest)
    return y


def _noise_on_attention(x):
    """Attention without dropout, followed by the block's own noise."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = _attention(x, attn_mask=torch.zeros(2, 1, 8, 8))
    return found * torch.empty_like(found).uniform_(0.5, 1.0).mul_(2.0)


NO_DROPOUTS = {
    "behind attention": _noise_on_attention,
    "p 0": lambda x: functional.dropout(x * x, 0.0),
    "p 1": lambda x: functional.dropout(x * x, 1.0) + x,
    "eval": lambda x: functional.dropout(x * x, 0.3, training=False),
    "of channels": lambda x: functional.dropout2d((x * x).view(2, 2, 8, 8), 0.3).view(2, 8, 16),
    # The values of a mask, from another source.
    "noise of a block's own": lambda x: x * x * torch.empty_like(x).bernoulli_(0.7).div_(0.7),
    "behind a softmax": lambda x: _noise_behind_a_softmax(x, lambda y, noise: torch._safe_softmax(y, -1) * noise),
    "behind a softmax, by one call": lambda x: _noise_behind_a_softmax(x, _by_one_call),
    "truth values": lambda x: functional.silu(torch.where(x.detach() > 0, x * x, x)),
}


@pytest.mark.parametrize("name", NO_DROPOUTS)
def test_nothing_else_is_packed(name, counts):
    region = same_toys(lambda x: NO_DROPOUTS[name](x) * SCALE)
    assert counts["packed"] == 0
    assert MASK not in region.dropped
    assert MASKS not in region.kept


def test_a_dropout_that_somebody_else_has_written_is_left_alone(counts, monkeypatch):
    def dropout(x, p):
        return x * torch.empty_like(x).uniform_(0.5, 1.0).mul_(2.0)

    monkeypatch.setattr(functional, "dropout", dropout)
    same_toys(lambda x: functional.dropout(x * x, 0.3) * SCALE)
    assert counts["packed"] == 0


def _attention(x, **options):
    q, k, v = ((functional.silu(x) * factor).view(2, 8, 4, 4).transpose(1, 2) for factor in (1.0, 0.5, 2.0))
    return functional.scaled_dot_product_attention(q, k, v, **options) * SCALE


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_mask_inside_attention_stays_as_bits(dtype, counts):
    """On the CPU, attention with dropout is separate float32 operations; its mask is stored as bits."""
    region = same_toys(lambda x: _attention(x, dropout_p=0.4), dtype=dtype)
    assert counts == {"packed": 1, "unpacked": 1}
    assert region.dropped[MASK] == 2 * 4 * 8 * 8 * 4
    assert region.kept[MASKS] == 2 * 4 * 8


def test_only_the_first_forward_compares_masks(monkeypatch):
    compared = []
    monkeypatch.setattr(masks, "holds", lambda mask, scale: compared.append(mask.shape) or True)
    region = RebuildRegion("toy", save=("linear", "attention"))
    for _ in range(2):
        toy(lambda x: functional.dropout(_attention(x, dropout_p=0.4).transpose(1, 2).reshape(2, 8, 16), 0.3), region)
    assert compared == [(2, 4, 8, 8), (2, 8, 16)]


@pytest.mark.parametrize("p", [0.25, 1.0])
def test_masks_of_truth_values_stay_as_bits(p, counts, monkeypatch):
    """On CUDA, dropout is one operation with a boolean mask; here the test calls that operation directly."""
    monkeypatch.setattr(compat.frames, "input_of_dropout", lambda: torch.empty(0))
    region = same_toys(lambda x: (torch.native_dropout(x * x, p, True)[0] + x) * SCALE, dtype=torch.bfloat16)
    assert counts["packed"] == 1
    assert region.dropped[MASK] == ELEMENTS


# --- models -----------------------------------------------------------------------------------------------------------

# Dropouts per block; T5's decoder blocks have a second attention.
IN_BLOCK = {"llama": 1, "gpt2": 3, "bert": 3, "t5": 5}


def masks_of(model):
    """Bytes of the packed masks of each block in the last forward."""
    return {name: region.kept.get(MASKS, 0) for name, region in installation(model).regions.items()}


@each_family
@sparing(
    "attention,dtype",
    [(a, d) for a in ("eager", "sdpa") for d in ("fp32", "bf16", "autocast")],
    ("eager", "bf16"),
    ("sdpa", "fp32"),
    ("eager", "autocast"),
)
def test_models_keep_their_masks_as_bits(family, attention, dtype, counts):
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    plain, ours = plain_and_ours(family, dtype=kind, dropout=0.1, attention=attention)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        assert_same(step(plain, tiny_batch(family)), step(ours, tiny_batch(family)))
    blocks = {"t5": 2 * 4 + 2 * 6}.get(family, 2 * IN_BLOCK[family])
    assert counts["packed"] == counts["unpacked"] == blocks
    assert all(masks_of(ours).values())
    ours.eval()
    step(ours, tiny_batch(family))
    assert counts["packed"] == blocks, "nothing is packed in eval mode"


@each_family
@sparing("hub", [False, True], False)
def test_adapters_keep_their_masks_as_bits(family, hub, counts):
    plain, ours = (with_lora(tiny_model(family, layers=2, dtype=torch.bfloat16), family, hub=hub) for _ in range(2))
    hf_ckpt.install(ours, SELECTIVE)
    enable(ours)
    graphed = []  # a dropout whose input needs no gradient, as in the first block, saves no mask
    inside = (module for block in find_blocks(ours).modules.values() for module in block.modules())
    for module in inside:
        if isinstance(module, nn.Dropout) and module.p:
            module.register_forward_pre_hook(lambda _, args: graphed.append(args[0].requires_grad))
    assert_same(step(plain, tiny_batch(family)), step(ours, tiny_batch(family)))
    assert counts["packed"] == counts["unpacked"] == sum(graphed) > len(graphed) / 2


@each_family
def test_the_peak_is_not_raised(family, monkeypatch):
    """Packing masks lowers the peak, although packing and unpacking take memory for a moment."""
    peaks = {}
    for way in ("bits", "whole"):
        if way == "whole":
            monkeypatch.setattr(masks, "can_pack", lambda mask: False)
        model = plain_and_ours(family, dropout=0.1, attention="sdpa", layers=3)[1]
        batch = tiny_batch(family, batch=4, tokens=64)
        step(model, batch)
        with LiveBytes(model, batch) as live:
            step(model, batch)
        peaks[way] = live.peak_bytes - live.start_bytes
        assert len(find_blocks(model).blocks) >= 3
    assert peaks["bits"] < peaks["whole"]
