"""Trainers of toy models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.training.callback import METRICS_FILE, MemoryTimeCallback

# The flag's name since transformers 5.23, and the older name.
NAMES = "activation_checkpointing", "gradient_checkpointing"
FLAG = next(name for name in NAMES if name in {field.name for field in dataclasses.fields(TrainingArguments)})


class Rows(torch.utils.data.Dataset):
    """Some rows of random tokens."""

    def __init__(self, family: str = "llama", count: int = 16, tokens: int = 12) -> None:
        self.batch = tiny_batch(family, batch=count, tokens=tokens)

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self.batch.items()}


def trainer(folder: Path, model=None, *, callbacks=(), evaluate=False, rows=None, kind=Trainer, **overrides) -> Trainer:
    """A Trainer, by default of a small LLaMA under `full`."""
    if model is None:
        model = tiny_model("llama", dropout=0.1)
        hf_ckpt.install(model)
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    sizes = {"use_cpu": True, "max_steps": 4, "per_device_train_batch_size": 2, "seed": 0}
    plan = {FLAG: True, f"{FLAG}_kwargs": {"policy": "full"}}
    return kind(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **{**quiet, **sizes, **plan, **overrides}),
        train_dataset=Rows() if rows is None else rows,
        eval_dataset=Rows(count=4) if evaluate else None,
        callbacks=list(callbacks) or [MemoryTimeCallback()],
    )


def metrics(folder: Path, event: str = "log") -> list[dict]:
    lines = (folder / METRICS_FILE).read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == event]
