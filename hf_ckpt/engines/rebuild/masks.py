"""Masks of dropout as bits: 1/8 byte for each element, instead of the byte that autograd keeps.

On accelerators, dropout saves booleans. The tape recognises them by the operation that saves them. On a CPU, dropout
multiplies by noise in the type of its input, which is kept as it is.
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


def to_bits(mask: torch.Tensor) -> torch.Tensor:
    """Return one bit for each element of a mask of booleans: uint8 [elements / 8, rounded up].

    The bits are in the order of the elements in memory.
    """
    truth = mask.as_strided((mask.numel(),), (1,))
    # Eight elements at a time are one 64-bit number, so the last ones are filled up.
    if len(truth) % 8:
        truth = functional.pad(truth.view(torch.uint8), (0, -len(truth) % 8))
    words = truth.view(torch.int64) * _GATHER
    return words.view(torch.uint8)[_HIGHEST::8].contiguous()  # a view would hold all eight bytes


def from_bits(bits: torch.Tensor, *, size: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    """Return the mask that was packed as `bits`, with this size and these strides."""
    rows = bits.new_empty((256, 8), dtype=torch.bool) if compat.torch.is_fake(bits) else _rows(bits.device)
    # One table of 256 rows, in place of shifts of every byte: a single pass, and no temporary of the mask's size.
    return rows.index_select(0, bits.int()).as_strided(size, stride)


@functools.cache
def _rows(device: torch.device) -> torch.Tensor:
    """Return the eight booleans that each byte stands for, bool [256, 8]. Cached for each device."""
    bytes_ = torch.arange(256, device=device).mul_(_COPIES).bitwise_and_(_ONE_EACH)
    return bytes_.view(torch.uint8).view(256, 8) != 0
