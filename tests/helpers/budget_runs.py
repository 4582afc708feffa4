"""Runs a training under `policy: budget` and reports real peaks, plans, predictions and gradients.

    reference = references(make)                   # the same training without hf_ckpt, and under `full`
    run = within(make, reference, share=0.5)       # under a budget half-way between their peaks
    run.misses()                                   # [] if everything holds

`make(spec)` returns a `Scenario`: a fresh model, always the same one, with the spec enabled; None enables nothing.
One `LiveBytes` counts all live tensors during the whole training. This module does not depend on how plans are made:
it reads the current plan from `hf_ckpt.describe` and from the log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import traceback
from collections.abc import Callable, Iterator

import torch
from torch import nn

import hf_ckpt
from hf_ckpt.measure.live import Holder, LiveBytes

SHARES = (0.25, 0.5, 0.75)
"""Positions of budgets between the peak under `full` and the peak without checkpointing."""
MOST, MOST_FIRST, MOST_PREDICTED = 1.01, 1.03, 1.03
"""Largest allowed ratios: real peak to budget from the second planned step on, real peak to budget in the first planned
step, and predicted to real peak."""
SLACK = 0.05
"""Extra tolerance of tests: plans depend on measured times, which vary on a busy machine."""


@dataclasses.dataclass
class Scenario:
    """A model and its training."""

    model: nn.Module
    """The model to describe; its parameters are compared at the end. `train` may replace it."""
    train: Callable[[Watch], None]
    """Trains, and reports to the watch where each micro-step begins and ends and when the model changed."""
    holders: tuple[Holder, ...] = ()
    """Other holders of tensors that exist before the training, such as batches."""
    settled: int = 0
    """Number of micro-steps after which peaks under one plan stop changing; 0: only the whole training shows that."""


Make = Callable[[dict | None], Scenario]


@dataclasses.dataclass
class Step:
    """One micro-step, with the optimizer's step after it, if there is one."""

    shape: str
    """Name of the batch's shape if steps differ in it."""
    phase: int
    """How often the model had changed before."""
    peak_bytes: int = 0
    plan: str = ""
    """Actions of the plan when the step's forward began, such as `2 full, 6 keep`."""
    predicted_bytes: int | None = None
    """Predicted peak of that plan; None if it has no prediction."""
    recomputed: int = 0
    said: list[str] = dataclasses.field(default_factory=list)
    """Log messages about plans, and warnings of hf_ckpt."""
    failed: bool = False
    """Whether an error ended it."""


class Settled(Exception):
    """Ends a training early when only its peaks are needed."""


class Watch:
    """Records what happens in each micro-step; the training reports where micro-steps begin and end."""

    def __init__(self, scenario: Scenario, planned: bool, live: LiveBytes, most: int = 0) -> None:
        self.scenario = scenario
        self._most = most
        self.steps: list[Step] = []
        self._live = live
        self._planned = planned
        self._phase = 0
        self._step: Step | None = None
        self._recomputed = 0

    @contextlib.contextmanager
    def step(self, shape: str = "") -> Iterator[None]:
        """A micro-step, as a context manager. Errors inside are recorded and raised again."""
        self.begin(shape)
        try:
            yield
        except BaseException:
            if self._step is not None:
                self._step.failed = True
            raise
        finally:
            self.end()

    def begin(self, shape: str = "") -> None:
        """Begin a micro-step, ending the previous one if needed. Raises `Settled` if no more steps are needed."""
        self.end()
        if self._most and len(self.steps) >= self._most:
            raise Settled
        self._step = Step(shape, self._phase)
        if self._planned:  # after the model's hooks, before its blocks
            embedding = self.scenario.model.get_input_embeddings()
            self._handle = embedding.register_forward_pre_hook(self._note_plan)
        self._live.timeline.clear()
        self._live.peak_bytes = self._live.current_bytes

    def end(self) -> None:
        """End the micro-step, including the optimizer's step; a second call does nothing."""
        step, self._step = self._step, None
        if step is None:
            return
        step.peak_bytes = self._live.peak_bytes
        if self._planned:
            self._handle.remove()
            described = self._noted(step)
            done = sum(described.recomputed.values())
            step.recomputed = done - self._recomputed if done >= self._recomputed else done
            self._recomputed = done
        self.steps.append(step)

    def changed(self) -> None:
        """Report that the model has changed, so that it may need another plan."""
        self._phase += 1

    def hear(self, record: logging.LogRecord) -> None:
        """Store a message logged during a step or before the next one."""
        step = self._step or (self.steps[-1] if self.steps else None)
        if step is not None:
            step.said.append(record.getMessage())

    def _note_plan(self, module: nn.Module, args: object) -> None:
        if self._step is not None and not self._step.plan and module.training and torch.is_grad_enabled():
            self._noted(self._step)

    def _noted(self, step: Step) -> hf_ckpt.Description:
        described = hf_ckpt.describe(self.scenario.model)
        if not step.plan:
            step.plan = in_words(described.plan)
            prediction = described.plan.prediction
            step.predicted_bytes = None if prediction is None else prediction.peak_bytes
        return described


