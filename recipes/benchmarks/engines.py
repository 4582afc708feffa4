"""What every engine of hf_ckpt, and transformers' own checkpointing, keeps and costs, on the same weights.

Measures the bytes that the blocks keep, time and host overhead, and compares the gradients. Everything is measured from
outside: bytes by watching the allocations of the blocks' forwards, time by steps without any watching. Engines take
turns inside every repeat, in rotated order, and ratios are taken within a repeat. The exit code is 1 if an engine
raised, recomputed nothing, or gave other gradients.

    python recipes/benchmarks/engines.py --family llama --tuning lora --json engines.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import command
import pictures
import report
import torch
import turns
from figures import read_json, write_json
from machine import circumstances
from session import gradients_of
from torch import nn
from ways import NONE, OURS, TRANSFORMERS, Running, Way

from hf_ckpt import compat
from hf_ckpt.attach.attach import describe
from hf_ckpt.cli.arguments import positive, progress
from hf_ckpt.console import make_console
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import BlockBytes
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

TUNINGS = ("full", "lora")
LORA_RANK = 8
DTYPES = ("bfloat16", "float16", "float32")
HOST_SIZES: dict[str, Any] = {"layers": 16, "hidden": 32, "batch": 1, "tokens": 8}  # nothing to compute: host time

REBUILD = Way("rebuild", OURS, {"policy": "selective", "engine": "rebuild"})
REBUILD_ATTENTION = Way(
    "rebuild, save attention", OURS, {"policy": "selective", "engine": "rebuild", "save": ["attention"]}
)
SAC = Way("sac", OURS, {"policy": "selective", "engine": "sac"})
EVERY_SECOND = (
    Way("every_n_layers: 2 (HF)", TRANSFORMERS, {"every_n_layers": 2})
    if compat.HAS_EVERY_N_LAYERS
    else Way("every_n_layers: 2 (hf_ckpt)", OURS, {"policy": "full", "every_n_layers": 2})
)
OFFLOADS = (
    Way("offload", OURS, {"policy": "offload"}),
    Way("rebuild, offload saved", OURS, {"policy": "selective", "engine": "rebuild", "offload": "saved"}),
    *([Way("offload (HF)", TRANSFORMERS, {"offload": True})] if compat.HAS_OWN_OFFLOAD else []),
)
"""With an accelerator only: without one nothing is moved."""
ENGINES = (NONE, REBUILD, REBUILD_ATTENTION, SAC, Way("full", OURS, {"policy": "full"}), EVERY_SECOND)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the models and of the steps. Raises `HfCkptError` for values that fit no model."""

    families: tuple[str, ...] = FAMILIES
    tunings: tuple[str, ...] = TUNINGS
    """`full` (every weight) and `lora`."""
    layers: int = 6
    """Blocks in each stack."""
    hidden: int = 512
    batch: int = 4
    tokens: int = 256
    dropout: float = 0.0
    dtype: str = "bfloat16"
    device: str = dataclasses.field(default_factory=lambda: compat.accelerator_type() or "cpu")
    repeats: int = 5
    """Timed steps of each engine."""
    host_rounds: int = 30
    """Timed steps of each engine on the tiny model that host time is taken from; 0 leaves that out."""

    def __post_init__(self) -> None:
        named = (
            ("family", self.families, FAMILIES),
            ("tuning", self.tunings, TUNINGS),
            ("dtype", [self.dtype], DTYPES),
        )
        for what, given, known in named:
            for value in given:
                if value not in known:
                    raise HfCkptError(f"{what} must be one of {', '.join(known)}, but is {value!r} instead.")
        if self.hidden % 16:
            raise HfCkptError(f"hidden must be a multiple of 16 (8 heads), but is {self.hidden} instead.")


