"""Every way to train in less memory that a user could pick, against what hf_ckpt does.

Measures peak, step time and gradients of no checkpointing, transformers' own options, torch's SAC, torch_remat, TRL's
offloading and compiled activation budgets, and of hf_ckpt: fixed specs, and plans for five budgets, with blocks in
eager mode and compiled, beside what was predicted. Each way has a process of its own. They take turns, step by step; on
an accelerator, whose memory they would share, they run one after the other. Peaks are those of the allocator. The exit
code is 1 if a row of hf_ckpt recomputed nothing, or gave other gradients than it promises.

    python recipes/benchmarks/peers.py --json peers.json --png peers.png
    python recipes/benchmarks/peers.py --family mini-gpt2 --repeats 1 --only transformers
    python recipes/benchmarks/peers.py --model mini-llama --blocks 32 --batch 1 --tokens 64 --only torch.compile
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import Benchmark, Case, fastest, option, rotated
from peer_figures import BUDGETS, Row, draw, fault, is_compiled, tables
from session import Session
from ways import NONE, OUR_WAYS, OURS, OURS_COMPILED, PEERS, SELECTIVE, Way, chosen
from workers import Worker, WorkerError

from hf_ckpt import compat
from hf_ckpt.attach.attach import describe
from hf_ckpt.costs.timeline import worst_timeline
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.forecast import forecast
from hf_ckpt.models.families import depth_keys
from hf_ckpt.prediction.question import Question, Workload
from hf_ckpt.prediction.workload import load_config
from hf_ckpt.spec.actions import FULL, Action
from hf_ckpt.spec.files import write_text
from hf_ckpt.spec.plan import Plan
from hf_ckpt.training.install import trial
from hf_ckpt.training.measurements import peak_of

MINI = ["mini-llama", "mini-gpt2", "mini-bert", "mini-t5"]
"""Presets that train on two CPU cores."""
UNSEEN = 0.02
"""Share of a budget that plans leave to what no tensor shows: kernels' scratch memory."""
MEASURED_STEPS = 12
"""Steps of a run before its plan is taken. It needs about seven."""
STEPS = 5
"""Steps of each way in one turn, of which the fastest counts."""
TOGETHER = 4
"""Ways that alternate in one turn, beside the reference."""


@dataclasses.dataclass
class Settings:
    """What is trained, and how often each way is timed."""

    model: list[str] = option(MINI, "presets, hub ids, folders or config.json files")
    blocks: int | None = option(None, "blocks in each stack, instead of the model's own number")
    batch: int = option(4, "sequences of a micro-step")
    tokens: int = option(256, "tokens of a sequence")
    lora: int | None = option(None, "rank of LoRA adapters on every linear layer")
    dtype: str = option("bfloat16", "type of the weights")
    optimizer: str = option("adamw", "an optimizer of PyTorch, as the Trainer names it")
    accumulation: int = option(1, "micro-steps of an optimizer step")
    architecture: str | None = option(None, "class of the model")
    repeats: int = option(5, f"turns of each way, on a CPU of {STEPS} steps")
    only: list[str] = option([], "names or groups of ways; `none` and the plans always run")

    def workload(self, model: str, folder: str) -> Workload:
        """What is trained; the config of a model of another depth is written to `folder`."""
        asked = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        sizes = {name: value for name, value in asked.items() if name not in ("model", "blocks", "repeats", "only")}
        if self.blocks is not None:
            config = load_config(model)
            changed = {**config.to_dict(), **dict.fromkeys(depth_keys(config), self.blocks)}
            model = str(Path(folder) / "config.json")
            write_text(model, json.dumps(changed))
        return Workload(model, **sizes)