def in_words(plan: hf_ckpt.Plan) -> str:
    """The actions of a plan, run by run."""
    runs = itertools.groupby(str(action) for _, action in plan.actions)
    found = ", ".join(f"{len(list(group))} {action}" for action, group in runs)
    return found + ("" if plan.head == "full" else ", head")


@dataclasses.dataclass
class Trained:
    """The results of a training."""

    steps: list[Step]
    weights: dict[str, torch.Tensor]
    """Final parameters, and gradients as `NAME.grad`."""
    error: str = ""
    """Traceback of the error that ended it."""

    @property
    def peak_bytes(self) -> int:
        """The largest peak of its steps."""
        return max(step.peak_bytes for step in self.steps)


def trained(make: Make, spec: dict | None, *, settle: bool = False) -> Trained:
    """Train under a spec, or without hf_ckpt for None; with `settle`, only until peaks stop changing.

    With a spec, an error ends the training and is stored.
    """
    gc.collect()
    scenario = make(spec)
    live = LiveBytes(scenario.model, *scenario.holders)
    watch = Watch(scenario, spec is not None, live, scenario.settled if settle else 0)
    error = ""
    with heard(watch), live:
        try:
            scenario.train(watch)
        except Settled:
            pass
        except Exception:
            if spec is None:
                raise
            error = traceback.format_exc()
        watch.end()
    weights = {}
    for name, parameter in scenario.model.named_parameters():
        weights[name] = parameter.detach().clone()
        if parameter.grad is not None:
            weights[f"{name}.grad"] = parameter.grad.clone()
    if spec is not None:
        hf_ckpt.uninstall(scenario.model)
    return Trained(watch.steps, weights, error)


@contextlib.contextmanager
def heard(watch: Watch) -> Iterator[None]:
    """Pass all messages about plans and all warnings of hf_ckpt to a watch, as a context manager."""
    plans, every, handler = logging.getLogger("hf_ckpt.plans"), logging.getLogger("hf_ckpt"), logging.Handler()
    handler.emit = watch.hear
    handler.addFilter(lambda record: record.name == plans.name or record.levelno >= logging.WARNING)
    before = plans.level
    plans.setLevel(logging.INFO)
    every.addHandler(handler)
    try:
        yield
    finally:
        every.removeHandler(handler)
        plans.setLevel(before)


@dataclasses.dataclass
class References:
    """The results of the training without hf_ckpt, and its peak under `full`."""

    keep: Trained
    full_bytes: int

    @property
    def room(self) -> float:
        """The share of the peak that `full` saves."""
        return 1 - self.full_bytes / self.keep.peak_bytes

    def budget_bytes(self, share: float) -> int:
        """The peak under `full` plus a share of what `full` saves."""
        return round(self.full_bytes + share * (self.keep.peak_bytes - self.full_bytes))


def references(make: Make) -> References:
    """Train without hf_ckpt and under `full`. Raises `ValueError` if `full` saves nothing."""
    keep = trained(make, None)
    full = trained(make, {"policy": "full"}, settle=True)
    if full.error:
        raise ValueError(f"it does not train under `full`: {full.error}")
    found = References(keep, full.peak_bytes)
    if found.room <= 0:
        raise ValueError(f"`full` needs {full.peak_bytes} bytes, no less than {keep.peak_bytes} without it")
    return found


