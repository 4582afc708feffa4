"""The bytes of an optimizer's state and of its step, from `optimizers.csv`. Does not import torch.

A row of the file has the name of an optimizer as Trainer's `optim` spells it, or a short one; how many tensors of a
parameter's size its state has; the bytes of one of their elements (those of the parameter's own type if empty; 1 for
bitsandbytes' 8-bit blocks, which have a float32 scale for every 256 elements, and are float32 below 4,096 elements);
and the temporary tensors of a step: as multiples of one parameter if it updates one after the other, as on a CPU, and
as multiples of all parameters if it updates all at once, as on an accelerator. Paged state counts as if it were on the
device. `tests/forecast/test_optimizers.py` compares the rows with real optimizers.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

_BLOCK_8BIT, _SMALL_8BIT = 256, 4096
with (Path(__file__).parent / "optimizers.csv").open(encoding="utf-8", newline="") as _file:
    OPTIMIZERS = {row["name"]: row for row in csv.DictReader(_file)}
"""Name -> its row."""


def optimizer_bytes(
    tensors: Sequence[tuple[tuple[int, ...], int, bool]], name: str, *, on_cpu: bool
) -> tuple[int, int]:
    """(bytes that an optimizer keeps from step to step, most temporary bytes of a step).

    Args:
        tensors: the parameters: (shape, bytes per element, whether it is trainable).
        name: of the optimizer, a row of the table.
        on_cpu: whether it steps on a CPU.
    """
    row = OPTIMIZERS[name]
    trained = [(shape, size) for shape, size, trainable in tensors if trainable]
    if row["states"] == "factored":  # Adafactor: float32 means of rows and of columns, and one parameter in float32
        means = [4 * _means(shape) for shape, _ in trained]
        left = [4 * math.prod(shape) for shape, _ in trained]
        needs = [
            (2 if size == 4 else 4) * copy + mean for (_, size), copy, mean in zip(trained, left, means, strict=True)
        ]
        return sum(means), _of_one_by_one(needs, left)
    states, each, loop = int(row["states"]), int(row["state_bytes"] or 0), int(row["loop"])
    state = sum(states * _bytes_of(math.prod(shape), each or size) for shape, size in trained)
    left = [math.prod(shape) * size for shape, size in trained]
    if not on_cpu:
        return state, int(row["foreach"]) * sum(left)
    return state, _of_one_by_one([loop * size for size in left], left) if loop else 0


def _of_one_by_one(needs: Sequence[int], left: Sequence[int]) -> int:
    """Most temporary bytes if parameters are updated one after the other: each update needs some, and variables still
    hold one tensor of the parameter before."""
    return max((now + before for now, before in zip(needs, [0, *left], strict=False)), default=0)


def _bytes_of(elements: int, each: int) -> int:
    """Bytes of one tensor of the state; 8-bit blocks have scales."""
    if each != 1:
        return elements * each
    return 4 * elements if elements < _SMALL_8BIT else elements + 4 * -(-elements // _BLOCK_8BIT)


def _means(shape: tuple[int, ...]) -> int:
    """Elements of the means of a parameter's rows and columns; a vector has one for each element."""
    size = math.prod(shape)
    return size if len(shape) < 2 else size // shape[-1] + size // shape[-2]
