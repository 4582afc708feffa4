"""Answers `hf_ckpt.predict` and `hf-ckpt plan`: what a training would need and take, before it is run."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hf_ckpt.attach.around import own_trial
from hf_ckpt.attach.attach import paused
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.measure.machine import device_memory
from hf_ckpt.models.blocks import find_blocks, vocabulary_head
from hf_ckpt.models.families import learned_positions
from hf_ckpt.planner.alternatives import Alternative, frontier, further_options, segmented_options, usual_options
from hf_ckpt.planner.answers import Setting, headline, shares_of, spec_of, to_write
from hf_ckpt.planner.budgets import costs_behind, peak_of_least, plan_within
from hf_ckpt.planner.nearest import Asked, nearest_settings
from hf_ckpt.planner.options import cost_options, transformers_costs, ways_to_run, with_host_memory
from hf_ckpt.planner.shapes import rounded_up
from hf_ckpt.prediction.batches import sizes_of_batch, step_of_workload
from hf_ckpt.prediction.choices import MOST_TOKENS
from hf_ckpt.prediction.costs import Costs, Static
from hf_ckpt.prediction.devices import Device, device_named
from hf_ckpt.prediction.fsdp2 import with_shards
from hf_ckpt.prediction.generation import generation_bytes
from hf_ckpt.prediction.layout import layout_for
from hf_ckpt.prediction.machine import this_device
from hf_ckpt.prediction.optimizers import optimizer_bytes
from hf_ckpt.prediction.scaling import UnlikeError, between
from hf_ckpt.prediction.skeleton import Skeleton, Weights, skeleton_of
from hf_ckpt.prediction.timeline import Timeline, worst_timeline
from hf_ckpt.prediction.timings import ShallowModels, depths_of, measured
from hf_ckpt.prediction.trace import Step, actions_for, chunked_head, trace_costs
from hf_ckpt.prediction.workload import DTYPES, Workload, skeleton_of_workload
from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import budget_bytes, format_bytes, parse_bytes

Progress = Callable[[str], None]
"""Called with a few words before everything that takes a while."""
DEFAULT_SHARE = 0.9
"""Share of the device's memory that is the budget where none is given; the rest is for what no tensor shows."""
_UNITS = {"batch": "sequences", "tokens": "tokens"}
MOST = 2**20
"""Most sequences or tokens that are tried in search of the largest that fit."""
_UNTIMED = "what ranks send to each other takes time that is not predicted"
_MOST_BYTES = 2**60  # of weights and what belongs to them; the solver adds in numbers of 64 bits


