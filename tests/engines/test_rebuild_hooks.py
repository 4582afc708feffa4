"""The user's hooks around the model, inside a block and on its modules, work beside the engine's own."""

from __future__ import annotations

import pytest
import torch
from helpers.steps import assert_same, outcome, step, without_cache
from helpers.toys import (
    SCALE,
    WEIGHT,
    Norm,
    each_family,
    each_save,
    plain_and_ours,
    rebuilt,
    same_steps,
    same_toys,
    toy,
)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.rebuild.full_selective import FullSelectiveRegion
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch

pytestmark = pytest.mark.usefixtures("unwatched")


class MovedAway:
    """Saved-tensor hooks that store activations as uncounted bytes, and return each of them once."""

    def __init__(self):
        self.store, self.asked, self.moved_bytes = {}, 0, 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor):
        key = object()
        self.store[key] = tensor
        if (tensor.is_floating_point() or tensor.dtype is torch.uint8) and not isinstance(tensor, nn.Parameter):
            self.moved_bytes += tensor.nbytes
            self.store[key] = tensor.detach().numpy().tobytes(), tensor.shape, tensor.stride(), tensor.dtype
        return key

    def unpack(self, key):
        self.asked += 1
        packed = self.store.pop(key)
        if isinstance(packed, torch.Tensor):
            return packed
        data, shape, stride, dtype = packed
        plain = torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
        if 0 in stride:
            return plain
        return torch.empty_strided(shape, stride, dtype=dtype).copy_(plain)  # another layout would round differently


@each_save
@each_family
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_hooks_around_the_model_get_what_stays(family, save, dropout):
    """Kept activations go only through the user's hooks, and are unpacked once, in backward."""
    plain, ours = plain_and_ours(family, save, dropout=dropout)
    batch = without_cache(plain, tiny_batch(family, tokens=64))
    expected, left, through = step(plain, batch), [], []
    for model in (plain, ours):
        model.zero_grad()
        torch.manual_seed(7)
        away = MovedAway()
        with LiveBytes(model) as live:
            with away.hooks:
                loss = model(**batch).loss
            left.append(live.current_bytes - live.start_bytes)
            assert not away.asked
            loss.backward()
        assert_same(expected, outcome(model, loss))
        through.append(away.moved_bytes)
    assert rebuilt(ours) > 0
    assert 0 < through[1] < through[0]
    assert left[1] <= left[0] + 10_000, "activations stay on the device beside their copies"


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
    regions = (
        RebuildRegion("toy", **options),
        RebuildRegion("toy", **options, fallback=FullRegion("toy")),
        FullSelectiveRegion("toy", **options),
    )
    for region in regions:
        CALLS.clear()
        assert_same(expected, toy(block, region))
        assert region.recomputed > 0
        assert 2 <= len(CALLS) <= 2 + (type(region) is FullSelectiveRegion)  # once with the block, and then by itself
        assert type(region) is FullSelectiveRegion or region.dropped


@each_save
def test_save_on_cpu_inside_and_around(save):
    def block(x):
        y = functional.silu(x) * x
        with torch.autograd.graph.save_on_cpu():
            y = functional.silu(y @ WEIGHT) * y
        return functional.gelu(y) * y

    def around(x):
        with torch.autograd.graph.save_on_cpu():
            return RebuildRegion("toy", save=tuple(save))(block, x)

    same_toys(block, save=save)
    assert_same(toy(block), toy(around))


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
