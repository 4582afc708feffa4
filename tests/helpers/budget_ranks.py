"""Trainings of two processes under `policy: budget`. See `budgets`, and the worker `scripts/budgets_of_ranks.py`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from helpers.processes import each_rank, run_on_ranks


@dataclasses.dataclass(frozen=True)
class Case:
    """A training and its budget."""

    way: str
    """`ddp`, `fsdp1` or `fsdp2`."""
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


def missed_on_ranks(cases: dict[str, Case], folder: Path) -> dict[str, list[list[str]]]:
    """Failed expectations of cases on two ranks in one launch: name -> those of each rank."""
    results = run_on_ranks("budgets_of_ranks.py", cases, folder, timeout=1200)
    return {name: [found["missed"] for found in each_rank(results, name)] for name in cases}
