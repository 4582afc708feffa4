"""Models whose blocks change between forward and backward, and the results of their steps."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from torch import nn

import hf_ckpt
from helpers.adapters import TARGETS, lora_config
from helpers.steps import enable, without_cache
from hf_ckpt.engines.state import ForwardState
from hf_ckpt.models.tiny import tiny_batch, tiny_model

LAYERS = 4
ENGINES = {
    "full": {"policy": "full"},
    "offload": {"policy": "offload"},
    "segments": {"policy": "full", "segments": 2},
    "selective": {"policy": "selective"},
    "full+selective": {"policy": "full+selective", "save": ["attention"]},
    "save attention": {"policy": "selective", "save": ["attention"]},
    "mixed": {
        "policy": "full",
        "rules": [{"layers": "1", "policy": "selective"}, {"layers": "2", "policy": "offload"}],
    },
}
each_engine = pytest.mark.parametrize("engine", ENGINES)


def plain_model():
    return tiny_model("llama", layers=LAYERS)


def two_adapters():
    """A model with two LoRA adapters, `default` and `critic`, and trained norms and embeddings."""
    torch.manual_seed(1)
    config = lora_config("llama", TARGETS["llama"], lora_dropout=0.1)
    model = get_peft_model(plain_model(), config)
    model.add_adapter("critic", config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "embed" in name:
            parameter.requires_grad_(True)
    return model.train()


class PowerNorm(nn.Module):
    """Divides by a running buffer after updating it in place, so that the output depends on a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("figure", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            self.figure.mul_(0.5).add_(x.abs().mean())
        return torch.sigmoid(x / self.figure.clone())


def enabled(model, engine):
    """The model with the plan of this engine enabled."""
    hf_ckpt.install(model, ENGINES[engine])
    enable(model)
    return model


def loss_of(model, seed=0):
    return model(**without_cache(model, tiny_batch("llama", seed=seed))).loss


def without_forward_state(region, fn):
    """Replaces `FullRegion.state_for`: a recomputation draws the same numbers, and no other state is restored."""
    return ForwardState(region.block, None, None, whole=False, keeps_draws=True)
