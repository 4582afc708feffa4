"""The head in chunks: logits of the whole batch never exist.

The head returns `Logits`: a tensor that knows its shape and how to make its values. What a loss does with logits is
rows of tokens turned into one number each, so those functions (`cross_entropy`, `nll_loss`, `gather`, `sum` and
`logsumexp` over the vocabulary) work through a few tokens at a time. Anything else makes all values, once, by the plain
head, with its ordinary graph.

A loss that ends in one number has its gradients taken chunk by chunk while the chunk is there, and scaled in backward:
no product is computed twice (Hsu et al., 2024, https://arxiv.org/abs/2410.10989). Others are recomputed in backward.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_ckpt import compat
from hf_ckpt.engines.chunks import Gradients, Job, RowOperation, Rows, Source, Total, applied, autocast, version_of
from hf_ckpt.errors import HfCkptError

log = logging.getLogger(__name__)

AUTO_PIECES, AUTO_LEAST = 8, 256
AUTO_MOST_FROZEN, AUTO_MOST = 1024, 4096
"""`auto`: an eighth of the tokens, but enough of them to keep a device busy, and not more than that takes. For each
chunk of a trained head its gradient is read and written once, so those are larger."""


def tokens_per_chunk(asked: int | str, tokens: int, *, trained: bool) -> int:
    """How many tokens the head takes at a time.

    Args:
        asked: that number, or `auto`.
        tokens: that need logits.
        trained: whether the head has a gradient of its own.
    """
    if isinstance(asked, int):
        return asked
    piece = -(-tokens // AUTO_PIECES)
    return max(AUTO_LEAST, min(-(-piece // 128) * 128, AUTO_MOST if trained else AUTO_MOST_FROZEN))


class Alias:
    """Logits that share their memory, if they are plain ones."""

    def __init__(self) -> None:
        self.made: list[tuple[weakref.ref[torch.Tensor], int]] = []
        """Those that were computed, and their versions then."""

    def add(self, values: torch.Tensor) -> None:
        """Values that were computed just now."""
        self.made.append((weakref.ref(values), version_of(values)))

    def check(self, own: torch.Tensor | None) -> None:
        """Raises `HfCkptError` when others than `own` have been changed in place."""
        for found, version in self.made:
            values = found()
            if values is not None and values is not own and version_of(values) != version:
                raise HfCkptError(
                    "logits were changed in place after a part of them was taken, which the chunked head cannot "
                    'follow. Use "head": "full", or change a copy.'
                )


class Logits(torch.Tensor):
    """Logits, or what some operations on each token's have made of them, that are not computed yet.

    Shape [..., vocabulary]; `hidden` is [..., hidden size]. It has the place of real ones in the graph.
    """

    source: Source
    hidden: torch.Tensor
    version: int
    operations: tuple[RowOperation, ...]
    alias: Alias
    node: Any
    """Its `grad_fn`, as it was made; None without a graph."""
    computed: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: type[Logits],
        source: Source,
        hidden: torch.Tensor,
        operations: tuple[RowOperation, ...],
        like: torch.Tensor,
        alias: Alias,
    ) -> Logits:
        """`like` has the type, the device and the last dimension."""
        shape = (*hidden.shape[:-1], like.shape[-1])
        made: Logits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.source, made.hidden, made.version, made.operations = source, hidden, version_of(hidden), operations
        made.alias, made.node, made.computed = alias, None, None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Logits(shape={tuple(self.shape)}, dtype={self.dtype}, computed={self.computed is not None})"

    def chunk_bytes(self) -> int:
        """Of the logits of one chunk."""
        return min(self.source.tokens, self.shape[:-1].numel()) * self.shape[-1] * self.element_size()

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """What gradients of anything that is made of it now go to: the hidden states and the head's parameters."""
        if self.node is None or not torch.is_grad_enabled():
            return (self.hidden.detach(),)
        self.source.taken = True
        return (self.hidden, *self.source.parameters)

    def in_its_place(self) -> bool:
        """Whether its gradient goes to `hidden`, and not to a function of autograd first that someone put between."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn is self.node

    def check(self) -> None:
        """Raises `HfCkptError` when its values would not be those of plain logits any more."""
        self.alias.check(self.computed)
        if self.computed is None:
            self.source.check()
            if version_of(self.hidden) != self.version:
                raise HfCkptError('the input of the chunked head was changed in place after it. Use "head": "full".')

    def values(self) -> torch.Tensor:
        """All of them, by the plain head, with its ordinary graph wherever they are first asked for.

        Raises `HfCkptError` when they cannot be told any more: see `check`.
        """
        self.check()
        if self.computed is None:
            own = self.in_its_place()
            with torch.inference_mode(False), torch.set_grad_enabled(own and self.node is not None):
                values = self._compute()
            with torch.inference_mode(False), torch.enable_grad():
                self.computed = values if own else _Attached.apply(self, values)  # type: ignore[no-untyped-call]
            self.alias.add(self.computed)
        return self.computed

    def bare_values(self) -> torch.Tensor:
        """The same without a graph, for where none can be made."""
        self.check()
        return self._compute() if self.computed is None else self.computed.detach()

    def _compute(self) -> torch.Tensor:
        return applied(self.operations, self.source.logits(self.hidden))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Logits) and first.computed is None:
            if _describes(func):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            handler = _HANDLERS.get(func)
            if handler is not None and first.in_its_place():
                first.check()
                found = handler(func, *args, **kwargs)
                if found is not NotImplemented:
                    return found
        if isinstance(first, Logits) and func in _WATCHING and first.source.taken:
            raise HfCkptError(
                "the gradient of logits cannot be watched with the chunked head once something was made of them (a "
                'loss?). Watch it before, or use "head": "full".'
            )
        return _on_real_ones(func, args, kwargs, Logits.values)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Only what does not go through `__torch_function__`: functions of autograd, C++. The graph is known already.
        first = args[0] if args else None
        with torch.no_grad():
            if isinstance(first, Logits) and first.computed is None and _is_alias(func, first, args):
                return Logits(first.source, first.hidden.detach(), first.operations, _no_tokens(first, ()), first.alias)
            if isinstance(first, Logits) and func._schema.is_mutable:
                raise HfCkptError(f'`{func}` changes logits in place, which needs "head": "full".')
            return _on_real_ones(func, args, kwargs or {}, Logits.bare_values)


class _Attached(torch.autograd.Function):
    """Values, with the place in the graph of the logits that they are of."""

    @staticmethod
    def forward(ctx: Any, logits: Logits, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def _on_real_ones(func: Any, args: Any, kwargs: Any, values: Callable[[Logits], torch.Tensor]) -> Any:
    def real(value: Any) -> Any:
        if isinstance(value, Logits):
            if value.computed is None:
                _tell(_name(func))
            return values(value)
        if type(value) in (list, tuple):
            return type(value)(map(real, value))
        return value

    return func(*map(real, args), **{key: real(value) for key, value in kwargs.items()})


def _name(func: Any) -> str:
    attribute = getattr(func, "__self__", None)  # of what `torch.Tensor.data.__get__` is
    return str(getattr(attribute if type(attribute) in _DESCRIPTOR_TYPES else func, "__name__", func))


@functools.lru_cache(maxsize=32)  # once an operation
def _tell(operation: str) -> None:
    log.warning(
        "hf_ckpt: `%s` asked for the logits of a training forward, which the chunked head does not compute, so they "
        'were computed as a whole there. Set "head": "full" if this is meant.',
        operation,
    )


# --- what Python code may ask without any values ----------------------------------------------------------------------

_DESCRIBING = frozenset(
    (
        *(torch.is_floating_point, torch.is_complex, torch.numel),
        *(
            getattr(torch.Tensor, name)
            for name in (
                *("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex"),
                *("get_device", "is_contiguous", "stride", "storage_offset", "__len__", "__hash__"),
            )
        ),
    )
)
_GETTERS = (
    *("shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout", "output_nr", "names"),
    *(
        "is_cuda",
        "is_cpu",
        "is_sparse",
        "is_quantized",
        "is_meta",
        "is_nested",
        "is_mps",
        "is_xpu",
        "itemsize",
        "nbytes",
    ),
    *("version_of", "retains_grad", "grad"),
)
_DESCRIPTORS = {id(getattr(torch.Tensor, name)) for name in _GETTERS if hasattr(torch.Tensor, name)}
_DESCRIPTOR_TYPES = (type(torch.Tensor.shape), property)
_WATCHING = frozenset((torch.Tensor.register_hook, torch.Tensor.retain_grad))


def _describes(func: Any) -> bool:
    owner = getattr(func, "__self__", None)
    return func in _DESCRIBING or (id(owner) in _DESCRIPTORS and func.__name__ == "__get__")


def _is_alias(func: Any, logits: Logits, args: Any) -> bool:
    """Whether all it does is name the same logits again, as autograd does where a function returns its input."""
    aten = torch.ops.aten
    return func in (aten.detach.default, aten.alias.default) or (
        func is aten.view.default and list(args[1]) == list(logits.shape)
    )


# --- operations that leave them uncomputed ----------------------------------------------------------------------------


def _derived(logits: Logits, hidden: torch.Tensor, *operations: RowOperation, copied: bool = False) -> Logits:
    """Other tokens, or more done to each; `copied`, where plain logits would have memory of their own."""
    chain = (*logits.operations, *operations)
    empty = _no_tokens(logits, operations)
    alias = Alias() if copied else logits.alias
    logits.inputs()  # are taken
    return lazily(logits.source, hidden, chain, empty, alias, graph=logits.node is not None)


def _no_tokens(logits: Logits, operations: Sequence[RowOperation]) -> torch.Tensor:
    """What the operations make of none: type and device, and the size of the vocabulary."""
    with torch.no_grad():
        empty = torch.empty(0, logits.shape[-1], dtype=logits.dtype, device=logits.device)
        return applied(operations, empty)


def lazily(
    source: Source,
    hidden: torch.Tensor,
    operations: tuple[RowOperation, ...],
    like: torch.Tensor,
    alias: Alias,
    *,
    graph: bool = True,
) -> Logits:
    """`Logits` that stand in the graph where real ones would; not in any without `graph`, or under `no_grad`."""
    if not (graph and torch.is_grad_enabled()):
        return Logits(source, hidden.detach(), operations, like, alias)
    made: Logits = _Promise.apply(source, operations, like, alias, hidden, *source.parameters)  # type: ignore[no-untyped-call]
    made.node = made.grad_fn
    return made


def _viewed(func: Any, logits: Logits, *shape: Any, **kwargs: Any) -> Any:
    """`view` and `reshape` that leave the vocabulary last."""
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape) if not kwargs else []
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    known = math.prod(size for size in sizes if size != -1)
    sizes = [logits.numel() // known if size == -1 and known else size for size in sizes]
    if sizes[-1] != logits.shape[-1] or math.prod(sizes) != logits.numel():
        return NotImplemented
    return _derived(logits, logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1]))


def _flattened(func: Any, logits: Logits, start_dim: int = 0, end_dim: int = -1) -> Any:
    last = logits.dim() - 1
    start, end = start_dim % logits.dim(), end_dim % logits.dim()
    return NotImplemented if end >= last or start > end else _derived(logits, logits.hidden.flatten(start, end))


def _indexed(func: Any, logits: Logits, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    plain = [part for part in parts if not isinstance(part, torch.Tensor)]
    if not all(type(part) in (int, slice, type(Ellipsis)) for part in plain):
        return NotImplemented
    taken = len(parts) - plain.count(Ellipsis)
    taken += sum(part.dim() - 1 for part in parts if isinstance(part, torch.Tensor) and part.dtype == torch.bool)
    reaches_last = taken >= logits.dim() or (Ellipsis in plain and parts[-1] is not Ellipsis)
    if reaches_last and not (type(parts[-1]) is slice and parts[-1] == slice(None)):
        return NotImplemented
    return _derived(logits, logits.hidden[index])


def _unbound(func: Any, logits: Logits, dim: int = 0) -> Any:
    if dim != 0 or logits.dim() < 2:
        return NotImplemented
    return tuple(_derived(logits, hidden) for hidden in logits.hidden.unbind(0))


def _split(func: Any, logits: Logits, size: Any, dim: int = 0) -> Any:
    if dim not in range(logits.dim() - 1):
        return NotImplemented
    return tuple(_derived(logits, hidden) for hidden in logits.hidden.split(size, dim))  # type: ignore[no-untyped-call]


def _same(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if args or kwargs else logits


def _cloned(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if args or kwargs else _derived(logits, logits.hidden, copied=True)


def _detached(func: Any, logits: Logits) -> Logits:
    return lazily(logits.source, logits.hidden, logits.operations, _no_tokens(logits, ()), logits.alias, graph=False)


def _pointwise(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    """Casts, scaling, capping: done to every value by itself, or with one number for each word (BART's bias)."""
    args = tuple(_row_for_all(value, logits) for value in args) if func not in _CASTING else args
    if any(value is None for value in args) or any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        return NotImplemented
    given = [value for value in (*args, *kwargs.values()) if not isinstance(value, torch.Tensor)]
    given = [value for value in given if value != logits.device]
    dtypes = [value for value in given if isinstance(value, torch.dtype)]
    if not all(isinstance(value, (int, float, torch.dtype)) for value in given):
        return NotImplemented
    if (func is torch.Tensor.type and not dtypes) or not all(dtype.is_floating_point for dtype in dtypes):
        return NotImplemented
    copied = func not in _CASTING or dtypes not in ([], [logits.dtype])
    return _derived(logits, logits.hidden, lambda values: func(values, *args, **kwargs), copied=copied)


def _row_for_all(value: Any, logits: Logits) -> Any:
    """What can be used on any tokens: of tensors, a copy of those that are one number, or a row with one for each word,
    and have no gradient. None for others."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Logits):
        return None
    row = value.dim() == 0 or value.numel() == value.shape[-1] == logits.shape[-1]
    if not row or value.dim() > logits.dim() or value.requires_grad or value.device != logits.device:
        return None
    return value.detach().clone().reshape(value.shape[-1:])


def _log_softmax(
    func: Any, logits: Logits, dim: int | None = None, *more: Any, dtype: Any = None, **kwargs: Any
) -> Any:
    if dim not in (-1, logits.dim() - 1):
        return NotImplemented
    dtype = more[-1] if more and isinstance(more[-1], torch.dtype) else dtype  # behind `_stacklevel`, in one of three
    around = functools.partial(autocast, logits.source.device_type, compat.autocast_dtype(logits.source.device_type))

    def softened(values: torch.Tensor) -> torch.Tensor:
        with around():
            return functional.log_softmax(values, -1, dtype=dtype)

    return _derived(logits, logits.hidden, softened, copied=True)


# --- functions that make one number of each token's -------------------------------------------------------------------


def _loss(
    func: Any,
    logits: Logits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if logits.dim() != 2 or target.dim() != 1 or target.is_floating_point() or isinstance(target, Logits):
        return NotImplemented
    if weight is not None or size_average is not None or reduce is not None or len(target) != len(logits):
        return NotImplemented
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": "none"}
    if label_smoothing:
        options["label_smoothing"] = label_smoothing

    def losses(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return func(values, targets, **options)  # type: ignore[no-any-return]

    if reduction == "none":
        return _row_by_row(logits, losses, target)
    hidden, *parameters = logits.inputs()
    hidden, targets, rows = _labelled(hidden, target, ignore_index)
    job = Job(logits.source, logits.operations, losses, targets)
    total = Total.apply(job, hidden, *parameters)  # type: ignore[no-untyped-call]
    if reduction == "mean":
        total = total / rows
    return total.to(job.result)


def _labelled(hidden: torch.Tensor, target: torch.Tensor, ignore: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Those tokens that have a label, and how many: the others add nothing to the loss."""
    if compat.is_fake(target):  # which has no values to ask; the most it can be
        return hidden, target, len(target)
    if compat.is_capturing():  # the next batch has others
        return hidden, target, (target != ignore).sum()
    has_label = target != ignore
    count = int(has_label.sum())
    if count == len(target):
        return hidden, target, count
    places = has_label.nonzero().squeeze(-1)
    return hidden.index_select(0, places), target.index_select(0, places), count


def _gathered(func: Any, logits: Logits, dim: int, index: torch.Tensor, **kwargs: Any) -> Any:
    if kwargs or dim not in (-1, logits.dim() - 1) or index.shape[:-1] != logits.shape[:-1]:
        return NotImplemented
    return _row_by_row(logits, lambda values, places: values.gather(-1, places), index)


def _reduced(
    func: Any, logits: Logits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **more: Any
) -> Any:
    """`sum`, `logsumexp` and `argmax` over the vocabulary."""
    if more or dim not in (-1, logits.dim() - 1, (-1,), [-1]):
        return NotImplemented
    options = {"keepdim": keepdim} | ({} if dtype is None else {"dtype": dtype})
    return _row_by_row(logits, lambda values, _: func(values, -1, **options), None)


def _row_by_row(logits: Logits, work: Callable[..., torch.Tensor], beside: torch.Tensor | None) -> torch.Tensor:
    """One number, or a few, a token, with a graph."""
    lead = logits.shape[:-1]
    hidden, *parameters = logits.inputs()
    hidden = hidden.reshape(-1, hidden.shape[-1])
    flat = None if beside is None else beside.reshape(len(hidden), *beside.shape[len(lead) :])
    job = Job(logits.source, logits.operations, work, flat)
    found: torch.Tensor = Rows.apply(job, hidden, *parameters)  # type: ignore[no-untyped-call]
    return found.reshape((*lead, *found.shape[1:]))


_CASTING = frozenset(getattr(torch.Tensor, name) for name in ("float", "double", "half", "bfloat16", "to", "type"))
_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.view: _viewed,
    torch.Tensor.reshape: _viewed,
    torch.reshape: _viewed,
    torch.Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    torch.Tensor.__getitem__: _indexed,
    torch.Tensor.unbind: _unbound,
    **dict.fromkeys((torch.Tensor.split, torch.split), _split),
    torch.Tensor.contiguous: _same,
    **dict.fromkeys((torch.Tensor.clone, torch.clone), _cloned),
    torch.Tensor.detach: _detached,
    **dict.fromkeys((functional.log_softmax, torch.log_softmax, torch.Tensor.log_softmax), _log_softmax),
    **dict.fromkeys((functional.cross_entropy, functional.nll_loss), _loss),
    **dict.fromkeys((torch.gather, torch.Tensor.gather), _gathered),
    **dict.fromkeys((torch.sum, torch.Tensor.sum, torch.logsumexp, torch.Tensor.logsumexp), _reduced),
    **dict.fromkeys((torch.argmax, torch.Tensor.argmax), _reduced),
    **{
        getattr(owner, name): _pointwise
        for owner, names in (
            (torch.Tensor, ("float", "double", "half", "bfloat16", "to", "type", "mul", "div", "neg", "tanh")),
            (torch.Tensor, ("add", "sub", "__add__", "__radd__", "__sub__")),
            (torch.Tensor, ("__mul__", "__rmul__", "__truediv__", "__neg__", "true_divide")),
            (torch, ("add", "sub", "mul", "div", "neg", "tanh", "true_divide")),
        )
        for name in names
    },
}


