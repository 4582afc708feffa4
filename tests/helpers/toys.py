"""Small models and blocks for tests of the rebuild engine, and comparisons with the same models without it."""

import pytest
import torch
from torch import nn

import hf_ckpt
from helpers.steps import assert_same, planned
from hf_ckpt.engines.rebuild.modules import enter_module, leave_module
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_model

SAVES = (["linear", "attention"], ["attention"], ["linear"])
each_family = pytest.mark.parametrize("family", TINY_FAMILIES)


def plain_and_ours(family="llama", save=SAVES[0], layers=2, **options):
    """The same model twice, the second with `selective` enabled."""
    plain, ours = (tiny_model(family, layers=layers, **options) for _ in range(2))
    return plain, planned(ours, {"policy": "selective", "save": save})


def rebuilt(model):
    """Number of operations and modules recomputed so far."""
    return sum(hf_ckpt.describe(model).recomputed.values())


def same_steps(run, family="llama", save=SAVES[0], **options):
    """Check that `run` gives the same on both models, and that something was rebuilt."""
    plain, ours = plain_and_ours(family, save, **options)
    assert_same(run(plain), run(ours), f"{family} {save}")
    assert rebuilt(ours) > 0
    return ours


SCALE = nn.Parameter(torch.tensor(0.7))
WEIGHT = nn.Parameter(torch.linspace(-1, 1, 256).view(16, 16).contiguous())


def hooked(module):
    """The module with the hooks that norms of a family get."""
    module.register_forward_pre_hook(enter_module, with_kwargs=True)
    module.register_forward_hook(leave_module, always_call=True)
    return module


class Norm(nn.Module):
    """A small module, hooked like a family's norms."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        hooked(self)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def toy(block, region=None, *, dtype=torch.float32, parameters=(SCALE, WEIGHT)):
    """Gradients of a block's input and of the parameters, with a region if given."""
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(1)
    x = torch.randn(2, 8, 16, dtype=dtype).requires_grad_()
    inner = x * 1  # a block's input has a graph
    out = region(block, inner) if region else block(inner)
    out.float().square().sum().backward()
    return {"x": x.grad} | {str(place): parameter.grad for place, parameter in enumerate(parameters)}


def same_toys(block, *, save=SAVES[0], dtype=torch.float32, parameters=(SCALE, WEIGHT), rebuilds=True):
    """Check that a rebuilding region gives the block's own gradients; returns the region."""
    region = RebuildRegion("toy", save=tuple(save))
    expected = toy(block, dtype=dtype, parameters=parameters)
    assert_same(expected, toy(block, region, dtype=dtype, parameters=parameters))
    assert (region.recomputed > 0) == rebuilds
    return region
