"""The recipe table of the rebuild engine: how to make a tensor again from the autograd node that made it. Data only.

A row says for one node name which operands the operation had and how to run it on them again. The engine resolves the
operands; a row reads the node's constants. Operations without a row are kept, so a row must be exact or not be there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

LINEAR, ATTENTION = "linear", "attention"
VIEW = "view"

Operation = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Row:
    """How results of one kind of autograd node are made again."""

    op_class: str
    """`linear` and `attention` are the classes that `save` names; `view` costs nothing; the others are for reports."""
    prepare: Callable[[Any, Any], Operation | None]
    """(node, metadata of the wanted output: shape, dtype, device) -> the operation on its operands; None: keep it."""
    constants: tuple[str, ...] = ()
    """Attributes of the node that hold the operands which need no gradient, in the order of the operands."""
    seen: str = "cpu, torch 2.13"
    """Where the row was last seen to give the very same bits; empty: from torch's source, never seen to run."""


def _plainly(operation: Operation) -> Callable[[Any, Any], Operation]:
    return lambda node, metadata: operation


def _signed(value: int) -> int:
    """Nodes show negative dimensions as unsigned 64-bit numbers."""
    return value - 2**64 if value >= 2**63 else value


def _gelu(node: Any, metadata: Any) -> Operation:
    return functools.partial(functional.gelu, approximate=node._saved_approximate)


def _pow(node: Any, metadata: Any) -> Operation:
    exponent = node._saved_exponent
    return lambda x: x.pow(exponent)


def _leaky_relu(node: Any, metadata: Any) -> Operation:
    return functools.partial(functional.leaky_relu, negative_slope=node._saved_negative_slope)


def _scaled(operation: Operation) -> Callable[[Any, Any], Operation]:
    """torch.add and torch.sub with their factor of the second operand."""

    def prepare(node: Any, metadata: Any) -> Operation:
        alpha = node._saved_alpha
        return operation if alpha == 1 else functools.partial(operation, alpha=alpha)

    return prepare


def _div(node: Any, metadata: Any) -> Operation:
    return torch.div


def _cast(node: Any, metadata: Any) -> Operation | None:
    dtype, device = metadata.dtype, metadata.device
    return lambda x: x.to(device=device, dtype=dtype)


def _cat(node: Any, metadata: Any) -> Operation:
    dim = _signed(node._saved_dim)
    return lambda *parts: torch.cat(parts, dim)


def _mean(node: Any, metadata: Any) -> Operation | None:
    dims = node._saved_dim
    if dims is None:
        return None
    dims, keepdim = [_signed(dim) for dim in dims], node._saved_keepdim
    dtype = metadata.dtype  # a mean can change it without a cast of its own
    return lambda x: x.mean(dims, keepdim, dtype=dtype)


def _softmax(node: Any, metadata: Any) -> Operation:
    dim, dtype = _signed(node._saved_dim), metadata.dtype
    return lambda x: torch.softmax(x, dim, dtype=dtype)


def _native_dropout(node: Any, metadata: Any) -> Operation:
    """The mask is an operand, not a draw. As torch does it, in aten/src/ATen/native/Dropout.cpp and cuda/Dropout.cu."""
    mask, kept = node._saved_result1, 1.0 - node._saved_p
    if metadata.device.type == "cpu":
        return lambda x: x * (mask.to(x.dtype) * (1.0 / kept))
    # CUDA computes x * mask * scale in float32, and the scale too; so does its backward kernel.
    scale = float(1.0 / torch.tensor(kept, dtype=torch.float32))
    return lambda x: torch.ops.aten.native_dropout_backward(x, mask, scale)


def _embedding(node: Any, metadata: Any) -> Operation:
    indices = node._saved_indices
    return lambda weight: functional.embedding(indices, weight)


def _addmm(node: Any, metadata: Any) -> Operation:
    alpha, beta = node._saved_alpha, node._saved_beta
    return lambda bias, a, b: torch.addmm(bias, a, b, alpha=alpha, beta=beta)


# --- attention --------------------------------------------------------------------------------------------------------
# Only what draws nothing: with dropout the kernel's own random state would be needed.


def _attention(name: str, *, mask: str | None, extra: Sequence[str] = ()) -> Callable[[Any, Any], Operation | None]:
    def prepare(node: Any, metadata: Any) -> Operation | None:
        operation = getattr(torch.ops.aten, name, None)
        if operation is None or node._saved_dropout_p:
            return None
        keywords: dict[str, Any] = {"dropout_p": 0.0, "is_causal": node._saved_is_causal, "scale": node._saved_scale}
        if mask is not None:
            keywords[mask] = getattr(node, f"_saved_{mask}")
        keywords |= dict.fromkeys(extra, True)
        return lambda q, k, v, *bias: operation(q, k, v, **keywords)[0]

    return prepare


# --- views ------------------------------------------------------------------------------------------------------------


def _view(node: Any, metadata: Any) -> Operation:
    shape = list(metadata.shape)
    return lambda x: x.reshape(shape)  # not `view`: what was made again may lie in another order until it is asked for