class Planner:
    """Plans for budgets, as a run makes them from measured steps."""

    def __init__(self, workload: Workload, compiled: bool) -> None:
        self.session = Session(workload, NONE)
        self.session.step()  # plans count the optimizer's state
        asked = Question(**dataclasses.asdict(workload), budget="100%")
        self.eager = forecast(asked)
        self.compiled = compiled
        self.planned = list(self._planned())

    def plans(self) -> list[tuple[str, str, float, int, Plan]]:
        """(name, group, share, bytes, the fastest plan) for each of `BUDGETS` that a plan fits into."""
        return self.planned

    def _planned(self) -> Iterator[tuple[str, str, float, int, Plan]]:
        floor = self.eager.floor_bytes
        none = next(option.peak_bytes for option in self.eager.usual if option.name == "none")
        for share in BUDGETS:
            limit = floor + round(share * (none - floor))
            allowed = max(floor, round((1 - UNSEEN) * limit))
            yield f"planned for {share:.0%}", OURS, share, limit, self._settled(allowed)
            if self.compiled:
                plan = self._settled(allowed, compile="blocks")
                yield f"compiled blocks, planned for {share:.0%}", OURS_COMPILED, share, limit, plan

    def _settled(self, budget_bytes: int, **keys: str) -> Plan:
        """The plan that a run uses once it has measured enough steps."""
        with trial(self.session.model, {"policy": "budget", "budget": budget_bytes, **keys}):
            for _ in range(MEASURED_STEPS):
                self.session.step()
            return describe(self.session.model).plan

    def predictions(self) -> dict[str, tuple[int, float | None]]:
        """Name of a row -> bytes and seconds, for what transformers offers, fixed specs and plans.

        Without measured steps, seconds are those of the table of devices, which is not for predicting times: None.
        """
        eager = self.eager
        predicted: dict[str, tuple[int, float | None]] = {
            option.name if option.name == "none" else f"{option.name} (HF)": (option.peak_bytes, None)
            for option in eager.usual
        }
        named = {FULL: "full", **{Action("selective", save): name for name, save in SELECTIVE.items()}}
        for number, action in enumerate(eager.costs.actions):
            if action in named:
                predicted[named[action]] = worst_timeline(eager.costs, eager.costs.uniform(number)).peak_bytes, None
        for name, group, _, _, plan in self.planned:
            assert plan.prediction is not None
            if group == OURS:  # whose own prediction is what the run had measured
                peak = peak_of(eager.costs, {block.name: action for block, action in plan.actions})
                predicted[name] = peak, plan.prediction.step_seconds
            else:
                predicted[name] = plan.prediction.peak_bytes, None
        return predicted


