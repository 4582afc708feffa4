"""The operations that the rebuild engine can run again: a table with one row for each kind of autograd node.

The engine finds the operands of a node; the row reads the node's constants and says how to run the operation again.
An operation gets a row only if that gives exactly the same bits. Results of operations without a row are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy
import torch
from torch.nn import functional

from hf_ckpt import compat
from hf_ckpt.engines.rebuild.layouts import Strides
from hf_ckpt.engines.rebuild.unpacking import read_saved
from hf_ckpt.engines.rebuild.values import Rebuilt, Stored, Value, View
from hf_ckpt.engines.seen import Kept

LINEAR = "linear"
ATTENTION = "attention"
"""The classes of operations that `save` may name. They are expensive to run again."""
VIEW = "view"
"""The class of operations that return a view of their operand."""
COPY = "copy"
CAST = "cast"
"""The classes of operations that may change the memory format, which their nodes do not show."""
INDEX = "index"
DROPOUT = "dropout"
EXACT = "pointwise"
"""The class of operations on single elements whose results are the nearest numbers, in whatever order they run."""
_KEEPS_CONTIGUOUS = ("activation", EXACT, "reduction")
"""Classes of operations whose results are contiguous if their operands are."""

Function = Callable[..., torch.Tensor]
"""An operation. It is called with its operands."""


Prepare = Callable[[Any, Any], Function | None]
"""Reads the constants of an operation, such as `alpha` or `dim`: (node, metadata of its result) -> the operation on its
operands, or None if the result has to be kept. The metadata are shape, dtype and device."""


@dataclasses.dataclass(frozen=True)
class Op:
    """How the results of one kind of autograd node are rebuilt.

    The operands are the inputs of the node, in their order, and then what `extra` names. In `torch.mm(x, weight)` with
    a frozen weight, the graph leads to `x`. The weight is found as `node._saved_mat2`: `saved_as` is `("self",
    "mat2")`.
    """

    op_class: str
    """Its class. `save` may name `linear` and `attention`; operations of all other classes are always rebuilt."""
    prepare: Callable[..., Function | None]
    """A `Prepare`; of a node with several results, it also gets the number of one, and of a row that reads tensors, the
    name of the block."""
    saved_as: tuple[str, ...] = ()
    """For each input, the name under which the node saves it (`_saved_<name>`), for inputs without a gradient. Fewer
    names than inputs if the node saves only its result, such as a softmax."""
    extra: tuple[str, ...] = ()
    """The names under which the node saves further operands."""
    inputs: int | None = None
    """How many of the node's inputs are operands, if `prepare` reads the others from the node; None for all."""
    reads_tensors: bool = False
    """Whether `prepare` reads tensors that the node has saved. It holds them as `Kept`, since they may be changed in
    place after the forward."""
    several: bool = False
    """Whether the node has several results."""
    has_bias: bool = False
    """Whether input 0 is the bias of a linear layer, which the node does not save."""
    strides: Strides = Strides.SAME
    """What is known of its results' strides if the operands have those of the forward; see `strides_of_result`."""


def _plainly(operation: Function) -> Callable[[Any, Any], Function]:
    """The `prepare` of an operation without constants."""
    return lambda node, metadata: operation


def _signed(value: Any) -> Any:
    """Return a constant of a node. Negative dimensions, and places in them, are shown as unsigned 64-bit numbers."""
    return value - 2**64 if type(value) is int and value >= 2**63 else value


def _with(operation: Function, *names: str) -> Callable[[Any, Any], Function]:
    """The `prepare` of an operation on one operand and on constants, which the node saves under these names."""
    getter = operator.attrgetter(*[f"_saved_{name}" for name in names])

    def prepare(node: Any, metadata: Any) -> Function:
        saved = getter(node) if len(names) > 1 else [getter(node)]
        constants = list(map(_signed, saved))
        return lambda x: operation(x, *constants)

    return prepare


def _gelu(node: Any, metadata: Any) -> Function:
    return functools.partial(functional.gelu, approximate=node._saved_approximate)


def _scaled(operation: Function) -> Callable[[Any, Any], Function]:
    """The `prepare` of torch.add and torch.sub, which may multiply the second operand by a factor."""

    def prepare(node: Any, metadata: Any) -> Function:
        alpha = node._saved_alpha
        return operation if alpha == 1 else functools.partial(operation, alpha=alpha)

    return prepare


