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
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from hf_ckpt.errors import HfCkptError

_BLOCK_8BIT, _SMALL_8BIT = 256, 4096


@dataclasses.dataclass(frozen=True)
class OptimizerBytes:
    """What an optimizer needs in addition to weights and gradients, in bytes."""

    state: int = 0
    """The tensors that it keeps from step to step."""
    step: int = 0
    """Most temporary bytes of a step, in addition to the state."""


with (Path(__file__).parent / "optimizers.csv").open(encoding="utf-8", newline="") as _file:
    OPTIMIZERS = {row["name"]: row for row in csv.DictReader(_file)}
"""Name -> its row."""


def optimizer_bytes(tensors: Sequence[tuple[tuple[int, ...], int, bool]], name: str, *, on_cpu: bool) -> OptimizerBytes:
    """What an optimizer needs.

    Args:
        tensors: the parameters: (shape, bytes per element, whether it is trainable).
        name: of the optimizer, a row of the table.
        on_cpu: whether it steps on a CPU.

    Raises `HfCkptError` for an unknown name.
    """
    if name not in OPTIMIZERS:
        raise HfCkptError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, but is {name!r} instead.")
    row = OPTIMIZERS[name]
    trained = [(shape, size) for shape, size, trainable in tensors if trainable]
    if row["states"] == "factored":  # Adafactor: float32 means of rows and of columns, and one parameter in float32
        means = [4 * _means(shape) for shape, _ in trained]
        copies = [4 * math.prod(shape) for shape, _ in trained]
        needed = [
            (2 if size == 4 else 4) * copy + mean for copy, mean, (_, size) in zip(copies, means, trained, strict=True)
        ]
        return OptimizerBytes(sum(means), _largest(needed, copies))
    states, each = int(row["states"]), int(row["state_bytes"] or 0)
    state = sum(states * _bytes_of(math.prod(shape), each or size) for shape, size in trained)
    sizes = [math.prod(shape) * size for shape, size in trained]
    if not on_cpu:
        return OptimizerBytes(state, int(row["foreach"]) * sum(sizes))
    loop = int(row["loop"])
    return OptimizerBytes(state, _largest([loop * size for size in sizes], sizes) if loop else 0)


def _largest(needed: Sequence[int], left: Sequence[int]) -> int:
    """Most temporary bytes of a step that updates one parameter after the other.

    Variables still hold one tensor of the parameter before.

    Args:
        needed: for each parameter, the bytes that its update needs.
        left: for each parameter, the bytes that are held until the next one's update.
    """
    return max((now + before for now, before in zip(needed, [0, *left], strict=False)), default=0)


def _bytes_of(elements: int, each: int) -> int:
    """Bytes of one tensor of the state."""
    if each != 1:
        return elements * each
    return 4 * elements if elements < _SMALL_8BIT else elements + 4 * -(-elements // _BLOCK_8BIT)


def _means(shape: tuple[int, ...]) -> int:
    """Elements of the means of a parameter's rows and columns; a vector has one for each element."""
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape) // shape[-1] + math.prod(shape) // shape[-2]
