"""The operations that the rebuild engine can run again: a table with one row for each kind of autograd node.

The engine finds the operands of a node; the row reads the node's constants and says how to run the operation again.
An operation gets a row only if that gives exactly the same bits. Results of operations without a row are kept.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy
import torch
from torch.nn import functional

from hf_ckpt import compat
from hf_ckpt.engines.rebuild.values import Stored, read

LINEAR, ATTENTION = "linear", "attention"
"""The classes of operations that `save` may name. They are expensive to run again."""
VIEW = "view"
"""The class of operations that return a view of their operand."""

Function = Callable[..., torch.Tensor]
"""An operation. It is called with its operands."""


@dataclasses.dataclass(frozen=True)
class Op:
    """How the results of one kind of autograd node are rebuilt."""

    op_class: str
    """Its class. `save` may name `linear` and `attention`; operations of all other classes are always rebuilt."""
    prepare: Callable[..., Function | None]
    """Reads the constants of an operation: (node, metadata of the result) -> the operation on its operands, or None if
    the result has to be kept. The metadata are shape, dtype and device."""
    constants: tuple[str, ...] = ()
    """For each operand, the name under which the node saves it (`_saved_<name>`), for operands without a gradient."""
    saved: tuple[str, ...] = ()
    """The names under which the node saves further operands, which follow its inputs."""
    operands: int | None = None
    """How many of the node's inputs are operands, if `prepare` reads the others from the node; None for all."""
    reads: bool = False
    """Whether `prepare` reads tensors that the node has saved."""
    several: bool = False
    """Whether the node has several results; then `prepare` also gets the number of one."""
    has_bias: bool = False
    """Whether operand 0 is the bias of a linear layer, which the node does not save."""


def _plainly(operation: Function) -> Callable[[Any, Any], Function]:
    """The `prepare` of an operation without constants."""
    return lambda node, metadata: operation


def _signed(value: int) -> int:
    """Return an attribute as a signed number: nodes show negative dimensions as unsigned 64-bit numbers."""
    return value - 2**64 if value >= 2**63 else value


def _gelu(node: Any, metadata: Any) -> Function:
    return functools.partial(functional.gelu, approximate=node._saved_approximate)


def _pow(node: Any, metadata: Any) -> Function:
    exponent = node._saved_exponent
    return lambda x: x.pow(exponent)


def _times_a_number(node: Any, metadata: Any) -> Function:
    number = node._saved_other
    return lambda x: torch.ops.aten.mul.Scalar(x, number)


def _softplus(node: Any, metadata: Any) -> Function:
    return functools.partial(functional.softplus, beta=node._saved_beta, threshold=node._saved_threshold)


def _leaky_relu(node: Any, metadata: Any) -> Function:
    return functools.partial(functional.leaky_relu, negative_slope=node._saved_negative_slope)


def _scaled(operation: Function) -> Callable[[Any, Any], Function]:
    """The `prepare` of torch.add and torch.sub, which may multiply the second operand by a factor."""

    def prepare(node: Any, metadata: Any) -> Function:
        alpha = node._saved_alpha
        return operation if alpha == 1 else functools.partial(operation, alpha=alpha)

    return prepare


def _typed(prepare: Callable[[Any, Any], Function]) -> Callable[[Any, Any], Function]:
    """The `prepare` of an operation whose in-place form keeps the type of the tensor that it changes."""

    def prepare_typed(node: Any, metadata: Any) -> Function:
        operation, dtype = prepare(node, metadata), metadata.dtype
        return lambda *operands: operation(*operands).to(dtype)

    return prepare_typed


def _cast(node: Any, metadata: Any) -> Function | None:
    dtype, device = metadata.dtype, metadata.device
    return lambda x: x.to(device=device, dtype=dtype)


def _cat(node: Any, metadata: Any) -> Function:
    dim = _signed(node._saved_dim)
    return lambda *parts: torch.cat(parts, dim)


