"""Measures the head of a causal language model and its loss, whole and in chunks of tokens, trained and frozen.

Measures bytes and time of forward and backward with transformers' own loss, on random hidden states. Bytes are those
in addition to the bytes alive before.

    python recipes/benchmarks/head.py --vocabulary 128256 --hidden 4096 --tokens 4096 --dtype bfloat16
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable

import torch
from comparison import Table
from harness import Benchmark, Case, Results, fastest, median, mib, option, ratios, rotated, seconds_of
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss  # documented nowhere, but what its causal models call

from hf_ckpt import compat
from hf_ckpt.engines.head.chunked import chunked
from hf_ckpt.engines.head.logits import Logits
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.units import format_ratio, format_seconds

FULL = "full"


@dataclasses.dataclass
class Settings:
    """Sizes."""

    vocabulary: int = option(32_000, "entries")
    tokens: int = option(2048, "tokens a step")
    hidden: list[int] = option([512, 1024, 2048], "hidden sizes")
    dtype: list[str] = option(["float32", "bfloat16"], "types")
    chunk: list[str] = option(["auto"], "tokens a chunk, or auto")
    repeats: int = option(7, "timed steps of each")


class Run:
    """Measures one head, whole and in chunks."""

    def __init__(self, settings: Settings, hidden: int, dtype: str, tuning: str) -> None:
        torch.manual_seed(0)
        self.settings, device = settings, compat.accelerator_type() or "cpu"
        made = {"dtype": getattr(torch, dtype), "device": device}
        self.head = nn.Linear(hidden, settings.vocabulary, bias=False, **made)
        self.head.weight.requires_grad_(tuning == "trained")
        self.hidden = torch.randn((1, settings.tokens, hidden), **made).requires_grad_()
        self.labels = torch.randint(settings.vocabulary, (1, settings.tokens), device=device)

    def take(self) -> Case:
        """Measure the whole head and each chunk size; returns a row for each."""
        rows = {way: self.counted(way) for way in (FULL, *self.settings.chunk)}
        for number in range(self.settings.repeats):
            order = rotated(rows, number, self.settings.repeats)
            steps = {way: functools.partial(seconds_of, functools.partial(self.step, way)) for way in order}
            for way, seconds in fastest(steps).items():
                rows[way]["step_seconds"].append(seconds)
        return {"rows": list(rows.values())}

    def step(self, way: str) -> None:
        """Run forward and backward."""
        self.head.weight.grad = self.hidden.grad = None
        if way == FULL:
            logits = self.head(self.hidden)
        else:
            logits = chunked(self.head, self.head.forward, self.hidden, way if way == "auto" else int(way))
            if not isinstance(logits, Logits):
                raise HfCkptError(f"{self.settings.tokens} tokens do not make several chunks of {way}.")
        ForCausalLMLoss(logits, self.labels, self.settings.vocabulary).backward()

    def counted(self, way: str) -> Case:
        """Count the peak of live bytes, and the gradient of the weight, which is part of it."""
        self.head.weight.grad = self.hidden.grad = None
        with LiveBytes(self.head, {"hidden": self.hidden, "labels": self.labels}) as live:
            self.step(way)
        weight = self.head.weight
        return {
            "head": way,
            "peak_bytes": live.peak_bytes - live.start_bytes,
            "weight_gradient_bytes": weight.nbytes if weight.requires_grad else 0,
            "step_seconds": [],
        }


def cases(settings: Settings, tell: Callable[[str], None]) -> dict[str, Callable[[], Case]]:
    """One case for each hidden size, type, and whether the weight is trained."""
    return {
        f"{hidden}, {dtype}, {tuning}": lambda sizes=(hidden, dtype, tuning): Run(settings, *sizes).take()
        for hidden, dtype, tuning in itertools.product(settings.hidden, settings.dtype, ("trained", "frozen"))
    }


def tables(results: Results) -> list[Table]:
    """One row for each head and chunk size, compared with the whole head."""
    columns = (
        "hidden size, type, weight",
        "chunks",
        "whole MiB",
        "chunks MiB",
        "gradient of weight",
        "step",
        "of whole",
    )
    cells = []
    for name, case in results.good.items():
        whole, *others = case["rows"]
        for row in others:
            sizes = (whole["peak_bytes"], row["peak_bytes"], row["weight_gradient_bytes"])
            ratio = median(ratios(row["step_seconds"], whole["step_seconds"]))
            times = (format_seconds(median(row["step_seconds"])), format_ratio(ratio))
            cells.append((name, str(row["head"]), *map(mib, sizes), *times))
    return [Table("the head and its loss, whole and in chunks", columns, cells, (0, 1))]


BENCHMARK = Benchmark(doc=__doc__, settings=Settings, cases=cases, tables=tables)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