def _typed(prepare: Callable[[Any, Any], Function]) -> Prepare:
    """The `prepare` of an operation whose in-place form keeps the type of the tensor that it changes.

    With `x` in bfloat16 and `y` in float32, `x += y` is in bfloat16, and `x + y` in float32. Both have the same node.
    """

    def prepare_typed(node: Any, metadata: Any) -> Function:
        operation = prepare(node, metadata)
        dtype = metadata.dtype
        return lambda *operands: operation(*operands).to(dtype)

    return prepare_typed


def _contiguous_copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


_MAKE_CONTIGUOUS = frozenset({"UnsafeViewBackward0", "SoftmaxBackward0", "SafeSoftmaxBackward0"})
"""Nodes of results that are contiguous: of a copy in `reshape`, of a product, and of kernels that first copy an operand
which is not."""


def _has_one_format(node: Any, number: int) -> bool:
    """Whether a copy of a contiguous tensor is contiguous: those of four and five dimensions may be `channels_last`."""
    return len(node._input_metadata[number].shape) not in (4, 5)


def strides_of_result(row: Op, node: Any, number: int, of_operands: Strides) -> Strides:
    """Return what is known of the strides of what an operation returns, from what is known of all its operands."""
    if row.strides is Strides.CONTIGUOUS:
        return Strides.CONTIGUOUS
    if row.strides is Strides.UNKNOWN:
        is_known = of_operands is Strides.CONTIGUOUS and _has_one_format(node, number)
        return Strides.CONTIGUOUS if is_known else Strides.UNKNOWN
    return min(of_operands, row.strides)


def rounds_by_strides(row: Op, node: Any, number: int) -> bool:
    """Whether operands with other strides could change the last bits of a result.

    Reductions add in the order of memory, libraries choose kernels for products by strides, and where elements are not
    side by side, a CPU computes functions such as `exp` one by one, which rounds otherwise than vectors of them.
    """
    if row.op_class in (CAST, COPY, INDEX, VIEW, DROPOUT) or node.name() in _MAKE_CONTIGUOUS:
        return False
    if row.op_class != EXACT:
        return True
    # Other pointwise operations are exact, but for sums with a factor and products of complex numbers.
    is_exact = getattr(node, "_saved_alpha", 1) == 1 and not node._input_metadata[number].dtype.is_complex
    return not is_exact


def has_one_layout(value: Value) -> bool:
    """Whether all memory formats that a copy may have had give the value the same strides, or views would fail."""
    with torch.no_grad(), compat.modes.unseen_by_modes():
        layouts = _layouts(value)
    return bool(layouts) and len({tensor.stride() for tensor in layouts}) == 1


def _layouts(value: Value) -> list[torch.Tensor]:
    """Return tensors without memory that have all layouts that a value may have had; none if these are not known.

    The first has the one that it is rebuilt with.
    """
    if isinstance(value, Kept):
        return [torch.empty_strided(value.tensor.size(), value.tensor.stride(), device="meta")]
    if isinstance(value, View):
        views = [(tensor, value.operation(tensor)) for tensor in _layouts(value.of)]
        are_views = [view.untyped_storage()._cdata == tensor.untyped_storage()._cdata for tensor, view in views]
        if False in are_views[:1]:
            return []  # it is rebuilt with this layout, which the forward cannot have had
        return [view for (_, view), is_view in zip(views, are_views, strict=True) if is_view]
    if not isinstance(value, Rebuilt):
        return []
    if value.layout is not None:
        return [torch.empty_strided(*value.layout[:2], device="meta")]
    if value.operation is not _contiguous_copy:
        return []
    layouts = []
    for tensor in _layouts(value.operands[0]):
        formats = [torch.contiguous_format, torch.preserve_format]
        formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(tensor.dim(), [])
        layouts += [torch.empty_like(tensor, memory_format=each) for each in formats]
    return layouts


def _cast(node: Any, metadata: Any) -> Function | None:
    source, number = node.next_functions[0]
    before = source._input_metadata[number]
    if before.dtype == metadata.dtype and before.device == metadata.device:
        return None  # `to(memory_format=...)`: the node does not show which
    return operator.methodcaller("to", device=metadata.device, dtype=metadata.dtype)


def _cat(node: Any, metadata: Any) -> Function:
    dim = _signed(node._saved_dim)
    return lambda *parts: torch.cat(parts, dim)