@dataclasses.dataclass
class EngineRow:
    """Figures of one engine on one model."""

    engine: str
    foreign: bool = False
    """Whether transformers runs it alone: other gradients are then told, and no failure of hf_ckpt."""
    error: str | None = None
    """What it raised; figures taken before that stay."""
    peak_bytes: int | None = None
    """Most live bytes at any moment of a step, weights included; no optimizer."""
    block_bytes: int | None = None
    """Live bytes at the end of the forward that were made inside the blocks."""
    bytes_ratio: float | None = None
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    time_ratios: list[float] = dataclasses.field(default_factory=list)
    """Step time over that of `none`, repeat by repeat."""
    recomputed: int = 0
    """Operations, modules or whole blocks that were run again in one step."""
    idle: str | None = None
    """What did not happen that should have."""
    first_difference: str | None = None
    """The first parameter whose gradient is not bit-equal to that of `none`, in any step."""
    host_seconds: float | None = None
    """Host time a block beyond `none`, forward and backward."""
    host_share_of_sac: float | None = None
    kept: dict[str, int] = dataclasses.field(default_factory=dict)
    """What the engine itself says it kept in all blocks, by autograd node."""
    kept_to_rebuild: dict[str, int] = dataclasses.field(default_factory=dict)
    """The part of `kept` that autograd itself would not hold."""
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def problem(self) -> str | None:
        """Why the benchmark fails; None if all is well."""
        return self.error or self.idle or (None if self.foreign else self.difference)

    @property
    def difference(self) -> str | None:
        """Where gradients depart from those of `none`, in words."""
        return None if self.equal else f"gradients differ: {self.first_difference}"

    @property
    def equal(self) -> bool:
        """Whether every gradient of every step was bit-equal to that of `none`."""
        return self.first_difference is None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, medians included."""
        return {
            **dataclasses.asdict(self),
            "gradients_equal": self.equal if self.error is None else None,
            "step_seconds_median": turns.median(self.step_seconds),
            "time_ratio": turns.median(self.time_ratios),
        }


@dataclasses.dataclass
class EngineCase:
    """All engines on one model."""

    family: str
    tuning: str
    blocks: int
    block_input_bytes: int
    rows: list[EngineRow]


@dataclasses.dataclass
class EngineBench:
    """What the benchmark measured, and where."""

    settings: Settings
    circumstances: dict[str, Any]
    cases: list[EngineCase]

    @property
    def ok(self) -> bool:
        """Whether every engine ran, did something, and gave the same gradients."""
        return not any(row.problem for case in self.cases for row in case.rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        cases = [{**vars(case), "rows": [row.to_dict() for row in case.rows]} for case in self.cases]
        settings = {**dataclasses.asdict(self.settings), "lora_rank": LORA_RANK}
        return {"circumstances": self.circumstances, "settings": settings, "ok": self.ok, "cases": cases}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> EngineBench:
        """Read `to_dict`'s form. Raises `HfCkptError` where something of it is missing."""

        def known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
            names = {field.name for field in dataclasses.fields(kind)}
            return {name: value for name, value in values.items() if name in names}

        try:
            cases = [
                EngineCase(**{**case, "rows": [EngineRow(**known(EngineRow, row)) for row in case["rows"]]})
                for case in given["cases"]
            ]
            return cls(Settings(**known(Settings, given["settings"])), given["circumstances"], cases)
        except (KeyError, TypeError) as error:
            raise HfCkptError(f"these are no figures of `engines.py`: {error}") from error


def engines_for(device: str) -> tuple[Way, ...]:
    """The engines that mean something on a device."""
    return ENGINES if device == "cpu" else (*ENGINES, *OFFLOADS)


