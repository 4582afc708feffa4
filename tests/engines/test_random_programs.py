"""Blocks of random operations: every engine gives the gradients of the plain block, bit for bit, or refuses by name.

Hypothesis draws the programs, and prints a failing one.
"""

import functools

import pytest
import torch
from helpers.toys import toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.rebuild.full_selective import FullSelectiveRegion
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.errors import HfCkptError

SIZE = 16
"""Tensors are [2, 8, 16], as in `helpers.toys`; those that are multiplied with each other, [2, 8, 8]."""
WEIGHTS = [nn.Parameter(torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE).roll(shift, 0)) for shift in range(2)]
GAIN = nn.Parameter(torch.linspace(0.5, 1.5, SIZE))
MASK = torch.arange(SIZE) % 3 == 0


class Cube(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


def in_place(x):
    """A change of a new tensor, whose new value autograd needs."""
    y = x * 0.5
    y.add_(1)
    return y * y


def attention(x, y):
    scores = (x @ y.transpose(-1, -2)) / 4
    return functional.dropout(scores.softmax(-1), 0.1) @ y


UNARY = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "tanh gelu": functools.partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": functools.partial(torch.softmax, dim=-1),
    "log_softmax": functools.partial(torch.log_softmax, dim=-1),
    "square": torch.square,
    "abs": torch.abs,
    "sin": torch.sin,
    "exp": lambda x: torch.exp(x.clamp(max=1)),
    "leaky": functools.partial(functional.leaky_relu, negative_slope=0.2),
    "dropout": functools.partial(functional.dropout, p=0.2),
    "layer_norm": lambda x: functional.layer_norm(x, (SIZE,), GAIN),
    "rms_norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * GAIN,
    "bfloat16": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "in 16 bits": lambda x: functional.silu(x.bfloat16()).to(x.dtype),
    "complex": lambda x: (x.to(torch.complex64) * (1 + 1j)).abs(),
    "fft": lambda x: torch.fft.rfft(x, dim=-1).real.sum(-1, keepdim=True) + x,
    "view": lambda x: x.reshape(2, SIZE, 8).transpose(1, 2).reshape(x.shape),
    "chunks": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "flip": lambda x: x.flip(-1),
    "expand": lambda x: x.mean(1, keepdim=True).expand_as(x),
    "cumsum": lambda x: x.cumsum(1) / 8,
    "index": lambda x: x[:, torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])],
    "where": lambda x: torch.where(MASK, x, x * 0.5),
    "masked": lambda x: x.masked_fill(MASK, 0.0),
    "clone": torch.clone,
    "contiguous": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "detach": lambda x: x.detach() + x,
    "in place": in_place,
    "function": Cube.apply,
    "scalar": lambda x: 1.7 / (x.abs() + 1.3) - 0.2,
    "topk": lambda x: x + x.topk(2, -1).values.sum(-1, keepdim=True),
    "empty": lambda x: x + x[:, :0].sum(),
    "unused": lambda x: (x.exp(), x)[1],
}
BINARY = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": lambda x, y: x - 0.3 * y,
    "gate": lambda x, y: functional.silu(x) * y,
    "maximum": torch.maximum,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.1),
    "attention": attention,
    "sdpa": lambda x, y: functional.scaled_dot_product_attention(x, y, y),
    "linear 0": lambda x, y: functional.linear(x, WEIGHTS[0]) + y,
    "linear 1": lambda x, y: functional.linear(y, WEIGHTS[1]) * 0.2,
}
STEPS = st.one_of(
    st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 9)),
    st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 9), st.integers(0, 9)),
)
PROGRAMS = st.lists(STEPS, min_size=2, max_size=12)
ENGINES = {
    "full": lambda: FullRegion("toy"),
    "selective": lambda: RebuildRegion("toy", save=("linear", "attention")),
    "save attention": lambda: RebuildRegion("toy", save=("attention",)),
    "save linear": lambda: RebuildRegion("toy", save=("linear",)),
    "full+selective": lambda: FullSelectiveRegion("toy", save=("attention",)),
}


def block_of(program):
    """The forward that runs a program: each step adds a value, from values before it."""

    def block(x):
        values = [x]
        for name, *places in program:
            work = UNARY.get(name) or BINARY[name]
            values.append(work(*(values[-1 - place % len(values)] for place in places)))
        return values[-1] + values[len(values) // 2] * 0.1

    return block


REBUILT = dict.fromkeys(ENGINES, 0)
"""What the engines have run again, in all programs of a test."""


def check(program):
    block = block_of(program)
    parameters = (*WEIGHTS, GAIN)
    expected = toy(block, parameters=parameters)
    for name, engine in ENGINES.items():
        region = engine()
        try:
            found = toy(block, region, parameters=parameters)
        except HfCkptError:
            assert any(step[0] == "in place" for step in program), f"{name} refuses what changes nothing in place"
            continue
        for key, value in expected.items():
            assert (value is None) == (found[key] is None), (name, key)
            assert value is None or torch.equal(value.nan_to_num(), found[key].nan_to_num()), (name, key)
        REBUILT[name] += region.recomputed


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_programs_have_the_gradients_of_the_plain_block(count):
    REBUILT.update(dict.fromkeys(REBUILT, 0))

    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(PROGRAMS)
    def run(program):
        check(program)

    run()
    assert min(REBUILT.values()) > count // 2, REBUILT
