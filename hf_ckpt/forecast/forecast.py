"""`hf_ckpt.predict`: predict the memory and time of a training step, and find the fastest plan that fits."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from hf_ckpt.costs.costs import Choice, Costs, timeline, with_offloading
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.forecast.answer import Forecast, Row, answer_of, assumed_of, spec_of, to_write
from hf_ckpt.forecast.devices import device_named, this_device
from hf_ckpt.forecast.model import ShallowModel, model_of_workload, quantisation_of
from hf_ckpt.forecast.question import FIELDS, OF_THE_PLAN, Question, on_device, question, words_of
from hf_ckpt.forecast.run import costs_of_model
from hf_ckpt.measure.memory import device_memory
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.families import GENERIC
from hf_ckpt.planner.budgets import choice_within, frontier, plan_of, plan_within
from hf_ckpt.spec.actions import FULL, KEEP
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import GIB, budget_bytes, format_bytes, format_seconds, parse_budget

_OF_THE_MODEL = {
    *("lora", "lora_targets", "lora_dropout", "load_in_4bit", "double_quant", "kbit_preparation"),
    *("dtype", "attention", "architecture"),
}
"""Fields of `Question` that a live model determines, but a config does not."""


def predict(
    model: str | Path | nn.Module | Any,
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
        model: a preset, a hub id, a folder, the path of a `config.json`, a transformers config, or a model, plain or
            wrapped.
        batch: sequences per micro-step.
        on_progress: called with a short message at the start of each slow part.
        options: options of `hf-ckpt plan`, by the names of the fields of `Question`, such as `tokens`, `lora`, `device`
            (default: this machine) and `budget` (bytes, "20GiB", "80%" or 0.8; default 90 % of the device).

    Raises `InfeasibleError` if no plan fits into the budget. Raises `HfCkptError` if an option is invalid, if the model
    or device is unknown, if the model cannot be measured, and if options such as `lora` are given for a live model.
    """
    if isinstance(model, nn.Module):
        fixed = sorted(_OF_THE_MODEL & options.keys())
        if fixed:
            raise HfCkptError(f"a live model has its own {', '.join(fixed)}: leave these out, or give its config.")
        blocks = find_blocks(model)
        name = blocks.model
        options["attention"] = getattr(blocks.base.config, "_attn_implementation", None) or "sdpa"
    else:
        name = str(getattr(model, "model_type", model))
    source = None if isinstance(model, (str, Path)) else model
    return Forecaster(question({"batch": batch, **options, "model": name}), on_progress, source).answer(nearest=False)