def _mean(node: Any, metadata: Any) -> Function | None:
    dims = node._saved_dim
    if dims is None:
        return None
    dims, keepdim = [_signed(dim) for dim in dims], node._saved_keepdim
    dtype = metadata.dtype  # a mean can change it without a cast of its own
    return lambda x: x.mean(dims, keepdim, dtype=dtype)


def _softmax(node: Any, metadata: Any) -> Function:
    dim, dtype = _signed(node._saved_dim), metadata.dtype
    return lambda x: torch.softmax(x, dim, dtype=dtype)


def _safe_softmax(node: Any, metadata: Any) -> Function:
    dim, dtype = _signed(node._saved_dim), metadata.dtype
    return lambda x: torch.ops.aten._safe_softmax(x, dim, dtype)


def _native_dropout(node: Any, metadata: Any) -> Function | None:
    """Dropout with the mask that the node saved: nothing is drawn again.

    The result is kept on a device whose kernel rounds by none of the known rules.
    """
    kept = 1.0 - node._saved_p
    if not kept:
        return lambda x, mask: x * torch.zeros_like(mask, dtype=x.dtype)
    mask, device = read(node, "result1"), metadata.device
    if isinstance(mask, Stored) and mask.original is not None:
        mask = mask.original.tensor
    if isinstance(mask, torch.Tensor) and compat.torch.is_fake(mask):
        return functools.partial(_dropped_on_cpu if device.type == "cpu" else _dropped_on_cuda, kept=kept)
    # With `train=False`, which only direct calls pass, nothing is scaled, and the node does not show it.
    if device.type == "cpu" and isinstance(mask, torch.Tensor) and bool(mask.all()):
        return None
    rule = _rule_of_dropout(device, metadata.dtype)
    return None if rule is None else functools.partial(rule, kept=kept)


def _dropped_on_cpu(x: torch.Tensor, mask: torch.Tensor, kept: float) -> torch.Tensor:
    """Dropout as in aten/src/ATen/native/Dropout.cpp."""
    return x * (mask.to(x.dtype) * (1.0 / kept))


def _dropped_on_cuda(x: torch.Tensor, mask: torch.Tensor, kept: float) -> torch.Tensor:
    """Dropout as in cuda/Dropout.cu: x * mask * scale in float32, and the scale, too. So does its backward kernel."""
    scale = numpy.float32(1.0) / numpy.float32(kept)
    dropped: torch.Tensor = torch.ops.aten.native_dropout_backward(x, mask, float(scale))
    return dropped


_rules_of_dropout: dict[tuple[str, torch.dtype], Callable[..., torch.Tensor] | None] = {}
"""(type of device, type of numbers) -> the rule that gives the same bits as dropout there, or None; as far as tried."""


