"""`hf-ckpt bench peers`, `max-batch` and `max-seq`: every way to train in less memory, each in a process of its own.

Ways take turns, step by step, so that a machine that slows down slows them all; on an accelerator, whose memory they
would share, they run one after the other. Peaks are those of the allocator, beside a count of all live tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.autoplan import this_device
from hf_ckpt.bench import median
from hf_ckpt.blueprint import Blueprint
from hf_ckpt.budgets import costs_behind, further_options, peak_of_least, plan_of, plan_within, usual_options
from hf_ckpt.cost import actions_for, chunked_head, trace_costs
from hf_ckpt.errors import HfCkptError, InfeasibleError, WorkerError
from hf_ckpt.families import find_blocks, vocabulary_head
from hf_ckpt.foresight import MOST, largest
from hf_ckpt.install import own_trial, trial
from hf_ckpt.measure import (
    CpuAllocations,
    LiveBytes,
    circumstances,
    keep_freed_memory,
    peak_meter,
    release_freed_memory,
    stopwatch,
)
from hf_ckpt.peers import COMPILED, NONE, OUR_PEERS, OURS, PEERS, SELECTIVE, Peer
from hf_ckpt.plan import Action, Plan
from hf_ckpt.setups import (
    Setup,
    blueprint_of_setup,
    learned_positions,
    load_config,
    optimizer_for,
    real_inputs,
    real_model,
    step_of_model,
    step_of_setup,
)
from hf_ckpt.timeline import Costs, worst_timeline
from hf_ckpt.timings import ShallowModels, Timings, depths_of
from hf_ckpt.variants import all_variants, transformers_costs
from hf_ckpt.workers import Worker

Progress = Callable[[str], None]
BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of the way from the lowest peak there is to that of no checkpointing."""
UNSEEN = 0.02
"""Share of a budget that plans leave to what no tensor shows: kernels' scratch memory."""
TAKES = 6
"""Turns of the shallow models whose times plans are made from."""
STEPS, TOGETHER = 5, 4
"""Steps of a way, or of a shallow model, in one turn on a CPU, and ways that alternate in them."""
DEPTHS = (1, 5)
"""Blocks a stack of the models that are timed for predictions."""
_PRELOAD = ("hf_ckpt.peerbench",)


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
        return self.group == COMPILED

    @property
    def time_ratios(self) -> list[float]:
        """Fastest step over the reference's, turn by turn: they ran within seconds, at one speed of the machine."""
        return [mine / theirs for mine, theirs in zip(self.step_seconds, self.reference_seconds, strict=False)]

    @property
    def time_ratio(self) -> float | None:
        """The median."""
        return median(self.time_ratios)

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

    setup: Setup
    blocks: int
    tokens: int
    """Of one optimizer step."""
    rows: list[PeerRow]
    reference: str = NONE.name
    """The way whose gradients and times the others are compared with: the first that ran."""

    def at_budgets(self) -> list[AtBudget]:
        """One line a budget. torch.compile is left aside."""
        others = [row for row in self.rows if row.group != OURS and not row.compiled and row.step_seconds]
        found = []
        for row in self.rows:
            if row.budget_bytes is None or row.budget_share is None:
                continue
            limit = row.budget_bytes
            fitting = [other for other in others if (other.allocated_bytes or limit + 1) <= limit]
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
        """JSON-able form."""
        return {
            "setup": dataclasses.asdict(self.setup),
            "blocks": self.blocks,
            "tokens": self.tokens,
            "reference": self.reference,
            "rows": [row.to_dict() for row in self.rows],
            "at_budgets": [{**dataclasses.asdict(line), "ahead": line.ahead} for line in self.at_budgets()],
        }


def _beats(one: PeerRow, other: PeerRow) -> bool:
    mine = (one.allocated_bytes or 0, one.time_ratio or 0.0)
    theirs = (other.allocated_bytes or 0, other.time_ratio or 0.0)
    return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]


@dataclasses.dataclass
class PeerBench:
    """What was measured, and where."""

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
            cases = [
                PeerCase(
                    Setup(**case["setup"]),
                    case["blocks"],
                    case["tokens"],
                    [*map(PeerRow.from_dict, case["rows"])],
                    case.get("reference", NONE.name),
                )
                for case in given["cases"]
            ]
            return cls(given["circumstances"], given["repeats"], cases)
        except (KeyError, TypeError) as error:
            raise HfCkptError(f"these are no figures of `hf-ckpt bench peers`: {error}") from error


