"""Fixtures of the engines' tests."""

from __future__ import annotations

import pytest
from helpers.lanes import Delayed, lanes_of

from hf_ckpt.engines.head.logits import Logits


@pytest.fixture
def lanes():
    """Stand-ins for an accelerator's lanes, as they are created; even the smallest tensors are moved."""
    with lanes_of(Delayed) as made:
        yield made


@pytest.fixture
def whole(monkeypatch):
    """Chunked logits that were computed as a whole."""
    found, values = [], Logits.values
    monkeypatch.setattr(Logits, "values", lambda logits: found.append(logits) or values(logits))
    return found
