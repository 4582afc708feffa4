"""Memory layouts of rebuilt tensors, and what the forward of a block knows of them."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """What a rebuilt tensor must have as the tensor of the forward had it."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def is_contiguous(self) -> bool:
        """Whether a tensor of this layout is contiguous."""
        following = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if size != 1 and stride != following:
                return 0 in self.size
            following *= size
        return True

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a rebuilt tensor with these strides."""
        if tensor.stride() == self.stride:
            return tensor
        return torch.empty_strided(*self[:2], dtype=self.dtype, device=tensor.device).copy_(tensor)


class Strides(enum.IntEnum):
    """What is known of the strides that a value is rebuilt with. The least of several holds for all of them."""

    UNKNOWN = 0
    """The forward may have had others: no node of autograd shows the memory format of a copy."""
    SAME = 1
    """They are those of the forward."""
    AS_OPERANDS = 2
    """They are those of the forward, which are contiguous if the operands are: only copies ask whether they are."""
    CONTIGUOUS = 3
    """They are those of the forward, which are contiguous."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Strides:
        """Return what is known of a value that is rebuilt with the strides of `tensor`, one of the forward."""
        return cls.CONTIGUOUS if tensor.is_contiguous() else cls.SAME
