"""Masks of dropout as bits: 1/8 byte for each element, where autograd keeps one byte, two or four.

On CUDA, dropout saves truth values. On the CPU it saves the noise that it multiplies by, in the type of its input: 0,
or one number. Which tensor is a mask is for others to tell, by the operation that has made it.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from hf_ckpt import compat

_GATHER = 0x0102040810204080
"""Times eight bytes of 0 or 1, it has them as the bits of the highest byte."""
_HIGHEST = 7
"""Place of that byte in memory: of all machines that torch runs on, the lowest byte comes first."""
_COPIES = 0x0101010101010101
"""Times a byte, it is that byte eight times."""
_ONE_EACH = 0x8040201008040201 - 2**64
"""One bit of each byte, another one every time."""


def can_pack(mask: torch.Tensor) -> bool:
    """Whether a mask fills its storage, with any strides. One that is a part of something frees nothing."""
    return mask.dim() > 0 and 0 < mask.nbytes == mask.untyped_storage().nbytes()


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Return whether each element of a mask is other than 0, as bits: uint8 [elements / 8, rounded up].

    The elements are taken in the order in which they lie in memory.
    """
    flat = mask.as_strided((mask.numel(),), (1,))
    truth = flat.to(torch.bool)  # of numbers an eighth of the time that `!= 0` takes on a CPU
    if len(truth) % 8:
        truth = functional.pad(truth.view(torch.uint8), (0, -len(truth) % 8))
    words = truth.view(torch.int64)
    words = words * _GATHER if truth is flat else words.mul_(_GATHER)  # never change the mask itself
    return words.view(torch.uint8)[_HIGHEST::8].contiguous()


def scale_of(mask: torch.Tensor) -> torch.Tensor | None:
    """Return the one number that a mask of numbers holds beside 0, as a tensor []; None for one of truth values."""
    return None if mask.dtype is torch.bool else mask.max()


def holds(mask: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether a mask of numbers holds nothing but 0 and `scale`. An accelerator has to be waited for."""
    return bool((mask.eq(0).logical_or_(mask.eq(scale))).all())


def unpack(
    bits: torch.Tensor, *, size: torch.Size, stride: tuple[int, ...], scale: torch.Tensor | None
) -> torch.Tensor:
    """Return the mask that was packed as `bits`, of this size and these strides, with `scale` where a bit is set.

    Without a scale it has truth values.
    """
    rows = bits.new_empty((256, 8), dtype=torch.bool) if compat.is_fake(bits) else _rows(bits.device)
    if scale is not None:
        rows = torch.where(rows, scale, 0)
    return rows.index_select(0, bits.int()).as_strided(size, stride)


@functools.cache
def _rows(device: torch.device) -> torch.Tensor:
    """Return the truth values that each byte stands for, bool [256, 8]; made once for a device."""
    bytes_ = torch.arange(256, device=device).mul_(_COPIES).bitwise_and_(_ONE_EACH)
    return bytes_.view(torch.uint8).view(256, 8) != 0
