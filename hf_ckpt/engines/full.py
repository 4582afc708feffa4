"""`full`: keep the block's inputs and recompute the block in backward, by `torch.utils.checkpoint`, non-reentrant."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hf_ckpt import compat
from hf_ckpt.errors import GraphCaptureError

Observer = Callable[[], contextlib.AbstractContextManager[None]]


class FullRegion:
    """The checkpointing function of one block. It counts what it did, and holds neither the block nor the model."""

    def __init__(self, block: str, *, preserve_rng_state: bool = True, determinism_check: str = "default") -> None:
        self.block = block
        self.preserve_rng_state = preserve_rng_state
        self.determinism_check = determinism_check
        self.forwards = 0
        """Calls that were checkpointed."""
        self.recomputed = 0
        """Times the block was run again in backward."""
        self.observer: Observer | None = None
        """Entered around every recomputation; set by measurements."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward, saving its inputs only.

        Raises `GraphCaptureError` inside CUDA graph capture while random state is preserved.
        """
        if not torch.is_grad_enabled():
            return fn(*args)
        # GPT-2 hands its cache over by position, where the layer does not strip it; recomputing would write it again.
        args = tuple(None if compat.is_cache(arg) else arg for arg in args)
        if compat.is_compiling():  # counting would be a side effect inside the traced region
            return self._checkpoint(fn, *args)
        self.refuse_capturing()
        self.forwards += 1
        return self._checkpoint(_Counted(fn, self), *args)

    def refuse_capturing(self) -> None:
        """Raise `GraphCaptureError` inside CUDA graph capture while random state is preserved."""
        if self.preserve_rng_state and compat.is_capturing():
            raise GraphCaptureError(
                f"block {self.block!r} preserves random state, which cannot be read while a CUDA graph is captured. "
                'Set "preserve_rng_state": false if no dropout is active, or capture without checkpointing.'
            )

    def _checkpoint(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self._checkpointed(fn, *args)

    def _checkpointed(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return checkpoint(
            fn,
            *args,
            use_reentrant=False,  # always spelt out: without it torch falls back to reentrant
            preserve_rng_state=self.preserve_rng_state,
            determinism_check=self.determinism_check,
            **options,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "observer": None}  # measurements belong to this process


class _Counted:
    """The block's forward; every call after the first is a recomputation."""

    __slots__ = ("fn", "ran", "region")

    def __init__(self, fn: Callable[..., Any], region: FullRegion) -> None:
        self.fn = fn
        self.region = region
        self.ran = False

    def __call__(self, *args: Any) -> Any:
        if not self.ran:
            self.ran = True
            return self.fn(*args)
        self.region.recomputed += 1
        with self.region.observer() if self.region.observer else contextlib.nullcontext():
            return self.fn(*args)
