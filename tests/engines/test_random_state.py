"""Random state around recomputed blocks, including Python's and numpy's; and CUDA graphs, which forbid reading it."""

import random
import types

import numpy
import pytest
import torch
from helpers.custom import custom_model, same_under, steps_of
from helpers.steps import assert_same, planned, step
from torch.nn import functional

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.errors import GraphCaptureError
from hf_ckpt.models.tiny import tiny_batch, tiny_model


@pytest.mark.trap(31)
def test_random_state_while_a_graph_is_captured(monkeypatch):
    """During graph capture, preserving random state is an error that names the block."""
    expected, batch = step(tiny_model("llama"), tiny_batch("llama")), tiny_batch("llama")
    monkeypatch.setattr(compat.devices, "is_capturing", lambda: True)
    assert_same(expected, step(planned(tiny_model("llama"), {"preserve_rng_state": False}), batch))
    model = planned(tiny_model("llama"))
    with pytest.raises(GraphCaptureError, match=r"block 'model.layers.0': it preserves random state"):
        step(model, batch)
    with torch.no_grad():
        model(**batch)  # nothing is recomputed, so nothing is preserved


def test_random_state_of_mps_counts_whatever_it_says_of_itself(monkeypatch):
    """torch's own checkpoint draws other dropout masks there, because `mps` does not say that it is initialised."""
    states = {"mps": torch.tensor([5], dtype=torch.uint8)}
    monkeypatch.setattr(torch.mps, "is_initialized", lambda: False, raising=False)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda device: states[device.type].clone())
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state, device: states.update({device.type: state}))
    before = compat.process_state.RandomState([torch.device("mps", 0)])
    states["mps"] += 1
    assert before.may_have_moved()
    before.restore()
    assert states["mps"].item() == 5


@pytest.mark.parametrize("device_type", ["cuda", "xpu", "npu"])
def test_a_graph_of_any_accelerator_is_seen(device_type, monkeypatch):
    module = types.SimpleNamespace(is_current_stream_capturing=lambda: True, is_initialized=lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: types.SimpleNamespace(type=device_type))
    monkeypatch.setattr(torch, device_type, module, raising=False)
    assert not compat.devices.is_capturing()
    module.is_initialized = lambda: True
    assert compat.devices.is_capturing()


# --- Python's and numpy's ---------------------------------------------------------------------------------------------


def seeds_itself():
    random.seed(random.random())
    numpy.random.seed(random.getrandbits(31))
    return random.random()


DRAWS = {
    "python, one of a pair": lambda: random.gauss(0.0, 1.0),
    "numpy, one of a pair": numpy.random.normal,
    "from a seed": seeds_itself,
}


def seeded(run, *args):
    """What `run` returns with fixed seeds, and the next number of each generator."""
    random.seed(5)
    numpy.random.seed(5)
    return run(*args), (random.random(), numpy.random.random(), random.gauss(0.0, 1.0), numpy.random.normal())


def test_every_draw_is_noticed_and_repeated():
    """Also the second number of a pair, which moves no generator, and another generator of numpy."""
    bits = numpy.random.get_bit_generator()
    draws = [draw for draw in DRAWS.values() for _ in range(2)]
    try:
        for draw in (*draws, lambda: numpy.random.set_bit_generator(numpy.random.PCG64(1)), numpy.random.random):
            before = compat.process_state.RandomState()
            assert not before.may_have_moved()
            expected = draw()
            assert before.may_have_moved()
            if expected is not None:
                with before.restored():
                    assert draw() == expected
    finally:
        numpy.random.set_bit_generator(bits)


@pytest.mark.compat
@pytest.mark.parametrize("is_of_another_torch", [False, True])
def test_a_state_that_differs_anywhere_has_moved(is_of_another_torch, monkeypatch):
    """Every byte of a state counts if its size says that its layout is not the known one."""
    assert torch.get_rng_state().nbytes == compat.process_state._STATE_BYTES
    if is_of_another_torch:
        monkeypatch.setattr(compat.process_state, "_STATE_BYTES", 0)
    for draw in (torch.rand, torch.randn, torch.randperm, torch.randn, lambda _: torch.manual_seed(3)):
        before = compat.process_state.RandomState()
        draw(1000)
        assert before.of_torch_has_moved()
    before = compat.process_state.RandomState()
    before.of_cpu[2500] ^= 1  # which no draw of this torch changes alone
    assert before.of_torch_has_moved() == is_of_another_torch


@pytest.mark.trap(48)
@pytest.mark.compat
@pytest.mark.parametrize("keeps_torchs", [True, False])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_block_draws_the_same_numbers_again(draw, keeps_torchs):
    """Recomputations repeat Python's and numpy's numbers, and later draws are as without recomputation."""

    def work(block, hidden, shift):
        return functional.silu(block.one(hidden * DRAWS[draw]())) + block.two(hidden)

    spec = {"policy": "full", "preserve_rng_state": keeps_torchs}
    model = same_under(spec, lambda model: seeded(steps_of, model), lambda: custom_model(work))
    assert [*hf_ckpt.describe(model).recomputed.values()] == [3, 3, 3]


def test_only_blocks_that_draw_from_the_host_read_its_state(monkeypatch):
    """Reading the states of Python and numpy takes longer than the rest of `full`."""
    model = planned(tiny_model("llama"), {"policy": "full", "check_every": 0})
    step(model, tiny_batch("llama"))
    monkeypatch.setattr(random, "getstate", lambda: pytest.fail("it is read"))
    step(model, tiny_batch("llama"))


@pytest.mark.parametrize("policy", ["full+selective", "selective"])
def test_a_part_of_a_block_draws_the_same_numbers_again(policy):
    def run(model):
        for block in model.model.layers:
            block.mlp.act_fn.register_forward_hook(lambda module, args, output: output * random.random())
        return step(model, tiny_batch("llama"))

    same_under({"policy": policy}, lambda model: seeded(run, model), lambda: tiny_model("llama"))
