"""Names that a training is described with. Free of torch, so that wrong ones are refused before torch is imported."""

from __future__ import annotations

DTYPE_NAMES = ("float32", "bfloat16", "float16")
"""Types that weights and autocast may have, as torch names them."""
MOST_TOKENS = 2**32
"""Most tokens of one micro-step: beyond them the bytes of a model are no numbers that can be calculated with."""
TRAINERS = ("sft", "dpo", "grpo")
"""Trainers of TRL whose steps can be planned for."""
REFERENCES = ("adapters-off", "model", "precomputed")
"""Where DPO takes its reference from: the policy without its adapters, a second model, or a column of the data."""
GENERATORS = ("transformers", "vllm")
"""What writes the completions of GRPO: the model's own `generate`, or vLLM, whose memory is not counted."""
PARALLEL = ("ddp", "fsdp2")
"""How ranks may share the work: each with a whole model, or with parts of its parameters, gradients and state."""
_ATTENTIONS = ("sdpa", "eager", "flex_attention")


def may_be_attention(name: str) -> bool:
    """Return whether transformers may know an attention implementation of this name.

    Beside the names of its own these are the versions of flash attention, and kernels of the hub ("owner/name").
    """
    return name in _ATTENTIONS or name.startswith("flash_attention_") or "/" in name
