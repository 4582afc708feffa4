"""Copies whose strides no node of autograd shows: `selective` gives the gradients of the plain block, bit for bit.

Sums, products and functions such as `exp` may round otherwise if elements lie in another order in memory.
"""

import collections

import pytest
import torch
from helpers.toys import toy
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from hf_ckpt.engines.rebuild.full_selective import FullSelectiveRegion
from hf_ckpt.engines.rebuild.layouts import Layout
from hf_ckpt.engines.rebuild.region import RebuildRegion

WEIGHT = nn.Parameter(torch.linspace(-1, 1, 256).view(16, 16).roll(5, 0))
FROZEN = torch.linspace(-1, 1, 256).view(16, 16).roll(3, 0)
KERNEL = nn.Parameter(torch.linspace(-1, 1, 144).view(4, 4, 3, 3).roll(1, 0))
IMAGES = (4, 4, 4, 4)
"""The elements of `toy` as images, and as they are: [2, 8, 16]."""


def order(x):
    """The memory format in which channels come last, if the tensor has as many dimensions."""
    return torch.channels_last if x.dim() == 4 else torch.contiguous_format


def apart(x):
    """A view of the same elements with strides in the reverse order."""
    dims = range(x.dim() - 1, -1, -1)
    return x.permute(*dims).contiguous().permute(*dims)


def pooled(x):
    return tuple(range(2, x.dim()))


FORMS = [
    *(torch.empty(2, 3, 4), torch.empty(2, 3, 4).transpose(0, 1), torch.empty(2, 3).t(), torch.empty(3).expand(2, 3)),
    *(torch.empty(4, 1, 3).transpose(0, 1), torch.empty(0, 3).t(), torch.empty(4, 6)[:, ::2], torch.empty(())),
    torch.empty(2, 1, 3).as_strided((2, 1, 3), (3, 7, 1)),
]


@pytest.mark.parametrize("tensor", FORMS, ids=lambda tensor: f"{tensor.size()}-{tensor.stride()}")
def test_a_layout_is_contiguous_if_torch_says_so(tensor):
    assert Layout(tensor.size(), tensor.stride(), tensor.dtype).is_contiguous() == tensor.is_contiguous()


COPIES = {
    "clone": torch.clone,
    "contiguous": torch.Tensor.contiguous,
    "clone last": lambda x: x.clone(memory_format=order(x)),
    "clone first": lambda x: x.clone(memory_format=torch.contiguous_format),
    "to": lambda x: x.to(memory_format=order(x)),
    "double": lambda x: x.to(torch.float64, memory_format=order(x)).to(x.dtype),
    "16 bits": lambda x: x.to(torch.bfloat16, memory_format=torch.contiguous_format).to(x.dtype),
    "copy": lambda x: x.to(x.dtype, copy=True),
    "cat": lambda x: torch.cat([x[:, :2], x[:, 2:]], 1),
    "index": lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
}
VIEWS = {
    "swap": lambda x: x.transpose(-1, -2) if x.dim() == 4 else x.view(2, 8, 4, 4).transpose(-1, -2).reshape(x.shape),
    "apart": apart,
    "last": lambda x: x.contiguous(memory_format=order(x)),
    "expand": lambda x: x[:, :1].expand_as(x),
    "part": lambda x: torch.cat([torch.exp(x[..., ::2].clamp(max=1)), x[..., 1::2]], -1),
}
SENSITIVE = {
    "gate": lambda x: torch.sigmoid(x.mean(pooled(x), keepdim=True)) * x,
    "mean": lambda x: x.mean(1, keepdim=True) * x,
    "tanh": torch.tanh,
    "exp": lambda x: torch.exp(x.clamp(max=1)),
    "silu": functional.silu,
    "pow": lambda x: (x.abs() + 0.1).pow(0.3),
    "softmax": lambda x: x.softmax(1) * x,
    "linear": lambda x: functional.linear(x, WEIGHT[: x.shape[-1], : x.shape[-1]]),
    "frozen": lambda x: functional.linear(x, FROZEN[: x.shape[-1], : x.shape[-1]]),
    "norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "conv": lambda x: functional.conv2d(x, KERNEL, padding=1) if x.dim() == 4 else x * 0.7,
    "sum": lambda x: torch.add(x.abs(), x, alpha=0.3),
    "products": lambda x: (x @ x.transpose(-1, -2)) @ x * 0.1,
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
}
STEPS = {**COPIES, **VIEWS, **SENSITIVE}
PROGRAMS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(kind)), st.integers(0, 1)) for kind in (COPIES, VIEWS, SENSITIVE, SENSITIVE)
    ),
    min_size=2,
    max_size=8,
)
ENGINES = {
    "selective": lambda: RebuildRegion("toy", save=("linear", "attention")),
    "save attention": lambda: RebuildRegion("toy", save=("attention",)),
    "save linear": lambda: RebuildRegion("toy", save=("linear",)),
    "full+selective": lambda: FullSelectiveRegion("toy", save=("attention",)),
}


ARRANGED = {"plain": lambda x: x, "apart": apart, "expanded": lambda x: x[:, :, :1].expand_as(x)}
"""How the block is given its input."""


def block_of(is_image, program):
    def block(x):
        values = [x.reshape(IMAGES) if is_image else x]
        for name, place in program:
            values.append(STEPS[name](values[-1 - place % len(values)]))
        return values[-1] + values[len(values) // 2] * 0.1

    return block


def check(is_image, arrange, program, rebuilt):
    block = block_of(is_image, program)

    def gradients(run):
        return toy(block, lambda block, x: run(block, ARRANGED[arrange](x)), parameters=(WEIGHT, KERNEL))

    expected = gradients(lambda block, x: block(x))
    for name, engine in ENGINES.items():
        region = engine()
        actual = gradients(region)
        for key, value in expected.items():
            assert (value is None) == (actual[key] is None), (name, key)
            assert value is None or torch.equal(value.nan_to_num(), actual[key].nan_to_num()), (name, key)
        rebuilt[name] += region.recomputed


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_copies_in_any_memory_format_change_no_bit(count):
    rebuilt = collections.Counter()

    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(st.booleans(), st.sampled_from(sorted(ARRANGED)), PROGRAMS)
    @example(False, "apart", [("clone", 0), ("apart", 0), ("attention", 0)])
    @example(True, "plain", [("double", 0), ("swap", 0), ("gate", 0)])
    @example(True, "plain", [("clone last", 0), ("swap", 0), ("silu", 0)])
    def run(is_image, arrange, program):
        check(is_image, arrange, program, rebuilt)

    run()
    assert min(rebuilt[name] for name in ENGINES) > count // 2, rebuilt
