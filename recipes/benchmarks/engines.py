"""Measures and compares the engines of hf_ckpt and transformers' own checkpointing, on the same weights.

For each engine, it measures the bytes that blocks keep for backward, step time, and the host's overhead per block (on a
tiny model), and compares gradients. Bytes are counted by watching allocations in the blocks' forwards; steps are timed
without watching. The exit code is 1 if an engine failed, recomputed nothing, or gave different gradients.

    python recipes/benchmarks/engines.py --family llama --json engines.json
    python recipes/benchmarks/engines.py --dropout 0.1 --attention eager --repeats 0 --host-rounds 0    # bytes only
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from comparison import Table, first_difference, gradients_of
from harness import Benchmark, Case, Results, fastest, in_words, median, option, ratios, rotated, seconds_of, spread
from torch import nn
from ways import NONE, OURS, TRANSFORMERS, WATCHED, Running, Way

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import FoundBlocks, base_model, find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.units import format_bytes, format_percent, format_ratio, format_seconds

TUNINGS = ("full", "LoRA")
HOST_SIZES = {"layers": 16, "hidden": 32, "batch": 1, "tokens": 8}
"""A model so small that its steps take host time only."""
EVERY_SECOND = (
    Way("every_n_layers: 2 (HF)", TRANSFORMERS, {"every_n_layers": 2})
    if compat.HAS_EVERY_N_LAYERS
    else Way("every_n_layers: 2 (hf_ckpt)", OURS, {"policy": "full", "every_n_layers": 2})
)
ENGINES = (
    NONE,
    Way("selective", OURS, {"policy": "selective", "engine": "rebuild"}),
    Way("selective, save attention", OURS, {"policy": "selective", "engine": "rebuild", "save": ["attention"]}),
    Way("sac", OURS, {"policy": "selective", "engine": "sac"}),
    Way("full", OURS, {"policy": "full"}),
    Way("full (HF)", TRANSFORMERS, {}),
    EVERY_SECOND,
    Way("full, checked", WATCHED, {"policy": "full"}),
    Way("selective, checked", WATCHED, {"policy": "selective", "engine": "rebuild"}),
    Way("offload", OURS, {"policy": "offload"}, to_host=True),
    Way("selective, offload saved", OURS, {"policy": "selective", "offload": "saved"}, to_host=True),
)
"""The others are compared with the first one."""


@contextlib.contextmanager
def kept_bytes(live: LiveBytes, found: FoundBlocks) -> Iterator[list[int]]:
    """Record by how many bytes live memory grows from the first to the last block of each stack.

    The sum of the list is what a forward of the blocks leaves: saved tensors and the last output.
    """
    stacks: dict[str, list[nn.Module]] = {}
    for block in found.blocks:
        stacks.setdefault(block.stack, []).append(found.modules[block.name])
    grown: list[int] = []
    with contextlib.ExitStack() as hooks:
        for first, *_, last in ([*blocks, blocks[-1]] for blocks in stacks.values()):
            hooks.enter_context(first.register_forward_pre_hook(lambda *_: grown.append(-live.current_bytes)))
            hooks.enter_context(last.register_forward_hook(lambda *_: grown.append(live.current_bytes)))
        yield grown


@dataclasses.dataclass
class Settings:
    """Sizes of the models and of the steps."""

    layers: int = option(6, "blocks in each stack")
    hidden: int = option(512, "hidden size, a multiple of 16")
    batch: int = option(4, "sequences a step")
    tokens: int = option(256, "tokens a sequence")
    dropout: float = option(0.0, "every dropout probability, that of adapters, too")
    attention: str = option("sdpa", "sdpa, or eager, which shows the masks of attention's dropout")
    dtype: str = option("bfloat16", "bfloat16, float16 or float32")
    lora: int = option(8, "rank of the adapters")
    repeats: int = option(5, "timed steps of each engine")
    host_rounds: int = option(30, "timed steps of each on the model that host time is taken from")

    def __post_init__(self) -> None:
        if self.hidden % 16:
            raise HfCkptError(f"hidden must be a multiple of 16 (8 heads), but is {self.hidden} instead.")


def model_and_batch(settings: Settings, family: str, tuning: str) -> tuple[nn.Module, dict[str, Any]]:
    """A batch and a random model with the family's usual proportions, but a small vocabulary: only blocks matter."""
    hidden, positions = settings.hidden, max(512, settings.tokens)
    heads = {"num_attention_heads": 8, "max_position_embeddings": positions}
    shapes: dict[str, dict[str, Any]] = {
        "llama": {"intermediate_size": hidden * 43 // 16, "num_key_value_heads": 8, **heads},
        "gpt2": {"n_head": 8, "n_positions": positions},
        "bert": {"intermediate_size": 4 * hidden, **heads},
        "t5": {"d_ff": 2 * hidden, "d_kv": hidden // 8, "num_heads": 8},
    }
    model: nn.Module = tiny_model(
        family,
        layers=settings.layers,
        hidden=hidden,
        dropout=settings.dropout,
        attention=settings.attention,
        dtype=getattr(torch, settings.dtype),
        **shapes[family],
    )
    if tuning == "LoRA":  # random adapters: with PEFT's zeros, half of the gradients are 0
        torch.manual_seed(0)
        model = compat.add_lora(model, rank=settings.lora, lora_dropout=settings.dropout, init_lora_weights=False)
    batch: dict[str, Any] = dict(tiny_batch(family, batch=settings.batch, tokens=settings.tokens))
    if family == "t5":
        batch["labels"] = batch["input_ids"].clone()
    device = compat.accelerator_type() or "cpu"
    batch = {name: value.to(device) for name, value in batch.items()}
    if compat.wants_use_cache(base_model(model)):
        batch["use_cache"] = False
    return model.to(device).train(), batch


class Run:
    """All engines on one model, with a row of figures for each."""

    def __init__(self, settings: Settings, family: str, tuning: str) -> None:
        self.settings, self.family, self.tuning = settings, family, tuning
        here = [engine for engine in ENGINES if not engine.to_host or compat.accelerator_type()]
        self.rows: dict[Way, dict[str, Any]] = {
            engine: {"name": engine.name, "group": engine.group, "step_seconds": []} for engine in here
        }
        self.model, self.batch = model_and_batch(settings, family, tuning)
        self.found = find_blocks(self.model)
        self.reference: dict[str, torch.Tensor] = {}

    def take(self, tell: Callable[[str], None]) -> Case:
        """Measure every engine: a warm-up step, a watched step, timed steps, and host time."""
        for engine in self.rows:
            self.attempt(engine, self.count_bytes)
        for number in range(self.settings.repeats):
            tell(f"{self.family}, {self.tuning}: step {number + 1} of {self.settings.repeats}")
            for engine, seconds in self.turn(number, self.settings.repeats, self.timed).items():
                self.rows[engine]["step_seconds"].append(seconds)
        self.time_host()
        return {"blocks": len(self.found.blocks), "rows": list(self.rows.values())}

    def count_bytes(self, engine: Way, running: Running) -> None:
        """Count the bytes and recomputations of one step."""
        row = self.rows[engine]
        self.compare(row, _step(self.model, self.batch))
        gc.collect()
        before = running.counts() or {}
        self.model.zero_grad(set_to_none=True)
        with LiveBytes(self.model, self.batch) as live:
            with kept_bytes(live, self.found) as grown:
                loss = self.model(**self.batch).loss
            loss.backward()
        row["block_bytes"], row["peak_bytes"] = sum(grown), live.peak_bytes
        counts = {name: count - before[name] for name, count in (running.counts() or {}).items()}
        row["recomputed"] = sum(counts.values())
        missed = sum(not count for count in counts.values())
        if missed or (not counts and engine is not NONE):
            row["error"] = f"{missed} of {len(counts)} planned blocks recomputed nothing"

    def timed(self, engine: Way, running: Running) -> float:
        """Return the seconds of one step, and compare its gradients."""
        gradients: dict[str, torch.Tensor] = {}
        seconds = seconds_of(lambda: gradients.update(_step(self.model, self.batch)))
        self.compare(self.rows[engine], gradients)
        return seconds

    def time_host(self) -> None:
        """Measure the host time per block, beyond that of no checkpointing, on a tiny model."""
        rounds = self.settings.host_rounds
        if not rounds:
            return
        small = dataclasses.replace(self.settings, **HOST_SIZES)
        model, batch = model_and_batch(small, self.family, self.tuning)

        def timed(engine: Way, running: Running) -> float:
            _step(model, batch)  # the first step after turning it on does more
            return seconds_of(lambda: _step(model, batch))

        turns = [self.turn(number, rounds, timed, model) for number in range(rounds)]
        for engine, row in self.rows.items():
            beyond = [turn[engine] - turn[NONE] for turn in turns if engine in turn]
            if engine is not NONE and beyond:
                row["host_seconds"] = median(beyond) / len(find_blocks(model).modules)

    def turn(
        self, number: int, count: int, take: Callable[[Way, Running], float], model: Any = None
    ) -> dict[Way, float]:
        """Run a step of every engine, in rotated order."""
        order = rotated(self.rows, number, count)
        return fastest({engine: functools.partial(self.attempt, engine, take, model) for engine in order})

    def attempt(self, engine: Way, measure: Callable[[Way, Running], Any], model: nn.Module | None = None) -> Any:
        """Turn an engine on and return its measurement; None if it fails or has failed, which its row records.

        Errors without checkpointing are raised.
        """
        if "error" in self.rows[engine]:
            return None
        try:
            with engine.turned_on(model or self.model) as running:
                return measure(engine, running)
        except Exception as error:
            if engine is NONE:
                raise
            self.rows[engine]["error"] = in_words(error)
            return None

    def compare(self, row: dict[str, Any], gradients: Mapping[str, torch.Tensor]) -> None:
        """Record the first gradient that differs from that of no checkpointing, in any step."""
        self.reference = self.reference or dict(gradients)
        row["first_difference"] = row.get("first_difference") or first_difference(gradients, self.reference)


def _step(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Run forward and backward, always from the same random state; return the gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    model(**batch).loss.backward()
    return gradients_of(model)


def cases(settings: Settings, tell: Callable[[str], None]) -> dict[str, Callable[[], Case]]:
    """One case for each family and way of training."""
    return {
        f"{family}, {tuning}": lambda family=family, tuning=tuning: Run(settings, family, tuning).take(tell)
        for family in FAMILIES
        for tuning in TUNINGS
    }


def faults(case: Case) -> list[str]:
    """Errors and different gradients; different gradients of transformers' own checkpointing do not count."""
    found = [f"{row['name']}: {row['error']}" for row in case["rows"] if "error" in row]
    differ = [row for row in case["rows"] if row.get("first_difference") and row["group"] in (OURS, WATCHED)]
    return found + [f"{row['name']}: gradients differ: {row['first_difference']}" for row in differ]


def engines_table(name: str, case: Case) -> Table:
    """The memory and time of every engine on one model. `host` is the host's overhead per block and step."""
    first = case["rows"][0]
    sac = next((row.get("host_seconds") for row in case["rows"] if row["name"] == "sac"), None)
    cells = []
    for row in case["rows"]:
        times, host = ratios(row["step_seconds"], first["step_seconds"]), row.get("host_seconds")
        cells.append(
            (
                row["name"],
                format_bytes(row.get("block_bytes")),
                format_ratio(_kept(row, first)),
                format_seconds(median(row["step_seconds"])),
                format_ratio(median(times)),
                spread(times),
                "differ" if row.get("first_difference") else "equal",
                str(row.get("recomputed", "-")),
                format_seconds(host),
                format_percent(host / sac if host and sac else None),
            )
        )
    columns = ("engine", "kept", "", "step", "", "spread", "gradients", "recomp.", "host", "of sac")
    return Table(f"{name}, {case['blocks']} blocks", columns, cells, (0, 6))


def all_engines(results: Results) -> Table:
    """Bytes kept by blocks and step time, relative to no checkpointing, of every engine on every model."""
    cells = []
    for name, case in results.good.items():
        first, *rows = case["rows"]
        rows = [row for row in rows if row["group"] != WATCHED and row["name"] != "full (HF)"]
        found = {row["name"]: f"{_kept(row, first):.2f}" for row in rows}
        for row in rows:
            if row["step_seconds"]:
                found[row["name"]] += f", {format_ratio(median(ratios(row['step_seconds'], first['step_seconds'])))}"
        cells.append((name, *found.values()))
    return Table("kept bytes and step time of every engine", ("model", *found), cells)


def checks(results: Results) -> Table:
    """Step time if every step checks a block, relative to the same engine without checks; and host time of engines.

    By default one step in 100 is checked.
    """
    cells = []
    for name, case in results.good.items():
        rows = {row["name"]: row for row in case["rows"]}
        checked = [
            median(ratios(rows[f"{engine}, checked"]["step_seconds"], rows[engine]["step_seconds"]))
            for engine in ("full", "selective")
        ]
        host = {engine: rows[engine]["host_seconds"] for engine in ("selective", "sac", "full", "full (HF)")}
        cells.append(
            (
                name,
                *map(format_ratio, checked),
                format_percent(host["selective"] / host["sac"]),
                format_percent(host["full"] / host["full (HF)"]),
            )
        )
    columns = ("model", "full, checked", "selective, checked", "host: selective of sac", "host: full of full (HF)")
    return Table("a checked step, and the host's time for a block", columns, cells)


def _kept(row: Mapping[str, Any], first: Mapping[str, Any]) -> float | None:
    return row["block_bytes"] / first["block_bytes"] if "block_bytes" in row else None


def tables(results: Results) -> Sequence[Table]:
    """One table per model."""
    return [engines_table(name, case) for name, case in results.good.items()]


BENCHMARK = Benchmark(doc=__doc__, settings=Settings, cases=cases, tables=tables, faults=faults)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
