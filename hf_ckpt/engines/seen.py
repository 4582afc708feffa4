"""Tensors as a forward saw them, and whether they were overwritten since.

Three things tell whether a tensor still has the values of the forward: that it is the same tensor, that its in-place
version has not moved, and, for parameters, that its values are still at the same address. `optimizer.step()` and other
changes in place move the version. `parameter.data = other` leaves the version alone and moves the address.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NoReturn, final

import torch
from torch import nn

from hf_ckpt.errors import ChangedBlockError, InPlaceError


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


def refuse(seen: Seen, block: str, name: str) -> NoReturn:
    """Raise the error for a tensor of a block that was overwritten since it was seen.

    `InPlaceError` if its version has moved: autograd would have refused the change, too. Otherwise `ChangedBlockError`,
    which calls the tensor by `name`.
    """
    if version_of(seen.tensor) != seen.version:
        raise InPlaceError(block, seen.tensor, seen.version)
    raise ChangedBlockError(block, f"{name} was overwritten")


@final
class Kept(Seen):
    """What autograd holds in place of a saved tensor that stays: the tensor without its graph, and its block.

    `detach` gives a view with the same storage and the same version counter. With its graph, a node that saves its own
    result would hold itself, and a forward without a backward would never be freed.

    Args:
        tensor: the tensor.
        block: name of the block, for errors.
        address: whether its values must still be at the same address when it is needed, if it is a parameter.
    """

    __slots__ = ("block",)
    depth: ClassVar[int] = 0
    """Number of values that `rebuild.values` rebuilds before it: none."""

    def __init__(self, tensor: torch.Tensor, block: str, *, address: bool = False) -> None:
        # As `Seen`, without the call.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = -1 if tensor.is_inference() else tensor._version
        self.address = tensor.data_ptr() if address and type(tensor) is nn.Parameter else 0
        self.trained = tensor.requires_grad
        self.block = block

    def value(self) -> torch.Tensor:
        """Return the tensor.

        Raises `InPlaceError` if it has been changed in place since, and `ChangedBlockError` if it was overwritten.
        """
        if self.is_overwritten:
            refuse(self, self.block, f"a parameter of shape {list(self.tensor.shape)}")
        return self.tensor


class SeenTensors:
    """Several tensors, as a forward saw them. They are compared all at once, because calls in Python take longest.

    Args:
        tensors: the tensors.
        addresses: whether to compare the addresses of parameters, too.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, addresses: bool = False) -> None:
        self.tensors = tensors
        # As `look_at`, without a call: every forward of every block comes here three times.
        self.trained = list(map(_requires_grad, tensors))
        """Whether each tensor required gradients."""
        try:
            self.versions = list(map(_version, tensors))
            """The in-place version of each tensor."""
        except RuntimeError:  # an inference tensor has none
            self.versions = list(map(version_of, tensors))
        self.parameters = [tensor for tensor in tensors if type(tensor) is nn.Parameter] if addresses else []
        """Those whose addresses are compared."""
        self.addresses = list(map(torch.Tensor.data_ptr, self.parameters))

    def are_unchanged(self) -> bool:
        """Whether no tensor was overwritten since, and each requires gradients if it did."""
        # Another `requires_grad` is a change, too, although no values are gone: `overwritten` yields nothing then.
        if not self.tensors:
            return True
        is_same = look_at(self.tensors) == (self.versions, self.trained)
        return is_same and list(map(torch.Tensor.data_ptr, self.parameters)) == self.addresses

    def overwritten(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield each tensor that was overwritten since, and the in-place version that it had."""
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if version_of(tensor) != version:
                yield tensor, version
        for parameter, address in zip(self.parameters, self.addresses, strict=True):
            if parameter.data_ptr() != address:
                yield parameter, parameter._version


def look_at(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[bool]]:
    """Return the in-place version of each tensor, and whether it requires gradients."""
    # `map` over C functions: a block of a LLaMA has some ten tensors, and each comparison in a loop is a Python call.
    trained = list(map(_requires_grad, tensors))
    try:
        return list(map(_version, tensors)), trained
    except RuntimeError:  # an inference tensor has none
        return list(map(version_of, tensors)), trained


_requires_grad = operator.attrgetter("requires_grad")
_version = operator.attrgetter("_version")
NO_TENSORS = SeenTensors(())
