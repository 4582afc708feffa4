"""The common part of all benchmarks: runs cases one after the other, writes figures to a JSON file, prints tables.

A benchmark is a script with a `Benchmark`. One function per case measures it and returns a dict. After each case,
everything measured so far is written to the file of `--json`; started again with the same file, a benchmark
skips the cases in it. A failed case is recorded with its error, and measured again next time.

The speed of a machine changes within minutes, and other work only makes steps slower. So the compared ways
alternate, step by step, within one turn; the fastest step of each counts, and ratios are taken within a turn. The
figure of a way is the median of its turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from comparison import Table
from machine import circumstances
from transformers import HfArgumentParser

from hf_ckpt.cli.arguments import quiet_libraries
from hf_ckpt.console import make_console, progress
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.clocks import stopwatch
from hf_ckpt.spec.files import read_values, refuse_unwritable, write_text

Case = dict[str, Any]
"""Figures of one case, as a dict for JSON; with the key `error` if it failed."""
Way = TypeVar("Way", bound=Hashable)
Item = TypeVar("Item")


def option(default: Any, help: str) -> Any:
    """A field of a benchmark's settings, which is also an option of its command line."""
    metadata = {"help": f"{help} (default {' '.join(map(str, default)) if isinstance(default, list) else default})"}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One benchmark."""

    doc: str
    """Its help."""
    settings: type
    """A dataclass of `option` fields."""
    cases: Callable[[Any, Callable[[str], None]], Mapping[str, Callable[[], Case]]]
    """(settings, function to call before each part) -> {name of a case: function that measures it}. A name begins with
    the case's family, which ends at the first comma."""
    tables: Callable[[Results], Sequence[Table]]
    """The tables to print at the end."""
    faults: Callable[[Case], Sequence[str]] = lambda case: ()
    """Errors in the figures of a case. Each is printed; any makes the exit code 1."""
    draw: Callable[[Results, Path], None] | None = None
    """Draws the figure of `--png`."""

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the benchmark. Returns 1 if a case failed or has faults, and 2 if the arguments are invalid."""
        parser = HfArgumentParser(self.settings, description=self.doc, add_help=True)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.add_argument("--json", type=Path, help="file for all figures; cases that are in it are not run again")
        parser.add_argument(
            "--family", nargs="+", default=[], help="only the cases whose names begin with one of these"
        )
        parser.add_argument("--show", type=Path, help="print and draw the figures of this file instead of measuring")
        if self.draw is not None:
            parser.add_argument("--png", type=Path, help="file for a picture")
        quiet_libraries()
        try:
            settings, arguments = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
            return self._run(settings, arguments)
        except HfCkptError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2

    def _run(self, settings: Any, arguments: argparse.Namespace) -> int:
        png = getattr(arguments, "png", None)
        for path, suffix in ((arguments.json, ".json"), (png, ".png")):
            if path is not None:
                refuse_unwritable(path, (suffix,))
        if arguments.show:
            results = Results.read(arguments.show)
        else:
            results = Results.begun(arguments.json, dataclasses.asdict(settings))
            with progress("starting") as tell:
                self.measure(results, settings, arguments.family, tell)
        console = make_console()
        for table in self.tables(results):
            table.show(console)
        console.print(results.where, highlight=False)
        faults = [f"{name}: {fault}" for name, case in results.cases.items() for fault in self.faults_of(case)]
        for fault in faults:
            console.print(fault, style="red", markup=False, highlight=False, soft_wrap=True)
        if png is not None and self.draw is not None:
            self.draw(results, png)
        return 1 if faults else 0

    def measure(self, results: Results, settings: Any, families: Sequence[str], tell: Callable[[str], None]) -> None:
        """Measure the cases of some families, or of all, that `results` does not have yet.

        Raises `HfCkptError` for an unknown family.
        """
        cases = self.cases(settings, tell)
        known = list(dict.fromkeys(name.partition(",")[0] for name in cases))
        for family in families:
            if family not in known:
                raise HfCkptError(f"family must be one of {', '.join(known)}, but is {family!r} instead.")
        for name, take in cases.items():
            wanted = not families or name.partition(",")[0] in families
            if wanted and "error" in results.cases.get(name, {"error": None}):
                tell(name)
                results.add(name, failing(take))

    def faults_of(self, case: Case) -> Sequence[str]:
        """The error of a case, or errors in its figures."""
        return [case["error"]] if "error" in case else self.faults(case)


def failing(take: Callable[[], Case]) -> Case:
    """The result of `take`, or the error that it raises, in one line and with its traceback."""
    try:
        return take()
    except Exception as error:
        return {"error": in_words(error), "traceback": traceback.format_exc()}


def in_words(error: Exception) -> str:
    """The first line of an error, with its type unless it is an error of hf_ckpt."""
    first = str(error).strip().partition("\n")[0]
    return first if isinstance(error, HfCkptError) else f"{type(error).__name__}: {first}"


@dataclasses.dataclass
class Results:
    """Figures of a benchmark, written to `path` after each case."""

    settings: dict[str, Any]
    circumstances: dict[str, Any]
    cases: dict[str, Case] = dataclasses.field(default_factory=dict)
    path: Path | None = None

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read the figures in a file. Raises `HfCkptError` if it has none."""
        try:
            found = read_values(path)
            return cls(found["settings"], found["circumstances"], found["cases"], path)
        except (ValueError, KeyError, TypeError) as error:
            raise HfCkptError(f"cannot read the figures of a benchmark from {path}: {error}") from error

    @classmethod
    def begun(cls, path: Path | None, settings: dict[str, Any]) -> Results:
        """Start without figures, or with those of an earlier run in `path`.

        Raises `HfCkptError` if that run had other settings, or another machine or versions.
        """
        here = circumstances()
        if path is None or not path.exists():
            return cls(settings, here, path=path)
        found = cls.read(path)
        asked, had = ({**now, **around} for now, around in ((settings, here), (found.settings, found.circumstances)))
        other = [name for name in asked if name != "date" and asked[name] != had.get(name)]
        if other:
            changes = ", ".join(f"{name} {had.get(name)} there and {asked[name]} now" for name in other)
            raise HfCkptError(
                f"{path} has figures of another run ({changes}): give another file, or the same settings."
            )
        return found

    def add(self, name: str, case: Case) -> None:
        """Add the figures of a case, and write the file."""
        self.cases[name] = case
        if self.path is not None:
            figures = {"settings": self.settings, "circumstances": self.circumstances, "cases": self.cases}
            write_text(self.path, json.dumps(figures, indent=1) + "\n")

    @property
    def good(self) -> dict[str, Case]:
        """The cases that did not fail."""
        return {name: case for name, case in self.cases.items() if "error" not in case}

    @property
    def where(self) -> str:
        """Machine, versions and date."""
        found = self.circumstances
        return (
            f"{found['device']}, {found['threads']} threads of {found['cpus']} CPUs; torch {found['torch']}, "
            f"transformers {found['transformers']}, {found['date'][:10]}"
        )


