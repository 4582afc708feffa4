"""Memory of optimizers: bytes of state and of a step, measured on fake tensors."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch
from helpers.planned import budgeted
from helpers.sparing import sparing
from helpers.steps import without_cache
from transformers.optimization import Adafactor
from transformers.training_args import OptimizerNames

from hf_ckpt.attach.record import installation
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.prediction.optimizer_names import NAMES, TRIED
from hf_ckpt.prediction.optimizers import OptimizerBytes, bytes_of, optimizer_bytes
from hf_ckpt.prediction.skeleton import Weights

SHAPES = ((96, 64), (64,), (32, 64), (96, 64))
MAKES = {
    "adamw_torch_fused": functools.partial(torch.optim.AdamW, fused=True),
    "adamw_torch": torch.optim.AdamW,
    "adafactor": functools.partial(Adafactor, lr=1e-3, scale_parameter=False, relative_step=False),
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


def weights(dtype):
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]


def really(make, dtype):
    """State and step of a real optimizer, counted."""
    parameters = weights(dtype)
    optimizer = make(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        held = {number: (parameter, parameter.grad) for number, parameter in enumerate(parameters)}
        with LiveBytes(optimizer, held) as live:
            optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(value.nbytes for value in values if value.dim()), live.peak_bytes - live.start_bytes


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKES)
def test_bytes_of_optimizers_before_their_first_step(name, dtype):
    """Bytes of state and step match a count, except for scalars."""
    make = MAKES[name]
    state, above = really(make, dtype)
    optimizer = make(weights(dtype))
    found = bytes_of([optimizer])
    assert found.state == pytest.approx(state, abs=64)
    assert found.step == pytest.approx(above, abs=64)
    shapes = Weights((*((shape, dtype.itemsize, True) for shape in SHAPES), ((1000, 1000), 4, False)))
    assert optimizer_bytes(shapes, name) == OptimizerBytes(state, found.step)


def test_a_step_that_is_not_fused_takes_a_copy_of_all_weights_on_an_accelerator():
    """On accelerators, `adamw_torch` uses PyTorch's `foreach` default, whose step copies all weights."""
    shapes = Weights(tuple((shape, 4, True) for shape in SHAPES))
    assert optimizer_bytes(shapes, "adamw_torch", "cuda").step == pytest.approx(shapes.nbytes, abs=512)
    assert optimizer_bytes(shapes, "adamw_torch", "cpu").step < shapes.nbytes
    assert optimizer_bytes(shapes, "adamw_torch_fused", "cuda").step == 0


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@sparing(
    ("name", "made"),
    [
        ("adamw_8bit", "AdamW8bit"),
        ("paged_adamw_32bit", "PagedAdamW32bit"),
        ("lion_32bit", "Lion"),
        ("lion_8bit", "Lion8bit"),
        ("rmsprop_bnb", "RMSprop"),
        ("rmsprop_bnb_8bit", "RMSprop8bit"),
        ("ademamix", "AdEMAMix"),
        ("ademamix_8bit", "AdEMAMix8bit"),
    ],
    ("adamw_8bit", "AdamW8bit"),
)
def test_state_of_bitsandbytes(name, made):
    """State matches bitsandbytes' own, except for maps of 256 values."""
    import bitsandbytes

    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((100, 100), (200,))]
    optimizer = getattr(bitsandbytes.optim, made)(parameters, lr=1e-3)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.ones_like(parameter)
        optimizer.init_state(optimizer.param_groups[0], parameter, 0, number)
    values = [value for state in optimizer.state.values() for key, value in state.items() if not key.startswith("qmap")]
    found = optimizer_bytes(Weights((((100, 100), 4, True), ((200,), 4, True))), name)
    assert found.state == sum(value.nbytes for value in values if torch.is_tensor(value))


def test_names_are_those_of_the_trainer():
    """The Trainer's optimizer names are known, except some from untested packages and some that step in backward."""
    shapes = Weights(tuple((shape, 4, True) for shape in SHAPES))
    assert all(optimizer_bytes(shapes, name) is not None for name in TRIED)
    unknown = {name.value for name in OptimizerNames} - set(NAMES)
    parts = ("galore", "apollo", "lomo", "schedule_free", "xla", "npu", "anyprecision", "4bit", "torch_8bit")
    assert {name for name in unknown if not any(part in name for part in parts)} <= {"grokadamw", "stable_adamw"}
    with pytest.raises(HfCkptError, match=r"optimizer must be one of adamw, .*adafactor.*, but is 'shampoo' instead"):
        optimizer_bytes(Weights(()), "shampoo")


class Odd(torch.optim.Adagrad):
    """An optimizer with an unknown name."""


def test_an_unknown_optimizer_is_counted_like_adamw_until_it_has_state():
    parameters = weights(torch.float32)
    optimizer, state = Odd(parameters), optimizer_bytes(Weights(tuple((shape, 4, True) for shape in SHAPES)), "adamw")
    optimizer.state.clear()
    assert bytes_of([optimizer]).state == state.state
    optimizer.state.update({parameter: {"sum": torch.zeros(3)} for parameter in parameters})
    assert bytes_of([optimizer]).state == 12 * len(parameters)
    assert bytes_of([]) == OptimizerBytes()


@pytest.mark.compat
@pytest.mark.parametrize(("name", "over"), [("adafactor", False), ("adamw", True)])
def test_a_budget_holds_for_the_state_that_an_optimizer_has(name, over):
    """A budget accounts for real optimizer state: Adafactor's is small; AdamW's, twice the weights, leaves no room."""
    batch, model = tiny_batch("llama", batch=1, tokens=16), tiny_model("llama", layers=3, hidden=64, attention="sdpa")
    optimizer = {"adafactor": MAKES["adafactor"], "adamw": torch.optim.AdamW}[name](model.parameters())
    budget = round(3 * sum(parameter.nbytes for parameter in model.parameters()))
    budgeted(model, budget)
    for _ in range(10):
        with LiveBytes(model, batch, optimizer) as live:
            model(**without_cache(model, batch)).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    planned = installation(model).planned
    assert planned.plan.prediction is not None
    assert planned.over == over == (live.peak_bytes > budget)
