"""`hf_ckpt.predict`: predict the memory and time of a training step, and find the fastest plan that fits."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from hf_ckpt.costs.costs import Costs, timeline, with_offloading
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.forecast import words
from hf_ckpt.forecast.answer import Forecast, Row
from hf_ckpt.forecast.devices import device_named, this_device
from hf_ckpt.forecast.model import ShallowModel, model_of_workload, quantisation_of
from hf_ckpt.forecast.question import FIELDS, MOST_TOKENS, OF_THE_PLAN, Question, on_device, question, words_of
from hf_ckpt.forecast.run import costs_of_model
from hf_ckpt.measure.machine import device_memory
from hf_ckpt.models.blocks import find_blocks, vocabulary_head
from hf_ckpt.models.families import GENERIC
from hf_ckpt.planner.budgets import choice_within, frontier, peak_of_least, plan_of, plan_within
from hf_ckpt.planner.segments import in_segments
from hf_ckpt.spec.actions import FULL, KEEP
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import GIB, budget_bytes, format_bytes, format_seconds, parse_budget

Progress = Callable[[str], None]
"""Called with a short message at the start of each slow part."""
_HOST_BUDGET = 64 * GIB
"""Host memory that is tried, in bytes."""
_LARGEST = 2**20
"""Most sequences that the search for the largest batch tries."""
_GAIN = 0.01
"""Share of time that a change of the question must save to be worth mentioning."""
_OF_THE_MODEL = {
    *("lora", "lora_targets", "lora_dropout", "load_in_4bit", "double_quant", "kbit_preparation"),
    *("dtype", "attention", "architecture"),
}
"""Fields of `Question` that a live model determines, but a config does not."""


def predict(
    model: str | Path | nn.Module | Any,
    batch: int = 1,
    *,
    on_progress: Progress = lambda text: None,
    **asked: Any,
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
        asked: options of `hf-ckpt plan`, by the names of the fields of `Question`, such as `tokens`, `lora`, `trainer`,
            `device` (default: this machine) and `budget` (bytes, "20GiB", "80%" or 0.8; default 90 % of the device).

    Raises:
        InfeasibleError: no plan fits into the budget.
        HfCkptError: an option is invalid, the model or device is unknown, or the model cannot be measured. Also if
            options such as `lora` or `dtype` are given for a model instead of a config.
    """
    fields = {"batch": batch, **asked}
    if isinstance(model, nn.Module):
        fixed = sorted(_OF_THE_MODEL & fields.keys())
        if fixed:
            raise HfCkptError(f"a live model has its own {', '.join(fixed)}: leave these out, or give its config.")
        found = find_blocks(model)
        attention = getattr(found.base.config, "_attn_implementation", None) or "sdpa"
        about_it = question({**fields, "model": found.model, "attention": attention})
        return Forecaster(about_it, on_progress, live=model).forecast()
    if isinstance(model, (str, Path)):
        return Forecaster(question({**fields, "model": str(model)}), on_progress).forecast()
    return Forecaster(question({**fields, "model": str(model.model_type)}), on_progress, config=model).forecast()


