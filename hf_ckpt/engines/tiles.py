"""`full+tiles`: recompute the block as `full+selective` does, and its feed-forward a few tokens at a time.

In the backward of a block, most of the memory is what its feed-forward computes for all tokens. A feed-forward maps
each token by itself. So it runs in tiles of tokens, and each tile is checkpointed inside of the block's checkpoint:
backward recomputes one tile, frees it, and goes on with the next. Autograd sums the gradients of the weights over tiles
in at least float32 before any hook sees them. They equal those of `full` up to rounding. Prior work: TiledMLP of Arctic
Long Sequence Training (Bekman et al., 2025, https://arxiv.org/abs/2506.13996), and of Liger Kernel.

The inputs of all tiles are saved before the first tile runs. torch ends the recomputation of a block as soon as it has
everything that backward needs. That is before the first tile, unless something behind the feed-forward saves its
output, as the norms of Gemma 2 do. So a feed-forward runs twice in a step, as under `full`. (Under torch 2.8, whose
checkpoints always save something, all tiles but the last run three times.)
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.full import Counted, FullRegion
from hf_ckpt.engines.head.chunks import autocast
from hf_ckpt.engines.rebuild.full_selective import FullSelectiveRegion
from hf_ckpt.engines.region import Hook, Region, Request
from hf_ckpt.engines.running import running
from hf_ckpt.engines.runs import FirstThenAgain, Runs
from hf_ckpt.engines.step_state import StepState
from hf_ckpt.errors import reason_of, shown
from hf_ckpt.logs import warn_once
from hf_ckpt.measure.levels import Boundary
from hf_ckpt.models.blocks import FoundBlocks
from hf_ckpt.models.parts import feed_forwards
from hf_ckpt.spec.actions import AUTO_TOKENS, SAVE_CLASSES

log = logging.getLogger(__name__)

TRIED_TOKENS = 128
"""Tokens on which it is tried whether a feed-forward maps each token by itself."""
ROUNDINGS = 8
"""The largest difference of a token's output between two runs, as a multiple of the precision of its type."""


class TiledRegion(FullSelectiveRegion):
    """The checkpointing function of a block that is recomputed, and whose feed-forwards run in tiles.

    The recomputation keeps of all else what `selective` keeps, and the inputs of the tiles as far as nothing rebuilds
    them.

    Args:
        block: name of the block.
        tile: the tokens of a tile, or `auto`.
        options: keyword arguments for `torch.utils.checkpoint`.
    """

    useless = ""  # rebuilding is only a means here

    def __init__(self, block: str, *, tile: int | str, **options: Any) -> None:
        super().__init__(block, save=SAVE_CLASSES, **options)
        self.tile = tile
        self.options = options
        self.parts: dict[str, FullRegion | None] = {}
        """Name of a feed-forward that was tried -> the region of each of its tiles, which counts them; None for one
        that runs as a whole."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `fn(*args)`, the block's own forward. If a tile fails, run it once more, with that part as a whole."""
        try:
            return super().__call__(fn, *args)
        except _TileFailedError:
            # Not from the feed-forward on: torch's checkpoint has counted what the tiles before saved.
            self.forwards -= 1
        # Not before the error is gone: until then, the hooks of the checkpoints that it has left are still on.
        return self(fn, *args)

    def inner(self, runs: Runs) -> Runs:
        """Return the block's own forward, with its feed-forwards in tiles both in the forward and later."""
        return super().inner(Runs(*[functools.partial(self._run, fn) for fn in runs]))

    def _run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run the block's own forward `fn` with its feed-forwards in tiles."""
        before = running.tiles
        running.tiles = self
        try:
            return fn(*args)
        finally:
            running.tiles = before

    def run_in_tiles(self, name: str, module: nn.Module, forward: Callable[..., Any], hidden: torch.Tensor) -> Any:
        """Run a feed-forward, which has the plain forward `forward`, on hidden states [..., tokens, hidden size]."""
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        tokens = AUTO_TOKENS if isinstance(self.tile, str) else self.tile
        if rows.shape[1] <= tokens:
            return forward(hidden)
        if name not in self.parts:
            self._set_part(name, module, why_not_in_tiles(module, forward, rows.detach()[:, :TRIED_TOKENS]))
        part = self.parts[name]
        if part is None:
            return forward(hidden)
        part.parameters_stay = self.parameters_stay
        try:
            output = self._in_tiles(part, module, forward, torch.split(rows, tokens, dim=1))
        except Exception as error:
            # A recomputation must run as the forward did, and torch ends it by an exception, too.
            if compat.autograd.running_node() is not None or compat.devices.is_out_of_memory(error):
                raise
            self._set_part(name, module, f"a tile raised {reason_of(error)}")
            raise _TileFailedError from error
        return output.view(*hidden.shape[:-1], output.shape[-1])

    def _set_part(self, name: str, module: nn.Module, why: str | None) -> None:
        """Record that a feed-forward runs in tiles; as a whole from now on, if there is a reason `why`."""
        self.parts[name] = FullRegion(f"{self.block}.{name}", **self.options) if why is None else None
        self.runs_whole = not any(self.parts.values())
        if why is not None:
            warn_once(log, "hf_ckpt: %s runs as a whole, not in tiles: %s.", type(module).__name__, why)

    def _in_tiles(self, part: FullRegion, module: nn.Module, forward: Callable[..., Any], tiles: Any) -> torch.Tensor:
        """Run a feed-forward on each tile, [1, tokens, hidden size], and join the outputs."""
        sums = sums_of(module)
        run = functools.partial(run_with_sums, forward, sums) if sums else forward
        inputs = [_Input.apply(torch.empty(0, requires_grad=True), tile) for tile in tiles]  # type: ignore
        # If autocast cached casts of weights, their gradients would be summed in 16 bits.
        device_type = tiles[0].device.type
        dtype = compat.devices.autocast_dtype(device_type)
        mark = _no_mark if self.trials is None else functools.partial(self.trials.mark, Boundary.TILE, self.block)
        with compat.devices.autocast_to(device_type, dtype, caches=False):
            outputs = [part.checkpointed(_tile(part, run, mark, *tile)) for tile in zip(tiles, inputs, strict=True)]
        return torch.cat(outputs, dim=1)