# --- in the process of one way ----------------------------------------------------------------------------------------


class Session:
    """One way on one model, alone in its process."""

    def __init__(self, setup: Setup, peer: Peer, seed: int = 0) -> None:
        keep_freed_memory()
        torch.manual_seed(seed)
        self.setup, self.seed = setup, seed
        self.device = compat.accelerator_type() or "cpu"
        with torch.device(self.device):
            self.model = real_model(setup).to(self.device).train()
        with torch.no_grad():
            for parameter in self.model.parameters():  # adapters begin at zero: half of all gradients would be, too
                if parameter.requires_grad and parameter.dim() > 1 and not parameter.any():
                    parameter.normal_(std=0.02)
        self.inputs = real_inputs(setup, self.model, self.device, seed)
        self.step_of = step_of_model(setup, self.model)
        self.optimizer = _optimizer(setup, self.model)
        self._exit = contextlib.ExitStack()
        self.running = self._exit.enter_context(peer.turned_on(self.model))
        self.meter = peak_meter()

    def facts(self) -> dict[str, int]:
        """What is the same for all ways."""
        return {"blocks": len(find_blocks(self.model).blocks), "tokens": self.step_of.tokens * self.setup.accumulation}

    def _backward(self) -> None:
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(self.seed)
        dtype, enabled = self.step_of.autocast or torch.bfloat16, self.step_of.autocast is not None
        for _ in range(self.setup.accumulation):
            with self.running.around():
                with torch.autocast(self.device, dtype=dtype, enabled=enabled):
                    outputs = self.running.forward(**self.inputs)
                    loss = outputs.loss if self.step_of.loss is None else self.step_of.loss(outputs)
                del outputs
                (loss / self.setup.accumulation).backward()

    def step(self) -> None:
        """One optimizer step."""
        self._backward()
        self.optimizer.step()

    def compare(self, path: Path, is_reference: bool) -> dict[str, Any]:
        """Gradients of the first step against those in `path`, or into it; then what warms up."""
        self._backward()
        gradients = {name: value.grad for name, value in self.model.named_parameters() if value.grad is not None}
        found: dict[str, Any] = {}
        if is_reference:
            torch.save({name: value.cpu() for name, value in gradients.items()}, path)
            self._backward()
            again = {name: value.grad for name, value in self.model.named_parameters() if value.grad is not None}
            found["repeatable"] = _compared(again, torch.load(path, mmap=True))["first_difference"] is None
            del again
        else:
            reference = torch.load(path, mmap=True)
            if gradients.keys() != reference.keys():
                raise HfCkptError(f"gives {len(gradients)} gradients against {len(reference)}")
            found = _compared(gradients, reference)
            del reference
        del gradients  # or a step would hold two sets of them
        for _ in range(2):
            self.step()
        return found

    def peaks(self) -> dict[str, int | None]:
        """Of one step."""
        found: dict[str, int | None] = {}
        if self.device == "cpu":
            self.model.zero_grad(set_to_none=True)
            release_freed_memory()  # of what came before
            self.meter.reset()
            self.step()
            found["reserved_bytes"] = self.meter.peak_bytes()
        before = self.running.count()
        found["allocated_bytes"] = self._allocated()
        after = self.running.count()
        found["recomputed"] = None if after is None or before is None else after - before
        if self.device != "cpu":
            found["reserved_bytes"] = self.meter.reserved_bytes()
        return found

    def _allocated(self) -> int | None:
        """Peak of the allocator in one step."""
        self.model.zero_grad(set_to_none=True)
        if self.device == "cpu":
            held = LiveBytes(self.model, self.optimizer, self.inputs).start_bytes
            with CpuAllocations() as allocations:
                self.step()
            return held + allocations.peak_bytes
        compat.release_memory()
        self.meter.reset()
        self.step()
        return self.meter.peak_bytes()

    def largest_peak(self) -> int:
        """Of the second step, when the optimizer has its state."""
        self.step()
        peak = self._allocated()
        if peak is None:
            raise HfCkptError("this accelerator's allocator tells no peak")
        return peak

    def live_peak(self) -> int:
        """Of one step, counted tensor by tensor."""
        self.model.zero_grad(set_to_none=True)
        with LiveBytes(self.model, self.optimizer, self.inputs, device=self.device) as live:
            self.step()
        return int(live.peak_bytes)

    def timed(self) -> float:
        """Seconds of one step."""
        with stopwatch() as seconds:
            self.step()
        return seconds[0]


