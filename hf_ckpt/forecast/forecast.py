"""`hf_ckpt.predict`: predict the memory and time of a training step, and find the fastest plan that fits."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from hf_ckpt.costs.costs import Costs, timeline
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.forecast import notes
from hf_ckpt.forecast.changes import SHORTER, Change, combined_changes, is_quick, single_changes
from hf_ckpt.forecast.devices import device_named, this_device
from hf_ckpt.forecast.estimator import CostEstimator
from hf_ckpt.forecast.model import OF_LIVE, fields_of_live
from hf_ckpt.forecast.question import FIELDS, OF_THE_PLAN, Question, on_device, question
from hf_ckpt.forecast.result import Forecast, ForecastRow
from hf_ckpt.forecast.sizes import REFUSED, largest_within, micro_batches
from hf_ckpt.forecast.snippets import shortest_spec, to_write
from hf_ckpt.measure.memory import device_memory
from hf_ckpt.planner.planner import Selection
from hf_ckpt.planner.policies import make_plan
from hf_ckpt.spec.actions import FULL, KEEP
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import budget_bytes, format_bytes, parse_budget

USUAL = {"none": KEEP, "full": FULL}
"""The ways of transformers, with the action of every block."""

UNIT_TOKENS = 128
"""The lengths that are compared for the longest that fits are multiples of this."""


def predict(
    model: str | Path | Any,
    batch: int = 1,
    *,
    on_progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Forecast:
    """Predict the memory and time of a training step, and find the fastest plan within a budget.

        forecast = hf_ckpt.predict("llama-3.1-8b", 4, tokens=4096, lora=16, device="h100", budget="60GiB")
        hf_ckpt.install(model, forecast.plan)

    It needs no weights and no GPU, like `hf-ckpt plan`.

    Args:
        model: a preset, a hub id, a folder, the path of a `config.json`, a transformers config, or a live model, which
            is not changed. What is frozen, quantised, adapted or of another type in a live model is read from it.
        batch: sequences per micro-step.
        on_progress: called with a short message at the start of each slow part.
        options: options of `hf-ckpt plan`, by the names of the fields of `Question`, such as `tokens`, `lora`, `device`
            (default: this machine) and `budget` (bytes, "20GiB", "80%" or 0.8; default 90 % of the device).

    Raises `InfeasibleError` if no plan fits into the budget. Raises `HfCkptError` if an option is invalid, if the model
    or device is unknown, or if the model cannot be measured.
    """
    if isinstance(model, nn.Module):
        fields = sorted(OF_LIVE & options.keys())
        if fields:
            raise HfCkptError(f"a model that is passed determines {', '.join(fields)}: leave them out.")
        options |= fields_of_live(model)
    else:
        options["model"] = str(getattr(model, "model_type", model))
    config = None if isinstance(model, (str, Path)) else model
    return Forecaster(question({"batch": batch, **options}), on_progress, config).answer(nearest=False)


def comparison(first: Question, second: Question, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Return why one training needs more memory than another: the parts of both lowest peaks, and single changes.

    The lists have rows: `parts` the name of a part and its bytes in both, `changes` the options of one field in which
    the questions differ, and the lowest peak in bytes of the first question with it. Changes that are refused alone are
    left out. `peaks` are the two lowest peaks.
    """
    lowest = [Forecaster(training, tell).lowest() for training in (first, second)]
    names = dict.fromkeys(name for forecast in lowest for name in forecast.parts)
    parts = [[name, *(forecast.parts.get(name, 0) for forecast in lowest)] for name in names]
    peaks = [forecast.floor_bytes for forecast in lowest]
    rows = [row for row in parts if any(row[1:])]
    changes: list[list[Any]] = []
    differing = [name for name in FIELDS if getattr(first, name) != getattr(second, name)]
    for name in differing if len(differing) > 1 else ():
        with contextlib.suppress(HfCkptError):
            change: dict[str, Any] = {name: getattr(second, name)}
            peak = Forecaster(dataclasses.replace(first, **change), tell).lowest().floor_bytes
            words = [f"without {FIELDS[name].flag}"] if change[name] is None else FIELDS[name].words(change[name])
            changes.append([" ".join(words), peak])
    return {"parts": [*rows, ["peak", *peaks]], "changes": changes, "peaks": peaks}


