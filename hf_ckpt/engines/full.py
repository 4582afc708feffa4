"""`full`: save only the block's inputs and recompute the block in backward. It uses `torch.utils.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hf_ckpt import compat
from hf_ckpt.engines.arguments import as_given
from hf_ckpt.engines.region import Region
from hf_ckpt.engines.seen import version_of
from hf_ckpt.engines.state import ForwardState, Settings
from hf_ckpt.errors import GraphCaptureError, InPlaceError


class FullRegion(Region):
    """The checkpointing function of a block that is recomputed as a whole."""

    keeps_choices = True

    def __init__(self, block: str, *, preserve_rng_state: bool = True, determinism_check: str = "default") -> None:
        self.block = block
        self.preserve_rng_state = preserve_rng_state
        self.determinism_check = determinism_check
        self.forwards = 0
        self.recomputed = 0
        self.in_graph = False
        self.whole = True
        """Whether every parameter stays on its device, unsharded, throughout a step."""
        self.settings: Settings | None = None
        """The settings of the block in its last forward; None before the first."""

    def inner(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to run in place of the block's own forward `fn`, in the forward and when recomputing."""
        return fn

    def told_of_parameters(self, stay: bool, owner: str) -> None:
        """Note whether parameters stay on their device, unsharded, throughout a step (`stay`), and can be compared."""
        self.whole = stay

    def state_for(self, fn: Callable[..., Any]) -> ForwardState:
        """Record the state of the block whose forward `fn` is about to run; only random state if the block is unknown.

        A replica of `nn.DataParallel` exists for one forward only, so nobody can change it.
        """
        block, settings = compat.transformers.module_of(fn), self.settings
        if block is None or compat.torch.is_replica(block):
            block = settings = None
        elif settings is None or not settings.hold(block):
            settings = self.settings = Settings(block)
        return ForwardState(self.block, block, settings, whole=self.whole, keeps_draws=self.preserve_rng_state)

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward, and save its inputs only.

        Raises `GraphCaptureError` if random state is preserved while a CUDA graph is captured, and `InPlaceError` if
        the block changes an input that it would be recomputed from.
        """
        if not torch.is_grad_enabled():
            return fn(*args)
        fn, args = compat.transformers.block_call(fn, args)
        if compat.torch.is_compiling():
            self.in_graph = True  # counting here would recompile for every value of the count
            return self._checkpoint(fn, *args)
        if self.preserve_rng_state and compat.devices.is_capturing():
            raise GraphCaptureError(
                self.block, "it preserves random state, which cannot be read while a CUDA graph is captured."
            )
        self.forwards += 1
        fn, args = as_given(fn, args)
        versions = [version_of(arg) for arg in args]
        output = self._checkpoint(Counted(fn, self), *args)
        for arg, version in zip(args, versions, strict=True):
            if version_of(arg) != version and needs_gradient(output):
                raise InPlaceError(self.block, arg, version, None if arg.grad_fn is None else arg.grad_fn.name())
        return output

    def _checkpoint(self, fn: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(
            fn,
            *args,
            use_reentrant=False,  # torch is reentrant by default
            # `ForwardState` does it faster.
            preserve_rng_state=self.preserve_rng_state and compat.torch.is_compiling(),
            determinism_check=self.determinism_check,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "settings": None}  # they refer to the modules of this block


class Counted:
    """A block's forward. All calls after the first count as recomputations and run in the state of the first."""

    __slots__ = ("fn", "ran", "region", "state")

    def __init__(self, fn: Callable[..., Any], region: FullRegion) -> None:
        self.fn = region.inner(fn)
        self.region = region
        self.ran = False
        self.state = region.state_for(fn)

    def __call__(self, *args: Any) -> Any:
        if not self.ran:
            self.ran = True
            return self.state.run(self.fn, args)
        self.region.recomputed += 1
        return self.state.recompute(self.fn, args)


def is_plain(args: tuple[Any, ...]) -> bool:
    """Whether the first argument is an ordinary tensor, outside torch.func, that no hooks of the user would store."""
    hidden = args[0] if args else None
    if type(hidden) is not torch.Tensor or hidden.is_inference() or not hidden.numel():
        return False
    return not (compat.torch.top_saved_tensor_hooks() or compat.torch.is_fake(hidden) or compat.torch.transforms())


def needs_gradient(output: Any) -> bool:
    """Whether a backward may reach a block that returned `output`."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in compat.torch.tree_leaves(output))