def _expand(node: Any, metadata: Any) -> Operation:
    shape = list(metadata.shape)
    return lambda x: x.expand(shape)


def _transpose(node: Any, metadata: Any) -> Operation:
    first, second = _signed(node._saved_dim0), _signed(node._saved_dim1)
    return lambda x: x.transpose(first, second)


def _permute(node: Any, metadata: Any) -> Operation:
    dims = [_signed(dim) for dim in node._saved_dims]
    return lambda x: x.permute(dims)


def _unsqueeze(node: Any, metadata: Any) -> Operation:
    dim = _signed(node._saved_dim)
    return lambda x: x.unsqueeze(dim)


def _slice(node: Any, metadata: Any) -> Operation:
    dim, start, end, step = (_signed(getattr(node, f"_saved_{name}")) for name in ("dim", "start", "end", "step"))
    return lambda x: torch.ops.aten.slice(x, dim, start, end, step)


def _select(node: Any, metadata: Any) -> Operation:
    dim, index = _signed(node._saved_dim), _signed(node._saved_index)
    return lambda x: x.select(dim, index)


UNARY = {
    "SiluBackward0": _plainly(functional.silu),
    "GeluBackward0": _gelu,
    "ReluBackward0": _plainly(torch.relu),
    "LeakyReluBackward0": _leaky_relu,
    "TanhBackward0": _plainly(torch.tanh),
    "SigmoidBackward0": _plainly(torch.sigmoid),
    "MishBackward0": _plainly(functional.mish),
    "ErfBackward0": _plainly(torch.erf),
}
POINTWISE = {
    "MulBackward0": _plainly(torch.mul),
    "DivBackward0": _div,
    "NegBackward0": _plainly(torch.neg),
    "PowBackward0": _pow,
    "RsqrtBackward0": _plainly(torch.rsqrt),
    "SqrtBackward0": _plainly(torch.sqrt),
    "AbsBackward0": _plainly(torch.abs),
    "AddBackward0": _scaled(torch.add),
    "SubBackward0": _scaled(torch.sub),
}
VIEWS = {
    "ViewBackward0": _view,
    "UnsafeViewBackward0": _view,
    "ReshapeAliasBackward0": _view,
    "AliasBackward0": _plainly(torch.Tensor.detach),
    "TBackward0": _plainly(torch.t),
    "TransposeBackward0": _transpose,
    "PermuteBackward0": _permute,
    "ExpandBackward0": _expand,
    "UnsqueezeBackward0": _unsqueeze,
    "SliceBackward0": _slice,
    "SelectBackward0": _select,
}

TABLE: dict[str, Row] = {
    **{name: Row("activation", prepare) for name, prepare in UNARY.items()},
    **{name: Row("pointwise", prepare, ("self", "other")) for name, prepare in POINTWISE.items()},
    **{name: Row(VIEW, prepare) for name, prepare in VIEWS.items()},
    "ToCopyBackward0": Row("cast", _cast),
    "CloneBackward0": Row("copy", _plainly(lambda x: x.clone(memory_format=torch.contiguous_format))),
    "CatBackward0": Row("copy", _cat),
    "MeanBackward1": Row("reduction", _mean),
    "NativeDropoutBackward0": Row("dropout", _native_dropout, seen="cpu, torch 2.13 (torch.native_dropout)"),
    "EmbeddingBackward0": Row("embedding", _embedding),
    "MmBackward0": Row(LINEAR, _plainly(torch.mm), ("self", "mat2")),
    "AddmmBackward0": Row(LINEAR, _addmm, ("", "mat1", "mat2")),
    "BmmBackward0": Row(ATTENTION, _plainly(torch.bmm), ("self", "mat2")),
    "SoftmaxBackward0": Row(ATTENTION, _softmax),
    "ScaledDotProductFlashAttentionForCpuBackward0": Row(
        ATTENTION,
        _attention("_scaled_dot_product_flash_attention_for_cpu", mask="attn_mask"),
        ("query", "key", "value"),
    ),
    "ScaledDotProductFlashAttentionBackward0": Row(
        ATTENTION,
        _attention("_scaled_dot_product_flash_attention", mask=None),
        ("query", "key", "value"),
        seen="",
    ),
    "ScaledDotProductEfficientAttentionBackward0": Row(
        ATTENTION,
        _attention("_scaled_dot_product_efficient_attention", mask="attn_bias", extra=("compute_log_sumexp",)),
        ("query", "key", "value"),
        seen="",
    ),
    "ScaledDotProductCudnnAttentionBackward0": Row(
        ATTENTION,
        _attention("_scaled_dot_product_cudnn_attention", mask="attn_bias", extra=("compute_log_sumexp",)),
        ("query", "key", "value"),
        seen="",
    ),
}


def rows_for(save: Sequence[str]) -> dict[str, Row]:
    """The rows that may be used when results of the op classes `save` stay."""
    return {name: row for name, row in TABLE.items() if row.op_class not in save}
