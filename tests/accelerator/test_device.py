"""The simulated device itself: what tests on it rely on. Its streams and statistics are those tests' own subject."""

import pytest
import torch
from helpers.steps import assert_near, assert_same, step

from accelerator import device
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model

SIZE = 1 << 16


def full(value, where="sim:0"):
    return torch.full((SIZE,), float(value), device=where)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_model_trains_as_on_the_cpu(family):
    """Its kernels are the CPU's, apart from attention and dropout."""
    model, batch = tiny_model(family), tiny_batch(family)
    expected = step(model, batch)
    model, batch = device.moved_to(model, "sim"), {name: value.to("sim") for name, value in batch.items()}
    got = step(model, batch)
    assert all(value.device == torch.device("sim:0") for value in got.values())
    assert_near(expected, {name: value.cpu() for name, value in got.items()})
    assert_same(got, step(model, batch))


@pytest.mark.parametrize("where", ["sim:0", "sim:1"])
def test_each_device_draws_from_its_own_generator(where):
    module, second = torch.get_device_module("sim"), "sim:1" if where == "sim:0" else "sim:0"
    torch.manual_seed(3)
    host, other = torch.get_rng_state(), module.get_rng_state(second)
    state = module.get_rng_state(where)
    drawn = [torch.nn.functional.dropout(full(1, where), 0.5) for _ in range(2)]
    module.set_rng_state(state, where)
    assert not torch.equal(*drawn)
    assert torch.equal(drawn[0], torch.nn.functional.dropout(full(1, where), 0.5))
    assert torch.equal(host, torch.get_rng_state())
    assert torch.equal(other, module.get_rng_state(second))
