"""`full`: save only the block's inputs and recompute the block in backward. It uses `torch.utils.checkpoint`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hf_ckpt import compat
from hf_ckpt.engines.arguments import as_given
from hf_ckpt.engines.region import Region
from hf_ckpt.engines.state import ForwardState, Settings
from hf_ckpt.errors import GraphCaptureError, InPlaceError, RecomputeError


class FullRegion(Region):
    """The checkpointing function of a block that is recomputed as a whole.

    The first forward shows whether the block changes its hidden states in place. If so, it is recomputed from a copy.
    """

    may_copy = True
    """Whether the block may be recomputed from a copy of its hidden states if it changes them in place."""
    keeps_choices = True

    def __init__(self, block: str, *, preserve_rng_state: bool = True, determinism_check: str = "default") -> None:
        self.block = block
        self.preserve_rng_state = preserve_rng_state
        self.determinism_check = determinism_check
        self.forwards = 0
        self.recomputed = 0
        self.in_graph = False
        self.changes_input: bool | None = None
        """Whether the block changes its hidden states in place; None before the first forward."""
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
        self.refuse_capturing()
        self.forwards += 1
        fn, args = as_given(fn, args)
        counted = Counted(fn, self)
        if self.changes_input is False or not self.may_copy or not is_plain(args):
            return self._with_inputs(counted, args)
        # Until it is known whether the block changes its hidden states in place, it is recomputed from a copy of them.
        hidden, version = args[0], args[0]._version
        copied = hidden.detach().clone()
        # An expansion or a slice: kernels may take another way for a copy. Transforms of torch.func know no leaves.
        if copied.stride() != hidden.stride() or compat.torch.transforms():
            return self._with_inputs(counted, args)
        copied.requires_grad_(hidden.requires_grad)
        from_copy = _FromCopy(counted, hidden)
        output = self._with_inputs(from_copy, (copied, *args[1:]))
        if self.changes_input is None:
            self.changes_input = hidden._version != version
            if not self.changes_input:
                from_copy.use(hidden, copied)
        return output

    def _with_inputs(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        versions = versions_of(args)
        output = self._checkpoint(fn, *args)
        self.refuse_changes(args, versions, output)
        return output

    def refuse_changes(self, args: tuple[Any, ...], versions: list[int | None], output: Any) -> None:
        """Raise `InPlaceError` if an input that the block will be recomputed from has changed since `versions`."""
        for arg, version in zip(args, versions, strict=True):
            if version is not None and arg._version != version and needs_gradient(output):
                raise InPlaceError(self.block, arg, version, changed_by(arg))

    def refuse_capturing(self) -> None:
        """Raise `GraphCaptureError` if random state is preserved while a CUDA graph is captured."""
        if self.preserve_rng_state and compat.devices.is_capturing():
            raise GraphCaptureError(
                self.block, "it preserves random state, which cannot be read while a CUDA graph is captured."
            )

    def _checkpoint(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self._checkpointed(fn, *args)

    def _checkpointed(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return checkpoint(
            fn,
            *args,
            use_reentrant=False,  # torch is reentrant by default
            # `ForwardState` does it faster.
            preserve_rng_state=self.preserve_rng_state and compat.torch.is_compiling(),
            determinism_check=self.determinism_check,
            **options,
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
            compat.torch.rename_checkpoint_errors(functools.partial(named, self.region.block))
            return self.state.run(self.fn, args)
        self.region.recomputed += 1
        return self.state.recompute(self.fn, args)


def named(block: str, error: RuntimeError) -> RecomputeError:
    """Return the error to raise in place of one that torch's checkpoint raises in the backward of a block."""
    if not compat.torch.is_read_twice(error):
        text = str(error).partition("\nTip:")[0].removeprefix("torch.utils.checkpoint: ")
        return RecomputeError(block, f"its recomputation does not repeat its forward. {' '.join(text.split())}")
    return RecomputeError(
        block,
        "the backward of a custom Function reads a tensor of `ctx.saved_tensors` twice, and a recomputed tensor is "
        "freed after it was read. Read all of them once, into variables.",
    )


class _FromCopy:
    """The forward of a block that may change its hidden states in place. Recomputations change a copy of a copy."""

    def __init__(self, fn: Counted, hidden: torch.Tensor) -> None:
        self.fn = fn
        self.hidden: torch.Tensor | None = hidden
        """The hidden states for the forward; None once it has run."""
        self.given: torch.Tensor | None = None
        """The hidden states, if they are what the block is recomputed from."""
        self.version = 0
        """Their in-place version after the forward."""

    def use(self, hidden: torch.Tensor, copied: torch.Tensor) -> None:
        """Recompute the block from its hidden states, which it does not change, and free the copy's memory."""
        self.given, self.version = hidden.detach(), hidden._version
        copied.data = self.given

    def __call__(self, copied: torch.Tensor, *args: Any) -> Any:
        hidden, self.hidden = self.hidden, None
        if hidden is None and self.given is not None:
            if self.given._version != self.version:
                raise InPlaceError(self.fn.region.block, self.given, self.version)
            return self.fn(copied, *args)
        return self.fn(copied.clone() if hidden is None else hidden, *args)


def is_plain(args: tuple[Any, ...]) -> bool:
    """Whether the first argument is an ordinary tensor, outside torch.func, that no hooks of the user would store."""
    hidden = args[0] if args else None
    if type(hidden) is not torch.Tensor or hidden.is_inference() or not hidden.numel():
        return False
    return not (compat.torch.top_saved_tensor_hooks() or compat.torch.is_fake(hidden) or compat.torch.transforms())


def needs_gradient(output: Any) -> bool:
    """Whether a backward may reach a block that returned `output`."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in compat.torch.tree_leaves(output))


def versions_of(values: tuple[Any, ...]) -> list[int | None]:
    """Return the in-place version of each tensor; None for other values and for inference tensors."""
    return [
        value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None for value in values
    ]


def changed_by(tensor: torch.Tensor) -> str:
    """Name the operation that last changed a tensor in place, if its graph shows it."""
    base = tensor if tensor._base is None else tensor._base
    if base.grad_fn is not None and base.grad_fn.name().endswith("CopySlices"):
        return "an operation on a view"
    return "an operation without a graph" if tensor.grad_fn is None else tensor.grad_fn.name()