def _mean(node: Any, metadata: Any) -> Function | None:
    if node._saved_dim is None:  # over all dimensions: keeping one number is cheaper
        return None
    dims = list(map(_signed, node._saved_dim))
    keepdim = node._saved_keepdim
    dtype = metadata.dtype  # a mean can change it without a cast of its own
    return lambda x: x.mean(dims, keepdim, dtype=dtype)


def _softmax(operation: Function) -> Prepare:
    """The `prepare` of a softmax, which may change the type without a cast of its own."""

    def prepare(node: Any, metadata: Any) -> Function:
        dim = _signed(node._saved_dim)
        dtype = metadata.dtype
        return lambda x: operation(x, dim, dtype)

    return prepare


def _native_dropout(node: Any, metadata: Any) -> Function | None:
    """Dropout with the mask that the node saved as `result1`: nothing is drawn again.

    On accelerators, `nn.functional.dropout` makes this node. On a CPU it multiplies by noise, and only direct calls of
    `torch.native_dropout` make it. The result is kept on a device whose kernel rounds by none of the known rules.
    """
    kept_share = 1.0 - node._saved_p
    if not kept_share:  # both rules divide by it
        return lambda x, mask: x * torch.zeros_like(mask, dtype=x.dtype)
    mask = read_saved(node, "result1")
    device = metadata.device
    if isinstance(mask, Stored) and mask.original is not None:
        mask = mask.original.tensor
    if isinstance(mask, torch.Tensor) and compat.torch.is_fake(mask):  # a trial of rules has no values to compare
        return functools.partial(_dropped_on_cpu if device.type == "cpu" else _dropped_on_cuda, kept_share=kept_share)
    # With `train=False`, which only direct calls pass, nothing is scaled, and the node does not show it.
    if device.type == "cpu" and isinstance(mask, torch.Tensor) and bool(mask.all()):
        return None
    rule = _rule_of_dropout(device, metadata.dtype)
    return None if rule is None else functools.partial(rule, kept_share=kept_share)


def _dropped_on_cpu(x: torch.Tensor, mask: torch.Tensor, kept_share: float) -> torch.Tensor:
    """Dropout as in aten/src/ATen/native/Dropout.cpp."""
    return x * (mask.to(x.dtype) * (1.0 / kept_share))


def _dropped_on_cuda(x: torch.Tensor, mask: torch.Tensor, kept_share: float) -> torch.Tensor:
    """Dropout as in cuda/Dropout.cu: x * mask * scale in float32, and the scale, too.

    The kernel of dropout's backward computes exactly this from a gradient, in one pass.
    """
    scale = numpy.float32(1.0) / numpy.float32(kept_share)
    dropped: torch.Tensor = torch.ops.aten.native_dropout_backward(x, mask, float(scale))
    return dropped


_rules_of_dropout: dict[tuple[str, torch.dtype], Callable[..., torch.Tensor] | None] = {}
"""(type of device, type of numbers) -> the rule that gives the same bits as dropout there, or None; as far as tried."""


