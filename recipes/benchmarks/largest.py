"""The largest batch, or the longest sequences, that train within a budget, for every way to train in less memory.

Searches the largest number whose measured peak is within the budget, weights, gradients and optimizer state included;
every number that is tried runs two steps in a fresh process. The search begins at --batch and --seq.

    python recipes/benchmarks/largest.py batch mini-gpt2 --budget 300MiB
    python recipes/benchmarks/largest.py tokens mini-gpt2 --batch 2 --budget 300MiB --only transformers --json most.json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import command
import report
from figures import LargestBench, LargestRow, write_json
from machine import circumstances
from session import Session
from ways import PLANNED_WAYS, Way, known_ways, wanted
from workers import Worker, WorkerError

from hf_ckpt import compat
from hf_ckpt.cli.arguments import progress
from hf_ckpt.cli.plan import MODEL_HELP, add_workload_options, workload_of
from hf_ckpt.console import make_console
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.models.blocks import vocabulary_head
from hf_ckpt.planner.budgets import peak_of_least, plan_within
from hf_ckpt.planner.forecast import MOST, largest
from hf_ckpt.planner.options import cost_options
from hf_ckpt.prediction.batches import step_of_workload
from hf_ckpt.prediction.costs import Costs
from hf_ckpt.prediction.machine import this_device
from hf_ckpt.prediction.skeleton import Skeleton
from hf_ckpt.prediction.trace import actions_for, trace_costs
from hf_ckpt.prediction.workload import Workload, learned_positions, load_config, skeleton_of_workload
from hf_ckpt.units import parse_bytes

PLANS = 3
"""How often a plan whose measured peak is beyond the budget is made again for less."""


def bench_largest(
    workload: Workload,
    what: str,
    budget_bytes: int,
    *,
    only: Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda text: None,
    on_row: Callable[[LargestBench], None] = lambda found: None,
) -> LargestBench:
    """The largest batch or the longest sequences whose measured peak is within `budget_bytes`, for every way.

    Args:
        workload: where the search begins.
        what: `batch` or `tokens`.
        budget_bytes: peak of the allocator, weights, gradients and optimizer state included.
        only: groups or names of ways to leave all others out, but for `none`.
        on_progress: called before each way.
        on_row: called after each way with all that has been found so far.
    """
    most = MOST if what == "batch" else learned_positions(load_config(workload.model)) or MOST
    skeleton = skeleton_of_workload(workload)
    found = LargestBench(circumstances(compat.accelerator_type() or "cpu"), workload, what, budget_bytes, [])
    for way in wanted(only, *PLANNED_WAYS):
        on_progress(way.name)
        row = _largest_of(way, workload, what, budget_bytes, most, skeleton)
        found.rows.append(row)
        none = found.rows[0].largest
        row.over_none = row.largest / none if row.largest is not None and none else None
        on_row(found)
    return found


def _largest_of(way: Way, start: Workload, what: str, budget_bytes: int, most: int, skeleton: Skeleton) -> LargestRow:
    row = LargestRow(way.name, way.group)

    def peak_of(number: int) -> int:
        changes: dict[str, Any] = {what: number}
        try:
            peak = _peak(way, dataclasses.replace(start, **changes), budget_bytes, skeleton)
        except InfeasibleError:
            peak = None
        except WorkerError as error:
            if not _ran_out(error):
                raise
            peak = None
        row.tried[number] = peak
        return 2 * budget_bytes if peak is None else peak

    try:
        row.largest = largest(peak_of, budget_bytes, getattr(start, what), most)
    except HfCkptError as error:
        row.error = str(error).partition("\n")[0]
        return row
    row.peak_bytes = row.tried.get(row.largest)
    return row


def _peak(way: Way, workload: Workload, budget_bytes: int, skeleton: Skeleton) -> int:
    """Measured; of plans the lowest of some, because the fastest one fills the budget to its prediction's last byte."""
    if way not in PLANNED_WAYS:
        return _measured_peak(way, workload)
    costs = _costs(way, workload, skeleton)
    limit, peak = budget_bytes, None
    for _ in range(PLANS):
        try:
            plan = plan_within(costs, limit, this_device().name)
        except InfeasibleError:
            break
        peak = _measured_peak(dataclasses.replace(way, options=plan), workload)
        if peak <= budget_bytes:
            break
        limit = limit * budget_bytes // peak
    if peak is None:
        raise InfeasibleError(budget_bytes, peak_of_least(costs), {}, (), "no plan fits")
    return peak


def _measured_peak(way: Way, workload: Workload) -> int:
    with Worker(Session, workload, way) as worker:
        return int(worker.ask("largest_peak"))


def _costs(way: Way, workload: Workload, skeleton: Skeleton) -> tuple[Costs, ...]:
    """What a plan for that workload may be made of."""
    device, step, head = this_device(), step_of_workload(workload, skeleton), way.options.get("head", "full")
    if head != "full" and vocabulary_head(skeleton.base) is None:
        raise HfCkptError(f"{type(skeleton.base).__name__} has no head over a vocabulary")
    actions = actions_for(skeleton, step, device, compiled="compile" in way.options)
    return cost_options(trace_costs(skeleton, step, device, actions=actions), skeleton, step, device, head=head)


def _ran_out(error: WorkerError) -> bool:
    return compat.is_out_of_memory(RuntimeError(str(error))) or "exit code -9" in str(error)


# --- the command ------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    parser.add_argument("what", choices=("batch", "tokens"), help="what to make larger")
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--budget", required=True, help="peak allowed, weights and all: 20GiB")
    add_workload_options(parser, **command.WORKLOAD)
    command.add_only(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    workload, budget = workload_of(arguments, arguments.model), parse_bytes(arguments.budget)
    only = known_ways(arguments.only)
    console = make_console()
    with progress("starting") as on_progress:
        result = bench_largest(
            workload,
            arguments.what,
            budget,
            only=only,
            on_progress=on_progress,
            on_row=lambda found: write_json(arguments.json, found.to_dict()),
        )
    report.print_largest(result, console)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these words, or with those of the command line."""
    return command.call(_run, _parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
