"""How torch's functions act on logits that are not computed yet: `logits.RULES` has a rule for each such function.

`rule(func, logits, *args, **kwargs)` replaces `func(logits, *args, **kwargs)`. It returns what `func` would return,
without computing all logits, or `NotImplemented` if it cannot do so with these arguments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hf_ckpt import compat
from hf_ckpt.engines.head.chunks import Job, Rows, Total, autocast
from hf_ckpt.engines.head.logits import RULES, Logits


def _viewed(func: Any, logits: Logits, *shape: Any, **kwargs: Any) -> Any:
    """`view` and `reshape` to a shape whose last dimension is still the vocabulary."""
    sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape) if not kwargs else []
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    known = math.prod(size for size in sizes if size != -1)
    sizes = [logits.numel() // known if size == -1 and known else size for size in sizes]
    if sizes[-1] != logits.shape[-1] or math.prod(sizes) != logits.numel():
        return NotImplemented
    return logits.derived(logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1]))


def _flattened(func: Any, logits: Logits, start_dim: int = 0, end_dim: int = -1) -> Any:
    """`flatten` of dimensions before the vocabulary."""
    last = logits.dim() - 1
    start, end = start_dim % logits.dim(), end_dim % logits.dim()
    return NotImplemented if end >= last or start > end else logits.derived(logits.hidden.flatten(start, end))


def _indexed(func: Any, logits: Logits, index: Any) -> Any:
    """Indexing that selects tokens, with the whole vocabulary of each."""
    parts = index if isinstance(index, tuple) else (index,)
    plain = [part for part in parts if not isinstance(part, torch.Tensor)]
    if not all(type(part) in (int, slice, type(Ellipsis)) for part in plain):
        return NotImplemented
    taken = len(parts) - plain.count(Ellipsis)
    taken += sum(part.dim() - 1 for part in parts if isinstance(part, torch.Tensor) and part.dtype == torch.bool)
    reaches_last = taken >= logits.dim() or (Ellipsis in plain and parts[-1] is not Ellipsis)
    if reaches_last and not (type(parts[-1]) is slice and parts[-1] == slice(None)):
        return NotImplemented
    return logits.derived(logits.hidden[index])


def _unbound(func: Any, logits: Logits, dim: int = 0) -> Any:
    """`unbind` of the first dimension, which iteration uses, too."""
    if dim != 0 or logits.dim() < 2:
        return NotImplemented
    return tuple(logits.derived(hidden) for hidden in logits.hidden.unbind(0))


def _split(func: Any, logits: Logits, split_size: Any, dim: int = 0) -> Any:
    """`split` along a dimension before the vocabulary."""
    if dim not in range(logits.dim() - 1):
        return NotImplemented
    return tuple(logits.derived(hidden) for hidden in logits.hidden.split(split_size, dim))  # type: ignore[no-untyped-call]


def _same(func: Any, logits: Logits) -> Any:
    """`contiguous`, which returns the logits themselves."""
    return logits


def _cloned(func: Any, logits: Logits) -> Any:
    """`clone`, which DDP applies to a model's outputs: the same logits, which share no memory with these."""
    return logits.derived(logits.hidden, copied=True)


def _detached(func: Any, logits: Logits) -> Logits:
    """`detach`: the same logits without a graph."""
    return logits.without_graph()


