"""Finds what fits with one change of the question, and the largest batch or length that fits."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any

from hf_ckpt.costs.costs import Static
from hf_ckpt.forecast.answer import Row
from hf_ckpt.forecast.question import Question
from hf_ckpt.units import GIB

HOST_BUDGET = 64 * GIB
"""Host memory that is tried, in bytes."""
LARGEST = 2**20
"""Most sequences or tokens that the search for the largest number tries."""
_STEP = 64
"""Lengths are tried in multiples of this."""
Changes = dict[str, Any]
"""Field of a question -> its new value."""


def own_changes(asked: Question, *, can_chunk: bool, can_move: bool) -> dict[str, Changes]:
    """Changes of the plan that leave the training as it is, by their names: the head in chunks, and host memory."""
    chunks = {"plan with the head in chunks": {"head": "auto"}} if can_chunk and asked.head == "full" else {}
    moves = {"plan with host memory": {"host_budget": HOST_BUDGET}} if can_move and asked.host_budget is None else {}
    return {**chunks, **moves}


def nearest(
    asked: Question,
    static: Static,
    own: Mapping[str, Changes],
    planned: Callable[[str, Changes], Row | None],
    peak_of: Callable[[Changes], int],
    budget_bytes: int,
) -> list[Row]:
    """What fits with one change, or if nothing does, with as many as have to come together; possibly nothing.

    `planned` returns the row of the fastest plan with a change, None if none fits; `peak_of` the lowest peak with it.
    `static` is what the question needs whatever blocks do.
    """
    can_help = static.always <= budget_bytes  # otherwise, changes of activations cannot
    changes = {**own} if can_help else {}
    if asked.prepared:
        changes["without PEFT's preparation"] = {"kbit_preparation": False}
    sizes = [size for size in range(1, asked.batch) if asked.batch % size == 0]
    batches = [{"batch": size, "accumulation": asked.batch * asked.accumulation // size} for size in sizes]
    number = 0
    if can_help and sizes:
        number = largest(lambda number: peak_of(batches[number - 1]), budget_bytes, len(sizes), len(sizes))
    smaller = batches[max(number, 1) - 1] if sizes else {}
    changes |= {"smaller batch, more micro-steps": smaller} if smaller and can_help else {}
    if asked.lora is None and static.parameters <= budget_bytes:
        changes |= {"8-bit optimizer": {"optimizer": "adamw_8bit"}, "LoRA": {"lora": 16}}
    fewest = {} if asked.lora else {"LoRA": {"lora": 16}}
    if asked.bits is None and not asked.sharded and asked.target_tokens is None:
        fewest = {"LoRA, base in 4 bits": {"lora": asked.lora or 16, "load_in_4bit": True}}
        changes |= fewest
    rows = [row for name, change in changes.items() if (row := planned(name, change))]
    together: Changes = {}
    names: list[str] = []
    for name, change in {**fewest, "smaller batch": smaller, **own}.items():
        names, together = [*names, name] if change else names, {**together, **change}
        row = planned(" + ".join(names), together) if not rows and change and len(names) > 1 else None
        rows += [row] if row else []
    if can_help and len(rows) < 2 and asked.target_tokens is None and (most := (asked.tokens - 1) // _STEP):
        number = largest(lambda number: peak_of({"tokens": number * _STEP}), budget_bytes, most, most)
        row = planned("shorter sequences", {"tokens": number * _STEP}) if number else None
        rows += [row] if row else []
    return rows


def largest(peak_of: Callable[[int], int], budget_bytes: int, start: int, most: int) -> int:
    """The largest number up to `most` whose peak is within the budget, 0 if that of 1 is not; begins at `start`."""
    high = min(start, most)
    while high < most and peak_of(high) <= budget_bytes:
        high = min(2 * high, most)
    return bisect.bisect_right(range(1, high + 1), budget_bytes, key=peak_of)
