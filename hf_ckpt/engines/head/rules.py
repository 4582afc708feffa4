"""Functions of logits that process a few tokens at a time: a rule for each.

They cover the losses of transformers and TRL. A loss turns each token's row of logits into one number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hf_ckpt import compat
from hf_ckpt.engines.head.chunks import InChunks, at_least_float32
from hf_ckpt.engines.head.logits import Logits, Rule, applied


def _viewed(func: Any, logits: Logits, *shape: Any, **more: Any) -> Any:
    """`view` and `reshape` to a shape whose last dimension is still the vocabulary."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if more or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    sizes = torch.empty(()).expand(logits.shape).view(sizes).shape  # torch knows what -1 is, and raises
    if sizes[-1:] != logits.shape[-1:]:
        return NotImplemented
    return logits.derived(logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1]))


def _indexed(func: Any, logits: Logits, index: Any) -> Any:
    """Indexing that selects tokens, with the whole vocabulary of each: `x[mask]`, `x[..., :-1, :]`, but not `x[:, 1:,
    5]`.

    The last index may stand for the vocabulary only as `:`.
    """
    parts = index if isinstance(index, tuple) else (index,)
    plain = [part for part in parts if not isinstance(part, torch.Tensor)]
    if not all(type(part) in (int, slice, type(Ellipsis)) for part in plain):
        return NotImplemented
    taken = len(parts) - plain.count(Ellipsis)  # dimensions; a mask takes as many as it has
    taken += sum(part.dim() - 1 for part in parts if isinstance(part, torch.Tensor) and part.dtype == torch.bool)
    reaches_last = taken >= logits.dim() or (Ellipsis in plain and parts[-1] is not Ellipsis)
    if reaches_last and not (type(parts[-1]) is slice and parts[-1] == slice(None)):
        return NotImplemented
    return logits.derived(logits.hidden[index])


def _parts(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    """`split`, `chunk` and `unbind` of tokens, as TRL does for entropies and, by iteration, for log-probabilities."""
    place = 0 if func.__name__ == "unbind" else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else 0)
    if logits.dim() < 2 or dim in (-1, logits.dim() - 1):  # parts of the vocabulary
        return NotImplemented
    return tuple(map(logits.derived, func(logits.hidden, *args, **kwargs)))


def _pointwise(func: Any, logits: Logits, *operands: Any, **more: Any) -> Any:
    """Scaling, capping: operations on each value by itself, or with one number for each word (BART's bias)."""
    rows: list[Any] = []
    for value in operands:
        if isinstance(value, torch.Tensor):
            row = value.dim() == 0 or value.numel() == value.shape[-1] == logits.shape[-1]
            if not row or value.dim() > logits.dim() or value.requires_grad or value.device != logits.device:
                return NotImplemented
            rows.append(value.detach().clone().reshape(value.shape[-1:]))  # a copy, because it may change later
        elif isinstance(value, (int, float)):
            rows.append(value)
    if more or len(rows) < len(operands):
        return NotImplemented
    return logits.derived(logits.hidden, lambda values: func(values, *rows))


