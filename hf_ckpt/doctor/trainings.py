"""Reads from training files what `Workload` describes: the model, its batch, adapters, types and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_ckpt.doctor.facts import ACCELERATE, Facts, is_positive, positive_int
from hf_ckpt.errors import HfCkptError
from hf_ckpt.prediction.optimizer_names import NAMES

_LENGTHS = ("max_length", "max_seq_length", "block_size", "sequence_len", "cutoff_len", "model_max_length")


def workload_fields(facts: Facts) -> dict[str, Any]:
    """The fields of `Workload` that files tell, by their names; what they leave open is left out.

    Raises `HfCkptError` for a `device_map` that keeps weights in host memory or on a disk.
    """
    _refuse_moved_weights(facts)
    found: dict[str, Any] = {
        "model": _text(facts, "model_name_or_path", "base_model", "model_name"),
        "batch": facts.batch or _number(facts, "per_device_train_batch_size", "micro_batch_size"),
        "tokens": facts.tokens or _number(facts, *_LENGTHS),
        "target_tokens": _number(facts, "max_target_length"),
        "accumulation": _number(facts, "gradient_accumulation_steps"),
        "attention": _text(facts, "attn_implementation"),
        "dtype": _text(facts, "torch_dtype", "dtype"),
        "load_in_4bit": facts.option_on("load_in_4bit") is not None or None,
        "load_in_8bit": facts.option_on("load_in_8bit") is not None or None,
        "packing": facts.option_on("packing", "sample_packing") is not None or None,
        "ranks": _ranks(facts),
        "parallel": "fsdp2" if facts.fsdp is not None else None,
        **_adapters(facts),
        **_computing(facts),
    }
    name = _text(facts, "optim", "optimizer")
    if name in NAMES:
        found["optimizer"] = name
    if found["dtype"] not in ("float32", "bfloat16", "float16"):
        # Scripts of transformers and TRL load in float32 unless told.
        found["dtype"] = "bfloat16" if found["load_in_4bit"] or found["load_in_8bit"] else "float32"
    return {name: value for name, value in found.items() if value is not None}


def _adapters(facts: Facts) -> dict[str, Any]:
    if facts.adapters is None:
        return {}
    targets = facts.option("lora_target_modules", "lora_target", "target_modules")
    chosen = None if targets is None else targets.value
    if chosen in ("all", "all-linear"):
        chosen = "all-linear"
    elif isinstance(chosen, str) and "," in chosen:
        chosen = tuple(part.strip() for part in chosen.split(","))
    rate = facts.option("lora_dropout")
    return {
        "lora": _number(facts, "lora_r", "lora_rank", "r") or 8,  # PEFT's default
        "lora_targets": tuple(chosen) if isinstance(chosen, list) else chosen,
        "lora_dropout": float(rate.value) if rate is not None and is_positive(rate.value) else None,
    }


def _computing(facts: Facts) -> dict[str, Any]:
    for flag, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        launched = any(str(file.values.get("mixed_precision")) == flag for file in facts.of(ACCELERATE))
        if facts.option_on(flag) is not None or launched:
            return {"autocast": name}
    return {"autocast": "none"}


def _ranks(facts: Facts) -> int | None:
    for file in facts.of(ACCELERATE):
        found = positive_int(file.setting("num_processes"))
        if found is not None:
            return found
    return None


def _number(facts: Facts, *names: str) -> int | None:
    return positive_int(facts.option(*names))


def _text(facts: Facts, *names: str) -> str | None:
    found = facts.option(*names)
    return found.value if found is not None and isinstance(found.value, str) else None


def _refuse_moved_weights(facts: Facts) -> None:
    found = facts.option("device_map")
    places = found.value.values() if found is not None and isinstance(found.value, Mapping) else ()
    offload = facts.option("offload_folder") or facts.option_on("offload_state_dict")
    if found is not None and (any(str(place) in ("cpu", "disk") for place in places) or offload is not None):
        raise HfCkptError(
            f"{found.where} keeps weights in host memory or on a disk, from where they come again for every forward: "
            "such a training cannot be planned for. Take fewer bits (load_in_4bit), more devices, or a smaller model, "
            'and `device_map: {"": 0}`.'
        )
