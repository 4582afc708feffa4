"""Mixtures of experts: a recomputed block sends every token to the experts that its forward chose.

A router chooses the experts with the largest scores (`topk`, `argmax`, `max`). Scores may tie, or differ in the last
bit between two runs, for example if a kernel adds in arbitrary order. A recomputation would then choose other experts:
its tensors would have other shapes, or gradients would go to experts that never saw the token. So hf_ckpt keeps the
indices of the first forward, one byte each for up to 256 experts, and returns them again. Values are the recomputed
scores at those indices.

Hooks on the routers intercept calls of these functions and nothing else. Blocks without a router have no hooks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_ckpt import compat

_TOP_K = (torch.topk, torch.Tensor.topk)
_ARGMAX = (torch.argmax, torch.Tensor.argmax)
_MAX = (torch.max, torch.Tensor.max)


class Choices:
    """The experts that a block's routers choose in one forward, and choose again in every recomputation of it."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor | None] = []
        """The indices of every call that is intercepted, in order; None for a call that does not choose experts."""
        self._next: int | None = None
        """Number of the next call in a recomputation; None in the first forward."""
        self._seeing: contextlib.ExitStack | None = None
        """Stops intercepting the calls of the running router; None between routers."""

    @contextlib.contextmanager
    def running(self, *, again: bool = False) -> Iterator[None]:
        """Record the choices made inside this context, or make the same ones `again`."""
        before, _running.choices, self._next = _running.choices, self, 0 if again else None
        try:
            yield
        finally:
            _running.choices = before
            self.leave()  # after an interrupt (Ctrl-C) inside a router

    def enter(self) -> None:
        """Start to intercept the choices."""
        if self._seeing is None:
            self._seeing = contextlib.ExitStack()
            self._seeing.enter_context(_SeesChoices(self))

    def leave(self) -> None:
        """Stop intercepting the choices."""
        seeing, self._seeing = self._seeing, None
        if seeing is not None:
            seeing.close()

    def choose(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function in the first forward; later return the same indices, and the scores at those indices."""
        scores = args[0] if args else kwargs["input"]
        place_of_dim, default = (2, -1) if function in _TOP_K else (1, None)
        dim = args[place_of_dim] if len(args) > place_of_dim else kwargs.get("dim", default)
        if not isinstance(dim, int):  # the largest of all scores, or of two tensors
            return function(*args, **kwargs)
        if self._next is None:
            chosen = function(*args, **kwargs)
            self._kept.append(_small(chosen if function in _ARGMAX else chosen.indices, scores, dim))
            return chosen
        place, self._next = self._next, self._next + 1
        kept = self._kept[place] if place < len(self._kept) else None
        if kept is None or not _fits(kept, scores, dim):
            return function(*args, **kwargs)
        indices = kept.long()
        if function in _ARGMAX:
            return indices
        kind = torch.return_types.topk if function in _TOP_K else torch.return_types.max
        return kind((_Chosen.apply(scores, indices, dim), indices))  # type: ignore[no-untyped-call]


class _Running(threading.local):
    """The choices of the block with routers that this thread runs, if any."""

    choices: Choices | None = None


_running = _Running()


def enter_router(router: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook of a router: in a checkpointed block, start to intercept its choices."""
    if not compat.torch.is_compiling() and _running.choices is not None and not compat.torch.transforms():
        _running.choices.enter()


def leave_router(router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a router, called even after an error: stop intercepting its choices."""
    if not compat.torch.is_compiling() and _running.choices is not None:
        _running.choices.leave()


class _SeesChoices(TorchFunctionMode):
    """Passes the calls that choose experts to the choices of the block."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self.choices = choices

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function in (*_TOP_K, *_ARGMAX, *_MAX) and not (kwargs and "out" in kwargs):
            return self.choices.choose(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


class _Chosen(torch.autograd.Function):
    """The scores at given indices. It saves what `topk` and `max` save, so that a recomputation matches its forward."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, indices: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.dim, ctx.shape = dim, scores.shape
        found = scores.gather(dim, _with(dim, indices, scores.dim()))
        return found if found.dim() == indices.dim() else torch.squeeze_copy(found, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (indices,) = ctx.saved_tensors
        wide = [_with(ctx.dim, tensor, len(ctx.shape)) for tensor in (indices, gradient)]
        return gradient.new_zeros(ctx.shape).scatter(ctx.dim, *wide), None, None


def _with(dim: int, tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """Return a tensor of `dims` dimensions: with `dim`, if `argmax` or `max` removed it."""
    return tensor if tensor.dim() == dims else tensor.unsqueeze(dim)


def _small(indices: torch.Tensor, scores: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return indices into `scores` in the smallest type that holds them; None if they are too many for a router."""
    experts = scores.shape[dim]
    if _with(dim, indices, scores.dim()).shape[dim] > compat.compiler.MOST_CHOICES:
        return None
    return indices.to(torch.uint8 if experts <= 2**8 else torch.int16 if experts <= 2**15 else torch.int32)


def _fits(kept: torch.Tensor, scores: torch.Tensor, dim: int) -> bool:
    """Whether the indices fit the shape and device of these scores."""
    shape, wide = list(scores.shape), _with(dim, kept, scores.dim())
    shape[dim] = wide.shape[dim]
    return shape == list(wide.shape) and kept.device == scores.device