class Forecaster:
    """Answers a question, and similar ones. It measures each training once.

    Args:
        asked: the question.
        tell: called with a short message at the start of each slow part.
        config: the model's config, if the question does not name one that can be loaded.
        live: a live model, which has its own class, config, types and adapters.
        program: `axolotl` or `LLaMA-Factory` for answers in the keys of its files.
        frontier: whether forecasts have the plans for other budgets.

    Raises `HfCkptError` for an unknown device, and for options that do not go together.
    """

    def __init__(
        self,
        asked: Question,
        tell: Progress = lambda text: None,
        *,
        config: Any = None,
        live: nn.Module | None = None,
        program: str = "",
        frontier: bool = False,
    ) -> None:
        self.device = device_named(asked.device) if asked.device else this_device()
        self.asked = on_device(asked, self.device) if live is None else asked
        self._memory = self.device.memory_bytes or device_memory(0).total_bytes
        self.budget = budget_bytes(asked.budget, self._memory)
        self._tell, self._config, self._live = tell, config, live
        self._program, self._with_frontier = program, frontier
        self._models: dict[Question, ShallowModel] = {}
        self._costs: dict[Any, Costs] = {}
        self._usual: dict[str, Plan] = {}
        self._frontier: dict[int, Plan] = {}

    def answer(self) -> Forecast:
        """Return the forecast. If no plan fits, its rows are what fits with a change.

        Raises `HfCkptError` for a model that cannot be found or measured.
        """
        try:
            return self.forecast()
        except InfeasibleError as error:
            hints = (f"to lower it: {hint}" for hint in error.hints)
            said = self._said(error.floor_bytes, error.floor_bytes, error.budget_bytes, error.model, None)
            misfit = Forecast(fits=False, **said, parts=error.parts, notes=(*error.notes, *hints))
        self._tell("nothing fits; looking for what does")
        return dataclasses.replace(misfit, rows=tuple(self._nearest()))

    def forecast(self) -> Forecast:
        """Return the fastest plan within the question's budget, with what to compare it with.

        Raises `InfeasibleError` if no plan fits, and `HfCkptError` for a model that cannot be found or measured.
        """
        asked = self.asked
        self._tell("reading the model")
        candidates = self.candidates(asked)
        self._tell("comparing")
        plain = self.costs_of(asked, "full", "full")
        self._usual = {name: plan_of(plain, plain.uniform(action)) for name, action in (("none", KEEP), ("full", FULL))}
        self._frontier = frontier(candidates) if self._with_frontier else {}
        found = self.within(self.budget)
        (own, *others), notes = found.rows, found.notes
        rows = (self._planned(name, changes) for name, changes in self._own_changes())
        most_seconds = (own.step_seconds or 0.0) * (1 - _GAIN)
        faster = [row for row in rows if row and (row.step_seconds or math.inf) < most_seconds]
        for row in sorted(faster, key=lambda row: row.step_seconds or 0.0)[:1]:
            seconds = f"{format_seconds(row.step_seconds)} instead of {format_seconds(own.step_seconds)}"
            notes = (f"faster with {row.options}: {seconds} a step", *notes)
        if asked.max_batch:
            faster.append(self._largest_batch())
        return dataclasses.replace(found, rows=(own, *faster, *others), notes=notes)

    def within(self, budget: float | str) -> Forecast:
        """Return the fastest plan within a budget: bytes, a text such as "20GiB", or a share of the device.

        Raises `InfeasibleError` if no plan fits, and `UnitError` for an invalid budget.
        """
        asked, device, candidates = self.asked, self.device, self.candidates(self.asked)
        limit = budget_bytes(parse_budget(budget), self._memory)
        costs, chosen = choice_within(candidates, limit)
        plan, course = plan_of(costs, chosen, limit, device.name), timeline(costs, chosen)
        spec = words.spec_of(plan, limit, asked.host_budget)
        own = _row("this plan", plan, limit, spec=spec)
        (_, resident), *moving = course.parts().items()
        weights, state = costs.static.parameters, costs.static.optimizer
        parts = {"weights": weights, "optimizer state": state, "buffers and batch": resident - weights - state}
        _, of_head = moving[-1]
        notes = []
        if course.is_heads and plan.head == "full" and of_head > dict(moving)["kept for backward"]:
            size = format_bytes(of_head)
            notes = [f"{size} are of the head and its loss: no policy on blocks lowers these, but --head auto"]
        return Forecast(
            fits=own.peak_bytes <= (device.memory_bytes or own.peak_bytes),
            **self._said(own.peak_bytes, peak_of_least(candidates), limit, plan.model, own.tokens_per_second),
            parts={**parts, **dict(moving)},
            step_seconds=own.step_seconds,
            tokens_per_second=own.tokens_per_second,
            notes=(*notes, *costs.notes),
            rows=(own, *(_row(name, way, limit) for name, way in self._usual.items())),
            frontier=tuple(_row("planned", way, limit) for way in self._frontier.values()),
            write=words.to_write(asked, spec, self._program),
            plan=plan,
            costs=costs,
            timeline=course,
            within=self.within,
        )

    def _said(self, peak: int, floor: int, limit: int, model: str, tokens_per_second: float | None) -> dict[str, Any]:
        asked = self.asked
        answer = words.headline(peak, limit, self.device, tokens_per_second, asked.ranks)
        assumed = words.assumed(asked, model, self.device, limit)
        sizes = {"budget_bytes": limit, "peak_bytes": peak, "floor_bytes": floor}
        training = dataclasses.replace(asked, **OF_THE_PLAN)
        return {"answer": answer, "assumed": assumed, "workload": training, "device": self.device.name, **sizes}

    def _planned(self, name: str, changes: dict[str, Any]) -> Row | None:
        """Return the row of the fastest plan that fits with these changes of the question; None if there is none."""
        try:
            asked = dataclasses.replace(self.asked, **changes)
            plan = plan_within(self.candidates(asked), self.budget)
        except HfCkptError:
            return None
        options = " ".join(word for field, value in changes.items() for word in words_of(FIELDS[field], value))
        spec = words.spec_of(plan, self.budget, asked.host_budget)
        return _row(name, plan, self.budget, options, spec)

    def _own_changes(self) -> list[tuple[str, dict[str, Any]]]:
        """Changes of the plan that leave the training as it is: (name, field -> value)."""
        asked = self.asked
        found: list[tuple[str, dict[str, Any]]] = []
        if asked.head == "full" and self._can_chunk(asked) and not asked.sharded and asked.trainer is None:
            found.append(("plan with the head in chunks", {"head": "auto"}))
        if asked.host_budget is None and self.device.name != "cpu":
            found.append(("plan with host memory", {"host_budget": _HOST_BUDGET}))
        return found

    def _nearest(self) -> list[Row]:
        """Return what fits with one change, or if nothing does, with as many as have to come together."""
        asked, static = self.asked, next(iter(self._costs.values())).static
        own = self._own_changes()
        halves = [batch for batch in range(asked.batch // 2, 0, -1) if asked.batch % batch == 0]
        smaller = [{"batch": batch, "accumulation": asked.batch * asked.accumulation // batch} for batch in halves]
        changes: list[tuple[str, dict[str, Any]]] = []
        """The changes in the order of the table; of those with one name, the first that fits counts."""
        if static.always <= self.budget:  # otherwise, changes of activations cannot help
            changes = [*own, *(("smaller batch, more micro-steps", change) for change in smaller)]
            if asked.target_tokens is None:
                changes += [("shorter sequences", {"tokens": asked.tokens // part}) for part in (2, 4, 8)]
        if asked.prepared:
            changes.append(("without PEFT's preparation", {"kbit_preparation": False}))
        fewest = [] if asked.lora else [("LoRA", {"lora": 16})]
        if not asked.lora and static.parameters <= self.budget:
            changes += [("8-bit optimizer", {"optimizer": "adamw_8bit"}), *fewest]
        if not asked.load_in_4bit and not asked.sharded and asked.target_tokens is None:
            fewest = [("LoRA, base in 4 bits", {"lora": asked.lora or 16, "load_in_4bit": True})]
            changes += fewest
        rows: dict[str, Row] = {}
        for name, change in changes:
            if name not in rows and (row := self._planned(name, change)):
                rows[name] = row
        names: list[str] = []
        together: dict[str, Any] = {}
        for name, change in [*fewest, *(("smaller batch", change) for change in smaller[-1:]), *own]:
            names, together = [*names, name], {**together, **change}
            if not rows and len(names) > 1 and (row := self._planned(" + ".join(names), together)):
                rows[name] = row
        return [*rows.values()]

    def _largest_batch(self) -> Row:
        """Return the row of the largest batch that fits into the budget."""
        most = min(_LARGEST, MOST_TOKENS // self.asked.tokens)

        def peak(batch: int) -> int:
            return peak_of_least(self.candidates(dataclasses.replace(self.asked, batch=batch)))

        high = min(self.asked.batch, most)
        while high < most and peak(high) <= self.budget:
            high = min(2 * high, most)
        batch = bisect.bisect_right(range(1, high + 1), self.budget, key=peak)
        title = f"largest batch: {batch}"
        return self._planned(title, {"batch": batch}) or Row(title, "", 0, None, None, False)

    def candidates(self, asked: Question) -> tuple[Costs, ...]:
        """Return the costs from which the plan for a question is made."""
        costs = self.costs_of(asked, asked.head if self._can_chunk(asked) else "full", asked.mlp)
        apart = with_offloading(costs, *self.device.offloading, asked.host_budget)
        return (*apart, *(() if asked.sharded else in_segments(costs)))

    def _can_chunk(self, asked: Question) -> bool:
        return vocabulary_head(self._model(asked).base) is not None

    def _model(self, asked: Question) -> ShallowModel:
        # What a shallow model depends on: the training without its sizes.
        sizes: dict[str, Any] = {"batch": 1, "tokens": 1, "target_tokens": None, "accumulation": 1, "padded": False}
        key = dataclasses.replace(asked, **OF_THE_PLAN, optimizer="adamw", **sizes)
        if key not in self._models:
            self._models[key] = model_of_workload(asked, self._config, live=self._live)
        return self._models[key]

    def costs_of(self, asked: Question, head: int | str, mlp: int | str) -> Costs:
        """Return what each action of each block costs in a step, on one rank. It measures each training once.

        Args:
            asked: the training.
            head: how the head runs: `full`, `auto` or tokens a chunk.
            mlp: how feed-forwards run, likewise.

        Raises `HfCkptError` for a model that does not run on fake tensors.
        """
        key = dataclasses.replace(asked, **OF_THE_PLAN), head, mlp
        if key in self._costs:
            return self._costs[key]
        self._tell(f"measuring steps with {asked.batch} x {asked.tokens} tokens, on fake tensors")
        model = self._model(asked)
        costs = costs_of_model(model, asked, self.device, head=head, mlp=mlp)
        notes = tuple(_notes_of(costs, model, asked))
        if asked.ranks > 1 and not asked.sharded:  # DDP copies gradients into buckets of the same size, and keeps these
            static = dataclasses.replace(costs.static, buffers=costs.static.buffers + costs.static.gradients)
            costs = dataclasses.replace(costs, static=static)
        self._costs[key] = dataclasses.replace(costs, notes=notes)
        return self._costs[key]


def _notes_of(costs: Costs, model: ShallowModel, asked: Question) -> Iterator[str]:
    """Remarks on a training."""
    if costs.family == GENERIC:
        yield f"{costs.model} is of no known family: every block that can be checkpointed is planned for alike"
    if quantisation_of(model.base.config) == "mxfp4":
        yield "the checkpoint's MXFP4 weights are dequantised for training"
    if asked.trainer == "grpo":
        yield "completions are written before the step: the memory for that, of generate or vLLM, is not counted"
    stacked = [(math.prod(shape) * size, size) for shape, size, _ in model.tensors if len(shape) > 2]
    stacked_bytes = sum(total for total, _ in stacked)
    if asked.load_in_4bit and stacked_bytes > costs.static.parameters / 2:
        wide = ", and PEFT's preparation casts them to float32 (half with --no-kbit-preparation)"
        yield (
            f"{format_bytes(stacked_bytes)} of the weights are experts. Since transformers 5 they are stacked in one "
            f"tensor a layer, which bitsandbytes does not quantise{wide if stacked[0][1] == 4 else ''}"
        )
    if asked.ranks > 1:
        yield "what ranks send to each other takes time that is not predicted"


def _row(name: str, plan: Plan, limit: int, options: str = "", spec: Any = None) -> Row:
    predicted = plan.prediction
    assert predicted is not None
    peak_bytes, seconds = predicted.peak_bytes, predicted.step_seconds
    return Row(name, options, peak_bytes, seconds or None, predicted.tokens_per_second, peak_bytes <= limit, spec)
