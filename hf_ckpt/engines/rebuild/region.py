"""`selective` by rebuilding: drop every saved tensor that can be recomputed cheaply from tensors that are kept.

Saved-tensor hooks around a block's forward see each tensor that autograd saves, and the node that produced it. If
`ops.OPS` has a row for that node and its operands are known, the hook drops the tensor and returns a `Rebuilt` value;
otherwise it keeps the tensor. Small modules that the family names (norms, activations of several operations) run again
as a whole. Backward rebuilds a dropped tensor when it is first needed, and frees it after its last use.

No random state is saved or restored, because dropout masks are operands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.check import Saved, difference_of
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.offload import Mover
from hf_ckpt.engines.rebuild.ops import ops_for
from hf_ckpt.engines.rebuild.tape import Tape, enter_module, hand_to_first_block, leave_module, running
from hf_ckpt.engines.rebuild.values import Kept, Work, unpack
from hf_ckpt.engines.region import Hook, Region, Request
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import FoundBlocks, cheap_modules, embedding_norms

log = logging.getLogger(__name__)


class RebuildRegion(Region):
    """The checkpointing function of a block whose cheap results are rebuilt in backward.

    Args:
        block: name of the block.
        save: classes of operations whose results are kept.
        compiled: recomputes the block in a graph of torch.compile, which has no graph of autograd nodes; None if no
            forward runs there while compiling.
        mover: moves kept tensors to host memory; if None, they stay on the device.
        fallback: recomputes a block of unknown code as a whole. The first forward of such a block is a trial, which
            holds all tensors until the block has ended. If one of them cannot be rebuilt, `fallback` runs the block
            from the next forward on. None for a block of known code.
    """

    runs_block_again = False
    transforms = frozenset()

    def __init__(
        self,
        block: str,
        *,
        save: tuple[str, ...],
        compiled: FullRegion | None = None,
        mover: Mover | None = None,
        fallback: FullRegion | None = None,
    ) -> None:
        self.block = block
        self.fallback = fallback
        self.takes_caches = fallback is None and compat.transformers.BLOCKS_TAKE_CACHES
        self.keeps_choices = fallback is not None
        self.trial = fallback is not None
        """Whether the trial is still pending."""
        self.failed = False
        """Whether the trial has failed."""
        self.mover = mover
        self.moved_bytes = 0
        self.compiled = compiled
        self.save = save
        self.work = Work(block)
        self.rows = ops_for(save)
        self.masks_hold = False
        """Whether a forward has compared its packed masks with the originals, and found them equal."""
        self.hopeless: set[tuple[int, int, str]] = set()
        """Results that could not be rebuilt so far, see `Tape`; for forwards that save the same number of tensors."""
        self.seen: tuple[list[int], int] = [], 0
        """Sizes of the tensors that the last forward saved, and how many tensors it could keep."""
        self.forwards = 0
        self.dropped: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        self.named: list[tuple[str, str]] = []
        """(autograd node, name to report) of each tensor that a forward kept, in order."""
        self.biases: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """Id of a linear layer's weight -> (weight, bias), as a forward found them. Autograd does not hold a frozen
        bias."""
        self.reaches_back = False
        """Whether the block may rebuild its own input, if that is a norm or an embedding of something that is kept. It
        may not if parameters are sharded: the parameters of other blocks are gone in the backward of this block."""

    def told_of_parameters(self, stay: bool, owner: str) -> None:
        """Allow the block to rebuild its input from what earlier blocks keep, if parameters stay in place (`stay`)."""
        self.reaches_back = stay
        if self.fallback is not None:
            self.fallback.told_of_parameters(stay, owner)

    @property
    def recomputed(self) -> int:  # type: ignore[override]
        """How many times operations and modules, or the whole block, were run again in backward."""
        return self.work.rebuilt + (self.fallback.recomputed if self.fallback is not None else 0)

    @property
    def dropped_bytes(self) -> int:  # type: ignore[override]
        """Bytes that the last forward dropped."""
        return sum(self.dropped.values())

    @property
    def kept_bytes(self) -> int:  # type: ignore[override]
        """Bytes of results that the last forward kept."""
        return sum(self.kept.values())

    @property
    def in_graph(self) -> bool:  # type: ignore[override]
        """Whether the block ran in a graph of torch.compile, where nothing can be counted."""
        return self.compiled is not None and self.compiled.in_graph

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward, and drop the cheap results that autograd saves.

        In a graph of torch.compile, which has no autograd graph to read yet, the block is recomputed as a whole.
        """
        if not torch.is_grad_enabled():
            return fn(*args)
        if compat.torch.is_compiling():
            assert self.compiled is not None, "only `full+selective` has none, and runs no forward here while compiling"
            return self.compiled(fn, *args)
        fn, args = compat.transformers.block_call(fn, args)
        self.forwards += 1
        self.moved_bytes = 0
        if (
            self.failed or compat.torch.top_saved_tensor_hooks() is not None
        ):  # the user's hooks get all that autograd saves
            self.dropped, self.kept, self.seen = {}, {}, ([], 0)
            return self.fallback(fn, *args) if self.failed and self.fallback is not None else fn(*args)
        if self.trial and not any(map(compat.torch.is_fake, filter(torch.is_tensor, args))):
            return self._try(fn, args)
        if self.mover is None or self.trial or not args:
            return self.run(fn, args)
        with self.mover.moving(self.block, args[0]) as group:
            output = self.run(fn, args, store=None if group is None else (group.pack, group.unpack))
        self.moved_bytes = 0 if group is None else group.moved_bytes
        return output

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        store: compat.torch.SavedTensorHooks | None = None,
        hooks: Callable[[Tape], compat.torch.SavedTensorHooks] = lambda tape: (tape.pack, unpack),
    ) -> Any:
        """Run the block's forward `fn` with a tape of its own.

        Args:
            fn: the forward.
            args: its arguments.
            store: hooks that store kept tensors elsewhere; see `Tape`.
            hooks: returns the saved-tensor hooks for the tape.
        """
        tape = Tape(self, fn, args, store)
        outer, running.tape = running.tape, tape
        try:
            with torch.autograd.graph.saved_tensors_hooks(*hooks(tape)):
                output = fn(*args)
            tape.hand_over(output)
            return output
        finally:
            running.tape = outer
            tape.close()

    def _try(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run the forward of a block of unknown code, and then rebuild all that it saved, in the order of a backward.

        If a tensor is not the same, all are kept in this forward, and the fallback runs the later ones.
        """
        saved: list[Saved] = []

        def hooks(tape: Tape) -> compat.torch.SavedTensorHooks:
            @compat.torch.untraced
            def pack(tensor: torch.Tensor) -> Saved:
                held = Saved(tensor, (tape.pack, unpack))
                if type(held.packed) is not Kept:
                    held.refer_to(tensor, len(saved), "")
                    saved.append(held)
                return held

            return pack, _unpack_saved

        output = self.run(fn, args, hooks=hooks)
        before = self.work.rebuilt
        wrong = next((held for held in reversed(saved) if not _is_right(held)), None)
        self.work.rebuilt = before
        # The forward of a frozen block saves nothing and so proves nothing: try again in the next one.
        self.trial, self.failed = not self.seen[0], wrong is not None
        for held in saved:
            assert held.tensor is not None
            if wrong is not None:
                held.packed = Kept(held.tensor, self.block)
                held.packed.version = held.version
            held.tensor = None
        if wrong is not None:
            self.dropped, self.kept = {}, self.kept | {"kept in place of rebuilding": sum(self.dropped.values())}
            log.warning(
                "hf_ckpt: block %r cannot recompute what %s returned, most likely because it works in place. All is "
                "kept there in this step, and the block is recomputed as a whole (`full`) from the next one on.",
                self.block,
                wrong.operation,
            )
        return output

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("rows", "biases")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, rows=ops_for(state["save"]), biases={})


@compat.torch.untraced
def _unpack_saved(held: Saved) -> torch.Tensor:
    """Saved-tensor hook of a trial: return what a tape has packed."""
    return unpack(held.packed)


def _is_right(held: Saved) -> bool:
    """Whether the value in a saved tensor's place gives the same bits."""
    assert held.tensor is not None
    with torch.no_grad(), compat.devices.autocast_off():
        try:
            return difference_of(held.tensor, unpack(held.packed)) is None
        except (RuntimeError, HfCkptError) as error:  # it cannot be run again
            if compat.devices.is_out_of_memory(error):
                raise
            return False


def make(request: Request) -> Region:
    """The engine of `selective`: rebuilding, and `full` in graphs of torch.compile."""
    return RebuildRegion(
        request.block,
        save=request.action.save,
        compiled=FullRegion(request.block, **request.options),
        mover=request.mover if request.action.moved else None,
        fallback=None if request.known else FullRegion(request.block, **request.options),
    )


def hooks(regions: Collection[Region], found: FoundBlocks, owners: Sequence[nn.Module]) -> Iterator[Hook]:
    """Yield the hooks on small modules that run again as a whole."""
    found_regions = (getattr(region, "rebuilding", region) for region in regions)
    rebuilding = [region for region in found_regions if isinstance(region, RebuildRegion)]
    for module in cheap_modules(found, list(dict.fromkeys(region.block for region in rebuilding))):
        yield Hook(module, enter_module, "before", with_kwargs=True)
        yield Hook(module, leave_module, "always")
    for norm in embedding_norms(found) if rebuilding else ():
        yield Hook(norm, hand_to_first_block, "after")
