"""Masks of dropout as bits: 1/8 byte for each element, instead of the one, two or four bytes that autograd keeps.

On CUDA, dropout saves booleans. On the CPU it saves the noise that it multiplies by, in the type of its input: every
element is 0 or one other number. The tape recognises masks by the operation that saves them.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from hf_ckpt import compat

_GATHER = 0x0102040810204080
"""Multiplied by eight bytes of 0 or 1, it collects them as the bits of the highest byte."""
_HIGHEST = 7
"""Index of that byte in memory: all machines that torch runs on are little-endian."""
_COPIES = 0x0101010101010101
"""Multiplied by a byte, it repeats the byte eight times."""
_ONE_EACH = 0x8040201008040201 - 2**64
"""One bit of each byte, a different one in every byte."""


def can_pack(mask: torch.Tensor) -> bool:
    """Whether a mask fills its storage, with any strides. Packing a part of a storage would free nothing."""
    return mask.dim() > 0 and 0 < mask.nbytes == mask.untyped_storage().nbytes()


def holds(mask: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether the first elements of a mask of numbers are 0 or `scale`. Other noise has no two equal numbers."""
    first = mask.as_strided((min(mask.numel(), 1024),), (1,))
    return compat.torch.is_fake(mask) or bool(first.eq(0).logical_or_(first.eq(scale)).all())


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Return one bit for each element of a mask, set if it is not 0: uint8 [elements / 8, rounded up].

    The bits are in the order of the elements in memory.
    """
    flat = mask.as_strided((mask.numel(),), (1,))
    truth = flat.to(torch.bool)  # on a CPU, an eighth of the time of `!= 0` for numbers
    if len(truth) % 8:
        truth = functional.pad(truth.view(torch.uint8), (0, -len(truth) % 8))
    words = truth.view(torch.int64)
    words = words * _GATHER if truth is flat else words.mul_(_GATHER)  # never change the mask itself
    return words.view(torch.uint8)[_HIGHEST::8].contiguous()


def unpack(
    bits: torch.Tensor, *, size: torch.Size, stride: tuple[int, ...], scale: torch.Tensor | None
) -> torch.Tensor:
    """Return the mask that was packed as `bits`, with this size and these strides, and `scale` where a bit is set.

    Without a scale, return booleans.
    """
    rows = bits.new_empty((256, 8), dtype=torch.bool) if compat.torch.is_fake(bits) else _rows(bits.device)
    if scale is not None:
        rows = torch.where(rows, scale, 0)
    return rows.index_select(0, bits.int()).as_strided(size, stride)


@functools.cache
def _rows(device: torch.device) -> torch.Tensor:
    """Return the eight booleans that each byte stands for, bool [256, 8]. Cached for each device."""
    bytes_ = torch.arange(256, device=device).mul_(_COPIES).bitwise_and_(_ONE_EACH)
    return bytes_.view(torch.uint8).view(256, 8) != 0
