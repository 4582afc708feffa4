"""Peaks under autocast, with dropout, padding and frozen blocks, at other depths and for other models."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.sparing import sparing
from helpers.tracing import CPU, PEAK, PEAK_BATCH, a_family, chosen, model_of, near_real, plans_of, real_peaks, within

from hf_ckpt.costs.timeline import timeline
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch
from hf_ckpt.prediction.skeleton import skeleton_of
from hf_ckpt.prediction.trace import Step, trace_costs
from hf_ckpt.spec.actions import FULL, KEEP, SELECTIVE

HIDDEN_STATE = PEAK_BATCH["batch"] * PEAK_BATCH["tokens"] * PEAK["hidden"] * 2
"""Bytes of one hidden state in bfloat16."""


def padded_batch(family):
    """A batch in which each sequence is shorter than the one before."""
    batch = tiny_batch(family, **PEAK_BATCH)
    for place, mask in enumerate(batch["attention_mask"]):
        mask[len(mask) - 16 * place :] = 0
    return batch


@pytest.mark.slow
def test_peaks_of_deeper_models_are_put_together_from_the_same_parts():
    model = model_of("llama", dtype=torch.bfloat16, **{**PEAK, "layers": 16})
    near_real(model, tiny_batch("llama", **PEAK_BATCH))


@pytest.mark.long
@pytest.mark.compat
@a_family
def test_peak_under_autocast(family):
    hidden = 256 if family == "bert" else PEAK["hidden"]  # for narrow models, `full` is predicted 4 % too high
    model = model_of(family, **{**PEAK, "hidden": hidden})
    near_real(model, tiny_batch(family, **PEAK_BATCH), autocast=torch.bfloat16)


@pytest.mark.slow
@a_family
def test_peak_with_dropout(family):
    model = model_of(family, dropout=0.1, dtype=torch.bfloat16, **PEAK)
    near_real(model, tiny_batch(family, **PEAK_BATCH), (KEEP, FULL))


@pytest.mark.slow
@pytest.mark.compat
@a_family
def test_peak_of_a_padded_batch(family):
    model = model_of(family, dtype=torch.bfloat16, **PEAK)
    near_real(model, padded_batch(family), (KEEP, SELECTIVE), padded=True)


@pytest.mark.compat
@a_family
def test_peak_above_a_frozen_prefix(family):
    """Three frozen blocks save nothing, so `keep` is their only action."""
    model = model_of(family, dtype=torch.bfloat16, **PEAK)
    inside = [f"{block.name}." for block in find_blocks(model).blocks]
    for name, parameter in model.named_parameters():
        outside = not name.startswith(tuple(inside))
        if name.startswith(tuple(inside[:3])) or (outside and ("emb" in name or "wte" in name or "wpe" in name)):
            parameter.requires_grad_(False)
        if name == "shared.weight":
            parameter.requires_grad_(False)
    costs = near_real(model, tiny_batch(family, **PEAK_BATCH))
    first, *others = costs.stacks
    assert [first.choices[kind] for kind in first.kinds] == [(0,)] * 3 + [(0, 1, 2)] * (len(first.kinds) - 3)
    assert all(choices == (0, 1, 2) for stack in others for choices in stack.choices)
    assert set(costs.uniform(2)[0][:3]) == {0}


WIDE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "pad_token_id": 0,
}
OTHERS = {
    "Gemma2ForCausalLM": {**WIDE, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 16},
    # These hold all hidden states until their stack has run, or free more than other models at that point.
    "DebertaV2ForMaskedLM": WIDE,
    "BartForConditionalGeneration": {
        "vocab_size": 320,
        "d_model": 256,
        "pad_token_id": 0,
        "encoder_layers": 6,
        "decoder_layers": 4,
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 512 for side in ("encoder", "decoder")},
    },
}


@pytest.mark.slow
@sparing("name", OTHERS, "DebertaV2ForMaskedLM")
def test_peak_of_other_models(name):
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**OTHERS[name])).train().to(torch.bfloat16)
    near_real(model, tiny_batch("llama", **PEAK_BATCH))


@pytest.mark.compat
@sparing(
    ("family", "layers"), [(family, layers) for family in FAMILIES for layers in (1, 2)], ("llama", 1), ("llama", 2)
)
def test_models_of_one_and_two_blocks(family, layers):
    """For shallow models, predictions are too high by at most a few hidden states; for T5, by its scores."""
    model = model_of(family, dtype=torch.bfloat16, **{**PEAK, "layers": layers})
    batch = tiny_batch(family, **PEAK_BATCH)
    with within(60):
        around = Step(batch, accumulation=2, optimizer="sgd")
        costs = trace_costs(skeleton_of(model), around, CPU, actions=(KEEP, SELECTIVE, FULL))
    most = (6 if family == "t5" else 2) * HIDDEN_STATE
    for name, choice in plans_of(costs).items():
        for accumulated, peak in enumerate(real_peaks(model, chosen(costs, choice), batch)):
            over = timeline(costs, choice, bool(accumulated)).peak_bytes - peak
            assert 0 <= over <= most, (name, accumulated, over / HIDDEN_STATE)
