"""Every way to train in less memory that a user could pick, against what hf_ckpt does.

Measures peak, saved bytes, step time and gradients of no checkpointing, transformers' own options, torch's SAC,
torch_remat and compiled activation budgets, and of hf_ckpt: fixed specs, and plans for five budgets. Each way has a
process of its own. The exit code is 1 if a row of hf_ckpt recomputed nothing, or gave other gradients than it promises.

The speed of a machine changes within minutes, and other work only makes steps slower. So the compared ways alternate,
step by step, within one turn; the fastest step of each counts, and ratios are taken within a turn. The figure of a way
is the median of its turns. On an accelerator, whose memory they would share, ways run one after the other.

    python recipes/benchmarks/peers.py --json peers.json
    python recipes/benchmarks/peers.py --model mini-gpt2 --repeats 1 --only transformers
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from figures import BUDGETS, faults, tables
from harness import Case, Results, Worker
from machine import DEVICE
from session import Session, config_for
from ways import NONE, WAYS, Way, our_way

import hf_ckpt
from hf_ckpt.errors import HfCkptError

UNSEEN = 0.02
"""Share of a budget that plans leave to what no tensor shows: kernels' scratch memory."""
STEPS = 5
"""Steps of each way in one turn, of which the fastest counts."""
TOGETHER = 4
"""Ways that alternate in one turn, beside the reference."""


def planned(settings: argparse.Namespace, name: str, folder: Path) -> Iterator[tuple[Way, Case]]:
    """The plans for `BUDGETS`, as a run makes them from its first steps, and what they predict. They are saved."""
    sizes = {key: getattr(settings, key) for key in ("tokens", "lora", "dtype")}
    forecast = hf_ckpt.predict(config_for(settings, name), settings.batch, **sizes, budget="100%")
    floor, none = forecast.floor_bytes, forecast.usual[0].peak_bytes
    with Worker(Session, settings, name, NONE) as planner:
        for share in BUDGETS:
            path = folder / f"{share}.json"
            way = our_way(f"planned for {share:.0%}", plan=str(path))
            limit = floor + round(share * (none - floor))
            budget = max(floor, round((1 - UNSEEN) * limit))
            row = planner.ask("plan_for", {"policy": "budget", "budget": budget}, path)
            yield way, row | {"budget_share": share, "budget_bytes": limit}


class Run:
    """All ways on one model, whose rows are filled."""

    def __init__(self, settings: argparse.Namespace, name: str, folder: Path) -> None:
        self.settings, self.name, self.path = settings, name, folder / "gradients.pt"
        only = settings.only or [way.name for way in WAYS]
        self.rows: dict[Way, Case] = {way: {} for way in WAYS if way is NONE or way.name in only or way.group in only}
        self.rows |= planned(settings, name, folder)
        for way, row in self.rows.items():
            row |= {"name": way.name, "group": way.group, "step_seconds": [], "reference_seconds": []}
        self.workers: dict[Way, Worker] = {}
        self.reference: Way | None = None
        """The first that ran, with which the others are compared."""

    def ask(self, way: Way, method: str, *arguments: Any) -> Any:
        """Call a method of a way's session. Returns None if the way failed, now or before: its row has the error."""
        if "error" in self.rows[way]:
            return None
        answer = self.workers[way].ask(method, *arguments)
        if isinstance(answer, dict):
            self.rows[way] |= answer
        return None if "error" in self.rows[way] else answer

    def measure(self) -> Case:
        """Measure all ways. On a CPU they are all alive and take turns; otherwise one runs after the other.

        Raises `HfCkptError` if no way ran.
        """
        repeats = self.settings.repeats
        with contextlib.ExitStack() as alive:
            for way in self.rows:
                self.workers[way] = alive.enter_context(Worker(Session, self.settings, self.name, way))
                if self.ask(way, "measure", self.path, self.reference is None):
                    self.reference = self.reference or way
                if DEVICE != "cpu":
                    for _ in range(repeats):
                        self.turn([way])
                    self.workers[way].shutdown()
            if self.reference is None:
                raise HfCkptError(f"no way runs on {self.name}; without checkpointing: {self.rows[NONE]['error']}")
            for number in range(repeats if DEVICE == "cpu" else 0):
                first = number * len(self.rows) // repeats
                order = [*self.rows, *self.rows][first : first + len(self.rows)]
                for place in range(0, len(order), TOGETHER):
                    self.turn(order[place : place + TOGETHER], self.reference)
        reference = self.rows[self.reference]
        for row in self.rows.values():
            row["reference_seconds"] = row["reference_seconds"] or reference["step_seconds"][: len(row["step_seconds"])]
        repeatable = reference.pop("repeatable")
        return {"reference": self.reference.name, "repeatable": repeatable, "rows": [*self.rows.values()]}

    def turn(self, ways: Sequence[Way], reference: Way | None = None) -> None:
        """Run one turn: a step of each way; with a reference `STEPS` steps, alternating with it. The fastest counts."""
        order = [*ways, *([] if reference is None else [reference])]  # it may be in `ways`, too, which shows the noise
        turns = [[self.ask(way, "timed") for way in order] for _ in range(1 if reference is None else STEPS)]
        fastest = [None if None in seconds else min(seconds) for seconds in zip(*turns, strict=True)]
        for way, seconds in zip(ways, fastest, strict=False):
            if None not in (seconds, fastest[-1]):
                self.rows[way]["step_seconds"].append(seconds)
                self.rows[way]["reference_seconds"] += [] if reference is None else [fastest[-1]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 1 if a model failed or has faults, and 2 if the arguments are invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mini = ["mini-llama", "mini-gpt2", "mini-bert", "mini-t5"]
    parser.add_argument("--model", nargs="+", default=mini, help="presets, hub ids, folders or config.json files")
    parser.add_argument("--blocks", type=int, help="blocks in each stack, instead of the model's own number")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--lora", type=int, help="rank of LoRA adapters on every linear layer")
    parser.add_argument("--dtype", default="bfloat16", help="type of the weights")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each way")
    known = [*dict.fromkeys([*(way.group for way in WAYS), *(way.name for way in WAYS)])]
    told = "names or groups of ways, beside `none` and plans"
    parser.add_argument("--only", nargs="+", default=[], choices=known, metavar="WAY", help=told)
    parser.add_argument("--json", type=Path, help="file for all figures; models that are in it are not run again")
    settings = parser.parse_args(argv)
    sizes = {name: value for name, value in vars(settings).items() if name not in ("model", "json")}
    try:
        results = Results.begun(settings.json, sizes)
    except HfCkptError as error:
        parser.error(str(error))
    for name in settings.model:
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            case = name.removesuffix(".json").rpartition("/")[2]
            results.add(case, lambda name=name, folder=folder: Run(settings, name, Path(folder)).measure())
    print(*tables(results), *faults(results), sep="\n\n")
    return 1 if faults(results) else 0


if __name__ == "__main__":
    sys.exit(main())
