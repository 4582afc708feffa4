"""A plain Accelerate loop that never enables checkpointing; hf_ckpt is used only to write results.

accelerate_loop.py OUT [--workers N] [--steps N] [--accumulate N] [--dropout P]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    """Defined here, so that spawned workers must import this script."""

    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {**{name: value[row] for name, value in self.columns.items()}, "process": os.getpid()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1, help="batches a step")
    parser.add_argument("--dropout", type=float, default=0.0)
    arguments = parser.parse_args()

    from accelerate import Accelerator

    from hf_ckpt.models.tiny import tiny_batch, tiny_model

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=arguments.accumulate)
    model = tiny_model("llama", dropout=arguments.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = arguments.steps * arguments.accumulate * accelerator.num_processes
    loader = DataLoader(
        Rows(tiny_batch("llama", batch=2 * batches)),
        batch_size=2,
        num_workers=arguments.workers,
        multiprocessing_context="spawn" if arguments.workers else None,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, readers = [], set()
    for batch in loader:
        readers |= set(batch.pop("process").tolist())
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    found = {
        "processes": accelerator.num_processes,
        "wrapper": type(model).__name__,
        "losses": losses,
        "read_elsewhere": os.getpid() not in readers,
        **describe(model),
    }
    weights = {name: parameter.detach() for name, parameter in accelerator.unwrap_model(model).named_parameters()}
    arguments.out.mkdir(exist_ok=True)
    (arguments.out / f"rank{accelerator.process_index}.json").write_text(json.dumps(found))
    torch.save(weights, arguments.out / f"rank{accelerator.process_index}.pt")
    # Give the GIL to gloo's threads: PyTorch can deadlock if DDP and the process group are destroyed within a few
    # milliseconds of the last backward, with or without checkpointing. https://github.com/pytorch/pytorch/issues/56297
    time.sleep(0.2)
    accelerator.end_training()


def describe(model: torch.nn.Module) -> dict[str, Any]:
    import hf_ckpt
    from hf_ckpt.attach.record import installation

    if installation(model) is None:
        return {"enabled": None}
    described = hf_ckpt.describe(model)
    return {"enabled": described.enabled, "spec": described.spec, "recomputed": described.recomputed}


if __name__ == "__main__":
    main()