def _rule_of_dropout(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """Return the rule that gives the same bits as dropout on this type of device; None if there is none.

    It is tried once, because backends round differently, some even in forward and backward. Waits for the device then.
    """
    key = (device.type, dtype)
    if key in _rules_of_dropout:
        return _rules_of_dropout[key]
    if compat.devices.is_capturing():  # a graph allows no trial
        return None
    # The trial draws, in the middle of the user's forward: random state is put back. And torch's own selective
    # checkpointing, or a count of operations, must not see operations that the block does not run.
    with torch.no_grad(), compat.modes.unseen_by_modes(), compat.process_state.RandomState([device]).kept():
        values = torch.randn(2**12, generator=torch.Generator().manual_seed(0), device="cpu").to(device, dtype)
        tries = [(1.0 - p, *torch.native_dropout(values, p, True)) for p in (0.1, 0.3, 0.7)]
        rules = (_dropped_on_cpu, _dropped_on_cuda)
        fitting = (r for r in rules if all(torch.equal(r(values, mask, share), out) for share, out, mask in tries))
        _rules_of_dropout[key] = next(fitting, None)
    return _rules_of_dropout[key]


def _kept(tensor: torch.Tensor | None, block: str) -> Kept | None:
    """Keep a tensor that a node has saved, which may be None."""
    return None if tensor is None else Kept(tensor, block)


def _value(kept: Kept | None) -> torch.Tensor | None:
    """Return what `_kept` has kept. Raises `InPlaceError` if it was changed in place since."""
    return None if kept is None else kept.value()


def _index(node: Any, metadata: Any, block: str) -> Function:
    kept = [_kept(tensor, block) for tensor in node._saved_indices]
    return lambda x: torch.ops.aten.index(x, list(map(_value, kept)))


def _grouped_mm(node: Any, metadata: Any, block: str) -> Function | None:
    """A product for each group of rows, such as the tokens of each expert. The node does not save a bias."""
    operation = getattr(torch.ops.aten, "_grouped_mm", None)
    if operation is None or any(source is not None for source, _ in node.next_functions[2:]):
        return None
    offsets = _kept(node._saved_offs, block)
    dtype = metadata.dtype
    return lambda a, b: operation(a, b, _value(offsets), None, dtype)


def _embedding(node: Any, metadata: Any, block: str) -> Function:
    indices = Kept(node._saved_indices, block)
    return lambda weight: functional.embedding(indices.value(), weight)


def _addmm(node: Any, metadata: Any) -> Function:
    return functools.partial(torch.addmm, alpha=node._saved_alpha, beta=node._saved_beta)


def _attention(kernel: str, *, mask: str | None = None, extra: Sequence[str] = (), inputs: int | None = None) -> Op:
    """Return the row of a kernel of scaled dot-product attention.

    With dropout its result is kept, because rebuilding it would need the kernel's own random state.

    Args:
        kernel: its name in `torch.ops.aten`, behind `_scaled_dot_product_`.
        mask: the keyword of its mask, which the node saves; None for a kernel without a mask.
        extra: keywords to set to True.
        inputs: see `Op.inputs`.
    """

    def prepare(node: Any, metadata: Any, block: str = "") -> Function | None:
        operation = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}", None)
        if operation is None or node._saved_dropout_p:
            return None
        keywords: dict[str, Any] = {"dropout_p": 0.0, "is_causal": node._saved_is_causal, "scale": node._saved_scale}
        keywords |= dict.fromkeys(extra, True)
        if mask is None:
            return lambda q, k, v: operation(q, k, v, **keywords)[0]
        kept = _kept(getattr(node, f"_saved_{mask}"), block)
        return lambda q, k, v: operation(q, k, v, **{mask: _value(kept)}, **keywords)[0]

    return Op(ATTENTION, prepare, ("query", "key", "value"), inputs=inputs, reads_tensors=mask is not None)


def _view(node: Any, metadata: Any) -> Function:
    shape = list(metadata.shape)
    return lambda x: x.reshape(shape)  # not `view`: a rebuilt tensor may have other strides at first


def _expand(node: Any, metadata: Any) -> Function:
    shape = list(metadata.shape)
    return lambda x: x.expand(shape)


def _permute(node: Any, metadata: Any) -> Function:
    dims = list(map(_signed, node._saved_dims))
    return lambda x: x.permute(dims)


def _split(node: Any, metadata: Any, number: int) -> Function:
    dim = _signed(node._saved_dim)
    size = node._saved_split_size
    return lambda x: torch.split(x, size, dim)[number]


def _split_with_sizes(node: Any, metadata: Any, number: int) -> Function:
    dim = _signed(node._saved_dim)
    sizes = list(node._saved_split_sizes)
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
    "SoftplusBackward0": _with(functional.softplus, "beta", "threshold"),
    "LeakyReluBackward0": _with(functional.leaky_relu, "negative_slope"),
    "TanhBackward0": _plainly(torch.tanh),
    "SigmoidBackward0": _plainly(torch.sigmoid),
    "MishBackward0": _plainly(functional.mish),
    "ErfBackward0": _plainly(torch.erf),
    "ExpBackward0": _plainly(torch.exp),
    "HardswishBackward0": _plainly(functional.hardswish),
    "ClampBackward1": _with(torch.clamp, "min", "max"),
    "ClampMinBackward0": _with(torch.clamp_min, "min"),
    "PowBackward0": _with(torch.pow, "exponent"),
    "RsqrtBackward0": _plainly(torch.rsqrt),
}
POINTWISE = {
    "MulBackward0": _plainly(torch.mul),
    "MulBackward1": _with(torch.ops.aten.mul.Scalar, "other"),
    "DivBackward0": _plainly(torch.div),
    "NegBackward0": _plainly(torch.neg),
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
    "TransposeBackward0": _with(torch.transpose, "dim0", "dim1"),
    "PermuteBackward0": _permute,
    "ExpandBackward0": _expand,
    "UnsqueezeBackward0": _with(torch.unsqueeze, "dim"),
    "SliceBackward0": _with(torch.ops.aten.slice, "dim", "start", "end", "step"),
    "SelectBackward0": _with(torch.select, "dim", "index"),
}
PARTS = {"SplitBackward0": _split, "SplitWithSizesBackward0": _split_with_sizes, "UnbindBackward0": _unbind}

