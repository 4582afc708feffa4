"""`full`: save only the block's inputs and recompute the block in backward. It uses `torch.utils.checkpoint`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hf_ckpt import compat
from hf_ckpt.engines.arguments import as_given
from hf_ckpt.engines.region import Region
from hf_ckpt.engines.seen import NO_TENSORS, SeenTensors
from hf_ckpt.engines.settings import Settings
from hf_ckpt.engines.state import ForwardState
from hf_ckpt.errors import ChangedBlockError, GraphCaptureError, HfCkptError, InPlaceError, TransformError

CALLS_A_TRANSFORM = "it calls `torch.func.grad`, which allows no hooks."
"""The problem of a block that no engine can checkpoint."""


class Recomputing(Protocol):
    """What happens in place of a recomputation: see `trials.Trials`."""

    @property
    def stops_early(self) -> bool: ...

    def inner(self, fn: Callable[..., Any]) -> Callable[..., Any]: ...

    def recompute(
        self,
        again: Callable[[Callable[..., Any]], Any],
        plain: Callable[..., Any],
        inner: Callable[..., Any],
        given: Sequence[torch.Tensor],
    ) -> Any: ...


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
        self.trials: Recomputing | None = None
        """What the recomputations of the next forwards try; None if they only recompute."""

    def inner(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to run in place of the block's own forward `fn`, in the forward and when recomputing."""
        return fn

    def told_of_parameters(self, stay: bool, owner: str) -> None:
        """Note whether parameters stay on their device, unsharded, throughout a step (`stay`), and can be compared."""
        self.whole = stay

    def state_for(self, fn: Callable[..., Any], inputs: SeenTensors = NO_TENSORS) -> ForwardState:
        """Record the state of the block whose forward `fn` is about to run; only random state if the block is unknown.

        `inputs` are the tensors that it is given by keyword or inside of containers.

        A replica of `nn.DataParallel` exists for one forward only, so nobody can change it.
        """
        block, settings = compat.transformers.module_of(fn), self.settings
        if block is None or compat.torch.is_replica(block):
            block = settings = None
        elif settings is None or not settings.hold(block):
            settings = self.settings = Settings(block)
        return ForwardState(
            self.block, block, settings, whole=self.whole, keeps_draws=self.preserve_rng_state, inputs=inputs
        )

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward, and save its inputs only.

        Raises `GraphCaptureError` if random state is preserved while a CUDA graph is captured, and `InPlaceError` if
        the block changes a tensor that it would be recomputed from.
        """
        if not torch.is_grad_enabled():
            return fn(*args)
        if compat.torch.is_compiling():
            self.in_graph = True  # counting here would recompile for every value of the count
            return self.checkpointed(fn, *compat.transformers.without_caches(args))
        fn, args = compat.transformers.block_call(fn, args)
        if self.preserve_rng_state and compat.devices.is_capturing():
            raise GraphCaptureError(
                self.block, "it preserves random state, which cannot be read while a CUDA graph is captured."
            )
        self.forwards += 1
        fn, args, tensors = as_given(self.block, fn, args)
        positional = SeenTensors([arg for arg in args if isinstance(arg, torch.Tensor)])
        inputs = SeenTensors(tensors)
        try:
            if self.trials is None or self.trials.stops_early:
                output = self.checkpointed(Counted(fn, self, inputs), *args)
            else:
                with set_checkpoint_early_stop(False):
                    output = self.checkpointed(Counted(fn, self, inputs), *args)
        except RuntimeError as error:
            if compat.torch.refuses_hooks(error):
                raise TransformError(self.block, CALLS_A_TRANSFORM) from error
            raise
        if not (positional.are_unchanged() and inputs.are_unchanged()) and needs_gradient(output):
            for tensor, version in (*positional.overwritten(), *inputs.overwritten()):
                operation = None if tensor.grad_fn is None else tensor.grad_fn.name()
                raise InPlaceError(self.block, tensor, version, operation)
        return output

    def checkpointed(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Return the outputs of `fn(*args)`, which backward runs again."""
        return checkpoint(
            fn,
            *args,
            use_reentrant=False,  # torch is reentrant by default
            # `ForwardState` does it faster.
            preserve_rng_state=self.preserve_rng_state and not isinstance(fn, Counted),
            determinism_check=self.determinism_check,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "settings": None, "trials": None}  # they refer to the modules of this block


class Counted:
    """A block's forward. All calls after the first count as recomputations and run in the state of the first."""

    __slots__ = ("fn", "plain", "ran", "region", "state", "trials")

    def __init__(self, fn: Callable[..., Any], region: FullRegion, inputs: SeenTensors) -> None:
        self.plain = fn
        self.trials = region.trials
        self.fn = region.inner(fn) if self.trials is None else self.trials.inner(fn)
        self.region = region
        self.ran = False
        self.state = region.state_for(fn, inputs)

    def __call__(self, *args: Any) -> Any:
        if not self.ran:
            self.ran = True
            name_block = functools.partial(_name_block, self.region.block)
            return compat.torch.run_watched(name_block, self.state.run, self.fn, args)
        self.region.recomputed += 1
        try:
            if self.trials is not None:
                values = (*args, *self.state.inputs.tensors)
                given = [value for value in values if isinstance(value, torch.Tensor)]
                # Without positional ones, it is not known which are hidden states; wrapped tensors have no storage.
                if not args or compat.torch.is_any_wrapper(map(type, given)):
                    given = []
                return self.trials.recompute(lambda runs: self.state.recompute(runs, args), self.plain, self.fn, given)
            return compat.torch.run_again(self.state.recompute, self.fn, args)
        except compat.torch.StopRecomputation:
            raise
        except Exception as error:
            _name_block(self.region.block, error)
            raise


def _name_block(block: str, error: Exception) -> None:
    """Add the block to an error of its recomputation: torch raises `CheckpointError`, and the block may raise any.

    Raises `ChangedBlockError` if an input of the block was changed in place.
    """
    if compat.torch.is_in_place_error(error):
        raise ChangedBlockError(block, "an input was changed in place") from error
    # Errors of hf_ckpt name the block themselves.
    if not isinstance(error, HfCkptError) and not compat.devices.is_out_of_memory(error):
        compat.torch.add_note(error, _NOTE.format(block=block))


_NOTE = (
    "hf_ckpt: block {block!r} raised this while backward recomputed it (`full` or `offload`). Usual causes: the block "
    "reads something that has changed since its forward, or it does not run the same operations twice. "
    '"policy": "selective" runs no block twice; a rule such as {{"layers": ..., "policy": "none"}} leaves one out.'
)


def is_plain(args: tuple[Any, ...]) -> bool:
    """Whether the first argument is an ordinary tensor, outside torch.func, that no hooks of the user would store."""
    hidden = args[0] if args else None
    if type(hidden) is not torch.Tensor or hidden.is_inference() or not hidden.numel():
        return False
    return not (compat.torch.top_saved_tensor_hooks() or compat.torch.is_fake(hidden) or compat.torch.transforms())


def needs_gradient(output: Any) -> bool:
    """Whether a backward may reach a block that returned `output`."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in compat.torch.tree_leaves(output))
