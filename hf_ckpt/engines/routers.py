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
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_ckpt import compat
from hf_ckpt.engines.region import Hook, Region
from hf_ckpt.engines.running import running
from hf_ckpt.models.blocks import FoundBlocks
from hf_ckpt.models.parts import routers

# `max` is never the only one: Switch Transformers choose by `argmax`, and take the values by `max`.
_CHOOSES: dict[Callable[..., Any], tuple[int, int | None, Any]] = {
    **dict.fromkeys((torch.topk, torch.Tensor.topk), (2, -1, torch.return_types.topk)),
    **dict.fromkeys((torch.argmax, torch.Tensor.argmax), (1, None, None)),
    **dict.fromkeys((torch.max, torch.Tensor.max), (1, None, torch.return_types.max)),
}
"""Function -> place of its argument `dim`, its default, and what it returns; None if it returns indices alone."""


class Choices(TorchFunctionMode):
    """The experts that a block's routers choose in one forward, and choose again in every recomputation of it."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[torch.Tensor | None] = []
        """The indices of every call that is intercepted, in order; None for a call that does not choose experts."""
        self._next: int | None = None
        """Number of the next call in a recomputation; None in the first forward."""
        self._is_on = False
        """Whether a router runs, so that calls are intercepted."""

    @contextlib.contextmanager
    def of_one_run(self, *, again: bool = False) -> Iterator[None]:
        """Record the choices made inside this context, or make the same ones `again`."""
        before = running.choices
        running.choices = self
        self._next = 0 if again else None
        try:
            yield
        finally:
            running.choices = before
            self.intercept(False)  # after an interrupt (Ctrl-C) inside a router

    def intercept(self, on: bool) -> None:
        """Start or stop to intercept the choices."""
        if on and not self._is_on:
            self.__enter__()  # type: ignore[no-untyped-call]
        elif self._is_on and not on:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._is_on = on

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _CHOOSES or "out" in kwargs:
            return function(*args, **kwargs)
        place_of_dim, default, kind = _CHOOSES[function]
        scores = args[0] if args else kwargs["input"]
        dim = args[place_of_dim] if len(args) > place_of_dim else kwargs.get("dim", default)
        if not isinstance(dim, int):  # the largest of all scores, or of two tensors: no choice for each token
            return function(*args, **kwargs)
        if self._next is None:
            chosen = function(*args, **kwargs)
            self._kept.append(_small(chosen if kind is None else chosen.indices, scores, dim))
            return chosen
        # A block may call its router once more in a recomputation than in the forward; that call chooses by itself.
        kept = self._kept[self._next] if self._next < len(self._kept) else None
        self._next += 1
        if kept is None:
            return function(*args, **kwargs)
        # The values are computed from the new scores, so that their gradients reach the router's weights.
        indices = kept.long()
        if kind is None:
            return indices
        return kind((_Chosen.apply(scores, indices, dim), indices))  # type: ignore[no-untyped-call]


def hooks(regions: Collection[Region], blocks: FoundBlocks) -> Iterator[Hook]:
    """Yield hooks on the routers of all blocks that are recomputed as a whole."""
    for name in dict.fromkeys(region.block for region in regions if region.keeps_choices):
        for router in routers(blocks.modules[name]):
            yield Hook(router, enter_router, "before")
            yield Hook(router, leave_router, "after")


def enter_router(router: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook of a router: in a checkpointed block, start to intercept its choices."""
    # Compiled blocks keep their choices by the partitioner, see `compat.compiler`.
    if not compat.torch.is_compiling() and running.choices is not None and not compat.modes.transforms():
        running.choices.intercept(True)


def leave_router(router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a router, called even after an error: stop intercepting its choices."""
    if not compat.torch.is_compiling() and running.choices is not None:
        running.choices.intercept(False)


class _Chosen(torch.autograd.Function):
    """The scores at given indices. It saves what `topk` and `max` save, so that a recomputation matches its forward."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, indices: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.dim = dim
        ctx.shape = scores.shape
        chosen = scores.gather(dim, _with(dim, indices, scores.dim()))
        return chosen if chosen.dim() == indices.dim() else torch.squeeze_copy(chosen, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (indices,) = ctx.saved_tensors
        wide = [_with(ctx.dim, tensor, len(ctx.shape)) for tensor in (indices, gradients[0])]
        return gradients[0].new_zeros(ctx.shape).scatter(ctx.dim, *wide), None, None


def _with(dim: int, tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """Return a tensor of `dims` dimensions: with `dim`, if `argmax` or `max` removed it."""
    return tensor if tensor.dim() == dims else tensor.unsqueeze(dim)


def _small(indices: torch.Tensor, scores: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return indices into `scores` in the smallest type that holds them; None if they are too many for a router."""
    experts = scores.shape[dim]
    if _with(dim, indices, scores.dim()).shape[dim] > compat.compiler.MOST_CHOICES:
        return None
    return indices.to(torch.uint8 if experts <= 2**8 else torch.int16 if experts <= 2**15 else torch.int32)