# --- turns ------------------------------------------------------------------------------------------------------------


def fastest(ways: Mapping[Way, Callable[[], float | None]], steps: int = 1) -> dict[Way, float]:
    """Run one turn: a step of every way, in order, `steps` times. Return the seconds of each way's fastest step.

    A step returns its seconds, or None if it failed; then its way has no figure in this turn.
    """
    seconds: dict[Way, list[float | None]] = {way: [] for way in ways}
    for _ in range(steps):
        for way, step in ways.items():
            seconds[way].append(step())
    return {way: min(taken) for way, taken in seconds.items() if None not in taken}


def seconds_of(step: Callable[[], object]) -> float:
    """Seconds of a step, including the accelerator."""
    with stopwatch() as seconds:
        step()
    return seconds[0]


def rotated(items: Iterable[Item], number: int, turns: int) -> list[Item]:
    """The items in the order of turn `number`: each of the `turns` starts at another item, evenly spread."""
    found = list(items)
    start = number * max(1, len(found) // turns) % max(1, len(found))
    return [*found[start:], *found[:start]]


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ratios of times, turn by turn."""
    return [one / other for one, other in zip(mine, theirs, strict=False)]


def median(values: Sequence[float]) -> float | None:
    """The median; None without values."""
    return statistics.median(values) if values else None


def spread(values: Sequence[float]) -> str:
    """The smallest and the largest, for a table."""
    return f"{min(values):.2f}-{max(values):.2f}" if values else "-"


def mib(size: int | None) -> str:
    """Bytes in MiB, for a table."""
    return "-" if size is None else f"{size / 2**20:.0f}"
