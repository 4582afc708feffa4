"""One rank of tests/planner/test_live.py: plans under DDP, with batches that differ between ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_cases, without_cache
from torch.nn.parallel import DistributedDataParallel

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.models.tiny import tiny_batch, tiny_model


def run_case(case: dict[str, Any], _: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {"plans": [], "shapes": [], "limits": [], "different": [], "recomputed": []}
    ours, plain = (tiny_model(case["family"], layers=6, hidden=64, attention="sdpa") for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (ours, plain)]
    hf_ckpt.install(ours)
    ours.gradient_checkpointing_enable(case["specs"][rank % len(case["specs"])])
    pair = DistributedDataParallel(ours), DistributedDataParallel(without_cache(plain))
    for number, tokens in enumerate(case["tokens"][rank]):
        batch = tiny_batch(case["family"], batch=2, tokens=tokens, seed=number)
        for model, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(number)
            model(**batch).loss.backward()
        theirs = dict(plain.named_parameters())
        found["different"].append(
            [name for name, parameter in ours.named_parameters() if not torch.equal(parameter.grad, theirs[name].grad)]
        )
        planned = installation(ours).planned
        described = hf_ckpt.describe(ours)
        found["plans"].append(described.plan.to_dict())
        found["shapes"].append(str(planned.shape) if planned else "")
        found["limits"].append(planned.limit_bytes if planned else None)
        found["recomputed"].append(sum(described.recomputed.values()))
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run_cases(run_case)
