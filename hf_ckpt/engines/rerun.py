"""The watch for blocks that hide what their backward gets: compare their outputs and gradients with a second run.

A compiled block keeps and recomputes tensors inside its graph, and feed-forwards in chunks are differentiated as they
run. For such blocks, the watch runs the block again in backward, as plain code. Its outputs and the gradient of its
input may differ from the first run only by rounding.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from hf_ckpt import compat
from hf_ckpt.engines.arguments import as_given
from hf_ckpt.engines.causes import buffers_put_back
from hf_ckpt.engines.differences import has_graph, share_of_difference
from hf_ckpt.engines.watch import Check

Report = Callable[[torch.Tensor, torch.Tensor], None]
"""Called with the gradient of some tokens, as plain code computes it and as chunks compute it."""

ROUNDING, ROUNDING_16 = 1e-4, 5e-2
"""Tolerated difference of results and gradients, in float32 and in 16-bit types: the norm of the difference over the
norm. In 16 bits, plain code deviates from the exact result by as much."""
MOST_HIDDEN = 48
"""The most bytes that a plain block holds, in multiples of the size of its hidden states."""


class Rerun(Check):
    """The check of one forward of a block by a second run; see `Check` for the arguments."""

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run `function(fn, *args)`, where `fn` is the block's own forward and `args[0]` are the hidden states."""
        self.put_back(self)
        if not self.is_first_call():
            return self.function(fn, *args)
        hidden = args[0] if args else None
        if (
            not torch.is_grad_enabled()
            or compat.is_compiling()
            or not isinstance(hidden, torch.Tensor)
            or not hidden.requires_grad
            or compat.is_fake(hidden)
            or compat.is_seen_by_modes()  # then the block runs as plain code
        ):
            self.done(self)
            return self.function(fn, *args)
        if hidden.nbytes * MOST_HIDDEN > self.room_bytes:
            self.saved = self.left_out = 1
            self.done(self)
            return self.function(fn, *args)
        autocast = compat.autocast_now()
        given = hidden.clone()  # its gradient comes from this block alone
        plain_fn, plain_args = as_given(fn, args, ran=True)
        context = compat.copied_context()
        output = self.function(fn, given, *args[1:])
        if not getattr(self.function, "in_graph", False):
            return output  # it ran as plain code, because it does not compile or has hooks
        values = {place: value.detach() for place, value in enumerate(compat.tree_leaves(output)) if has_graph(value)}
        arrived: dict[int, torch.Tensor] = {}

        def arrives(place: int, gradient: torch.Tensor | None) -> None:
            if gradient is not None:  # it is None if the loss does not depend on this result
                arrived[place] = gradient.detach()

        for place in values:
            self.on_gradient(compat.tree_leaves(output)[place], functools.partial(arrives, place))

        def compare(gradient: torch.Tensor | None) -> None:
            if self._ends or gradient is None:  # a second backward, or one that does not reach the block
                return
            self._ends = True
            self.saved = len(arrived) + 1
            with torch.enable_grad(), compat.unseen_by_modes(), contextlib.ExitStack() as around:
                state = compat.RandomState(compat.devices_of([given]))
                around.enter_context(state.kept())
                around.enter_context(buffers_put_back(self.module))
                around.enter_context(contextlib.suppress(RuntimeError))  # no memory for it, or its inputs were changed
                around.enter_context(compat.autocast_as(autocast))
                plain = given.detach().requires_grad_()
                again = compat.tree_leaves(plain_fn(plain, *plain_args[1:]))
                if not state.may_have_moved():  # a graph draws other numbers than plain code
                    outputs = [again[place] for place in arrived]
                    (expected,) = torch.autograd.grad(outputs, plain, list(arrived.values()))
                    for place in arrived:
                        self._near("output", again[place].detach(), values[place])
                    self._near("gradient of the input", expected, gradient)
            self.left_out = self.saved - self.compared
            self.done(self)

        self.on_gradient(given, lambda gradient: context.run(compare, gradient))
        return output

    def _near(self, what: str, expected: torch.Tensor, found: torch.Tensor) -> None:
        self.compared += 1
        share = beyond_rounding(expected, found)
        if share is not None:
            text = f"differs from that of plain code by {share:.2g} of its norm"
            cause = "The graph is not that of the block: hooks or flags inside may have changed since it was compiled."
            self.note(len(self.differences), what, tuple(expected.shape), text, share, cause=cause)


def beyond_rounding(expected: torch.Tensor, found: torch.Tensor) -> float | None:
    """Return the norm of the difference over the norm of `expected`; None if rounding explains it."""
    share = share_of_difference(expected, found)
    small = expected.element_size() < 4 or compat.autocast_is_on()
    return share if share > (ROUNDING_16 if small else ROUNDING) else None


def across_chunks(rows: int, chunk: int, most: int = 64) -> slice:
    """Return up to `most` of `rows` rows: those around the border between the first two chunks, or the last ones."""
    end = min(rows, chunk + most // 2)
    return slice(max(0, end - most), end)
