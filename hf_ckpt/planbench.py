"""`hf-ckpt bench plans`: planned within the peaks of what transformers offers, measured against it.

For every model the peaks that transformers' own `every_n_layers` and `full` have are taken as budgets; a plan is made
for each, and all of them are measured interleaved, as in `bench`. Peaks are counted exactly, beside their predictions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from hf_ckpt import compat
from hf_ckpt.bench import Case, Engine, EngineRow, Settings, bench_model, median
from hf_ckpt.blueprint import blueprint_of
from hf_ckpt.budgets import plan_of, usual_options
from hf_ckpt.cost import Apply, Step, trace_costs
from hf_ckpt.devices import DEVICES
from hf_ckpt.install import own_trial, trial
from hf_ckpt.measure import circumstances
from hf_ckpt.plan import Action, Plan
from hf_ckpt.solver import fastest
from hf_ckpt.timeline import Costs
from hf_ckpt.timings import REPEATS, measured, timed_step
from hf_ckpt.variants import transformers_costs

EVERY = (4, 2)
"""The `every_n_layers` whose peaks are budgets, beside that of `full`."""
CUT = 0.6
"""The share of what activations add to the peak that one more plan takes off."""
SHALLOW = (2, 6)
"""Blocks of the models that times of blocks are taken from."""


@dataclasses.dataclass
class PlanRow:
    """One option of one model."""

    name: str
    against: str | None
    """The option whose peak was the budget; None for those of transformers."""
    plan: str
    predicted_peak_bytes: int
    predicted_seconds: float
    measured: EngineRow
    ratio_to_rival: float | None = None
    """Step time over that of `against`, the median of the ratios of all repeats."""

    @property
    def peak_error(self) -> float | None:
        """Measured over predicted peak, less 1."""
        peak = self.measured.peak_bytes
        return None if peak is None else peak / self.predicted_peak_bytes - 1

    @property
    def within(self) -> bool | None:
        """Whether nothing failed: an error, a gradient that differs, a plan that did nothing."""
        return self.measured.problem is None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        row = {name: value for name, value in vars(self).items() if name != "measured"}
        return {**row, "peak_error": self.peak_error, **self.measured.to_dict(), "engine": self.name}


@dataclasses.dataclass
class PlanCase:
    """All options of one model."""

    family: str
    tuning: str
    blocks: int
    none_activation_bytes: int
    """What activations add to the peak without checkpointing, as predicted."""
    rows: list[PlanRow]


@dataclasses.dataclass
class PlanBench:
    """What was measured, and where."""

    settings: Settings
    circumstances: dict[str, Any]
    cases: list[PlanCase]

    @property
    def ok(self) -> bool:
        """Every option ran, did something, and gave the same gradients."""
        return all(row.within for case in self.cases for row in case.rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        cases = [{**vars(case), "rows": [row.to_dict() for row in case.rows]} for case in self.cases]
        return {
            "circumstances": self.circumstances,
            "settings": dataclasses.asdict(self.settings),
            "ok": self.ok,
            "cases": cases,
        }


def bench_plans(settings: Settings, *, on_progress: Callable[[str], None] = lambda text: None) -> PlanBench:
    """Plan within the peaks of transformers' options, and measure both, on every model that `settings` name."""
    cases = []
    for family in settings.families:
        for tuning in settings.tunings:
            cases.append(_bench_case(settings, family, tuning, on_progress))
    return PlanBench(settings, circumstances(settings.device), cases)


def progress_steps(settings: Settings) -> int:
    """How often `bench_plans` reports progress."""
    return len(settings.families) * len(settings.tunings) * (settings.repeats + REPEATS + 2)


def _bench_case(settings: Settings, family: str, tuning: str, on_progress: Callable[[str], None]) -> PlanCase:
    def tell(text: str) -> None:
        on_progress(f"{family}, {tuning}: {text}")

    tell("planning")
    costs, own = _costs(settings, family, tuning, tell)
    usual = {option.name: option for option in usual_options(costs, DEVICES["cpu"].host_bandwidth, own)}
    none, full = usual["none"], usual["full"]
    rivals = [*(usual[name] for every in EVERY if (name := f"every_n_layers: {every}") in usual), full]
    budgets: list[tuple[str, str | None, int]] = [
        (f"planned, {rival.name}", rival.name, rival.peak_bytes) for rival in rivals
    ]
    start = costs.static.always
    budgets.append((f"planned, -{CUT:.0%} activations", None, start + round((1 - CUT) * (none.peak_bytes - start))))
    engines = [Engine("none")]
    engines += [_rival(option.name, option.plan) for option in rivals]
    rows: dict[str, tuple[str | None, Plan]] = {o.name: (None, o.plan) for o in (none, *rivals) if o.plan is not None}
    for name, against, limit in budgets:
        choice = fastest(costs, limit)
        if choice is None:
            continue
        plan = plan_of(costs, choice, limit, "cpu")
        rows[name] = against, plan
        engines.append(Engine(name, plan))
    case = Case(settings, family, tuning, engines)
    tell("counting bytes")
    case.count_bytes()
    for number in range(settings.repeats):
        tell(f"repeat {number + 1} of {settings.repeats}")
        case.time_steps(number)
    found = {engine.name: row for engine, row in case.rows.items()}
    made = []
    for name, (against, plan) in rows.items():
        prediction = plan.prediction
        assert prediction is not None
        row = PlanRow(name, against, str(plan), prediction.peak_bytes, prediction.step_seconds, found[name])
        if against is not None:
            pairs = zip(found[name].step_seconds, found[against].step_seconds, strict=False)
            row.ratio_to_rival = median([mine / theirs for mine, theirs in pairs])
        made.append(row)
    return PlanCase(family, tuning, len(case.blocks), none.peak_bytes - start, made)


def _rival(name: str, plan: Plan | None) -> Engine:
    """The option as transformers carries it out, where this version of it can."""
    every = 1 if name == "full" else int(name.partition(": ")[2])
    if compat.HAS_EVERY_N_LAYERS:
        return Engine(name, own={"every_n_layers": every})
    return Engine(name, plan)


def _costs(settings: Settings, family: str, tuning: str, tell: Callable[[str], None]) -> tuple[Costs, Costs]:
    """Traced bytes, and times of this machine: of hf_ckpt's actions, and of transformers' own checkpointing."""
    model, inputs = bench_model(settings, family, tuning)
    batch = {name: value for name, value in inputs.items() if name != "use_cache"}
    step, blueprint, device = Step(batch=batch, optimizer="sgd"), blueprint_of(model), DEVICES["cpu"]
    costs = trace_costs(blueprint, step, device, trial)
    own = transformers_costs(costs, blueprint, step, device, own_trial)
    shallow = {depth: bench_model(dataclasses.replace(settings, layers=depth), family, tuning) for depth in SHALLOW}

    def step_seconds(depth: int, action: Action, apply: Apply = trial) -> float:
        return timed_step(shallow[depth][0], shallow[depth][1], action, apply=apply)

    timed = measured(costs, step_seconds, tell, depths=SHALLOW)
    if own is costs:
        return timed, timed
    return timed, measured(own, functools.partial(step_seconds, apply=own_trial), depths=SHALLOW)
