"""The memory in which a model writes completions before a step of GRPO: predicted, against a count."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.sparing import sparing

import hf_ckpt
from hf_ckpt.compat.peft import add_lora
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_model
from hf_ckpt.planner import forecast as forecasts
from hf_ckpt.prediction.generation import generation_bytes
from hf_ckpt.prediction.workload import Workload, skeleton_of_workload
from hf_ckpt.spec.actions import FULL, KEEP
from hf_ckpt.units import GIB

ROWS, PROMPT, TOKENS = 4, 16, 96
GRPO = {"trainer": "grpo", "batch": 2, "accumulation": 2, "tokens": TOKENS, "autocast": "none", "dtype": "float32"}
CASES = [("llama", None), ("llama", "bfloat16"), ("gpt2", None), ("llama", "lora")]


@pytest.fixture
def saved(tmp_path):
    """Saves a model as a folder that a workload can name."""

    def save(model):
        model.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def written(model, autocast):
    """Bytes beside the model's, at their peak, while it writes completions of padded prompts as TRL has it do."""
    mask = torch.ones(ROWS, PROMPT, dtype=torch.long)
    mask[0, :3] = 0  # prompts of different lengths
    ids = torch.randint(5, 60, (ROWS, PROMPT))
    options = {"max_new_tokens": TOKENS - PROMPT, "min_new_tokens": TOKENS - PROMPT, "do_sample": True}
    with LiveBytes(model) as live, torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
        found = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **options)
    assert found.shape == (ROWS, TOKENS)
    return live.peak_bytes - live.start_bytes, live.start_bytes


@sparing(("family", "how"), CASES, CASES[0], CASES[2])
def test_what_is_written_in_is_what_generate_takes(family, how, saved):
    autocast, lora = ("bfloat16", None) if how == "bfloat16" else (None, 8 if how == "lora" else None)
    model = tiny_model(family, layers=4, hidden=128, attention="sdpa")
    workload = Workload(saved(model), **{**GRPO, "autocast": autocast or "none"}, lora=lora)
    found = generation_bytes(workload, skeleton_of_workload(workload, on_cpu=True), on_cpu=True)
    model = model if lora is None else add_lora(model, rank=lora)
    peak, weights = written(model.train(), autocast)
    cache = 2 * 4 * ROWS * (TOKENS - 1) * model.config.hidden_size * (2 if autocast else 4)
    cache //= model.config.num_attention_heads // getattr(
        model.config, "num_key_value_heads", model.config.num_attention_heads
    )
    assert peak > cache
    assert weights + found == pytest.approx(weights + peak, rel=0.03)
    assert found == pytest.approx(peak, rel=0.1)


def test_what_is_written_elsewhere_takes_nothing(saved):
    folder = saved(tiny_model("llama", layers=2))
    asked = [Workload(folder, **{**GRPO, **more}) for more in ({}, {"accumulation": 4}, {"generation": "vllm"})]
    skeleton = skeleton_of_workload(asked[0], on_cpu=True)
    once, twice, elsewhere = (generation_bytes(workload, skeleton, on_cpu=True) for workload in asked)
    assert 1.9 * once < twice < 2.1 * once
    assert elsewhere == generation_bytes(Workload(folder), skeleton, on_cpu=True) == 0


def test_a_plan_has_room_for_what_is_written(saved, monkeypatch):
    """Completions of many micro-steps take more than one micro-step does."""
    monkeypatch.setattr(forecasts, "actions_for", lambda *_, compiled: (KEEP, FULL))
    monkeypatch.setattr(forecasts, "largest", lambda *_: 0)
    folder = saved(tiny_model("llama", layers=4, hidden=128, attention="sdpa"))
    sizes = {**GRPO, "accumulation": 64, "lora": 4, "optimizer": "sgd"}
    found = hf_ckpt.predict(folder, device="t4", **sizes)
    static = found.costs.static
    assert found.floor_bytes == static.always + static.generation > static.always + 2**20
    least = found.within(found.floor_bytes)
    assert least.peak_bytes == found.floor_bytes
    assert dict(least.plan.prediction.parts)["temporary in generation"] == static.generation
    assert least.timeline.moments[0].label == "generation"
    low = hf_ckpt.predict(folder, device="t4", **sizes, generation="vllm")
    assert low.costs.static.generation == 0
    assert low.floor_bytes < found.floor_bytes
    with pytest.raises(InfeasibleError, match=r"completions are written in .*--generation vllm"):
        hf_ckpt.predict(folder, device="t4", budget=str(static.always + static.generation - 1), **sizes)


def test_what_writes_is_asked_of_grpo_only():
    with pytest.raises(HfCkptError, match="generation must be one of transformers, vllm"):
        Workload("gpt2", trainer="grpo", generation="vlm")
    with pytest.raises(HfCkptError, match="generation goes with the trainer grpo"):
        Workload("gpt2", trainer="dpo", generation="vllm")


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["Qwen2", "Mistral", "Gemma2", "Phi3", "StableLm", "GPTNeoX", "Qwen3Moe"])
def test_other_causal_models_write(architecture):
    config = getattr(transformers, f"{architecture}Config")()
    workload = Workload(config.model_type, trainer="grpo", batch=4, tokens=512)
    skeleton = skeleton_of_workload(workload, config)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    least = 2 * config.num_hidden_layers * 4 * 511 * heads * size * 2
    assert least < generation_bytes(workload, skeleton) < 1.5 * least + GIB