class Run:
    """All ways on one model, whose rows are filled."""

    def __init__(self, workload: Workload, rows: Mapping[Way, Row], path: Path, tell: Callable[[str], None]) -> None:
        self.workload, self.rows, self.path, self.tell = workload, rows, path, tell
        self.reference: Way | None = None
        """The first that ran, with which the others are compared."""
        self.facts: dict[str, Any] = {}

    def take(self, repeats: int, together: bool) -> None:
        """Measure all ways. Together, they are all alive and take turns; otherwise one runs after the other."""
        with contextlib.ExitStack() as alive:
            workers: dict[Way, Worker] = {}
            for way in self.rows:
                self.tell(way.name)
                workers[way] = Worker(Session, self.workload, way)
                alive.callback(workers[way].close)
                self.prepare(way, workers[way])
                if not together:
                    for _ in range(repeats):
                        self.turn({way: workers[way]})
                    workers[way].close()
            for number in range(repeats if together else 0):
                self.tell(f"turn {number + 1} of {repeats}")
                order = rotated(workers, number, repeats)
                for first in range(0, len(order), TOGETHER):
                    some = {way: workers[way] for way in order[first : first + TOGETHER]}
                    self.turn(some, workers.get(self.reference))

    def prepare(self, way: Way, worker: Worker) -> None:
        """Gradients and peaks of a way."""
        row = self.rows[way]
        with self.noting_errors(way):
            row |= worker.ask("compare", self.path, self.reference is None)
            row |= worker.ask("peaks")
            if self.reference is None:
                self.reference = way
                self.facts = {"reference": way.name, "repeatable": row.pop("repeatable"), **worker.ask("facts")}
            with contextlib.suppress(WorkerError):  # not every library works while it is watched
                row["live_bytes"] = None if is_compiled(row) else worker.ask("live_peak")

    def turn(self, ways: Mapping[Way, Worker], reference: Worker | None = None) -> None:
        """One turn. With the reference's worker these ways alternate with it; without, each takes one step."""
        steps = {way: functools.partial(self.seconds, way, worker) for way, worker in ways.items()}
        if reference is not None:  # the reference may be one of `ways`, too: it is compared with itself
            steps = {None: functools.partial(self.seconds, self.reference, reference), **steps}
        taken = fastest(steps, 1 if reference is None else STEPS)
        beside = taken.pop(None, None)
        for way, seconds in taken.items():
            if reference is None or beside is not None:
                self.rows[way]["step_seconds"].append(seconds)
                self.rows[way]["reference_seconds"] += [] if beside is None else [beside]

    def seconds(self, way: Way, worker: Worker) -> float | None:
        """Seconds of a step; None if the way failed, now or before."""
        if "error" not in self.rows[way]:
            with self.noting_errors(way):
                return float(worker.ask("timed"))
        return None

    @contextlib.contextmanager
    def noting_errors(self, way: Way) -> Iterator[None]:
        """Inside the `with` block, an error of the way's process is noted in its row."""
        try:
            yield
        except WorkerError as error:
            self.rows[way] |= {"error": str(error), "traceback": error.details}

    def figures(self) -> Case:
        """All rows. Raises `HfCkptError` if no way ran."""
        if self.reference is None:
            raise HfCkptError(
                f"no way runs on {self.workload.model}; without checkpointing: {self.rows[NONE]['error']}"
            )
        first = self.rows[self.reference]["step_seconds"]
        for row in self.rows.values():
            row["reference_seconds"] = row["reference_seconds"] or first[: len(row["step_seconds"])]
        return {"workload": dataclasses.asdict(self.workload), **self.facts, "rows": [*self.rows.values()]}


def measure(settings: Settings, model: str, tell: Callable[[str], None]) -> Case:
    """Every way on one model. A way that fails is a row with its error."""
    rows: dict[Way, Row] = {way: _row(way) for way in chosen(settings.only, (*PEERS, *OUR_WAYS))}
    with tempfile.TemporaryDirectory() as folder:
        workload = settings.workload(model, folder)
        with Worker(Planner, workload, not settings.only or OURS_COMPILED in settings.only) as planner:
            tell(f"{model}: planning")
            for name, group, share, limit, plan in planner.ask("plans"):
                more = {"plan": str(plan), "budget_share": share, "budget_bytes": limit}
                way = Way(name, group, plan)
                rows[way] = {**_row(way), **more}
            predictions: dict[str, tuple[int, float | None]] = planner.ask("predictions")
        run = Run(workload, rows, Path(folder) / "gradients.pt", lambda text: tell(f"{model}: {text}"))
        run.take(settings.repeats, together=compat.accelerator_type() is None)
    for row in rows.values():
        row["predicted_peak_bytes"], row["predicted_seconds"] = predictions.get(row["name"], (None, None))
    return run.figures()


def _row(way: Way) -> Row:
    return {"name": way.name, "group": way.group, "step_seconds": [], "reference_seconds": []}


def cases(settings: Settings, tell: Callable[[str], None]) -> dict[str, Callable[[], Case]]:
    """One case for each model, named by the last part of what names it."""
    return {
        model.removesuffix(".json").rpartition("/")[2]: functools.partial(measure, settings, model, tell)
        for model in settings.model
    }


BENCHMARK = Benchmark(
    doc=__doc__,
    settings=Settings,
    cases=cases,
    tables=tables,
    faults=lambda case: [told for row in case["rows"] if (told := fault(case, row))],
    draw=draw,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
