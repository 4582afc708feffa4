"""DoRA on a frozen linear layer: recognise the cast of its weight and the subtraction of its bias.

With dropout the adapter runs the layer a second time, on the weight cast to the type of its own input. Without, it
subtracts the bias from the layer's result. Neither weight nor bias requires gradients, so the graph does not name them;
hf_ckpt identifies them by the running adapter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hf_ckpt import compat
from hf_ckpt.engines.rebuild.ops import CAST
from hf_ckpt.engines.rebuild.values import Kept, Rebuilt, Work

Keep = Callable[[torch.Tensor], Kept]
"""Makes the value of a parameter that is an operand of a rebuilt tensor."""


def cast_weight(tensor: torch.Tensor, work: Work, keep: Keep) -> Rebuilt | None:
    """Return the value of a frozen weight's cast, or of its transpose, that a product saves; None for other tensors."""
    layer = compat.layer_under_dora()
    whole = tensor if tensor._base is None else tensor._base
    if layer is None or whole is not layer.cast or whole._version or tensor.storage_offset():
        return None
    like = functools.partial(_cast, dtype=tensor.dtype, size=tensor.size(), stride=tensor.stride())
    return Rebuilt(work, CAST, like, [keep(layer.weight)])


def bias_taken_off(node: Any, place: int, keep: Keep) -> Kept | None:
    """Return the value of the frozen bias, if it is operand `place` of a node; None for other operands."""
    layer = compat.layer_under_dora() if place == 1 and node.name() == "SubBackward0" else None
    if layer is None or layer.bias is None or layer.result is None or layer.result.grad_fn is not node:
        return None
    return keep(layer.bias)


def _cast(source: torch.Tensor, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    return source.to(dtype).as_strided(size, stride)
