"""What DoRA makes of a frozen linear layer, and autograd does not tell: a cast of its weight, and its bias taken off.

With dropout the adapter runs the layer a second time, on the weight in the type of its own input; without, it takes the
bias off the layer's result. Neither weight nor bias needs a gradient, so only the running adapter tells what they are.
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
"""Makes the value of a parameter that something is rebuilt from."""


def cast_weight(tensor: torch.Tensor, work: Work, keep: Keep) -> Rebuilt | None:
    """The value of a cast of a frozen weight, which a product saves, as it is or transposed; None of other tensors."""
    layer = compat.layer_under_dora()
    whole = tensor if tensor._base is None else tensor._base
    if layer is None or whole is not layer.cast or whole._version or tensor.storage_offset():
        return None
    like = functools.partial(_cast, dtype=tensor.dtype, size=tensor.size(), stride=tensor.stride())
    return Rebuilt(work, CAST, like, [keep(layer.weight)])


def bias_taken_off(node: Any, place: int, keep: Keep) -> Kept | None:
    """The value of the frozen bias, if operand `place` of a node is that; None of other operands."""
    layer = compat.layer_under_dora() if place == 1 and node.name() == "SubBackward0" else None
    if layer is None or layer.bias is None or layer.result is None or layer.result.grad_fn is not node:
        return None
    return keep(layer.bias)


def _cast(source: torch.Tensor, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    return source.to(dtype).as_strided(size, stride)