@dataclasses.dataclass(frozen=True)
class Request:
    """What a forecast is made for beside the workload, and what else it shall answer."""

    device: str | None = None
    """Name of a row of the device table; None for this machine's."""
    budget: float | str | None = None
    """The peak that is allowed, as `Spec.budget`; None for `DEFAULT_SHARE`."""
    frontier: bool = False
    """Also find the fastest plans for other budgets."""
    max_batch: bool = False
    """Also find the most sequences of a micro-step that fit into the budget."""
    max_tokens: bool = False
    """Also find the longest sequences that fit into the budget."""
    measure: bool = False
    """Measure times on this machine, in place of those that the device table predicts."""
    head: int | str = "full"
    """As `Spec.head`: `auto` lets the plan run the head in chunks."""
    mlp: int | str = "full"
    """As `Spec.mlp`: `auto` lets the plan run the feed-forward of each block in chunks."""
    compiled: bool = False
    """Whether every block is compiled, as by `Spec.compile`."""
    host_budget: str | None = None
    """Host memory that offloading may use, as "64GiB"; None for no offloading."""
    nearest: bool = False
    """Where nothing fits, also find the nearest settings that do, for `InfeasibleError.nearest`."""
    quick: bool = False
    """Only plan: neither look for settings that fit where nothing does, nor price other ways to train."""
    lengths: tuple[int, ...] = ()
    """Tokens of each sequence of the data, to plan for every batch shape; `Workload.tokens` is the longest of them."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The batches of the data whose longest sequences are of nearly one length, and the plan for them."""

    tokens: int
    """Tokens of the longest sequence."""
    batches: int
    """How many of the batches, in the order of the data."""
    peak_bytes: int
    step_seconds: float
    recomputed: int
    """Blocks with another action than `keep`."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a training step is predicted to need and to take, and the plan for it."""

    workload: Workload
    device: Device
    """Whose memory and speed are assumed."""
    budget_bytes: int
    """The peak that was allowed."""
    costs: Costs
    """The costs that the plan was made from."""
    plan: Plan
    """The fastest plan within the budget."""
    timeline: Timeline
    """The memory of the step under the plan, for the micro-step with the largest peak."""
    usual: tuple[Alternative, ...]
    """What transformers itself offers, beginning with no checkpointing, and `segments`."""
    candidates: tuple[Costs, ...] = ()
    """The costs that plans for other budgets are made from."""
    further: tuple[Alternative, ...] = ()
    """What offloading and a head in chunks would need and take."""
    frontier: tuple[Alternative, ...] = ()
    """The fastest plans for other budgets, where they were asked for."""
    host_budget: str | None = None
    """Host memory that offloading may use."""
    buckets: tuple[Bucket, ...] = ()
    """Plans for the batch shapes of the data, where lengths were given."""
    max_batch: int | None = None
    """Most sequences of a micro-step that fit into the budget; None where that was not asked."""
    max_tokens: int | None = None
    """Most tokens of a sequence that fit into the budget; None where that was not asked."""

    @property
    def peak_bytes(self) -> int:
        """The plan's predicted peak: most bytes of tensors alive at any moment of the step."""
        return self.timeline.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one optimizer step under the plan, with all its micro-steps."""
        return self.timeline.nanoseconds / 1e9

    @property
    def answer(self) -> str:
        """Whether it fits, in a sentence."""
        speed = self.plan.prediction.tokens_per_second if self.plan.prediction else None
        return headline(self.peak_bytes, self.budget_bytes, self.device, speed)

    @property
    def floor_bytes(self) -> int:
        """The lowest peak that any plan has, in bytes."""
        return peak_of_least(self.candidates or self.costs)

    def within(self, budget: float | str) -> Forecast:
        """The forecast for another budget, from the same costs: nothing is traced again, which makes it quick.

        Answers of the first budget that would have to be traced (`buckets`, `max_batch`, `max_tokens`) are left out.

        Args:
            budget: the peak that is allowed: bytes, a text as "20GiB", or a share of the device ("80%" or 0.8).

        Raises `InfeasibleError` where no plan fits, and `UnitError` for what is no budget.
        """
        limit = _budget_bytes(budget, self.device)
        candidates = self.candidates or (self.costs,)
        plan = plan_within(candidates, limit, self.device.name)
        made_from, chosen = costs_behind(candidates, plan)
        return dataclasses.replace(
            self,
            budget_bytes=limit,
            costs=made_from,
            plan=plan,
            timeline=worst_timeline(made_from, chosen),
            buckets=(),
            max_batch=None,
            max_tokens=None,
        )

    @property
    def spec(self) -> dict[str, Any]:
        """The checkpointing kwargs under which a training makes this plan, as `Spec.parse` reads them."""
        compiled = any(action.kind == "compiled" for action in self.costs.actions)
        return spec_of(self.plan, self.budget_bytes, self.host_budget, compiled=compiled)

    def to_dict(self) -> dict[str, Any]:
        """The forecast in numbers, texts, lists and dicts, which JSON can hold; costs and timeline are left out."""
        return {
            "fits": True,
            "answer": self.answer,
            "write": to_write(self.workload, self.spec),
            "workload": dataclasses.asdict(self.workload),
            "device": dataclasses.asdict(self.device),
            "budget_bytes": self.budget_bytes,
            "static_bytes": dataclasses.asdict(self.costs.static),
            "plan": self.plan.to_dict(),
            "tokens_per_second": self.plan.prediction.tokens_per_second if self.plan.prediction else None,
            "usual": [_row(option) for option in self.usual],
            "further": [_row(option) for option in self.further],
            "frontier": [_row(option) for option in self.frontier],
            "buckets": [dataclasses.asdict(bucket) for bucket in self.buckets],
            "max_batch": self.max_batch,
            "max_seq": self.max_tokens,
        }


def _row(option: Alternative) -> dict[str, Any]:
    return {"name": option.name, "peak_bytes": option.peak_bytes, "step_seconds": option.step_seconds}


def predict(
    model: str | Path | nn.Module | Any,
    batch: int | Mapping[str, Any] = 1,
    *,
    device: str | None = None,
    budget: float | str | None = None,
    head: int | str = "full",
    mlp: int | str = "full",
    host_budget: str | None = None,
    compiled: bool = False,
    frontier: bool = False,
    on_progress: Progress | None = None,
    **workload: Any,
) -> Forecast:
    """Predict what a training step needs and takes, and find the fastest plan for it that fits: as `hf-ckpt plan` does.

        forecast = hf_ckpt.predict("llama-3.1-8b", 4, tokens=4096, lora=16, device="h100", budget="60GiB")
        hf_ckpt.install(model, forecast.plan)

    Args:
        model: a preset, a folder, a hub id, the path of a `config.json`, a transformers config, or a live model, plain
            or wrapped. Weights are neither needed nor read.
        batch: sequences of a micro-step, or one batch of the training: keyword arguments of the forward, of which only
            the shapes ([sequences, tokens] of `input_ids` and `labels`) and the attention mask count.
        device: a row of the device table; by default this machine's.
        budget: the peak that is allowed, as "20GiB", or as a share of the device ("80%" or 0.8); by default 90 %.
        head: as `Spec.head`: `auto` lets the plan run the head in chunks.
        mlp: as `Spec.mlp`: `auto` lets the plan run the feed-forward of each block in chunks.
        host_budget: host memory that offloading may use, as "64GiB"; None for no offloading.
        compiled: whether every block is compiled (`"compile": "blocks"`), so that the plan gives each a share.
        frontier: whether to also find the fastest plans for budgets from the lowest peak to that of no checkpointing.
        on_progress: called with a few words before everything that takes a while.
        workload: further fields of `Workload`, as `tokens`, `lora`, `dtype`, `autocast`, `optimizer`, `accumulation`.

    Raises `InfeasibleError` where no plan fits into the budget, and `HfCkptError` for a model or device that cannot be
    found, for a model that cannot be traced, and for adapters or types that are asked of a live model, which has its
    own.
    """
    request = Request(device, budget, frontier, head=head, mlp=mlp, compiled=compiled, host_budget=host_budget)
    if isinstance(batch, Mapping):
        workload = {**sizes_of_batch(batch), **workload}
    else:
        workload["batch"] = batch
    if isinstance(model, nn.Module):
        fixed = sorted(_OF_THE_MODEL & workload.keys())
        if fixed:
            raise HfCkptError(f"a live model has its own {', '.join(fixed)}: leave these out, or give its config.")
        _refuse_moved_weights(model)
        asked = Workload(model=find_blocks(model).model, **workload)
        with paused(model):
            return _Forecaster(asked, request, skeleton_of(model), on_progress).forecast()
    if isinstance(model, (str, Path)):
        return forecast(Workload(model=str(model), **workload), request, on_progress=on_progress)
    return forecast(Workload(model=str(model.model_type), **workload), request, config=model, on_progress=on_progress)


_OF_THE_MODEL = {
    *("lora", "lora_targets", "lora_dropout", "load_in_4bit", "load_in_8bit", "double_quant"),
    *("dtype", "attention", "architecture"),
}
"""Fields of `Workload` that a live model answers itself."""


def _refuse_moved_weights(model: nn.Module) -> None:
    """Raise `HfCkptError` for a model whose weights `device_map` has put into host memory or on a disk."""
    found = getattr(find_blocks(model).base, "hf_device_map", None) or {}
    away = [name for name, place in found.items() if str(place) in ("cpu", "disk")]
    if away and any(str(place) not in ("cpu", "disk") for place in found.values()):
        raise HfCkptError(
            f"`device_map` keeps weights of {', '.join(away[:3])}{' ...' if away[3:] else ''} in host memory or on a "
            "disk, from where they come again for every forward: such a training cannot be planned for. Take fewer "
            'bits (load_in_4bit), more devices, or a smaller model, and `device_map={"": 0}`.'
        )


def forecast(
    workload: Workload, asked: Request, *, config: Any = None, on_progress: Progress | None = None
) -> Forecast:
    """Plan for a workload, and answer what else is asked.

    Args:
        workload: what is trained.
        asked: device, budget, and further questions.
        config: of the model, in place of the one that the workload names.
        on_progress: called with a few words before everything that takes a while.

    Raises `InfeasibleError` where no plan fits into the budget, with the largest batch and the longest sequences that
    would, where these are asked for; and `HfCkptError` for a model or device that cannot be found, and for a model that
    cannot be traced.
    """
    if on_progress is not None:
        on_progress("reading the model")
    return _Forecaster(workload, asked, _skeleton(workload, asked, config), on_progress).forecast()


def _skeleton(workload: Workload, asked: Request, config: Any = None) -> Skeleton:
    """The skeleton of a workload's model, for the device that is asked about."""
    return skeleton_of_workload(workload, config, on_cpu=device_of(asked).name == "cpu")


