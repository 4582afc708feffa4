"""Trainings of two processes under `policy: budget`. See `budgets`, and the worker `scripts/budgets_of_ranks.py`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from helpers.processes import each_rank, run_on_ranks

# DeepSpeed compiles an extension at its first start; killing that leaves a lock that blocks all later starts.
DEEPSPEED = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix, "torch_extensions"))}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training and its budget."""

    way: str
    """`ddp`, `fsdp1`, `fsdp2`, `zero2` or `zero3`."""
    lora: bool = False
    half: bool = False
    """Whether forwards run in bfloat16."""
    accumulate: int = 1
    """Micro-steps per optimizer step; only the last exchanges gradients."""
    tokens: tuple[int, int] = (96, 96)
    """Tokens of each rank's sequences."""
    steps: int = 12
    share: float = 0.5
    """Position of the budget between the peaks under `full` and without checkpointing."""


RANK_ROWS = {
    "ddp": Case("ddp"),
    "ddp, lora, other lengths": Case("ddp", lora=True, tokens=(96, 64)),
    "fsdp1": Case("fsdp1"),
    "fsdp2": Case("fsdp2"),
    "fsdp2, bf16, three micro-steps": Case("fsdp2", half=True, accumulate=3, steps=8),
}
DEEPSPEED_ROWS = {
    "zero2, three micro-steps": Case("zero2", accumulate=3, steps=8),
    "zero3, other lengths": Case("zero3", tokens=(96, 64)),
}
"""The trainings that need DeepSpeed."""


def missed_on_ranks(cases: dict[str, Case], folder: Path) -> dict[str, list[list[str]]]:
    """Failed expectations of cases on two ranks in one launch: name -> those of each rank."""
    extra = DEEPSPEED if any(case.way.startswith("zero") for case in cases.values()) else {}
    results: list[dict[str, Any]] = run_on_ranks("budgets_of_ranks.py", cases, folder, timeout=1200, extra=extra)
    return {name: [found["missed"] for found in each_rank(results, name)] for name in cases}
