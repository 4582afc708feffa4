"""What other actions would keep and need, read while a `full` block is recomputed.

The recomputation in backward holds all that the block saves, so there is room for it in every budget in which `full`
fits. A trial runs the block under another action there, and marks the moments between which memory is read, see
`measure.levels.Boundary`: `CAST`, `TRIAL`, `TRIED`, and `SHOWN` or `KEPT`; where layers of the block hold tensors by
themselves, `HELD` before these and `FREED` after them.

The casts of weights are read apart, by a run before the trial, because they outlive the block's forward: other blocks
may share the weights. From the levels at these marks, `measure.levels` computes `costs.steps.Needs`: what is kept is
`TRIED` less `CAST`, and what autocast's casts add for the backward is `SHOWN` less `TRIAL`, less what is kept.

Blocks whose feed-forwards run in tiles may be recomputed under another action only where it has room. The first step
finds out, by the marks `TILE` and `RECOMPUTED`.

A trial that ends with `SHOWN` is freed, and the block runs once more. After `KEPT`, backward goes on with what the
trial has kept, and so shows what the backward needs under the action.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hf_ckpt import compat
from hf_ckpt.costs.steps import Freed
from hf_ckpt.engines.full import Recomputation
from hf_ckpt.engines.rebuild.full_selective import rebuilding
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.engines.running import running
from hf_ckpt.engines.runs import Runs
from hf_ckpt.measure.levels import Boundary
from hf_ckpt.spec.actions import Action


class Mark(Protocol):
    """Called with a boundary and the name of a block; for a trial, with its action, and at its end with what the block
    was given and the action does not keep."""

    def __call__(
        self, what: Boundary, block: str = ..., has_graph: bool = ..., action: Action | None = ..., freed: Freed = ...
    ) -> None: ...


def unmarked(*args: Any, **kwargs: Any) -> None:
    """A `Mark` that does nothing."""


class Attempts(NamedTuple):
    """What a measured step tries on one block."""

    shown: tuple[Action, ...] = ()
    """Actions whose forward runs while the block is recomputed. Their trials end with the mark `SHOWN`."""
    last: Action | None = None
    """The action of the recomputation itself, whose backward is measured, too; None for that of `full`."""


class Trial(NamedTuple):
    """An action to try, and the function that a block has under it."""

    action: Action
    region: RebuildRegion | None
    """None for `keep`."""

    def inner(self, runs: Runs) -> Runs:
        """Return what to run in place of the block's own forward, inside of torch's checkpoint."""
        return runs if self.region is None else rebuilding(runs, self.region, as_selective=True)

    def alone(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that runs the block under the action, outside of torch's checkpoint."""
        region = self.region
        if region is None:
            return plain
        return lambda *args: region.run(plain, args)


@dataclasses.dataclass(frozen=True)
class Trials:
    """The trials of one block in the recomputations of one step; see `FullRegion.trials`."""

    block: str
    """Name of the block."""
    mark: Mark
    shown: tuple[Trial, ...]
    """Trials of the forward only. They run before the recomputation; without any trial, it is only marked."""
    last: Trial | None = None
    """The trial that the recomputation itself is; None if the block is recomputed as under `full`, and may stop when
    all tensors are there that backward needs."""

    def inner(self, runs: Runs) -> Runs:
        """Return what to run in place of the block's own forward, in the forward and when recomputing.

        There must be a `last` trial.
        """
        assert self.last is not None
        return self.last.inner(runs)

    def recompute(self, recomputation: Recomputation) -> Any:
        """Run the trials, and then the recomputation."""
        for trial in self.shown:
            with compat.autograd.without_saved_tensor_hooks():  # torch's checkpoint must not see what this saves
                self._run(trial, Boundary.SHOWN, recomputation, trial.alone(recomputation.plain))
        if self.last is None:
            return self._marked(recomputation)
        self._run(self.last, Boundary.KEPT, recomputation, recomputation.inner)
        return None  # torch's checkpoint does not use the output

    def _marked(self, recomputation: Recomputation) -> Any:
        """Recompute the block as its action does, and mark the end."""
        try:
            return recomputation.again(recomputation.inner)
        finally:  # torch ends it by an exception as soon as it has all that backward needs
            if not self.shown:
                self.mark(Boundary.RECOMPUTED, self.block, freed=Freed(dropped=recomputation.dropped_bytes()))

    def _run(
        self, trial: Trial, ends_with: Boundary, recomputation: Recomputation, function: Callable[..., Any]
    ) -> None:
        """Run `function`, the block under the action of a trial, between the marks of the trial."""
        if compat.devices.autocast_is_on() and torch.is_autocast_cache_enabled():
            with compat.autograd.without_saved_tensor_hooks():
                recomputation.again(recomputation.plain)
        has_held = self._mark_held(recomputation)
        self.mark(Boundary.CAST, self.block, True, trial.action)
        torch.clear_autocast_cache()
        self.mark(Boundary.TRIAL, self.block, True, trial.action)
        inputs = _Inputs(recomputation.inputs)
        output = recomputation.again(function)
        # The graph holds what the action keeps. The hidden states that it returns belong to the next block.
        returned = [leaf for leaf in compat.torch.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        graph = [leaf.grad_fn for leaf in returned]
        inputs.pass_on(returned[1:])
        del output, returned
        self.mark(Boundary.TRIED, self.block, True, trial.action)
        torch.clear_autocast_cache()
        self.mark(ends_with, self.block, True, trial.action, inputs.freed(trial))
        del graph
        if has_held:
            self.mark(Boundary.FREED, self.block)

    def _mark_held(self, recomputation: Recomputation) -> bool:
        """Mark what layers of the block hold under any action; returns whether any layer does."""
        block = compat.transformers.module_of(recomputation.plain)
        if block is None or not compat.peft.has_inputs_held(block):
            return False
        output = compat.autograd.run_without_saving(recomputation.again, recomputation.plain)
        graph = [leaf.grad_fn for leaf in compat.torch.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        del output
        self.mark(Boundary.HELD, self.block)
        del graph
        return True


class _Inputs:
    """The tensors that a block is given in a trial, and which of them the action keeps.

    torch's checkpoint holds them in a recomputation, so that no count of memory shows it. So it is told by how many
    objects refer to each of them before and after.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        self._users = list(map(compat.autograd.users_of, tensors))
        self._passed_on: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def pass_on(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note what the block returns beside hidden states, such as T5's position bias: other blocks are given it."""
        self._passed_on = [(weakref.ref(tensor), tensor.untyped_storage().nbytes()) for tensor in tensors]

    def freed(self, trial: Trial) -> Freed:
        """Return the bytes of what the action does not keep."""
        if not self._sizes:
            return Freed()
        # Counted as before: the variables of a loop would refer to the tensors, too.
        users = list(map(compat.autograd.users_of, self._tensors))
        are_kept = map(operator.gt, users, self._users)
        hidden, *others = [0 if is_kept else size for size, is_kept in zip(self._sizes, are_kept, strict=True)]
        shared = sum(others) + sum(size for tensor, size in self._passed_on if tensor() is None)
        # The tape of the trial has just closed, and left there the output of a norm at the end of the block.
        ends_with_norm = trial.region is not None and trial.region.parameters_stay and running.norm_output is not None
        return Freed(hidden, shared, self._sizes[0] - hidden if ends_with_norm else 0)
