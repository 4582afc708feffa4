"""Trainers of toy models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
import transformers
from transformers import Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.training.callback import METRICS_FILE, MemoryTimeCallback

KNOWN = {field.name for field in dataclasses.fields(TrainingArguments)}
# The flag's name since transformers 5.23, and the older name.
FLAG = "activation_checkpointing" if "activation_checkpointing" in KNOWN else "gradient_checkpointing"


class Rows(torch.utils.data.Dataset):
    """Some rows of random tokens."""

    def __init__(self, family: str = "llama", count: int = 16, tokens: int = 12) -> None:
        self.batch = tiny_batch(family, batch=count, tokens=tokens)

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self.batch.items()}


def arguments(folder: Path, **overrides) -> TrainingArguments:
    values = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
        FLAG: True,
        f"{FLAG}_kwargs": {"policy": "full"},
    }
    return TrainingArguments(**(values | overrides))


def trainer(folder: Path, model=None, *, callbacks=(), evaluate: bool = False, rows=None, **overrides) -> Trainer:
    if model is None:
        model = tiny_model("llama", dropout=0.1)
        hf_ckpt.install(model)
    return Trainer(
        model=model,
        args=arguments(folder, **overrides),
        train_dataset=Rows() if rows is None else rows,
        eval_dataset=Rows(count=4) if evaluate else None,
        callbacks=list(callbacks) or [MemoryTimeCallback()],
    )


def metrics(folder: Path, event: str = "log") -> list[dict]:
    lines = (folder / METRICS_FILE).read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == event]


class StopAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step
