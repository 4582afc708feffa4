"""Trains a small model for two steps with the callback and one of the Trainer's trackers: TRACKER FOLDER."""

from __future__ import annotations

import sys

from transformers import Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt.models.tiny import tiny_batch, tiny_model

if __name__ == "__main__":
    tracker, folder = sys.argv[1:]
    model = tiny_model("llama", layers=2)
    hf_ckpt.install(model)
    row = {name: value[0] for name, value in tiny_batch("llama", batch=1).items()}
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[tracker],
        save_strategy="no",
        use_cpu=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"policy": "full"},
    )
    Trainer(model, arguments, train_dataset=[row] * 8, callbacks=[hf_ckpt.MemoryTimeCallback()]).train()
