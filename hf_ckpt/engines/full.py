"""`full`: save only the block's inputs and recompute the block in backward. It uses `torch.utils.checkpoint`.

`FullRegion` is also the base of the other engines that run a block again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hf_ckpt import compat
from hf_ckpt.engines import segments
from hf_ckpt.engines.copies import as_given, cut
from hf_ckpt.engines.region import Region, Request
from hf_ckpt.engines.runs import FirstThenAgain, Runs
from hf_ckpt.engines.seen import NO_TENSORS, SeenTensors
from hf_ckpt.engines.settings import Above, Settings
from hf_ckpt.engines.snapshot import Snapshot
from hf_ckpt.engines.state import ForwardState
from hf_ckpt.errors import ChangedBlockError, GraphCaptureError, HfCkptError, InPlaceError, TransformError
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.live import stop_counts

log = logging.getLogger(__name__)

CALLS_A_TRANSFORM = "it calls `torch.func.grad`, which allows no hooks."
"""The problem of a block that no engine can checkpoint."""


class Recomputation(NamedTuple):
    """One recomputation of a block, for whoever runs it in another way."""

    again: Callable[[Callable[..., Any]], Any]
    """Runs a function in the state of the forward, with the arguments of the forward."""
    plain: Callable[..., Any]
    """The block's own forward."""
    inner: Callable[..., Any]
    """The function that runs in its place; see `Recomputing.inner`."""
    inputs: list[torch.Tensor]
    """The tensors that the block is given, first its hidden states; empty if it is not known which these are."""
    dropped_bytes: Callable[[], int]
    """Returns the bytes of what the last run of `inner` has dropped of all that autograd would save."""


class Recomputing(Protocol):
    """What happens in place of a recomputation. It is `trials.Trials`, which this module cannot import: trials use the
    engines that derive from `FullRegion`."""

    @property
    def last(self) -> object: ...

    @property
    def mark(self) -> Callable[..., None]: ...

    def inner(self, runs: Runs) -> Runs: ...

    def recompute(self, recomputation: Recomputation) -> Any: ...


