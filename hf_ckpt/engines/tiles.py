"""The feed-forward in chunks of tokens: its intermediate results never exist for the whole sequence.

A feed-forward treats each token independently. So its forward runs chunk by chunk without a graph, and only its input
is kept. Backward runs each chunk again and differentiates it at once. The gradient of each weight is summed over chunks
in one tensor, so it equals the gradient without chunks up to rounding. Prior work: Arctic Long Sequence Training
(Bekman et al., 2025, https://arxiv.org/abs/2506.13996) and the tiled MLP of Liger Kernel.

The input is saved before the first chunk runs. If the block is recomputed (`full`), torch stops the recomputation once
it has everything that backward needs. That is before the first chunk, unless something after the feed-forward saves its
output, so no feed-forward runs three times. Backward does not need the result of a feed-forward's last product. A plain
recomputation stops before it, but a chunk runs it again.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.check import Report, across_chunks
from hf_ckpt.engines.head.chunks import autocast, differentiable_once
from hf_ckpt.engines.state import ForwardState, lend

AUTO_PIECES = 8
AUTO_LEAST, AUTO_MOST_FROZEN, AUTO_MOST = 512, 2048, 4096
"""Chunks of `auto`, in tokens: an eighth of the batch, which makes intermediate results smaller than the block's other
tensors, with a minimum that keeps a device busy and a maximum. Each chunk of trained weights reads and writes their
whole gradients, so those chunks may be larger."""

Run = Callable[[torch.Tensor], torch.Tensor]
"""The plain feed-forward: [..., tokens, hidden size] -> the same shape."""


standing_for: contextvars.ContextVar[Callable[[int], contextlib.AbstractContextManager[None]] | None]
standing_for = contextvars.ContextVar("hf_ckpt: one chunk stands for many", default=None)
"""Set by traces on fake tensors, where all chunks between the first and the last are alike: makes a context in which
one chunk runs in place of the given number of chunks."""


def tokens_per_tile(asked: int | str, tokens: int, *, trained: bool) -> int:
    """Return the number of tokens in a chunk of the feed-forward.

    Args:
        asked: the number that the user set, or `auto`.
        tokens: number of tokens of the batch.
        trained: whether its weights are trained, and not only those of adapters.
    """
    if isinstance(asked, int):
        return asked
    piece = -(-tokens // AUTO_PIECES)
    return max(AUTO_LEAST, min(-(-piece // 128) * 128, AUTO_MOST if trained else AUTO_MOST_FROZEN))


def mostly_trained(parts: Iterable[nn.Module]) -> bool:
    """Whether most of the weights of these modules are trained, which is not the case with adapters."""
    sizes = [(parameter.numel(), parameter.requires_grad) for part in parts for parameter in part.parameters()]
    return 2 * sum(size for size, trained in sizes if trained) > sum(size for size, _ in sizes)


def is_watched(module: nn.Module) -> bool:
    """Whether a module has forward or backward hooks that do not belong to hf_ckpt."""
    boxes = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    hooks = (hook for box in boxes if box for hook in box.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("hf_ckpt.") for hook in hooks)


class Tiles:
    """One call of a feed-forward in chunks, with what is needed to run each chunk again.

    Args:
        state: the state of the module that owns the feed-forward.
        parts: the modules that compute it.
        run: the plain feed-forward.
        tokens: number of tokens per chunk.
    """

    def __init__(self, state: ForwardState, parts: Sequence[nn.Module], run: Run, tokens: int) -> None:
        self.state, self.run, self.tokens = state, run, tokens
        self.boxes = [module._parameters for part in parts for module in part.modules() if module._parameters]
        trained = (tensor for box in self.boxes for tensor in box.values() if tensor is not None)
        found = list({id(tensor): tensor for tensor in trained if tensor.requires_grad}.values())
        self.parameters = found
        """The trained parameters, each once."""
        numbers = {id(tensor): number for number, tensor in enumerate(found)}
        self.places = [(box, key, numbers[id(p)]) for box in self.boxes for key, p in box.items() if id(p) in numbers]
        """(dict of a module's parameters, name, number in `parameters`) of each trained parameter."""
        self.input: Any = None
        """The node that keeps the input."""
        self.report: Report | None = None
        """Called with the gradient of some tokens, if the watch checks this call."""

    def chunks(self, rows: int) -> Iterator[slice]:
        """Yield the rows of each chunk; one empty chunk if there are no rows."""
        found = [slice(start, min(start + self.tokens, rows)) for start in range(0, max(rows, 1), self.tokens)]
        one_for_many = standing_for.get()
        if one_for_many is None or len(found) < 4:
            yield from found
            return
        yield found[0]
        with one_for_many(len(found) - 2):
            yield found[1]
        yield found[-1]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run all chunks without a graph, and return the output [..., tokens, hidden size]."""
        self.device_type = hidden.device.type
        self.autocast_dtype = compat.devices.autocast_dtype(self.device_type)
        with torch.no_grad(), autocast(self.device_type, self.autocast_dtype):
            output: torch.Tensor = self.state.run(self._all, (hidden,))
        return output

    def _all(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = _as_rows(hidden)
        output: torch.Tensor | None = None
        for chunk in self.chunks(rows.shape[1]):
            made = self.run(rows[:, chunk])
            if output is None:
                output = made.new_empty(1, rows.shape[1], made.shape[-1])
            output[:, chunk] = made
        assert output is not None
        return output.view(*hidden.shape[:-1], output.shape[-1])

    def backward(
        self, hidden: torch.Tensor, gradient: torch.Tensor, wants_input: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Run each chunk again and differentiate it.

        Args:
            hidden: the input of the forward.
            gradient: the gradient of its output.
            wants_input: whether to compute the gradient of the input.

        Returns the gradient of the input, and that of each of `parameters`; None for one without.
        """
        rows, down = _as_rows(hidden), _as_rows(gradient)
        found = torch.empty_like(rows) if wants_input else None
        with self._as_in_forward() as stand_ins:
            for chunk in self.chunks(rows.shape[1]):
                given = rows[:, chunk].detach().requires_grad_(wants_input)
                made = self.run(given)
                if made.requires_grad:
                    torch.autograd.backward(made, down[:, chunk])
                if found is not None:
                    found[:, chunk] = 0.0 if given.grad is None else given.grad
                del given, made  # free them before the next chunk runs
        return None if found is None else found.view(hidden.shape), [stand_in.grad for stand_in in stand_ins]

    def compare(self, hidden: torch.Tensor, gradient: torch.Tensor, found: torch.Tensor) -> None:
        """Compute the gradient of some tokens by plain code, and report it with theirs in `found`.

        Nothing is reported if random numbers are drawn, because chunks draw different ones.
        """
        report, self.report = self.report, None
        rows = _as_rows(hidden)
        some = across_chunks(rows.shape[1], self.tokens)
        with self._as_in_forward():
            before = compat.random_state.RandomState(compat.random_state.devices_of([hidden]))
            given = rows[:, some].detach().requires_grad_()
            made = self.run(given)
            (expected,) = torch.autograd.grad(made, given, _as_rows(gradient)[:, some])
            if report is not None and not before.may_have_moved():
                report(expected, _as_rows(found)[:, some])

    @contextlib.contextmanager
    def _as_in_forward(self) -> Iterator[list[nn.Parameter]]:
        """Make the context to run chunks again, with gradients on and with the random numbers of the forward.

        Stand-in parameters with the same values replace the trained ones, so that torch sums their gradients in place,
        chunk by chunk, and hooks of the real parameters see only the sum. Yields the stand-ins.
        """
        with contextlib.ExitStack() as around:
            around.enter_context(self.state.again())
            stand_ins: dict[int, nn.Parameter] = {}
            contents = {id(box): dict(box) for box in self.boxes}
            for box, key, number in self.places:
                now = contents[id(box)][key]
                assert now is not None, "a parameter that was there is gone"
                contents[id(box)][key] = stand_ins.setdefault(number, nn.Parameter(now.detach()))
            for box in self.boxes:
                lend(box, contents[id(box)], around)
            around.enter_context(torch.enable_grad())
            # Cast weights once for all chunks; inside another autocast, the casts would be held until that one ends.
            alone = not compat.devices.autocast_is_on()
            around.enter_context(compat.devices.autocast_to(self.device_type, self.autocast_dtype, caches=alone))
            yield [stand_ins[number] for number in range(len(self.parameters))]


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tokens of all sequences as one sequence: [1, tokens, hidden size]."""
    return tensor.reshape(1, -1, tensor.shape[-1])


def tiled(tiles: Tiles, hidden: torch.Tensor) -> torch.Tensor:
    """Run a feed-forward in chunks on hidden states [..., tokens, hidden size]. Returns the output of the plain one."""
    if not (tiles.parameters or hidden.requires_grad):  # it and everything before it is frozen: keep nothing
        return tiles.forward(hidden)
    token = torch.empty(0, device=hidden.device, requires_grad=True)
    kept = _Input.apply(token, hidden)  # type: ignore[no-untyped-call]
    tiles.input = kept.grad_fn
    output: torch.Tensor = _FeedForward.apply(tiles, kept, hidden, *tiles.parameters)  # type: ignore[no-untyped-call]
    return output


class _Input(torch.autograd.Function):
    """Saves the input of a feed-forward before it runs. Its empty output connects it to the graph."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        return token.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


class _FeedForward(torch.autograd.Function):
    """A feed-forward in chunks, which are recomputed in backward."""

    @staticmethod
    def forward(ctx: Any, tiles: Tiles, kept: torch.Tensor, hidden: torch.Tensor, *parameters: Any) -> torch.Tensor:
        ctx.tiles = tiles
        return tiles.forward(hidden)

    @staticmethod
    @differentiable_once("mlp")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (hidden,) = ctx.tiles.input.saved_tensors
        in_context = ctx.tiles.state.in_context
        found, sums = in_context(ctx.tiles.backward, hidden, gradient, ctx.needs_input_grad[2])
        if ctx.tiles.report is not None and found is not None:
            in_context(ctx.tiles.compare, hidden, gradient, found)
        return None, gradient.new_empty(0), found, *sums
