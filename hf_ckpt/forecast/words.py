"""Sentences and lines to copy: whether a training fits, what was assumed, and which settings it needs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from hf_ckpt.forecast.devices import Device
from hf_ckpt.forecast.question import Question
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import GIB, exact_size, format_bytes

NONE = {"policy": "none"}
"""The spec without checkpointing."""
_OPTIM = {"adamw": "adamw_torch_fused", "adam": "adamw_torch_fused", "adamw8bit": "adamw_8bit", "lion": "lion_32bit"}
"""Short names of optimizers -> their names in Trainer's `optim`."""
_AXOLOTL = {
    "per_device_train_batch_size": "micro_batch_size",
    "max_length": "sequence_len",
    "packing": "sample_packing",
    "optim": "optimizer",
    "lora": "lora_r",
}
OWN_KEYS = {"axolotl": _AXOLOTL, "LLaMA-Factory": {"max_length": "cutoff_len", "lora": "lora_rank"}}
"""Program with files of its own -> its names for keys of Trainer and TRL, where they differ."""


def assumed(workload: Question, model: str, device: Device, budget_bytes: int) -> str:
    """The assumptions in one line: what is trained (and its class `model`), types, optimizer, batch, device, budget."""
    layers = workload.lora_targets
    where = "every linear layer" if layers == "all-linear" else layers if isinstance(layers, str) else ", ".join(layers)
    computing = f"autocast {workload.autocast_name}" if workload.autocast_name else "no autocast"
    if not device.bfloat16 and "float16" in (workload.dtype, workload.autocast_name):
        computing += f" ({_named(device)} has no bfloat16)"
    accumulated = f" x {workload.accumulation} micro-steps" if workload.accumulation > 1 else ""
    parts = (
        "every weight" if workload.lora is None else f"LoRA r={workload.lora} on {where}",
        "base in 4 bits" if workload.load_in_4bit else "",
        "the rest in float32" if workload.prepared else "",
        f"weights {workload.dtype}",
        computing,
        workload.optimizer,
        f"batch {workload.batch} x {workload.tokens} tokens{accumulated}",
        workload.attention,
        f"{workload.trainer.upper()} of TRL" if workload.trainer else "",
        "packed" if workload.packing else "",
        f"{workload.ranks} ranks ({workload.parallel})" if workload.ranks > 1 else "",
    )
    trained = f"{workload.model} ({model}): {', '.join(filter(None, parts))}"
    return f"{trained}; {device.title}, budget {format_bytes(budget_bytes)}"


def headline(peak_bytes: int, budget_bytes: int, device: Device, tokens_per_second: float | None, ranks: int) -> str:
    """Whether a peak fits: "Fits: 21.3 of 23.5 GiB on an RTX 4090, 4,100 tokens a second." A rank trains these tokens.

    The peak is that of a plan, or the lowest of all plans if none fits.
    """
    digits = 1 if budget_bytes >= GIB else 3
    whole_bytes = device.memory_bytes or budget_bytes
    peak, budget = (f"{size / GIB:.{digits}f}" for size in (peak_bytes, budget_bytes))
    whole = f"{whole_bytes / GIB:.{1 if device.memory_bytes else digits}f}"
    if peak_bytes > min(budget_bytes, whole_bytes):
        has = f", and {_named(device)} has {whole}"
        plans = "every plan" if peak_bytes > budget_bytes else "the plan"
        return f"Does not fit: {plans} needs {peak} GiB or more. The budget is {budget} GiB{has}."
    speed = f", {tokens_per_second:,.0f} tokens a second" if tokens_per_second else ""
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    return f"Fits: {peak} of {whole} GiB on {_named(device)}{speed}{each}."


def _named(device: Device) -> str:
    """A device with its article, as names are spelled out: an RTX 4090, a T4."""
    if device.memory_bytes is None:
        return device.title
    return f"{'an' if device.title[:1] in 'AEFHILMNORSX8' else 'a'} {device.title}"


