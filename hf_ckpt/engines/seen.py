"""One tensor as a forward saw it, and whether it was overwritten since.

Three things tell whether a tensor still has the values of the forward: that it is the same tensor, that its in-place
version has not moved, and, for parameters, that its values are still at the same address. `optimizer.step()` and other
changes in place move the version. `parameter.data = other` leaves the version alone and moves the address.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def version_of(value: Any) -> int:
    """Return the in-place version of a tensor, which its views share; -1 for inference tensors and other values."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else -1


class Seen:
    """A tensor, with its version and its address when it was seen.

    Args:
        tensor: the tensor. Pass `tensor.detach()`, which shares its version, if its graph must not be kept.
        address: whether to compare the address of its values, too. Leave it out where parameters are moved or sharded
            during a step (FSDP, ZeRO-3, device maps).
    """

    __slots__ = ("address", "tensor", "trained", "version")

    def __init__(self, tensor: torch.Tensor, *, address: bool = False) -> None:
        # No calls in Python here and in `is_overwritten`: both run for every tensor that `selective` keeps.
        self.tensor = tensor
        self.version = -1 if tensor.is_inference() else tensor._version
        """The in-place version; -1 for inference tensors, which have none."""
        self.address = tensor.data_ptr() if address and type(tensor) is nn.Parameter else 0
        """The address of its values; 0 if it is not compared, and for tensors of other types: some have no address."""
        self.trained = tensor.requires_grad
        """Whether the tensor required gradients."""

    @property
    def is_overwritten(self) -> bool:
        """Whether its values may have changed since: the version has moved, or the values are at another address."""
        tensor = self.tensor
        if self.version >= 0 and tensor._version != self.version:
            return True
        return self.address != 0 and tensor.data_ptr() != self.address
