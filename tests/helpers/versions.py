"""Skips tests of what older transformers do not have."""

from __future__ import annotations

import pytest

from hf_ckpt.models.tiny import tiny_batch, tiny_model


def skip_where_absent(family, attention):
    """Skip the test where the family has no such attention: T5 has no sdpa before transformers 5."""
    try:
        tiny_model(family, layers=1, attention=attention)(**tiny_batch(family))
    except ValueError as error:
        pytest.skip(f"{family} has no {attention} attention in this transformers: {str(error)[:80]}")