class Forecaster:
    """Answers a question, and similar ones. It measures each training once.

    Args:
        training: the question.
        tell: called with a short message at the start of each slow part.
        source: the model's config, or a live model with its own types and adapters; None if the question names one.
        program: as in `to_write`.

    Raises `HfCkptError` for an unknown device, and for options that do not go together.
    """

    def __init__(
        self,
        training: Question,
        tell: Callable[[str], None] = lambda text: None,
        source: Any = None,
        *,
        program: str = "",
    ) -> None:
        self.device = device_named(training.device) if training.device else this_device()
        self.training = training if isinstance(source, nn.Module) else on_device(training, self.device)
        self._memory = self.device.memory_bytes or device_memory(0).total_bytes
        self.budget = budget_bytes(training.budget, self._memory)
        self._tell, self._source, self._program = tell, source, program
        self._models: dict[Any, ShallowModel] = {}
        self._costs: dict[Question, Costs] = {}
        self._frontier: dict[int, Plan] = {}

    def answer(self, *, nearest: bool = True) -> Forecast:
        """Return the fastest plan within the question's budget, with what to compare it with.

        If no plan fits, return the one with the lowest peak, with what fits with a change as its rows. If `nearest` is
        False, raise `InfeasibleError` instead. Raises `HfCkptError` for a model that cannot be found or measured.
        """
        self._tell("reading the model")
        try:
            forecast = self.within(self.budget)
        except InfeasibleError as error:
            if not nearest:
                raise
            self._tell("nothing fits; looking for what does")
            lowest = self._forecast(*choice_within(self.candidates(self.training), error.floor_bytes), self.budget)
            notes = (*error.notes, *(f"to lower it: {hint}" for hint in error.hints))
            rows = tuple(self._nearest())
            return dataclasses.replace(lowest, notes=notes, rows=rows, write={}, plan=None)  # type: ignore[arg-type]
        if not forecast.plan.active():  # more memory cannot make it faster
            return forecast
        self._tell("comparing")
        plan, *usual = forecast.rows
        ways = (self._planned(*change) for change in self._changes() if change[1].keys() <= OF_THE_PLAN.keys())
        worth = 0.99 * plan.step_seconds  # smaller gains are not worth mentioning
        faster = sorted((row for row in ways if row and row.step_seconds < worth), key=lambda row: row.step_seconds)
        notes = forecast.notes
        if faster:
            seconds = f"{format_seconds(faster[0].step_seconds)} instead of {format_seconds(plan.step_seconds)}"
            notes = (f"faster with {faster[0].options}: {seconds} a step", *notes)
        return dataclasses.replace(forecast, rows=(plan, *faster, *usual), notes=notes)

    def within(self, budget: float | str) -> Forecast:
        """Return the fastest plan within a budget: bytes, a text such as "20GiB", or a share of the device.

        Raises `InfeasibleError` if no plan fits, and `UnitError` for an invalid budget.
        """
        limit = budget_bytes(parse_budget(budget), self._memory)
        return self._forecast(*choice_within(self.candidates(self.training), limit), limit)

    def _forecast(self, costs: Costs, choice: Choice, limit: int) -> Forecast:
        """Return the forecast whose plan has these costs and actions."""
        training = self.training
        device = self.device
        plan = plan_of(costs, choice, limit, device.name)
        course = timeline(costs, choice)
        most = min(limit, device.memory_bytes or limit)
        own = _row("this plan", plan, most, spec=spec_of(plan, limit, training.host_budget))
        plain = self.costs_of(dataclasses.replace(training, head="full"))
        usual = {name: plan_of(plain, plain.uniform(action)) for name, action in (("none", KEEP), ("full", FULL))}
        (_, resident), *moving = course.worst.parts().items()
        weights, state = costs.static.parameters, costs.static.optimizer
        parts = {"weights": weights, "optimizer state": state, "buffers and batch": resident - weights - state}
        parts |= dict(moving)
        notes, of_head = costs.notes, moving[-1][1]
        if course.is_heads and costs.chunks_help and of_head > parts["kept for backward"]:
            size = format_bytes(of_head)
            notes = (f"{size} are of the head and its loss: no policy on blocks lowers these, but --head auto", *notes)
        self._frontier = self._frontier or frontier(self.candidates(training))
        return Forecast(
            fits=own.fits,
            answer=answer_of(training, device, own, limit),
            assumed=assumed_of(training, plan.model, device, limit),
            workload=dataclasses.replace(training, **OF_THE_PLAN),
            device=device.name,
            budget_bytes=limit,
            peak_bytes=own.peak_bytes,
            floor_bytes=min(self._frontier),
            parts=parts,
            step_seconds=own.step_seconds,
            tokens_per_second=own.tokens_per_second,
            notes=notes,
            rows=(own, *(_row(name, way, most) for name, way in usual.items())),
            frontier=tuple(_row("planned", way, most) for way in self._frontier.values()),
            write=to_write(training, own.spec or {}, self._program),
            plan=plan,
            timeline=course,
            within=self.within,
        )

    def _planned(self, name: str, change: dict[str, Any]) -> Row | None:
        """Return the row of the fastest plan that fits with a change of the question; None if there is none."""
        try:
            training = dataclasses.replace(self.training, **change)
            plan = plan_within(self.candidates(training), self.budget)
        except HfCkptError:
            return None
        options = " ".join(word for field, value in change.items() for word in words_of(FIELDS[field], value))
        most = min(self.budget, self.device.memory_bytes or self.budget)
        return _row(name, plan, most, options, spec_of(plan, self.budget, training.host_budget))

    def _changes(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what can be changed in the question: (name, field -> value). Of one name, the first is the least."""
        training, all_weights = self.training, self.training.lora is None
        host = training.host_budget is None and self.device.host_bandwidth > 0
        parts = [batch for batch in range(training.batch // 2, 0, -1) if training.batch % batch == 0]
        smaller = [{"batch": batch, "accumulation": training.batch * training.accumulation // batch} for batch in parts]
        one_length = training.target_tokens is None
        bits = not training.load_in_4bit and not training.sharded and one_length
        rows: list[tuple[bool, str, dict[str, Any]]] = [
            (self.costs_of(training).chunks_help, "plan with the head in chunks", {"head": "auto"}),
            (host, "plan with host memory", {"host_budget": 64 * GIB}),
            *((True, "smaller batch", change) for change in smaller),
            *((one_length, "shorter sequences", {"tokens": training.tokens // by}) for by in (2, 4, 8)),
            (training.prepared, "without PEFT's preparation", {"kbit_preparation": False}),
            (all_weights, "8-bit optimizer", {"optimizer": "adamw_8bit"}),
            (all_weights, "LoRA", {"lora": 16}),
            (bits, "LoRA, base in 4 bits", {"lora": training.lora or 16, "load_in_4bit": True}),
        ]
        return [(name, change) for applies, name, change in rows if applies]

    def _nearest(self) -> list[Row]:
        """Return what fits with one change, or if nothing does, what fits with fewer weights and another change."""
        changes = self._changes()
        of_weights = [way for way in changes if way[1].keys() & {"lora", "optimizer", "kbit_preparation"}]
        others = [way for way in changes if way not in of_weights]
        if self.candidates(self.training)[0].static.always > self.budget:  # activations alone cannot help
            changes = of_weights
        rows: dict[str, Row] = {}
        for name, change in changes:
            if name not in rows and (row := self._planned(name, change)):
                rows[name] = row
        if not rows and of_weights:
            least, weights = of_weights[-1]
            both = (self._planned(f"{least} + {name}", {**weights, **change}) for name, change in others)
            return list(itertools.islice(filter(None, both), 1))
        return [*rows.values()]

    def candidates(self, training: Question) -> list[Costs]:
        """Return the costs from which the plan for a question is made."""
        costs, device = self.costs_of(training), self.device
        return with_offloading(costs, device.host_bandwidth, device.launch_nanoseconds, training.host_budget)

    def _model(self, training: Question) -> ShallowModel:
        key = training.lora, training.load_in_4bit, training.kbit_preparation  # what suggestions change in a model
        if key not in self._models:
            source = {"live" if isinstance(self._source, nn.Module) else "config": self._source}
            self._models[key] = model_of_workload(training, **source)
        return self._models[key]

    def costs_of(self, training: Question) -> Costs:
        """Return what each action of each block costs in a step, on one rank. It measures each training once.

        Raises `HfCkptError` for a model that does not run on fake tensors.
        """
        key = dataclasses.replace(training, host_budget=None)
        if key not in self._costs:
            self._tell(f"measuring steps with {training.batch} x {training.tokens} tokens, on fake tensors")
            model = self._model(training)
            costs = costs_of_model(model, training, self.device)
            copies = costs.static.gradients if training.ranks > 1 and not training.sharded else 0  # in buckets of DDP
            static = dataclasses.replace(costs.static, buffers=costs.static.buffers + copies)
            self._costs[key] = dataclasses.replace(costs, static=static, notes=tuple(_notes_of(costs, model, training)))
        return self._costs[key]


def _notes_of(costs: Costs, model: ShallowModel, training: Question) -> Iterator[str]:
    """Remarks on a training."""
    if costs.family == GENERIC:
        yield f"{costs.model} is of no known family: every block that can be checkpointed is planned for alike"
    if quantisation_of(model.base.config) == "mxfp4":
        yield "the checkpoint's MXFP4 weights are dequantised for training"
    if training.trainer == "grpo":
        yield "completions are written before the step: the memory for that, of generate or vLLM, is not counted"
    experts = sum(math.prod(shape) * size for shape, size, _ in model.tensors if len(shape) > 2)
    if training.load_in_4bit and experts > costs.static.parameters / 2:
        wide = "; --no-kbit-preparation leaves them in 16 bits" if training.prepared else ""
        yield f"{format_bytes(experts)} of the weights are stacked experts, which bitsandbytes does not quantise{wide}"
    if training.ranks > 1:
        yield "what ranks send to each other takes time that is not predicted"


def _row(name: str, plan: Plan, limit: int, options: str = "", spec: Any = None) -> Row:
    predicted = plan.prediction
    assert predicted is not None
    peak_bytes, seconds, speed = predicted.peak_bytes, predicted.step_seconds, predicted.tokens_per_second
    return Row(name, options, peak_bytes, seconds, speed, peak_bytes <= limit, spec)
