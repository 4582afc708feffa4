"""The head in chunks: logits of the whole batch never exist.

The head returns `Logits`, a tensor that knows its shape and how to compute its values. A loss turns each token's row of
logits into one number. The functions that do this (`cross_entropy`, and `gather`, `sum` and `logsumexp` over the
vocabulary) process a few tokens at a time. `rules.py` has their rules, which cover the losses of transformers and TRL.
Any other function computes all values, once, with the plain head and its ordinary graph.

If the loss ends in one number, the gradients of each chunk are computed while the chunk exists and scaled in backward,
so no product is computed twice (Hsu et al., 2024, https://arxiv.org/abs/2410.10989). Otherwise backward recomputes the
chunks.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_ckpt import compat
from hf_ckpt.engines.head.chunks import (
    Gradients,
    Job,
    RowOperation,
    Source,
    applied,
    differentiable_once,
    version_of,
)
from hf_ckpt.errors import HfCkptError
from hf_ckpt.logs import warn_once

log = logging.getLogger(__name__)

RULES: dict[Any, Callable[..., Any]] = {}
"""Function, as `__torch_function__` receives it -> its rule. `rules.py` fills it."""
_GETTERS = (
    *("shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout", "output_nr", "names"),
    *("is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta", "is_nested", "is_mps", "is_xpu"),
    *("itemsize", "nbytes", "_version", "retains_grad", "grad"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex"),
    *("get_device", "is_contiguous", "stride", "storage_offset", "__len__", "__hash__"),
)
DESCRIBING = frozenset(
    (
        *(torch.is_floating_point, torch.is_complex, torch.numel),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(getattr(torch.Tensor, name).__get__ for name in _GETTERS if hasattr(torch.Tensor, name)),
    )
)
"""Functions and attributes that need a tensor's shape, type, device or graph, but no values."""
WATCHING = frozenset((torch.Tensor.register_hook, torch.Tensor.retain_grad))
"""Functions with which a user watches the gradient of a tensor."""


def is_alias(func: Any, logits: Logits, args: Any) -> bool:
    """Whether an operation only makes an alias of its input, as autograd does if a function returns its input."""
    aten = torch.ops.aten
    return func in (aten.detach.default, aten.alias.default) or (
        func is aten.view.default and list(args[1]) == list(logits.shape)
    )


def name_of(func: Any) -> str:
    """Return the name of a function, or of the attribute that it reads."""
    of = func.__self__ if getattr(func, "__name__", "") == "__get__" else func  # such as `torch.Tensor.data.__get__`
    return str(getattr(of, "__name__", func))


