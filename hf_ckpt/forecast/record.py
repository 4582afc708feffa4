"""What is predicted of a training, and its answers from what an earlier process has kept on disk. Free of torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_ckpt.errors import InfeasibleError
from hf_ckpt.forecast import cache
from hf_ckpt.forecast.words import assumed, headline, spec_of, task_of, to_write
from hf_ckpt.planner.alternatives import Alternative, frontier
from hf_ckpt.planner.budgets import choice_within, peak_of_least, plan_of
from hf_ckpt.prediction.costs import Costs
from hf_ckpt.prediction.devices import Device
from hf_ckpt.prediction.question import Question, Workload
from hf_ckpt.prediction.timeline import Timeline, worst_timeline
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import budget_bytes, parse_budget


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a training step is predicted to need and to take, and the plan for it."""

    asked: Question
    """What was asked, with the types that the device computes in."""
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
    max_batch: int | None = None
    """Most sequences of a micro-step that fit into the budget; None where that was not asked."""
    max_tokens: int | None = None
    """Most tokens of a sequence that fit into the budget; None where that was not asked."""

    @property
    def workload(self) -> Workload:
        """What is trained."""
        return self.asked.workload

    @property
    def peak_bytes(self) -> int:
        """The plan's predicted peak: most bytes of tensors alive at any moment of the step."""
        return self.timeline.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one optimizer step under the plan, with all its micro-steps."""
        return self.timeline.nanoseconds / 1e9

    @property
    def tokens_per_second(self) -> float | None:
        """Predicted speed under the plan."""
        return self.plan.prediction.tokens_per_second if self.plan.prediction else None

    @property
    def answer(self) -> str:
        """Whether it fits, in a sentence."""
        task = task_of(self.plan.model)
        return headline(self.peak_bytes, self.budget_bytes, self.device, self.tokens_per_second, task)

    @property
    def fits(self) -> bool:
        """Whether the plan fits into the memory of the device, which a budget may be larger than."""
        return self.device.memory_bytes is None or self.peak_bytes <= self.device.memory_bytes

    @property
    def floor_bytes(self) -> int:
        """The lowest peak that any plan has, in bytes."""
        return peak_of_least(self.candidates or self.costs)

    def within(self, budget: float | str) -> Forecast:
        """The forecast for another budget, from the same costs: nothing is traced again, which makes it quick.

        `max_batch` and `max_tokens`, which would have to be traced, are left out.

        Args:
            budget: the peak that is allowed: bytes, a text as "20GiB", or a share of the device ("80%" or 0.8).

        Raises `InfeasibleError` where no plan fits, and `UnitError` for what is not a budget.
        """
        candidates, limit = self.candidates or (self.costs,), bytes_allowed(parse_budget(budget), self.device)
        return forecast_within(
            limit, self.asked, self.device, candidates, self.usual, self.further, frontier=self.frontier
        )

    @property
    def spec(self) -> dict[str, Any]:
        """The checkpointing kwargs under which a training makes this plan, as `Spec.parse` reads them."""
        compiled = any(action.kind == "compiled" for action in self.costs.actions)
        return spec_of(self.plan, self.budget_bytes, self.asked.host_budget, compiled=compiled)

    def to_dict(self) -> dict[str, Any]:
        """The forecast in numbers, texts, lists and dicts, which JSON can hold; costs and timeline are left out."""
        ways = {name: getattr(self, name) for name in ("usual", "further", "frontier")}
        return {
            "fits": self.fits,
            "answer": self.answer,
            "assumed": assumed(self.workload, self.device),
            "write": to_write(self.workload, self.spec),
            "workload": dataclasses.asdict(self.workload),
            "device": dataclasses.asdict(self.device),
            "budget_bytes": self.budget_bytes,
            "static_bytes": dataclasses.asdict(self.costs.static),
            "plan": self.plan.to_dict(),
            "tokens_per_second": self.tokens_per_second,
            **{
                name: [{key: getattr(way, key) for key in ("name", "peak_bytes", "step_seconds")} for way in found]
                for name, found in ways.items()
            },
            "max_batch": self.max_batch,
            "max_seq": self.max_tokens,
        }


def forecast_within(
    limit: int,
    asked: Question,
    device: Device,
    candidates: tuple[Costs, ...],
    usual: tuple[Alternative, ...],
    further: tuple[Alternative, ...],
    **more: Any,
) -> Forecast:
    """The forecast with the fastest plan whose peak is at most `limit` bytes; the other arguments are its fields.

    Raises `InfeasibleError` where no plan fits.
    """
    costs, chosen = choice_within(candidates, limit)
    plan, timeline = plan_of(costs, chosen, limit, device.name), worst_timeline(costs, chosen)
    return Forecast(asked, device, limit, costs, plan, timeline, usual, candidates, further, **more)


def remembered(asked: Question) -> Forecast | None:
    """The forecast from what an earlier process kept of the same training, for any budget.

    None where nothing was kept, and where no plan fits: what would fit has to be looked for.
    """
    found = cache.load(asked)
    if found is None:
        return None
    known, device, candidates, usual, further = found
    known = dataclasses.replace(known, budget=asked.budget, frontier=asked.frontier)
    limit, others = bytes_allowed(asked.budget, device), tuple(frontier(candidates)) if asked.frontier else ()
    try:
        return forecast_within(limit, known, device, candidates, usual, further, frontier=others)
    except InfeasibleError:
        return None


def bytes_allowed(budget: float | None, device: Device) -> int:
    """A budget in bytes, as `budget_bytes`, on a device of the table or this machine's CPU."""
    memory = device.memory_bytes
    if memory is None:  # a CPU
        from hf_ckpt.measure.machine import device_memory

        memory = device_memory(0).total_bytes
    return budget_bytes(budget, memory)