class Forecaster:
    """Answers a question, and similar ones.

    Args:
        training: the question.
        tell: called with a short message at the start of each slow part.
        config: of the model; None for that of the model that the question names.
        saved_as: the file for a plan that has to be saved.

    Raises `HfCkptError` for an unknown device, and for options that do not go together.
    """

    def __init__(
        self,
        training: Question,
        tell: Callable[[str], None] = lambda text: None,
        config: Any = None,
        saved_as: str = "plan.json",
    ) -> None:
        self.device = device_named(training.device) if training.device else this_device()
        self._asked = training
        """The question as it was asked: each change is one of this."""
        self.training = on_device(training, self.device)
        self._memory = self.device.memory_bytes or device_memory(0).total_bytes
        self.budget = budget_bytes(training.budget, self._memory)
        self._saved = {"plan": saved_as}
        """The spec of a plan that has to be saved."""
        self._tell = tell
        self._is_live = isinstance(config, nn.Module)
        self.estimator = CostEstimator(self.device, config, tell)

    def answer(
        self,
        show: Callable[[Forecast], None] = lambda first: None,
        add: Callable[[ForecastRow], None] = lambda row: None,
        *,
        nearest: bool = True,
    ) -> Forecast:
        """Return the fastest plan within the question's budget, with what to compare it with.

        With `global_batch`, the fastest micro-batch and accumulation become those of the question. `show` is called
        with the answer before changes are measured, and `add` with each further row as soon as it is there.

        If no plan fits, return the one with the lowest peak, with what fits with a change as its rows. If `nearest` is
        False, raise `InfeasibleError` instead. Raises `HfCkptError` for a model that cannot be found or measured.
        """
        self._tell("reading the model")
        sequences = self.training.global_batch
        splits = self._choose_split(sequences // self.training.ranks) if sequences else ()
        margin = self._choose_largest()
        try:
            forecast = self._within(self.budget)
        except InfeasibleError as error:
            if not nearest:
                raise
            return self._nearest(error, show, add)
        rows_of_spec, of_spec = self._spec_rows()
        all_notes = (*margin, *forecast.notes, *of_spec)
        first = dataclasses.replace(forecast, notes=all_notes, others=(*rows_of_spec, *splits))
        show(first)
        # More memory cannot make a step faster that recomputes nothing.
        fields = OF_THE_PLAN if forecast.plan and forecast.plan.active() else ()
        faster = []
        for row in self._changed_rows(fields):
            # A row that is less than a percent faster is not worth reading: predictions are not that exact.
            if row.step_seconds < 0.99 * forecast.step_seconds:
                faster.append(row)
                add(row)
        for row in forecast.others:
            add(row)
        return dataclasses.replace(first, others=(*first.others, *faster, *forecast.others))

    def _nearest(
        self, error: InfeasibleError, show: Callable[[Forecast], None], add: Callable[[ForecastRow], None]
    ) -> Forecast:
        """Return the plan with the lowest peak, and what fits with a change, as `answer` does.

        No error for who asks "what would fit?": the page and the command show what the lowest peak consists of.
        """
        lowest = self.lowest()
        rows_of_spec, of_spec = self._spec_rows()
        hints = (f"to lower it: {hint}" for hint in error.hints)
        all_notes = (*error.notes, *self._notes_beside(), *of_spec, *hints)
        first = dataclasses.replace(lowest, notes=all_notes, others=rows_of_spec, write={}, plan=None)
        show(first)
        rows = []
        for row in self._changed_rows(FIELDS):
            rows.append(row)
            add(row)
        if all(row.name == SHORTER for row in rows):  # what a training sees of its data is the last thing to change
            several = self._combined_row()
            if several is not None and several.fits:
                rows.insert(0, several)
                add(several)
            elif several is not None:
                peak = format_bytes(several.peak_bytes)
                above = format_bytes(several.peak_bytes - self.budget)
                all_notes += (f"several changes do not suffice: {several.options} needs {peak}, {above} too much",)
        return dataclasses.replace(first, notes=all_notes, others=(*rows_of_spec, *rows))

    def lowest(self) -> Forecast:
        """Return the forecast of the plan with the lowest peak, whatever the budget is."""
        return self._forecast(self.estimator.planner_of(self.training).lowest(), self.budget)

    def within(self, budget: float | str) -> Forecast:
        """Return the fastest plan within a budget: bytes, a text such as "20GiB", or a share of the device.

        Raises `InfeasibleError` if no plan fits, and `UnitError` for an invalid budget.
        """
        return self._within(budget_bytes(parse_budget(budget), self._memory))

    def _within(self, limit: int) -> Forecast:
        return self._forecast(self.estimator.planner_of(self.training).within(limit), limit)

    def _forecast(self, selection: Selection, limit: int) -> Forecast:
        """Return the forecast whose plan has these actions."""
        training = self.training
        costs = selection.costs
        plan = selection.plan(limit, self.device.name)
        row = self._row("this plan", plan, limit, spec=self._spec(costs, plan, limit, training))
        # transformers has no head in chunks: its ways are measured with the whole head, and are labelled so.
        whole_head = self.estimator.costs_of(dataclasses.replace(training, head="whole"))
        label = "" if training.head == "whole" else ", head as a whole"
        usual = {
            name + label: Selection(whole_head, whole_head.uniform(action)).plan() for name, action in USUAL.items()
        }
        return Forecast(
            **vars(row),
            verdict=notes.verdict_of(training, self.device, row, limit, self._memory),
            assumed=notes.assumed_of(training, plan.model, self.device, limit),
            budget_bytes=limit,
            floor_bytes=min(self._frontier),
            parts=notes.parts_of(selection, training),
            allocator_bytes=notes.allocator_bytes_of(self.device, row),
            left=notes.left_of(self.device, row),
            notes=(
                *costs.notes,
                *self._notes_beside(),
                *notes.on_compiled_blocks(training, self.device, plan, usual[f"full{label}"]),
                *notes.on_allocator(self.device, row),
                *([notes.NEEDS_PLAN.format(**self._saved)] if row.spec == self._saved else []),
            ),
            others=tuple(self._row(name, way, limit) for name, way in usual.items()),
            frontier=tuple(self._row("planned", way, limit) for way in self._frontier.values()),
            write=to_write(training, row.spec or {}, "" if self._is_live else plan.model),
            plan=plan,
            timeline=selection.timeline,
            within=self.within,
        )

    def _notes_beside(self) -> Iterator[str]:
        costs = self.estimator.costs_of(self.training)
        return notes.beside(self.training, self.estimator.model_of(self.training), costs, self.budget)

    @functools.cached_property
    def _frontier(self) -> dict[int, Plan]:
        return self.estimator.planner_of(self.training).frontier()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _row(self, name: str, plan: Plan, limit: int, options: str = "", spec: Any = None) -> ForecastRow:
        predicted = plan.prediction
        assert predicted is not None
        peak_bytes = predicted.peak_bytes
        fits = peak_bytes <= min(limit, self.device.memory_bytes or limit)
        return ForecastRow(name, options, peak_bytes, predicted.step_seconds, predicted.tokens_per_second, fits, spec)

    def _changed(self, change: Change) -> Question:
        """Return the question with a change, on the device."""
        return on_device(dataclasses.replace(self._asked, **change), self.device)

    def _changed_row(self, name: str, change: Change) -> ForecastRow:
        """Return the fastest plan with a change; if none fits, the one with the lowest peak."""
        training = self._changed(change)
        # `within` would look for advice, which takes as long as planning ten times.
        selection = self.estimator.planner_of(training).within_or_lowest(self.budget)
        plan = selection.plan()
        options = " ".join(word for field, value in change.items() for word in FIELDS[field].words(value))
        return self._row(name, plan, self.budget, options, self._spec(selection.costs, plan, self.budget, training))

    def _changed_rows(self, fields: Collection[str]) -> Iterator[ForecastRow]:
        """Yield the fastest plans that fit with one change of these fields; of one name, the first that fits."""
        names = set()
        costs = self.estimator.costs_of(self.training)
        for name, change in single_changes(self.training, costs, self.budget, self.device):
            if name in names or not change.keys() <= set(fields):
                continue
            with contextlib.suppress(HfCkptError):
                if not is_quick(self._changed(change)):
                    continue
                if self.estimator.least_bytes(self._changed(change), self.budget) > self.budget:
                    continue
                row = self._changed_row(name, change)
                if row.peak_bytes <= self.budget:
                    names.add(name)
                    yield row

    def _combined_row(self) -> ForecastRow | None:
        """Return the row of several changes, in a fixed order, as few of them as fit.

        If none fit, return the row with the lowest peak; None if no step could be measured.
        """
        same_length, shorter, shared = combined_changes(self._asked)
        rows: list[ForecastRow] = []

        def fits(change: Change) -> bool:
            with contextlib.suppress(HfCkptError):  # such as PEFT's, which knows no layers for adapters
                others = {field: value for field, value in change.items() if value != getattr(self._asked, field)}
                if not is_quick(self._changed(others)):
                    return False
                rows.append(self._changed_row("several changes", others))
                return rows[-1].fits
            return False

        # 4 bits may need more than 16 with long sequences, so these are tried in turn; shorter sequences need less.
        if any(map(fits, same_length)):
            return rows[-1]
        if bisect.bisect_left(shorter, True, key=fits) == len(shorter) and self._asked.ranks == 1:
            fits(shared)
        fitting = [row for row in rows if row.fits]
        return fitting[-1] if fitting else min(rows, key=lambda row: row.peak_bytes, default=None)

    def _spec_rows(self) -> tuple[tuple[ForecastRow, ...], tuple[str, ...]]:
        """Return the row of the spec that is asked about, whether it fits or not, and notes on it.

        Raises `HfCkptError` for a spec that does not fit the model.
        """
        spec = self._asked.spec
        if spec is None:
            return (), ()
        if spec.compile is not None:
            return (), ("your spec compiles blocks, for which no figures are predicted",)
        head = "whole" if self._asked.sharded else spec.head  # as it runs there, whatever the spec says
        training = self._changed({"head": head, "mlp": spec.mlp, "host_budget": spec.host_budget})
        limit = self.budget if spec.budget is None else budget_bytes(spec.budget, self._memory)
        plan = self.estimator.planner_of_spec(spec, training).within_or_lowest(limit).plan()
        return (self._row("your spec", plan, self.budget, spec=spec.to_dict()),), ()

    def _spec(self, costs: Costs, plan: Plan, limit: int, training: Question) -> dict[str, Any]:
        """Return the spec to train with: a budget if the steps that it measures fit into the device."""
        spec = shortest_spec(plan, limit, training.host_budget)
        if any(action.made for _, action in plan.actions):
            same = make_plan(Spec.parse(spec), [block for block, _ in plan.actions], plan.family, plan.model)
            return spec if same.actions == plan.actions else self._saved
        # A session measures steps that keep least on the device; see `training/session.py`. With host memory, a plan
        # may need less than these, so that the run would end before it had a plan.
        if costs.peak({}) > self._memory:
            return self._saved
        # Tiles that the plan does not need may be what these steps need.
        needs_tiles = training.mlp != "whole" and timeline(costs, costs.uniform(FULL)).peak_bytes > self._memory
        return {**spec, "mlp": training.mlp} if needs_tiles and spec["policy"] == "budget" else spec

    # --- numbers that the question leaves open ------------------------------------------------------------------------

    def _ask(self, **change: Any) -> None:
        """Change the question."""
        self._asked = dataclasses.replace(self._asked, **change)
        self.training = on_device(self._asked, self.device)

    def _choose_largest(self) -> tuple[str, ...]:
        """Set the largest batch or length that fits, if one is asked for. Return a note on the margin it leaves."""
        field = next((field for field in ("max_batch", "max_tokens") if getattr(self._asked, field)), None)
        if field is None:
            return ()
        self._ask(**{field: False})
        name = field.removeprefix("max_")
        unit = 1 if name == "batch" else UNIT_TOKENS

        def peak_of(number: int) -> int:
            try:
                return self.estimator.planner_of(self._changed({name: number * unit})).lowest_peak
            except HfCkptError:
                if number == 1:
                    raise
                return REFUSED  # more positions than the model has

        peaks = largest_within(peak_of, self.budget)
        number = max((number for number, peak in peaks.items() if peak <= self.budget), default=1)
        self._ask(**{name: number * unit})
        if peaks[number] > self.budget:
            return ()
        more = peaks[number + 1]
        refused = "the model takes no more" if more == REFUSED else f"{(number + 1) * unit} need {format_bytes(more)}"
        left = format_bytes(self.budget - peaks[number])
        noun = "sequences per micro-step" if name == "batch" else "tokens per sequence"
        return (f"{number * unit} {noun} are the most that fit, and can leave {left} of the budget; {refused}",)

    def _choose_split(self, sequences: int) -> tuple[ForecastRow, ...]:
        """Set the fastest micro-batch for so many sequences per step on a rank.

        Return a row for each: its fastest plan, or that with the lowest peak if none fits.
        A micro-batch that does not fit ends the rows, because larger ones need more. A step that is not split is tried
        anyway: no gradients of an earlier micro-step are alive in it.
        """
        self._ask(global_batch=None)
        rows: dict[int, ForecastRow] = {}
        for batch in micro_batches(sequences):
            if batch < sequences and not all(row.fits for row in rows.values()):
                continue
            change = {"batch": batch, "accumulation": sequences // batch}
            rows[batch] = self._changed_row(f"micro-batch of {batch}", change)
        fitting = {batch: row.step_seconds for batch, row in rows.items() if row.fits}
        cost = fitting or {batch: row.peak_bytes for batch, row in rows.items()}
        fastest = min(cost, key=lambda batch: cost[batch])
        self._ask(batch=fastest, accumulation=sequences // fastest)
        return tuple(rows.values())
