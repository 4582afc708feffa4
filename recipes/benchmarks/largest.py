"""Finds the largest batch, or the longest sequences, that train within a budget, for every way to save memory.

Searches for the largest number whose measured peak is within the budget, including weights, gradients and optimizer
state. Every number tried runs two steps in a fresh process. The search begins at --batch and --tokens. Each way is a
case with its own family.

    python recipes/benchmarks/largest.py --budget 300MiB --json most.json
    python recipes/benchmarks/largest.py --what tokens --batch 2 --budget 300MiB --family none full planned
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from comparison import Table
from harness import Benchmark, Case, Results, option
from session import Session
from ways import OUR_WAYS, PEERS, PLANNED_WAYS, Way, chosen
from workers import Worker, WorkerError

from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.forecast.forecast import forecast
from hf_ckpt.forecast.nearest import LARGEST, largest
from hf_ckpt.models.families import learned_positions
from hf_ckpt.prediction.question import Question, Workload
from hf_ckpt.prediction.workload import load_config
from hf_ckpt.units import format_bytes, format_ratio, parse_bytes

PLANS = 3
"""Most plans per number. If a plan's measured peak exceeds the budget, the next one is for a smaller budget."""


@dataclasses.dataclass
class Settings:
    """The start of the search, and its budget."""

    what: str = option("batch", "batch or tokens: what to make larger")
    budget: str = option("256MiB", "peak allowed, weights and all")
    model: str = option("mini-gpt2", "a preset, hub id, folder or config.json")
    batch: int = option(4, "sequences")
    tokens: int = option(128, "tokens of each")
    dtype: str = option("bfloat16", "type of the weights")
    lora: int | None = option(None, "rank of LoRA adapters")
    optimizer: str = option("adamw", "an optimizer of PyTorch, as the Trainer names it")
    only: list[str] = option([], "names or groups of ways; `none` always runs")

    def __post_init__(self) -> None:
        if self.what not in ("batch", "tokens"):
            raise HfCkptError(f"what must be batch or tokens, but is {self.what!r} instead.")
        parse_bytes(self.budget)


def search(settings: Settings, way: Way) -> Case:
    """Search with one way: returns the largest number that fits (0 if none does), its peak, and all numbers tried.

    A number that runs out of memory, or has no plan, does not fit.
    """
    sizes = {name: getattr(settings, name) for name in ("batch", "tokens", "dtype", "lora", "optimizer")}
    start, budget = Workload(settings.model, **sizes), parse_bytes(settings.budget)
    tried: dict[str, int | None] = {}

    def peak_of(number: int) -> int:
        changed: dict[str, Any] = {settings.what: number}
        peak = None
        try:
            peak = peak_within(way, dataclasses.replace(start, **changed), budget)
        except InfeasibleError:
            pass
        except WorkerError as error:
            if not error.out_of_memory:
                raise
        tried[str(number)] = peak
        return 2 * budget if peak is None else peak

    most = LARGEST if settings.what == "batch" else learned_positions(load_config(settings.model)) or LARGEST
    found = largest(peak_of, budget, getattr(start, settings.what), most)
    return {"largest": found, "peak_bytes": tried.get(str(found)), "tried": tried}


def peak_within(way: Way, workload: Workload, budget_bytes: int) -> int:
    """The measured peak. If a plan exceeds the budget, it is replaced by one for a smaller budget, up to `PLANS` plans:
    the fastest plan's predicted peak fills the budget to the last byte.

    Raises `InfeasibleError` if no plan fits.
    """
    if way not in PLANNED_WAYS:
        return measured_peak(way, workload)
    head = way.options.get("head", "full")
    asked = Question(**dataclasses.asdict(workload), budget=f"{budget_bytes}B", head=head)
    found = forecast(asked)
    peak = measured_peak(dataclasses.replace(way, options=found.plan), workload)
    limit = budget_bytes
    for _ in range(PLANS - 1):
        if peak <= budget_bytes:
            break
        limit = limit * budget_bytes // peak
        try:
            plan = found.within(f"{limit}B").plan
        except InfeasibleError:
            break
        peak = measured_peak(dataclasses.replace(way, options=plan), workload)
    return peak


def measured_peak(way: Way, workload: Workload) -> int:
    """The peak of the second step, measured in a fresh process."""
    with Worker(Session, workload, way) as worker:
        return int(worker.ask("largest_peak"))


def cases(settings: Settings, tell: Callable[[str], None]) -> dict[str, Callable[[], Case]]:
    """One case for each way."""
    ways = chosen(settings.only, (*PEERS, *OUR_WAYS, *PLANNED_WAYS))
    return {way.name: lambda way=way: search(settings, way) for way in ways}


def largest_table(searches: Sequence[Results]) -> Table:
    """The largest number of every way that runs, relative to no checkpointing; a column for each search."""
    heads = [f"{found.settings['model']}: {found.settings['what']} in {found.settings['budget']}" for found in searches]
    names = dict.fromkeys(name for found in searches for name in found.good)
    return Table("most", ("way", *heads), [(name, *(_cell(found, name) for found in searches)) for name in names])


def _cell(found: Results, name: str) -> str:
    if name not in found.good:
        return "-"
    most, none = found.good[name]["largest"], found.good.get("none", {}).get("largest")
    return f"{most} ({format_ratio(most / none)})" if none else str(most)


def tables(results: Results) -> list[Table]:
    """The largest number of every way, and peaks or errors."""
    peaks = [
        (name, case.get("error") or format_bytes(case["peak_bytes"]), str(len(case.get("tried", ()))))
        for name, case in results.cases.items()
    ]
    return [largest_table([results]), Table("the peak with as many", ("way", "peak", "numbers tried"), peaks, (0, 1))]


BENCHMARK = Benchmark(doc=__doc__, settings=Settings, cases=cases, tables=tables)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
