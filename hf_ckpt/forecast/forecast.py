"""`hf_ckpt.predict`: predict the memory and time of a training step, and find the fastest plan that fits."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hf_ckpt.costs.costs import ON_DEVICE, Costs, timeline, with_offloading, with_segments
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.forecast.devices import device_named, this_device
from hf_ckpt.forecast.model import OF_LIVE, ShallowModel, fields_of_live, kv_bytes, nbytes, shallow_model
from hf_ckpt.forecast.optimizers import optimizer_bytes
from hf_ckpt.forecast.question import FIELDS, MODEL, OF_THE_PLAN, Question, on_device, question
from hf_ckpt.forecast.ranks import sent_bytes
from hf_ckpt.forecast.result import (
    Forecast,
    ForecastRow,
    allocator_bytes_of,
    assumed_of,
    left_of,
    notes_on_allocator,
    shortest_spec,
    to_write,
    verdict_of,
)
from hf_ckpt.forecast.run import Inputs, costs_of_model, inputs_of, least_bytes
from hf_ckpt.forecast.sizes import REFUSED, divisors, largest_within, micro_batches
from hf_ckpt.measure.memory import device_memory
from hf_ckpt.planner.planner import Planner, Selection, in_segments_of
from hf_ckpt.planner.policies import make_plan
from hf_ckpt.spec.actions import FULL, KEEP, Action
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import GIB, budget_bytes, format_bytes, parse_budget

USUAL = {"none": KEEP, "full": FULL}
"""The ways of transformers, with the action of every block."""

UNIT_TOKENS = 128
"""The lengths that are compared for the longest that fits are multiples of this."""
COMPILED_NOTE = (
    'compiled blocks are not predicted: {{"compile": "blocks", "share": 0}} needs at most about the {peak} of `full`, '
    "and was faster than every eager plan on an H200 (docs/comparison.md)"
)
SHORTER = "shorter sequences"
"""The name of the rows with fewer tokens."""

NEEDS_PLAN = (
    "a budget measures its first steps without host memory, and they do not fit: save the plan with `--out {plan}`, or "
    "`forecast.plan.save`, and train with it"
)


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
            raise HfCkptError(f"a model that is passed determines {', '.join(fields)} are: leave them out.")
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
    """Answers a question, and similar ones. It measures each training once.

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
        self._config = config
        self._models: dict[Question, ShallowModel] = {}
        self._costs: dict[Inputs, Costs] = {}

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
        rows_of_spec, notes = self._spec_rows()
        notes = (*margin, *forecast.notes, *notes)
        first = dataclasses.replace(forecast, notes=notes, others=(*rows_of_spec, *splits))
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
        beside = self._notes_beside(self.costs_of(self.training))
        rows_of_spec, of_spec = self._spec_rows()
        hints = (f"to lower it: {hint}" for hint in error.hints)
        notes = (*error.notes, *beside, *of_spec, *hints)
        first = dataclasses.replace(lowest, notes=notes, others=rows_of_spec, write={}, plan=None)
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
                notes += (f"several changes do not suffice: {several.options} needs {peak}, {above} too much",)
        return dataclasses.replace(first, notes=notes, others=(*rows_of_spec, *rows))

    def lowest(self) -> Forecast:
        """Return the forecast of the plan with the lowest peak, whatever the budget is."""
        return self._forecast(self.planner_of(self.training).lowest(), self.budget)

    def within(self, budget: float | str) -> Forecast:
        """Return the fastest plan within a budget: bytes, a text such as "20GiB", or a share of the device.

        Raises `InfeasibleError` if no plan fits, and `UnitError` for an invalid budget.
        """
        return self._within(budget_bytes(parse_budget(budget), self._memory))

    def _within(self, limit: int) -> Forecast:
        return self._forecast(self.planner_of(self.training).within(limit), limit)

    def _forecast(self, selection: Selection, limit: int) -> Forecast:
        """Return the forecast whose plan has these actions."""
        training = self.training
        costs = selection.costs
        plan = selection.plan(limit, self.device.name)
        row = self._row("this plan", plan, limit, spec=self._spec(costs, plan, limit, training))
        # transformers has no head in chunks: its ways are measured with the whole head, and are labelled so.
        whole_head = self.costs_of(dataclasses.replace(training, head="whole"))
        label = "" if training.head == "whole" else ", head as a whole"
        usual = {
            name + label: Selection(whole_head, whole_head.uniform(action)).plan() for name, action in USUAL.items()
        }
        return Forecast(
            row=row,
            verdict=verdict_of(training, self.device, row, limit, self._memory),
            assumed=assumed_of(training, plan.model, self.device, limit),
            budget_bytes=limit,
            floor_bytes=min(self._frontier),
            parts=self._parts(selection),
            allocator_bytes=allocator_bytes_of(self.device, row),
            left=left_of(self.device, row),
            notes=(
                *costs.notes,
                *self._notes_beside(costs),
                *self._compiled_note(plan, usual[f"full{label}"]),
                *notes_on_allocator(self.device, row),
                *([NEEDS_PLAN.format(**self._saved)] if row.spec == self._saved else []),
            ),
            others=tuple(self._row(name, way, limit) for name, way in usual.items()),
            frontier=tuple(self._row("planned", way, limit) for way in self._frontier.values()),
            write=to_write(training, row.spec or {}, "" if isinstance(self._config, nn.Module) else plan.model),
            plan=plan,
            timeline=selection.timeline,
            within=self.within,
        )

    def _parts(self, selection: Selection) -> dict[str, int]:
        """Return what fills the peak: name -> bytes."""
        (_, resident), *moving = selection.timeline.worst.parts().items()
        static = selection.costs.static
        buffers = "shards of gradients" if self.training.way.deepspeed else "copies of gradients in DDP's buckets"
        parts = {
            "weights": static.parameters,
            "optimizer state": static.optimizer,
            "the optimizer's copy of the weights in float32": static.master,
            buffers: static.buckets,
            "weights gathered from other ranks": static.gathered,
        }
        parts["buffers and batch"] = resident - sum(parts.values())
        return {**parts, **dict(moving)}

    def _compiled_note(self, plan: Plan, full: Plan) -> Iterator[str]:
        """A note on compiled blocks, for which no figures are predicted, if the plan recomputes something."""
        if plan.active() and full.prediction and self.device.name != "cpu" and not self.training.sharded:
            yield COMPILED_NOTE.format(peak=format_bytes(full.prediction.peak_bytes))

    def _notes_beside(self, costs: Costs) -> Iterator[str]:
        """Notes on what the figures leave out: the KV cache while completions are generated, and communication."""
        training = self.training
        model = self._model_of(training)
        if training.generation:
            size = len(costs.calls) * kv_bytes(model.base.config, training)
            alone = costs.static.always + size
            fits = "fits" if alone <= self.budget else "does not fit"
            yield (
                f"while completions are generated, a KV cache of {training.generation} tokens takes at most "
                f"{format_bytes(size)}; with weights and optimizer, {format_bytes(alone)}, which {fits}"
            )
        if training.load_in_8bit:
            yield "8-bit layers hold their inputs until the backward ends, under any plan; 4-bit layers do not"
        if training.ranks > 1:
            size = sent_bytes(model, training)
            yield f"each rank sends about {format_bytes(size)} a step to others; the time for that is not predicted"
            if training.way.left_out:
                yield f"the figures leave out {training.way.left_out}"

    @functools.cached_property
    def _frontier(self) -> dict[int, Plan]:
        return self.planner_of(self.training).frontier()

    def _row(self, name: str, plan: Plan, limit: int, options: str = "", spec: Any = None) -> ForecastRow:
        predicted = plan.prediction
        assert predicted is not None
        fits = predicted.peak_bytes <= min(limit, self.device.memory_bytes or limit)
        return ForecastRow(
            name, options, predicted.peak_bytes, predicted.step_seconds, predicted.tokens_per_second, fits, spec
        )

    def _changed_rows(self, fields: Collection[str]) -> Iterator[ForecastRow]:
        """Yield the fastest plans that fit with one change of these fields; of one name, the first that fits."""
        names = set()
        for name, change in self._changes():
            if name in names or not change.keys() <= set(fields):
                continue
            row = None
            with contextlib.suppress(HfCkptError):
                if self._least_bytes(change) <= self.budget:
                    row = self._changed_row(name, change)
            if row is not None and row.peak_bytes <= self.budget:
                names.add(name)
                yield row

    def _changed_row(self, name: str, change: Mapping[str, Any]) -> ForecastRow:
        """Return the fastest plan with a change; if none fits, the one with the lowest peak."""
        training = on_device(dataclasses.replace(self._asked, **change), self.device)
        # `within` would look for advice, which takes as long as planning ten times.
        selection = self.planner_of(training).within_or_lowest(self.budget)
        plan = selection.plan()
        options = " ".join(word for field, value in change.items() for word in FIELDS[field].words(value))
        spec = self._spec(selection.costs, plan, self.budget, training)
        return self._row(name, plan, self.budget, options, spec)

    def _least_bytes(self, change: Mapping[str, Any]) -> int:
        """Return bytes that every plan with a change needs: weights and optimizer, what follows from larger steps that
        were measured, or what its head needs, for which only one step is measured."""
        training = on_device(dataclasses.replace(self._asked, **change), self.device)
        needed = [0]
        if not training.sharded:
            tensors = self._model_of(training).tensors
            states = 0 if training.way.states else optimizer_bytes(tensors, training.optimizer)[0]
            needed.append(nbytes(tensors) + states)
        for measured, costs in self._costs.items():
            larger = dataclasses.replace(
                measured.training, host_budget=training.host_budget, segments=training.segments
            )
            batch = training.batch / larger.batch
            length = training.tokens / larger.tokens
            same_size = dataclasses.replace(
                larger, batch=training.batch, tokens=training.tokens, accumulation=training.accumulation
            )
            # In a step of one micro-step, no gradients of earlier ones are alive.
            has_fewer = training.accumulation == 1 < larger.accumulation
            if max(batch, length) > 1 or has_fewer or self._inputs_of(same_size) != self._inputs_of(training):
                continue
            # What is alive at the peak is a polynomial of batch and length, whose constant part holds at least what is
            # always alive. No part grows with more than the square of the length, or that of a packed row.
            share = (batch * length) ** 2 if training.packing else batch * length**2
            always = costs.static.always - costs.static.buffers
            needed.append(always + math.floor(share * (self.planner_of(larger).lowest_peak - always)))
        if max(needed) <= self.budget:
            needed.append(least_bytes(self._model_of(training), self._inputs_of(training)))
        return max(needed)

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
        parts: dict[str, Any] = {"head": head, "mlp": spec.mlp, "host_budget": spec.host_budget}
        training = on_device(dataclasses.replace(self._asked, **parts), self.device)
        limit = self.budget if spec.budget is None else budget_bytes(spec.budget, self._memory)
        plan = Planner(self._costs_of_spec(spec, training)).within_or_lowest(limit).plan()
        return (self._row("your spec", plan, self.budget, spec=spec.to_dict()),), ()

    def _costs_of_spec(self, spec: Spec, training: Question) -> list[Costs]:
        """Return the costs of the actions that a spec gives; stacks that it leaves to the planner have all actions."""
        plain = self.costs_of(training)
        plan = make_plan(spec, plain.blocks, plain.family, plain.model)
        actions = {block: action for block, action in plan.actions if not spec.is_planned or spec.is_fixed(block.stack)}
        held = {block: dataclasses.replace(action, made=False) for block, action in actions.items()}
        moved = ON_DEVICE.keys() & held.values()
        is_divided = any(action.made for action in actions.values())
        if moved and is_divided:
            raise HfCkptError("segments whose inputs are offloaded cannot be predicted: leave one of the two out.")
        if len(moved) > 1:
            raise HfCkptError("two ways of offloading in one spec cannot be predicted: leave one of them out.")
        costs = self.costs_of(training, frozenset(ON_DEVICE.get(action, action) for action in held.values()))
        if is_divided:
            return [with_segments(costs, actions)]
        host_limit = training.host_budget or (2**60 if moved else None)
        ways = with_offloading(costs, self.device.host_bandwidth, self.device.launch_nanoseconds, host_limit)
        # On a CPU nothing moves, and blocks keep on the device what they would move.
        return [way.restricted(actions) for way in ways if moved <= set(way.actions)] or [costs.restricted(actions)]

    def _choose_largest(self) -> tuple[str, ...]:
        """Set the largest batch or length that fits, if one is asked for. Return a note on the margin it leaves."""
        field = next((field for field in ("max_batch", "max_tokens") if getattr(self._asked, field)), None)
        if field is None:
            return ()
        self._ask(**{field: False})
        name = field.removeprefix("max_")
        unit = 1 if name == "batch" else UNIT_TOKENS

        def peak_of(number: int) -> int:
            change: dict[str, Any] = {name: number * unit}
            training = on_device(dataclasses.replace(self._asked, **change), self.device)
            return self.planner_of(training).lowest_peak

        def or_refused(number: int) -> int:
            try:
                return peak_of(number)
            except HfCkptError:  # more positions than the model has
                return REFUSED

        peaks = {1: peak_of(1), **largest_within(or_refused, self.budget)}
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

    def _ask(self, **change: Any) -> None:
        """Change the question."""
        self._asked = dataclasses.replace(self._asked, **change)
        self.training = on_device(self._asked, self.device)

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

    def _changes(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what can be changed in the question: (name, field -> value). Of one name, the first is the least."""
        training = self.training
        costs = self.costs_of(training)
        room = costs.static.always < self.budget  # otherwise, less activations cannot help
        host = room and training.host_budget is None and self.device.host_bandwidth > 0
        parts = divisors(training.batch)[1:]
        smaller = [{"batch": training.batch // by, "accumulation": training.accumulation * by} for by in parts]
        shorter = room and training.target_tokens is None  # which of the two lengths to halve, only the user knows
        bits = not training.load_in_4bit and not training.sharded
        in_4_bits = {"load_in_4bit": True} | ({"load_in_8bit": False} if training.load_in_8bit else {})
        rows: list[tuple[bool, str, dict[str, Any]]] = [
            (costs.chunks_help, "plan with the head in chunks", {"head": "auto"}),
            (room and training.mlp == "whole", "plan with feed-forwards in tiles", {"mlp": "auto"}),
            (host, "plan with host memory", {"host_budget": 64 * GIB}),
            (room and training.segments is None and not training.sharded, "plan in segments", {"segments": "sqrt"}),
            *((room, "smaller batch", change) for change in smaller),
            (training.ranks > 1 and training.way.more != "", "more shared by ranks", {"parallel": training.way.more}),
            (training.ranks == 1 and bits, "8 ranks under FSDP2", {"ranks": 8, "parallel": "fsdp2"}),
            *((shorter, SHORTER, {"tokens": training.tokens // by}) for by in (2, 4, 8)),
            (training.prepared, "without PEFT's preparation", {"kbit_preparation": False}),
            # Under LoRA, gradients and state are a few MiB: an optimizer or another rank would not change what fits.
            (training.lora is None, "8-bit optimizer", {"optimizer": "adamw_8bit"}),
            (training.lora is None, "LoRA", {"lora": 16}),
            (bits, "LoRA, base in 4 bits", {"lora": training.lora or 16, **in_4_bits}),
        ]
        return [(name, change) for applies, name, change in rows if applies]

    def _combined_row(self) -> ForecastRow | None:
        """Return the row of several changes, in a fixed order, as few of them as fit.

        If none fit, return the row with the lowest peak; None if no step could be measured.
        """
        training = self._asked
        change: dict[str, Any] = {"mlp": "auto", "head": "auto"}
        if training.sharded:  # the head in chunks needs whole weights
            change |= {"parallel": "ddp"}
        in_4_bits = {"load_in_4bit": True, "load_in_8bit": False}
        steps: list[dict[str, Any]] = [{"lora": training.lora or 16}, in_4_bits]
        steps.append({"batch": 1, "accumulation": training.accumulation * training.batch})
        if not training.sharded:
            steps.append({"segments": "sqrt"})
        if training.target_tokens is None:
            steps += [{"tokens": max(1, training.tokens // by)} for by in (2, 4, 8, 16)]
        changes = [*itertools.accumulate(steps, operator.or_, initial=change)]
        shared = {"ranks": 8, "parallel": "fsdp2", "head": "whole", "segments": None}
        shared |= {"load_in_4bit": False, "load_in_8bit": False}
        rows: list[ForecastRow] = []

        def fits(change: Mapping[str, Any]) -> bool:
            with contextlib.suppress(HfCkptError):  # such as PEFT's, which knows no layers for adapters
                others = {field: value for field, value in change.items() if value != getattr(training, field)}
                rows.append(self._changed_row("several changes", others))
                return rows[-1].fits
            return False

        # 4 bits may need more than 16 with long sequences, so these are tried in turn; shorter sequences need less.
        longest = [change for change in changes if change.get("tokens", training.tokens) == training.tokens]
        shorter = changes[len(longest) :]
        if any(map(fits, longest)):
            return rows[-1]
        if bisect.bisect_left(shorter, True, key=fits) == len(shorter) and training.ranks == 1:
            fits(changes[-1] | shared)
        fitting = [row for row in rows if row.fits]
        return fitting[-1] if fitting else min(rows, key=lambda row: row.peak_bytes, default=None)

    def planner_of(self, training: Question) -> Planner:
        """Return the planner for a question, with host memory and segments as it has them."""
        costs = self.costs_of(training)
        host = self.device.host_bandwidth, self.device.launch_nanoseconds, training.host_budget
        divided = [] if training.segments is None else in_segments_of(costs, training.segments)
        return Planner([*with_offloading(costs, *host), *divided])

    def costs_of(self, training: Question, further: frozenset[Action] = frozenset()) -> Costs:
        """Return what each action of each block costs in a step, on one rank. It measures each training once.

        `further` are actions beside those that a plan chooses from. Raises `HfCkptError` for a model that does not run
        on fake tensors.
        """
        inputs = self._inputs_of(training, further)
        if inputs not in self._costs:
            model = self._model_of(training)
            self._tell(f"measuring steps with {training.batch} x {training.tokens} tokens, on fake tensors")
            costs = costs_of_model(model, inputs)
            # transformers 5 stacks the weights of experts in one parameter. bitsandbytes replaces `nn.Linear` only, so
            # that "4 bits" of such a model may be far larger than its users expect.
            experts = nbytes(tensor for tensor in model.tensors if len(tensor.shape) > 2)
            if training.bits and experts > costs.static.parameters / 2:
                note = f"{format_bytes(experts)} of weights are stacked experts, which bitsandbytes does not quantise"
                costs = dataclasses.replace(costs, notes=(note,))
            self._costs[inputs] = costs
        return self._costs[inputs]

    def _inputs_of(self, training: Question, further: frozenset[Action] = frozenset()) -> Inputs:
        return inputs_of(training, self.device, further)

    def _model_of(self, training: Question) -> ShallowModel:
        """Return the shallow model of a question."""
        of_model = training.only(MODEL)
        if of_model not in self._models:
            self._models[of_model] = shallow_model(of_model, self._config)
        return self._models[of_model]
