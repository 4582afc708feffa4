"""The bytes of an optimizer's state and of its step, from `optimizers.csv`. Does not import torch.

A row of the file has the name of an optimizer as Trainer's `optim` spells it, or a short one; how many tensors of a
parameter's size its state has; the bytes of one of their elements (those of the parameter's own type if empty; 1 for
bitsandbytes' 8-bit blocks, which have a float32 scale for every 256 elements, and are float32 below 4,096 elements);
the temporary tensors of a step that updates all parameters at once, as multiples of these; and, for a short name, what
TrainingArguments call it. Paged state counts as if it were on the device. `tests/forecast/test_optimizers.py` compares
each row with the optimizer that a Trainer makes of it.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path

with Path(__file__).with_suffix(".csv").open(encoding="utf-8") as _file:
    OPTIMIZERS = {row["name"]: row for row in csv.DictReader(_file)}
"""Name -> its row."""


def training_arguments(name: str) -> dict[str, str]:
    """Return the keys of `TrainingArguments` that choose the optimizer of a row: `optim`, and perhaps `optim_args`."""
    optim, _, arguments = (OPTIMIZERS[name]["optim"] or name).partition(" ")
    return {"optim": optim, "optim_args": arguments} if arguments else {"optim": optim}


def optimizer_bytes(tensors: Iterable[tuple[tuple[int, ...], int, bool]], name: str) -> tuple[int, int]:
    """(bytes that an optimizer keeps from step to step, most temporary bytes of a step).

    Args:
        tensors: the parameters: (shape, bytes per element, whether it is trainable).
        name: of the optimizer, a row of the table.
    """
    row = OPTIMIZERS[name]
    trained = [(shape, size) for shape, size, trainable in tensors if trainable]
    if row["states"] == "factored":
        return _adafactor_bytes(trained)
    states = int(row["states"])
    element_bytes = int(row["state_bytes"] or 0)
    state = sum(states * _bytes_of(math.prod(shape), element_bytes or size) for shape, size in trained)
    return state, int(row["temporary"]) * sum(math.prod(shape) * size for shape, size in trained)


def _adafactor_bytes(trained: Iterable[tuple[tuple[int, ...], int]]) -> tuple[int, int]:
    """The same for Adafactor, which keeps float32 means of rows and of columns, and updates one parameter after the
    other, in float32. Its variables still hold one such copy of the parameter before."""
    state = 0
    temporary = 0
    before = 0
    for shape, size in trained:
        elements = math.prod(shape)
        # Factored means need two dimensions; a vector has one mean for each element (transformers/optimization.py).
        means = 4 * elements if len(shape) < 2 else 4 * (elements // shape[-1] + elements // shape[-2])
        copies = 2 if size == 4 else 4  # 16-bit parameters and gradients are cast to float32 first
        state += means
        temporary = max(temporary, 4 * elements * copies + means + before)
        before = 4 * elements
    return state, temporary


def _bytes_of(elements: int, element_bytes: int) -> int:
    """Bytes of one tensor of the state; 8-bit blocks have scales."""
    if element_bytes != 1:
        return elements * element_bytes
    # `min_8bit_size` of bitsandbytes' optimizers (bitsandbytes/optim): smaller tensors have a state in 32 bits.
    return 4 * elements if elements < 4096 else elements + 4 * -(-elements // 256)
