"""Models whose blocks change between forward and backward, and the results of their steps."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from torch import nn

import hf_ckpt
from helpers.adapters import TARGETS, lora_config
from helpers.steps import enable, gradients, without_cache
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.engines.state import ForwardState
from hf_ckpt.models.blocks import base_model, find_blocks
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


def plain_model(family="llama", **options):
    return tiny_model(family, layers=LAYERS, **options)


def two_adapters(family="llama"):
    """A model with two LoRA adapters, `default` and `critic`, and trained norms and embeddings."""
    torch.manual_seed(1)
    model = get_peft_model(plain_model(family), lora_config(family, TARGETS[family], lora_dropout=0.1))
    model.add_adapter("critic", lora_config(family, TARGETS[family], lora_dropout=0.1))
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


def with_modules(make, family="llama"):
    model = plain_model(family)
    for block in model.model.layers:
        block.mlp.act_fn = nn.Sequential(block.mlp.act_fn, make())
    return model.train()


def enabled(model, engine):
    """The model with the plan of this engine enabled."""
    hf_ckpt.install(model, ENGINES[engine])
    enable(model)
    return model


def loss_of(model, family="llama", seed=0):
    return model(**without_cache(model, tiny_batch(family, seed=seed))).loss


def outcome(model, *losses):
    """Backward of the losses: gradients, buffers, and the losses."""
    total = sum(number * loss for number, loss in enumerate(losses, start=1))
    total.backward()
    buffers = {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    for _, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.grad is not None or parameter.requires_grad)
    return {"loss": total.detach(), **gradients(model), **buffers}


def check_counts(model, forwards):
    """Check that every block was recomputed: once for each forward, or in parts."""
    found = hf_ckpt.describe(model)
    regions = installation(base_model(model)).regions
    assert regions.keys() == found.recomputed.keys() == set(find_blocks(model).modules)
    for name, region in regions.items():
        assert found.forwards[name] == forwards
        if isinstance(region, RebuildRegion):
            assert found.recomputed[name] > 0
        else:
            assert found.recomputed[name] == forwards


def without_forward_state(region, fn):
    """Replaces `FullRegion.state_for`: a recomputation draws the same numbers, and no other state is restored."""
    return ForwardState(region.block, None, None, whole=False, keeps_draws=True)
