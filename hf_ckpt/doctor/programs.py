"""The programs whose training files can be read, one row each: how to recognise their files, and what keys mean.

The same key can mean different things: `bf16: true` is autocast over float32 weights for Trainer and TRL, and weights
in bfloat16 for axolotl and LLaMA-Factory. Sources: TRL 1.16, axolotl 0.19, LLaMA-Factory 0.9.5.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from hf_ckpt.doctor.facts import ACCELERATE, FLAGS, KWARGS, TRAINING, Facts, is_on, is_set
from hf_ckpt.prediction.question import FIELDS, about

KEYS = {name: about(field).keys for name, field in FIELDS.items() if about(field).keys}
"""Field of `Workload` -> its keys in the files of all programs."""
_BESIDE = {
    *("bf16", "fp16", "pure_bf16", "bfloat16", "float16", "float32", "quantization_bit", "lora_target_linear"),
    *("use_peft", "use_lora", "adapter", "finetuning_type", "flash_attention", "sdp_attention", "eager_attention"),
    *(
        "flex_attention",
        "activation_offloading",
        "use_unsloth_gc",
        "bnb_config_kwargs",
        "device_map",
        "fsdp",
        "fsdp_config",
        *FLAGS,
        *KWARGS,
    ),
}
"""Other keys that are read, or that a plan replaces."""

# Keys that do not change the memory of a training step: data, optimization, logs, saving, evaluation, launching.
_HARMLESS = re.compile(
    "|".join(
        (
            "(adam|answer|bench|chat_template|comet|data|dataloader|dataset|datasets|ddp|early_stopping|eval|evals|export|hub|"
            "generation|include|jit|label|lisa|log|logging|loraplus|lr|max_grad|mlflow|pad|preprocessing|push|ray|"
            "report|resume|run|save|saves|skip|swanlab|tb|tokenizer|trackio|val|wandb|warmup)(_.*)?",
            "(learning_rate|weight_decay|num(_train)?_epochs|max_steps|epochs?|.*seed|output_dir|overwrite_.*|do_.*)",
            "(group_by_length|length_column_name|remove_unused_columns|metric_for_.*|greater_is_better|load_best_.*)",
            "(train_on_inputs|train_on_prompt|mask_history|template|stage|media_dir|max_samples|streaming|shuffle_.*)",
            "(special_tokens|tokens|trust_remote_code|cache_dir|model_revision|revision|model_type|strict|plot_loss)",
            "(lora_alpha|use_rslora|lora_bias|lora_task_type|lora_fan_in_fan_out|init_lora_weights|peft_type|bias)",
            "(peft_use_rslora|task_type|lora_model_dir|bnb_4bit_quant_type|quantization_type|quantization_method)",
            "(tf32|double_quant|use_fast_tokenizer|split_special_tokens|resize_vocab|.*_token|disable_tqdm|prefix)",
            "(local_rank|world_size|no_cuda|use_cpu|disable_shuffling|test_datasets|type|rl_beta|beta|loss_watchdog_.*)",
            "(auto_resume_.*|train_split|test_split|prompt_template|completion_only_loss|assistant_only_loss|field.*)",
            "(per_device_eval_batch_size|enable_thinking|eot_tokens|default_system.*|excess_length_strategy|is_.*_model)",
        )
    )
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program, and how to read its files."""

    name: str
    """Its name in messages."""
    types: Callable[[Facts, bool], dict[str, Any]]
    """(facts, whether adapters freeze the weights) -> `dtype` and `autocast` of `Workload`."""
    telltales: tuple[str, ...] = ()
    """Keys that only this program has."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Its defaults for fields of `Workload`."""
    lora_by_default: bool = False
    """Whether it trains adapters by default."""


def program_of(facts: Facts) -> Program:
    """Return the program of the training files: the one with most telltales among their keys, or Trainer."""
    keys = {key for file in facts.of(TRAINING) for key in file.values}
    best = max(PROGRAMS, key=lambda program: len(keys.intersection(program.telltales)))
    return best if keys.intersection(best.telltales) else PROGRAMS[0]


def not_understood(facts: Facts) -> list[str]:
    """Return the keys of the training files that may affect memory and are not read, in their order."""
    known = _BESIDE.union(*KEYS.values())
    found = []
    for file in facts.of(TRAINING):
        for key, value in file.values.items():
            if is_set(value) and key not in known and not _HARMLESS.fullmatch(key):
                found.append(key)
    return found


