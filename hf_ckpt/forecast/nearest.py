"""Finds the settings nearest to those asked for with which a training fits, and the largest number that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.words import spec_of
from hf_ckpt.planner.budgets import fits, peak_of_least, plan_within
from hf_ckpt.prediction.costs import Costs
from hf_ckpt.prediction.question import FIELDS, Question, words_of
from hf_ckpt.units import GIB

HOST_BUDGET = 64 * GIB
"""Host memory that is tried, in bytes."""
MOST = 4
"""Settings that fit, with those that change nothing more than others, after which the search ends."""
LARGEST = 2**20
"""Most sequences or tokens that are tried in search of the largest that fit."""
_STEP = 64
"""Lengths are tried in multiples of this."""
Candidates = Callable[[Question], Sequence[Costs]]
"""The costs that a plan for a question is chosen from."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A change of what was asked with which a training fits."""

    name: str
    """What is changed, in words."""
    options: str
    """The change as options of `hf-ckpt plan`."""
    peak_bytes: int
    """Most bytes of tensors alive at any moment of a step."""
    tokens_per_second: float | None
    spec: Mapping[str, Any]
    """The checkpointing kwargs to write."""


def nearest_settings(
    asked: Question, budget_bytes: int, candidates: Candidates, *, can_chunk: bool, can_move: bool
) -> list[Setting]:
    """The settings that fit, those with the fewest changes first; empty if none of those that are tried does.

    Args:
        asked: what does not fit.
        budget_bytes: the peak that is allowed.
        candidates: gives the costs of other settings.
        can_chunk: whether the head can run in chunks.
        can_move: whether there is host memory beside the device.
    """
    found: list[Setting] = []
    fitting = 0
    for words, changes in _changes(asked, can_chunk, can_move):
        if fitting == MOST:
            break
        try:
            if "batch" in changes:
                changes = {**changes, **_largest_batch(asked, changes, budget_bytes, candidates)}
                words = (f"batch {changes['batch']} with accumulation", *words)
            setting = _setting(asked, words, changes, budget_bytes, candidates)
        except HfCkptError:
            continue
        fitting += 1
        if all((setting.peak_bytes, setting.spec) != (other.peak_bytes, other.spec) for other in found):
            found.append(setting)  # else one of its changes changes nothing
    can_shorten = fitting < MOST and asked.target_tokens is None and asked.tokens >= 2 * _STEP
    if can_shorten and fits(candidates(_with(asked, {"tokens": _STEP})), budget_bytes):
        tokens = _STEP * largest(
            lambda number: peak_of_least(candidates(_with(asked, {"tokens": number * _STEP}))),
            budget_bytes,
            asked.tokens // _STEP - 1,
            asked.tokens // _STEP - 1,
        )
        shorter = _setting(asked, ("fewer tokens",), {"tokens": tokens}, budget_bytes, candidates)
        found.insert(min(len(found), 2), shorter)
    return found


def _changes(asked: Question, can_chunk: bool, can_move: bool) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """What is tried, in words and as fields: one change first, then several."""
    bases: list[tuple[str, dict[str, Any]]] = [("", {})]
    if asked.batch > 1:
        bases.append(("", {"batch": 1, "accumulation": asked.batch * asked.accumulation}))
    if asked.lora is None:
        if "8bit" not in asked.optimizer:
            bases.append(("8-bit optimizer", {"optimizer": "adamw_8bit"}))
        bases.append(("LoRA", {"lora": 16}))
        if not asked.sharded and asked.target_tokens is None:
            bases.append(("LoRA, base in 4 bits", {"lora": 16, "load_in_4bit": True}))
    elif asked.bits is None and not asked.sharded:
        bases.append(("base in 4 bits", {"load_in_4bit": True}))
    chunks = [("", {}), ("head in chunks", {"head": "auto"})][: 1 + (can_chunk and asked.head == "full")]
    moves = [("", {}), ("host memory", {"host_budget": HOST_BUDGET})][: 1 + (can_move and asked.host_budget is None)]
    ways = [(*chunk, *move) for move in moves for chunk in chunks]  # neither, chunks, host memory, both
    for name, base in bases:
        for chunked, chunk, moved, move in ways:
            changes = {**base, **chunk, **move}
            if changes:
                yield tuple(filter(None, (name, chunked, moved))), changes


def _largest_batch(
    asked: Question, changes: Mapping[str, Any], budget_bytes: int, candidates: Candidates
) -> dict[str, int]:
    """The largest batch below the one asked for that fits and divides it, 1 where none does, with its micro-steps."""
    sizes = [size for size in range(1, asked.batch) if asked.batch % size == 0]

    def accumulated(size: int) -> dict[str, int]:
        return {"batch": size, "accumulation": asked.batch * asked.accumulation // size}

    while len(sizes) > 1:
        middle = len(sizes) // 2
        fitting = fits(candidates(_with(asked, {**changes, **accumulated(sizes[middle])})), budget_bytes)
        sizes = sizes[middle:] if fitting else sizes[:middle]
    return accumulated(sizes[0])


def _setting(
    asked: Question, words: Sequence[str], changes: Mapping[str, Any], budget_bytes: int, candidates: Candidates
) -> Setting:
    """The setting that some changes make. Raises `InfeasibleError` if it does not fit."""
    changed = _with(asked, changes)
    plan = plan_within(candidates(changed), budget_bytes)
    assert plan.prediction is not None
    options = [word for name, value in changes.items() for word in words_of(FIELDS[name], value)]
    spec = spec_of(plan, budget_bytes, changed.host_budget, compiled=changed.compiled)
    peak, speed = plan.prediction.peak_bytes, plan.prediction.tokens_per_second
    return Setting(", ".join(words), " ".join(options), peak, speed, spec)


def _with(asked: Question, changes: Mapping[str, Any]) -> Question:
    return dataclasses.replace(asked, **changes)


def largest(peak_of: Callable[[int], int], budget: int, start: int, most: int = LARGEST) -> int:
    """The largest number whose peak is within the budget, 0 if that of 1 is not.

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