def _rule_of_dropout(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """Return the rule that gives the same bits as dropout on this type of device; None if there is none.

    It is tried once, because backends round differently, some even in forward and backward. Waits for the device then.
    """
    key = device.type, dtype
    if key in _rules_of_dropout:
        return _rules_of_dropout[key]
    if compat.devices.is_capturing():  # a graph allows no trial
        return None
    with torch.no_grad(), compat.torch.unseen_by_modes(), compat.random_state.RandomState([device]).kept():
        values = torch.randn(2**12, generator=torch.Generator().manual_seed(0), device="cpu").to(device, dtype)
        tries = [(1.0 - p, *torch.native_dropout(values, p, True)) for p in (0.1, 0.3, 0.7)]
        rules = (_dropped_on_cpu, _dropped_on_cuda)
        fitting = (r for r in rules if all(torch.equal(r(values, mask, kept), out) for kept, out, mask in tries))
        _rules_of_dropout[key] = next(fitting, None)
    return _rules_of_dropout[key]


def _clamp(node: Any, metadata: Any) -> Function:
    return functools.partial(torch.clamp, min=node._saved_min, max=node._saved_max)


def _clamp_min(node: Any, metadata: Any) -> Function:
    return functools.partial(torch.clamp_min, min=node._saved_min)


def _index(node: Any, metadata: Any) -> Function:
    indices = list(node._saved_indices)
    return lambda x: torch.ops.aten.index(x, indices)


def _grouped_mm(node: Any, metadata: Any) -> Function | None:
    """A product for each group of rows, such as the tokens of each expert. The node does not save a bias."""
    operation = getattr(torch.ops.aten, "_grouped_mm", None)
    if operation is None or any(source is not None for source, _ in node.next_functions[2:]):
        return None
    offsets, dtype = node._saved_offs, metadata.dtype
    return lambda a, b: operation(a, b, offsets, None, dtype)


def _embedding(node: Any, metadata: Any) -> Function:
    indices = node._saved_indices
    return lambda weight: functional.embedding(indices, weight)


def _addmm(node: Any, metadata: Any) -> Function:
    alpha, beta = node._saved_alpha, node._saved_beta
    return lambda bias, a, b: torch.addmm(bias, a, b, alpha=alpha, beta=beta)


def _attention(name: str, *, mask: str | None, extra: Sequence[str] = ()) -> Callable[[Any, Any], Function | None]:
    """The `prepare` of a kernel of scaled dot-product attention.

    With dropout its result is kept, because rebuilding it would need the kernel's own random state.

    Args:
        name: the kernel's name in `torch.ops.aten`.
        mask: the keyword of its mask, which the node saves; None for a kernel without a mask.
        extra: keywords to set to True.
    """

    def prepare(node: Any, metadata: Any) -> Function | None:
        operation = getattr(torch.ops.aten, name, None)
        if operation is None or node._saved_dropout_p:
            return None
        keywords: dict[str, Any] = {"dropout_p": 0.0, "is_causal": node._saved_is_causal, "scale": node._saved_scale}
        if mask is not None:
            keywords[mask] = getattr(node, f"_saved_{mask}")
        keywords |= dict.fromkeys(extra, True)
        return lambda q, k, v: operation(q, k, v, **keywords)[0]

    return prepare


def _view(node: Any, metadata: Any) -> Function:
    shape = list(metadata.shape)
    return lambda x: x.reshape(shape)  # not `view`: a rebuilt tensor may have other strides at first


def _expand(node: Any, metadata: Any) -> Function:
    shape = list(metadata.shape)
    return lambda x: x.expand(shape)


def _transpose(node: Any, metadata: Any) -> Function:
    first, second = _signed(node._saved_dim0), _signed(node._saved_dim1)
    return lambda x: x.transpose(first, second)


def _permute(node: Any, metadata: Any) -> Function:
    dims = [_signed(dim) for dim in node._saved_dims]
    return lambda x: x.permute(dims)


def _unsqueeze(node: Any, metadata: Any) -> Function:
    dim = _signed(node._saved_dim)
    return lambda x: x.unsqueeze(dim)


def _slice(node: Any, metadata: Any) -> Function:
    dim, start, end, step = (_signed(getattr(node, f"_saved_{name}")) for name in ("dim", "start", "end", "step"))
    return lambda x: torch.ops.aten.slice(x, dim, start, end, step)


def _select(node: Any, metadata: Any) -> Function:
    dim, index = _signed(node._saved_dim), _signed(node._saved_index)
    return lambda x: x.select(dim, index)


def _split(node: Any, metadata: Any, number: int) -> Function:
    dim, size = _signed(node._saved_dim), node._saved_split_size
    return lambda x: torch.split(x, size, dim)[number]


def _split_with_sizes(node: Any, metadata: Any, number: int) -> Function:
    dim, sizes = _signed(node._saved_dim), list(node._saved_split_sizes)
    return lambda x: torch.split(x, sizes, dim)[number]


def _unbind(node: Any, metadata: Any, number: int) -> Function:
    dim = _signed(node._saved_dim)
    return lambda x: x.select(dim, number)


# `prepare` by name of the node: activations, pointwise operations of one or two operands, views, and
# operations that return several views.
UNARY = {
    "SiluBackward0": _plainly(functional.silu),
    "GeluBackward0": _gelu,
    "ReluBackward0": _plainly(torch.relu),
    "SoftplusBackward0": _softplus,
    "LeakyReluBackward0": _leaky_relu,
    "TanhBackward0": _plainly(torch.tanh),
    "SigmoidBackward0": _plainly(torch.sigmoid),
    "MishBackward0": _plainly(functional.mish),
    "ErfBackward0": _plainly(torch.erf),
    "ExpBackward0": _plainly(torch.exp),
    "HardswishBackward0": _plainly(functional.hardswish),
    "ClampBackward1": _clamp,
    "ClampMinBackward0": _clamp_min,
}
POINTWISE = {
    "MulBackward0": _plainly(torch.mul),
    "MulBackward1": _times_a_number,
    "DivBackward0": _plainly(torch.div),
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
PARTS = {"SplitBackward0": _split, "SplitWithSizesBackward0": _split_with_sizes, "UnbindBackward0": _unbind}

OPS: dict[str, Op] = {
    **{name: Op("activation", prepare) for name, prepare in UNARY.items()},
    **{name: Op("pointwise", _typed(prepare), ("self", "other")) for name, prepare in POINTWISE.items()},
    **{name: Op(VIEW, prepare) for name, prepare in VIEWS.items()},
    **{name: Op(VIEW, prepare, several=True) for name, prepare in PARTS.items()},
    "ToCopyBackward0": Op("cast", _cast),
    "CloneBackward0": Op("copy", _plainly(lambda x: x.clone(memory_format=torch.contiguous_format))),
    "CatBackward0": Op("copy", _cat),
    "IndexBackward0": Op("copy", _index, reads=True),
    "MeanBackward1": Op("reduction", _mean),
    "NativeDropoutBackward0": Op("dropout", _native_dropout, saved=("result1",)),
    "EmbeddingBackward0": Op("embedding", _embedding, reads=True),
    "MmBackward0": Op(LINEAR, _plainly(torch.mm), ("self", "mat2")),
    "AddmmBackward0": Op(LINEAR, _addmm, ("", "mat1", "mat2"), has_bias=True),
    "GroupedMmBackward0": Op(LINEAR, _grouped_mm, ("self", "mat2"), reads=True),
    "BmmBackward0": Op(ATTENTION, _plainly(torch.bmm), ("self", "mat2")),
    "SoftmaxBackward0": Op(ATTENTION, _softmax),
    "SafeSoftmaxBackward0": Op(ATTENTION, _safe_softmax),
    "ScaledDotProductFlashAttentionForCpuBackward0": Op(
        ATTENTION,
        _attention("_scaled_dot_product_flash_attention_for_cpu", mask="attn_mask"),
        ("query", "key", "value"),
        reads=True,
    ),
    "ScaledDotProductFlashAttentionBackward0": Op(
        ATTENTION, _attention("_scaled_dot_product_flash_attention", mask=None), ("query", "key", "value")
    ),
    "ScaledDotProductEfficientAttentionBackward0": Op(
        ATTENTION,
        _attention("_scaled_dot_product_efficient_attention", mask="attn_bias", extra=("compute_log_sumexp",)),
        ("query", "key", "value"),
        reads=True,
        operands=3,  # the bias is an input, too, and the node saves it
    ),
    # The kernels of XPU, and of devices that torch does not know (PrivateUse1), such as NPUs.
    "ScaledDotProductFusedAttentionOverrideableBackward0": Op(
        ATTENTION,
        _attention("_scaled_dot_product_fused_attention_overrideable", mask="attn_bias"),
        ("query", "key", "value"),
        reads=True,
        operands=3,
    ),
    "ScaledDotProductCudnnAttentionBackward0": Op(
        ATTENTION,
        _attention("_scaled_dot_product_cudnn_attention", mask="attn_bias", extra=("compute_log_sumexp",)),
        ("query", "key", "value"),
        reads=True,
    ),
}
"""Name of the autograd node -> its row."""


def ops_for(save: Collection[str]) -> dict[str, Op]:
    """Return the rows to use when results of the classes in `save` are kept."""
    return {name: row for name, row in OPS.items() if row.op_class not in save}