class Sum(NamedTuple):
    """Where the gradient of a trained parameter in 16 bits is summed over the tiles."""

    parameters: dict[str, Any]
    """The dict of the module that has the parameter."""
    name: str
    total: torch.Tensor
    """A tensor in float32 without memory, whose gradient goes to the parameter."""


def sums_of(module: nn.Module) -> list[Sum]:
    """Return the sums of all trained parameters in 16 bits, each parameter once."""
    sums: dict[int, Sum] = {}
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is None or id(parameter) in sums:
                continue
            if parameter.requires_grad and parameter.dtype.itemsize < 4:
                zeros = parameter.new_zeros((), dtype=torch.float32).expand_as(parameter)
                total = _Alias.apply(parameter, zeros)  # type: ignore[no-untyped-call]
                sums[id(parameter)] = Sum(inner._parameters, name, total)
    return list(sums.values())


def run_with_sums(forward: Callable[..., Any], sums: list[Sum], rows: torch.Tensor) -> Any:
    """Run the plain forward of a feed-forward such that gradients go to the sums of its parameters."""
    # Not by `torch.func.functional_call`, which walks over the module for every tile.
    before = [(each, each.parameters[each.name]) for each in sums]
    try:
        for each, parameter in before:
            each.parameters[each.name] = _Alias.apply(each.total, parameter.detach())  # type: ignore[no-untyped-call]
        return forward(rows)
    finally:
        for each, parameter in before:
            each.parameters[each.name] = parameter


def why_not_in_tiles(module: nn.Module, forward: Callable[..., Any], rows: torch.Tensor) -> str | None:
    """Return why a feed-forward does not run in tiles; None if it does. Warn once if it draws random numbers.

    It is tried on some tokens [1, tokens, hidden size]. Buffers, modes and random state are restored.
    """
    if any(map(compat.distributed.is_sharded, module.children())):  # they would be gathered for every tile
        return "its parts are sharded one by one (FSDP)"
    if compat.peft.counts_tokens(module):
        return "its activated LoRA counts tokens from the end of a row"
    before = StepState(module, compat.process_state.devices_of([rows]), parameters_stay=True)
    try:
        maps_tokens = is_same_up_to_rounding(forward, rows)
        draws = before.random.may_have_moved()
        if draws and not maps_tokens:  # other masks of dropout say nothing, so they are left out
            with contextlib.ExitStack() as modes:
                for inner in module.modules():
                    # Norms of a batch mix tokens in train mode only.
                    if not isinstance(inner, nn.modules.batchnorm._NormBase):
                        modes.enter_context(mock.patch.object(inner, "training", False))
                maps_tokens = is_same_up_to_rounding(forward, rows)
    except Exception as error:
        if compat.devices.is_out_of_memory(error):
            raise
        return f"some of its tokens alone raised {reason_of(error)}"
    finally:
        before.restore()
    if not maps_tokens:
        return "it does not process each token by itself"
    if draws:
        kind = type(module).__name__
        warn_once(log, "hf_ckpt: %s draws its dropout for each tile, so masks differ from those without `mlp`.", kind)
    return None


