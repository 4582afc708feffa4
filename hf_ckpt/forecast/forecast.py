"""`hf_ckpt.predict`: predict the memory and time of a training step, and find the fastest plan that fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hf_ckpt.costs.costs import Costs, timeline, with_offloading
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.forecast import words
from hf_ckpt.forecast.answer import Forecast, Row
from hf_ckpt.forecast.batches import DTYPES, micro_step, sizes_of_batch
from hf_ckpt.forecast.devices import Device, device_named, this_device
from hf_ckpt.forecast.model import ShallowModel, model_of_workload, quantisation_of
from hf_ckpt.forecast.nearest import LARGEST, Changes, largest, nearest, own_changes
from hf_ckpt.forecast.question import FIELDS, MOST_TOKENS, Question, Workload, on_device, question, words_of
from hf_ckpt.forecast.ranks import Sharding
from hf_ckpt.forecast.run import CannotRunError, costs_of_model
from hf_ckpt.measure.machine import device_memory
from hf_ckpt.models.blocks import find_blocks, vocabulary_head
from hf_ckpt.models.families import GENERIC, learned_positions
from hf_ckpt.planner.alternatives import frontier, usual_options
from hf_ckpt.planner.budgets import choice_within, peak_of_least, plan_of, plan_within
from hf_ckpt.planner.segments import in_segments
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import budget_bytes, format_bytes, format_seconds, parse_budget

Progress = Callable[[str], None]
"""Called with a short message at the start of each slow part."""
_MOST_BLOCKS = 128
"""Most blocks that a model measured as a whole may have."""
_GAIN = 0.01
"""Share of time that a change of the question must save to be worth mentioning."""
_OF_THE_MODEL = {
    *("lora", "lora_targets", "lora_dropout", "load_in_4bit", "load_in_8bit", "double_quant", "kbit_preparation"),
    *("dtype", "attention", "architecture"),
}
"""Fields of `Workload` that a live model determines, but a config does not."""


def predict(
    model: str | Path | nn.Module | Any,
    batch: int | Mapping[str, Any] = 1,
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
        batch: sequences per micro-step; or a batch of the training, as keyword arguments of the forward. Of a batch,
            only the attention mask and the shapes of `input_ids` and `labels` ([sequences, tokens]) are used.
        on_progress: called with a short message at the start of each slow part.
        asked: options of `hf-ckpt plan`, by the names of the fields of `Question`, such as `tokens`, `lora`, `trainer`,
            `device` (default: this machine) and `budget` (bytes, "20GiB", "80%" or 0.8; default 90 % of the device).

    Raises:
        InfeasibleError: no plan fits into the budget.
        HfCkptError: an option is invalid, the model or device is unknown, or the model cannot be measured. Also if
            options such as `lora` or `dtype` are given for a model instead of a config.
    """
    sizes = sizes_of_batch(batch) if isinstance(batch, Mapping) else {"batch": batch}
    fields = {**sizes, **asked}
    if isinstance(model, nn.Module):
        fixed = sorted(_OF_THE_MODEL & fields.keys())
        if fixed:
            raise HfCkptError(f"a live model has its own {', '.join(fixed)}: leave these out, or give its config.")
        found = find_blocks(model)
        fields |= {
            "model": found.model,
            "attention": getattr(found.base.config, "_attn_implementation", None) or "sdpa",
        }
        return Forecaster(question(fields), on_progress, live=model).forecast()
    if isinstance(model, (str, Path)):
        return Forecaster(question({**fields, "model": str(model)}), on_progress).forecast()
    return Forecaster(question({**fields, "model": str(model.model_type)}), on_progress, config=model).forecast()


def forecast(asked: Question, tell: Progress = lambda text: None) -> Forecast:
    """Return the forecast for a question. Raises the errors of `Forecaster.forecast`."""
    return Forecaster(asked, tell).forecast()


