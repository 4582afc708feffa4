"""`Forecast`: the predicted memory and time of a training step. This file does not import torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_ckpt.costs.costs import Costs
from hf_ckpt.costs.timeline import Timeline, worst_timeline
from hf_ckpt.forecast.devices import Device
from hf_ckpt.forecast.words import assumed, headline, spec_of, task_of, to_write
from hf_ckpt.planner.alternatives import Alternative
from hf_ckpt.planner.budgets import choice_within, peak_of_least, plan_of
from hf_ckpt.prediction.question import Question, Workload
from hf_ckpt.spec.plan import Plan
from hf_ckpt.units import budget_bytes, parse_budget


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The fastest plan within a budget, with its predicted memory and time. `hf_ckpt.predict` returns it.

    forecast = hf_ckpt.predict("llama-3.1-8b", 4, tokens=4096, lora=16, device="h100", budget="60GiB")
    print(forecast.answer)  # Fits: 59.9 of 79.2 GiB of an NVIDIA H100 80GB, 8,000 tokens a second
    forecast.plan.save("plan.json")
    forecast.within("50GiB").step_seconds  # another budget; takes milliseconds
    """

    asked: Question
    """The question. Types that the device cannot compute in are replaced."""
    device: Device
    """The device whose memory and speed are assumed."""
    budget_bytes: int
    """The peak that is allowed."""
    costs: Costs
    """The costs that the plan was made from."""
    plan: Plan
    """The fastest plan whose peak is within the budget."""
    timeline: Timeline
    """Memory over one step under the plan, for the micro-step with the largest peak."""
    usual: tuple[Alternative, ...]
    """The options of transformers (`none` first), and `segments`, each with its peak and step time."""
    candidates: tuple[Costs, ...] = ()
    """The costs from which plans for other budgets are made."""
    further: tuple[Alternative, ...] = ()
    """Offloading and the head in chunks, each with its peak and step time."""
    frontier: tuple[Alternative, ...] = ()
    """The fastest plans for other budgets; empty unless `frontier=True` was asked for."""
    max_batch: int | None = None
    """The largest number of sequences per micro-step within the budget; None if not asked for."""
    max_tokens: int | None = None
    """The largest number of tokens per sequence within the budget; None if not asked for."""

    @property
    def workload(self) -> Workload:
        """The training, without the device and the budget."""
        return self.asked.workload

    @property
    def peak_bytes(self) -> int:
        """Predicted peak under the plan: the most bytes of tensors alive at any moment of the step."""
        return self.timeline.peak_bytes

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of one optimizer step under the plan, with all its micro-steps."""
        return self.timeline.nanoseconds / 1e9

    @property
    def tokens_per_second(self) -> float | None:
        """Predicted tokens per second under the plan; None if tokens are not counted."""
        return self.plan.prediction.tokens_per_second if self.plan.prediction else None

    @property
    def answer(self) -> str:
        """One sentence that says whether the training fits."""
        task = task_of(self.plan.model)
        return headline(self.peak_bytes, self.budget_bytes, self.device, self.tokens_per_second, task)

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the device's memory. A budget may be larger than that."""
        return self.device.memory_bytes is None or self.peak_bytes <= self.device.memory_bytes

    @property
    def floor_bytes(self) -> int:
        """The lowest peak of any plan, in bytes."""
        return peak_of_least(self.candidates or self.costs)

    def within(self, budget: float | str) -> Forecast:
        """Return the forecast for another budget. It uses the same costs, so nothing is traced.

        `max_batch` and `max_tokens` are None in it.

        Args:
            budget: the peak that is allowed: bytes, a text such as "20GiB", or a share of the device ("80%" or 0.8).

        Raises `InfeasibleError` if no plan fits, and `UnitError` for an invalid budget.
        """
        candidates, limit = self.candidates or (self.costs,), bytes_allowed(parse_budget(budget), self.device)
        return forecast_within(
            limit, self.asked, self.device, candidates, self.usual, self.further, frontier=self.frontier
        )

    @property
    def spec(self) -> dict[str, Any]:
        """The `activation_checkpointing_kwargs` for a training with this budget."""
        return spec_of(self.plan, self.budget_bytes, self.asked.host_budget)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that can be written as JSON, without costs and timeline."""
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
    """Return the forecast with the fastest plan whose peak is at most `limit` bytes. Other arguments are its fields.

    Raises `InfeasibleError` if no plan fits.
    """
    costs, chosen = choice_within(candidates, limit)
    plan, timeline = plan_of(costs, chosen, limit, device.name), worst_timeline(costs, chosen)
    return Forecast(asked, device, limit, costs, plan, timeline, usual, candidates, further, **more)


def bytes_allowed(budget: float | None, device: Device) -> int:
    """A budget in bytes, as `budget_bytes`, on a device of the table or this machine's CPU."""
    memory = device.memory_bytes
    if memory is None:  # a CPU
        from hf_ckpt.measure.machine import device_memory

        memory = device_memory(0).total_bytes
    return budget_bytes(budget, memory)
