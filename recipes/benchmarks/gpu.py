"""All figures of hf_ckpt on an accelerator, in parts of a few minutes, in one file.

A row is one way to train one model, or the host time of one block. It is written as soon as it is measured, and is not
measured again. A part ends before its time is over; started again, it goes on with the next row. Steps of a way and of
no checkpointing are timed in turns, in one process.

    python recipes/benchmarks/gpu.py --list
    python recipes/benchmarks/gpu.py small --out gpu.json  # again, until the exit code is 0
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from figures import BUDGETS, HERE, gpu_table
from harness import Case, Results
from machine import DEVICE, seconds_of
from session import Session, config_for
from ways import NONE, OURS, OURS_COMPILED, WAYS, Way, our_way

import hf_ckpt
from hf_ckpt.compat.devices import current_accelerator, is_out_of_memory, release_memory
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.memory import device_memory, keeps_statistics
from hf_ckpt.models.tiny import tiny_model

TURNS = 3  # of a way and of its reference
STEPS = 3  # timed steps of each in one turn; one more comes before them
LAUNCHES = 20  # steps whose median is the host time of a model
NOT_YET = "not measured yet"
HOST_BLOCKS = (8, 24)  # of two models: the difference of their host times has no embeddings and no head


@dataclasses.dataclass(frozen=True)
class Training:
    """A model and its batches: the settings of a `Session`."""

    name: str
    config: str  # a preset, or the path of a config.json
    batch: int
    tokens: int
    blocks: int | None = None
    lora: int | None = None
    four_bits: bool = False
    dtype: str = "bfloat16"


class Budget(NamedTuple):
    """A plan, made in the run, for a budget between the peaks of `full` and `none`: this share of the way."""

    share: float
    label: str = "planned"
    group: str = OURS
    spec: Mapping[str, Any] = {}  # further keys

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"{self.label} for {self.share:.0%}"


WAY = {way.name: way for way in WAYS}
FULL, SELECTIVE, ATTENTION = WAY["full"], WAY["selective"], WAY["selective, save attention"]
OFFLOAD, OFFLOAD_SAVED = WAY["offload"], WAY["selective, offload saved"]
SECOND = our_way("every_n_layers: 2", policy="full", every_n_layers=2)
FULL_SELECTIVE = our_way("full+selective", policy="full+selective")
COMPILED = {
    share: our_way(f"compiled blocks, share {share:g}", OURS_COMPILED, compile="blocks", share=share)
    for share in (1.0, 0.8, 0.5, 0.0)
}
PLANS = [Budget(0.25), Budget(0.6)]
COMPILED_PLANS = [
    Budget(share, "compiled blocks, planned", OURS_COMPILED, {"compile": "blocks"}) for share, *_ in PLANS
]
WITH_HOST = Budget(0.15, "planned with host memory", OURS, {"host_budget": "32GiB"})

GPT2 = Training("gpt2-medium", "gpt2-medium", batch=8, tokens=1024)
BERT = Training("bert-large", "bert-large", batch=16, tokens=512)
T5 = Training("t5-350m", "t5-large", batch=8, tokens=512, blocks=11)
LLAMA = Training("llama-1b", str(HERE / "gpu-llama.json"), batch=4, tokens=2048)
LORA = [
    Training(f"llama-8b, {kind}, {tokens // 1024}k", "llama-3.1-8b", 1, tokens, lora=16, four_bits=kind == "QLoRA")
    for kind, tokens in itertools.product(("LoRA", "QLoRA"), (2048, 8192, 32768))
]
NARROW = [
    Training("llama", "mini-llama", batch=1, tokens=64),
    Training("gpt2, dropout", str(HERE / "mini-gpt2-dropout.json"), batch=1, tokens=64),
]
TABLE = [NONE, SELECTIVE, ATTENTION, FULL, WAY["full (HF)"], OFFLOAD, OFFLOAD_SAVED, Budget(0.15), WITH_HOST]
TABLE += [*map(Budget, (0.35, 0.6, 0.85)), COMPILED[1], COMPILED[0.5], COMPILED[0]]
PARTS: dict[str, tuple[Sequence[Training], Sequence[Way | Budget]]] = {
    "small": ([GPT2, BERT, T5], [NONE, FULL, SELECTIVE, SECOND, *PLANS]),
    "lora": (LORA, [NONE, FULL, SELECTIVE, *PLANS]),
    "compiled": ([LLAMA, GPT2], [NONE, FULL, *COMPILED.values(), *COMPILED_PLANS]),
    "peaks": ([LLAMA, GPT2, BERT, T5, LORA[0], LORA[3]], [NONE, FULL, *map(Budget, BUDGETS)]),
    "host": (NARROW, [NONE, SELECTIVE, ATTENTION, FULL, FULL_SELECTIVE, OFFLOAD]),
    "table": ([LLAMA], TABLE),
}
"""Name -> models, and the ways to train each of them. `table` is that of docs/comparison.md."""


class Run:
    """Measures rows. It holds the sessions of one model."""

    def __init__(self, results: Results, folder: Path, is_tiny: bool) -> None:
        self.results = results
        self.folder = folder  # for plans and tiny configs
        self.is_tiny = is_tiny
        self.sessions: dict[Training, Session] = {}
        self.longest_seconds = 0.0  # of a row so far

    def left(self, part: str) -> dict[str, tuple[Training, Way | Budget]]:
        """The rows that are to be measured: also those that failed, and that lacked a package which is there now."""
        rows = {}
        for training, way in itertools.product(*PARTS[part]):
            name = f"{part}: {training.name}: {way.name}"
            row = self.results.cases.get(name, {"error": NOT_YET})
            if "error" in row or ("needs" in row and importlib.util.find_spec(row["needs"])):
                rows[name] = training, way
        return rows

    def measure(self, part: str, seconds: float) -> None:
        """Measure the rows of a part that are left, until the next one could take more time than there is."""
        end = time.monotonic() + seconds
        for name, (training, way) in self.left(part).items():
            begin = time.monotonic()
            if begin + self.longest_seconds > end:
                return
            print(f"{name} ...", file=sys.stderr, flush=True)
            self.results.cases[name] = {"error": NOT_YET}
            self.results.add(name, lambda training=training, way=way: self.row(part, training, way))
            release_memory()
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - begin)

    def row(self, part: str, training: Training, way: Way | Budget) -> Case:
        """Measure a row. If memory runs out, or a package is missing, `left_out` says so."""
        row: Case = {"part": part, "model": training.name, "name": way.name, "group": way.group}
        if training.four_bits and importlib.util.find_spec("bitsandbytes") is None:
            return {**row, "needs": "bitsandbytes", "left_out": "needs bitsandbytes, which is not installed"}
        try:
            return row | (self.launched(training, way) if part == "host" else self.trained(part, training, way))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return {**row, "left_out": "out of memory"}

    def case(self, part: str, training: Training, way: Way) -> Case:
        """Another row of the same model, if it is measured. Raises `HfCkptError` if it failed."""
        case = self.results.cases.get(f"{part}: {training.name}: {way.name}", {})
        if case.get("error", NOT_YET) != NOT_YET:
            raise HfCkptError(f"needs the row of {way.name}: {case['error']}")
        return case

    def settings(self, training: Training) -> argparse.Namespace:
        """The settings of a session, with `--tiny` of a model with a few thousand parameters."""
        settings = argparse.Namespace(**dataclasses.asdict(training))
        if self.is_tiny:
            real = config_for(settings, training.config)
            config = tiny_model(real.model_type, layers=training.blocks or 2, dropout=0.1).config
            config.architectures = real.architectures
            config.save_pretrained(self.folder)
            settings.config = str(self.folder / "config.json")
            settings.batch, settings.tokens = 2, max(8, training.tokens // 256)
        return settings

    def session(self, training: Training) -> Session:
        """The session of a training. It frees those of other models."""
        if training not in self.sessions:
            if any(other.name != training.name for other in self.sessions):
                self.sessions.clear()
                release_memory()
            settings = self.settings(training)
            self.sessions[training] = Session(settings, settings.config, NONE)
        return self.sessions[training]

    def trained(self, part: str, training: Training, way: Way | Budget) -> Case:
        """Bytes of a step, what was predicted, and, but for `peaks`, the times of steps."""
        session, row = self.session(training), {}
        if isinstance(way, Budget):
            row, way = self.planned(part, training, way)
        with session.under(way):
            row["first_seconds"] = seconds_of(session.backward)
            session.step()
            row |= session.bytes()
            if way.group == OURS_COMPILED and not hf_ckpt.describe(session.model).in_graphs:
                raise HfCkptError("no block was compiled")
        if part == "peaks" and "budget_bytes" not in row:
            row["predicted_peak_bytes"] = self.forecast(training)[way.name]
        if part != "peaks":
            fits = (other for other in (NONE, FULL) if "left_out" not in self.case(part, training, other))
            reference = next(fits, way)
            row |= {"reference": reference.name, "reference_seconds": [], "step_seconds": []}
            for times, other in [("reference_seconds", reference), ("step_seconds", way)] * TURNS:
                with session.under(other):
                    session.step()
                    row[times].append(session.timed(STEPS))
        return row

    def planned(self, part: str, training: Training, way: Budget) -> tuple[Case, Way]:
        """Plan for a budget. The memory of the device stands for the peak of what ran out of memory."""
        memory_bytes = device_memory(0).total_bytes
        lowest = self.case(part, training, FULL).get("allocated_bytes", memory_bytes)
        highest = self.case(part, training, NONE).get("allocated_bytes", memory_bytes)
        limit = lowest + round(way.share * (highest - lowest))
        path = self.folder / "plan.json"
        row = self.session(training).plan_for({"policy": "budget", "budget": f"{limit}B", **way.spec}, path)
        row |= {"budget_share": way.share, "budget_bytes": limit}
        return row, our_way(way.name, way.group, plan=str(path))

    def forecast(self, training: Training) -> dict[str, int]:
        """The peaks that `hf-ckpt plan` predicts, by the name of the way."""
        settings = self.settings(training)
        options = {key: getattr(settings, key) for key in ("tokens", "lora", "dtype")}
        options |= {"load_in_4bit": True, "kbit_preparation": False} if training.four_bits else {}
        forecast = hf_ckpt.predict(config_for(settings, settings.config), settings.batch, budget="100%", **options)
        return {row.name: row.peak_bytes for row in forecast.usual}

    def launched(self, training: Training, way: Way) -> Case:
        """Host time of one block, forward and backward: nothing waits for the device meanwhile."""
        seconds = []
        for number in HOST_BLOCKS:
            session = self.session(dataclasses.replace(training, blocks=number))
            with session.under(way):
                session.step()
                times = [seconds_of(session.backward, is_complete=False) for _ in range(LAUNCHES)]
            seconds.append(statistics.median(times))
        return {"host_seconds": (seconds[1] - seconds[0]) / (HOST_BLOCKS[1] - HOST_BLOCKS[0])}


def main(argv: Sequence[str] | None = None) -> int:
    """Run parts. Returns 1 if rows are left or failed, and 2 if the arguments are invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*PARTS, "all"], default="all", help="or all")
    parser.add_argument("--list", action="store_true", help="list the parts, with their models and ways")
    parser.add_argument("--out", type=Path, help="file for all figures; rows that are in it are not measured again")
    parser.add_argument("--minutes", type=float, default=9, help="minutes of each part")
    parser.add_argument("--tiny", action="store_true", help="models of a few thousand parameters, to try the script")
    options = parser.parse_args(argv)
    parts = [*PARTS] if "all" in options.parts else options.parts
    if options.list:
        for part in parts:
            print(part, *("; ".join(row.name for row in rows) for rows in PARTS[part]), sep="\n  ")
        return 0
    if options.out is None:
        parser.error("--out: give a file for the figures")
    if DEVICE == "cpu" or not keeps_statistics(current_accelerator()):
        parser.error(f"needs an accelerator whose allocator reports peaks, but torch trains on {DEVICE} here")
    try:
        results = Results.begun(options.out, {"tiny": options.tiny})
    except HfCkptError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(results, Path(folder), options.tiny)
        for part in parts:
            run.measure(part, 60 * options.minutes)
        left = [name for part in parts for name in run.left(part)]
    print(*(gpu_table(results, part) for part in parts), sep="\n\n")
    for name in left:
        print(f"left: {name}: {results.cases.get(name, {}).get('error', NOT_YET)}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
