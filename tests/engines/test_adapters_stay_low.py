"""`save: ["attention"]` keeps as little with adapters around frozen linear layers as without them."""

from __future__ import annotations

import functools

import peft
import pytest
import torch
from helpers.sparing import sparing
from helpers.steps import assert_same, enable, step
from helpers.toys import SELECTIVE

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.rebuild.values import MASKS, NO_GRAPH
from hf_ckpt.errors import InPlaceError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

ATTENTION = {**SELECTIVE, "save": ["attention"]}
LORA = functools.partial(peft.LoraConfig, r=4, init_lora_weights=False)
ADAPTERS = {
    "LoRA": functools.partial(LORA, lora_dropout=0.1),
    "LoRA, no dropout": LORA,
    "rsLoRA": functools.partial(LORA, lora_dropout=0.1, use_rslora=True),
    "DoRA": functools.partial(LORA, lora_dropout=0.1, use_dora=True),
    "DoRA, no dropout": functools.partial(LORA, use_dora=True),
    "VeRA": functools.partial(peft.VeraConfig, r=4, vera_dropout=0.1, init_weights=False),
}
INPUTS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "bert": ["query", "key", "value", "output.dense", "intermediate.dense"]}
ROWS = 2 * 16  # tokens of a batch


def model_of(family, adapters=None):
    model = tiny_model(family, layers=3, dropout=0.1, attention="eager", dtype=torch.bfloat16)
    if adapters is None:
        return model
    torch.manual_seed(1)
    targets = INPUTS.get(family, "all-linear")
    return peft.get_peft_model(model, ADAPTERS[adapters](target_modules=targets, fan_in_fan_out=family == "gpt2"))


def activations(model, family):
    """Bytes of activations that the last block of the encoder, or else of the decoder, keeps beside masks."""
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
    ("DoRA", "llama"),
    ("DoRA, no dropout", "gpt2"),
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
    block = next(iter(find_blocks(model).modules.values()))
    magnitudes = sum(4 * value.numel() for name, value in block.named_parameters() if "magnitude" in name)
    assert 0 < activations(model, family) <= activations(plain, family) + magnitudes


def test_what_a_frozen_layer_is_given_stays_in_16_bits_once():
    """Autograd saves only the adapter's float32 copy of it, after the dropout; the attention's output is one."""
    model = model_of("gpt2", "LoRA")
    hf_ckpt.install(model, ATTENTION)
    activations(model, "gpt2")
    last = list(installation(model).regions.values())[-1]
    assert last.kept["attention"] == ROWS * 32 * 2
    assert last.kept_to_rebuild["attention"] == ROWS * 32 * 2
    assert last.dropped["mask"] > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dropout", ["", ", no dropout"])
def test_dora_holds_no_copy_of_a_frozen_weight(family, dropout):
    """With dropout it multiplies by the weight in the type of its own input, which is float32."""
    held = []
    for adapters in ("LoRA", "DoRA"):
        model = model_of(family, adapters + dropout)
        hf_ckpt.install(model, ATTENTION)
        enable(model)
        batch = tiny_batch(family)
        with LiveBytes(model, batch) as live:
            loss = model(**batch).loss
            held.append(live.current_bytes - live.start_bytes)
        del loss
    copies = sum(4 * value.numel() for name, value in model.named_parameters() if "base_layer.weight" in name)
    assert held[1] - held[0] < copies / 5


def test_a_weight_under_dora_that_is_changed_before_the_backward_is_an_error():
    model = model_of("llama", "DoRA")
    hf_ckpt.install(model, ATTENTION)
    enable(model)
    loss = model(**tiny_batch("llama")).loss
    with torch.no_grad():
        [value for name, value in model.named_parameters() if "down_proj.base_layer.weight" in name][-1].mul_(2)
    with pytest.raises(InPlaceError):
        loss.backward()
