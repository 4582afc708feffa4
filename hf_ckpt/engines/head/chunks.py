"""Forward and backward of the head, and of operations on its logits, a few tokens at a time.

The gradients of a sum over all tokens are computed while each chunk exists and scaled in backward, so no product is
computed twice (Hsu et al., 2024, https://arxiv.org/abs/2410.10989). Otherwise backward recomputes the chunks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from hf_ckpt import compat
from hf_ckpt.engines.seen import Seen
from hf_ckpt.engines.settings import Settings
from hf_ckpt.engines.state import ForwardState
from hf_ckpt.errors import ChangedBlockError, DoubleBackwardError

Result = TypeVar("Result")
RowOperation = Callable[[torch.Tensor], torch.Tensor]
"""An operation on logits [tokens, vocabulary] that treats each row independently."""
Work = Callable[[torch.Tensor, slice], torch.Tensor]
"""Computes a row of results for each token of a chunk, from its logits and from its place among all tokens."""
Form = str | Callable[[], torch.Tensor]
PIECE = 2**22
"""Values of a weight's gradient that are added at once, so that there is no second gradient for a chunk's product."""
SAMPLED = 4096
"""How many values of each parameter are compared before the head runs again."""


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Copy values from all over a tensor, about `SAMPLED`, as bytes: NaN equals nothing."""
    flat = tensor.detach().reshape(-1)
    step = len(flat) // SAMPLED | 1  # odd, for values of all columns
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
        self.run, self.tokens = run, tokens
        self.when_read_whole: Callable[[str], None] = lambda function: None
        """Called with the name of a function that needs all logits."""
        self.numbers = itertools.count()
        self.bypassed: set[int] = set()
        """Numbers of the logits whose own gradient would miss a part: a loss of them was computed in chunks."""
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.hidden = Seen(hidden.detach())
        self.state = ForwardState("head", module, Settings(module), whole=True, keeps_draws=False)
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
        for parameter, values in () if compat.devices.is_capturing() else self.samples:
            if not torch.equal(_sample(parameter), values):
                torch.autograd.graph.increment_version(parameter)
        return self.state.recompute(function, args)  # type: ignore[no-any-return]


def autocast(device_type: str, dtype: torch.dtype | None) -> Any:
    """Make a context with autocast to `dtype` on this type of device; None turns autocast off.

    Casts of weights are cached only while gradients are recorded: others would have no gradient when used later.
    """
    return compat.devices.autocast_to(device_type, dtype, caches=torch.is_grad_enabled())


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
    linear = call.linear
    of_hidden = torch.zeros_like(hidden) if wants_input else None
    sums: dict[int, torch.Tensor] = {}  # by the number of the parameter
    if linear is not None:
        parameter, bias = linear.weight, linear.bias
        weight = parameter.detach().to(call.autocast_dtype or parameter.dtype)
        piece = max(1, PIECE // weight.shape[1])
        if parameter.requires_grad:
            sums[0] = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))

    def run_chunk(chunk: slice) -> torch.Tensor:  # a function, so that a chunk is freed before the next one
        rows = hidden[chunk].detach()
        if linear is None:
            rows.requires_grad_(wants_input)
            with torch.enable_grad():
                logits = call.logits(rows)
            wanted = [*([rows] if wants_input else []), *call.parameters]
        else:
            logits = call.logits(rows, lambda rows: functional.linear(rows, weight, bias)).requires_grad_()
            wanted = [logits]
        with torch.enable_grad():
            result = work(logits, chunk)
        down = torch.ones_like(result) if gradient is None else gradient[chunk].to(result.dtype)
        with autocast(call.device_type, None):  # as in the backward of a plain head
            found: list[Any] = list(torch.autograd.grad(result, wanted, down, allow_unused=True))
            if linear is not None:
                of_logits = found[0]
                found = [None if p is parameter else of_logits.sum(0) for p in call.parameters]
                found = [of_logits @ weight, *found] if wants_input else found
                for start in range(0, len(weight) if parameter.requires_grad else 0, piece):
                    product = of_logits[:, start : start + piece].t() @ rows.to(weight.dtype)
                    sums[0][start : start + piece] += product
        if of_hidden is not None:
            of_hidden[chunk] = found.pop(0)
        for number, value in enumerate(found):
            if value is not None and number in sums:
                sums[number] += value
            elif value is not None:  # a copy: autograd may return one tensor for two parameters, or an expanded one
                sums[number] = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
        return result.detach().sum(dtype=torch.promote_types(result.dtype, torch.float32))

    total = functools.reduce(torch.add, map(run_chunk, call.chunks(len(hidden))))
    return total, [of_hidden, *(sums.get(number) for number in range(len(call.parameters)))]


class InChunks(torch.autograd.Function):
    """What `work` makes of the logits of all tokens, with gradients for `hidden` and for the parameters of the head.

    Args:
        call: the call of the head.
        work: what is computed from the logits of a chunk.
        form: `rows` for a row of results for each token; `sum` for their sum in at least float32; or a function that
            returns a stand-in for the rows.
        hidden: the head's input, [tokens, hidden size]; with more dimensions for a stand-in.
        parameters: the parameters of the call; none if no gradient is needed.
    """

    @staticmethod
    def forward(
        ctx: Any, call: HeadCall, work: Work, form: Form, hidden: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.call, ctx.work, ctx.form, ctx.gradients = call, work, form, None
        ctx.save_for_backward(hidden, *parameters)
        if not isinstance(form, str):
            ctx.form = "rows"  # the stand-in itself would be a reference cycle
            return form()
        if form == "sum" and any(ctx.needs_input_grad) and call.like.dtype != torch.float16:
            # Not in float16, where gradients underflow if they are computed before the loss is scaled.
            total, ctx.gradients = call.again(differentiated, call, work, hidden, ctx.needs_input_grad[3])
            return total
        chunks = call.chunks(len(hidden))
        rows = call.again(lambda: torch.cat([work(call.logits(hidden[chunk]), chunk) for chunk in chunks]))
        return rows.sum(dtype=torch.promote_types(rows.dtype, torch.float32)) if form == "sum" else rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # `create_graph=True` turns gradients on. torch's own `once_differentiable` raises nothing if the incoming
        # gradient is a constant, such as that of a loss, and second derivatives would be wrong.
        if torch.is_grad_enabled():
            raise DoubleBackwardError
        hidden, *parameters = ctx.saved_tensors
        flat = hidden.reshape(-1, hidden.shape[-1])
        trailing = () if ctx.form == "sum" else gradient.shape[hidden.dim() - 1 :]
        rows = (gradient.expand(len(flat)) if ctx.form == "sum" else gradient).reshape(len(flat), *trailing)
        found, ctx.gradients = ctx.gradients, None
        if found is None:  # rows, float16, or a second backward
            _, found = ctx.call.again(differentiated, ctx.call, ctx.work, flat, ctx.needs_input_grad[3], rows)
        else:
            found = [None if value is None else value.mul_(gradient) for value in found]
        for number, (value, like) in enumerate(zip(found, [hidden, *parameters], strict=True)):
            found[number] = None if value is None else value.to(like.dtype).view_as(like)
        return None, None, None, *found
