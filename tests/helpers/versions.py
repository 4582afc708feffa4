"""What the versions at hand do not have: tests that need it are skipped, and say why."""

from __future__ import annotations

import functools

import pytest
import torch
from peft import LoraConfig

from hf_ckpt.models.tiny import tiny_batch, tiny_model


def skip_where_absent(family, attention):
    """Skip the test where the family has no such attention: T5 has no sdpa before transformers 5."""
    try:
        tiny_model(family, layers=1, attention=attention)(**tiny_batch(family))
    except ValueError as error:
        pytest.skip(f"{family} has no {attention} attention in this transformers: {str(error)[:80]}")


@functools.cache
def missing_for_add_adapter():
    """Why `add_adapter` of a transformers model does not work here; None where it does.

    Each transformers names the oldest PEFT that it takes: 5.24 one that came out after it.
    """
    try:
        with torch.random.fork_rng():
            tiny_model("llama", layers=1).add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    except (ImportError, ValueError) as error:
        return f"add_adapter of this transformers: {error}"
    return None


def skip_without_add_adapter():
    """Skip the test where transformers wants another PEFT for `add_adapter`."""
    missing = missing_for_add_adapter()
    if missing is not None:
        pytest.skip(missing)
