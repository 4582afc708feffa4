"""Training files of TRL, axolotl and LLaMA-Factory follow the rules of their programs."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import yaml
from helpers.configs import found

from hf_ckpt.cli.main import main
from hf_ckpt.doctor.facts import gather
from hf_ckpt.doctor.programs import PROGRAMS, not_understood, program_of
from hf_ckpt.doctor.trainings import remarks, workload_fields
from hf_ckpt.errors import HfCkptError
from hf_ckpt.prediction.workload import Workload, load_config, skeleton_of_workload

TRL = """
model_name_or_path: mini-llama
dtype: bfloat16
load_in_4bit: true
use_bnb_nested_quant: true
use_peft: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [all-linear]
dataset_name: trl-lib/Capybara
max_length: 512
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
learning_rate: 2.0e-4
lr_scheduler_type: cosine
num_train_epochs: 1
optim: adamw_torch_fused
bf16: true
logging_steps: 10
output_dir: out
"""
AXOLOTL = """
base_model: mini-llama
load_in_8bit: false
load_in_4bit: true
strict: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/qlora-out
adapter: qlora
lora_model_dir:
sequence_len: 512
sample_packing: false
pad_to_sequence_len: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
"""
LLAMA_FACTORY = """
model_name_or_path: mini-llama
quantization_bit: 4
quantization_method: bnb
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target: all
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 512
max_samples: 1000
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/llama3/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
optim: adamw_torch_fused
bf16: true
ddp_timeout: 180000000
"""
FILES = {"TRL": TRL, "axolotl": AXOLOTL, "LLaMA-Factory": LLAMA_FACTORY}
QLORA = Workload(
    "mini-llama",
    2,
    512,
    lora=16,
    lora_dropout=0.05,
    load_in_4bit=True,
    kbit_preparation=False,
    autocast="bfloat16",
    optimizer="adamw_torch_fused",
    accumulation=4,
)


def facts_in(folder, text, **changed):
    file = folder / "train.yaml"
    file.write_text(yaml.safe_dump({**(yaml.safe_load(text) if text else {}), **changed}))
    return gather([file])


@pytest.mark.parametrize("program", FILES)
def test_the_same_qlora_is_the_same_training_in_each_program(program, tmp_path):
    facts = facts_in(tmp_path, FILES[program])
    assert program_of(facts).name == program
    assert Workload(**workload_fields(facts)) == QLORA
    assert list(remarks(facts)) == []


def test_the_three_files_ask_for_the_same_plan(tmp_path, monkeypatch):
    """The three files lead to the same question on the command line, and so to the same plan."""
    asked = []

    def record(*given, **_):
        asked.append(given)
        raise HfCkptError("enough")

    monkeypatch.setattr("hf_ckpt.forecast.forecast.Forecaster", record)
    for name, text in FILES.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        assert main(["plan", "--config", str(path), "--device", "4090", "--budget", "400MiB"]) == 2
    assert asked[0][0].workload == QLORA
    assert asked[0][0] == asked[1][0] == asked[2][0]


def test_without_preparation_nothing_is_cast_to_float32():
    """PEFT's preparation doubles the bytes of embeddings, head and norms; without it, nothing is cast."""
    found = []
    for prepared in (False, True):
        weights = skeleton_of_workload(dataclasses.replace(QLORA, kbit_preparation=prepared)).weights
        found.append(sum(math.prod(shape) * size for shape, size, _ in weights.tensors))
    config = load_config("mini-llama")
    halves = 2 * config.vocab_size * config.hidden_size + (2 * config.num_hidden_layers + 1) * config.hidden_size
    assert found[1] - found[0] == 2 * halves


