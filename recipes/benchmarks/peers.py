"""Every way to train in less memory that a user could pick, against what hf_ckpt does.

Measures peak, step time, tokens a second and gradients of no checkpointing, transformers' own options, torch's SAC,
TRL's offloading and compiled activation budgets, and of what hf_ckpt does: fixed specs, and plans for five budgets,
with blocks in eager mode and compiled, with the error of every prediction. Each way has a process of its own. They take
turns, step by step; on an accelerator, whose memory they would share, they run one after the other. Peaks are those of
the allocator, beside a count of all live tensors. The exit code is 1 if a row of hf_ckpt did nothing, or gave other
gradients than it promises.

    python recipes/benchmarks/peers.py mini-llama mini-bert --json peers.json --png peers.png
    python recipes/benchmarks/peers.py mini-gpt2 --repeats 1 --only transformers
    python recipes/benchmarks/peers.py --show peers.json --markdown peers.md
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import command
import pictures
import report
import turns
from figures import PeerBench, PeerCase, PeerRow, read_json, write_json
from forecaster import BUDGETS, STEPS, Forecaster
from machine import circumstances
from session import Session
from ways import NONE, OURS, OURS_COMPILED, Way, known_ways, wanted
from workers import Worker, WorkerError

from hf_ckpt import compat
from hf_ckpt.cli.arguments import positive, progress
from hf_ckpt.cli.plan import MODEL_HELP, add_workload_options, workload_of
from hf_ckpt.console import make_console
from hf_ckpt.errors import HfCkptError
from hf_ckpt.prediction.workload import Workload
from hf_ckpt.spec.files import write_text

MINI = ("mini-llama", "mini-gpt2", "mini-bert", "mini-t5")
"""Presets that train on two CPU cores."""
TAKES = 6
"""Turns of the shallow models whose times plans are made from."""
TOGETHER = 4
"""Ways that alternate in one turn, beside the reference."""
Progress = Callable[[str], None]


def bench_peers(
    workloads: Sequence[Workload],
    *,
    repeats: int = 5,
    only: Sequence[str] = (),
    on_progress: Progress = lambda text: None,
    on_case: Callable[[PeerBench], None] = lambda found: None,
) -> PeerBench:
    """Measure every way that there is on every workload.

    Args:
        workloads: models with their batches; their optimizer must be PyTorch's own.
        repeats: turns of each way, with `STEPS` timed steps each; on an accelerator, one.
        only: groups or names of ways to leave all others out, but for `none` and the plans.
        on_progress: called before each part.
        on_case: called after each workload with all that has been found so far.

    A way that fails or is not there is a row that says so, and the first that runs is what others are compared with.
    Raises `HfCkptError` where nothing runs, and what planning raises.
    """
    found = PeerBench(circumstances(compat.accelerator_type() or "cpu"), repeats, [])
    for workload in workloads:
        found.cases.append(_bench_case(workload, repeats, only, on_progress))
        on_case(found)
    return found


def progress_steps(workloads: Sequence[Workload], repeats: int, only: Sequence[str] = ()) -> int:
    """How often `bench_peers` reports progress."""
    return len(workloads) * (1 + len(wanted(only)) + 2 * len(BUDGETS) + repeats)


def _bench_case(workload: Workload, repeats: int, only: Sequence[str], on_progress: Progress) -> PeerCase:
    def tell(text: str) -> None:
        on_progress(f"{workload.model}: {text}")

    rows = {way: PeerRow(way.name, way.group) for way in wanted(only)}
    compiled = not only or OURS_COMPILED in only
    with Worker(Forecaster, workload, compiled) as forecaster, tempfile.TemporaryDirectory() as folder:
        tell("timing blocks and planning")
        for _ in range(TAKES):
            forecaster.ask("take")
        for name, share, limit, plan in forecaster.ask("plans"):
            rows[Way(name, OURS, plan)] = PeerRow(name, OURS, plan=str(plan), budget_share=share, budget_bytes=limit)
        for name, share, limit, plan in forecaster.ask("compiled_plans"):
            rows[Way(name, OURS_COMPILED, plan)] = PeerRow(
                name, OURS_COMPILED, plan=str(plan), budget_share=share, budget_bytes=limit
            )
        case = Case(workload, rows, Path(folder) / "gradients.pt", tell)
        if compat.accelerator_type() is None:
            case.run(repeats, forecaster)
            predictions: dict[str, tuple[int, float]] = forecaster.ask("predictions")
        else:  # whose memory is for one way alone
            predictions = forecaster.ask("predictions")
            forecaster.close()
            case.run(repeats)
    for row in rows.values():
        if row.name in predictions:
            row.predicted_peak_bytes, row.predicted_seconds = predictions[row.name]
    return case.figures()


class Case:
    """All ways on one model, whose rows are filled."""

    def __init__(self, workload: Workload, rows: Mapping[Way, PeerRow], path: Path, tell: Progress) -> None:
        self.workload, self.rows, self.path, self.tell = workload, rows, path, tell
        self.facts: dict[str, int] = {}
        self.reference: Way | None = None
        """The first that ran."""

    def run(self, repeats: int, forecaster: Worker | None = None) -> None:
        """Measure all ways. With a forecaster they are alive together and take turns, and so does it; without one they
        run one after the other."""
        with contextlib.ExitStack() as alive:
            workers: dict[Way, Worker] = {}
            for way in self.rows:
                self.tell(way.name)
                worker = Worker(Session, self.workload, way)
                alive.callback(worker.close)
                self._prepare(way, worker)
                if forecaster is not None:
                    workers[way] = worker
                    continue
                for _ in range(repeats):
                    self.turn({way: worker})
                worker.close()
            for number in range(0 if forecaster is None else repeats):
                self.tell(f"repeat {number + 1} of {repeats}")
                forecaster.ask("take")
                order = turns.rotated(workers, number, repeats)
                for first in range(0, len(order), TOGETHER):
                    some = {way: workers[way] for way in order[first : first + TOGETHER]}
                    self.turn(some, workers.get(self.reference))
        self.conclude()

    def turn(self, ways: Mapping[Way, Worker], reference: Worker | None = None) -> None:
        """One turn. With the reference's worker, these ways alternate with it; without, each takes one step."""
        steps: dict[Way | None, turns.Step] = {
            way: functools.partial(self._seconds, way, worker) for way, worker in ways.items()
        }
        if reference is not None:  # the reference may be one of `ways`, too: it is compared with itself
            steps = {None: functools.partial(self._seconds, self.reference, reference), **steps}
        fastest = turns.fastest(steps, 1 if reference is None else STEPS)
        beside = fastest.pop(None, None)
        for way, seconds in fastest.items():
            if reference is None:
                self.rows[way].step_seconds.append(seconds)
            elif beside is not None:
                self.rows[way].step_seconds.append(seconds)
                self.rows[way].reference_seconds.append(beside)

    def _seconds(self, way: Way, worker: Worker) -> float | None:
        if self.rows[way].error is None:
            with self._failing(way):
                return float(worker.ask("timed"))
        return None

    def _prepare(self, way: Way, worker: Worker) -> None:
        row = self.rows[way]
        with self._failing(way):
            vars(row).update(worker.ask("compare", self.path, self.reference is None))
            vars(row).update(worker.ask("peaks"))
            if self.reference is None:
                self.reference, self.facts = way, worker.ask("facts")
            row.repeatable = self.rows[self.reference].repeatable
            if not row.compiled:
                with contextlib.suppress(WorkerError):  # not every library bears to be watched
                    row.live_bytes = worker.ask("live_peak")

    @contextlib.contextmanager
    def _failing(self, way: Way) -> Iterator[None]:
        try:
            yield
        except WorkerError as error:
            self.rows[way].error, self.rows[way].details = str(error), error.details

    def conclude(self) -> None:
        """What follows from the times of all."""
        if self.reference is None:
            return
        first = self.rows[self.reference]
        beside = (row.reference_seconds for row in self.rows.values())
        base = min(itertools.chain(first.step_seconds, *beside), default=None)
        for row in self.rows.values():
            row.reference_seconds = row.reference_seconds or first.step_seconds[: len(row.step_seconds)]
            ratio = row.time_ratio
            if ratio is not None and base is not None:
                row.seconds = ratio * base
                row.tokens_per_second = self.facts["tokens"] / row.seconds

    def figures(self) -> PeerCase:
        """All rows. Raises `HfCkptError` where nothing ran."""
        if self.reference is None:
            first = self.rows[NONE]
            raise HfCkptError(
                f"nothing runs on {self.workload.model}; without checkpointing: {first.error}\n{first.details}"
            )
        reference = self.rows[self.reference].name
        found = PeerCase(self.workload, **self.facts, rows=list(self.rows.values()), reference=reference)
        found.mark_frontier()
        return found