@dataclasses.dataclass
class Run:
    """A training under a budget, and its ratios to the limits. A ratio is 0 if there was no such step."""

    budget_bytes: int
    full_bytes: int
    steps: list[Step]
    mixed: bool
    """Whether the steps differ in the shape of their batches."""
    error: str
    differing: list[str]
    """Parameters and gradients that are not bit-equal to those without hf_ckpt."""
    recomputed: int
    """Recomputations of blocks and operations in all steps."""

    def measuring(self) -> list[Step]:
        """The steps before the first plan."""
        planned = {id(step) for group in self._planned() for step in group}
        return [step for step in self.steps if id(step) not in planned]

    @property
    def worst_measuring(self) -> float:
        """Largest real peak before the first plan, divided by the larger of the budget and the peak under `full`."""
        return self._largest(self.measuring(), max(self.budget_bytes, self.full_bytes))

    @property
    def first_planned(self) -> float:
        """Largest real peak of the first step under a plan, divided by the budget."""
        return self._largest([group[0] for group in self._planned() if group], self.budget_bytes)

    @property
    def worst_planned(self) -> float:
        """Largest real peak from the second step under a plan on, divided by the budget."""
        return self._largest([step for group in self._planned() for step in group[1:]], self.budget_bytes)

    @property
    def predicted(self) -> float:
        """Predicted over real peak of the last plan, for its largest step; 0 if it keeps everything."""
        last = next((group for group in reversed(self._planned()) if group), None)
        if last is None or self.mixed or self._keeps_all(last[-1]):  # if all fits, a high prediction does no harm
            return 0.0
        real = max(step.peak_bytes for step in (last[1:] or last))
        return (last[-1].predicted_bytes or 0) / real

    def misses(self, slack: float = 0.0) -> list[str]:
        """Failed expectations in words; `slack` is added to the limits of the ratios."""
        limits = (
            ("planned", self.worst_planned, MOST),
            ("first planned", self.first_planned, MOST_FIRST),
            ("measuring", self.worst_measuring, MOST),
            ("predicted", self.predicted, MOST_PREDICTED),
        )
        found = [f"error: {self.error}"] if self.error else []
        found += [f"{name} {ratio:.3f}" for name, ratio, most in limits if ratio > most + slack]
        if self.differing and not self.error:
            found.append(f"{len(self.differing)} tensors differ, the first is {self.differing[0]}")
        if not self.recomputed and not self.error:
            found.append("nothing was recomputed")
        if not any(self._planned()) and not self.error:
            found.append("no plan was made")
        return found

    def _planned(self) -> list[list[Step]]:
        """The steps from the first plan on, grouped by phase and, if shapes are mixed, by shape."""
        found = []
        for steps in self._phases():
            if self.mixed:
                steps = sorted((step for step in steps if step.predicted_bytes is not None), key=lambda s: s.shape)
                found += [list(same) for _, same in itertools.groupby(steps, key=lambda step: step.shape)]
            else:
                found.append(list(itertools.dropwhile(lambda step: step.predicted_bytes is None, steps)))
        return found

    def _phases(self) -> list[list[Step]]:
        phases = itertools.groupby(self.steps, key=lambda step: step.phase)
        return [[step for step in steps if not step.failed] for _, steps in phases]

    @staticmethod
    def _keeps_all(step: Step) -> bool:
        return step.plan.endswith(" keep") and "," not in step.plan

    @staticmethod
    def _largest(steps: list[Step], limit: int) -> float:
        return max((step.peak_bytes for step in steps if not step.failed), default=0) / limit


def run_of(done: Trained, full_bytes: int, budget: int, expected: dict, found: dict) -> Run:
    """A training under a budget; `expected` holds the weights and gradients that it should produce."""
    return Run(
        budget_bytes=budget,
        full_bytes=full_bytes,
        steps=done.steps,
        mixed=len({step.shape for step in done.steps}) > 1,
        error=done.error,
        differing=sorted(n for n in expected.keys() | found.keys() if not _equal(expected.get(n), found.get(n))),
        recomputed=sum(step.recomputed for step in done.steps),
    )


def within(make: Make, reference: References, share: float) -> Run:
    """Train under a budget at this position between the two peaks."""
    budget = reference.budget_bytes(share)
    done = trained(make, {"policy": "budget", "budget": budget})
    return run_of(done, reference.full_bytes, budget, reference.keep.weights, done.weights)


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)
