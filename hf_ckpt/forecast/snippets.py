"""What to copy from an answer: the spec of a plan, arguments of a Trainer, and lines of Python. Without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hf_ckpt.forecast.optimizers import training_arguments
from hf_ckpt.forecast.question import Question
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import exact_size

NONE = {"policy": "none"}
"""The spec without checkpointing."""


def shortest_spec(plan: Plan, budget_bytes: int, host_budget: int | None) -> dict[str, Any]:
    """The shortest spec with which a training makes this plan by itself, for the peak and host memory allowed.

    A plan in segments recomputes all blocks in one way, so its spec is that way, with nothing to measure.
    """
    head = {} if plan.head == "whole" else {"head": plan.head}
    tile = next((action.tile for _, action in plan.actions if action.tile is not None), None)
    tiles = {} if tile is None else {"mlp": tile}
    # Nothing to do: with the kwargs of a plan, a training would measure steps under `full` to find that out.
    if all(action.kind == "keep" for _, action in plan.actions):
        return {**NONE, **head}
    segmented = next((action for _, action in plan.actions if action.made), None)
    if segmented is not None:
        policy = "full" if segmented.tile is not None else segmented.kind
        recomputed = {
            stack: [a.made for _, a in pairs if a.kind == segmented.kind] for stack, pairs in plan.stacks().items()
        }
        numbers = {stack: inputs.count(False) for stack, inputs in recomputed.items() if True in inputs}
        alike = len(set(numbers.values())) == 1 and len(numbers) == len(recomputed)
        return {"policy": policy, "segments": next(iter(numbers.values())) if alike else numbers, **head, **tiles}
    host = {"host_budget": exact_size(host_budget)} if host_budget else {}
    # Rounded up: the plan may need every byte of the budget.
    return {"policy": "budget", "budget": f"{-(-budget_bytes // 2**20)}MiB", **head, **tiles, **host}


def to_write(training: Question, spec: Mapping[str, Any], model: str) -> dict[str, str]:
    """What to copy: where it goes -> its lines. Values are written as JSON, which YAML includes.

    These are fields of `TrainingArguments` or of a config of TRL, and Python. `model` is the class of the model;
    empty for one that is there already.
    """
    trainer = training.trainer
    computing = training.dtype if training.way.deepspeed else training.autocast_name
    bf16: bool | None = computing == "bfloat16"
    if not bf16 and (trainer is None or computing == "float16"):
        bf16 = None  # left out, which otherwise means true to TRL's configs (trl/trainer/base_config.py)
    checkpoints = spec != NONE
    arguments = {
        "per_device_train_batch_size": training.batch,
        "gradient_accumulation_steps": training.accumulation if training.accumulation > 1 else None,
        "max_length": training.tokens if trainer in ("sft", "dpo") else None,
        "packing": True if training.packing and trainer == "sft" else None,
        **training_arguments(training.optimizer),
        "bf16": bf16,
        "fp16": True if computing == "float16" else None,
        **training.way.arguments,
        "gradient_checkpointing": checkpoints,
        "gradient_checkpointing_kwargs": dict(spec) if checkpoints else None,
    }
    yaml = "\n".join(f"{key}: {json.dumps(value)}" for key, value in arguments.items() if value is not None)
    program = "python" if training.ranks == 1 else f"torchrun --nproc-per-node {training.ranks}"
    lines = {
        **(_lines_of_model(training, model) if model else {}),
        "data_collator=DataCollatorWithFlattening()  # from transformers": training.packing and trainer != "sft",
        f"hf_ckpt.install(model)  # or start the script with: {program} -m hf_ckpt train.py": checkpoints,
    }
    python = "\n".join(line for line, applies in lines.items() if applies)
    return {"Training arguments (YAML)": yaml, **({"With the model (Python)": python} if python else {})}


def _lines_of_model(training: Question, model: str) -> dict[str, bool]:
    """Python that makes the model that was planned for: line -> whether it applies. `NAME` is the model's name.

    A model with other types, bits or adapters would need other bytes than the answer says.
    """
    dtype = json.dumps(training.dtype)
    options = f"dtype={dtype}, attn_implementation={json.dumps(training.attention)}"
    four = f'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype={dtype}'
    double = f"bnb_4bit_use_double_quant={training.double_quant}"
    targets = training.lora_targets if isinstance(training.lora_targets, str) else list(training.lora_targets)
    adapters = f"target_modules={json.dumps(targets)}, lora_dropout={training.lora_dropout}"
    lora = f"LoraConfig(r={training.lora}, {adapters})"
    prepared = "model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)"
    bits = training.bits is not None
    config = f"{four}, {double}" if training.load_in_4bit else "load_in_8bit=True"
    has_trainer = training.trainer is not None
    return {
        f"bits = BitsAndBytesConfig({config})": bits,
        f"model = {model}.from_pretrained(NAME, {options}{', quantization_config=bits' if bits else ''})": True,
        f"{prepared}  # from peft; assumed here unless --no-kbit-preparation": training.prepared,
        f"model = get_peft_model(model, {lora})": training.lora is not None and not has_trainer,
        f"peft_config={lora}  # argument of the trainer": training.lora is not None and has_trainer,
    }
