"""Custom model code in the format of 2022 is checkpointed, or refused with an explanation."""

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
    """The same block, based on transformers' layer."""


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
        """Linear layers initialise themselves."""

    def _set_gradient_checkpointing(self, module, value=False):
        if isinstance(module, RemoteModel):
            module.gradient_checkpointing = value

    def forward(self, hidden_states):
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


def test_remote_code_without_blocks_is_an_error_with_the_families():
    """Remote code without blocks is refused: otherwise enabling would checkpoint nothing without an error."""
    model = RemoteModel(RemoteConfig(), PlainBlock)
    with pytest.raises(NoBlocksError, match="no blocks built on GradientCheckpointingLayer") as caught:
        hf_ckpt.install(model)
    assert "llama: llama, mistral" in str(caught.value)
    assert "_hf_ckpt" not in vars(model)


def test_remote_code_with_blocks_is_generic(caplog):
    """Remote code with blocks is checkpointed as a generic family, with a warning."""
    model = RemoteModel(RemoteConfig(), Block).train()
    hf_ckpt.install(model)
    assert "3 checkpointable blocks found, used as family `generic`" in caplog.text
    enable(model)
    model(torch.randn(2, 8)).sum().backward()
    assert recomputed(model) == ["layers.0", "layers.1", "layers.2"]
