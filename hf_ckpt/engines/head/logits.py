"""The head in chunks: logits of the whole batch never exist.

`chunked` returns `Logits`, a tensor that knows its shape and how to compute its values. A loss turns each token's row
of logits into one number. The functions that do this (`cross_entropy`, and `gather`, `sum` and `logsumexp` over the
vocabulary) process a few tokens at a time. `RULES` has a rule for each; they cover the losses of transformers and TRL.
Any other function gets the values of all tokens, which are computed once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from hf_ckpt import compat
from hf_ckpt.engines.head.chunks import HeadCall, InChunks, RowOperation, Work, autocast
from hf_ckpt.engines.seen import Seen
from hf_ckpt.errors import ChangedBlockError, HfCkptError
from hf_ckpt.logs import warn_once

log = logging.getLogger(__name__)

Operations = tuple[RowOperation, ...]
Rule = Callable[..., Any]
"""`rule(func, logits, *args, **kwargs)` replaces `func(logits, *args, **kwargs)`.

It returns what `func` would return, without computing all logits, or `NotImplemented` if it cannot do so with these
arguments.
"""
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
GRADIENT_HOOKS = frozenset((torch.Tensor.register_hook, torch.Tensor.retain_grad))
BACKWARDS = frozenset((torch.autograd.grad, torch.autograd.backward))


class Logits(torch.Tensor):
    """Logits that are not computed yet, possibly with operations on each token's row, such as a cast.

    Shape [..., vocabulary]. They have the place of plain logits in autograd's graph.
    """

    rules: ClassVar[dict[Any, Rule]] = {}
    """The functions that process a few tokens at a time: `rules.RULES`."""
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
        if not graph:
            return logits
        # The function returns the same object, with a graph.
        return InChunks.apply(  # type: ignore
            call, logits.work(lambda values: values), False, lambda: logits, hidden, *call.parameters
        )

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
        with compat.modes.without_torch_function():
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
                values = applied(operations, values)
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
        if func in GRADIENT_HOOKS or func in BACKWARDS:
            _refuse_bypassed(func, args[:1] if func in GRADIENT_HOOKS else (args[1:], kwargs.get("inputs")))
        # Once all values exist, chunks would compute them a second time.
        if isinstance(first, Logits) and first.computed is None:
            if func in DESCRIBING:
                with compat.modes.without_torch_function():
                    return func(*args, **kwargs)
            if func in cls.rules and first.in_its_place():
                first.check()
                result = cls.rules[func](func, *args, **kwargs)
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


def applied(operations: Operations, values: torch.Tensor) -> torch.Tensor:
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
