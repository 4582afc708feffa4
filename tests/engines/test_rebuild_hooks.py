"""The user's checkpoint inside a block, and hooks on its modules, work beside the engine's own hooks."""

from __future__ import annotations

import pytest
import torch
from helpers.steps import assert_same, step
from helpers.toys import SCALE, WEIGHT, Norm, each_family, each_save, same_steps, toy
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hf_ckpt.engines.rebuild.full_selective import FullSelectiveRegion
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.models.tiny import tiny_batch

pytestmark = pytest.mark.usefixtures("unwatched")

HALVES, SWAP, MASK, NORM = torch.full((16,), 0.5), torch.tensor([1, 0]), torch.zeros(8, 8), Norm()
CALLS = []

# Functions that a block runs under its own checkpoint. Most of them could be rebuilt if the checkpoint did not store
# their saved tensors.
UNDER_A_CHECKPOINT = {
    "operands with a graph": lambda y: functional.gelu(y @ WEIGHT) * y,
    "a constant": lambda y: functional.silu(y * HALVES) * 1.5 * HALVES,
    "dropout": lambda y: functional.dropout(y, 0.3) * SCALE * HALVES,
    "indices": lambda y: functional.silu(y)[SWAP] * SCALE,
    "an embedding": lambda y: y * functional.embedding(torch.arange(8), WEIGHT),
    "attention": lambda y: functional.scaled_dot_product_attention(*(y.view(2, 1, 8, 16),) * 3, attn_mask=MASK)[:, 0],
    "a norm": lambda y: NORM(y) * SCALE,
    "a checkpoint": lambda y: checkpoint(lambda z: functional.silu(z) * HALVES, y * HALVES, use_reentrant=False),
}


@pytest.mark.compat
@each_save
@pytest.mark.parametrize("name", UNDER_A_CHECKPOINT)
def test_the_users_own_checkpoint_inside_a_block(name, save):
    """A checkpointed function runs again only in backward; tensors around it are rebuilt."""
    CALLS.clear()

    def inner(y):
        CALLS.append(name)
        return UNDER_A_CHECKPOINT[name](y)

    def block(x):
        return functional.silu(checkpoint(inner, functional.silu(x) * SCALE, use_reentrant=False)) * SCALE

    expected = toy(block)
    options = {"save": tuple(save)}
    for region in (RebuildRegion("toy", **options), FullSelectiveRegion("toy", **options)):
        CALLS.clear()
        assert_same(expected, toy(block, region))
        assert region.recomputed > 0
        assert 2 <= len(CALLS) <= 2 + (type(region) is FullSelectiveRegion)  # once with the block, and then by itself
        assert type(region) is FullSelectiveRegion or region.dropped_tensors


@each_family
def test_the_users_hook_on_a_norm(family):
    """Hooks that change a norm's input, output or gradient are called in rebuilt blocks, too."""

    def norms(model):
        return [module for module in model.modules() if type(module).__name__.endswith(("Norm", "LayerNorm"))]

    def before(model):
        for module in norms(model):
            module.register_forward_hook(lambda module, args, output: output * 1.5)
        return step(model, tiny_batch(family))

    def first(model):
        for module in norms(model):
            module.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,), prepend=True)
        return step(model, tiny_batch(family))

    def backward(model):
        for module in norms(model):
            module.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        return step(model, tiny_batch(family))

    for run in (before, first, backward):
        same_steps(run, family, ["attention"])
