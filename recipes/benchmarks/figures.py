"""What the comparison of all ways measured, and how far every way goes, as records that JSON files hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import turns
from ways import COMPILED, NONE, OURS, OURS_COMPILED

from hf_ckpt.errors import HfCkptError
from hf_ckpt.prediction.workload import Workload
from hf_ckpt.spec.files import read_values, write_text


def read_json(path: Path) -> Any:
    """What lies in a file of figures. Raises `HfCkptError` where there is none."""
    try:
        return read_values(path)
    except ValueError as error:
        raise HfCkptError(f"cannot read figures from {path}: {error}") from error


def write_json(path: Path | None, figures: Any) -> None:
    """Write a file of figures, where one is wanted. Raises `FileError` where it cannot be written."""
    if path is not None:
        write_text(path, json.dumps(figures, indent=1) + "\n")


@dataclasses.dataclass
class PeerRow:
    """Figures of one way to run a step."""

    name: str
    group: str
    error: str | None = None
    """Why there are none; those taken before stay."""
    details: str = ""
    """The traceback behind `error`."""
    allocated_bytes: int | None = None
    """Peak of the allocator over an optimizer step, weights, gradients and optimizer state included."""
    reserved_bytes: int | None = None
    """Peak of what the allocator took from the device; on a CPU the resident size of the process."""
    live_bytes: int | None = None
    """Peak of all live tensors, each storage once; unknown inside compiled graphs."""
    first_seconds: float | None = None
    """Forward and backward of the first step, in which graphs are compiled; on caches that begin empty."""
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    """Of whole optimizer steps: the fastest of each turn."""
    reference_seconds: list[float] = dataclasses.field(default_factory=list)
    """Of the reference, through the same turns."""
    seconds: float | None = None
    """A step: `time_ratio` of the reference's fastest."""
    tokens_per_second: float | None = None
    recomputed: int | None = None
    """Blocks, operations or heads run again, or heads run in chunks, in one step; None where nobody knows."""
    first_difference: str | None = None
    """The first parameter whose gradient is not bit-equal to that of the reference."""
    difference: float | None = None
    """Of all gradients from those of the reference: norm over norm."""
    repeatable: bool = True
    """Whether the reference gives the same bits twice; where kernels add up in any order, no way can be bit-equal."""
    plan: str | None = None
    budget_share: float | None = None
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    frontier: bool = False
    """Whether no other row is as fast with as little memory."""

    @property
    def compiled(self) -> bool:
        """Whether it is listed apart: another kind of program runs."""
        return self.group in (COMPILED, OURS_COMPILED)

    @property
    def time_ratios(self) -> list[float]:
        """Fastest step over the reference's, turn by turn."""
        return turns.ratios(self.step_seconds, self.reference_seconds)

    @property
    def time_ratio(self) -> float | None:
        """The median of `time_ratios`."""
        return turns.median(self.time_ratios)

    @property
    def peak_error(self) -> float | None:
        """Measured over predicted peak, less 1."""
        if self.allocated_bytes is None or self.predicted_peak_bytes is None:
            return None
        return self.allocated_bytes / self.predicted_peak_bytes - 1

    @property
    def seconds_error(self) -> float | None:
        """Measured over predicted step time, less 1."""
        if self.seconds is None or self.predicted_seconds is None:
            return None
        return self.seconds / self.predicted_seconds - 1

    @property
    def fault(self) -> str | None:
        """What must not happen to a row of hf_ckpt: other gradients, though its head is whole, or nothing done."""
        if self.group != OURS or self.error is not None:
            return None
        if self.first_difference is not None and self.repeatable and "head" not in self.name:
            return f"gradients differ: {self.first_difference}"
        return "nothing was run again" if self.recomputed == 0 and self.plan is None else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        found = {name: value for name, value in vars(self).items() if name != "details"}
        errors = {"peak_error": self.peak_error, "seconds_error": self.seconds_error}
        return {**found, "time_ratio": self.time_ratio, **errors}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> PeerRow:
        """Read `to_dict`'s form."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in names})


@dataclasses.dataclass(frozen=True)
class AtBudget:
    """The plan for one budget against the fastest of the others that fits into it."""

    share: float
    budget_bytes: int
    ours: str
    fits: bool
    """Whether the plan's measured peak is within the budget."""
    rival: str | None
    """None where none of them fits."""
    ratio: float | None
    """Step time over the rival's."""

    @property
    def ahead(self) -> bool:
        """Whether the plan fits and nothing else that fits is faster."""
        return self.fits and (self.ratio is None or self.ratio <= 1)


