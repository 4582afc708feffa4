"""The programs whose training files hf_ckpt reads, one row each, and what their keys mean.

Sources: TRL 1.16, axolotl 0.19, LLaMA-Factory 0.9.5.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

KEYS = {
    "model": ("model_name_or_path", "base_model", "model_name_or_path"),
    "batch": ("per_device_train_batch_size", "micro_batch_size", "per_device_train_batch_size"),
    "tokens": ("max_length max_seq_length block_size max_source_length", "sequence_len", "cutoff_len"),
    "target_tokens": ("max_target_length", "", ""),
    "accumulation": ("gradient_accumulation_steps", "gradient_accumulation_steps", "gradient_accumulation_steps"),
    "optimizer": ("optim", "optimizer", "optim"),
    "attention": ("attn_implementation", "attn_implementation", "flash_attn"),
    "packing": ("packing", "sample_packing", "neat_packing"),
    "lora": ("lora_r", "lora_r", "lora_rank"),
    "lora_targets": ("lora_target_modules", "lora_target_modules", "lora_target"),
    "lora_dropout": ("lora_dropout", "lora_dropout", "lora_dropout"),
    "load_in_4bit": ("load_in_4bit", "load_in_4bit", ""),
    "double_quant": ("use_bnb_nested_quant", "", "double_quantization"),
    "dtype": ("dtype torch_dtype", "", ""),
}
"""Field of a `Question` -> its keys in the files of Trainer and TRL, of axolotl, and of LLaMA-Factory."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program, and how to read its files."""

    name: str
    telltales: frozenset[str]
    """Keys that only this program has."""
    column: int
    """Its place in the rows of `KEYS`."""
    weights: str
    """What decides the type of weights: `dtype` (a key), `autocast` (its type), or `frozen`: float32 if trained."""
    defaults: Mapping[str, Any]
    """Its defaults for keys that no dataclass has, or whose dataclass does not say them."""
    choices: Mapping[str, Mapping[str, Mapping[str, Any]]] = dataclasses.field(default_factory=dict)
    """Key -> value in lower case -> fields that follow from it. Other values cannot be planned for."""
    others: str = ""
    """Further keys that are read."""
    configs: tuple[str, ...] = ("Seq2SeqTrainingArguments",)
    """Dataclasses of options. A file is for the first that knows most of its keys; its name is the key `config`."""
    library: str = "transformers"
    """Where the dataclasses are, and TRL's of further options."""

    @property
    def keys(self) -> dict[str, str]:
        """Key -> field of a `Question`."""
        return {key: name for name, row in KEYS.items() for key in row[self.column].split()}

    def options(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the dataclasses for a file with their defaults. Raises `ImportError` without them."""
        library = importlib.import_module(self.library)
        classes = [getattr(library, name) for name in self.configs]
        classes.sort(key=lambda config: -len(config.__dataclass_fields__.keys() & written.keys()))
        beside = [getattr(library, name, None) for name in ("ScriptArguments", "ModelConfig")]
        used = [config for config in (*classes[:1], *beside) if config is not None]
        options = {field.name: field.default for config in used for field in dataclasses.fields(config)}
        return {**options, "config": classes[0].__name__ if classes else ""}


PROGRAMS = (
    Program("Trainer", frozenset(), 0, "dtype", {}),
    Program(
        "TRL",
        frozenset(("use_peft", "packing", "assistant_only_loss", "completion_only_loss", "beta", "num_generations")),
        0,
        "dtype",
        {"bf16": "auto"},
        {
            "config": {f"{trainer}config": {"trainer": trainer} for trainer in ("sft", "dpo", "grpo")},
            "use_peft": {"true": {}, "false": {"lora": None}},
            "load_in_8bit": {"none": {}, "false": {}},
        },
        configs=("SFTConfig", "DPOConfig", "GRPOConfig", "RewardConfig", "KTOConfig", "RLOOConfig"),
        library="trl",
    ),
    Program(
        "axolotl",
        frozenset(("base_model", "micro_batch_size", "sequence_len", "adapter", "lora_target_linear")),
        1,
        "autocast",
        {"micro_batch_size": 1, "sequence_len": 512, "lora_r": 8, "bf16": "auto"},
        {
            "adapter": {"none": {"lora": None}, "lora": {}, "qlora": {}},
            "rl": {"none": {"kbit_preparation": False}, "dpo": {"trainer": "dpo"}, "grpo": {"trainer": "grpo"}},
            "lora_target_linear": {"none": {}, "false": {}, "true": {"lora_targets": "all-linear"}},
            "load_in_8bit": {"none": {}, "false": {}},
        },
        "adapter rl lora_target_linear load_in_8bit fp16 bfloat16 float16 gradient_checkpointing "
        "gradient_checkpointing_kwargs activation_offloading fsdp fsdp_config fsdp_version deepspeed torch_compile "
        "flash_attention sdp_attention",
        configs=(),
    ),
    Program(
        "LLaMA-Factory",
        frozenset(("finetuning_type", "cutoff_len", "quantization_bit", "lora_target", "template", "stage")),
        2,
        "frozen",
        {"cutoff_len": 2048, "lora_rank": 8, "lora_target": "all", "finetuning_type": "lora", "stage": "sft"},
        {
            "stage": {**{stage: {"kbit_preparation": False} for stage in ("sft", "pt")}, "dpo": {"trainer": "dpo"}},
            "finetuning_type": {"lora": {}, "full": {"lora": None}},
            "quantization_bit": {"none": {}, "4": {"load_in_4bit": True}},
        },
        "quantization_bit pure_bf16 use_unsloth_gc packing",
    ),
)
"""All programs. Trainer is the first, because the others share its keys."""
