"""Compare two tensors bit for bit: whether they differ, where, and by how much."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> an integer type of that size, in which bits are compared."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor that backward got, and that differs from the one that the forward saved."""

    block: str
    """Qualified name of the block, or of a head or feed-forward in chunks."""
    module: str
    """Name of the module inside the block that produced or saved the tensor; empty for the block itself."""
    operation: str
    """What produced the tensor: an autograd node (`MulBackward0`), `parameter`, `buffer`, `attribute`, `output`, or
    `input` for a tensor without a graph."""
    shape: tuple[int, ...]
    what: str
    """What is different, in words."""
    share: float
    """Norm of the difference over the norm of the original; infinite if they cannot be subtracted."""
    cause: str = ""
    """The likely cause and what to do about it."""

    def __str__(self) -> str:
        where = f"{self.block}.{self.module}" if self.module else self.block
        shape = " x ".join(map(str, self.shape)) or "a number"
        return f"in `{where}`: {self.operation} ({shape}): {self.what}. {self.cause}".rstrip()


def version_of(tensor: torch.Tensor) -> int:
    """Return the in-place version of a tensor; -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def parameter_of(tensor: torch.Tensor) -> nn.Parameter | None:
    """Return the parameter that a tensor is, or is a view of; None if neither."""
    leaf = tensor if isinstance(tensor, nn.Parameter) else tensor._base
    return leaf if isinstance(leaf, nn.Parameter) and leaf.is_leaf else None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether this module can compare the values of a tensor."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    plain = plain and not (tensor.is_nested or tensor.is_quantized)
    return plain and not has_no_values(tensor) and not compat.is_compiling()


def has_no_values(value: Any) -> bool:
    """Whether a value is a tensor without values, such as a fake or a meta tensor."""
    return isinstance(value, torch.Tensor) and (compat.is_fake(value) or value.is_meta)


def has_graph(value: Any) -> bool:
    """Whether a value is a tensor that requires gradients."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def difference_of(one: torch.Tensor, other: torch.Tensor) -> tuple[str, float] | None:
    """Return what differs between two tensors, in words, and the norm of the difference over that of `one`.

    None if they have the same shape, type and bits.
    """
    if one.shape != other.shape:
        return f"shape {tuple(other.shape)} instead of {tuple(one.shape)}", float("inf")
    if one.dtype != other.dtype:
        return f"type {other.dtype} instead of {one.dtype}", float("inf")
    if one.device != other.device:
        return f"on {other.device} instead of {one.device}", float("inf")
    if one.layout is not torch.strided or torch.equal(_bits(one), _bits(other)):
        return None
    count = int((_bits(one) != _bits(other)).sum())
    share = share_of_difference(one, other)
    numbers = one.numel() * (2 if one.is_complex() else 1)
    return f"{count:,} of {numbers:,} values differ, by {share:.2g} of their norm", share


def share_of_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference of two tensors of the same shape, over the norm of `one`.

    It is computed in host memory: some devices, such as `mps`, have no float64, and others have little free memory.
    """
    wide = torch.complex128 if one.is_complex() else torch.float64
    exact = one.detach().cpu().to(wide)
    norm, gap = float(exact.norm()), float((other.detach().cpu().to(wide) - exact).norm())
    return gap / norm if norm else (float("inf") if gap else 0.0)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor's numbers as integers, with conjugate and negative views resolved."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.element_size()])