# --- on a model -------------------------------------------------------------------------------------------------------


class _Promise(torch.autograd.Function):
    """`Logits` with their place in the graph, for what takes them past `__torch_function__`."""

    @staticmethod
    def forward(
        ctx: Any,
        source: Source,
        operations: tuple[RowOperation, ...],
        like: torch.Tensor,
        alias: Alias,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> Logits:
        ctx.source, ctx.operations = source, operations
        ctx.save_for_backward(hidden, *parameters)
        return Logits(source, hidden, operations, like, alias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, *parameters = ctx.saved_tensors
        flat = hidden.reshape(-1, hidden.shape[-1])
        job = Job(ctx.source, ctx.operations, lambda values, _: values, None)
        gradients = Gradients(job, flat, ctx.needs_input_grad[4])
        downs = gradient.reshape(len(flat), -1)
        for chunk in job.chunks(len(flat)):
            gradients.add(flat[chunk], chunk, downs[chunk])
        given = None if gradients.hidden is None else gradients.hidden.reshape(hidden.shape)
        found = zip(gradients.of_parameters(), parameters, strict=True)
        return None, None, None, None, given, *(None if value is None else value.to(p.dtype) for value, p in found)


def has_dropout(module: nn.Module) -> bool:
    """Whether the head draws random numbers, which in chunks would be others."""
    return any(isinstance(inner, nn.Dropout) and inner.p and inner.training for inner in module.modules())


def has_computed_weights(module: nn.Module) -> bool:
    """Whether its weights are results of autograd themselves, as the hooks of `weight_norm` leave them: a graph that
    cannot be gone through for each chunk."""
    values = (value for inner in module.modules() for value in vars(inner).values())
    return any(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in values)


def chunked(module: nn.Module, run: RowOperation, hidden: torch.Tensor, asked: int | str) -> torch.Tensor:
    """What the head returns: `Logits`, or real ones where there is but one chunk."""
    trained = any(parameter.requires_grad for parameter in module.parameters())
    count = math.prod(hidden.shape[:-1])
    tokens = tokens_per_chunk(asked, count, trained=trained)
    if count <= tokens or has_computed_weights(module):
        return run(hidden)
    with torch.no_grad(), autocast(hidden.device.type, compat.autocast_dtype(hidden.device.type)):
        like = run(hidden.reshape(-1, hidden.shape[-1])[:0])
    return lazily(Source(module, run, tokens, like), hidden, (), like, Alias())
