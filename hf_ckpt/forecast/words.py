"""Describes in words whether a training fits, what was assumed, and which settings it needs. Pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hf_ckpt.costs.costs import Costs
from hf_ckpt.forecast.devices import Device
from hf_ckpt.models.families import GENERIC
from hf_ckpt.prediction.question import Workload
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import GIB, exact_size, format_bytes

if TYPE_CHECKING:
    from hf_ckpt.prediction.skeleton import Skeleton

_OPTIM = {"adamw": "adamw_torch_fused", "adam": "adamw_torch_fused", "adamw8bit": "adamw_8bit", "lion": "lion_32bit"}
"""Short names of optimizers -> their names in Trainer's `optim`."""
_TASKS = {
    "ForMaskedLM": "masked language modelling",
    "ForPreTraining": "pretraining",
    "ForSequenceClassification": "sequence classification",
    "ForTokenClassification": "token classification",
    "ForQuestionAnswering": "question answering",
    "ForMultipleChoice": "multiple choice",
}
"""Suffix of a class name -> the task, for models with one of several heads."""


def task_of(model: str) -> str | None:
    """The task of a model by its class, in words: "masked language modelling (BertForMaskedLM)".

    None for models that generate text, which have no other task.
    """
    return next((f"{task} ({model})" for end, task in _TASKS.items() if model.endswith(end)), None)


def assumed(workload: Workload, device: Device) -> str:
    """The assumptions about a training, in one line: what is trained, types, optimizer, batch, trainer, device."""
    layers = workload.lora_targets
    where = "every linear layer" if layers == "all-linear" else layers if isinstance(layers, str) else ", ".join(layers)
    tuning = "every weight" if workload.lora is None else f"LoRA r={workload.lora} on {where}"
    bits = f"base in {workload.bits} bits" + (", the rest in float32" if workload.prepared else "")
    computing = f"autocast {workload.autocast_name}" if workload.autocast_name else "no autocast"
    lacking = "" if device.bfloat16 else f" ({article(device.title)} {device.title} has no bfloat16)"
    accumulated = f" x {workload.accumulation} micro-steps" if workload.accumulation > 1 else ""
    parts = (
        tuning,
        bits if workload.bits else "",
        f"weights {workload.dtype}",
        computing + (lacking if "float16" in (workload.dtype, workload.autocast_name) else ""),
        workload.optimizer,
        f"batch {workload.batch} x {workload.tokens} tokens{accumulated}",
        workload.attention,
        f"{workload.trainer.upper()} of TRL" if workload.trainer else "",
        "packed" if workload.packing else "",
        f"{workload.ranks} ranks ({workload.parallel})" if workload.ranks > 1 else "",
    )
    return f"{workload.model}: {', '.join(filter(None, parts))}; {device.title}"


def notes_of(costs: Costs, skeleton: Skeleton, workload: Workload) -> Iterator[str]:
    """Remarks on a model, for the notes of its costs."""
    if costs.family == GENERIC:
        yield f"{costs.model} is of no known family: every block that can be checkpointed is planned for alike"
    if workload.trainer == "grpo":
        yield "completions are written before the step: the memory for that, of generate or vLLM, is not counted"
    stacked = [(math.prod(shape) * size, size) for shape, size, _ in skeleton.weights.tensors if len(shape) > 2]
    stacked_bytes = sum(total for total, _ in stacked)
    if workload.bits is not None and stacked_bytes > costs.static.parameters / 2:
        wide = ", and PEFT's preparation casts them to float32 (half with --no-kbit-preparation)"
        yield (
            f"{format_bytes(stacked_bytes)} of the weights are experts. Since transformers 5 they are stacked in one "
            f"tensor a layer, which bitsandbytes does not quantise{wide if stacked[0][1] == 4 else ''}"
        )


def headline(
    peak_bytes: int, budget_bytes: int, device: Device, tokens_per_second: float | None, task: str | None = None
) -> str:
    """Whether a peak fits, in a sentence: "Fits: 21.3 of 23.5 GiB on an RTX 4090, 4,100 tokens a second."

    Args:
        peak_bytes: of the plan, or the lowest of all plans if none fits.
        budget_bytes: the peak that is allowed.
        device: the device to train on.
        tokens_per_second: predicted; None if unknown, or if nothing fits.
        task: of the model, see `task_of`.
    """
    whole_bytes = device.memory_bytes or budget_bytes
    digits = 1 if budget_bytes >= GIB else 3
    peak, whole, most = (f"{size / GIB:.{digits}f}" for size in (peak_bytes, whole_bytes, budget_bytes))
    where = f"on {article(device.title)} {device.title}" if device.memory_bytes else "on this CPU"
    allowed = f", of which {most} may be used" if device.memory_bytes else ""
    end = f". The task is {task}." if task else "."
    if peak_bytes > budget_bytes:
        return f"Does not fit: {peak} of {whole} GiB {where}{allowed}, as low as a plan can go{end}"
    if device.memory_bytes and peak_bytes > device.memory_bytes:
        return f"Does not fit: {peak} of {whole} GiB {where}, though a budget of {most} GiB would allow it{end}"
    speed = f", {tokens_per_second:,.0f} tokens a second" if tokens_per_second else ""
    return f"Fits: {peak} of {whole} GiB {where}{speed}{end}"