# --- types ------------------------------------------------------------------------------------------------------------


def _named(facts: Facts, default: str) -> str:
    """Return the type of the weights from its key."""
    found = facts.option(*KEYS["dtype"])
    name = str(found.value).removeprefix("torch.") if found is not None else default
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "auto": "bfloat16"}.get(name, name)
    return name if name in ("float32", "bfloat16", "float16") else default


def _half(facts: Facts, *flags: tuple[str, str]) -> str | None:
    """Return the type of the first flag that is on."""
    return next((name for flag, name in flags if facts.option_on(flag) is not None), None)


def _launched(facts: Facts) -> str | None:
    """Return the type of the autocast that accelerate's launcher enables."""
    names = {"bf16": "bfloat16", "fp16": "float16"}
    found = (names.get(str(file.values.get("mixed_precision"))) for file in facts.of(ACCELERATE))
    return next(filter(None, found), None)


def _of_trainer(facts: Facts, frozen: bool) -> dict[str, Any]:
    """Scripts load in float32 by default, and `bf16` enables autocast."""
    quantised = any(facts.option_on(*KEYS[name]) is not None for name in ("load_in_4bit", "load_in_8bit"))
    autocast = _half(facts, ("bf16", "bfloat16"), ("fp16", "float16")) or _launched(facts)
    return {"dtype": _named(facts, "bfloat16" if quantised else "float32"), "autocast": autocast or "none"}


def _of_trl(facts: Facts, frozen: bool) -> dict[str, Any]:
    """Like Trainer, but `bf16` is on unless it or `fp16` is set. With 4 bits, the other weights keep their type."""
    found = {**_of_trainer(facts, frozen), "dtype": _named(facts, "float32")}
    if found["autocast"] == "none" and facts.option("bf16") is None:
        found["autocast"] = "bfloat16"
    return found


def _of_axolotl(facts: Facts, frozen: bool) -> dict[str, Any]:
    """`bf16`, which is on by default, sets the type of weights and autocast; `bfloat16` only that of weights."""
    bf16, fp16 = facts.option("bf16"), facts.option_on("fp16")
    autocast = "float16" if fp16 is not None else "none"
    if (bf16 is None and fp16 is None) or (bf16 is not None and (is_on(bf16.value) or bf16.value in ("auto", "full"))):
        autocast = "bfloat16"
    plain = _half(facts, ("bfloat16", "bfloat16"), ("float16", "float16"), ("load_in_8bit", "float16"))
    return {"dtype": (plain or "float32") if autocast == "none" else autocast, "autocast": autocast}


def _of_llama_factory(facts: Facts, frozen: bool) -> dict[str, Any]:
    """Weights have the type of the computation. Trained weights are cast to float32, except with `pure_bf16`."""
    pure = facts.option_on("pure_bf16") is not None
    autocast = None if pure else _half(facts, ("bf16", "bfloat16"), ("fp16", "float16"))
    dtype = (autocast or "bfloat16") if frozen or pure else "float32"
    return {"dtype": dtype, "autocast": autocast or "none"}


PROGRAMS = (
    Program("Trainer", _of_trainer, defaults={"lora": 8}),
    Program(
        "TRL",
        _of_trl,
        telltales=(
            *("use_peft", "use_bnb_nested_quant", "lora_task_type", "packing_strategy", "padding_free"),
            *("assistant_only_loss", "completion_only_loss", "num_generations", "max_completion_length"),
        ),
        defaults={"batch": 8, "tokens": 1024, "lora": 16, "lora_dropout": 0.05, "double_quant": False},
    ),
    Program(
        "axolotl",
        _of_axolotl,
        telltales=(
            *("base_model", "micro_batch_size", "sequence_len", "sample_packing", "adapter", "lora_target_linear"),
            *("pad_to_sequence_len", "val_set_size", "dataset_prepared_path", "bnb_config_kwargs"),
        ),
        defaults={"batch": 1, "lora": 8},
    ),
    Program(
        "LLaMA-Factory",
        _of_llama_factory,
        telltales=(
            *("finetuning_type", "cutoff_len", "quantization_bit", "lora_target", "lora_rank", "template", "stage"),
            *("pure_bf16", "double_quantization", "use_unsloth_gc", "flash_attn"),
        ),
        defaults={"batch": 8, "tokens": 2048, "lora": 8},
        lora_by_default=True,
    ),
)
"""All programs. Trainer is the first, because the others share its keys."""
