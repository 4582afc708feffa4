"""LoRA on a 4-bit or 8-bit base, with bitsandbytes' own CPU kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from helpers.adapters import with_lora
from helpers.clients import LAYERS, MIXED, PLANS, STEPS
from helpers.compiled import kept
from helpers.sparing import sparing
from helpers.steps import assert_near, assert_same, gradients, input_gradient_hooks, planned
from peft import prepare_model_for_kbit_training

import hf_ckpt
from hf_ckpt.models.tiny import tiny_batch, tiny_model


def lora_model(folder: Path, bits: int | None, *, dropout: float = 0.1, prepare: bool = False):
    """LoRA on a LLaMA with linear layers in 4 or 8 bits, or in 32 (None)."""
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    options = {4: four, 8: {"load_in_8bit": True}}.get(bits)
    config = None if options is None else transformers.BitsAndBytesConfig(**options)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=prepare)
    return with_lora(model, "llama", targets="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout).train()


def steps_of(model):
    """Loss and gradients of five steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(5)
    found = []
    for number in range(STEPS):
        loss = model(**tiny_batch("llama", seed=number, tokens=32), use_cache=False).loss
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.fixture
def base64(tmp_path):
    tiny_model("llama", layers=LAYERS, hidden=64, attention="sdpa").save_pretrained(tmp_path / "base64")
    return tmp_path / "base64"


def assert_same_steps(wanted, got):
    for before, after in zip(wanted, got, strict=True):
        assert_same(before, after)


@pytest.mark.long
@sparing("bits", [4, 8], 4)
def test_lora_on_a_quantised_base(base64, bits):
    """On a quantised base, a plan drops and keeps the same bytes as on a plain base.

    bitsandbytes' functions do not save unpacked weights.
    """
    import bitsandbytes

    reference = lora_model(base64, bits)
    kind = {4: bitsandbytes.nn.Linear4bit, 8: bitsandbytes.nn.Linear8bitLt}[bits]
    assert sum(isinstance(module, kind) for module in reference.modules()) == 7 * LAYERS
    wanted = steps_of(reference)
    for spec in (*PLANS.values(), {"policy": "selective", "save": ["attention"]}):
        quantised, plain = lora_model(base64, bits), lora_model(base64, None)
        for model in (quantised, plain):
            planned(model, spec)
        assert_same_steps(wanted, steps_of(quantised))
        steps_of(plain)
        quantised, plain = hf_ckpt.describe(quantised), hf_ckpt.describe(plain)
        full = [name for name, action in quantised.plan.active().items() if action.kind == "full"]
        assert [quantised.recomputed[name] for name in full] == [STEPS] * len(full)
        assert set(quantised.forwards.values()) == {STEPS}
        assert bool(quantised.dropped_tensors) == (len(full) < len(quantised.forwards))
        if "save" not in spec:
            assert quantised.dropped_tensors == plain.dropped_tensors
        else:  # only PyTorch's own linear layers can be rebuilt
            assert 0 < quantised.dropped_tensors < plain.dropped_tensors


@pytest.mark.trap(23)
def test_kbit_preparation_does_not_prevent_a_plan(base64):
    """k-bit preparation enables transformers' own checkpointing by default, but does not prevent a plan."""
    wanted = steps_of(lora_model(base64, 4))
    model = lora_model(base64, 4, prepare=True)
    assert input_gradient_hooks(model) > 0
    hf_ckpt.install(model, MIXED)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert input_gradient_hooks(model) == 0
    assert_same_steps(wanted, steps_of(model))
    full, selective = hf_ckpt.describe(model).recomputed.values()
    assert full == STEPS < selective


@pytest.mark.slow
@sparing("bits", [4, 8], 4)
def test_compiled_blocks_on_a_quantised_base(nothing_compiled, graphs, base64, bits):
    """Each block is one graph. It saves as many bytes as on a plain base; 5 % more because the partitioner chooses."""
    batch, saved = tiny_batch("llama", tokens=48), {}
    expected, eager = kept(lora_model(base64, bits, dropout=0.0), batch)
    for base in (bits, None):
        model = lora_model(base64, base, dropout=0.0)
        planned(model, {"compile": "blocks", "share": 0.0})
        found, saved[base] = kept(model, batch)
        if base == bits:
            assert_near(expected, found, 1e-5)  # decomposed operations round differently
        described = hf_ckpt.describe(model)
        assert len(described.in_graphs) == LAYERS
        assert set(described.forwards.values()) == {1}
    assert saved[bits] <= 1.05 * saved[None]
    assert saved[bits] < 0.4 * eager