def is_same_up_to_rounding(forward: Callable[..., Any], rows: torch.Tensor) -> bool:
    """Whether the outputs of all rows, and of each half of them, are the same up to rounding.

    Fake tensors have no values to compare.
    """
    dtype = compat.devices.autocast_dtype(rows.device.type)
    with torch.no_grad(), autocast(rows.device.type, dtype):  # without cached casts that outlive the trial
        whole = forward(rows)
        halves = torch.cat([forward(half) for half in rows.tensor_split(2, dim=1)], dim=1)
    allowed = ROUNDINGS * torch.finfo(dtype or rows.dtype).eps
    is_near = (whole - halves).float().norm(dim=-1) <= allowed * whole.float().norm(dim=-1)
    return is_near.shape == rows.shape[:2] and (compat.torch.is_fake(is_near) or bool(is_near.all()))


def _no_mark() -> None:
    """Marks nothing, in a step that is not measured."""


class _TileFailedError(Exception):
    """A tile of a feed-forward raised an error. From now on, it runs as a whole."""


def _tile(
    region: FullRegion, forward: Callable[..., Any], mark: Callable[[], None], rows: torch.Tensor, saved: torch.Tensor
) -> FirstThenAgain:
    """Return the forward of one tile. It takes no arguments, because a checkpoint would save them.

    Args:
        region: the region of the feed-forward's tiles.
        forward: runs the feed-forward.
        mark: called when the recomputation begins.
        rows: the input [1, tokens, hidden size]. After the forward, it is only among the tensors that autograd saved.
        saved: what `_Input` returned for the input.
    """
    counted = Counted(region, region.state_for(forward), forward, forward)

    def recompute() -> Any:
        (rows,) = saved.grad_fn.saved_tensors  # type: ignore[union-attr]  # the first tile recomputes the block
        mark()
        return counted.recompute(rows)

    return FirstThenAgain(functools.partial(counted.run, forward, rows), recompute)


class _Input(torch.autograd.Function):
    """Saves the input of a tile. The node of its empty output holds the input."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return token.new_empty(0)


class _Alias(torch.autograd.Function):
    """Returns `values`. Their gradient goes to `source`, in its type."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _run(name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What replaces the forward of a feed-forward."""
    region = None if compat.torch.is_compiling() else running.tiles
    if region is None:
        return forward(*args, **kwargs)
    return region.run_in_tiles(name, module, forward, *args, *kwargs.values())


def make(request: Request) -> Region:
    """The engine of `full+tiles`."""
    return TiledRegion(request.block, tile=request.action.tile or "auto", **request.options)


def hooks(regions: Collection[Region], blocks: FoundBlocks) -> Iterator[Hook]:
    """Yield what replaces the forwards of feed-forwards. Warn once of the blocks that have none."""
    tiled = [region for region in regions if isinstance(region, TiledRegion)]
    without: dict[str, list[str]] = {}
    for name in dict.fromkeys(region.block for region in tiled):
        block = blocks.modules[name]
        names = feed_forwards(block)
        if not names:
            without.setdefault(type(block).__name__, []).append(name)
        for part in names:
            yield Hook(block.get_submodule(part), functools.partial(_run, part), "instead")
    why = "none of its modules takes one tensor and has several matrices, or a router sends tokens to experts"
    for kind, names_of_kind in without.items():
        text = shown(", ".join(names_of_kind), quoted=False)
        warn_once(log, "hf_ckpt: no part of %s (%s) runs in tiles, because %s.", kind, text, why)
    for region in tiled:
        region.runs_whole = region.runs_whole or any(region.block in names for names in without.values())
