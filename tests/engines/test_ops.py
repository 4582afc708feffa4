"""Every row of `engines.rebuild.ops` is used, and rebuilds bit-equal results."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from helpers.toys import SAVES, SCALE, WEIGHT, same_toys
from torch import nn
from torch.nn import functional

from hf_ckpt.engines.rebuild import ops
from hf_ckpt.errors import RebuildError

BIAS = nn.Parameter(torch.linspace(-1, 1, 16))


def _qkv(x):
    return [x.view(2, 8, 4, 4).transpose(1, 2) * factor for factor in (1.0, 0.5, 2.0)]


def _attention(y, **options):
    return functional.scaled_dot_product_attention(*_qkv(y), **options)


def _fused_attention(y, *mask, **options):
    return torch.ops.aten._scaled_dot_product_fused_attention_overrideable(*_qkv(y), *mask, **options)[0]


def _mask(y):
    return torch.linspace(-1, 1, 64, dtype=y.dtype).view(1, 1, 8, 8).expand(2, 4, 8, 8)


def _overrideable(query, key, value, mask=None, dropout=0.0, is_causal=False, debug=False, *, scale=None):
    """What a device of its own may do as its fused attention."""
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, is_causal, attn_mask=mask, scale=scale
    )
    nothing = torch.empty(0)
    return output, logsumexp, nothing, nothing, 8, 8, nothing, nothing, nothing


def _overrideable_backward(gradient, query, key, value, mask, wanted, output, logsumexp, *rest, scale=None):
    *_, dropout, is_causal, _, _ = rest
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, logsumexp, dropout, is_causal, attn_mask=mask, scale=scale
    )
    return *gradients, None


OVERRIDEABLE = torch.library.Library("aten", "IMPL")
OVERRIDEABLE.impl("_scaled_dot_product_fused_attention_overrideable", _overrideable, "CPU")
OVERRIDEABLE.impl("_scaled_dot_product_fused_attention_overrideable_backward", _overrideable_backward, "CPU")

# Node, and sometimes a constant that its row must read -> a function whose product saves the node's result, which must
# then be rebuilt. `y` is saved by itself first.
TOYS = {
    "SiluBackward0": functional.silu,
    "GeluBackward0": lambda y: functional.gelu(y, approximate="tanh"),
    "ReluBackward0": lambda y: torch.relu(y) * 2.0,
    "LeakyReluBackward0": lambda y: functional.leaky_relu(y, 0.2),
    "SoftplusBackward0": lambda y: functional.softplus(y, beta=2.0) * 2.0,
    "TanhBackward0": lambda y: torch.tanh(y) * 2.0,
    "SigmoidBackward0": lambda y: torch.sigmoid(y) * 2.0,
    "MishBackward0": functional.mish,
    "ErfBackward0": torch.erf,
    "ExpBackward0": lambda y: torch.exp(-y) * 2.0,
    "HardswishBackward0": functional.hardswish,
    "ClampBackward1": lambda y: y.clamp(0.2, 1.5),
    "ClampMinBackward0": lambda y: y.clamp_min(0.2),
    "MulBackward0": lambda y: y * y.detach(),
    "MulBackward1": lambda y: torch.ops.aten.mul.Scalar(y, 1.7),
    "DivBackward0": lambda y: y / (y.detach().abs() + 1),
    "NegBackward0": lambda y: -y,
    "PowBackward0": lambda y: y.pow(3),
    "RsqrtBackward0": lambda y: torch.rsqrt(y * y),
    "SqrtBackward0": lambda y: torch.sqrt(y * y),
    "AbsBackward0": torch.abs,
    "AddBackward0": lambda y: torch.add(y, y, alpha=3),
    "SubBackward0": lambda y: torch.sub(y, y * y, alpha=2),
    "ToCopyBackward0": lambda y: y.to(torch.bfloat16),
    "CloneBackward0": lambda y: y.transpose(0, 1).contiguous().transpose(0, 1),
    "CatBackward0": lambda y: torch.cat([y[..., 8:], -y[..., :8]], -1),
    "MeanBackward1": lambda y: y.mean(-1, keepdim=True),
    "NativeDropoutBackward0": lambda y: torch.native_dropout(y, 0.25, True)[0],
    "ViewBackward0": lambda y: (y * y).view(2, 8, 4, 4).view(2, 8, 16),
    "UnsafeViewBackward0": lambda y: torch.ops.aten._unsafe_view(y * y, [2, 8, 16]),
    "ReshapeAliasBackward0": lambda y: torch.ops.aten._reshape_alias(y * y, [2, 8, 16], [128, 16, 1]),
    "AliasBackward0": lambda y: torch.ops.aten.alias(y * y),
    "TBackward0": lambda y: (y * y).view(16, 16).t().view(2, 8, 16),
    "TransposeBackward0": lambda y: (y * y).transpose(-1, -2).transpose(1, 2),
    "PermuteBackward0": lambda y: (y * y).permute(0, 2, 1).permute(0, -1, 1),
    "ExpandBackward0": lambda y: (y * y)[:, :1].expand(2, 8, 16),
    "UnsqueezeBackward0": lambda y: (y * y).unsqueeze(1).view(2, 8, 16),
    "SliceBackward0": lambda y: (y * y)[:, 2:6:2],
    "SelectBackward0": lambda y: (y * y)[:, -1],
    "SplitBackward0": lambda y: (y * y).split(3, -1)[2],
    "SplitWithSizesBackward0": lambda y: (y * y).split([3, 1, 4], 1)[2],
    "UnbindBackward0": lambda y: (y * y).unbind(-2)[5],
    "IndexBackward0": lambda y: y[:, torch.tensor([5, 1, 1])],
    "EmbeddingBackward0": lambda y: functional.embedding(torch.arange(16).view(2, 8), WEIGHT) * y.detach(),
    "MmBackward0": lambda y: torch.mm(y.view(16, 16), WEIGHT),
    "AddmmBackward0": lambda y: torch.addmm(BIAS, y.view(16, 16), WEIGHT),
    "GroupedMmBackward0": lambda y: torch.ops.aten._grouped_mm(
        y.view(16, 16), WEIGHT.expand(2, 16, 16).contiguous(), torch.tensor([5, 16], dtype=torch.int32)
    ),
    "BmmBackward0": lambda y: torch.bmm(y, y.transpose(1, 2)),
    "SoftmaxBackward0": lambda y: torch.softmax(y, -1) * 2.0,
    "SafeSoftmaxBackward0": lambda y: torch.ops.aten._safe_softmax(y, -1) * 2.0,
    "ScaledDotProductFlashAttentionForCpuBackward0": _attention,
    "ScaledDotProductFusedAttentionOverrideableBackward0": lambda y: _fused_attention(y, scale=0.3),
    "GeluBackward0: exact": functional.gelu,
    "ClampBackward1: from above": lambda y: y.clamp(max=0.1),
    "MulBackward0: a number": lambda y: y * 3.3,
    "MulBackward0: of a parameter": lambda y: y * (SCALE * 2.5),
    "DivBackward0: a number": lambda y: y / 3.3,
    "PowBackward0: negative": lambda y: (y + 1).pow(-2),
    "ToCopyBackward0: wider": lambda y: y.double(),
    "ToCopyBackward0: another layout": lambda y: y.transpose(1, 2).to(
        torch.float64, memory_format=torch.contiguous_format
    ),
    "CloneBackward0: of a transposed": lambda y: (y * y).transpose(1, 2).clone().transpose(1, 2).reshape(2, 128),
    "CloneBackward0: then a product": lambda y: (y.transpose(0, 1).clone() * 1.5).transpose(0, 1).reshape(2, 128),
    "CatBackward0: in the middle": lambda y: torch.cat([y, -y], 1),
    "MeanBackward1: over two": lambda y: y.mean((0, -1), keepdim=True),
    "MeanBackward1: dropped": lambda y: y.mean(1),
    "MeanBackward1: in float32": lambda y: y.mean(-1, keepdim=True, dtype=torch.float32),
    "NativeDropoutBackward0: of everything": lambda y: torch.cat([torch.native_dropout(y * y, 1.0, True)[0], y]),
    "SliceBackward0: from the end": lambda y: (y * y)[:, -7:-1:3],
    "UnsqueezeBackward0: the end": lambda y: (y * y).unsqueeze(-1),
    "IndexBackward0: two": lambda y: (y * y)[torch.tensor([1, 0]), torch.tensor([3, 2])],
    "IndexBackward0: truth values": lambda y: (y * y)[y.detach() > 0.5],
    "AddmmBackward0: alpha and beta": lambda y: torch.addmm(BIAS, y.view(16, 16), WEIGHT, alpha=0.5, beta=2.0),
    "SoftmaxBackward0: in the middle": lambda y: torch.softmax(y, 1) * 2.0,
    "ScaledDotProductFlashAttentionForCpuBackward0: causal": lambda y: _attention(y, is_causal=True, scale=0.3),
    "ScaledDotProductFlashAttentionForCpuBackward0: masked": lambda y: _attention(y, attn_mask=_mask(y)),
    "ScaledDotProductFusedAttentionOverrideableBackward0: masked": lambda y: _fused_attention(y, _mask(y)),
}


OF_CUDA = {f"ScaledDotProduct{name}AttentionBackward0" for name in ("Flash", "Efficient", "Cudnn")}


def test_every_row_is_tried_but_those_of_cuda():
    assert ops.OPS.keys() - OF_CUDA == {name.partition(":")[0] for name in TOYS}


@pytest.mark.parametrize("name", sorted(OF_CUDA))
def test_fused_attention_with_dropout_is_kept(name):
    """Rebuilt, it would draw another mask."""
    prepared = []
    for share in (0.0, 0.1):
        node = SimpleNamespace(_saved_dropout_p=share, _saved_is_causal=True, _saved_scale=None, _saved_attn_bias=None)
        prepared.append(ops.OPS[name].prepare(node, None) is not None)
    assert prepared == [True, False]


OF_NUMBERS = ("MulBackward0: a number", "DivBackward0: a number", "CloneBackward0: then a product")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@each_dtype
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.compat] * (":" in name)) for name in TOYS])
def test_a_row_makes_the_same_bits(name, dtype, monkeypatch):
    """A product with a parameter saves the result, so the row must rebuild it."""
    if name in OF_NUMBERS and not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"):
        pytest.skip("this torch (2.8) does not tell whether a number lies behind saved-tensor hooks: results stay")
    used, node = [], name.partition(":")[0]
    row = ops.OPS[node]

    def prepare(saving, *metadata):
        operation = row.prepare(saving, *metadata)
        return operation and (lambda *operands: used.append(node) or operation(*operands))

    monkeypatch.setitem(ops.OPS, node, dataclasses.replace(row, prepare=prepare))
    weight, bias = (nn.Parameter(tensor.detach().to(dtype)) for tensor in (WEIGHT, BIAS))
    monkeypatch.setitem(globals(), "WEIGHT", weight)
    monkeypatch.setitem(globals(), "BIAS", bias)
    same_toys(lambda x: TOYS[name](x * x).float() * SCALE, save=(), dtype=dtype, parameters=(SCALE, weight, bias))
    assert used, f"the row {node} was not used"


def _gated(x, reorder):
    """As in squeeze and excitation. A mean over channels that are apart in memory adds them in another order."""
    images = x.view(2, 4, 4, 8)
    return torch.exp(reorder(images, memory_format=torch.channels_last).mean((2, 3), keepdim=True) * SCALE) * images


def test_a_chain_of_sums_is_walked_once():
    """Each sum needs the one before it twice: forty of them have 2 ** 40 paths."""

    def chain(x):
        hidden = functional.silu(x)
        for _ in range(40):
            hidden = (hidden + hidden) * 0.5
        return torch.exp(hidden.mean(-1, keepdim=True) * SCALE) * x

    same_toys(chain, save=())


STAY = {
    "a mean of a copy in an order that no node shows": lambda x: _gated(x, torch.clone),
    "a mean of a cast to such an order": lambda x: _gated(x, torch.Tensor.to),
    "an operation without a row": lambda x: x.abs().pow(SCALE),
    "a sum in place of two types": lambda x: functional.silu((x * 2.0).add_(x.float() * 0.7)),
    "dropout in eval mode": lambda x: torch.native_dropout(functional.silu(x), 0.3, False)[0] * functional.mish(x),
    "64 bits": lambda x: (wide := x.double().sin()).float().square() * torch.sigmoid(wide) * wide,
}


@pytest.mark.compat
@each_dtype
@pytest.mark.parametrize("name", STAY)
def test_what_a_row_cannot_make_stays(name, dtype):
    same_toys(lambda x: STAY[name](x) * SCALE, save=(), dtype=dtype)


@pytest.mark.parametrize("inputs", [None, 2])
def test_inputs_that_a_row_reads_itself_are_no_operands(inputs, monkeypatch):
    """Inputs that a row reads itself, such as the optional bias of efficient attention, do not count as operands."""

    def prepare(node, metadata):
        factor = node._saved_tensor2
        return lambda base, other: torch.addcmul(base, other, factor)

    monkeypatch.setitem(ops.OPS, "AddcmulBackward0", ops.Op("pointwise", prepare, inputs=inputs))
    factor = torch.linspace(-1, 1, 256).view(2, 8, 16)
    same_toys(lambda x: torch.addcmul(x * x, x, factor) * SCALE, save=(), rebuilds=inputs is not None)


@pytest.mark.parametrize("wrong", [torch.Tensor.double, lambda x: x[:1]])
def test_another_shape_or_type_is_an_error(wrong, monkeypatch):
    row = ops.Op("activation", lambda node, metadata: lambda x: wrong(functional.silu(x)))
    monkeypatch.setitem(ops.OPS, "SiluBackward0", row)
    with pytest.raises(RebuildError, match=r"block 'toy': an operation gave .* in the forward"):
        same_toys(lambda x: functional.silu(x) * SCALE)


VIEWS_OF_A_RESULT = {
    "as complex": lambda y: torch.view_as_real(torch.view_as_complex(y.view(2, 8, 8, 2)) * SCALE),
    "imaginary part of a conjugate": lambda y: torch.view_as_complex(y.view(2, 8, 8, 2)).conj().imag * SCALE,
    "negated view": lambda y: torch._neg_view(y) * SCALE,
    "bits": lambda y: y * (y.detach().view(torch.int32) % 7) * SCALE,
    "as_strided": lambda y: torch.as_strided(y, (2, 3), (1, 16), 5) * SCALE,
    "expanded": lambda y: y[:, :1].expand(2, 5, 16) * SCALE,
    "of an offset": lambda y: y[1:].view(8, 16)[2:].t() * SCALE,
    "of a transposed": lambda y: torch.mul(y.transpose(1, 2), 2.0)[:, 3:] * SCALE,
}


@pytest.mark.compat
@pytest.mark.parametrize("name", VIEWS_OF_A_RESULT)
def test_a_view_of_what_is_made_again(name):
    """A view of a rebuilt result is right, whether the result or the view is saved first."""

    for order in (1, -1):
        makers = [lambda y: y * SCALE, VIEWS_OF_A_RESULT[name]][::order]

        def block(x, makers=makers):
            y = functional.silu(x)
            return torch.cat([make(y).flatten() for make in makers])

        for save in ((), *SAVES):
            same_toys(block, save=save)
