"""`full`: keep the block's inputs and recompute the block in backward, by `torch.utils.checkpoint`, non-reentrant."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hf_ckpt import compat
from hf_ckpt.engines.block_settings import Settings
from hf_ckpt.engines.forward_state import ForwardState
from hf_ckpt.engines.region import Observer, Region
from hf_ckpt.errors import GraphCaptureError, InPlaceError


class FullRegion(Region):
    """The checkpointing function of a block that is recomputed as a whole.

    If the block changes its hidden states in place, which its first forward shows, it is recomputed from a copy.
    """

    may_copy = True
    """Whether the block may be recomputed from a copy of its hidden states, where it changes them in place."""
    keeps_choices = True

    def __init__(self, block: str, *, preserve_rng_state: bool = True, determinism_check: str = "default") -> None:
        self.block = block
        self.preserve_rng_state = preserve_rng_state
        self.determinism_check = determinism_check
        self.forwards = 0
        self.recomputed = 0
        self.in_graph = False
        self.observer: Observer | None = None
        self.changes_input: bool | None = None
        """Whether the block changes its hidden states in place; None until a forward has shown it."""
        self.whole = True
        """Whether all parameters lie whole on their device throughout a step."""
        self.settings: Settings | None = None
        """How the block was set in its last forward; None before the first."""

    def inner(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs in the place of the block's own forward `fn`, for the first time and again."""
        return fn

    def told_of_parameters(self, stay: bool, owner: str) -> None:
        """Take note of whether parameters lie whole on their device throughout a step (`stay`), to be compared."""
        self.whole = stay

    def state_for(self, fn: Callable[..., Any]) -> ForwardState:
        """Note the state of the block whose forward `fn` is about to run; of an unknown one, only what it draws.

        A replica of `nn.DataParallel` lives for one forward, so nobody can change it.
        """
        block, settings = compat.module_of(fn), self.settings
        if block is None or compat.is_replica(block):
            block = settings = None
        elif settings is None or not settings.hold(block):
            settings = self.settings = Settings(block)
        return ForwardState(self.block, block, settings, whole=self.whole, keeps_draws=self.preserve_rng_state)

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward, and save its inputs only.

        Raises `GraphCaptureError` if random state is preserved while a CUDA graph is captured, and `InPlaceError` if
        the block has changed an input from which it would be recomputed.
        """
        if not torch.is_grad_enabled():
            return fn(*args)
        fn, args = compat.without_caches(fn, args)
        if compat.is_compiling():
            self.in_graph = True  # a count would be read as well, and so compiled anew for every value
            return self._checkpoint(fn, *args)
        self.refuse_capturing()
        self.forwards += 1
        counted = _Counted(fn, self)
        if self.changes_input is False or not self.may_copy or not _is_plain(args):
            return self._with_inputs(counted, args)
        given = _Given(counted, args[0])
        if self.changes_input:
            return self._with_inputs(given, (given.copied(), *args[1:]))
        # The first forward: a copy is held until it is known whether the block changes its hidden states.
        copied, version = given.copied(), args[0]._version
        # An empty tensor stands in for the hidden states: torch preserves the random state of its device.
        output = self._with_inputs(given, (args[0].new_empty(0), *args[1:]))
        self.changes_input = args[0]._version != version
        given.keep(copied if self.changes_input else args[0])
        return output

    def _with_inputs(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        versions = versions_of(args)
        output = self._checkpoint(fn, *args)
        self.refuse_changes(args, versions, output)
        return output

    def refuse_changes(self, args: tuple[Any, ...], versions: list[int | None], output: Any) -> None:
        """Raise `InPlaceError` if an input that the block is to be recomputed from has changed since `versions`."""
        for arg, version in zip(args, versions, strict=True):
            if version is not None and arg._version != version and needs_gradient(output):
                raise InPlaceError(self.block, tuple(arg.shape), version, arg._version, changed_by(arg))

    def refuse_capturing(self) -> None:
        """Raise `GraphCaptureError` if random state is preserved while a CUDA graph is captured."""
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
            use_reentrant=False,  # torch is reentrant by default
            # `ForwardState` does so in less time.
            preserve_rng_state=self.preserve_rng_state and compat.is_compiling(),
            determinism_check=self.determinism_check,
            **options,
        )

    def __getstate__(self) -> dict[str, Any]:
        # Measurements belong to this process, and settings refer to the modules of this block.
        return {**vars(self), "observer": None, "settings": None}


class _Counted:
    """A block's forward, whose further calls count as recomputations and run in the state of the first one."""

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
        observer = self.region.observer
        if observer is None and self.state.holds():
            return self.fn(*args)
        with observer() if observer else contextlib.nullcontext(), self.state.again():
            return self.fn(*args)


class _Given:
    """A block's forward that changes, or may change, its hidden states in place and is recomputed from a copy."""

    def __init__(self, fn: _Counted, hidden: torch.Tensor) -> None:
        self.fn = fn
        self.requires_grad = hidden.requires_grad
        self.hidden: torch.Tensor | None = hidden
        """The hidden states that the forward takes; None once it has run."""
        self.kept: torch.Tensor | None = None
        """The hidden states to recompute from, if they are not the first argument of the call."""
        self.version = 0
        """How often `kept` had been changed in place when it was stored."""

    def copied(self) -> torch.Tensor:
        """Return a copy of the hidden states as they are before the forward."""
        assert self.hidden is not None
        return self.hidden.detach().clone()

    def keep(self, hidden: torch.Tensor) -> None:
        """Have the block recomputed from these hidden states."""
        self.kept, self.version = hidden.detach(), hidden._version

    def __call__(self, given: torch.Tensor, *args: Any) -> Any:
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            if self.kept is not None:
                given = self.kept
                if given._version != self.version:
                    raise InPlaceError(self.fn.region.block, tuple(given.shape), self.version, given._version)
            given = given.detach().requires_grad_(self.requires_grad)
            hidden = given.clone() if self.fn.region.changes_input else given
        return self.fn(hidden, *args)


def _is_plain(args: tuple[Any, ...]) -> bool:
    """Whether the first argument is an ordinary tensor, and no saved-tensor hooks decide how it is kept."""
    hidden = args[0] if args else None
    if type(hidden) is not torch.Tensor or hidden.is_inference() or not hidden.numel():
        return False
    return compat.top_saved_tensor_hooks() is None and not compat.is_fake(hidden)


def needs_gradient(output: Any) -> bool:
    """Whether a backward may reach a block that returned `output`."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in compat.tree_leaves(output))


def versions_of(values: tuple[Any, ...]) -> list[int | None]:
    """Return how often each tensor was changed in place; None for other values and for inference tensors."""
    return [
        value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None for value in values
    ]


def changed_by(tensor: torch.Tensor) -> str:
    """Name the operation that last changed a tensor in place, as far as its graph tells."""
    base = tensor if tensor._base is None else tensor._base
    if base.grad_fn is not None and base.grad_fn.name().endswith("CopySlices"):
        return "an operation on a view"
    return "an operation without a graph" if tensor.grad_fn is None else tensor.grad_fn.name()
