"""Finds the nearest settings with which a training fits, and the largest batch or length that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hf_ckpt.costs.costs import Costs
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.words import spec_of
from hf_ckpt.planner.budgets import fits, peak_of_least, plan_within
from hf_ckpt.prediction.question import FIELDS, Question, words_of
from hf_ckpt.units import GIB

HOST_BUDGET = 64 * GIB
"""Host memory that is tried, in bytes."""
MOST = 4
"""The search ends after so many settings that fit, counting those with the same result as another."""
LARGEST = 2**20
"""Most sequences or tokens that the search for the largest number tries."""
_STEP = 64
"""Lengths are tried in multiples of this."""
Candidates = Callable[[Question], Sequence[Costs]]
"""Returns the costs from which the plan for a question is chosen."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A change of the question with which the training fits."""

    name: str
    """The change, in words."""
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
    """The settings that fit, those with the fewest changes first; empty if none of those tried does.

    Args:
        asked: the question, for which nothing fits.
        budget_bytes: the peak that is allowed.
        candidates: returns the costs of other settings.
        can_chunk: whether the head can run in chunks.
        can_move: whether there is host memory apart from the device's.
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
            found.append(setting)  # else one of its changes has no effect
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
    """The changes to try, in words and as fields: single changes first, then several."""
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
    """The largest smaller batch that fits and divides the one asked for, with its micro-steps; 1 if none fits."""
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
    """The setting with some changes. Raises `InfeasibleError` if it does not fit."""
    changed = _with(asked, changes)
    plan = plan_within(candidates(changed), budget_bytes)
    assert plan.prediction is not None
    options = [word for name, value in changes.items() for word in words_of(FIELDS[name], value)]
    spec = spec_of(plan, budget_bytes, changed.host_budget)
    peak, speed = plan.prediction.peak_bytes, plan.prediction.tokens_per_second
    return Setting(", ".join(words), " ".join(options), peak, speed, spec)


def _with(asked: Question, changes: Mapping[str, Any]) -> Question:
    return dataclasses.replace(asked, **changes)


def largest(peak_of: Callable[[int], int], budget: int, start: int, most: int = LARGEST) -> int:
    """The largest number whose peak is within the budget, 0 if that of 1 is not.

    Peaks are nearly linear in the number, so the next guess lies on the line through the last two. Peaks of plans are
    not always, because plans fill the budget: if a guess left more than half of the range, the next one halves it.

    Args:
        peak_of: returns the peak of a number, in bytes.
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
