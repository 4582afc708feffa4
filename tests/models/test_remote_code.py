"""Models with code of their own, written against the format of 2022: driven, or refused with what is known."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.steps import enable, recomputed
from torch import nn

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.errors import NoBlocksError


class PlainBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states):
        return hidden_states + self.linear(hidden_states).tanh()


class Block(compat.GradientCheckpointingLayer, PlainBlock):
    """The same on transformers' base class."""


class RemoteConfig(transformers.PretrainedConfig):
    model_type = "from_the_hub"


class RemoteModel(transformers.PreTrainedModel):
    """A model in the old format."""

    config_class = RemoteConfig
    supports_gradient_checkpointing = True

    def __init__(self, config, block_class):
        super().__init__(config)
        self.layers = nn.ModuleList(block_class() for _ in range(3))
        self.post_init()

    def _init_weights(self, module):
        """Nothing to do: linear layers start themselves."""

    def _set_gradient_checkpointing(self, module, value=False):
        if isinstance(module, RemoteModel):
            module.gradient_checkpointing = value

    def forward(self, hidden_states):
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


def test_remote_code_without_blocks_is_an_error_with_the_families():
    """It was enabled without an error, and nothing was checkpointed."""
    model = RemoteModel(RemoteConfig(), PlainBlock)
    with pytest.raises(NoBlocksError, match="no blocks built on GradientCheckpointingLayer") as caught:
        hf_ckpt.install(model)
    assert "llama: llama, mistral" in str(caught.value)
    assert "_hf_ckpt" not in vars(model)


def test_remote_code_with_blocks_is_generic(caplog):
    """They are driven, and the family is said to be unknown."""
    model = RemoteModel(RemoteConfig(), Block).train()
    hf_ckpt.install(model)
    assert "3 checkpointable blocks found, used as family `generic`" in caplog.text
    enable(model)
    model(torch.randn(2, 8)).sum().backward()
    assert recomputed(model) == ["layers.0", "layers.1", "layers.2"]