def _product(func: Any, logits: Logits, other: Any, **more: Any) -> Any:
    """`mul`, also by a function of the same logits: an entropy is the sum of p log p."""
    if not isinstance(other, Logits):
        return _pointwise(func, logits, other, **more)
    # Only if both are of the same tokens of the same call: one pass over the chunks then computes both factors.
    if more or other.call is not logits.call or other.requires_grad != logits.requires_grad:
        return NotImplemented
    if _memory_of(other.hidden) != _memory_of(logits.hidden) or other.computed is not None or not other.in_its_place():
        return NotImplemented
    other.check()
    first = logits.operations
    second = other.operations
    plain = Logits.make(logits.call, logits.hidden, (), logits.call.like, graph=logits.requires_grad)
    return plain.derived(plain.hidden, lambda values: func(applied(first, values), applied(second, values)))


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what two tensors have in common only if they are views of the same numbers."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _cast(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    """Casts to a floating type on the same device."""
    like = func(logits.like, *args, **kwargs)  # on no tokens, so that torch itself reads the arguments
    has_more = kwargs.keys() - {"dtype", "device", "non_blocking"}
    if has_more or like.device != logits.device or not like.dtype.is_floating_point:
        return NotImplemented
    if like.dtype == logits.dtype:  # as torch does: the same object
        return logits
    return logits.derived(logits.hidden, lambda values: values.to(like.dtype))


def _log_softmax(func: Any, logits: Logits, dim: Any = None, *more: Any, **kwargs: Any) -> Any:
    """`log_softmax` over the vocabulary."""
    if dim not in (-1, logits.dim() - 1):
        return NotImplemented
    dtype = func(logits.like, -1, *more, **kwargs).dtype  # of the autocast of now
    return logits.derived(logits.hidden, lambda values: functional.log_softmax(values, -1, dtype=dtype))


def _loss(
    func: Any,
    logits: Logits,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **unsupported: Any,
) -> Any:
    """`cross_entropy` of logits [tokens, vocabulary] with one label for each token, chunk by chunk."""
    # torch passes all options by keyword. Unsupported ones are weights of words, and older names of `reduction`.
    if any(value is not None for value in unsupported.values()):
        return NotImplemented
    if logits.dim() != 2 or target.dim() != 1 or target.is_floating_point() or len(target) != len(logits):
        return NotImplemented
    # The labels below are counted and selected, for which the host waits; a captured graph does not allow that.
    if reduction not in ("mean", "sum", "none") or compat.devices.is_capturing():
        return NotImplemented

    def losses(values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        options = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
        return func(values, labels, reduction="none", **options)  # type: ignore[no-any-return]

    if reduction == "none":
        return _in_rows(logits, losses, target)
    hidden, *parameters = logits.inputs()  # only now, because it marks the logits as `bypassed`
    # Tokens without a label add nothing to the loss. Fake labels have no values: all tokens are the most there can be.
    if compat.torch.is_fake(target):
        places = torch.arange(len(target), device=target.device)
    else:
        places = (target != ignore_index).nonzero().squeeze(-1)
    work = logits.work(losses, target.index_select(0, places))
    total: torch.Tensor = InChunks.apply(  # type: ignore[no-untyped-call]
        logits.call, work, True, None, hidden.index_select(0, places), *parameters
    )
    if reduction == "mean":  # without a label NaN, and no gradient, as the plain head
        total = total / len(places) if len(places) else total + float("nan")
    return total.to(logits.dtype if compat.devices.autocast_dtype(logits.call.device_type) is None else torch.float32)


def _gathered(func: Any, logits: Logits, dim: int | None, index: torch.Tensor, **more: Any) -> Any:
    """`gather` of the values of some words for each token."""
    if more or dim not in (-1, logits.dim() - 1) or index.shape[:-1] != logits.shape[:-1]:
        return NotImplemented
    return _in_rows(logits, lambda values, words: values.gather(-1, words), index)


def _reduced(func: Any, logits: Logits, dim: Any = None, *more: Any, **options: Any) -> Any:
    """`sum`, `mean`, `logsumexp` and `argmax` over the vocabulary, and the sum or mean of all values."""
    if dim is None and not more and not options and func.__name__ in ("sum", "mean"):
        wide = at_least_float32(logits.dtype)
        total = _in_rows(logits, lambda values: values.sum(-1, dtype=wide)).sum()
        if func.__name__ == "mean":
            total = total / logits.numel()
        return total.to(func(logits.like).dtype)
    if more or dim not in (-1, logits.dim() - 1, (-1,), [-1]) or options.keys() - {"keepdim", "dtype"}:
        return NotImplemented
    if func.__name__ == "argmax":  # it has no gradient, so it leaves that of the logits to whoever asks
        logits = logits.derived(logits.hidden, graph=False)
    return _in_rows(logits, lambda values: func(values, -1, **options))


def _in_rows(logits: Logits, function: Callable[..., torch.Tensor], beside: torch.Tensor | None = None) -> torch.Tensor:
    """Return the results of `function(values, rows of beside)` for each token, usually one number, with a graph."""
    hidden, *parameters = logits.inputs()
    hidden = hidden.reshape(-1, hidden.shape[-1])
    flat = None if beside is None else beside.reshape(len(hidden), *beside.shape[logits.dim() - 1 :])
    work = logits.work(function, flat)
    rows: torch.Tensor = InChunks.apply(  # type: ignore[no-untyped-call]
        logits.call, work, False, None, hidden, *parameters
    )
    return rows.reshape((*logits.shape[:-1], *rows.shape[1:]))


def _rows(rule: Callable[..., Any], *names: str) -> dict[Any, Callable[..., Any]]:
    """Return the rows of a rule in `RULES` for functions that torch has both in its namespace and as methods."""
    return {getattr(owner, name): rule for owner in (torch, torch.Tensor) for name in names}


RULES: dict[Any, Rule] = {
    torch.Tensor.__getitem__: _indexed,
    torch.Tensor.contiguous: lambda func, logits: logits,
    torch.Tensor.detach: lambda func, logits: logits.derived(logits.hidden, graph=False),
    functional.cross_entropy: _loss,
    **dict.fromkeys((torch.Tensor.view, torch.Tensor.reshape, torch.reshape), _viewed),
    **dict.fromkeys((torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.to), _cast),
    functional.log_softmax: _log_softmax,
    **_rows(_log_softmax, "log_softmax"),
    **_rows(_gathered, "gather"),
    **_rows(lambda func, logits, indices, dim=None: _gathered(func, logits, dim, indices), "take_along_dim"),
    **_rows(_product, "mul"),
    **_rows(_parts, "unbind", "split", "chunk"),
    **_rows(_reduced, "sum", "mean", "logsumexp", "argmax"),
    **_rows(_pointwise, "add", "div", "neg", "exp", "tanh", "clone"),  # DDP clones the outputs of a model
}
"""Function, as `__torch_function__` receives it -> its rule; see `logits.Rule`."""
