"""Skip tests whose requirements the installed versions lack, with the reason."""

from __future__ import annotations

import functools

import pytest
import torch
from peft import LoraConfig

from hf_ckpt.models.tiny import tiny_batch, tiny_model


def skip_where_absent(family, attention):
    """Skip the test if the family lacks this attention: T5 has no sdpa before transformers 5."""
    try:
        tiny_model(family, layers=1, attention=attention)(**tiny_batch(family))
    except ValueError as error:
        pytest.skip(f"{family} has no {attention} attention in this transformers: {str(error)[:80]}")


@functools.cache
def missing_for_add_adapter():
    """Why `add_adapter` of transformers models does not work here; None if it does.

    Each transformers requires a minimum PEFT; for 5.24, that PEFT was released later.
    """
    try:
        with torch.random.fork_rng():
            tiny_model("llama", layers=1).add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    except (ImportError, ValueError) as error:
        return f"add_adapter of this transformers: {error}"
    return None
