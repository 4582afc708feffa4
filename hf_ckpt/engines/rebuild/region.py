"""`selective` by rebuilding: drop every saved tensor that can be recomputed cheaply from tensors that are kept.

Saved-tensor hooks around a block's forward see each tensor that autograd saves, and the node that produced it. If
`ops.OPS` has a row for that node and its operands are known, the hook drops the tensor and returns a `Rebuilt` value;
otherwise it keeps the tensor. Small modules that the family names (norms, activations of several operations) run again
as a whole. Backward rebuilds a dropped tensor when it is first needed, and frees it after its last use.

No random state is saved or restored, because dropout masks are operands. Changes in place that autograd counts are
harmless or an error that names the block; other changes, such as through `.data`, only the watch can find.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from hf_ckpt import compat
from hf_ckpt.engines.full import CALLS_A_TRANSFORM, FullRegion
from hf_ckpt.engines.host_memory import Mover
from hf_ckpt.engines.rebuild.modules import enter_module, leave_module
from hf_ckpt.engines.rebuild.names import Names, Recording, SavedSizes
from hf_ckpt.engines.rebuild.ops import ops_for
from hf_ckpt.engines.rebuild.tape import Tape
from hf_ckpt.engines.rebuild.unpacking import unpack
from hf_ckpt.engines.rebuild.values import Work
from hf_ckpt.engines.region import Hook, Region, Request
from hf_ckpt.engines.running import running
from hf_ckpt.engines.seen import look_at
from hf_ckpt.errors import TransformError
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.live import stop_counts
from hf_ckpt.models.blocks import FoundBlocks
from hf_ckpt.models.parts import cheap_modules

log = logging.getLogger(__name__)

_USELESS = (
    "`selective` with save %s found nothing in blocks like %s that can be rebuilt, so every activation is kept there. "
    "Use `full` for such blocks, also if they are compiled by themselves."
)


class RebuildRegion(Region):
    """The checkpointing function of a block whose cheap results are rebuilt in backward.

    Args:
        block: name of the block.
        save: classes of operations whose results are kept.
        compiled: recomputes the block in a graph of torch.compile, which has no graph of autograd nodes; None if no
            forward runs there while compiling.
        mover: moves kept tensors to host memory; if None, they stay on the device.
    """

    runs_block_again = False
    takes_caches = compat.transformers.BLOCKS_TAKE_CACHES

    def __init__(
        self, block: str, *, save: tuple[str, ...], compiled: FullRegion | None = None, mover: Mover | None = None
    ) -> None:
        self.block = block
        self.mover = mover
        self.compiled = compiled
        self.save = save
        self.work = Work(block)
        self.rows = ops_for(save)
        self.hopeless: set[tuple[int, int, str]] = set()
        """Results that earlier forwards could not rebuild: (place among the block's nodes, number, name of the node).
        The graph behind them is not walked again, which is slow. At worst a tensor is kept for nothing. Forgotten when
        a forward saves another number of tensors."""
        self.parts_are_sharded: bool | None = None
        """Whether parts of the block are sharded by themselves (FSDP), and free their weights in the middle of its
        forward; None before the first."""
        self.saved_tensors = 0
        """Number of tensors that autograd saved in the last forward."""
        self.reads_parameters = True
        """Whether operations may be rebuilt from parameters themselves, so that a forward has to look at their
        versions first. Norms that run again as a whole look at their own."""
        self.dropped_sizes: dict[int, int] = {}
        """Id of a value -> bytes of the tensor that it rebuilds, in the last recomputation of `full+selective`."""
        self.saved: SavedSizes | None = None
        """What the first forward kept and dropped."""
        self.weights: list[dict[str, torch.Tensor | None]] | None = None
        """The dicts of the block's parameters; None before a forward has shown the block."""

    @property
    def recomputed(self) -> int:  # type: ignore[override]
        """How many times operations and modules were run again in backward."""
        return self.work.rebuilt

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward, and drop the cheap results that autograd saves.

        The user's hooks on saved tensors get those that are kept. In a graph of torch.compile, which has no autograd
        graph to read yet, the block is recomputed as a whole.
        """
        if not torch.is_grad_enabled():
            return fn(*args)
        if compat.torch.is_compiling():
            assert self.compiled is not None, "only `full+selective` has none, and runs no forward here while compiling"
            self.in_graph = True
            return self.compiled(fn, *args)
        fn, args = compat.transformers.block_call(fn, args)
        self.forwards += 1
        self.moved_bytes = 0
        self.dropped_tensors = 0
        outer = compat.autograd.top_saved_tensor_hooks()
        # torch's checkpoint lets each tensor be unpacked once. Here, one kept tensor serves several operations.
        if outer is not None and compat.checkpoint.are_of_a_checkpoint(outer):
            warn_once(log, "hf_ckpt: `selective` has no effect in blocks that another checkpoint recomputes.")
            return fn(*args)
        store = None if outer is None else _without_graphs(outer)
        group = None
        if self.mover is not None and args:
            group = self.mover.group(self.block, args[0])
        if group is None:
            return self.run(fn, args, store=store, describes=True, useless=_USELESS)
        output = self.run(fn, args, store=(group.pack, group.unpack), describes=True, useless=_USELESS)
        group.leave_device()
        self.moved_bytes = group.moved_bytes
        return output

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        store: compat.autograd.SavedTensorHooks | None = None,
        hooks: Callable[[Tape], compat.autograd.SavedTensorHooks] = lambda tape: (tape.pack, unpack),
        describes: bool = False,
        useless: str = "",
    ) -> Any:
        """Run the block's forward `fn` with a tape of its own.

        Args:
            fn: the forward.
            args: its arguments.
            store: hooks that store kept tensors elsewhere; see `Tape`.
            hooks: returns the saved-tensor hooks for the tape.
            describes: whether to record what is kept and dropped in `saved`, if no forward has done so yet.
            useless: the warning if nothing can be rebuilt, with places for `save` and the block; none if nobody has
                asked for rebuilding, as in a trial.

        Raises `TransformError` if the forward calls a function of torch.func that allows no hooks.
        """
        tape = self._tape(fn, args, store)
        output = None
        has_ended = False
        pack, unpack_saved = hooks(tape)
        recording = self._recording(fn, args, tape) if describes else None
        if recording is not None:
            pack = recording.of(pack)
        outer = running.tape
        running.tape = tape
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack_saved):
                output = fn(*args)
            has_ended = True
            if recording is not None:
                self.saved = recording.saved()
            return output
        except BaseException as error:
            # torch ends a recomputation by an exception as soon as it has saved all that the forward saved.
            has_ended = isinstance(error, compat.checkpoint.StopRecomputation)
            if isinstance(error, RuntimeError) and compat.autograd.refuses_hooks(error):
                raise TransformError(self.block, CALLS_A_TRANSFORM) from error
            # After other errors, the end of the model's forward, which is told of it, ends the count.
            if not isinstance(error, Exception):
                stop_counts()
            raise
        finally:
            running.tape = outer  # of a block around this one: models may nest their blocks
            tape.close(output)
            if recording is not None:
                recording.close()
            self._learn(tape, useless if has_ended else None)

    def _tape(
        self, fn: Callable[..., Any], args: tuple[Any, ...], store: compat.autograd.SavedTensorHooks | None
    ) -> Tape:
        """Return the tape of a forward that begins."""
        if self.parts_are_sharded is None:
            block = compat.transformers.module_of(fn)
            self.parts_are_sharded = block is not None and any(map(compat.distributed.is_sharded, block.children()))
        return Tape(self, args, store, self._versions(fn) if self.reads_parameters else None)

    def _recording(self, fn: Callable[..., Any], args: tuple[Any, ...], tape: Tape) -> Recording | None:
        """Return what records the names of saved tensors in the first forward; None in later ones."""
        if self.saved is not None or not args or compat.torch.is_fake(args[0]):
            return None
        with compat.modes.without_torch_functions():  # a mode may refuse tensors that the block does not use
            return Recording(Names(compat.transformers.module_of(fn), tape.graph, args[0]))

    def _learn(self, tape: Tape, useless: str | None) -> None:
        """Count what a forward has saved and dropped, and give the warning `useless` once if nothing can be rebuilt.

        Of a forward that has raised an error, for which `useless` is None, nothing is learnt.
        """
        if useless is None:
            self.hopeless.clear()
            return
        is_first = not self.saved_tensors
        saves_others = tape.saved != self.saved_tensors
        misses_versions = tape.parameters.are_read and not self.reads_parameters
        # Another forward than the one before, for example in eval mode: places among the nodes are others, too.
        if misses_versions or (saves_others and not is_first):
            self.hopeless.clear()
            self.weights = None
        self.reads_parameters = tape.parameters.are_read or (self.reads_parameters and not tape.saved)
        self.saved_tensors = tape.saved
        self.dropped_tensors = tape.dropped
        if useless and tape.saved and not tape.dropped:
            warn_once(log, useless, list(self.save), self.block)

    def _versions(self, fn: Callable[..., Any]) -> dict[int, int]:
        """Return the in-place version of each parameter of the block whose forward is `fn`: id -> version."""
        if self.weights is None:
            block = compat.transformers.module_of(fn)
            dicts = [] if block is None else [vars(module).get("_parameters") for module in block.modules()]
            self.weights = [tensors for tensors in dicts if isinstance(tensors, dict)]
        leaves = [leaf for tensors in self.weights for leaf in tensors.values() if leaf is not None]
        return dict(zip(map(id, leaves), look_at(leaves)[0], strict=True))

    def __getstate__(self) -> dict[str, Any]:
        # The rows hold functions inside of functions, which cannot be pickled. They follow from `save`.
        return {name: value for name, value in vars(self).items() if name != "rows"} | {"weights": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, rows=ops_for(state["save"]))


def _without_graphs(hooks: compat.autograd.SavedTensorHooks) -> compat.autograd.SavedTensorHooks:
    """Return the user's hooks for kept tensors. They get no graph: a node that holds its own result is never freed.

    TRL's hooks copy on a stream of their own, and expect one node to use what they return; here it is kept for several.
    """
    outer_pack, outer_unpack = hooks

    def pack_kept(tensor: torch.Tensor) -> Any:
        # A leaf keeps its identity, by which hooks tell a parameter from an activation (TRL's do not offload it).
        base = tensor if tensor._base is None else tensor._base
        return outer_pack(tensor if base.is_leaf else tensor.detach())

    def fetch(packed: Any) -> torch.Tensor:
        return compat.devices.used_here(outer_unpack(packed))

    return pack_kept, fetch


def make(request: Request) -> Region:
    """The engine of `selective`: rebuilding, and `full` in graphs of torch.compile."""
    return RebuildRegion(
        request.block,
        save=request.action.save,
        compiled=FullRegion(request.block, **request.options),
        mover=request.mover if request.action.moved else None,
    )


def hooks(regions: Collection[Region], blocks: FoundBlocks) -> Iterator[Hook]:
    """Yield the hooks on small modules that run again as a whole."""
    # `full+selective` and `full+tiles` have a region of `selective` inside.
    inner = (getattr(region, "rebuilding", region) for region in regions)
    rebuilding = [region for region in inner if isinstance(region, RebuildRegion)]
    for module in cheap_modules(blocks, list(dict.fromkeys(region.block for region in rebuilding))):
        yield Hook(module, enter_module, "before", with_kwargs=True)
        yield Hook(module, leave_module, "after")
