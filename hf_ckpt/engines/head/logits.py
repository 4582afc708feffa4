"""The head in chunks: logits of the whole batch never exist.

`chunked` returns `Logits`, a tensor that knows its shape and how to compute its values. A loss turns each token's row
of logits into one number. The functions that do this (`cross_entropy`, and `gather`, `sum` and `logsumexp` over the
vocabulary) process a few tokens at a time. `RULES` has a rule for each; they cover the losses of transformers and TRL.
Any other function gets the values of all tokens, which are computed once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_ckpt import compat
from hf_ckpt.engines.head.chunks import HeadCall, InChunks, RowOperation, Work, at_least_float32, autocast
from hf_ckpt.engines.seen import Seen
from hf_ckpt.errors import ChangedBlockError, HfCkptError
from hf_ckpt.logs import warn_once

log = logging.getLogger(__name__)

AUTO_PIECES = 8
"""The number of chunks of `auto`."""
AUTO_LEAST = 256
"""The fewest tokens in such a chunk: fewer would not keep a device busy."""
AUTO_MOST = 4096
"""The most tokens in one. Each chunk of a trained head reads and writes the whole gradient of its weight."""
AUTO_MOST_FROZEN = 1024
"""The same for a frozen head, which has no such gradient."""
Operations = tuple[RowOperation, ...]
_DESCRIBING = (
    *("shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout", "output_nr", "_version"),
    *("is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta", "is_nested", "itemsize", "nbytes", "size", "dim"),
    *("ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "get_device", "stride"),
    *("is_contiguous", "storage_offset", "__len__", "__hash__"),
)
_members = [getattr(torch.Tensor, name) for name in _DESCRIBING]
_getters = [member.__get__ for member in _members]
DESCRIBING = frozenset((*_members, *_getters, torch.is_floating_point, torch.is_complex, torch.numel))
"""Functions and attributes that need a tensor's shape, type, device or graph, but no values. `__torch_function__` gets
the `__get__` of an attribute."""
HOOKS = frozenset((torch.Tensor.register_hook, torch.Tensor.retain_grad))
BACKWARDS = frozenset((torch.autograd.grad, torch.autograd.backward))


def tokens_per_chunk(chunk: int | str, tokens: int, head: nn.Module) -> int:
    """Return the number of tokens in a chunk: `chunk`, or for `auto` what suits this many `tokens` that need logits."""
    if isinstance(chunk, int):
        return chunk
    trained = any(parameter.requires_grad for parameter in head.parameters())
    most = AUTO_MOST if trained else AUTO_MOST_FROZEN
    piece = -(-tokens // AUTO_PIECES)
    piece = -(-piece // 128) * 128  # whole tiles of 128 rows, as most matrix kernels have
    return max(AUTO_LEAST, min(piece, most))


def chunks_help(logits: torch.Tensor, head: nn.Module, tokens: int, chunk: int) -> bool:
    """Whether a head and its loss need less memory in chunks of `chunk` tokens than on all `tokens` at once.

    Of `logits`, only the size of the vocabulary and the type count.

    At the peak of a plain head, its loss holds the logits, and copies in float32: the cast, log-probabilities and their
    gradient. Chunks hold these for one chunk, but also the sum of all gradients of the head's parameters in float32,
    and cast it to the parameters' type in the end.
    """
    of_a_token = logits.shape[-1] * (logits.element_size() + 3 * 4)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    summed = 4 * sum(parameter.numel() for parameter in trained)
    cast = sum(parameter.nbytes for parameter in trained if parameter.element_size() < 4)
    return tokens * of_a_token > summed + max(chunk * of_a_token, cast)


def auto_helps(head: nn.Module, logits: torch.Tensor) -> bool:
    """Whether a training forward of a head that returned these logits would need less memory under `head: auto`."""
    tokens = logits.shape[:-1].numel()
    chunk = tokens_per_chunk("auto", tokens, head)
    return why_whole(head) is None and chunks_help(logits, head, tokens, chunk)


def why_whole(head: nn.Module) -> str | None:
    """Return why a head cannot run in chunks now; None if it can."""
    modules = list(head.modules())
    if any(isinstance(module, nn.Dropout) and module.p and module.training for module in modules):
        return "it has an active dropout, whose draws would be others"
    values = (value for module in modules for value in vars(module).values())
    if any(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in values):
        return "its weights are computed (by `weight_norm`?), and backward runs through their graph only once"
    if compat.torch.transforms():
        return "a transform of torch.func or forward-mode AD is active"
    return None


def chunked(module: nn.Module, run: RowOperation, hidden: torch.Tensor, chunk: int | str) -> torch.Tensor:
    """Run a head in chunks: return `Logits`, or plain logits if chunks would not need less.

    Args:
        module: the head.
        run: its own forward.
        hidden: its input, [..., hidden size].
        chunk: tokens per chunk, or `auto`.
    """
    all_tokens = hidden.shape[:-1].numel()
    tokens = tokens_per_chunk(chunk, all_tokens, module)
    if all_tokens <= tokens:
        return run(hidden)
    call = HeadCall(module, run, hidden, tokens)
    if chunk == "auto" and not chunks_help(call.like, module, all_tokens, tokens):
        return run(hidden)
    return Logits.make(call, hidden, (), call.like, graph=True)


class Logits(torch.Tensor):
    """Logits that are not computed yet, possibly with operations on each token's row, such as a cast.

    Shape [..., vocabulary]. They have the place of plain logits in autograd's graph.
    """

    call: HeadCall
    """The call of the head that they come from."""
    hidden: torch.Tensor
    """The head's input for these tokens, [..., hidden size]."""
    operations: Operations
    """The operations on each row after the head, in order."""
    like: torch.Tensor
    """Logits of no tokens, [0, vocabulary], with the type and device of these."""
    shared: list[Seen]
    """Computed values of all logits that would share memory with these."""
    computed: torch.Tensor | None
    """All values, once something has needed them; else None."""

    @classmethod
    def make(
        cls, call: HeadCall, hidden: torch.Tensor, operations: Operations, like: torch.Tensor, *, graph: bool
    ) -> Logits:
        """Make logits; with the place of plain logits in autograd's graph, if `graph`."""
        shape = (*hidden.shape[:-1], like.shape[-1])
        # A tensor without memory: whatever reads its values comes to `__torch_function__` or `__torch_dispatch__`.
        logits: Logits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        logits.call = call
        logits.hidden = hidden if graph else hidden.detach()
        logits.operations = operations
        logits.like = like
        logits.shared = []
        logits.computed = None
        work = logits.work(lambda values: values)
        # The function returns the same object, with a graph.
        return InChunks.apply(call, work, lambda: logits, hidden, *call.parameters) if graph else logits  # type: ignore

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Logits(shape={tuple(self.shape)}, dtype={self.dtype}, computed={self.computed is not None})"

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors to which a loss in chunks sends its gradients: hidden states and parameters of the head.

        The logits themselves get none then, so later questions for their gradient are refused.
        """
        if self.grad_fn is None or not torch.is_grad_enabled():
            return (self.hidden.detach(),)
        self.call.is_bypassed = True
        return (self.hidden, *self.call.parameters)

    def in_its_place(self) -> bool:
        """Whether gradients go straight to `hidden`, without another autograd function in between."""
        # DDP puts a function around the outputs of a model. Such a one may have a gradient of its own.
        with compat.torch.without_torch_function():
            return self.grad_fn is None or self.grad_fn.name() == "InChunksBackward"

    def work(self, function: Callable[..., torch.Tensor], beside: torch.Tensor | None = None) -> Work:
        """Make a function that applies `function` to the values of a chunk, and to its rows of `beside` if given.

        It runs under the autocast of now, also in backward, and raises `ChangedBlockError` if `beside` has changed.
        """
        device_type = self.call.device_type
        operations = self.operations
        dtype = compat.devices.autocast_dtype(device_type)
        seen = None if beside is None else Seen(beside.detach())

        def work(values: torch.Tensor, chunk: slice) -> torch.Tensor:
            with autocast(device_type, dtype):
                values = _applied(operations, values)
                if seen is None:
                    return function(values)
                if seen.is_overwritten:
                    raise ChangedBlockError("head", "the labels, or what else its logits met, were overwritten")
                return function(values, seen.tensor[chunk])

        return work

    def check(self) -> None:
        """Raise `HfCkptError` if values were changed in place, which logits that are not computed yet would not see."""
        for values in self.shared:
            if values.is_overwritten:
                raise HfCkptError('logits were changed in place, which needs "head": "whole".')

    def values(self) -> torch.Tensor:
        """Return all values, which the plain head computes at the first call; backward runs it in chunks.

        Raises `HfCkptError` if something has changed since the head was called; see `check` and `HeadCall.again`.
        """
        self.check()
        if self.computed is None:
            # With a graph even if asked under `no_grad`: the values are kept for later uses, which may need gradients.
            with torch.inference_mode(False), torch.enable_grad():
                self.computed = _Values.apply(self).view(self.shape)  # type: ignore[no-untyped-call]
            self.shared.append(Seen(self.computed.detach()))
        return self.computed

    def bare_values(self) -> torch.Tensor:
        """Return all values without a graph. Raises `HfCkptError` as `values` does."""
        self.check()
        return self.flat_values().view(self.shape) if self.computed is None else self.computed.detach()

    def flat_values(self) -> torch.Tensor:
        """Compute all values, [tokens, vocabulary]."""
        values = self.call.again(self.call.logits, self.hidden.reshape(-1, self.hidden.shape[-1]))
        return self.work(lambda values: values)(values, slice(None))

    def derived(self, hidden: torch.Tensor, operation: RowOperation | None = None, *, graph: bool = True) -> Logits:
        """Make logits of other tokens (`hidden`), or with one more operation on each row; detached if not `graph`."""
        operations = self.operations
        like = self.like
        if operation is not None:
            operations = (*operations, operation)
            with torch.no_grad():
                like = operation(like)
        graph = graph and self.grad_fn is not None and torch.is_grad_enabled()
        logits = Logits.make(self.call, hidden, operations, like, graph=graph)
        if operation is None:  # else the result has memory of its own
            logits.shared = self.shared
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        # Before all else: gradients of logits are wrong once a loss has gone around them, also where values exist.
        if func in HOOKS or func in BACKWARDS:
            _refuse_bypassed(func, args[:1] if func in HOOKS else (args[1:], kwargs.get("inputs")))
        # Once all values exist, chunks would compute them a second time.
        if isinstance(first, Logits) and first.computed is None:
            if func in DESCRIBING:
                with compat.torch.without_torch_function():
                    return func(*args, **kwargs)
            if func in RULES and first.in_its_place():
                first.check()
                result = RULES[func](func, *args, **kwargs)
                if result is not NotImplemented:
                    return result
        return _on_values(func, args, kwargs, Logits.values)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Only calls that bypass `__torch_function__` come here: autograd's functions and C++. The graph already exists.
        if args and isinstance(args[0], Logits) and func._schema.is_mutable:
            raise HfCkptError(f'`{func}` changes logits in place, which needs "head": "whole".')
        with torch.no_grad():
            return _on_values(func, args, kwargs or {}, Logits.bare_values)


class _Values(torch.autograd.Function):
    """Computes the values of logits, and gives them the place of the logits in the graph."""

    @staticmethod
    def forward(ctx: Any, logits: Logits) -> torch.Tensor:
        ctx.shape = logits.shape
        return logits.flat_values()  # not a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.view(ctx.shape)


def _refuse_bypassed(func: Any, targets: Any) -> None:
    """Raise `HfCkptError` if a function asks for gradients of logits (`targets`) that a loss in chunks never computes.

    Such a loss sends its gradients straight to the hidden states and the parameters.
    """
    leaves = (leaf for leaf in compat.torch.tree_leaves(targets) if isinstance(leaf, Logits))
    if any(leaf.call.is_bypassed for leaf in leaves):
        raise HfCkptError(
            f"`{torch.overrides.resolve_name(func) or func.__name__}` asked for the gradient of logits whose loss was "
            'already computed in chunks. Ask before the loss is computed, or use "head": "whole".'
        )


def _applied(operations: Operations, values: torch.Tensor) -> torch.Tensor:
    """Apply the operations to rows of values, in order."""
    for operation in operations:
        values = operation(values)
    return values


def _on_values(func: Any, args: Any, kwargs: Any, values: Callable[[Logits], torch.Tensor]) -> Any:
    """Call `func` with `values(logits)` in place of all logits among its arguments. Warns once."""

    def computed(value: Any) -> Any:
        if not isinstance(value, Logits):
            return value
        if value.computed is None:
            name = str(torch.overrides.resolve_name(func) or func)
            value.call.when_read_whole(name)
            warn_once(
                log,
                "hf_ckpt: `%s` asked for the logits of a training forward, which the chunked head does not "
                'compute, so they were computed as a whole there. Set "head": "whole" if this is meant.',
                name,
            )
        return values(value)

    all_logits = [leaf for leaf in compat.torch.tree_leaves((args, kwargs)) if isinstance(leaf, Logits)]
    args, kwargs = compat.torch.tree_map(computed, (args, kwargs))
    result = func(*args, **kwargs)
    for logits in all_logits:
        logits.check()
    return result


# --- rules ------------------------------------------------------------------------------------------------------------


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
    return plain.derived(plain.hidden, lambda values: func(_applied(first, values), _applied(second, values)))


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
        logits.call, work, "sum", hidden.index_select(0, places), *parameters
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
    rows: torch.Tensor = InChunks.apply(logits.call, work, "rows", hidden, *parameters)  # type: ignore[no-untyped-call]
    return rows.reshape((*logits.shape[:-1], *rows.shape[1:]))


def _rows(rule: Callable[..., Any], *names: str) -> dict[Any, Callable[..., Any]]:
    """Return the rows of a rule in `RULES` for functions that torch has both in its namespace and as methods."""
    return {getattr(owner, name): rule for owner in (torch, torch.Tensor) for name in names}


RULES: dict[Any, Callable[..., Any]] = {
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
"""Function, as `__torch_function__` receives it -> its rule.

`rule(func, logits, *args, **kwargs)` replaces `func(logits, *args, **kwargs)`. It returns what `func` would return,
without computing all logits, or `NotImplemented` if it cannot do so with these arguments.
"""