def costs_of(asked: Question, model: ShallowModel, device: Device, head: int | str, mlp: int | str) -> Costs:
    """What each action of each block costs in a step, on one rank.

    Args:
        asked: the training.
        model: its model.
        device: gives the time of operations.
        head: how the head runs: `full`, `auto` or tokens a chunk.
        mlp: how feed-forwards run, likewise.

    Raises `CannotRunError` for a model that does not run on fake tensors.
    """
    sharding = None
    if asked.sharded:
        size = DTYPES[asked.dtype].itemsize
        sharding = Sharding(model, asked.ranks, size, accumulated=asked.accumulation > 1)
    costs = costs_of_model(model, micro_step(asked, model.base), device, head=head, mlp=mlp, sharding=sharding)
    notes = [*_notes_of(costs, model, asked)]
    if asked.ranks > 1:
        notes.append("what ranks send to each other takes time that is not predicted")
    if asked.ranks > 1 and not asked.sharded:  # DDP copies gradients into buckets of the same size, and keeps these
        static = dataclasses.replace(costs.static, buffers=costs.static.buffers + costs.static.gradients)
        costs = dataclasses.replace(costs, static=static)
    return dataclasses.replace(costs, notes=tuple(notes))


def _notes_of(costs: Costs, model: ShallowModel, asked: Workload) -> Iterator[str]:
    """Remarks on a model."""
    if costs.family == GENERIC:
        yield f"{costs.model} is of no known family: every block that can be checkpointed is planned for alike"
    if quantisation_of(model.base.config)[0] == "mxfp4":
        yield "the checkpoint's MXFP4 weights are dequantised for training"
    if asked.trainer == "grpo":
        yield "completions are written before the step: the memory for that, of generate or vLLM, is not counted"
    stacked = [(math.prod(shape) * size, size) for shape, size, _ in model.tensors if len(shape) > 2]
    stacked_bytes = sum(total for total, _ in stacked)
    if asked.bits is not None and stacked_bytes > costs.static.parameters / 2:
        wide = ", and PEFT's preparation casts them to float32 (half with --no-kbit-preparation)"
        yield (
            f"{format_bytes(stacked_bytes)} of the weights are experts. Since transformers 5 they are stacked in one "
            f"tensor a layer, which bitsandbytes does not quantise{wide if stacked[0][1] == 4 else ''}"
        )


