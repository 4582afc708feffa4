"""`full` over several neighbouring blocks: keep the input of the first one, and recompute all of them in backward.

The model runs its blocks one by one, so a segment opens at its first block and closes at its last, or at the end of the
stack. It records the arguments of each block. Backward runs the blocks again one after another, each on the output of
the previous one. Chen et al., 2016, https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.arguments import as_given
from hf_ckpt.engines.full import FullRegion, named, needs_gradient, versions_of
from hf_ckpt.engines.region import Hook, Region, Request, Segment
from hf_ckpt.engines.routers import enter_router, leave_router
from hf_ckpt.engines.state import ForwardState
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.blocks import FoundBlocks, routers


class SegmentRegion(FullRegion):
    """The checkpointing function of a block that is recomputed with the other blocks of its segment."""

    def __init__(self, block: str, segment: Segment, **options: Any) -> None:
        super().__init__(block, **options)
        self.segment = segment

    def told_of_parameters(self, stay: bool, owner: str) -> None:
        """Raise `HfCkptError` unless parameters stay on their device, unsharded, throughout a step (`stay`)."""
        if not stay:
            raise HfCkptError(
                f"`segments` recompute several blocks of {owner} at once, but its parameters are sharded or moved "
                "block by block (FSDP, ZeRO-3, device maps), so those of the others are away then. Use `policy: full` "
                "without `segments`."
            )
        super().told_of_parameters(stay, owner)

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward, as a part of its segment.

        Raises `HfCkptError` if the block's input is not the output of the previous block, and `GraphCaptureError` if
        random state is preserved while a CUDA graph is captured.
        """
        if not torch.is_grad_enabled() or compat.is_compiling():  # compiled blocks are recomputed one by one
            return super().__call__(fn, *args)
        self.refuse_capturing()
        run = _open.run
        if run is not None and run.segment is not self.segment:
            run.close()
            run = None
        fn, args = as_given(*compat.block_call(fn, args))
        if run is None:
            run = _open.run = _Run(self, args)
        self.forwards += 1
        try:
            run.resume()
            output = run.call(self, fn, args)
            run.suspend()
        except BaseException:
            run.abandon()
            raise
        # Below the first trainable parameter nothing is saved, so there is nothing to recompute.
        if self.block == self.segment.blocks[-1] or not needs_gradient(output):
            run.close()
        return output


def make(request: Request) -> Region:
    """The engine of `full`, for a block by itself or, if its action names a segment, together with its neighbours."""
    if request.segment is None:
        return FullRegion(request.block, **request.options)
    return SegmentRegion(request.block, request.segment, **request.options)


def hooks(regions: Collection[Region], found: FoundBlocks, owners: Sequence[nn.Module]) -> Iterator[Hook]:
    """Yield hooks on the modules that run the stacks, so that no segment stays open beyond its stack.

    Also yield hooks on the routers of all blocks that are recomputed as a whole.
    """
    segments = {region.segment for region in regions if isinstance(region, SegmentRegion)}
    for owner in owners if segments else ():
        yield Hook(owner, StartOfStack(segments), "before")
        yield Hook(owner, end_of_stack, "always")
    choosing = dict.fromkeys(region.block for region in regions if region.keeps_choices)
    for router in (router for name in choosing for router in routers(found.modules[name])):
        yield Hook(router, enter_router, "before")
        yield Hook(router, leave_router, "always")


class StartOfStack:
    """Forward pre-hook of a module that runs a stack: an interrupt (Ctrl-C) may have left one of its segments open."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.segments = list(segments)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Abandon a segment that is still open."""
        run = _open.run
        if run is not None and not compat.is_compiling() and run.segment in self.segments:
            run.abandon()


