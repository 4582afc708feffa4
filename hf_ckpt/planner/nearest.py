"""Finds the settings nearest to those asked for with which a training fits, each by a plan of its own.

Costs are traced once for each model (16 bits, 4 bits, adapters) and once more for a short length and a batch of one;
those of lengths and batches between lie on the line through both, as in training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.planner.answers import Setting, spec_of
from hf_ckpt.planner.budgets import peak_of_least, plan_within
from hf_ckpt.prediction.costs import Costs
from hf_ckpt.prediction.scaling import UnlikeError, between
from hf_ckpt.prediction.workload import Workload

HOST_BUDGET = "64GiB"
"""Host memory that is tried."""
MOST = 4
"""Settings that fit, after which the search ends; those that change nothing are among them, and are not told."""
_STEP = 64
"""Lengths are tried in multiples of this."""

Candidates = Callable[[Workload, int | str, str | None], tuple[Costs, ...]]
"""(what is trained, how the head runs, host memory) -> the costs to plan with."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What does not fit."""

    workload: Workload
    head: int | str
    host_budget: str | None
    budget_bytes: int
    can_chunk: bool
    """Whether the head can run in chunks."""
    can_move: bool
    """Whether there is host memory beside the device."""


@dataclasses.dataclass(frozen=True)
class _Change:
    """A change that may be enough."""

    name: str
    options: str
    workload: Workload
    head: int | str
    host_budget: str | None


def nearest_settings(asked: Asked, candidates: Candidates) -> list[Setting]:
    """The settings that fit, those with the fewest changes first; empty where none of those that are tried does.

    Args:
        asked: what does not fit.
        candidates: gives the costs of other settings.
    """
    found: list[Setting] = []
    fitting = 0
    for change in _changes(asked):
        if fitting == MOST:
            break
        try:
            setting = _setting(*_largest_batch(change, asked, candidates), asked)
        except HfCkptError:
            continue
        fitting += 1
        if all((setting.peak_bytes, setting.spec) != (other.peak_bytes, other.spec) for other in found):
            found.append(setting)  # one change more that changes nothing is none
    if fitting < MOST:
        shorter = _fewer_tokens(asked, candidates)
        if shorter is not None:
            found.insert(min(len(found), 2), shorter)
    return found


def _changes(asked: Asked) -> Iterator[_Change]:
    """What is tried: one change first, then several."""
    start = asked.workload
    bases: list[tuple[str, str, Workload]] = [("", "", start)]
    if start.batch > 1:
        bases.append(("", "", _accumulated(start, 1)))
    if start.lora is None:
        if "8bit" not in start.optimizer:
            bases.append(
                ("8-bit optimizer", "--optimizer adamw_8bit", dataclasses.replace(start, optimizer="adamw_8bit"))
            )
        small = dataclasses.replace(start, lora=16, optimizer=start.optimizer)
        bases.append(("LoRA", "--lora 16", small))
        if not start.sharded and start.target_tokens is None:
            bases.append(
                ("LoRA, base in 4 bits", "--lora 16 --load-in-4bit", dataclasses.replace(small, load_in_4bit=True))
            )
    elif start.bits is None and not start.sharded:
        bases.append(("base in 4 bits", "--load-in-4bit", dataclasses.replace(start, load_in_4bit=True)))
    ways: list[tuple[str, str, int | str, str | None]] = [("", "", asked.head, asked.host_budget)]
    chunks, host = asked.can_chunk and asked.head == "full", asked.can_move and asked.host_budget is None
    if chunks:
        ways.append(("head in chunks", "--head auto", "auto", asked.host_budget))
    if host:
        ways.append(("host memory", f"--host-budget {HOST_BUDGET}", asked.head, HOST_BUDGET))
    if chunks and host:
        ways.append(("head in chunks, host memory", f"--head auto --host-budget {HOST_BUDGET}", "auto", HOST_BUDGET))
    for name, options, workload in bases:
        for how, more_options, head, host_budget in ways:
            if name or how or workload is not start:
                words = ", ".join(filter(None, (name, how)))
                yield _Change(words, f"{options} {more_options}".strip(), workload, head, host_budget)


def _accumulated(workload: Workload, batch: int) -> Workload:
    """The same sequences a step, `batch` of them at a time."""
    return dataclasses.replace(workload, batch=batch, accumulation=workload.batch * workload.accumulation // batch)


def _largest_batch(change: _Change, asked: Asked, candidates: Candidates) -> tuple[_Change, tuple[Costs, ...]]:
    """The change and its costs; where it makes batches smaller, with the largest that fits and leaves no remainder."""
    start, least = asked.workload, change.workload

    def costs_at(workload: Workload) -> tuple[Costs, ...]:
        return candidates(workload, change.head, change.host_budget)

    low = costs_at(least)
    if least.batch == start.batch:
        return change, low
    batch, fitting = least.batch, low
    if peak_of_least(low) <= asked.budget_bytes:
        high = costs_at(dataclasses.replace(start, accumulation=max(2, start.accumulation)))
        for smaller in (size for size in range(start.batch // 2, 1, -1) if start.batch % size == 0):
            try:
                costs = between(low, high, smaller - 1, start.batch - 1)
            except UnlikeError:
                costs = costs_at(_accumulated(start, smaller))
            if peak_of_least(costs) <= asked.budget_bytes:
                batch, fitting = smaller, costs
                break
    workload = _accumulated(start, batch)
    name = ", ".join(filter(None, (f"batch {batch} with accumulation", change.name)))
    options = f"--batch {batch} --accum {workload.accumulation} {change.options}".strip()
    return dataclasses.replace(change, name=name, options=options, workload=workload), fitting


def _setting(change: _Change, costs: Sequence[Costs], asked: Asked) -> Setting:
    """The setting that a change makes. Raises `InfeasibleError` where it does not fit."""
    plan = plan_within(costs, asked.budget_bytes)
    assert plan.prediction is not None
    spec = spec_of(plan, asked.budget_bytes, change.host_budget)
    speed = plan.prediction.tokens_per_second
    return Setting(change.name, change.options, plan.prediction.peak_bytes, speed, spec)


def _fewer_tokens(asked: Asked, candidates: Candidates) -> Setting | None:
    """The longest sequences that fit with nothing else changed; None where there are none of 64 tokens."""
    start = asked.workload
    if start.target_tokens is not None or start.tokens < 2 * _STEP:
        return None

    def costs_at(tokens: int) -> tuple[Costs, ...]:
        changes: dict[str, Any] = {"tokens": tokens}
        found = candidates(dataclasses.replace(start, **changes), asked.head, asked.host_budget)
        return tuple(costs for costs in found if not costs.segments)

    low, high = costs_at(_STEP), costs_at(start.tokens)
    if peak_of_least(low) > asked.budget_bytes:
        return None
    least, most = 1, start.tokens // _STEP
    fitting = low
    while least < most - 1:
        middle = (least + most) // 2
        try:
            costs = between(low, high, (middle - 1) * _STEP, start.tokens - _STEP)
        except UnlikeError:
            costs = costs_at(middle * _STEP)
        if peak_of_least(costs) <= asked.budget_bytes:
            least, fitting = middle, costs
        else:
            most = middle
    tokens = least * _STEP
    change = _Change("fewer tokens", f"--seq {tokens}", start, asked.head, asked.host_budget)
    try:
        return _setting(change, fitting, asked)
    except InfeasibleError:
        return None