def _optimizer(setup: Setup, model: nn.Module) -> torch.optim.Optimizer:
    found = optimizer_for(setup, model)
    if found is None:
        raise HfCkptError(f"a benchmark trains with an optimizer of PyTorch's own, but not with {setup.optimizer}.")
    return found


def _compared(gradients: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    first, apart, size = None, 0.0, 0.0
    for name, value in gradients.items():
        right = reference[name].to(value.device)
        if not torch.equal(value, right):
            first = first or name
            apart += float((value.double() - right.double()).square().sum())
        size += float(right.double().square().sum())
    return {"first_difference": first, "difference": (apart / size) ** 0.5 if size else 0.0}


# --- in the process that asks -----------------------------------------------------------------------------------------


class Forecaster:
    """Predicts all rows of a setup, from blocks traced on fake tensors and shallow models timed on this machine."""

    def __init__(self, setup: Setup) -> None:
        keep_freed_memory()
        self.blueprint, self.device = blueprint_of_setup(setup), this_device()
        self.step = step_of_setup(setup, self.blueprint)
        linear, known = Action("selective", ("linear",)), actions_for(self.blueprint)
        actions = known if linear in known else (*known[:-1], linear, known[-1])
        models = ShallowModels(setup)
        costs = trace_costs(self.blueprint, self.step, self.device, trial, actions=actions)
        own = transformers_costs(costs, self.blueprint, self.step, self.device, own_trial)
        depths = depths_of(costs, DEPTHS)
        seconds = functools.partial(models.step_seconds, steps=STEPS)
        self.timings = Timings(costs, seconds, models.optimizer_seconds, depths=depths)
        own_seconds = functools.partial(seconds, apply=own_trial)
        self.own_timings = None if own is costs else Timings(own, own_seconds, models.optimizer_seconds, depths=depths)
        self.planned: dict[str, Plan] = {}

    def take(self) -> None:
        """Time shallow models once."""
        self.timings.take()
        if self.own_timings is not None:
            self.own_timings.take()

    def plans(self) -> list[tuple[str, float, int, Plan]]:
        """(name, share, bytes, the fastest plan) of each of `BUDGETS`, by the times taken so far."""
        costs = _restricted(self.timings.costs(), actions_for(self.blueprint))
        low, high = peak_of_least(costs), worst_timeline(costs, costs.uniform(0)).peak_bytes
        found = []
        for share in BUDGETS:
            limit = low + round(share * (high - low))
            name = f"planned for {share:.0%}"
            self.planned[name] = plan_within(costs, max(low, round((1 - UNSEEN) * limit)), self.device.name)
            found.append((name, share, limit, self.planned[name]))
        return found

    def predictions(self) -> dict[str, tuple[int, float]]:
        """Name of a row -> bytes and seconds that it should need and take, by the times taken so far."""
        costs, device = self.timings.costs(), self.device
        full = costs.actions.index(Action("full"))
        own = None if self.own_timings is None else self.own_timings.costs()
        found = {}
        for option in usual_options(costs, device.host_bandwidth, own):
            name = option.name.removesuffix(" (transformers)")
            found[name if name == NONE.name else f"{name} (HF)"] = option.peak_bytes, option.step_seconds
        plans = {
            name: plan_of(costs, costs.uniform(costs.actions.index(Action("selective", save))))
            for name, save in SELECTIVE.items()
        }
        plans["full"] = plan_of(costs, costs.uniform(full))
        if vocabulary_head(self.blueprint.base) is not None:
            chunked = chunked_head(costs, self.blueprint, self.step, device, trial, "auto")
            plans["head in chunks"] = plan_of(chunked, chunked.uniform(0))
            plans["full, head in chunks"] = plan_of(chunked, chunked.uniform(full))
        for name, plan in self.planned.items():
            plans[name] = plan_of(costs, costs_behind([costs], plan)[1])
        if device.name == "cpu":
            del found["offload (HF)"]
        else:
            for option in further_options(costs, None, device.host_bandwidth, device.launch_nanoseconds):
                found[option.name] = option.peak_bytes, option.step_seconds
        for name, plan in plans.items():
            assert plan.prediction is not None
            found[name] = plan.prediction.peak_bytes, plan.prediction.step_seconds
        return found


def _restricted(costs: Costs, actions: Sequence[Action]) -> Costs:
    """What a plan may choose from: those of `costs` that `actions` name."""
    allowed = {number for number, action in enumerate(costs.actions) if action in actions}
    stacks = (
        dataclasses.replace(
            stack, choices=tuple(tuple(number for number in here if number in allowed) for here in stack.choices)
        )
        for stack in costs.stacks
    )
    return dataclasses.replace(costs, stacks=tuple(stacks))


def bench_peers(
    setups: Sequence[Setup],
    *,
    repeats: int = 5,
    only: Sequence[str] = (),
    on_progress: Progress = lambda text: None,
    on_case: Callable[[PeerBench], None] = lambda found: None,
) -> PeerBench:
    """Measure every way that there is on every setup.

    Args:
        setups: models with their batches; their optimizer must be PyTorch's own.
        repeats: turns of each way, with `STEPS` timed steps each; on an accelerator, one.
        only: groups or names of ways to leave all others out, but for `none` and the plans.
        on_progress: called before each part.
        on_case: called after each setup with all that has been found so far.

    A way that fails or is not there is a row that says so, and the first that runs is what others are compared with.
    Raises `HfCkptError` where nothing runs, and what planning raises.
    """
    found = PeerBench(circumstances(compat.accelerator_type() or "cpu"), repeats, [])
    for setup in setups:
        found.cases.append(_bench_case(setup, repeats, only, on_progress))
        on_case(found)
    return found


def progress_steps(setups: Sequence[Setup], repeats: int, only: Sequence[str] = ()) -> int:
    """How often `bench_peers` reports progress."""
    ways = len(_wanted((*PEERS, *OUR_PEERS), only)) + len(BUDGETS)
    return len(setups) * (1 + ways + repeats)


def known_ways(names: Sequence[str]) -> tuple[str, ...]:
    """`names`, if each is that of a way or of a group of them; raises `HfCkptError` else."""
    ways = (*PEERS, *OUR_PEERS, PLANNED, PLANNED_CHUNKED)
    known = dict.fromkeys([*(peer.group for peer in ways), *(peer.name for peer in ways)])
    for name in names:
        if name not in known:
            raise HfCkptError(f"a way must be one of {', '.join(known)}, but is {name!r} instead.")
    return tuple(names)


def _wanted(peers: Sequence[Peer], only: Sequence[str]) -> list[Peer]:
    return [peer for peer in peers if peer is NONE or not only or peer.name in only or peer.group in only]


def _bench_case(setup: Setup, repeats: int, only: Sequence[str], on_progress: Progress) -> PeerCase:
    def tell(text: str) -> None:
        on_progress(f"{setup.model}: {text}")

    rows = {peer: PeerRow(peer.name, peer.group) for peer in _wanted((*PEERS, *OUR_PEERS), only)}
    with Worker(Forecaster, setup, preload=_PRELOAD) as forecaster, tempfile.TemporaryDirectory() as folder:
        tell("timing blocks and planning")
        for _ in range(TAKES):
            forecaster.ask("take")
        for name, share, limit, plan in forecaster.ask("plans"):
            rows[Peer(name, OURS, plan)] = PeerRow(name, OURS, plan=str(plan), budget_share=share, budget_bytes=limit)
        case = _Case(setup, rows, Path(folder) / "gradients.pt", tell)
        if compat.accelerator_type() is None:
            facts = case.run(repeats, forecaster)
            predictions: dict[str, tuple[int, float]] = forecaster.ask("predictions")
        else:  # whose memory is for one way alone
            predictions = forecaster.ask("predictions")
            forecaster.close()
            facts = case.run(repeats)
    for row in rows.values():
        if row.name in predictions:
            row.predicted_peak_bytes, row.predicted_seconds = predictions[row.name]
    if case.reference is None:
        first = rows[NONE]
        raise HfCkptError(f"nothing runs on {setup.model}; without checkpointing: {first.error}\n{first.details}")
    made = PeerCase(setup, facts["blocks"], facts["tokens"], list(rows.values()), rows[case.reference].name)
    made.mark_frontier()
    return made


class _Case:
    def __init__(self, setup: Setup, rows: Mapping[Peer, PeerRow], path: Path, tell: Progress) -> None:
        self.setup, self.rows, self.path, self.tell = setup, rows, path, tell
        self.facts: dict[str, int] = {}
        self.reference: Peer | None = None
        """The first that ran."""

    def run(self, repeats: int, forecaster: Worker | None = None) -> dict[str, int]:
        """With a forecaster all ways are alive together and take turns, and so does it; without one they run one after
        the other. A CPU's speed changes within minutes, and whatever else it does makes steps slower, never faster: a
        few ways and the reference take their steps together, within seconds, and the fastest of each is compared."""
        with contextlib.ExitStack() as alive:
            workers: dict[Peer, Worker] = {}
            for peer in self.rows:
                self.tell(peer.name)
                worker = Worker(Session, self.setup, peer, preload=_PRELOAD)
                alive.callback(worker.close)
                self._prepare(peer, worker)
                if forecaster is not None:
                    workers[peer] = worker
                    continue
                for _ in range(repeats):
                    self._time({peer: worker})
                worker.close()
            for number in range(repeats if forecaster is not None else 0):
                self.tell(f"repeat {number + 1} of {repeats}")
                assert forecaster is not None
                forecaster.ask("take")
                order = list(workers.items())
                start = number * max(1, len(order) // repeats) % max(1, len(order))
                order = [*order[start:], *order[:start]]
                for first in range(0, len(order), TOGETHER):
                    self._time(dict(order[first : first + TOGETHER]), workers)
        self._conclude()
        return self.facts

    def _time(self, ways: Mapping[Peer, Worker], workers: Mapping[Peer, Worker] | None = None) -> None:
        """One turn. Where all are alive, these ways and the reference alternate."""
        reference = self.reference if workers is not None else None
        beside: list[float] = []
        seconds: dict[Peer, list[float]] = {peer: [] for peer in ways}
        for _ in range(1 if reference is None else STEPS):
            if workers is not None and reference is not None:
                self._step(reference, workers[reference], beside)
            for peer, found in seconds.items():
                self._step(peer, ways[peer], found)
        for peer, found in seconds.items():
            if self.rows[peer].error is None and (beside or reference is None):
                self.rows[peer].step_seconds.append(min(found))
                self.rows[peer].reference_seconds += [min(beside)] if beside else []

    def _step(self, peer: Peer, worker: Worker, found: list[float]) -> None:
        if self.rows[peer].error is None:
            with self._failing(peer):
                found.append(worker.ask("timed"))

    def _conclude(self) -> None:
        """What follows from the times of all."""
        if self.reference is None:
            return
        first = self.rows[self.reference]
        turns = (row.reference_seconds for row in self.rows.values())
        base = min(itertools.chain(first.step_seconds, *turns), default=None)
        for row in self.rows.values():
            row.reference_seconds = row.reference_seconds or first.step_seconds[: len(row.step_seconds)]
            ratio = row.time_ratio
            if ratio is not None and base is not None:
                row.seconds = ratio * base
                row.tokens_per_second = self.facts["tokens"] / row.seconds

    def _prepare(self, peer: Peer, worker: Worker) -> None:
        row = self.rows[peer]
        with self._failing(peer):
            vars(row).update(worker.ask("compare", self.path, self.reference is None))
            vars(row).update(worker.ask("peaks"))
            if self.reference is None:
                self.reference, self.facts = peer, worker.ask("facts")
            row.repeatable = self.rows[self.reference].repeatable
            if not row.compiled:
                with contextlib.suppress(WorkerError):  # not every library bears to be watched
                    row.live_bytes = worker.ask("live_peak")

    @contextlib.contextmanager
    def _failing(self, peer: Peer) -> Iterator[None]:
        try:
            yield
        except WorkerError as error:
            self.rows[peer].error, self.rows[peer].details = str(error), error.details


# --- the largest that fits --------------------------------------------------------------------------------------------


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
    """What was measured, and where."""

    circumstances: dict[str, Any]
    setup: Setup
    what: str
    """`batch` or `tokens`."""
    budget_bytes: int
    rows: list[LargestRow]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "circumstances": self.circumstances,
            "setup": dataclasses.asdict(self.setup),
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
            return cls(given["circumstances"], Setup(**given["setup"]), given["what"], given["budget_bytes"], rows)
        except (KeyError, TypeError, ValueError) as error:
            raise HfCkptError(f"these are no figures of `hf-ckpt bench max-batch`: {error}") from error


PLANNED = Peer("planned", OURS, {"policy": "budget"})
PLANNED_CHUNKED = Peer("planned, head in chunks", OURS, {"policy": "budget", "head": "auto"})


def bench_largest(
    setup: Setup,
    what: str,
    budget_bytes: int,
    *,
    only: Sequence[str] = (),
    on_progress: Progress = lambda text: None,
    on_row: Callable[[LargestBench], None] = lambda found: None,
) -> LargestBench:
    """The largest batch or the longest sequences whose measured peak is within `budget_bytes`, for every way.

    Args:
        setup: where the search begins.
        what: `batch` or `tokens`.
        budget_bytes: peak of the allocator, weights, gradients and optimizer state included.
        only: groups or names of ways to leave all others out, but for `none`.
        on_progress: called before each way.
        on_row: called after each way with all that has been found so far.

    Every number that is tried runs two steps in a fresh process.
    """
    most = MOST if what == "batch" else learned_positions(load_config(setup.model)) or MOST
    blueprint = blueprint_of_setup(setup)
    found = LargestBench(circumstances(compat.accelerator_type() or "cpu"), setup, what, budget_bytes, [])
    for peer in _wanted((*PEERS, *OUR_PEERS, PLANNED, PLANNED_CHUNKED), only):
        on_progress(peer.name)
        row = _largest_of(peer, setup, what, budget_bytes, most, blueprint)
        found.rows.append(row)
        none = found.rows[0].largest
        row.over_none = row.largest / none if row.largest is not None and none else None
        on_row(found)
    return found


def _largest_of(peer: Peer, setup: Setup, what: str, budget_bytes: int, most: int, blueprint: Blueprint) -> LargestRow:
    row = LargestRow(peer.name, peer.group)

    def peak_of(number: int) -> int:
        changes: dict[str, Any] = {what: number}
        try:
            peak = _peak(peer, dataclasses.replace(setup, **changes), budget_bytes, blueprint)
        except InfeasibleError:
            peak = None
        except WorkerError as error:
            if not _ran_out(error):
                raise
            peak = None
        row.tried[number] = peak
        return 2 * budget_bytes if peak is None else peak

    try:
        row.largest = largest(peak_of, budget_bytes, getattr(setup, what), most)
    except HfCkptError as error:
        row.error = str(error).partition("\n")[0]
        return row
    row.peak_bytes = row.tried.get(row.largest)
    return row


def _peak(peer: Peer, setup: Setup, budget_bytes: int, blueprint: Blueprint) -> int:
    """Measured; of plans the lowest of some, because the fastest one fills the budget to its prediction's last byte."""
    if peer not in (PLANNED, PLANNED_CHUNKED):
        return _measured_peak(peer, setup)
    ways = _ways(peer, setup, blueprint)
    limit, peak = budget_bytes, None
    for _ in range(3):
        try:
            plan = plan_within(ways, limit, this_device().name)
        except InfeasibleError:
            break
        peak = _measured_peak(dataclasses.replace(peer, options=plan), setup)
        if peak <= budget_bytes:
            break
        limit = limit * budget_bytes // peak
    if peak is None:
        raise InfeasibleError(budget_bytes, peak_of_least(ways), {}, (), "no plan fits")
    return peak


def _measured_peak(peer: Peer, setup: Setup) -> int:
    with Worker(Session, setup, peer, preload=_PRELOAD) as worker:
        return int(worker.ask("largest_peak"))


def _ways(peer: Peer, setup: Setup, blueprint: Blueprint) -> tuple[Costs, ...]:
    """What a plan for that setup may be made of."""
    assert isinstance(peer.options, Mapping)
    device, step = this_device(), step_of_setup(setup, blueprint)
    head = peer.options.get("head", "full")
    if head != "full" and vocabulary_head(blueprint.base) is None:
        raise HfCkptError(f"{type(blueprint.base).__name__} has no head over a vocabulary")
    costs = trace_costs(blueprint, step, device, trial)
    return all_variants(costs, blueprint, step, device, trial, head=head)


def _ran_out(error: WorkerError) -> bool:
    return compat.is_out_of_memory(RuntimeError(str(error))) or "exit code -9" in str(error)
