"""LoRA on a 4-bit or 8-bit base, with bitsandbytes' own CPU kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from helpers.clients import LAYERS, MIXED, PLANS, STEPS
from helpers.compiled import kept
from helpers.sparing import sparing
from helpers.steps import assert_near, enable, input_gradient_hooks
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

import hf_ckpt
from hf_ckpt.models.tiny import tiny_batch, tiny_model


def lora_model(folder: Path, bits: int | None, *, prepare: bool | None = False, dropout: float = 0.1):
    """LoRA on a LLaMA with linear layers in 4 or 8 bits, or in 32 (None)."""
    how = {}
    if bits is not None:
        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
        how["quantization_config"] = transformers.BitsAndBytesConfig(**(four if bits == 4 else {"load_in_8bit": True}))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    if prepare is None:
        prepare_model_for_kbit_training(model)  # enables transformers' own checkpointing
    else:
        prepare_model_for_kbit_training(model, use_gradient_checkpointing=prepare)
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout)
    model = get_peft_model(model, lora).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide half of the gradients
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def steps_of(model):
    """Loss and gradients of five steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    torch.manual_seed(5)
    found = []
    for number in range(STEPS):
        loss = model(**tiny_batch("llama", seed=number, tokens=32), use_cache=False).loss
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **gradients})
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.fixture
def base64(tmp_path):
    tiny_model("llama", layers=LAYERS, hidden=64, attention="sdpa").save_pretrained(tmp_path / "base64")
    return tmp_path / "base64"


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
    trained = {name for name, value in wanted[0].items() if value.any()}
    assert len(trained) == 1 + 2 * 7 * LAYERS
    for spec in (*PLANS.values(), {"policy": "full", "segments": 2}, {"policy": "selective", "save": ["attention"]}):
        done = []
        for model in (lora_model(base64, bits), lora_model(base64, None)):
            hf_ckpt.install(model)
            model.gradient_checkpointing_enable(spec)
            got = steps_of(model)
            done.append(hf_ckpt.describe(model))
            if len(done) == 1:
                assert_same_steps(wanted, got)
        quantised, plain = done
        full = [name for name, action in quantised.plan.active().items() if action.kind == "full"]
        times = [STEPS] * len(full)
        if "segments" in spec:  # the first of two blocks also runs again to make the second one's input
            times[0] *= 2
        assert [quantised.recomputed[name] for name in full] == times
        assert set(quantised.forwards.values()) == {STEPS}
        assert bool(quantised.dropped_tensors) == (len(full) < len(quantised.forwards))
        if "save" not in spec:
            assert quantised.dropped_tensors == plain.dropped_tensors
        else:  # only PyTorch's own linear layers can be rebuilt
            assert 0 < quantised.dropped_tensors < plain.dropped_tensors


def assert_same_steps(wanted, got):
    for before, after in zip(wanted, got, strict=True):
        assert before.keys() == after.keys()
        assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


@sparing("prepare", [None, True, False], None)
def test_preparing_for_kbit_training_does_not_keep_the_plan_off(base64, prepare):
    """k-bit preparation enables transformers' own checkpointing by default, but does not prevent a plan."""
    wanted = steps_of(lora_model(base64, 4))
    model = lora_model(base64, 4, prepare=prepare)
    assert (input_gradient_hooks(model) > 0) == (prepare is not False)
    hf_ckpt.install(model, MIXED)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert input_gradient_hooks(model) == 0
    assert_same_steps(wanted, steps_of(model))
    done = hf_ckpt.describe(model)
    first, second = done.recomputed.values()
    assert (first, second > 3 * STEPS) == (STEPS, True)


def compiled(folder, bits, share):
    model = lora_model(folder, bits, dropout=0.0)
    hf_ckpt.install(model, {"compile": "blocks", "share": share})
    enable(model)
    return model


@pytest.mark.slow
@sparing("bits", [4, 8], 4)
def test_compiled_blocks_on_a_quantised_base(nothing_compiled, graphs, base64, bits):
    """Each block is one graph. It saves as many bytes as on a plain base; 5 % more because the partitioner chooses."""
    batch = tiny_batch("llama", tokens=48)
    eager, most = kept(lora_model(base64, bits, dropout=0.0), batch)
    sizes = []
    for share in (1.0, 0.0):
        model = compiled(base64, bits, share)
        found, quantised = kept(model, batch)
        _, plain = kept(compiled(base64, None, share), batch)
        assert_near(eager, found)
        told = hf_ckpt.describe(model)
        assert len(told.in_graphs) == LAYERS
        assert set(told.forwards.values()) == {1}
        assert quantised <= 1.05 * plain
        sizes.append(quantised)
    assert sizes[1] < 0.4 * sizes[0] < 0.4 * most
