"""Ranks, and refusals: what `predict` says of a config or a live model."""

from __future__ import annotations

import pytest

import hf_ckpt
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import tiny_model


@pytest.mark.slow
def test_ranks_hold_buckets_or_parts():
    alone, ddp, parts = (
        hf_ckpt.predict("mini-llama", tokens=32, device="t4", ranks=ranks, parallel=how).costs.static
        for ranks, how in ((1, "ddp"), (4, "ddp"), (4, "fsdp2"))
    )
    assert ddp.buffers - alone.buffers == alone.gradients
    assert parts.parameters == alone.parameters // 4
    assert parts.optimizer == alone.optimizer // 4


def test_adapters_on_layers_that_are_not_there():
    with pytest.raises(HfCkptError, match="PEFT puts no adapters on"):
        hf_ckpt.predict("mini-llama", tokens=16, device="t4", lora=4, lora_targets=("c_attn",))


def test_weights_that_a_device_map_moves_are_refused():
    model = tiny_model("llama")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    with pytest.raises(HfCkptError, match=r"`device_map` keeps weights of model\.layers\.1"):
        hf_ckpt.predict(model, tokens=16)
