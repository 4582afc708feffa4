"""The state of a block's forward, in which its recomputations run.

A block may change between its forward and its backward: the user sets another adapter, calls `eval()` or removes a
hook, or `torch.func.functional_call` ends and takes its parameters with it. A `ForwardState` records what the forward
saw. If the block differs when it is recomputed, the modes, adapters, hooks, attributes and tensors of the forward are
put back, and taken off again afterwards; see `snapshot`. If the block uses a value that is gone, because a tensor was
overwritten or an adapter was merged, it raises `ChangedBlockError`.

A recomputation runs in the context of the forward: context variables have the values that they had then, even in
autograd's own threads, and torch chooses kernels by the same switches. Other things that a block reads, such as
thread-local values, are not restored.

What a forward changes in the block itself (running statistics, a counter, a recurrent state) is recorded before the
forward. The recomputation starts from the recorded values and leaves the block as it found it, so each forward counts
once. Routers choose the same experts again, see `routers`. torch draws the same numbers again. So do Python's `random`
and `numpy.random` for a block that draws from them in its first forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hf_ckpt import compat
from hf_ckpt.engines.routers import Choices
from hf_ckpt.engines.seen import NO_TENSORS, SeenTensors
from hf_ckpt.engines.snapshot import Snapshot
from hf_ckpt.errors import ChangedBlockError


class ForwardState:
    """The state in which one forward of a block runs.

    Args:
        name: qualified name of the block.
        snapshot: what the block holds; None if the block is unknown.
        inputs: tensors that the block is given, and that a recomputation gets as they are then.
        keeps_draws: whether a recomputation draws torch's random numbers again.
    """

    draws: compat.process_state.RandomState | None = None
    """Random state before the forward; None if the forward drew nothing."""

    def __init__(
        self, name: str, snapshot: Snapshot | None, inputs: SeenTensors = NO_TENSORS, *, keeps_draws: bool
    ) -> None:
        self.name = name
        self.snapshot = snapshot
        self.inputs = inputs
        self.keeps_draws = keeps_draws
        self.context = compat.transformers.copied_context()
        self.switches = compat.process_state.Switches()
        self.choices = Choices() if snapshot is not None and snapshot.settings.chooses else None
        """The experts that the block chooses; None for a block without experts."""

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the block for the first time, and record what a recomputation needs to run it in the same way."""
        snapshot = self.snapshot
        learned = None if snapshot is None else snapshot.settings.learned
        before = compat.process_state.RandomState(
            compat.process_state.devices_of(args),
            of_torch=self.keeps_draws,
            of_host=learned is None or learned.draws_on_host,
        )
        # From the beginning: a block may run a backward inside its forward, which recomputes what it has run so far.
        self.draws = before
        if self.choices is None:  # no context for the many blocks without experts
            output = fn(*args)
        else:
            with self.choices.of_one_run():
                output = fn(*args)
        if not before.may_have_moved():
            self.draws = None
        if snapshot is not None and learned is not None:
            if not learned.has_run:
                learned.draws_on_host = before.of_host_has_moved()
            snapshot.forward_has_ended()
        return output

    def recompute(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the block again, in the context and in the state of its forward.

        Raises `ChangedBlockError` for a value that cannot be restored.
        """
        # A copy, because several threads may do so at once.
        return self.context.copy().run(self.switches.run, self._recompute, fn, args)

    def _recompute(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        snapshot = self.snapshot
        if snapshot is None:
            return self._run_again(fn, args, is_unchanged=self.inputs.are_unchanged())
        hooks = compat.hooks.tensor_hooks(snapshot.seen.tensors)
        try:
            is_unchanged = self.inputs.are_unchanged() and snapshot.is_unchanged()
            return self._run_again(fn, args, is_unchanged=is_unchanged and snapshot.settings.learned.has_stopped)
        finally:
            if compat.hooks.restore_tensor_hooks(snapshot.seen.tensors, hooks):
                # The block may keep the handle in an attribute, which is an object that is not compared.
                snapshot.settings.learned.changes_attributes = True

    def _run_again(self, fn: Callable[..., Any], args: tuple[Any, ...], *, is_unchanged: bool) -> Any:
        if is_unchanged and self.draws is None and self.choices is None:  # most blocks in most steps
            return fn(*args)
        with contextlib.ExitStack() as undo:
            if self.draws is not None:
                undo.enter_context(self.draws.restored())
            if not is_unchanged:
                self._put_back(undo)
            if self.choices is not None:
                undo.enter_context(self.choices.of_one_run(again=True))
            try:
                return fn(*args)
            except compat.checkpoint.StopRecomputation:
                if self.snapshot is not None:
                    self.snapshot.recomputation_has_stopped()
                raise

    def _put_back(self, undo: contextlib.ExitStack) -> None:
        """Restore what the forward found until `undo` ends, and refuse each use of a tensor whose values are gone.

        Raises `ChangedBlockError` if an adapter was merged since.
        """
        inputs = self.inputs.overwritten()
        gone = {id(tensor): f"a tensor of shape {list(tensor.shape)} that it was given" for tensor, _ in inputs}
        if self.snapshot is not None:
            gone |= self.snapshot.put_back(undo)
        if gone:
            undo.enter_context(_Refused(self.name, gone))


class _Refused(TorchFunctionMode):
    """Raises `ChangedBlockError` when an operation uses one of some tensors.

    Only use counts: a block may hold tensors that it does not use, such as those of inactive adapters.

    Args:
        name: name of the block.
        tensors: id of a tensor -> its description.
    """

    def __init__(self, name: str, tensors: dict[int, str]) -> None:
        super().__init__()
        self.name = name
        self.tensors = tensors
        self.refused: ChangedBlockError | None = None
        """The error that was raised."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The getter of an attribute. Asking for a type or a shape is no use of values; `.data` and `.T` are.
        if getattr(function, "__name__", "") == "__get__":
            value = function(*args)
            if not isinstance(value, torch.Tensor):
                return value
        for value in compat.torch.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and id(value) in self.tensors:
                self.refused = ChangedBlockError(self.name, f"{self.tensors[id(value)]} was overwritten")
                raise self.refused
        return function(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if self.refused is not None and compat.torch.is_of_script(error):
            raise self.refused from error
