"""Random state around blocks that run again, and CUDA graphs, in which it cannot be read."""

from __future__ import annotations

import pytest
import torch
from helpers.installed import ALL
from helpers.steps import assert_same, enable, recomputed, step

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.errors import GraphCaptureError
from hf_ckpt.models.tiny import tiny_batch, tiny_model


@pytest.mark.parametrize("preserve", ["auto", True, False])
def test_random_state_while_a_graph_is_captured(monkeypatch, preserve):
    """The error came from deep inside the generator; here it names the block, where anything is preserved."""
    model = tiny_model("llama")
    expected = step(model, tiny_batch("llama"))
    hf_ckpt.install(model, {"preserve_rng_state": preserve})
    enable(model)
    monkeypatch.setattr(compat, "is_capturing", lambda: True)
    if preserve is False:
        assert_same(expected, step(model, tiny_batch("llama")))
        assert recomputed(model) == ALL
    else:
        with pytest.raises(GraphCaptureError, match=r"block 'model.layers.0' preserves random state"):
            step(model, tiny_batch("llama"))
        with torch.no_grad():
            model(**tiny_batch("llama"))  # nothing is preserved where nothing is recomputed