@functools.cache
def _signature(rule: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(rule)


def by_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply the rule of a function to its arguments. Returns `NotImplemented` if no rule accepts them."""
    rule = RULES.get(func)
    if rule is None:
        return NotImplemented
    try:
        _signature(rule).bind(func, *args, **kwargs)
    except TypeError:  # a keyword that the rule does not have
        return NotImplemented
    return rule(func, *args, **kwargs)


class Alias:
    """Logits that would share memory if they were plain, so that changing one in place would change the others."""

    def __init__(self) -> None:
        self.made: list[tuple[weakref.ref[torch.Tensor], int]] = []
        """Computed values, with their in-place versions at that time."""

    def add(self, values: torch.Tensor) -> None:
        """Record values that were just computed."""
        self.made.append((weakref.ref(values), version_of(values)))

    def check(self, own: torch.Tensor | None) -> None:
        """Raise `HfCkptError` if values other than `own` have been changed in place since."""
        for found, version in self.made:
            values = found()
            if values is not None and values is not own and version_of(values) != version:
                raise HfCkptError(
                    "logits were changed in place after a part of them was taken, which the chunked head cannot "
                    'follow. Use "head": "full", or change a copy.'
                )


class Logits(torch.Tensor):
    """Logits that are not computed yet, possibly with operations on each token's row, such as a cast.

    Shape [..., vocabulary]. They have the place of plain logits in autograd's graph.
    """

    source: Source
    """The call of the head that they come from."""
    hidden: torch.Tensor
    """The head's input for these tokens, [..., hidden size]."""
    version: int
    """The in-place version of `hidden` when they were made."""
    operations: tuple[RowOperation, ...]
    """The operations on each row after the head, in order."""
    alias: Alias
    """The logits that would share memory with these."""
    node: Any
    """Their `grad_fn` when they were made; None without a graph."""
    computed: torch.Tensor | None
    """All values, once something has needed them; else None."""

    @staticmethod
    def __new__(
        cls: type[Logits],
        source: Source,
        hidden: torch.Tensor,
        operations: tuple[RowOperation, ...],
        like: torch.Tensor,
        alias: Alias,
    ) -> Logits:
        """Make logits with the type, the device and the last dimension of `like`."""
        shape = (*hidden.shape[:-1], like.shape[-1])
        made: Logits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        made.source, made.hidden, made.version, made.operations = source, hidden, version_of(hidden), operations
        made.alias, made.node, made.computed = alias, None, None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Logits(shape={tuple(self.shape)}, dtype={self.dtype}, computed={self.computed is not None})"

    def chunk_bytes(self) -> int:
        """Return the bytes of the logits of one chunk."""
        return min(self.source.tokens, self.shape[:-1].numel()) * self.shape[-1] * self.element_size()

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that get gradients from these logits: hidden states and parameters of the head."""
        if self.node is None or not torch.is_grad_enabled():
            return (self.hidden.detach(),)
        self.source.taken = True
        return (self.hidden, *self.source.parameters)

    def in_its_place(self) -> bool:
        """Whether gradients go straight to `hidden`, without another autograd function in between."""
        with compat.torch.without_torch_function():
            return self.grad_fn is self.node

    def check(self) -> None:
        """Raise `HfCkptError` if something has changed so that the values would differ from those of plain logits."""
        self.alias.check(self.computed)
        if self.computed is None:
            self.source.check()
            if version_of(self.hidden) != self.version:
                raise HfCkptError('the input of the chunked head was changed in place after it. Use "head": "full".')

    def values(self) -> torch.Tensor:
        """Return all values. The plain head computes them at the first call, with its ordinary graph.

        Raises `HfCkptError` if something has changed since the head was called; see `check`.
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
        """Return all values without a graph. Raises `HfCkptError` as `values` does."""
        self.check()
        return self._compute() if self.computed is None else self.computed.detach()

    def _compute(self) -> torch.Tensor:
        return applied(self.operations, self.source.logits(self.hidden))

    def derived(self, hidden: torch.Tensor, *operations: RowOperation, copied: bool = False) -> Logits:
        """Make logits of other tokens (`hidden`), or with more operations on each row.

        `copied` says whether plain logits would then have their own memory.
        """
        chain = (*self.operations, *operations)
        empty = self._no_tokens(operations)
        alias = Alias() if copied else self.alias
        self.inputs()  # records that these logits were used
        return lazily(self.source, hidden, chain, empty, alias, graph=self.node is not None)

    def without_graph(self) -> Logits:
        """Make the same logits, detached from the graph."""
        return lazily(self.source, self.hidden, self.operations, self._no_tokens(()), self.alias, graph=False)

    def _no_tokens(self, operations: Sequence[RowOperation]) -> torch.Tensor:
        """Apply the operations to a batch without tokens, to get the type, device and last dimension."""
        with torch.no_grad():
            empty = torch.empty(0, self.shape[-1], dtype=self.dtype, device=self.device)
            return applied(operations, empty)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Logits) and first.computed is None:
            if func in DESCRIBING:
                with compat.torch.without_torch_function():
                    return func(*args, **kwargs)
            if func in RULES and first.in_its_place():
                first.check()
                found = by_rule(func, args, kwargs)
                if found is not NotImplemented:
                    return found
        if isinstance(first, Logits) and func in WATCHING and first.source.taken:
            raise HfCkptError(
                "the gradient of logits cannot be watched with the chunked head once something was made of them (a "
                'loss?). Watch it before, or use "head": "full".'
            )
        return _on_real_ones(func, args, kwargs, Logits.values)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Only calls that bypass `__torch_function__` come here: autograd's functions and C++. The graph already exists.
        first = args[0] if args else None
        with torch.no_grad():
            if isinstance(first, Logits) and first.computed is None and is_alias(func, first, args):
                return Logits(first.source, first.hidden.detach(), first.operations, first._no_tokens(()), first.alias)
            if isinstance(first, Logits) and func._schema.is_mutable:
                raise HfCkptError(f'`{func}` changes logits in place, which needs "head": "full".')
            return _on_real_ones(func, args, kwargs or {}, Logits.bare_values)


class _Attached(torch.autograd.Function):
    """Gives computed values the place of their logits in the graph."""

    @staticmethod
    def forward(ctx: Any, logits: Logits, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def _on_real_ones(func: Any, args: Any, kwargs: Any, values: Callable[[Logits], torch.Tensor]) -> Any:
    """Call `func` with `values(logits)` in place of all logits among its arguments."""

    def real(value: Any) -> Any:
        if isinstance(value, Logits):
            if value.computed is None:
                _tell(name_of(func))
            return values(value)
        if type(value) in (list, tuple):
            return type(value)(map(real, value))
        return value

    return func(*map(real, args), **{key: real(value) for key, value in kwargs.items()})


def _tell(operation: str) -> None:
    warn_once(
        log,
        "hf_ckpt: `%s` asked for the logits of a training forward, which the chunked head does not compute, so they "
        'were computed as a whole there. Set "head": "full" if this is meant.',
        operation,
    )


def lazily(
    source: Source,
    hidden: torch.Tensor,
    operations: tuple[RowOperation, ...],
    like: torch.Tensor,
    alias: Alias,
    *,
    graph: bool = True,
) -> Logits:
    """Make `Logits` with the graph of plain logits; without one if `graph` is false, or under `no_grad`."""
    if not (graph and torch.is_grad_enabled()):
        return Logits(source, hidden.detach(), operations, like, alias)
    made: Logits = _Promise.apply(source, operations, like, alias, hidden, *source.parameters)  # type: ignore[no-untyped-call]
    made.node = made.grad_fn
    return made


class _Promise(torch.autograd.Function):
    """Gives `Logits` their place in the graph. Its backward serves uses that bypass `__torch_function__`."""

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
    @differentiable_once
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
