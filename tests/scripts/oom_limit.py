"""A training whose address space is limited by the kernel, so that torch's CPU allocator really fails.

Writes to sys.argv[1] what came of the same steps with and without a guard.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from ranks import without_cache

import hf_ckpt
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.training.guard import OomGuard

ROOM = 160 << 20  # `none` needs about three times as much, `full` half


def losses(run: Any, model: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    found = []
    for number in range(3):
        batch = tiny_batch("llama", batch=8, tokens=256, seed=number)

        def step(batch: Any = batch) -> float:
            loss = model(**batch).loss
            loss.backward()
            return float(loss)

        found.append(run(step))
        optimizer.step()
        optimizer.zero_grad()
    return found


def main() -> None:
    torch.set_num_threads(1)
    models = [without_cache(tiny_model("llama", layers=8, hidden=128, dropout=0.1)) for _ in range(3)]
    expected = losses(lambda step: step(), models[0])
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    guard = OomGuard(models[2], exact=True, folder=Path(sys.argv[1]).parent)
    # The test has the C library give freed memory back, which would else be hoarded and used again.
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    failed = ""
    try:
        losses(lambda step: step(), models[1])
    except RuntimeError as error:
        failed = str(error)
    models[1].zero_grad()
    found = losses(guard, models[2])
    described = hf_ckpt.describe(models[2])
    result = {
        "without": failed,
        "expected": expected,
        "found": found,
        "taken": guard.taken,
        "attempts": guard.attempts,
        "recomputed": described.recomputed,
    }
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