class FullRegion(Region):
    """The checkpointing function of a block that is recomputed as a whole."""

    keeps_choices = True
    parameters_stay = True
    recomputes_input = False
    """Whether backward makes its hidden states again, if they are what the block before has returned."""
    passes_on = False
    """Whether backward makes those of the next block again."""
    runs_outside = True
    """Whether the block can run while the backward of another one does: its parameters stay, or can be gathered. The
    first forward of the stack sets it."""

    def __init__(self, block: str, *, preserve_rng_state: bool = True, determinism_check: str = "default") -> None:
        self.block = block
        self.preserve_rng_state = preserve_rng_state
        self.determinism_check = determinism_check
        self.above: Above = ()
        """Proxies of the modules above the block. The first forward of the stack sets it."""
        self.settings: Settings | None = None
        """The settings of the block in its last forward; None before the first."""
        self.trials: Recomputing | None = None
        """What the recomputations of the next forwards try, in place of this engine's `inner`; None if they only
        recompute."""
        self.watching: segments.Watching | None = None
        """What a measured step is told of segments; None in other steps."""

    @property
    def dropped_bytes(self) -> int:
        """Bytes of what the last recomputation has dropped of all that autograd would save."""
        return 0

    def inner(self, runs: Runs) -> Runs:
        """Return what to run in place of the block's own forward, in the forward and when recomputing."""
        return runs

    def state_for(self, fn: Callable[..., Any], inputs: SeenTensors = NO_TENSORS) -> ForwardState:
        """Record the state of the block whose forward `fn` is about to run; only random state if the block is unknown.

        `inputs` are the tensors that it is given by keyword or inside of containers.

        A replica of `nn.DataParallel` exists for one forward only, so nobody can change it.
        """
        block = compat.transformers.module_of(fn)
        snapshot = None
        if block is not None and not compat.torch.is_replica(block):
            settings = self.settings
            if settings is None or not settings.still_apply(block):
                settings = self.settings = Settings(block, self.above)
            snapshot = Snapshot(self.block, block, settings, parameters_stay=self.parameters_stay)
        return ForwardState(self.block, snapshot, inputs, keeps_draws=self.preserve_rng_state)

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward, and save its inputs only.

        Raises `GraphCaptureError` if random state is preserved while a CUDA graph is captured, and `InPlaceError` if
        the block changes a tensor that it would be recomputed from.
        """
        if not torch.is_grad_enabled():  # nothing is saved, and there is no backward
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
        # A block may change a list that it is given. Its recomputation must find the list as it was.
        runs, args, tensors = as_given(self.block, fn, args)
        arguments = SeenTensors([*[arg for arg in args if isinstance(arg, torch.Tensor)], *tensors])
        try:
            output = self._run_checkpointed(
                runs, self.state_for(fn, SeenTensors(tensors) if tensors else NO_TENSORS), args
            )
        except RuntimeError as error:
            if compat.autograd.refuses_hooks(error):
                raise TransformError(self.block, CALLS_A_TRANSFORM) from error
            raise
        except Exception:  # the end of the model's forward, which is told of it, ends the count
            raise
        except BaseException:  # an interrupt ends the step before anything is told
            stop_counts()
            raise
        if not arguments.are_unchanged() and needs_gradient(output):
            # torch would find a change of positional ones only in backward, where the operation is not known any more,
            # and of others never. None may be overwritten: the other change is that one now requires gradients.
            for tensor, version in arguments.overwritten():
                operation = None if tensor.grad_fn is None else tensor.grad_fn.name()
                raise InPlaceError(self.block, tensor, version, operation)
        return output

    def _run_checkpointed(self, runs: Runs, state: ForwardState, args: tuple[Any, ...]) -> Any:
        """Run the block's own forward, and checkpoint it."""
        trials = self.trials if self.trials is not None and self.trials.last is not None else None
        # In the forward, too: `full+selective` puts hooks there, by which backward gets what a recomputation packs.
        inner = self.inner(runs) if trials is None else trials.inner(runs)
        counted = Counted(self, state, inner.again, runs.again)
        function = FirstThenAgain(functools.partial(counted.run, inner.first), counted.recompute)
        run = self.checkpointed
        if self.recomputes_input or self.passes_on:
            run = functools.partial(self._run_in_segment, counted)
        if trials is None:
            return run(function, *args)
        # torch ends a recomputation by an exception as soon as it has the last tensor that backward needs. A trial has
        # to see its output, because it marks the memory after that is freed.
        with set_checkpoint_early_stop(False):
            return run(function, *args)

    def run_before(self, args: tuple[Any, ...]) -> segments.Run | None:
        """Return the run of the block before that makes the hidden states `args[0]` again; None if they are held.

        Warn once of a block that holds them although its action makes them again.
        """
        hidden = args[0] if args else None
        self.holds_input = False
        if not self.recomputes_input or not isinstance(hidden, torch.Tensor) or not hidden.requires_grad:
            return None  # blocks before one whose input has no graph have no backward, and are not run again either
        why = self._why_not_in_segment()
        result = segments.result_of(hidden)
        if why is None and result is None:
            why = "a block is given other hidden states than the block before has returned"
        if why is not None:
            self.holds_input = True
            warn_once(log, "hf_ckpt: blocks hold their hidden states, despite `segments`: %s.", why)
        return None if why is not None or result is None else result.run

    def _why_not_in_segment(self) -> str | None:
        """Return why no hidden states are made again; None if they are."""
        if not self.runs_outside:
            return "their parameters are freed during a step (FSDP1, ZeRO-3, a device map)"
        if segments.are_others_hooks():
            return "there are saved-tensor hooks around the model (another checkpoint, `save_on_cpu`)"
        return None

    def _run_in_segment(self, counted: Counted, function: FirstThenAgain, *args: Any) -> Any:
        """As `checkpointed`, with hidden states that are made again, or from which the next block's are."""
        run = self.run_before(args)
        with contextlib.nullcontext() if run is None else segments.instead_of_results(run):
            output = self.checkpointed(function, *args)
        if self.passes_on and args and isinstance(args[0], torch.Tensor) and self._why_not_in_segment() is None:
            others = counted.state.inputs.tensors
            segments.pass_on(output, counted.again, args, run, others, self.block, self.watching)
        return output

    def checkpointed(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Return the outputs of `fn(*args)`, which backward runs again."""
        return checkpoint(
            fn,
            *args,
            use_reentrant=False,  # torch is reentrant by default
            # `ForwardState` does it instead, and restores nothing where the forward drew nothing.
            preserve_rng_state=self.preserve_rng_state and not isinstance(fn, FirstThenAgain),
            determinism_check=self.determinism_check,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "above": (),
            "settings": None,
            "trials": None,
            "watching": None,
        }  # they refer to this model


class Counted:
    """A block's forward, and its recomputations, which it counts and runs in the state of the forward."""

    __slots__ = ("inner", "plain", "region", "state", "trials")

    def __init__(
        self, region: FullRegion, state: ForwardState, inner: Callable[..., Any], plain: Callable[..., Any]
    ) -> None:
        self.region = region
        self.state = state
        self.inner = inner
        """What recomputations run; see `FullRegion.inner`."""
        self.plain = plain
        """The block's own forward in them."""
        self.trials = region.trials

    def run(self, first: Callable[..., Any], *args: Any) -> Any:
        """Run the forward, `first(*args)`."""
        # torch raises some errors outside of this function, before and after it recomputes.
        name_block = functools.partial(_name_block, self.region.block)
        return compat.checkpoint.run_watched(name_block, self.state.run, first, args)

    def recompute(self, *args: Any) -> Any:
        """Run the forward again, in the state of the first run."""
        self.region.recomputed += 1
        try:
            if self.trials is not None:
                return self.trials.recompute(self._recomputation(args))
            return compat.checkpoint.run_again(self.state.recompute, self.inner, _cut(args))
        except compat.checkpoint.StopRecomputation:  # no error: torch ends a recomputation by it
            raise
        except Exception as error:
            _name_block(self.region.block, error)
            raise

    def again(self, *args: Any) -> Any:
        """Return what the block returns when it runs once more, for the hidden states of the next one."""
        self.region.recomputed += 1
        try:
            snapshot = self.state.snapshot
            with contextlib.ExitStack() as context:
                if not self.region.parameters_stay and snapshot is not None:
                    context.enter_context(compat.distributed.gathered(snapshot.block))
                return self.state.recompute(self.inner, _cut(args))
        except Exception as error:
            _name_block(self.region.block, error)
            raise

    def _recomputation(self, args: tuple[Any, ...]) -> Recomputation:
        inputs = [value for value in (*args, *self.state.inputs.tensors) if isinstance(value, torch.Tensor)]
        # Without positional ones, it is not known which are hidden states; wrapped tensors have no storage.
        if not args or compat.torch.is_any_wrapper(map(type, inputs)):
            inputs = []

        def again(function: Callable[..., Any]) -> Any:
            return self.state.recompute(function, _cut(args))

        return Recomputation(again, self.plain, self.inner, inputs, lambda: self.region.dropped_bytes)


def _cut(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return positional arguments for one recomputation, cut from the graph of the forward."""
    return tuple(map(functools.partial(cut, cuts={}), args))


def _name_block(block: str, error: Exception) -> None:
    """Add the block to an error of its recomputation: torch raises `CheckpointError`, and the block may raise any.

    Raises `ChangedBlockError` if an input of the block was changed in place.
    """
    if compat.autograd.is_in_place_error(error):
        raise ChangedBlockError(block, "an input was changed in place") from error
    # Errors of hf_ckpt name the block themselves. Out of memory is no fault of the block, and the guard retries.
    if not isinstance(error, HfCkptError) and not compat.devices.is_out_of_memory(error):
        compat.torch.add_note(error, _NOTE.format(block=block))


_NOTE = (
    "hf_ckpt: block {block!r} raised this while backward recomputed it. Usual causes: the block reads something that "
    "has changed since its forward, or it does not run the same operations twice. "
    '"policy": "selective" runs no block twice; a rule such as {{"layers": ..., "policy": "none"}} leaves one out.'
)


def needs_gradient(output: Any) -> bool:
    """Whether a backward may reach a block that returned `output`."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in compat.torch.tree_leaves(output))


def make(request: Request) -> Region:
    """The engine of `full`."""
    return FullRegion(request.block, **request.options)
