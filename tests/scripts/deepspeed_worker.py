"""One rank of tests/users/test_deepspeed.py: Trainer under DeepSpeed, without and with hf_ckpt, see ranks.py."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from ranks import counted_calls, heard, run_cases, without_cache
from torch import nn
from transformers import Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt.logs import forget_warnings
from hf_ckpt.models.tiny import tiny_batch, tiny_model

STEPS = 3
ROWS = 16


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    found = {
        "zero_optimization": {"stage": case["stage"]},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"),
    }
    if case["block"]:
        found["activation_checkpointing"] = {"partition_activations": True, "number_checkpoints": 4}
    return found


def build(case: dict[str, Any]) -> nn.Module:
    model: nn.Module = without_cache(tiny_model(case["family"], dropout=case["dropout"]))
    if case["lora"]:
        import peft

        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.05, init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    return model


def train(case: dict[str, Any], folder: Path, spec: dict[str, Any] | None) -> tuple[nn.Module, dict[str, Any]]:
    AcceleratorState._reset_state(reset_partial_state=False)
    model = build(case)
    options: dict[str, Any] = {}
    if spec is not None:
        hf_ckpt.install(model)
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": spec}
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=7,
        deepspeed=config_of(case),
        **options,
    )
    whole = tiny_batch(case["family"], batch=ROWS)
    rows = [{name: value[row] for name, value in whole.items()} for row in range(ROWS)]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    before = digest(model)
    with counted_calls(model) as calls:
        trainer.train()
    return model, {
        "wrapper": type(trainer.model_wrapped).__name__,
        "stage": trainer.model_wrapped.zero_optimization_stage(),
        "split": all(hasattr(parameter, "ds_id") for parameter in model.parameters()),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "before": before,
        "after": digest(model),
        "calls": calls,
    }


def digest(model: nn.Module) -> str:
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        split = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(split) if split else contextlib.nullcontext():
            total.update(name.encode() + parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    _, plain = train(case, folder, None)
    if case["spec"] is None:
        return {"plain": plain}
    said: list[str] = []
    forget_warnings()
    try:
        with heard(said):
            model, ours = train(case, folder, case["spec"])
    except hf_ckpt.HfCkptError as error:
        return {"plain": plain, "refused": f"{type(error).__name__}: {error}"}
    described = hf_ckpt.describe(model)
    return {
        "plain": plain,
        "ours": ours,
        "said": " ".join(said),
        "forwards": described.forwards,
        "recomputed": described.recomputed,
    }


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    assert dist.is_initialized()
    run_cases(run_case)
