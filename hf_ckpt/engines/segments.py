"""`full` over several blocks at once: keep the input of the first, recompute them all as one region in backward.

The model runs its blocks one by one, so the region is opened at the first block of a segment and closed at the last, or
wherever the stack ends before that. What the blocks were given is noted; in backward they run again one after another,
each on what the one before has made. Chen et al., 2016, https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import get_device_states, set_device_states

from hf_ckpt import compat
from hf_ckpt.engines.full import FullRegion, needs_gradient, versions_of
from hf_ckpt.errors import HfCkptError


class Segment:
    """Neighbouring blocks of one stack."""

    def __init__(self, blocks: tuple[str, ...]) -> None:
        self.blocks = blocks


class SegmentRegion(FullRegion):
    """The checkpointing function of one block of a segment."""

    def __init__(self, block: str, segment: Segment, **options: Any) -> None:
        super().__init__(block, **options)
        self.segment = segment

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward, as a part of its segment.

        Raises `HfCkptError` when the block is not given what the one before it made, and `GraphCaptureError` as `full`.
        """
        if not torch.is_grad_enabled() or compat.is_compiling():  # compiled blocks are recomputed one by one
            return super().__call__(fn, *args)
        self.refuse_capturing()
        run = _open.run
        if run is not None and run.segment is not self.segment:
            run.close()
            run = None
        args = tuple(None if compat.is_cache(arg) else arg for arg in args)
        if run is None:
            run = _open.run = _Run(self, args)
        self.forwards += 1
        try:
            output = run.call(self, fn, args)
        except BaseException:
            run.abandon()
            raise
        # Below the first trainable parameter nothing is saved, so there is nothing to run again for.
        if self.block == self.segment.blocks[-1] or not needs_gradient(output):
            run.close()
        return output


class StartOfStack:
    """Forward pre-hook of whatever runs a stack: an interrupt (Ctrl-C) may have left one of its segments open."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.segments = list(segments)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Let an open segment go."""
        run = _open.run
        if run is not None and not compat.is_compiling() and run.segment in self.segments:
            run.abandon()


def end_of_stack(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of whatever runs a stack: its last blocks may have been skipped, or have raised an error."""
    run = _open.run
    if run is not None and not compat.is_compiling():
        if output is None:
            run.abandon()
        else:
            run.close()


class _Made:
    """In place of a tensor that an earlier block of the segment made."""

    def __init__(self, call: int, place: int) -> None:
        self.call = call
        self.place = place


class _Call:
    """One block's call: what to run again."""

    def __init__(self, region: SegmentRegion, fn: Callable[..., Any], given: Any) -> None:
        self.region = region
        self.fn = fn
        self.given = given
        """(args, keywords), with `_Made` for what earlier blocks made."""
        self.random_state: tuple[torch.Tensor, Any] | None = None


class _Run:
    """One forward through the blocks of a segment."""

    def __init__(self, first: SegmentRegion, args: tuple[Any, ...]) -> None:
        self.segment = first.segment
        self.calls: list[_Call] = []
        self.made: dict[int, tuple[weakref.ref[torch.Tensor], _Made]] = {}
        """While the segment is open: id of an output -> the output (ids are used again), and where it is from."""
        self.frame: Generator[None, None, None] | None = compat.checkpoint_frame(
            self.again, args, preserve_rng_state=first.preserve_rng_state, determinism_check=first.determinism_check
        )
        next(self.frame)

    def call(self, region: SegmentRegion, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a block and note how."""
        keywords: dict[str, Any] = {}
        bare = fn
        if isinstance(fn, functools.partial):  # the block's keyword arguments
            bare, keywords = functools.partial(fn.func, *fn.args), fn.keywords
        number = len(self.calls)
        given = pytree.tree_map(self._by_origin, (args, keywords))
        if number and not isinstance(given[0][0], _Made):
            raise HfCkptError(
                f"block {region.block!r} is not given what block {self.calls[-1].region.block!r} returned, so the two "
                "cannot be recomputed as one segment. Use `policy: full` without `segments` for this model."
            )
        call = _Call(region, bare, given if number else ((), given[1]))
        if number and region.preserve_rng_state:  # the frame has the state before the first block
            call.random_state = torch.get_rng_state(), get_device_states(*args)
        versions = versions_of(args[:1])
        output = fn(*args)
        if not number:  # the others are given what is made again
            region.refuse_changes(args[:1], versions, output)
        for place, value in enumerate(pytree.tree_leaves(output)):
            if isinstance(value, torch.Tensor):
                self.made[id(value)] = weakref.ref(value), _Made(number, place)
        self.calls.append(call)
        return output

    def _by_origin(self, value: Any) -> Any:
        found = self.made.get(id(value))
        return found[1] if found is not None and found[0]() is value else value

    def again(self, *args: Any) -> None:
        """Run the blocks once more, for backward. `args` are those of the first."""
        outputs: list[list[Any]] = []

        def fetch(value: Any) -> Any:
            return outputs[value.call][value.place] if isinstance(value, _Made) else value

        for call in self.calls:
            if call.random_state is not None:
                cpu, (devices, states) = call.random_state
                torch.set_rng_state(cpu)
                set_device_states(devices, states)
            region = call.region
            region.recomputed += 1
            positional, keywords = pytree.tree_map(fetch, call.given)
            with region.observer() if region.observer else contextlib.nullcontext():
                outputs.append(pytree.tree_leaves(call.fn(*(positional if outputs else args), **keywords)))

    def close(self) -> None:
        """The segment has ended."""
        frame = self._forget()
        if frame is not None:
            with contextlib.suppress(StopIteration):
                next(frame)

    def abandon(self) -> None:
        """A block raised an error."""
        frame = self._forget()
        if frame is not None:
            frame.close()

    def _forget(self) -> Generator[None, None, None] | None:
        frame, self.frame = self.frame, None
        self.made.clear()
        if _open.run is self:
            _open.run = None
        return frame


class _Open(threading.local):
    """The segment that this thread is in."""

    run: _Run | None = None


_open = _Open()
