"""Forward and backward of the head, and of operations on its logits, a few tokens at a time.

The gradients of a sum over all tokens are computed while each chunk exists and scaled in backward, so no product is
computed twice (Hsu et al., 2024, https://arxiv.org/abs/2410.10989). Otherwise backward recomputes the chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from hf_ckpt import compat
from hf_ckpt.engines.seen import Seen
from hf_ckpt.engines.settings import Settings
from hf_ckpt.engines.snapshot import Snapshot
from hf_ckpt.engines.state import ForwardState
from hf_ckpt.errors import ChangedBlockError, DoubleBackwardError

Result = TypeVar("Result")
RowOperation = Callable[[torch.Tensor], torch.Tensor]
"""An operation on logits [tokens, vocabulary] that treats each row independently."""
Work = Callable[[torch.Tensor, slice], torch.Tensor]
"""Computes a row of results for each token of a chunk, from its logits and from its place among all tokens."""
PIECE = 2**22
"""Values of a weight's gradient that are added at once, so that there is no second gradient for a chunk's product."""
SAMPLED = 4096
"""How many values of each parameter are compared before the head runs again."""


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Copy values from all over a tensor, about `SAMPLED`, as bytes: NaN equals nothing."""
    flat = tensor.detach().reshape(-1)
    # Odd, for values of all columns: an even step and an even width would meet half of them at most.
    step = len(flat) // SAMPLED | 1
    return flat[::step].clone().view(torch.uint8)