@dataclasses.dataclass
class PeerCase:
    """All ways on one model."""

    workload: Workload
    blocks: int
    tokens: int
    """Of one optimizer step."""
    rows: list[PeerRow]
    reference: str = NONE.name
    """The way whose gradients and times the others are compared with: the first that ran."""

    def at_budgets(self) -> list[AtBudget]:
        """One line a budget. Plans of blocks in eager mode are not compared with what is compiled."""
        others = [row for row in self.rows if row.group not in (OURS, OURS_COMPILED) and row.step_seconds]
        found = []
        for row in self.rows:
            if row.budget_bytes is None or row.budget_share is None:
                continue
            limit = row.budget_bytes
            fitting = [
                other
                for other in others
                if (other.allocated_bytes or limit + 1) <= limit and (row.compiled or not other.compiled)
            ]
            rival = min(fitting, key=lambda other: other.time_ratio or 0.0, default=None)
            mine, theirs = row.time_ratio, None if rival is None else rival.time_ratio
            ratio = mine / theirs if mine is not None and theirs is not None else None
            fits = row.allocated_bytes is not None and row.allocated_bytes <= limit
            name = None if rival is None else rival.name
            found.append(AtBudget(row.budget_share, limit, row.name, fits, name, ratio))
        return found

    def mark_frontier(self) -> None:
        """Tell which rows nothing else beats in both time and peak; torch.compile is left aside."""
        eager = [row for row in self.rows if not row.compiled and row.time_ratio and row.allocated_bytes]
        for row in eager:
            row.frontier = not any(_beats(other, row) for other in eager)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form. The workload is called `setup` there, as in the files that lie beside this one."""
        return {
            "setup": dataclasses.asdict(self.workload),
            "blocks": self.blocks,
            "tokens": self.tokens,
            "reference": self.reference,
            "rows": [row.to_dict() for row in self.rows],
            "at_budgets": [{**dataclasses.asdict(line), "ahead": line.ahead} for line in self.at_budgets()],
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> PeerCase:
        """Read `to_dict`'s form."""
        rows, reference = [*map(PeerRow.from_dict, given["rows"])], given.get("reference", NONE.name)
        return cls(Workload(**given["setup"]), given["blocks"], given["tokens"], rows, reference)


def _beats(one: PeerRow, other: PeerRow) -> bool:
    mine = (one.allocated_bytes or 0, one.time_ratio or 0.0)
    theirs = (other.allocated_bytes or 0, other.time_ratio or 0.0)
    return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]


@dataclasses.dataclass
class PeerBench:
    """What the comparison of all ways measured, and where."""

    circumstances: dict[str, Any]
    repeats: int
    cases: list[PeerCase]

    @property
    def ok(self) -> bool:
        """Whether every row of hf_ckpt that ran did something and gave the gradients it promises."""
        return not any(row.fault for case in self.cases for row in case.rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        cases = [case.to_dict() for case in self.cases]
        return {"circumstances": self.circumstances, "repeats": self.repeats, "ok": self.ok, "cases": cases}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> PeerBench:
        """Read `to_dict`'s form. Raises `HfCkptError` where something of it is missing."""
        try:
            return cls(given["circumstances"], given["repeats"], [*map(PeerCase.from_dict, given["cases"])])
        except (KeyError, TypeError) as error:
            raise HfCkptError(f"these are no figures of `peers.py`: {error}") from error


@dataclasses.dataclass
class LargestRow:
    """How far one way goes."""

    name: str
    group: str
    largest: int | None = None
    """Sequences or tokens; 0 if not even one fits."""
    peak_bytes: int | None = None
    """Measured, with that many."""
    tried: dict[int, int | None] = dataclasses.field(default_factory=dict)
    """Number -> measured peak; None where memory ran out, or nothing could be planned."""
    over_none: float | None = None
    error: str | None = None


@dataclasses.dataclass
class LargestBench:
    """How far every way goes, and where that was measured."""

    circumstances: dict[str, Any]
    workload: Workload
    what: str
    """`batch` or `tokens`."""
    budget_bytes: int
    rows: list[LargestRow]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form. The workload is called `setup` there, as in the files that lie beside this one."""
        return {
            "circumstances": self.circumstances,
            "setup": dataclasses.asdict(self.workload),
            "what": self.what,
            "budget_bytes": self.budget_bytes,
            "rows": [vars(row) for row in self.rows],
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> LargestBench:
        """Read `to_dict`'s form, also behind JSON. Raises `HfCkptError` where something of it is missing."""
        try:
            rows = [
                LargestRow(**{**row, "tried": {int(number): peak for number, peak in row["tried"].items()}})
                for row in given["rows"]
            ]
            return cls(given["circumstances"], Workload(**given["setup"]), given["what"], given["budget_bytes"], rows)
        except (KeyError, TypeError, ValueError) as error:
            raise HfCkptError(f"these are no figures of `largest.py`: {error}") from error
