"""How long the first step takes, in which graphs are compiled, at several depths: compiled blocks and whole models.

Blocks of a kind share a graph, so that their time should not grow with depth. Each way has a process of its own, whose
compiler begins with empty caches, and one runs after the other. The batch is small, so that nearly all of the step is
compiling. The fastest of all repeats counts. Blocks of two shares have two graphs, and the first two blocks the lower
share.

    python recipes/benchmarks/compiling.py mini-llama --depths 4 8 32 --json compiling-cpu.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import command
import report
from figures import read_json, write_json
from machine import circumstances
from session import Session
from ways import COMPILED, OURS_COMPILED, Way
from workers import Worker

from hf_ckpt import compat
from hf_ckpt.cli.arguments import positive, progress
from hf_ckpt.cli.plan import MODEL_HELP, add_workload_options, workload_of
from hf_ckpt.console import make_console
from hf_ckpt.models.families import depth_keys
from hf_ckpt.prediction.workload import Workload, load_config
from hf_ckpt.spec.files import write_text

BUDGETS = (0.7, 0.5, 0.3)
"""Shares of whole models."""
LOWER = {"layers": "0-1", "policy": "full", "share": 0.0}
WAYS = (
    *(Way(f"whole model, budget {share:g}", COMPILED, {"share": share}) for share in BUDGETS),
    Way("blocks, one share", OURS_COMPILED, {"compile": "blocks", "share": 0.8}),
    Way("blocks, two shares", OURS_COMPILED, {"compile": "blocks", "policy": "full", "share": 0.8, "rules": [LOWER]}),
)
"""What is compiled; whole models come first."""
SMALL: dict[str, Any] = {**command.WORKLOAD, "batch": 1, "tokens": 64}


@dataclasses.dataclass
class CompilingRow:
    """One way at one depth."""

    name: str
    blocks: int
    """In every stack."""
    seconds: list[float] = dataclasses.field(default_factory=list)
    """Of forward and backward of the first step, once for each repeat."""
    later_seconds: list[float] = dataclasses.field(default_factory=list)
    """Of the same in a later step, when all is compiled."""

    @property
    def first(self) -> float:
        """The fastest first step."""
        return min(self.seconds)


@dataclasses.dataclass
class CompilingBench:
    """What was measured."""

    circumstances: dict[str, Any]
    workload: Workload
    rows: list[CompilingRow]

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CompilingBench:
        """From what `to_dict` returned."""
        rows = [CompilingRow(**row) for row in values["rows"]]
        return cls(values["circumstances"], Workload(**values["workload"]), rows)

    def over_whole(self, row: CompilingRow) -> float:
        """Its first step over the fastest of whole models of its depth."""
        whole = {way.name for way in WAYS if way.group == COMPILED}
        return row.first / min(other.first for other in self.rows if other.name in whole and other.blocks == row.blocks)


def bench_compiling(
    workload: Workload,
    depths: Sequence[int],
    repeats: int = 1,
    *,
    on_progress: Callable[[str], None] = lambda text: None,
) -> CompilingBench:
    """Time the first step of every way at every depth, in blocks a stack."""
    found = CompilingBench(circumstances(compat.accelerator_type() or "cpu"), workload, [])
    for blocks in depths:
        rows = {way: CompilingRow(way.name, blocks) for way in WAYS}
        with tempfile.TemporaryDirectory() as folder:
            deep = at_depth(workload, blocks, Path(folder) / "config.json")
            for way in [*WAYS] * repeats:
                on_progress(f"{way.name}, {blocks} blocks")
                with Worker(Session, deep, way) as worker:
                    first, later = worker.ask("first_steps")
                rows[way].seconds.append(first)
                rows[way].later_seconds.append(later)
        found.rows += rows.values()
    return found


def at_depth(workload: Workload, blocks: int, path: Path) -> Workload:
    """The workload with so many blocks in every stack; its config is written to `path`."""
    config = load_config(workload.model)
    keys = dict.fromkeys(depth_keys(config), blocks)
    write_text(path, json.dumps({**config.to_dict(), **keys}))
    return dataclasses.replace(workload, model=str(path))


# --- the command ------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="mini-llama", help=MODEL_HELP)
    parser.add_argument(
        "--depths", type=positive, nargs="+", default=[4, 8, 32], help="blocks a stack (default 4 8 32)"
    )
    parser.add_argument("--repeats", type=positive, default=1, help="how often each is compiled (default 1)")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print these figures instead of measuring")
    add_workload_options(parser, **SMALL)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if arguments.show:
        result = CompilingBench.from_dict(read_json(arguments.show))
    else:
        workload = workload_of(arguments, arguments.model)
        steps = len(arguments.depths) * len(WAYS) * arguments.repeats
        with progress("starting", steps) as on_progress:
            result = bench_compiling(workload, arguments.depths, arguments.repeats, on_progress=on_progress)
        write_json(arguments.json, result.to_dict())
    report.print_compiling(result, make_console())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script with these words, or with those of the command line."""
    return command.call(_run, _parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