OPS: dict[str, Op] = {
    **{name: Op("activation", prepare) for name, prepare in UNARY.items()},
    **{name: Op(EXACT, _typed(prepare), ("self", "other")) for name, prepare in POINTWISE.items()},
    **{name: Op(VIEW, prepare) for name, prepare in VIEWS.items()},
    **{name: Op(VIEW, prepare, several=True) for name, prepare in PARTS.items()},
    "ToCopyBackward0": Op(CAST, _cast),
    # `Layout.of` restores other strides, if autograd has saved the copy.
    "CloneBackward0": Op(COPY, _plainly(_contiguous_copy)),
    "CatBackward0": Op(INDEX, _cat),
    "IndexBackward0": Op(INDEX, _index, reads_tensors=True),
    "MeanBackward1": Op("reduction", _mean),
    "NativeDropoutBackward0": Op(DROPOUT, _native_dropout, extra=("result1",)),
    "EmbeddingBackward0": Op("embedding", _embedding, reads_tensors=True),
    "MmBackward0": Op(LINEAR, _plainly(torch.mm), ("self", "mat2")),
    # The node does not save its input 0, the bias.
    "AddmmBackward0": Op(LINEAR, _addmm, ("", "mat1", "mat2"), has_bias=True),
    "GroupedMmBackward0": Op(LINEAR, _grouped_mm, ("self", "mat2"), reads_tensors=True),
    "BmmBackward0": Op(ATTENTION, _plainly(torch.bmm), ("self", "mat2")),
    # They save only their result, so the graph has to lead to their input.
    "SoftmaxBackward0": Op(ATTENTION, _softmax(torch.softmax)),
    "SafeSoftmaxBackward0": Op(ATTENTION, _softmax(torch.ops.aten._safe_softmax)),
    "ScaledDotProductFlashAttentionForCpuBackward0": _attention("flash_attention_for_cpu", mask="attn_mask"),
    "ScaledDotProductFlashAttentionBackward0": _attention("flash_attention"),
    "ScaledDotProductEfficientAttentionBackward0": _attention(
        "efficient_attention",
        mask="attn_bias",
        extra=("compute_log_sumexp",),
        inputs=3,  # the fourth is the bias, which the node saves
    ),
    # The kernels of XPU, and of devices that torch does not know (PrivateUse1), such as NPUs.
    "ScaledDotProductFusedAttentionOverrideableBackward0": _attention(
        "fused_attention_overrideable", mask="attn_bias", inputs=3
    ),
    # Its bias gets no gradient (derivatives.yaml), and so is no input.
    "ScaledDotProductCudnnAttentionBackward0": _attention(
        "cudnn_attention", mask="attn_bias", extra=("compute_log_sumexp",)
    ),
}
"""Name of the autograd node -> its row."""


def _strides_of(name: str, row: Op) -> Strides:
    """What is known of the strides of what an operation returns, see `Op.strides`."""
    if name in _MAKE_CONTIGUOUS or row.op_class == LINEAR:
        return Strides.CONTIGUOUS
    if row.op_class in (COPY, CAST):
        return Strides.UNKNOWN
    keeps = row.op_class in _KEEPS_CONTIGUOUS or row.prepare is _view
    return Strides.AS_OPERANDS if keeps else Strides.SAME


OPS = {name: dataclasses.replace(row, strides=_strides_of(name, row)) for name, row in OPS.items()}


def ops_for(save: Collection[str]) -> dict[str, Op]:
    """Return the rows to use when results of the classes in `save` are kept."""
    return {name: row for name, row in OPS.items() if row.op_class not in save}
