"""`hf_ckpt.predict`: predict the memory and time of a training step, and find the fastest plan that fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hf_ckpt.attach.attach import paused
from hf_ckpt.costs.costs import Costs
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.devices import Device, device_named, this_device
from hf_ckpt.forecast.nearest import LARGEST, Setting, largest, nearest_settings
from hf_ckpt.forecast.record import Forecast, bytes_allowed, forecast_within
from hf_ckpt.forecast.words import notes_of
from hf_ckpt.models.blocks import find_blocks, vocabulary_head
from hf_ckpt.models.families import learned_positions
from hf_ckpt.planner.alternatives import Alternative, frontier, further_options, segmented_options, usual_options
from hf_ckpt.planner.budgets import peak_of_least
from hf_ckpt.planner.options import cost_options, ways_to_run, with_host_memory
from hf_ckpt.prediction.batches import sizes_of_batch, step_of_workload
from hf_ckpt.prediction.fsdp2 import layout_for, with_shards
from hf_ckpt.prediction.optimizers import optimizer_bytes
from hf_ckpt.prediction.question import MOST_TOKENS, Question, Workload, question
from hf_ckpt.prediction.skeleton import Skeleton, Weights, refuse_moved_weights, skeleton_of
from hf_ckpt.prediction.trace import chunked_head, trace_costs
from hf_ckpt.prediction.workload import DTYPES, on_device, skeleton_of_workload
from hf_ckpt.spec.actions import FULL, KEEP
from hf_ckpt.units import format_bytes

Progress = Callable[[str], None]
"""Called with a short message at the start of each slow part."""
_UNTIMED = "what ranks send to each other takes time that is not predicted"
_MOST_BYTES = 2**60  # of weights, gradients and optimizer state; the solver adds 64-bit integers


def predict(
    model: str | Path | nn.Module | Any,
    batch: int | Mapping[str, Any] = 1,
    *,
    on_progress: Progress | None = None,
    **asked: Any,
) -> Forecast:
    """Predict the memory and time of a training step, and find the fastest plan within a budget.

        forecast = hf_ckpt.predict("llama-3.1-8b", 4, tokens=4096, lora=16, device="h100", budget="60GiB")
        hf_ckpt.install(model, forecast.plan)

    It runs a few shallow copies of the model on fake tensors, without weights and without a GPU, as `hf-ckpt plan`
    does.

    Args:
        model: a preset, a hub id, a folder, the path of a `config.json`, a transformers config, or a model, plain or
            wrapped.
        batch: sequences per micro-step; or a batch of the training, as keyword arguments of the forward. Of a batch,
            only the attention mask and the shapes of `input_ids` and `labels` ([sequences, tokens]) are used.
        on_progress: called with a short message at the start of each slow part.
        asked: options of `hf-ckpt plan`, which explains them. The training: `tokens`, `target_tokens`, `lora`,
            `lora_targets`, `lora_dropout`, `load_in_4bit`, `load_in_8bit`, `dtype`, `autocast`, `optimizer`,
            `accumulation`, `attention`, `padded`, `packing`, `trainer`, `ranks`, `parallel`. What to plan for:
            `device` (default: this machine), `budget` (bytes, "20GiB", "80%" or 0.8; default 90 % of the device),
            `host_budget`, `head`, `mlp`. `frontier=True` adds the fastest plans for other budgets.

    Raises:
        InfeasibleError: no plan fits into the budget.
        HfCkptError: an option is invalid, the model or device is unknown, or the model cannot be traced. Also if
            options such as `lora` or `dtype` are given for a model instead of a config.
    """
    sizes = sizes_of_batch(batch) if isinstance(batch, Mapping) else {"batch": batch}
    given = {**sizes, **asked}
    if isinstance(model, nn.Module):
        fixed = sorted(_OF_THE_MODEL & given.keys())
        if fixed:
            raise HfCkptError(f"a live model has its own {', '.join(fixed)}: leave these out, or give its config.")
        refuse_moved_weights(model)
        about_it = question({**given, "model": find_blocks(model).model})
        with paused(model):
            return Forecaster(about_it, on_progress, skeleton=skeleton_of(model)).forecast()
    if isinstance(model, (str, Path)):
        return forecast(question({**given, "model": str(model)}), on_progress)
    return Forecaster(question({**given, "model": str(model.model_type)}), on_progress, config=model).forecast()


_OF_THE_MODEL = {
    *("lora", "lora_targets", "lora_dropout", "load_in_4bit", "load_in_8bit", "double_quant", "kbit_preparation"),
    *("dtype", "attention", "architecture"),
}
"""Fields of `Workload` that a live model determines, but a config does not."""


def forecast(asked: Question, on_progress: Progress | None = None) -> Forecast:
    """Return the forecast for a question. Raises the errors of `Forecaster.forecast`."""
    return Forecaster(asked, on_progress).forecast()


def device_of(asked: Question) -> Device:
    """Return the device of a question: a row of the table, or this machine."""
    return device_named(asked.device) if asked.device else this_device()


class Forecaster:
    """Answers a question, and similar ones. It traces each model and shape once.

    Args:
        asked: the question.
        on_progress: called with a short message at the start of each slow part.
        config: the model's config, if the question does not name one that can be loaded.
        skeleton: of a live model, which has its own types and adapters.
    """

    def __init__(
        self,
        asked: Question,
        on_progress: Progress | None = None,
        *,
        config: Any = None,
        skeleton: Skeleton | None = None,
    ) -> None:
        self.device = device_of(asked)
        self.asked = asked if skeleton else on_device(asked, self.device)
        self.tell: Progress = on_progress or (lambda text: None)
        self.budget = bytes_allowed(asked.budget, self.device)
        self._config = config
        self._skeletons = {} if skeleton is None else {_model_of(self.asked): skeleton}
        self._traces: dict[Any, Costs] = {}

    def forecast(self) -> Forecast:
        """Return the fastest plan within the budget, with what to compare it with.

        Raises `InfeasibleError` if no plan fits, and `HfCkptError` for a model that cannot be found or traced.
        """
        asked, device = self.asked, self.device
        self.tell("reading the model")
        costs = self._traced(asked, "full")
        ways = self._ways(asked)
        candidates = self._in_ways(ways, asked)
        self.tell("comparing")
        segments = () if asked.sharded else segmented_options(costs)
        usual = (*usual_options(costs, device.host_bandwidth, self._under_transformers(asked)), *segments)
        further = () if asked.sharded else self._further(costs, candidates)
        return forecast_within(
            self.budget,
            asked,
            device,
            candidates,
            usual,
            further,
            frontier=tuple(frontier(candidates)) if asked.frontier else (),
            max_batch=self._largest("batch") if asked.max_batch else None,
            max_tokens=self._largest("tokens") if asked.max_tokens else None,
        )

    def nearest(self) -> list[Setting]:
        """Return similar settings that fit; empty if none of those tried does."""
        asked = self.asked
        whole = vocabulary_head(self._skeleton(asked).base) is not None and asked.trainer is None
        chunks, host = whole and not asked.sharded, self.device.name != "cpu"
        return nearest_settings(asked, self.budget, self.candidates, can_chunk=chunks, can_move=host)

    def candidates(self, asked: Question) -> tuple[Costs, ...]:
        """Return the costs from which the plan for a question is made."""
        return self._in_ways(self._ways(asked), asked)

    def _ways(self, asked: Question) -> list[Costs]:
        return [self._traced(asked, mlp) for mlp in ways_to_run(asked.mlp)]

    def _in_ways(self, ways: Sequence[Costs], asked: Question) -> tuple[Costs, ...]:
        if asked.sharded:  # a head in chunks and segments need whole parameters
            return with_host_memory(ways, self.device, asked.host_budget)
        skeleton = self._skeleton(asked)
        step = step_of_workload(asked, skeleton)
        return cost_options(ways, skeleton, step, self.device, head=asked.head, host_limit=asked.host_budget)

    def _skeleton(self, asked: Question) -> Skeleton:
        key = _model_of(asked)
        if key not in self._skeletons:
            on_cpu = self.device.name == "cpu"
            self._skeletons[key] = skeleton_of_workload(asked, self._config, on_cpu=on_cpu)
        return self._skeletons[key]

    def _traced(self, asked: Question, mlp: int | str) -> Costs:
        """Return the costs of a workload, with feed-forwards run as `mlp` says."""
        key = dataclasses.replace(asked.workload, accumulation=1), mlp
        if key not in self._traces:
            blocks = "blocks" if mlp == "full" else "feed-forwards in chunks"
            self.tell(f"tracing {blocks} with {asked.batch} x {asked.tokens} tokens")
            skeleton = self._skeleton(asked)
            step = step_of_workload(asked, skeleton)
            costs = self._shared(trace_costs(skeleton, step, self.device, mlp=mlp), asked)
            if costs.static.beside > _MOST_BYTES:
                raise HfCkptError(
                    f"{asked.model} cannot be planned for: its weights, gradients and optimizer state are "
                    f"{format_bytes(costs.static.beside)}. Are the numbers in its config right?"
                )
            notes = (*costs.notes, *notes_of(costs, skeleton, asked))
            self._traces[key] = dataclasses.replace(costs, notes=notes)
        return dataclasses.replace(self._traces[key], accumulation=asked.accumulation)

    def _under_transformers(self, asked: Question) -> Costs | None:
        """Return the costs of transformers' own checkpointing, if it changes more than which blocks are recomputed."""
        plain = self._skeleton(asked)
        skeleton = plain.switched_on()
        if skeleton is plain:
            return None
        costs = trace_costs(skeleton, step_of_workload(asked, skeleton), self.device, actions=(KEEP, FULL))
        return dataclasses.replace(self._shared(costs, asked), accumulation=asked.accumulation)

    def _shared(self, costs: Costs, asked: Question) -> Costs:
        """Return the costs on one rank."""
        if asked.ranks == 1:
            return costs
        if asked.parallel == "ddp":  # copies gradients into buckets of the same size, and keeps these
            static = dataclasses.replace(costs.static, buffers=costs.static.buffers + costs.static.gradients)
            return dataclasses.replace(costs, static=static, notes=(*costs.notes, _UNTIMED))
        skeleton, own = self._skeleton(asked), DTYPES[asked.dtype].itemsize
        count = sum(math.prod(shape) for shape, *_ in skeleton.weights.tensors)
        plain = Weights(tuple((shape, own, trained) for shape, _, trained in skeleton.weights.tensors))
        needed = optimizer_bytes(plain, asked.optimizer, "cpu" if self.device.name == "cpu" else "cuda")
        layout = layout_for(skeleton, asked.ranks, own, needed, count)
        return dataclasses.replace(with_shards(costs, layout), notes=(*costs.notes, _UNTIMED))

    def _largest(self, name: str) -> int:
        """Return the largest `batch` or `tokens` that fits into the budget; 0 if none does."""
        asked = self.asked
        most = (learned_positions(self._skeleton(asked).base.config) or LARGEST) if name == "tokens" else LARGEST
        beside = asked.batch if name == "tokens" else max(asked.tokens, asked.target_tokens or 0)

        def peak_of(number: int) -> int:
            changed: dict[str, Any] = {name: number}
            return peak_of_least(self.candidates(dataclasses.replace(asked, **changed)))

        return largest(peak_of, self.budget, getattr(asked, name), min(most, MOST_TOKENS // beside))

    def _further(self, costs: Costs, candidates: Sequence[Costs]) -> tuple[Alternative, ...]:
        """Return the peaks and times of offloading and of a head in chunks.

        `costs` have neither. If one of `candidates` has the head in chunks, that trace is used.
        """
        skeleton, device = self._skeleton(self.asked), self.device
        chunked = next((found for found in candidates if found.head_tokens != "full"), None)
        if chunked is None and vocabulary_head(skeleton.base) is not None:
            chunked = chunked_head(costs, skeleton, step_of_workload(self.asked, skeleton), device, "auto")
        if chunked is not None:
            chunked = dataclasses.replace(costs, head=chunked.head, head_tokens=chunked.head_tokens)
        bandwidth = device.host_bandwidth if device.name != "cpu" else 0.0
        return tuple(further_options(costs, chunked, bandwidth, device.launch_nanoseconds))


def _model_of(asked: Question) -> Workload:
    """Return what a skeleton depends on: the workload without its sizes."""
    return dataclasses.replace(
        asked.workload, batch=1, tokens=1, target_tokens=None, accumulation=1, optimizer="adamw", padded=False
    )
