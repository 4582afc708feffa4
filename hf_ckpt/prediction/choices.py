"""Names that a training is described with. Free of torch, so that wrong ones are refused before torch is imported."""

from __future__ import annotations

DTYPE_NAMES = ("float32", "bfloat16", "float16")
"""Types that weights and autocast may have, as torch names them."""
MOST_TOKENS = 2**32
"""Most tokens of one micro-step: beyond them the bytes of a model are no numbers that can be calculated with."""
_ATTENTIONS = ("sdpa", "eager", "flex_attention")


def may_be_attention(name: str) -> bool:
    """Return whether transformers may know an attention implementation of this name.

    Beside the names of its own these are the versions of flash attention, and kernels of the hub ("owner/name").
    """
    return name in _ATTENTIONS or name.startswith("flash_attention_") or "/" in name