def bench_engines(
    settings: Settings,
    *,
    engines: Sequence[Way] | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> EngineBench:
    """Compare engines (`engines_for` the device, unless given), the first being what the others are compared with, on
    every model that `settings` name.

    An engine that raises is a row with its error. Only the first may not: its error is raised.
    """
    cases = []
    compared = engines_for(settings.device) if engines is None else engines
    for family in settings.families:
        for tuning in settings.tunings:
            on_progress(f"{family}, {tuning}")
            case = Case(settings, family, tuning, compared)
            case.count_bytes()
            for number in range(settings.repeats):
                on_progress(f"{family}, {tuning}: repeat {number + 1} of {settings.repeats}")
                case.time_steps(number)
            on_progress(f"{family}, {tuning}: host time")
            case.time_host(dataclasses.replace(settings, **HOST_SIZES))
            cases.append(EngineCase(family, tuning, len(case.blocks), case.block_input_bytes, [*case.rows.values()]))
    return EngineBench(settings, circumstances(settings.device), cases)


def progress_steps(settings: Settings) -> int:
    """How often `bench_engines` reports progress."""
    return len(settings.families) * len(settings.tunings) * (settings.repeats + 2)


def bench_model(settings: Settings, family: str, tuning: str) -> tuple[nn.Module, dict[str, Any]]:
    """A random model of the family's usual proportions but for a small vocabulary, because blocks matter; a batch."""
    hidden, positions = settings.hidden, max(512, settings.tokens)
    shapes: dict[str, dict[str, Any]] = {
        "llama": {
            "intermediate_size": hidden * 43 // 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "max_position_embeddings": positions,
        },
        "gpt2": {"n_head": 8, "n_positions": positions},
        "bert": {"intermediate_size": 4 * hidden, "num_attention_heads": 8, "max_position_embeddings": positions},
        "t5": {"d_ff": 2 * hidden, "d_kv": hidden // 8, "num_heads": 8},
    }
    model: nn.Module = tiny_model(
        family,
        layers=settings.layers,
        hidden=hidden,
        dropout=settings.dropout,
        attention="sdpa",
        dtype=getattr(torch, settings.dtype),
        **shapes[family],
    )
    if tuning == "lora":  # random adapters: at PEFT's zeros, half of the gradients are 0
        torch.manual_seed(0)
        model = compat.add_lora(model, rank=LORA_RANK, lora_dropout=settings.dropout, init_lora_weights=False)
    inputs: dict[str, Any] = dict(tiny_batch(family, batch=settings.batch, tokens=settings.tokens))
    if family == "t5":
        inputs["labels"] = inputs["input_ids"].clone()
    inputs = {name: value.to(settings.device) for name, value in inputs.items()}
    if compat.wants_use_cache(base_model(model)):
        inputs["use_cache"] = False
    return model.to(settings.device).train(), inputs


class Case:
    """One model and what its steps gave."""

    def __init__(self, settings: Settings, family: str, tuning: str, engines: Sequence[Way]) -> None:
        self.settings, self.family, self.tuning, self.engines = settings, family, tuning, tuple(engines)
        self.rows = {engine: EngineRow(engine.name, foreign=engine.group == TRANSFORMERS) for engine in engines}
        self.model, self.inputs = bench_model(settings, family, tuning)
        self.blocks = find_blocks(self.model).modules
        element_bytes = getattr(torch, settings.dtype).itemsize
        self.block_input_bytes = settings.batch * settings.tokens * settings.hidden * element_bytes
        self.reference: dict[str, torch.Tensor] = {}

    def count_bytes(self) -> None:
        """One plain step of every engine, which warms up, and a watched one."""
        for engine in self.engines:
            self._try(engine, self._count_bytes)
        first = self.rows[self.engines[0]].block_bytes
        for row in self.rows.values():
            if row.block_bytes is not None and first:
                row.bytes_ratio = row.block_bytes / first

    def _count_bytes(self, engine: Way, row: EngineRow, running: Running) -> None:
        self._compare(row, _step(self.model, self.inputs))
        gc.collect()
        before = running.counts() or {}
        self.model.zero_grad(set_to_none=True)
        with BlockBytes(self.blocks.values(), self.model, self.inputs) as live:
            outputs = self.model(**self.inputs)
            row.block_bytes = live.block_bytes
            loss = outputs.loss
            del outputs  # as in a training loop
            loss.backward()
        row.peak_bytes = live.peak_bytes
        counts = {name: count - before[name] for name, count in (running.counts() or {}).items()}
        row.recomputed = sum(counts.values())
        missed = sum(not count for count in counts.values())
        if missed:
            row.idle = f"{missed} of {len(counts)} planned blocks recomputed nothing"
        elif not counts and engine is not self.engines[0]:
            row.idle = "nothing was planned"
        if engine.group == OURS:
            done = describe(self.model)
            row.kept, row.dropped, row.kept_to_rebuild = done.kept, done.dropped, done.kept_to_rebuild

    def time_steps(self, number: int) -> None:
        """One timed step of every engine."""

        def take(engine: Way, row: EngineRow, running: Running) -> float:
            gradients: dict[str, torch.Tensor] = {}
            seconds = turns.seconds_of(lambda: gradients.update(_step(self.model, self.inputs)))
            self._compare(row, gradients)
            return seconds

        seconds = self._turn(number, self.settings.repeats, take)
        for engine, taken in seconds.items():
            self.rows[engine].step_seconds.append(taken)
            self.rows[engine].time_ratios.append(taken / seconds[self.engines[0]])

    def time_host(self, settings: Settings) -> None:
        """Steps of a model so small that host time is all there is."""
        if not settings.host_rounds:
            return
        model, inputs = bench_model(settings, self.family, self.tuning)
        beyond: dict[Way, list[float]] = {engine: [] for engine in self.engines}

        def take(engine: Way, row: EngineRow, running: Running) -> float:
            _step(model, inputs)  # the first one after turning it on does more
            return turns.seconds_of(lambda: _step(model, inputs))

        for number in range(settings.host_rounds):
            seconds = self._turn(number, settings.host_rounds, take, model)
            for engine, taken in seconds.items():
                beyond[engine].append(taken - seconds[self.engines[0]])
        blocks = len(find_blocks(model).modules)
        for engine, row in self.rows.items():
            found = turns.median(beyond[engine])
            if row.error is None and engine is not self.engines[0] and found is not None:
                row.host_seconds = found / blocks
        sac = self.rows[SAC].host_seconds if SAC in self.rows else None
        for row in self.rows.values():
            if row.host_seconds is not None and sac:
                row.host_share_of_sac = row.host_seconds / sac

    def _turn(
        self,
        number: int,
        count: int,
        take: Callable[[Way, EngineRow, Running], float],
        model: nn.Module | None = None,
    ) -> dict[Way, float]:
        order = turns.rotated(self.engines, number, count)
        return turns.fastest({engine: functools.partial(self._try, engine, take, model) for engine in order})

    def _try(
        self, engine: Way, measure: Callable[[Way, EngineRow, Running], Any], model: nn.Module | None = None
    ) -> Any:
        """Turn an engine on and return what is measured; None if it fails, or has failed before."""
        row = self.rows[engine]
        if row.error is not None:
            return None
        try:
            with engine.turned_on(model or self.model) as running:
                return measure(engine, row, running)
        except Exception as error:
            if engine is self.engines[0]:
                raise
            row.error = f"{type(error).__name__}: {error}"
            return None

    def _compare(self, row: EngineRow, gradients: Mapping[str, torch.Tensor]) -> None:
        self.reference = self.reference or dict(gradients)
        if row.first_difference is not None:
            return
        if gradients.keys() != self.reference.keys():
            row.first_difference = f"{len(gradients)} gradients against {len(self.reference)}"
        else:
            unequal = (name for name, value in gradients.items() if not torch.equal(value, self.reference[name]))
            row.first_difference = next(unequal, None)


def _step(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Forward and backward, from the same random state every time; returns the gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    model(**inputs).loss.backward()
    return gradients_of(model)


# --- the command ------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    parser.add_argument("--family", action="append", help="llama, gpt2, bert or t5; repeatable (default all)")
    parser.add_argument("--tuning", action="append", help="full or lora; repeatable (default both)")
    parser.add_argument("--layers", type=positive, help="blocks in each stack (default 6)")
    parser.add_argument("--hidden", type=positive, help="hidden size (default 512)")
    parser.add_argument("--batch", type=positive, help="sequences a step (default 4)")
    parser.add_argument("--tokens", type=positive, help="tokens a sequence (default 256)")
    parser.add_argument("--dropout", type=float, help="every dropout probability (default 0)")
    parser.add_argument("--dtype", help="bfloat16 (default), float16 or float32")
    command.add_device(parser)
    parser.add_argument("--repeats", type=positive, help="timed steps of each (default 5)")
    parser.add_argument("--host-rounds", type=int, help="timed steps of each for host time (default 30; 0: none)")
    parser.add_argument("--png", type=Path, help="file for a picture of bytes and time")
    parser.add_argument("--block-png", type=Path, help="file for a picture of what one block keeps")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print and draw these figures instead of measuring")
    return parser


def _settings(arguments: argparse.Namespace) -> Settings:
    """What was asked for, as far as it was asked."""
    given = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(Settings)}
    given |= {"families": arguments.family, "tunings": arguments.tuning}
    return Settings(**{name: value for name, value in given.items() if value is not None})


def _run(arguments: argparse.Namespace) -> int:
    settings, console = _settings(arguments), make_console()
    if arguments.show:
        result = EngineBench.from_dict(read_json(arguments.show))
    else:
        with progress("starting", progress_steps(settings)) as on_progress:
            result = bench_engines(settings, on_progress=on_progress)
    report.print_engines(result, console)
    write_json(arguments.json, result.to_dict())
    if arguments.png:
        pictures.save_engines_picture(result, arguments.png)
    if arguments.block_png:
        pictures.save_block_picture(result, arguments.block_png)
    return 0 if result.ok else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these words, or with those of the command line."""
    return command.call(_run, _parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