# --- the command ------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{MODEL_HELP} (default: {', '.join(MINI)})")
    add_workload_options(parser, **command.WORKLOAD)
    command.add_only(parser)
    parser.add_argument(
        "--repeats", type=positive, default=5, help=f"turns of each, on a CPU of {STEPS} timed steps (default 5)"
    )
    parser.add_argument("--png", type=Path, help="file for a picture of time against peak")
    parser.add_argument("--markdown", type=Path, help="file for the tables as Markdown")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print and draw these figures instead of measuring")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    console = make_console()
    if arguments.show:
        result = PeerBench.from_dict(read_json(arguments.show))
    else:
        workloads = [workload_of(arguments, model) for model in arguments.models or MINI]
        only = known_ways(arguments.only)
        with progress("starting", progress_steps(workloads, arguments.repeats, only)) as on_progress:
            result = bench_peers(
                workloads,
                repeats=arguments.repeats,
                only=only,
                on_progress=on_progress,
                on_case=lambda found: write_json(arguments.json, found.to_dict()),
            )
    report.print_peers(result, console)
    if arguments.markdown:
        write_text(arguments.markdown, report.peers_as_markdown(result))
    if arguments.png:
        pictures.save_peers_picture(result, arguments.png)
    return 0 if result.ok else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these words, or with those of the command line."""
    return command.call(_run, _parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
