"""One rank of tests/users/test_ddp_training.py: the same training without and with hf_ckpt under DDP, see ranks.py.

By Trainer, or by a plain loop of Accelerate.

The run without comes first, so that what is said only once and has nothing to do with checkpointing is said there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from ranks import run_cases, without_cache
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.models.tiny import tiny_batch, tiny_model

STEPS = 2
ROWS = 16


@contextlib.contextmanager
def complaints() -> Iterator[list[str]]:
    """Everything said at level WARNING or above: loggers, Python warnings, and what C++ writes to stderr."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(f"{record.name}: {record.getMessage()}")  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in (None, "transformers", "accelerate", "torch")]
    for logger in loggers:
        logger.addHandler(handler)
    with tempfile.TemporaryFile("w+") as written, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sys.stderr.flush()
        terminal = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            yield found
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            for logger in loggers:
                logger.removeHandler(handler)
            found += [f"{warning.category.__name__}: {warning.message}" for warning in caught]
            written.seek(0)
            found += [line.strip() for line in written if "warn" in line.lower()]


def train(family: str, folder: Path, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    model = tiny_model(family, dropout=0.1)
    if family == "t5":
        without_cache(model)
    before = digest(model)
    whole = tiny_batch(family, batch=ROWS)
    rows = [{name: value[row] for name, value in whole.items()} for row in range(ROWS)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=7,
        **options,
    )
    if options:
        hf_ckpt.install(model)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    with complaints() as found:
        trainer.train()
    return model, {
        "complaints": found,
        "wrapper": type(trainer.model_wrapped).__name__,
        "find_unused_parameters": getattr(trainer.model_wrapped, "find_unused_parameters", None),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "before": before,
        "after": digest(model),
        "use_cache": getattr(model.config, "use_cache", None),
    }


def loop(family: str, spec: dict[str, Any] | None) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Two steps of two micro-batches, which DDP synchronises once."""
    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(3)
    model = without_cache(tiny_model(family, dropout=0.1))
    before = digest(model)
    if spec is not None:
        hf_ckpt.install(model)
        getattr(model, compat.ENABLE_NAMES[-1])(spec)
    whole = tiny_batch(family, batch=ROWS)
    rows = [{name: value[row] for name, value in whole.items()} for row in range(ROWS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
    torch.manual_seed(100 + accelerator.process_index)
    losses = []
    for batch in loader:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    wrapper = type(prepared).__name__
    return model, {"wrapper": wrapper, "losses": losses, "before": before, "after": digest(model), "use_cache": None}


def digest(model: PreTrainedModel) -> str:
    total = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    if case["how"] == "loop":
        _, plain = loop(case["family"], None)
        model, ours = loop(case["family"], case["spec"])
        described = hf_ckpt.describe(model)
        return {"plain": plain, "ours": ours, "forwards": described.forwards, "recomputed": described.recomputed}
    _, plain = train(case["family"], folder)
    model, ours = train(case["family"], folder, gradient_checkpointing=True, gradient_checkpointing_kwargs=case["spec"])
    described = hf_ckpt.describe(model)
    return {"plain": plain, "ours": ours, "forwards": described.forwards, "recomputed": described.recomputed}


if __name__ == "__main__":
    run_cases(run_case)