def _pointwise(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    """Casts, scaling, capping: operations on each value by itself, or with one number for each word (BART's bias)."""
    args = tuple(_row_for_all(value, logits) for value in args) if func not in _CASTING else args
    if any(value is None for value in args) or any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        return NotImplemented
    given = [value for value in (*args, *kwargs.values()) if not isinstance(value, torch.Tensor)]
    given = [value for value in given if value != logits.device]
    dtypes = [value for value in given if isinstance(value, torch.dtype)]
    if not all(isinstance(value, (int, float, torch.dtype)) for value in given):
        return NotImplemented
    if not all(dtype.is_floating_point for dtype in dtypes):
        return NotImplemented
    copied = func not in _CASTING or dtypes not in ([], [logits.dtype])
    return logits.derived(logits.hidden, lambda values: func(values, *args, **kwargs), copied=copied)


def _row_for_all(value: Any, logits: Logits) -> Any:
    """Return an operand in a form that works with any chunk of tokens; None if there is none.

    A tensor works if it is one number, or a row with one number for each word, and requires no gradient. It is copied.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, type(logits)):
        return None
    row = value.dim() == 0 or value.numel() == value.shape[-1] == logits.shape[-1]
    if not row or value.dim() > logits.dim() or value.requires_grad or value.device != logits.device:
        return None
    return value.detach().clone().reshape(value.shape[-1:])


def _log_softmax(
    func: Any, logits: Logits, dim: int | None = None, *more: Any, dtype: Any = None, **kwargs: Any
) -> Any:
    """`log_softmax` over the vocabulary, under the autocast of the call."""
    if dim not in (-1, logits.dim() - 1):
        return NotImplemented
    dtype = more[-1] if more and isinstance(more[-1], torch.dtype) else dtype  # after `_stacklevel`
    around = functools.partial(
        autocast, logits.source.device_type, compat.devices.autocast_dtype(logits.source.device_type)
    )

    def softened(values: torch.Tensor) -> torch.Tensor:
        with around():
            return functional.log_softmax(values, -1, dtype=dtype)

    return logits.derived(logits.hidden, softened, copied=True)


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
    """`cross_entropy` of logits [tokens, vocabulary] with one label for each token, chunk by chunk."""
    if logits.dim() != 2 or target.dim() != 1 or target.is_floating_point() or isinstance(target, type(logits)):
        return NotImplemented
    if weight is not None or size_average is not None or reduce is not None or len(target) != len(logits):
        return NotImplemented
    if reduction not in ("mean", "sum", "none"):
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
    """Return hidden states, labels and number of the tokens that have a label: others add nothing to the loss."""
    if compat.torch.is_fake(target):  # without values: select all tokens, the most that can be selected
        places = torch.arange(len(target), device=target.device)
        return hidden.index_select(0, places), target.index_select(0, places), len(target)
    if compat.devices.is_capturing():  # the graph is used again, with other labels
        return hidden, target, (target != ignore).sum()
    has_label = target != ignore
    count = int(has_label.sum())
    if count == len(target):
        return hidden, target, count
    places = has_label.nonzero().squeeze(-1)
    return hidden.index_select(0, places), target.index_select(0, places), count


def _gathered(func: Any, logits: Logits, dim: int, index: torch.Tensor, **kwargs: Any) -> Any:
    """`gather` of the values of some words for each token."""
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
    """Return the results of `work(values, beside)` for each token, usually one number, with a graph."""
    lead = logits.shape[:-1]
    hidden, *parameters = logits.inputs()
    hidden = hidden.reshape(-1, hidden.shape[-1])
    flat = None if beside is None else beside.reshape(len(hidden), *beside.shape[len(lead) :])
    job = Job(logits.source, logits.operations, work, flat)
    found: torch.Tensor = Rows.apply(job, hidden, *parameters)  # type: ignore[no-untyped-call]
    return found.reshape((*lead, *found.shape[1:]))


_CASTING = frozenset((torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.to))
RULES |= {
    torch.Tensor.view: _viewed,
    torch.Tensor.reshape: _viewed,
    torch.reshape: _viewed,
    torch.Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    torch.Tensor.__getitem__: _indexed,
    torch.Tensor.unbind: _unbound,
    **dict.fromkeys((torch.Tensor.split, torch.split), _split),
    torch.Tensor.contiguous: _same,
    torch.Tensor.clone: _cloned,
    torch.Tensor.detach: _detached,
    **dict.fromkeys((functional.log_softmax, torch.log_softmax, torch.Tensor.log_softmax), _log_softmax),
    functional.cross_entropy: _loss,
    **dict.fromkeys((torch.gather, torch.Tensor.gather), _gathered),
    **dict.fromkeys((torch.sum, torch.Tensor.sum, torch.logsumexp, torch.Tensor.logsumexp), _reduced),
    **dict.fromkeys((torch.argmax, torch.Tensor.argmax), _reduced),
    **dict.fromkeys(_CASTING, _pointwise),
    **{
        getattr(owner, name): _pointwise
        for owner in (torch.Tensor, torch)
        for name in ("add", "mul", "div", "neg", "tanh")
    },
}