@pytest.mark.parametrize(
    ("program", "changed", "types"),
    [
        ("TRL", {"dtype": None}, ("float32", "bfloat16")),
        ("TRL", {"dtype": "auto", "bf16": None}, ("bfloat16", "bfloat16")),
        ("TRL", {"bf16": False, "fp16": True, "dtype": "float16"}, ("float16", "float16")),
        ("axolotl", {"bf16": True}, ("bfloat16", "bfloat16")),
        ("axolotl", {"bf16": False, "bfloat16": True}, ("bfloat16", "none")),
        ("axolotl", {"bf16": None, "fp16": True}, ("float16", "float16")),
        ("axolotl", {"bf16": False}, ("float32", "none")),
        ("axolotl", {"adapter": None, "load_in_4bit": False}, ("bfloat16", "bfloat16")),
        ("LLaMA-Factory", {"fp16": True, "bf16": None}, ("float16", "float16")),
        ("LLaMA-Factory", {"quantization_bit": None}, ("bfloat16", "bfloat16")),
        ("LLaMA-Factory", {"quantization_bit": None, "finetuning_type": "full"}, ("float32", "bfloat16")),
        (
            "LLaMA-Factory",
            {"quantization_bit": None, "finetuning_type": "full", "bf16": None, "pure_bf16": True},
            ("bfloat16", "none"),
        ),
    ],
)
def test_bf16_means_what_it_means_to_the_program(program, changed, types, tmp_path):
    fields = workload_fields(facts_in(tmp_path, FILES[program], **changed))
    assert (fields["dtype"], fields["autocast"]) == types


def test_for_trainer_bf16_is_autocast_over_float32_weights(tmp_path):
    facts = facts_in(tmp_path, "", model_name_or_path="gpt2", output_dir="out", bf16=True)
    assert program_of(facts) is PROGRAMS[0]
    assert workload_fields(facts) == {"model": "gpt2", "dtype": "float32", "autocast": "bfloat16"}


@pytest.mark.parametrize(
    ("program", "changed", "field", "value"),
    [
        ("LLaMA-Factory", {"quantization_bit": 8}, "load_in_8bit", True),
        ("LLaMA-Factory", {"double_quantization": False}, "double_quant", False),
        ("LLaMA-Factory", {"flash_attn": "fa2"}, "attention", "flash_attention_2"),
        ("LLaMA-Factory", {"finetuning_type": None, "lora_rank": None}, "lora", 8),
        ("LLaMA-Factory", {"cutoff_len": None}, "tokens", 2048),
        ("axolotl", {"flash_attention": True}, "attention", "flash_attention_2"),
        ("axolotl", {"sample_packing": True}, "packing", True),
        ("axolotl", {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}, "double_quant", False),
        ("axolotl", {"adapter": None, "load_in_4bit": False}, "lora", None),
        ("TRL", {"use_bnb_nested_quant": None}, "double_quant", False),
        ("TRL", {"lora_r": None}, "lora", 16),
        ("TRL", {"use_peft": False, "load_in_4bit": False}, "lora", None),
    ],
)
def test_keys_mean_what_they_mean_to_the_program(program, changed, field, value, tmp_path):
    assert workload_fields(facts_in(tmp_path, FILES[program], **changed)).get(field) == value


def test_what_is_not_understood_is_told(tmp_path):
    facts = facts_in(tmp_path, AXOLOTL, sequence_length=4096, use_liger=True, optimizer="muon", peft_use_dora=False)
    assert not_understood(facts) == ["sequence_length", "use_liger"]
    (told,) = remarks(facts)
    assert told.endswith(
        "not understood, and left out of the plan: sequence_length (did you mean sequence_len?), use_liger, "
        "optimizer: 'muon'."
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"activation_offloading": True},
        {"activation_offloading": "legacy"},
        {"gradient_checkpointing": "unsloth"},
        {"gradient_checkpointing": "offload"},
    ],
)
def test_axolotls_ways_of_offloading_are_checkpointing_that_is_on(changed, tmp_path):
    facts = facts_in(tmp_path, AXOLOTL, **changed)
    assert facts.checkpointing is not None
    assert found(facts, "own-offloading")
    (told,) = remarks(facts)
    assert next(iter(changed)) in told
    assert not found(facts_in(tmp_path, AXOLOTL, activation_offloading=False), "own-offloading")


def test_fsdp_beside_deepspeed_is_told(tmp_path):
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    deepspeed = str(tmp_path / "zero.json")
    facts = facts_in(tmp_path, AXOLOTL, fsdp=["full_shard"], deepspeed=deepspeed)
    assert found(facts, "fsdp-and-deepspeed")
    assert any("Both fsdp and deepspeed" in told for told in remarks(facts))
    assert not found(facts_in(tmp_path, AXOLOTL, deepspeed=deepspeed), "fsdp-and-deepspeed")


def test_the_keys_of_the_trl_file_are_trls():
    trl = pytest.importorskip("trl")
    classes = (trl.SFTConfig, trl.ModelConfig, trl.ScriptArguments)
    known = {name for made in classes for name in made.__dataclass_fields__}
    assert yaml.safe_load(TRL).keys() <= known
