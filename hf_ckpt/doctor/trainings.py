"""Read the fields of `Workload` from training files: the model, its batch, adapters, types and optimizer."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from hf_ckpt.doctor.facts import ACCELERATE, TRAINING, Facts, is_on, is_positive, key_of, positive_int, shown
from hf_ckpt.doctor.programs import KEYS, Program, not_understood, program_of
from hf_ckpt.doctor.rules import diagnose
from hf_ckpt.errors import HfCkptError
from hf_ckpt.prediction.optimizer_names import NAMES
from hf_ckpt.prediction.question import FIELDS, about
from hf_ckpt.units import parse_count

_ATTENTIONS = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "disabled": "eager", "auto": "sdpa"}
"""LLaMA-Factory's names of attention implementations."""
_FLAGS = {"flash": "flash_attention_2", "sdp": "sdpa", "eager": "eager", "flex": "flex_attention"}
"""Prefix of `_attention` in axolotl's flags -> attention implementation."""
_READ_APART = ("attention", "dtype", "double_quant", "lora", "lora_targets", "lora_dropout")
"""Fields that depend on the program or on adapters."""


def workload_fields(facts: Facts) -> dict[str, Any]:
    """Return field of `Workload` -> value, for the fields that the files set.

    `programs` has the rules for the files of each program. Raises `HfCkptError` for a `device_map` that keeps weights
    in host memory or on disk.
    """
    _refuse_moved_weights(facts)
    program = program_of(facts)
    adapters = _adapters(facts, program)
    found: dict[str, Any] = {
        **{name: _value(facts, name) for name in KEYS if name not in _READ_APART},
        "attention": _attention(facts),
        "ranks": _ranks(facts),
        "parallel": "fsdp2" if facts.fsdp is not None else None,
        **adapters,
        **program.types(facts, bool(adapters)),
    }
    found["batch"] = facts.batch or found["batch"] or program.defaults.get("batch")
    found["tokens"] = facts.tokens or found["tokens"] or program.defaults.get("tokens")
    bits = facts.option("quantization_bit")
    if bits is not None and str(bits.value) in ("4", "8"):
        found[f"load_in_{bits.value}bit"] = True
    if found["load_in_4bit"]:
        found["double_quant"] = _double_quant(facts, program)
        found["kbit_preparation"] = False if program.telltales else None
    return {name: value for name, value in found.items() if value is not None}


def remarks(facts: Facts) -> Iterator[str]:
    """Return sentences about options of the training files that a plan ignores."""
    beside = ("own-offloading", "fsdp-and-deepspeed")
    yield from (f"{finding.where}: {finding.what}" for finding in diagnose(facts) if finding.code in beside)
    left = not_understood(facts)
    optimizer = facts.option(*KEYS["optimizer"])
    if optimizer is not None and optimizer.value not in NAMES:
        left.append(f"{key_of(optimizer)}: {shown(optimizer.value)}")
    if left:
        files = ", ".join(file.path for file in facts.of(TRAINING))
        names = [name for names in KEYS.values() for name in names]
        near = {key: difflib.get_close_matches(key, names, n=1, cutoff=0.8) for key in left}
        told = [f"{key} (did you mean {near[key][0]}?)" if near[key] else key for key in left]
        yield f"{files}: not understood, and left out of the plan: {', '.join(told)}."


def _adapters(facts: Facts, program: Program) -> dict[str, Any]:
    chosen = facts.option("adapter", "finetuning_type")
    if facts.adapters is None and not (program.lora_by_default and chosen is None):
        return {}
    targets = facts.option(*KEYS["lora_targets"])
    chosen_targets = None if targets is None else targets.value
    if chosen_targets in ("all", "all-linear", ["all-linear"]) or facts.option_on("lora_target_linear") is not None:
        chosen_targets = "all-linear"
    elif isinstance(chosen_targets, str) and "," in chosen_targets:
        chosen_targets = tuple(part.strip() for part in chosen_targets.split(","))
    rate = facts.option(*KEYS["lora_dropout"])
    dropout = program.defaults.get("lora_dropout") if rate is None else rate.value
    return {
        "lora": _value(facts, "lora") or program.defaults["lora"],
        "lora_targets": tuple(chosen_targets) if isinstance(chosen_targets, list) else chosen_targets,
        "lora_dropout": float(dropout) if dropout is not None and is_positive(dropout) else None,
    }


def _double_quant(facts: Facts, program: Program) -> bool | None:
    found = facts.option(*KEYS["double_quant"])
    if found is None:
        given = facts.option("bnb_config_kwargs")
        inner = given.value.get(KEYS["double_quant"][-1]) if given and isinstance(given.value, Mapping) else None
        return program.defaults.get("double_quant") if inner is None else is_on(inner)
    return is_on(found.value)


def _attention(facts: Facts) -> str | None:
    flags = (name for flag, name in _FLAGS.items() if facts.option_on(f"{flag}_attention") is not None)
    name = _text(facts, *KEYS["attention"]) or next(flags, None)
    return None if name is None else _ATTENTIONS.get(name, name)


def _value(facts: Facts, name: str) -> Any:
    """Return the value of a field from the first of its keys that can be read; None if there is none."""
    field = FIELDS[name]
    if isinstance(field.default, bool):
        return any(facts.option_on(key) is not None for key in KEYS[name]) or None
    if about(field).read is parse_count:
        return positive_int(facts.option(*KEYS[name]))
    text = _text(facts, *KEYS[name])
    return text if text in about(field).choices or not about(field).choices else None


def _ranks(facts: Facts) -> int | None:
    for file in facts.of(ACCELERATE):
        found = positive_int(file.setting("num_processes"))
        if found is not None:
            return found
    return None


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