def device_of(asked: Request) -> Device:
    """The device that is asked about: a row of the table, or this machine's."""
    return device_named(asked.device) if asked.device else this_device()


class _Forecaster:
    """Answers the questions about one workload, with what is the same for all of them."""

    def __init__(self, workload: Workload, asked: Request, skeleton: Skeleton, tell: Progress | None) -> None:
        self.workload, self.asked, self.skeleton = workload, asked, skeleton
        self.actions: dict[bool, tuple[Action, ...]] = {}
        """Whether blocks are compiled -> the actions that a plan chooses from."""
        self.generations: dict[tuple[int, int], int] = {}
        """(completions, tokens of each) -> bytes in which they are written."""
        self.tell: Progress = tell or (lambda text: None)
        self.device = device_of(asked)
        self.budget = _budget_bytes(asked.budget, self.device)
        if asked.compiled and asked.mlp != "full":
            raise HfCkptError("compiled blocks run their feed-forward as a whole: leave `mlp` or compiling out.")
        self.host_limit = None if asked.host_budget is None else parse_bytes(asked.host_budget)

    def forecast(self) -> Forecast:
        """Everything that was asked for."""
        step = step_of_workload(self.workload, self.skeleton)
        costs = self._costs(self.workload, "tracing", compiled=False)
        planned = self._costs(self.workload, "tracing compiled blocks") if self.asked.compiled else costs
        by_transformers = transformers_costs(costs, self.skeleton, step, self.device)
        ways: Sequence[Costs] = [
            planned if mlp == "full" else self._costs(self.workload, "tracing feed-forwards in chunks", mlp=mlp)
            for mlp in ways_to_run(self.asked.mlp)
        ]
        if by_transformers is not costs:
            by_transformers = self._shared(by_transformers, self.workload)
        if self.asked.measure:
            costs, by_transformers, ways = self._measured(costs, by_transformers, ways)
        candidates = self._candidates(ways, self.workload)
        max_batch = self._largest("batch") if self.asked.max_batch else None
        max_tokens = self._largest("tokens") if self.asked.max_tokens else None
        found = (("--batch", max_batch), ("--seq", max_tokens))
        plan = self._plan(candidates, [f"{name} {number} fits" for name, number in found if number])
        self.tell("comparing")
        made_from, chosen = costs_behind(candidates, plan)
        return Forecast(
            workload=self.workload,
            device=self.device,
            budget_bytes=self.budget,
            costs=made_from,
            plan=plan,
            timeline=worst_timeline(made_from, chosen),
            usual=(
                *usual_options(costs, self.device.host_bandwidth, by_transformers),
                *(() if self.workload.sharded else segmented_options(costs)),
            ),
            further=()
            if self.workload.sharded or self.asked.quick
            else _further(costs, () if self.asked.compiled else candidates, self.skeleton, step, self.device),
            frontier=tuple(frontier(candidates)) if self.asked.frontier else (),
            candidates=tuple(candidates),
            host_budget=self.asked.host_budget,
            buckets=tuple(self._buckets(candidates)) if self.asked.lengths else (),
            max_batch=max_batch,
            max_tokens=max_tokens,
        )

    def _buckets(self, longest: Sequence[Costs]) -> Iterator[Bucket]:
        """A plan for every bucket of lengths, from costs between those of the longest and of the shortest one."""
        workload = self.workload
        counts: collections.Counter[int] = collections.Counter()
        for tokens in shares_of(self.asked.lengths, workload.batch):
            counts[min(rounded_up(tokens, 3), workload.tokens)] += 1
        least = min(counts)
        high = tuple(costs for costs in longest if not costs.segments)
        low = high if least == workload.tokens else self._plannable(dataclasses.replace(workload, tokens=least))
        for tokens, batches in sorted(counts.items()):
            try:
                costs = between(low, high, tokens - least, max(1, workload.tokens - least)) if low is not high else high
            except UnlikeError:
                costs = self._plannable(dataclasses.replace(workload, tokens=tokens))
            plan = plan_within(costs, self.budget, self.device.name)
            assert plan.prediction is not None
            yield Bucket(tokens, batches, plan.prediction.peak_bytes, plan.prediction.step_seconds, len(plan.active()))

    def _plannable(self, workload: Workload) -> tuple[Costs, ...]:
        """The candidates for another length, without segments."""
        found = self._candidates([self._costs(workload, f"trying {workload.tokens} tokens")], workload)
        return tuple(costs for costs in found if not costs.segments)

    def _nearest(self) -> list[Setting]:
        """The settings that fit, by costs that are traced once for each model and shape."""
        others: dict[Any, tuple[_Forecaster, Costs]] = {}

        def candidates(workload: Workload, head: int | str, host_budget: str | None) -> tuple[Costs, ...]:
            key = dataclasses.replace(workload, accumulation=1, optimizer="sgd")
            if key not in others:
                same = dataclasses.replace(key, tokens=1, batch=1) == dataclasses.replace(
                    self.workload, accumulation=1, optimizer="sgd", tokens=1, batch=1
                )
                skeleton = self.skeleton if same else _skeleton(workload, self.asked)
                made = _Forecaster(workload, self.asked, skeleton, self.tell)
                made.actions = self.actions
                others[key] = made, made._costs(workload, f"trying {workload.tokens} tokens")
            made, costs = others[key]
            asked = dataclasses.replace(self.asked, head=head, host_budget=host_budget)
            other = _Forecaster(workload, asked, made.skeleton, self.tell)
            static = costs.static
            if workload.optimizer != made.workload.optimizer:
                device_type = "cpu" if self.device.name == "cpu" else "cuda"
                needed = optimizer_bytes(made.skeleton.weights, workload.optimizer, device_type)
                static = dataclasses.replace(static, optimizer=needed.state, step_bytes=needed.step)
            static = made._writing(static, workload)
            changed = dataclasses.replace(costs, static=static, accumulation=workload.accumulation)
            return other._candidates([changed], workload)

        whole = vocabulary_head(self.skeleton.base) is not None and self.workload.trainer is None
        asked = Asked(
            self.workload,
            self.asked.head,
            self.asked.host_budget,
            self.budget,
            can_chunk=whole and not self.workload.sharded,
            can_move=self.device.name != "cpu",
        )
        return nearest_settings(asked, candidates)

    def _costs(self, workload: Workload, what: str, *, compiled: bool | None = None, mlp: int | str = "full") -> Costs:
        """What the workload costs, with blocks in eager mode or compiled: as it was asked for, unless said."""
        self.tell(what)
        compiled = self.asked.compiled if compiled is None else compiled
        step = step_of_workload(workload, self.skeleton)
        if compiled not in self.actions:  # those of the first workload serve the others
            self.actions[compiled] = actions_for(self.skeleton, step, self.device, compiled=compiled)
        actions = self.actions[compiled]
        costs = self._shared(trace_costs(self.skeleton, step, self.device, actions=actions, mlp=mlp), workload)
        costs = dataclasses.replace(costs, static=self._writing(costs.static, workload))
        static = costs.static.beside
        if static > _MOST_BYTES:
            raise HfCkptError(
                f"{workload.model} cannot be planned for: its weights, gradients and optimizer state are "
                f"{format_bytes(static)}. Are the numbers in its config right?"
            )
        return costs

    def _writing(self, static: Static, workload: Workload) -> Static:
        """The same, with the memory in which the workload's completions are written."""
        key = workload.written, workload.tokens
        if key not in self.generations:
            self.generations[key] = generation_bytes(workload, self.skeleton, on_cpu=self.device.name == "cpu")
        return dataclasses.replace(static, generation=self.generations[key])

    def _shared(self, costs: Costs, workload: Workload) -> Costs:
        """The costs on one of the workload's ranks."""
        if workload.ranks == 1:
            return costs
        if workload.parallel == "ddp":  # which copies gradients into buckets of their size, and keeps these
            buckets = costs.static.gradients
            static = dataclasses.replace(costs.static, buffers=costs.static.buffers + buckets)
            return dataclasses.replace(costs, static=static, notes=(*costs.notes, _UNTIMED))
        weights = self.skeleton.weights
        count, own = sum(math.prod(shape) for shape, *_ in weights.tensors), DTYPES[workload.dtype].itemsize
        plain = Weights(tuple((shape, own, trained) for shape, _, trained in weights.tensors))
        needed = optimizer_bytes(plain, workload.optimizer, "cpu" if self.device.name == "cpu" else "cuda")
        layout = layout_for(self.skeleton, workload.ranks, own, needed, count)
        return dataclasses.replace(with_shards(costs, layout), notes=(*costs.notes, _UNTIMED))

    def _candidates(self, ways: Sequence[Costs], workload: Workload) -> tuple[Costs, ...]:
        if workload.sharded:  # a head in chunks and segments need whole parameters
            return with_host_memory(ways, self.device, self.host_limit)
        step = step_of_workload(workload, self.skeleton)
        head, host_limit = self.asked.head, self.host_limit
        return cost_options(ways, self.skeleton, step, self.device, head=head, host_limit=host_limit)

    def _measured(
        self, costs: Costs, by_transformers: Costs, ways: Sequence[Costs]
    ) -> tuple[Costs, Costs, Sequence[Costs]]:
        """All with times measured on this machine.

        `by_transformers` are the costs of transformers' own checkpointing, and `ways` those of compiled blocks, or with
        feed-forwards in chunks.
        """
        models = ShallowModels(self.workload)
        time = functools.partial(
            measured,
            on_progress=self.tell,
            depths=depths_of(costs),
            optimizer_seconds=models.optimizer_seconds,
        )
        timed = time(costs, models.step_seconds)
        step_seconds = functools.partial(models.step_seconds, put_on=own_trial)
        own = timed if by_transformers is costs else time(by_transformers, step_seconds)
        others = [
            timed if way == costs else time(way, functools.partial(models.step_seconds, mlp=way.mlp_tokens))
            for way in ways
        ]
        return timed, own, others

    def _peak_with(self, name: str, number: int) -> int:
        """The lowest peak that any plan has with another batch size or sequence length, in bytes."""
        changes: dict[str, Any] = {name: number}
        changed = dataclasses.replace(self.workload, **changes)
        mlps = ways_to_run(self.asked.mlp)
        ways = [self._costs(changed, f"trying {number} {_UNITS[name]}", mlp=mlp) for mlp in mlps]
        return peak_of_least(self._candidates(ways, changed))

    def _largest(self, name: str) -> int:
        """The largest `batch` or `tokens` that fits into the budget, 0 where none does."""
        most = (learned_positions(self.skeleton.base.config) or MOST) if name == "tokens" else MOST
        asked = self.workload
        beside = asked.batch if name == "tokens" else max(asked.tokens, asked.target_tokens or 0)
        most = min(most, MOST_TOKENS // beside)
        start = getattr(self.workload, name)
        return largest(lambda number: self._peak_with(name, number), self.budget, start, most)

    def _plan(self, candidates: Sequence[Costs], hints: list[str]) -> Plan:
        """The fastest plan that fits into the budget. Where none does, the error names a smaller batch that would."""
        batch, accumulation = self.workload.batch, self.workload.accumulation
        try:
            return plan_within(candidates, self.budget, self.device.name, hints)
        except InfeasibleError as error:
            if self.asked.nearest:
                error.nearest = tuple(self._nearest())
                raise
            if hints or batch == 1 or self.asked.quick:
                raise
            fitting = largest(lambda number: self._peak_with("batch", number), self.budget, 1, batch - 1)
            steps = -(-batch * accumulation // max(fitting, 1))
            hints = [f"--batch {fitting} --accum {steps} fits"] if fitting else []
            return plan_within(candidates, self.budget, self.device.name, hints)


def _budget_bytes(given: float | str | None, device: Device) -> int:
    """Return a budget that is given as bytes, as a share of the device, or not at all, in bytes."""
    memory = device.memory_bytes
    if memory is None:  # a CPU
        memory = device_memory(0).total_bytes
    return budget_bytes(DEFAULT_SHARE if given is None else given, memory)


def _further(
    costs: Costs, candidates: Sequence[Costs], skeleton: Skeleton, step: Step, device: Device
) -> tuple[Alternative, ...]:
    """What offloading and a head in chunks would need and take.

    `costs` have neither; where one of `candidates` has the head in chunks, it is not traced again.
    """
    in_chunks = next((found for found in candidates if found.head_tokens != "full"), None)
    if in_chunks is None and vocabulary_head(skeleton.base) is not None:
        in_chunks = chunked_head(costs, skeleton, step, device, "auto")
    chunked = None
    if in_chunks is not None:
        chunked = dataclasses.replace(costs, head=in_chunks.head, head_tokens=in_chunks.head_tokens)
    bandwidth = device.host_bandwidth if device.name != "cpu" else 0.0
    return tuple(further_options(costs, chunked, bandwidth, device.launch_nanoseconds))


def largest(peak_of: Callable[[int], int], budget: int, start: int, most: int = MOST) -> int:
    """The largest number whose peak is within the budget, 0 where that of 1 is not.

    Peaks grow nearly in proportion with the number, so that the next guess lies on the line through the last two. The
    peaks of plans do not always, since plans fill the budget: where a guess left more than half of the range, the next
    one halves it.

    Args:
        peak_of: gives the peak of a number, in bytes.
        budget: the peak that is allowed, in bytes.
        start: the first guess.
        most: the largest number to try.
    """
    halved = True
    low, low_peak = 0, 0
    high = min(start, most)
    while (high_peak := peak_of(high)) <= budget:
        low, low_peak = high, high_peak
        if high == most:
            return most
        high = min(2 * high, most)
    while high - low > 1:
        width = high - low
        share = (budget - low_peak) / max(1, high_peak - low_peak) if low and halved else 0.5
        middle = min(max(low + 1, low + int((high - low) * share)), high - 1)
        found = peak_of(middle)
        if found <= budget:
            low, low_peak = middle, found
        else:
            high, high_peak = middle, found
        halved = 2 * (high - low) <= width
    return low
