"""The programs whose training files hf_ckpt reads, one row each, and what their keys mean.

Sources: TRL 1.16, axolotl 0.19, LLaMA-Factory 0.9.5.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from hf_ckpt.errors import MissingDependencyError

Fields = Mapping[str, Any]
"""Field of a `Question` -> value; None if it is not set."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program, and how to read its files."""

    name: str
    telltales: tuple[str, ...]
    """Keys that only this program has."""
    weights: str
    """What decides the type of weights: `dtype` (a key), `autocast` (its type), or `frozen`: float32 if trained."""
    keys: Mapping[str, str]
    """Its keys beside the options of its dataclasses -> field of a `Question`; empty if the key is read elsewhere."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Its defaults for keys."""
    choices: Mapping[str, Mapping[str, Fields]] = dataclasses.field(default_factory=dict)
    """Key -> value in lower case -> fields that follow from it. Other values cannot be planned for."""
    library: str | None = None
    """The library with the dataclasses of its options; None if hf_ckpt does not use them."""
    configs: tuple[str, ...] = ()
    """Dataclasses of which a file is one: the first that knows most of its keys. Its name is the key `config`."""
    others: tuple[str, ...] = ()
    """Dataclasses of further options."""

    def options(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the dataclasses for a file with their defaults, and the name of its `config`."""
        if self.library is None:
            return {}
        try:
            library = importlib.import_module(self.library)
        except ImportError as error:
            command = f"pip install {self.library}"
            raise MissingDependencyError(self.library, f"reading a file of {self.name}", command) from error
        configs = [getattr(library, name) for name in self.configs]
        config = max(configs, key=lambda config: len(config.__dataclass_fields__.keys() & written.keys()))
        classes = (config, *(getattr(library, name) for name in self.others))
        options = {field.name: field.default for found in classes for field in dataclasses.fields(found)}
        return {**options, "config": config.__name__}


_TRAINER = {
    "model_name_or_path": "model",
    "per_device_train_batch_size": "batch",
    "optim": "optimizer",
    **dict.fromkeys(("max_length", "max_seq_length", "block_size", "max_source_length"), "tokens"),
    "max_target_length": "target_tokens",
    "gradient_accumulation_steps": "accumulation",
    "packing": "packing",
    "lora_r": "lora",
    "lora_target_modules": "lora_targets",
    "lora_dropout": "lora_dropout",
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "use_bnb_nested_quant": "double_quant",
    "attn_implementation": "attention",
    "dtype": "dtype",
    "torch_dtype": "dtype",
}
_AXOLOTL = {
    "base_model": "model",
    "micro_batch_size": "batch",
    "sequence_len": "tokens",
    "optimizer": "optimizer",
    "gradient_accumulation_steps": "accumulation",
    "sample_packing": "packing",
    "lora_r": "lora",
    "lora_target_modules": "lora_targets",
    "lora_dropout": "lora_dropout",
    "attn_implementation": "attention",
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    **dict.fromkeys(("lora_target_linear", "adapter", "rl", "bf16", "fp16", "bfloat16", "float16"), ""),
    **dict.fromkeys(("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_offloading"), ""),
    **dict.fromkeys(("fsdp", "fsdp_config", "fsdp_version", "deepspeed", "torch_compile"), ""),
    **dict.fromkeys(("flash_attention", "sdp_attention"), ""),  # both save as much as sdpa
}
_LLAMA_FACTORY = {
    "model_name_or_path": "model",
    "per_device_train_batch_size": "batch",
    "cutoff_len": "tokens",
    "gradient_accumulation_steps": "accumulation",
    "optim": "optimizer",
    "flash_attn": "attention",
    "lora_rank": "lora",
    "lora_target": "lora_targets",
    "lora_dropout": "lora_dropout",
    "neat_packing": "packing",
    "double_quantization": "double_quant",
    **dict.fromkeys(("quantization_bit", "stage", "finetuning_type", "pure_bf16", "use_unsloth_gc", "packing"), ""),
}
PROGRAMS = (
    Program(
        "Trainer", (), "dtype", _TRAINER, {"dtype": "auto"}, {}, "transformers", ("Seq2SeqTrainingArguments",)
    ),  # since transformers 5, weights have the type of the checkpoint
    Program(
        "TRL",
        ("use_peft", "packing", "assistant_only_loss", "completion_only_loss", "loss_type", "beta", "num_generations"),
        "dtype",
        _TRAINER,
        {"bf16": "auto"},
        {
            "config": {f"{trainer}config": {"trainer": trainer} for trainer in ("sft", "dpo", "grpo")},
            "use_peft": {"true": {}, "false": {"lora": None}},
            "precompute_ref_log_probs": {"none": {}, "false": {}, "true": {"reference": "precomputed"}},
        },
        "trl",
        ("SFTConfig", "DPOConfig", "GRPOConfig", "RewardConfig", "KTOConfig", "RLOOConfig"),
        ("ScriptArguments", "ModelConfig"),
    ),
    Program(
        "axolotl",
        ("base_model", "micro_batch_size", "sequence_len", "sample_packing", "adapter", "lora_target_linear"),
        "autocast",
        _AXOLOTL,
        {"micro_batch_size": 1, "sequence_len": 512, "lora_r": 8, "bf16": "auto"},
        {
            "adapter": {"none": {"lora": None}, "lora": {}, "qlora": {}},
            "rl": {"none": {"kbit_preparation": False}, "dpo": {"trainer": "dpo"}, "grpo": {"trainer": "grpo"}},
            "lora_target_linear": {"none": {}, "false": {}, "true": {"lora_targets": "all-linear"}},
        },
    ),
    Program(
        "LLaMA-Factory",
        ("finetuning_type", "cutoff_len", "quantization_bit", "lora_target", "template", "stage", "pure_bf16"),
        "frozen",
        _LLAMA_FACTORY,
        {"cutoff_len": 2048, "lora_rank": 8, "lora_target": "all", "finetuning_type": "lora", "stage": "sft"},
        {
            "stage": {**{stage: {"kbit_preparation": False} for stage in ("sft", "pt")}, "dpo": {"trainer": "dpo"}},
            "finetuning_type": {"lora": {}, "full": {"lora": None}},
            "quantization_bit": {"none": {}, "4": {"load_in_4bit": True}, "8": {"load_in_8bit": True}},
        },
        "transformers",
        ("Seq2SeqTrainingArguments",),
    ),
)
"""All programs. Trainer is the first, because the others share its keys."""