def article(name: str) -> str:
    """The article before a name that is spelled out: an RTX, a T4."""
    return "an" if name[:1] in "AEFHILMNORSX8" else "a"


def spec_of(plan: Plan, budget_bytes: int, host_budget: int | None) -> dict[str, Any]:
    """The shortest spec with which a training makes this plan by itself, as `Spec.parse` reads it.

    Args:
        plan: the plan.
        budget_bytes: the peak that was allowed.
        host_budget: bytes of host memory that were allowed.
    """
    whole = plan.head == plan.mlp == "full"
    if all(action.kind == "keep" for _, action in plan.actions) and whole:
        return {"policy": "none"}
    moved = any(action.moved or action.kind == "offload" for _, action in plan.actions)
    return {
        "policy": "budget",
        "budget": f"{budget_bytes // 2**20}MiB",
        **({"head": plan.head} if plan.head != "full" else {}),
        **({"mlp": plan.mlp} if plan.mlp != "full" else {}),
        **({"host_budget": exact_size(host_budget)} if moved and host_budget else {}),
    }


def arguments_of(workload: Workload, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `TrainingArguments` (or of a config of TRL) that the training needs."""
    computing = workload.autocast_name
    found: dict[str, Any] = {"per_device_train_batch_size": workload.batch}
    if workload.accumulation > 1:
        found["gradient_accumulation_steps"] = workload.accumulation
    if workload.trainer in ("sft", "dpo"):
        found["max_length"] = workload.tokens
    if workload.packing:
        found["packing"] = True
    if workload.reference == "precomputed":
        found["precompute_ref_log_probs"] = True
    found["optim"] = _OPTIM.get(workload.optimizer, workload.optimizer)
    if computing in ("bfloat16", "float16"):
        found["bf16" if computing == "bfloat16" else "fp16"] = True
    elif workload.trainer is not None:
        found["bf16"] = False
    if spec == {"policy": "none"}:
        return {**found, "gradient_checkpointing": False}
    return {**found, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": dict(spec)}


def model_lines(workload: Workload, spec: Mapping[str, Any]) -> list[str]:
    """Lines of Python for the model: its type, its bits, its adapters, and hf_ckpt if the spec needs it."""
    lines = [f"dtype=torch.{workload.dtype}"]
    if workload.load_in_4bit:
        double = ", bnb_4bit_use_double_quant=True" if workload.double_quant else ""
        lines.append(
            f'quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"{double}, '
            f"bnb_4bit_compute_dtype=torch.{workload.dtype})"
        )
    elif workload.load_in_8bit:
        lines.append("quantization_config=BitsAndBytesConfig(load_in_8bit=True)")
    if workload.prepared:
        lines.append(
            "model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # of peft, as assumed "
            "here; without it: --no-kbit-preparation"
        )
    if workload.lora is not None:
        targets: Any = workload.lora_targets
        chosen = json.dumps(targets if isinstance(targets, str) else list(targets))
        dropout = f", lora_dropout={workload.lora_dropout:g}" if workload.lora_dropout else ""
        lines.append(f"peft_config=LoraConfig(r={workload.lora}, target_modules={chosen}{dropout})")
    if spec != {"policy": "none"}:
        lines.append("hf_ckpt.install(model)  # or start the script by: python -m hf_ckpt train.py")
    return lines


def yaml_lines(arguments: Mapping[str, Any]) -> list[str]:
    """Lines of YAML for training arguments; nested values are written as JSON, which YAML includes."""
    return [f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in arguments.items()]


def to_write(workload: Workload, spec: Mapping[str, Any]) -> dict[str, Any]:
    """All settings that the training needs, as a dict for JSON."""
    return {
        "training_arguments": arguments_of(workload, spec),
        "model": model_lines(workload, spec),
        "spec": dict(spec),
    }
