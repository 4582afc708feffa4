"""Budgets on trainings of two processes: the cases, and what each rank measured. See `budget_runs`."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

from helpers.budget_runs import SHARES, Run, Step
from helpers.processes import each_rank, run_on_ranks

WORKER = "budgets_of_ranks.py"
# DeepSpeed compiles an extension at its first start; killing that leaves a lock that blocks all later starts.
DEEPSPEED = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix, "torch_extensions"))}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training and its budget."""

    way: str
    """`ddp`, `fsdp1`, `fsdp2`, `zero2` or `zero3`."""
    family: str = "llama"
    lora: bool = False
    half: bool = False
    """Whether forwards run in bfloat16."""
    accumulate: int = 1
    """Micro-steps per optimizer step; only the last exchanges gradients."""
    tokens: tuple[tuple[int, ...], ...] = ((96,), (96,))
    """For each rank, the lengths of its batches in order."""
    steps: int = 12
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    share: float = 0.5
    """Position of the budget between the peaks under `full` and without checkpointing."""


def _mixed(steps: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(random.Random(rank).sample(range(24, 129), steps)) for rank in (0, 1))


_OTHER = {"tokens": ((96,), (64,))}
_MICRO = {"accumulate": 3, "steps": 8}
_MIXED = {"tokens": _mixed(24), "steps": 24}
RANK_ROWS = {
    "ddp": Case("ddp"),
    "ddp, lora": Case("ddp", lora=True),
    "ddp, t5": Case("ddp", family="t5"),
    "ddp, other lengths": Case("ddp", **_OTHER),
    "ddp, mixed lengths": Case("ddp", **_MIXED),
    "ddp, three micro-steps": Case("ddp", **_MICRO),
    "ddp, gradients in buckets": Case("ddp", options={"gradient_as_bucket_view": True}),
    "fsdp1": Case("fsdp1"),
    "fsdp1, bf16": Case("fsdp1", half=True),
    "fsdp1, lora": Case("fsdp1", lora=True),
    "fsdp1, other lengths": Case("fsdp1", **_OTHER),
    "fsdp1, three micro-steps": Case("fsdp1", **_MICRO),
    "fsdp2": Case("fsdp2"),
    "fsdp2, bf16": Case("fsdp2", half=True),
    "fsdp2, bf16, lora": Case("fsdp2", half=True, lora=True),
    "fsdp2, other lengths": Case("fsdp2", **_OTHER),
    "fsdp2, mixed lengths": Case("fsdp2", **_MIXED),
    "fsdp2, three micro-steps": Case("fsdp2", **_MICRO),
    "fsdp2, bf16, three micro-steps": Case("fsdp2", half=True, **_MICRO),
}
"""Name -> training."""
DEEPSPEED_ROWS = {
    f"zero{stage}{name}": Case(f"zero{stage}", **options)
    for stage in (2, 3)
    for name, options in {
        "": {},
        ", bf16": {"half": True},
        ", lora": {"lora": True},
        ", other lengths": _OTHER,
        ", three micro-steps": _MICRO,
    }.items()
}
"""The trainings that need DeepSpeed."""


def at_every_share(rows: dict[str, Case], shares: tuple[float, ...] = SHARES) -> dict[str, Case]:
    """The cases with each budget, named such as `ddp at 0.5`."""
    return {
        f"{name} at {share}": dataclasses.replace(case, share=share) for name, case in rows.items() for share in shares
    }


def run_rows(cases: dict[str, Case], folder: Path, timeout: float = 1200) -> list[dict[str, Any]]:
    """Run cases on two ranks in one launch."""
    extra = DEEPSPEED if any(case.way.startswith("zero") for case in cases.values()) else {}
    return run_on_ranks(WORKER, cases, folder, timeout=timeout, extra=extra)


def judged(results: list[dict[str, Any]], name: str) -> list[Run]:
    """What each rank measured in a case."""
    runs = [found["run"] for found in each_rank(results, name)]
    return [Run(**{**run, "steps": [Step(**step) for step in run["steps"]]}) for run in runs]