def spec_of(plan: Plan, budget_bytes: int, host_budget: int | None) -> dict[str, Any]:
    """The shortest spec with which a training makes this plan by itself, as `Spec.parse` reads it.

    The budgets are the peak and the bytes of host memory that were allowed.
    """
    whole = plan.head == plan.mlp == "full"
    if all(action.kind == "keep" for _, action in plan.actions) and whole:
        return NONE
    moved = any(action.moved or action.kind == "offload" for _, action in plan.actions)
    found: dict[str, Any] = {"policy": "budget", "budget": f"{budget_bytes // 2**20}MiB"}
    found |= {name: how for name, how in (("head", plan.head), ("mlp", plan.mlp)) if how != "full"}
    return found | ({"host_budget": exact_size(host_budget)} if moved and host_budget else {})


def to_write(workload: Question, spec: Mapping[str, Any], program: str = "") -> dict[str, str]:
    """What to copy: where it goes -> its lines. Nested values are written as JSON, which YAML includes.

    For a `program` of `OWN_KEYS`, these are keys of its files and the command that starts it; otherwise fields of
    `TrainingArguments` or of a config of TRL, and Python.
    """
    own, arguments = OWN_KEYS.get(program, {}), _arguments(workload, spec, program)
    named = {own.get(key, key): value for key, value in arguments.items()}
    yaml = "\n".join(f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in named.items())
    if program not in OWN_KEYS:
        return {"Training arguments (YAML)": yaml, "With the model (Python)": "\n".join(_model_lines(workload, spec))}
    found = {f"File of {program} (YAML)": yaml}
    if program == "LLaMA-Factory" and spec != NONE:
        start = f"python -m hf_ckpt --spec {shlex.quote(json.dumps(spec))} -m llamafactory.launcher train.yaml"
        found["To start it"] = start
    return found


def _arguments(workload: Question, spec: Mapping[str, Any], program: str) -> dict[str, Any]:
    own, computing = program in OWN_KEYS, workload.autocast_name
    found: dict[str, Any] = {"per_device_train_batch_size": workload.batch}
    if workload.accumulation > 1:
        found["gradient_accumulation_steps"] = workload.accumulation
    if own or workload.trainer in ("sft", "dpo"):
        found["max_length"] = workload.tokens
    if workload.packing and (own or workload.trainer == "sft"):
        found["packing"] = True
    if own and workload.lora is not None:
        found["lora"] = workload.lora
    found["optim"] = _OPTIM.get(workload.optimizer, workload.optimizer)
    if computing in ("bfloat16", "float16"):
        found["bf16" if computing == "bfloat16" else "fp16"] = True
    elif workload.trainer is not None:
        found["bf16"] = False
    if program == "LLaMA-Factory":  # its own checkpointing goes off, for that of hf_ckpt
        return {**found, "disable_gradient_checkpointing": True}
    if spec == NONE:
        return {**found, "gradient_checkpointing": False}
    plugins = {"plugins": ["hf_ckpt.integrations.axolotl.HfCkptPlugin"]} if program == "axolotl" else {}
    return {**found, **plugins, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": dict(spec)}


def _model_lines(workload: Question, spec: Mapping[str, Any]) -> list[str]:
    """Lines of Python for the model: its type, its bits, its adapters, and hf_ckpt if the spec needs it."""
    lines = [f"dtype=torch.{workload.dtype}"]
    if workload.load_in_4bit:
        double = ", bnb_4bit_use_double_quant=True" if workload.double_quant else ""
        nf4 = f'load_in_4bit=True, bnb_4bit_quant_type="nf4"{double}, bnb_4bit_compute_dtype=torch.{workload.dtype}'
        lines.append(f"quantization_config=BitsAndBytesConfig({nf4})")
    if workload.prepared:
        prepared = "model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)"
        lines.append(f"{prepared}  # of peft, as assumed here; without it: --no-kbit-preparation")
    if workload.lora is not None:
        dropout = f", lora_dropout={workload.lora_dropout:g}" if workload.lora_dropout else ""
        targets = json.dumps(workload.lora_targets)
        lines.append(f"peft_config=LoraConfig(r={workload.lora}, target_modules={targets}{dropout})")
    if workload.packing and workload.trainer != "sft":
        lines.append("data_collator=DataCollatorWithFlattening()  # of transformers: a batch is one packed row")
    if spec != NONE:
        lines.append("hf_ckpt.install(model)  # or start the script by: python -m hf_ckpt train.py")
    return lines