class Forecaster:
    """Answers a question, and similar ones. It measures each training once.

    Args:
        asked: the question.
        tell: called with a short message at the start of each slow part.
        config: the model's config, if the question does not name one that can be loaded.
        live: a live model, which has its own class, config, types and adapters.
        program: `axolotl` or `LLaMA-Factory` for answers in the keys of its files.

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
    ) -> None:
        if asked.parallel != "ddp" and asked.ranks == 1:
            raise HfCkptError(f"--parallel {asked.parallel} shares work between ranks: give their number (--ranks).")
        if asked.sharded and asked.head != "full":
            raise HfCkptError("the head in chunks needs whole weights, which fsdp2 shards: leave --head out.")
        self.device = device_named(asked.device) if asked.device else this_device()
        self.asked = on_device(asked, self.device) if live is None else asked
        self.budget = bytes_allowed(asked.budget, self.device)
        self._tell = tell
        self._config, self._program = config, program if program in words.OWN_KEYS else ""
        self._models: dict[Workload, ShallowModel] = {}
        self._live = live
        self._costs: dict[Any, Costs] = {}
        self._usual: dict[str, Plan] = {}
        self._frontier: dict[int, Plan] = {}

    def answer(self, early: Callable[[Forecast], None] = lambda misfit: None) -> Forecast:
        """Return the forecast. If no plan fits, its rows are what fits with a change.

        Args:
            early: called with the forecast that nothing fits, before the search for what does.

        Raises `HfCkptError` for a model that cannot be found or measured.
        """
        try:
            return self.forecast()
        except InfeasibleError as error:
            peak, hints = error.floor_bytes, (f"to lower it: {hint}" for hint in error.hints)
            said = self._said(peak, peak, error.budget_bytes, error.model, None)
            misfit = Forecast(fits=False, **said, parts=error.parts, notes=(*error.notes, *hints))
        early(misfit)
        self._tell("looking for what fits")
        static = next(iter(self._costs.values())).static
        rows = nearest(self.asked, static, self._own_changes(), self._planned, self._peak_of, self.budget)
        return dataclasses.replace(misfit, rows=tuple(rows))

    def forecast(self) -> Forecast:
        """Return the fastest plan within the question's budget, with what to compare it with.

        Raises `InfeasibleError` if no plan fits, and `HfCkptError` for a model that cannot be found or measured.
        """
        asked = self.asked
        self._tell("reading the model")
        candidates = self.candidates(asked)
        self._tell("comparing")
        costs = self.costs_of(asked, "full", "full")
        self._usual = usual_options(costs, self.device.host_bandwidth)
        self._frontier = frontier(candidates) if asked.frontier else {}
        plain = self.within(self.budget)
        (own, *others), notes = plain.rows, plain.notes
        rows = (self._planned(name, changes) for name, changes in self._own_changes().items())
        most_seconds = (own.step_seconds or 0.0) * (1 - _GAIN)
        faster = [row for row in rows if row and (row.step_seconds or math.inf) < most_seconds]
        sizes = [self._largest(name) for name in ("batch", "tokens") if getattr(asked, f"max_{name}")]
        for row in sorted(faster, key=lambda row: row.step_seconds or 0.0)[:1]:
            seconds = f"{format_seconds(row.step_seconds)} instead of {format_seconds(own.step_seconds)}"
            notes = (f"faster with {row.options}: {seconds} a step", *notes)
        return dataclasses.replace(plain, rows=(own, *faster, *sizes, *others), notes=notes)

    def within(self, budget: float | str) -> Forecast:
        """Return the fastest plan within a budget: bytes, a text such as "20GiB", or a share of the device.

        Raises `InfeasibleError` if no plan fits, and `UnitError` for an invalid budget.
        """
        asked, device, candidates = self.asked, self.device, self.candidates(self.asked)
        limit = bytes_allowed(parse_budget(budget), device)
        costs, chosen = choice_within(candidates, limit)
        plan, course = plan_of(costs, chosen, limit, device.name), timeline(costs, chosen)
        spec = words.spec_of(plan, limit, asked.host_budget)
        peak_bytes = course.peak_bytes
        own = _row("this plan", plan, limit, spec=spec)
        others = [_row(name, way, limit) for name, way in self._usual.items()]
        for peak, way in self._frontier.items():
            others.append(_row("planned", way, limit, f"--budget {-(-peak // 2**20)}MiB"))
        (_, resident), *moving = course.parts().items()
        weights, state = costs.static.parameters, costs.static.optimizer
        parts = {"weights": weights, "optimizer state": state, "buffers and batch": resident - weights - state}
        _, of_head = moving[-1]
        notes = []
        if course.is_heads and plan.head == "full" and of_head > dict(moving)["kept for backward"]:
            size = format_bytes(of_head)
            notes = [f"{size} are of the head and its loss: no policy on blocks lowers these, but --head auto"]
        return Forecast(
            fits=peak_bytes <= (device.memory_bytes or peak_bytes),
            **self._said(peak_bytes, peak_of_least(candidates), limit, plan.model, own.tokens_per_second),
            parts={**parts, **dict(moving)},
            step_seconds=own.step_seconds,
            tokens_per_second=own.tokens_per_second,
            notes=(*notes, *costs.notes),
            rows=(own, *others),
            write=words.to_write(asked, spec, self._program),
            program=self._program,
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
        return {"answer": answer, "assumed": assumed, "workload": asked.workload, "device": self.device.name, **sizes}

    def _planned(self, name: str, changes: Changes) -> Row | None:
        """Return the row of the fastest plan that fits with these changes of the question; None if there is none."""
        try:
            asked = dataclasses.replace(self.asked, **changes)
            plan = plan_within(self.candidates(asked), self.budget)
        except HfCkptError:
            return None
        options = " ".join(word for field, value in changes.items() for word in words_of(FIELDS[field], value))
        spec = words.spec_of(plan, self.budget, asked.host_budget)
        return _row(name, plan, self.budget, options, spec)

    def _own_changes(self) -> dict[str, Changes]:
        chunks = self._can_chunk(self.asked) and not self.asked.sharded and self.asked.trainer is None
        return own_changes(self.asked, can_chunk=chunks, can_move=self.device.name != "cpu")

    def _peak_of(self, changes: Changes) -> int:
        return peak_of_least(self.candidates(dataclasses.replace(self.asked, **changes)))

    def _largest(self, name: str) -> Row:
        """Return the row of the largest `batch` or `tokens` that fits into the budget."""
        asked, most = self.asked, LARGEST
        if name == "tokens":
            most = learned_positions(self._model(asked).base.config) or LARGEST
        most = min(most, MOST_TOKENS // (asked.batch if name == "tokens" else asked.tokens))
        number = largest(lambda number: self._peak_of({name: number}), self.budget, getattr(asked, name), most)
        title = f"{'largest batch' if name == 'batch' else 'longest sequences'}: {number}"
        return self._planned(title, {name: number}) or Row(title, "", 0, None, None, False)

    def candidates(self, asked: Question) -> tuple[Costs, ...]:
        """Return the costs from which the plan for a question is made."""
        costs = self.costs_of(asked, asked.head if self._can_chunk(asked) else "full", asked.mlp)
        apart = with_offloading(costs, *self.device.offloading, asked.host_budget)
        return (*apart, *(() if asked.sharded else in_segments(costs)))

    def _can_chunk(self, asked: Question) -> bool:
        return vocabulary_head(self._model(asked).base) is not None

    def _model(self, asked: Question, *, whole: bool = False) -> ShallowModel:
        key = _model_of(asked)
        if whole or key not in self._models:
            on_cpu = self.device.name == "cpu"
            live = self._live
            self._models[key] = model_of_workload(asked, self._config, live=live, on_cpu=on_cpu, whole=whole)
        return self._models[key]

    def costs_of(self, asked: Question, head: int | str, mlp: int | str) -> Costs:
        """Return the result of `costs_of`, measured once for each training."""
        key = asked.workload, head, mlp
        if key not in self._costs:
            self._tell(f"measuring steps with {asked.batch} x {asked.tokens} tokens, on fake tensors")
            model = self._model(asked)
            try:
                self._costs[key] = costs_of(asked, model, self.device, head, mlp)
            except CannotRunError:  # some models look up the type of a block by its number
                if len(model.inside) > _MOST_BLOCKS:
                    raise
                self._costs[key] = costs_of(asked, self._model(asked, whole=True), self.device, head, mlp)
        return self._costs[key]


def _model_of(asked: Question) -> Workload:
    """Return what a shallow model depends on: the workload without its sizes."""
    sizes: dict[str, Any] = {"batch": 1, "tokens": 1, "target_tokens": None, "accumulation": 1, "padded": False}
    return dataclasses.replace(asked.workload, optimizer="adamw", **sizes)


def _row(name: str, plan: Plan, limit: int, options: str = "", spec: Any = None) -> Row:
    predicted = plan.prediction
    assert predicted is not None
    peak_bytes, seconds = predicted.peak_bytes, predicted.step_seconds
    return Row(name, options, peak_bytes, seconds or None, predicted.tokens_per_second, peak_bytes <= limit, spec)


def bytes_allowed(budget: float | None, device: Device) -> int:
    """A budget in bytes, as `budget_bytes`, on a device of the table or this machine's CPU."""
    return budget_bytes(budget, device.memory_bytes or device_memory(0).total_bytes)