class HeadCall:
    """One call of the head, and how to run it again on some of its tokens, as the head was at the call.

    Logits are computed where they are used, and by then the head may be another: an optimizer has stepped, adapters
    were switched, or `torch.func.functional_call` has ended and has taken its weights with it. `ForwardState` restores
    what can be restored. Values that are gone are refused.

    Args:
        module: the head.
        run: its own forward.
        hidden: its input, [..., hidden size].
        tokens: number of tokens per chunk.
    """

    def __init__(self, module: nn.Module, run: RowOperation, hidden: torch.Tensor, tokens: int) -> None:
        self.run = run
        self.tokens = tokens
        self.when_read_whole: Callable[[str], None] = lambda function: None
        """Called with the name of a function that needs all logits."""
        self.is_bypassed = False
        """Whether the logits' own gradients would miss a part: a loss of them was computed in chunks, and sent its
        gradients straight to the hidden states. `torch.autograd.grad(loss, logits)` then raises an error."""
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.hidden = Seen(hidden.detach())
        # It never runs the head by `ForwardState.run`: which buffers a head writes is not learned, so all are copied.
        snapshot = Snapshot("head", module, Settings(module), parameters_stay=True, may_write_weights=False)
        self.state = ForwardState("head", snapshot, keeps_draws=False)
        # Quantised weights have no plain values to compare. They are frozen, so no optimizer changes them.
        self.samples = [(p, _sample(p)) for p in module.parameters() if type(p.data) is torch.Tensor]
        """Each parameter whose values can be read, and some of its values at the call."""
        self.linear: nn.Linear | None = None
        """The head, if it is a linear layer whose weight is neither quantised nor computed."""
        if isinstance(module, nn.Linear) and type(module) is nn.Linear:
            plain = type(module.weight.data) is torch.Tensor or compat.torch.is_fake(module.weight.data)
            self.linear = module if plain else None
        self.device_type = hidden.device.type
        self.autocast_dtype = compat.devices.autocast_dtype(self.device_type)
        one = 0 if self.linear is not None else 1  # some adapters cannot reshape a tensor without tokens
        with torch.no_grad():
            logits = self.logits(hidden.reshape(-1, hidden.shape[-1])[:one])
        self.like = logits.new_empty(0, logits.shape[-1])
        """Logits of no tokens, for their type and device."""

    def logits(self, hidden: torch.Tensor, run: RowOperation | None = None) -> torch.Tensor:
        """Run the head on `hidden`, or `run` in its place, under the autocast of its call."""
        with autocast(self.device_type, self.autocast_dtype):
            return (run or self.run)(hidden)

    def chunks(self, rows: int) -> Iterator[slice]:
        """Yield the rows of each chunk; one empty chunk if there are no rows."""
        for start in range(0, max(rows, 1), self.tokens):
            yield slice(start, min(start + self.tokens, rows))

    def again(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call `function`, which runs the head, in the state of this call.

        Raises `ChangedBlockError` if the input of the head, or a parameter that it uses, was overwritten since.
        """
        if self.hidden.is_overwritten:
            raise ChangedBlockError(self.state.name, "its input was overwritten")
        # Fused optimizers, and changes of `parameter.data` in place, leave the version where it was. A comparison waits
        # for the device, which is not possible while a CUDA graph is captured.
        samples = [] if compat.devices.is_capturing() else self.samples
        for parameter, values in samples:
            if not torch.equal(_sample(parameter), values):
                torch.autograd.graph.increment_version(parameter)  # so that `ForwardState` refuses its use
        return self.state.recompute(function, args)  # type: ignore[no-any-return]


def autocast(device_type: str, dtype: torch.dtype | None) -> Any:
    """Make a context with autocast to `dtype` on this type of device; None turns autocast off.

    Casts of weights are cached only while gradients are recorded: others would have no gradient when used later.
    """
    return compat.devices.autocast_to(device_type, dtype, caches=torch.is_grad_enabled())


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which to add numbers of a type: sums of many 16-bit numbers lose small ones."""
    return torch.promote_types(dtype, torch.float32)


def differentiated(
    call: HeadCall, work: Work, hidden: torch.Tensor, wants_input: bool, gradient: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Run forward and backward of all chunks.

    Args:
        call: the call of the head.
        work: what is computed from the logits.
        hidden: the head's input, [tokens, hidden size].
        wants_input: whether the gradient of `hidden` is needed.
        gradient: the gradient of the results, a row for each token; None for ones.

    Returns:
        the sum of all results, and the gradients of `hidden` and of the parameters of the call, with None for those
        without. Gradients of parameters are summed over chunks in at least float32.
    """
    of_hidden = torch.zeros_like(hidden) if wants_input else None
    gradients = _Gradients(call, work, gradient)

    def run_chunk(chunk: slice) -> torch.Tensor:  # a function, so that a chunk is freed before the next one
        rows = hidden[chunk].detach()
        of_rows = None if of_hidden is None else of_hidden[chunk]
        run = gradients.by_autograd if call.linear is None else gradients.of_linear
        result = run(chunk, rows, of_rows).detach()
        return result.sum(dtype=at_least_float32(result.dtype))

    total = functools.reduce(torch.add, map(run_chunk, call.chunks(len(hidden))))
    return total, [of_hidden, *gradients.sums]


class _Gradients:
    """The gradients of a head's parameters, summed over the chunks that run.

    Args:
        call: the call of the head.
        work: what is computed from the logits.
        gradient: the gradient of the results, a row for each token; None for ones.
    """

    def __init__(self, call: HeadCall, work: Work, gradient: torch.Tensor | None) -> None:
        self.call = call
        self.work = work
        self.gradient = gradient
        self.sums: list[torch.Tensor | None] = [None] * len(call.parameters)
        """For each parameter of the call, the sum over the chunks so far."""
        if call.linear is not None:
            weight = call.linear.weight.detach()
            self.weight = weight.to(call.autocast_dtype or weight.dtype)  # cast once for all chunks

    def by_autograd(self, chunk: slice, rows: torch.Tensor, of_rows: torch.Tensor | None) -> torch.Tensor:
        """Run a chunk of any head, and return the results. The gradient of its `rows` is written to `of_rows`."""
        wanted: list[torch.Tensor] = list(self.call.parameters)
        if of_rows is not None:
            wanted.append(rows.requires_grad_())
        with torch.enable_grad():
            result = self.work(self.call.logits(rows), chunk)
        gradients = self._differentiate(result, chunk, wanted)
        if of_rows is not None:
            of_rows.copy_(gradients.pop())
        for number, gradient in enumerate(gradients):
            self._add(number, gradient)
        return result

    def of_linear(self, chunk: slice, rows: torch.Tensor, of_rows: torch.Tensor | None) -> torch.Tensor:
        """As `by_autograd`, for a linear layer. Autograd would make a whole gradient of its weight for each chunk."""
        linear = self.call.linear
        assert linear is not None
        logits = self.call.logits(rows, lambda rows: functional.linear(rows, self.weight, linear.bias))
        logits.requires_grad_()  # a leaf: autograd goes no further, and saves nothing of the product
        with torch.enable_grad():
            result = self.work(logits, chunk)
        (of_logits,) = self._differentiate(result, chunk, [logits])
        with autocast(self.call.device_type, None):
            if of_rows is not None:
                of_rows.copy_(of_logits @ self.weight)
            for number, parameter in enumerate(self.call.parameters):
                if parameter is linear.weight:
                    self._add_product(number, of_logits, rows.to(self.weight.dtype))
                else:  # the bias
                    self._add(number, of_logits.sum(0))
        return result

    def _differentiate(self, result: torch.Tensor, chunk: slice, wanted: list[torch.Tensor]) -> list[Any]:
        """Return the gradients of a chunk's results for `wanted`; None for those that the results do not depend on."""
        down = torch.ones_like(result) if self.gradient is None else self.gradient[chunk].to(result.dtype)
        with autocast(self.call.device_type, None):  # as in the backward of a plain head
            return list(torch.autograd.grad(result, wanted, down, allow_unused=True))

    def _add(self, number: int, gradient: torch.Tensor | None) -> None:
        total = self.sums[number]
        if gradient is None:  # the chunk does not depend on the parameter, such as one of an adapter that is off
            return
        if total is not None:
            total += gradient
        else:  # a copy: autograd may return one tensor for two parameters, or an expanded one
            self.sums[number] = gradient.to(at_least_float32(gradient.dtype), copy=True)

    def _add_product(self, number: int, of_logits: torch.Tensor, rows: torch.Tensor) -> None:
        """Add the weight's gradient, [vocabulary, hidden size], some words at a time; see `PIECE`."""
        total = self.sums[number]
        if total is None:
            total = torch.zeros_like(self.weight, dtype=at_least_float32(self.weight.dtype))
            self.sums[number] = total
        words = max(1, PIECE // self.weight.shape[1])
        for start in range(0, len(self.weight), words):
            total[start : start + words] += of_logits[:, start : start + words].t() @ rows


class InChunks(torch.autograd.Function):
    """What `work` makes of the logits of all tokens, with gradients for `hidden` and for the parameters of the head.

    Args:
        call: the call of the head.
        work: what is computed from the logits of a chunk.
        sums: whether to return the sum of the results, in at least float32, in place of a row for each token.
        stand_in: returns a tensor in place of the rows, which are then not computed; None to compute them.
        hidden: the head's input, [tokens, hidden size]; with more dimensions for a stand-in.
        parameters: the parameters of the call; none if no gradient is needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: HeadCall,
        work: Work,
        sums: bool,
        stand_in: Callable[[], torch.Tensor] | None,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.call = call
        ctx.work = work
        ctx.sums = sums
        ctx.gradients = None
        # The parameters, too: autograd refuses a backward after they were changed in place, as with a plain head.
        ctx.save_for_backward(hidden, *parameters)
        if stand_in is not None:  # not kept: it would be a reference cycle
            return stand_in()
        if sums and any(ctx.needs_input_grad) and call.like.dtype != torch.float16:
            # Not in float16, where gradients underflow if they are computed before the loss is scaled.
            total, ctx.gradients = call.again(differentiated, call, work, hidden, ctx.needs_input_grad[4])
            return total
        chunks = call.chunks(len(hidden))
        rows = call.again(lambda: torch.cat([work(call.logits(hidden[chunk]), chunk) for chunk in chunks]))
        return rows.sum(dtype=at_least_float32(rows.dtype)) if sums else rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # `create_graph=True` turns gradients on. torch's own `once_differentiable` raises nothing if the incoming
        # gradient is a constant, such as that of a loss, and second derivatives would be wrong.
        if torch.is_grad_enabled():
            raise DoubleBackwardError
        hidden, *parameters = ctx.saved_tensors
        flat = hidden.reshape(-1, hidden.shape[-1])
        gradients = ctx.gradients
        ctx.gradients = None  # scaled in place below, so a second backward computes them anew
        if gradients is not None:
            gradients = [None if each is None else each.mul_(gradient) for each in gradients]
        else:  # rows, float16, or a second backward
            if ctx.sums:
                rows = gradient.expand(len(flat))
            else:
                rows = gradient.reshape(len(flat), *gradient.shape[hidden.dim() - 1 :])
            _, gradients = ctx.call.again(differentiated, ctx.call, ctx.work, flat, ctx.needs_input_grad[4], rows)
        for number, (value, like) in enumerate(zip(gradients, [hidden, *parameters], strict=True)):
            gradients[number] = None if value is None else value.to(like.dtype).view_as(like)
        return None, None, None, None, *gradients