def end_of_stack(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a module that runs a stack: close a segment that is still open, or abandon it after an error.

    The last blocks of the stack may have been skipped, or one may have raised an error.
    """
    run = _open.run
    if run is not None and not compat.is_compiling():
        if output is None:
            run.abandon()
        else:
            run.close()


class _Made:
    """Replaces a tensor that an earlier block of the segment returned."""

    def __init__(self, call: int, place: int) -> None:
        self.call = call
        """Number of the block's call within the segment."""
        self.place = place
        """Index of the tensor among the leaves of that call's output."""


class _Call:
    """One call of a block, to repeat in backward."""

    def __init__(self, region: SegmentRegion, fn: Callable[..., Any], given: Any, state: ForwardState) -> None:
        self.region = region
        self.fn = fn
        self.given = given
        """(positional, keyword arguments), with `_Made` in place of tensors that earlier blocks returned."""
        self.state = state


class _Run:
    """One forward through the blocks of a segment."""

    def __init__(self, first: SegmentRegion, args: tuple[Any, ...]) -> None:
        self.segment = first.segment
        self.calls: list[_Call] = []
        self.made: dict[int, tuple[weakref.ref[torch.Tensor], _Made]] = {}
        """Outputs so far, by id, while the segment is open. Ids are reused, so each comes with its tensor."""
        self.frame: Generator[None, None, None] | None = compat.checkpoint_frame(
            self.again, args, determinism_check=first.determinism_check
        )
        self._resume: Callable[[], None] | None = None
        """Resumes the segment; None while one of its blocks runs."""
        next(self.frame)
        compat.rename_checkpoint_errors(functools.partial(named, " to ".join(dict.fromkeys(first.segment.blocks))))

    def suspend(self) -> None:
        """Leave the segment until its next block: what runs between blocks is not recomputed with them."""
        self._resume = compat.suspend_saved_tensor_hooks()

    def resume(self) -> None:
        """Resume the segment, if it was left."""
        resume, self._resume = self._resume, None
        if resume is not None:
            resume()

    def call(self, region: SegmentRegion, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a block, and record how to run it again.

        Raises `HfCkptError` if the block's input is not the output of the previous block.
        """
        keywords: dict[str, Any] = {}
        bare = fn
        if isinstance(fn, functools.partial):  # the block's keyword arguments
            bare, keywords = functools.partial(fn.func, *fn.args), fn.keywords
        number = len(self.calls)
        given = compat.tree_map(self._by_origin, (args, keywords))
        if number and not isinstance(_hidden_states(*given), _Made):
            raise HfCkptError(
                f"block {region.block!r} is not given what block {self.calls[-1].region.block!r} returned, so the two "
                "cannot be recomputed as one segment. Use `policy: full` without `segments` for this model."
            )
        call = _Call(region, bare, given if number else ((), given[1]), region.state_for(fn))
        hidden = (_hidden_states(args, keywords),)
        versions = versions_of(hidden)
        output = call.state.run(fn, args)
        if not number:  # the others are recomputed from recomputed outputs
            region.refuse_changes(hidden, versions, output)
        for place, value in enumerate(compat.tree_leaves(output)):
            if isinstance(value, torch.Tensor):
                self.made[id(value)] = weakref.ref(value), _Made(number, place)
        self.calls.append(call)
        return output

    def _by_origin(self, value: Any) -> Any:
        """Return `_Made` for a tensor that an earlier block returned, and any other value as it is."""
        found = self.made.get(id(value))
        return found[1] if found is not None and found[0]() is value else value

    def again(self, *args: Any) -> None:
        """Recompute all blocks for backward. `args` are the arguments of the first one."""
        outputs: list[list[Any]] = []

        def fetch(value: Any) -> Any:
            return outputs[value.call][value.place] if isinstance(value, _Made) else value

        for call in self.calls:
            region = call.region
            region.recomputed += 1
            positional, keywords = compat.tree_map(fetch, call.given)
            run = functools.partial(call.fn, **keywords)
            output = call.state.recompute(run, positional if outputs else args)
            outputs.append(compat.tree_leaves(output))

    def close(self) -> None:
        """End the segment: from now on it can be recomputed in backward."""
        frame = self._forget()
        if frame is not None:
            with contextlib.suppress(StopIteration):
                next(frame)

    def abandon(self) -> None:
        """Discard the segment, because a block raised an error."""
        frame = self._forget()
        if frame is not None:
            frame.close()

    def _forget(self) -> Generator[None, None, None] | None:
        self.resume()
        frame, self.frame = self.frame, None
        self.made.clear()
        if _open.run is self:
            _open.run = None
        return frame


def _hidden_states(args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Return the first argument of a block; hidden states may be passed by keyword."""
    return args[0] if args else next(iter(keywords.values()), None)


class _Open(threading.local):
    """The segment that this thread is running, if any."""

    run: _Run | None = None


_open = _Open()
