"""Forward and backward of the head, and of operations on its logits, a few tokens at a time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_ckpt import compat
from hf_ckpt.engines.check import Report, across_chunks
from hf_ckpt.errors import DoubleBackwardError, HfCkptError

RowOperation = Callable[[torch.Tensor], torch.Tensor]
"""An operation on logits [tokens, vocabulary] that treats each row independently."""


class Source:
    """One call of the head, and how to run it again.

    Args:
        module: the head.
        run: its own forward.
        tokens: number of tokens per chunk.
        like: logits of no tokens, for their type and device.
    """

    def __init__(self, module: nn.Module, run: RowOperation, tokens: int, like: torch.Tensor) -> None:
        self.dtype = like.dtype
        self.run = run
        self.tokens = tokens
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.versions = [(p, version_of(p)) for p in module.parameters()]
        """All parameters, with their in-place versions at the call."""
        self.report: Report | None = None
        """Called with the gradient of some tokens, if the watch checks this call."""
        self.taken = False
        """Whether a result was computed from the logits without them in its graph, so that their gradient is lost."""
        self.linear = _plain_projection(module)
        """The head, if it is a plain linear layer."""
        self.device_type = like.device.type
        self.autocast_dtype = compat.devices.autocast_dtype(self.device_type)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the plain head on `hidden`, under the autocast of its call."""
        with autocast(self.device_type, self.autocast_dtype):
            return self.run(hidden)

    def check(self) -> None:
        """Raise `HfCkptError` if a parameter of the head has changed since its call."""
        if any(version_of(parameter) != version for parameter, version in self.versions):
            raise HfCkptError(
                "logits of a training forward were asked for after the parameters of the head had changed (by an "
                "optimizer's step?), which the chunked head would compute with the new ones. Ask for them before, or "
                'use "head": "full".'
            )


def _plain_projection(module: nn.Module) -> nn.Linear | None:
    """Return the module if it is a linear layer without reparametrisation or quantisation; else None."""
    if type(module) is not nn.Linear or {name for name, _ in module.named_parameters()} - {"weight", "bias"}:
        return None
    plain = isinstance(module._parameters.get("weight"), nn.Parameter) and type(module.weight.data) is torch.Tensor
    return module if plain or compat.torch.is_fake(module.weight.data) else None


def autocast(device_type: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Make a context with autocast to `dtype` on this type of device; None turns autocast off.

    Casts of weights are cached only while gradients are recorded: others would have no gradient when used later.
    """
    return compat.devices.autocast_to(device_type, dtype, caches=torch.is_grad_enabled())


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an autograd Function that returns gradients without a graph.

    It raises `DoubleBackwardError` under `create_graph=True`, which turns gradients on inside a backward. torch's own
    `once_differentiable` raises nothing if the incoming gradient is a constant, such as that of a loss. The returned
    gradients then count as constants, too, and second derivatives are wrong.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise DoubleBackwardError
        return backward(ctx, *gradients)

    return once


def version_of(tensor: torch.Tensor) -> int:
    """Return the in-place version of a tensor, which its views share; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def applied(operations: Sequence[RowOperation], values: torch.Tensor) -> torch.Tensor:
    """Apply the operations to `values`, one after another."""
    for operation in operations:
        values = operation(values)
    return values


class Job:
    """The work on the logits of each chunk.

    Args:
        source: the call of the head that computes them.
        operations: operations on each row, which come first.
        work: the function to call then: (logits, rows of `beside`) -> a row of results for each token.
        beside: one row for each token, such as its label; None if there is none.
    """

    def __init__(
        self,
        source: Source,
        operations: Sequence[RowOperation],
        work: Callable[..., torch.Tensor],
        beside: torch.Tensor | None,
    ) -> None:
        self.source = source
        self.operations = tuple(operations)
        self.work = work
        self.beside = beside
        self.autocast_dtype = compat.devices.autocast_dtype(source.device_type)
        self.result: torch.dtype | None = None
        """Type of the results; None before the first chunk."""
        self.needs_scale = source.dtype == torch.float16
        """Whether to compute gradients only once the scale of the loss is known: in float16 they would underflow."""

    def chunks(self, rows: int) -> Iterator[slice]:
        """Yield the rows of each chunk; one empty chunk if there are no rows."""
        for start in range(0, max(rows, 1), self.source.tokens):
            yield slice(start, min(start + self.source.tokens, rows))

    def of(self, logits: torch.Tensor, chunk: slice) -> torch.Tensor:
        """Do the work on the logits of one chunk, under the autocast of the user's call."""
        with autocast(self.source.device_type, self.autocast_dtype):
            found = self.work(applied(self.operations, logits), None if self.beside is None else self.beside[chunk])
        self.result = found.dtype
        return found

    def compare(self, hidden: torch.Tensor, gradient: torch.Tensor, found: torch.Tensor | None) -> None:
        """Compute the gradient of some tokens by plain code, and report it with theirs in `found`.

        Args:
            hidden: the head's input, [tokens, hidden size].
            gradient: the gradient of the results: one number for all of them, or one for each token.
            found: the gradient of `hidden`.
        """
        report, self.source.report = self.source.report, None
        if report is None or found is None:
            return
        some = across_chunks(len(hidden), self.source.tokens)
        given = hidden[some].detach().requires_grad_()
        with torch.enable_grad():
            result = self.of(self.source.logits(given), some)
        down = gradient[some] if gradient.dim() else gradient.to(result.dtype).expand_as(result)
        (expected,) = torch.autograd.grad(result, given, down)
        with autocast(self.source.device_type, self.source.autocast_dtype):  # the tolerance for rounding depends on it
            report(expected, found[some])


class Gradients:
    """Gradients of the head's input and parameters, the latter summed over chunks in at least float32.

    Raises `HfCkptError` if a parameter has changed since the head was called.
    """

    def __init__(self, job: Job, hidden: torch.Tensor, wants_input: bool) -> None:
        job.source.check()
        self.job = job
        self.hidden = torch.zeros_like(hidden) if wants_input else None
        self.sums: dict[int, torch.Tensor] = {}
        """Gradients by number of the parameter in `Source.parameters`."""
        self.weights: tuple[torch.Tensor, torch.Tensor | None] | None = None
        """(weight, bias) of a plain linear layer, in its computing type; None for other heads."""
        linear = job.source.linear
        if linear is not None:
            dtype = job.source.autocast_dtype or linear.weight.dtype
            self.weights = linear.weight.to(dtype), None if linear.bias is None else linear.bias.to(dtype)

    def add(self, rows: torch.Tensor, chunk: slice, gradient: torch.Tensor | None) -> torch.Tensor:
        """Run a chunk and add its gradients. Returns the results of its rows.

        Args:
            rows: the head's input for the chunk, [tokens, hidden size].
            chunk: the position of these rows among all rows.
            gradient: the gradient of the results: one number for all of them, or one for each; None for 1.
        """
        source = self.job.source
        if self.weights is not None:
            rows = rows.to(self.weights[0].dtype)
            logits = functional.linear(rows, *self.weights).requires_grad_()
            wanted = [logits]
        else:
            given = rows.detach().requires_grad_(self.hidden is not None)
            with torch.enable_grad():
                logits = source.logits(given)
            wanted = [*([given] if self.hidden is not None else []), *source.parameters]
        with torch.enable_grad():
            result = self.job.of(logits, chunk)
        down = torch.ones_like(result) if gradient is None else gradient.to(result.dtype).expand_as(result)
        found = list(torch.autograd.grad(result, wanted, down, allow_unused=True))
        if self.weights is not None:
            self._through(rows, chunk, found[0])
        else:
            if self.hidden is not None:
                self.hidden[chunk] = found.pop(0)
            memory: set[int] = set()
            for number, value in enumerate(found):
                if value is not None:  # autograd may return one tensor for two parameters, or an expanded one
                    key = value.untyped_storage()._cdata
                    self._sum(number, value if key not in memory and value.is_contiguous() else value.clone())
                    memory.add(key)
        return result.detach()

    def _through(self, rows: torch.Tensor, chunk: slice, gradient: torch.Tensor) -> None:
        """Run backward through a plain linear layer, and sum the gradient of its weight in place."""
        linear, weights = self.job.source.linear, self.weights
        assert linear is not None
        assert weights is not None
        if self.hidden is not None:
            self.hidden[chunk] = torch.mm(gradient, weights[0])
        for number, parameter in enumerate(self.job.source.parameters):
            if parameter is not linear.weight:
                self._sum(number, gradient.sum(0))
            elif gradient.dtype.itemsize < 4:  # in pieces, because the product has 16 bits and the sum has 32
                if number not in self.sums:
                    self.sums[number] = torch.zeros_like(parameter, dtype=torch.float32)
                for piece in _pieces(self.sums[number]):
                    self.sums[number][piece] += torch.mm(gradient[:, piece].t(), rows)
            elif number in self.sums:
                self.sums[number].addmm_(gradient.t(), rows)
            else:
                self.sums[number] = torch.mm(gradient.t(), rows)

    def _sum(self, number: int, value: torch.Tensor) -> None:
        if number in self.sums:
            self.sums[number] += value
        else:
            self.sums[number] = value.float() if value.dtype.itemsize < 4 else value

    def done(self) -> None:
        """Free the weights in the computing type, after the last chunk."""
        self.weights = None

    def of_parameters(self) -> list[torch.Tensor | None]:
        """Return the gradient of each of `Source.parameters`, in order; None for one without."""
        return [self.sums.get(number) for number in range(len(self.job.source.parameters))]


def _scaled(gradient: torch.Tensor | None, by: torch.Tensor, wanted: torch.dtype) -> torch.Tensor | None:
    """Return `gradient * by` in type `wanted`: in place if it has that type already, else computed piece by piece."""
    if gradient is None:
        return None
    if gradient.dtype == wanted:
        return gradient.mul_(by)
    made = torch.empty_like(gradient, dtype=wanted)
    for piece in _pieces(gradient):
        made[piece] = gradient[piece] * by
    return made


def _pieces(tensor: torch.Tensor) -> Iterator[slice]:
    """Yield runs of rows of about four million values each."""
    rows = max(1, 2**22 * len(tensor) // max(1, tensor.numel()))
    return (slice(start, start + rows) for start in range(0, len(tensor), rows))


class Total(torch.autograd.Function):
    """The sum of the losses of all rows, in at least float32. Gradients are computed while each chunk exists."""

    @staticmethod
    def forward(ctx: Any, job: Job, hidden: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.job, ctx.gradients = job, None
        ctx.save_for_backward(hidden, *parameters)
        if any(ctx.needs_input_grad) and not job.needs_scale:
            total, ctx.gradients = _differentiated(job, hidden, ctx.needs_input_grad[1])
            return total
        chunks = (job.of(job.source.logits(hidden[chunk]), chunk) for chunk in job.chunks(len(hidden)))
        return _added(_sum_of(losses) for losses in chunks)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, *parameters = ctx.saved_tensors
        # If no token has a label, the mean is 0 / 0, so its gradient is NaN. The plain head's is 0 then.
        gradient = torch.where(gradient.isfinite(), gradient, 0.0) if not len(hidden) else gradient
        gradients, ctx.gradients = ctx.gradients, None
        scale = gradient
        if gradients is None:  # a second backward, or one that needs the scale (float16)
            _, gradients = _differentiated(ctx.job, hidden, ctx.needs_input_grad[1], gradient)
            gradient = torch.ones_like(gradient)
        sums = zip([gradients.hidden, *gradients.of_parameters()], [hidden, *parameters], strict=True)
        found = [_scaled(value, gradient, like.dtype) for value, like in sums]
        ctx.job.compare(hidden, scale, found[0])
        return None, *found


def _differentiated(
    job: Job, hidden: torch.Tensor, wants_input: bool, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, Gradients]:
    """Return the sum of the losses of all rows, and its gradients times `scale` (None for 1)."""
    gradients = Gradients(job, hidden, wants_input)
    total = _added(_sum_of(gradients.add(hidden[chunk], chunk, scale)) for chunk in job.chunks(len(hidden)))
    gradients.done()
    return total, gradients


def _sum_of(losses: torch.Tensor) -> torch.Tensor:
    return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))


def _added(parts: Iterator[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, parts)


class Rows(torch.autograd.Function):
    """A row of results for every token; the chunks are recomputed in backward."""

    @staticmethod
    def forward(ctx: Any, job: Job, hidden: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.job = job
        ctx.save_for_backward(hidden, *parameters)
        return torch.cat([job.of(job.source.logits(hidden[chunk]), chunk) for chunk in job.chunks(len(hidden))])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, *parameters = ctx.saved_tensors
        gradients = Gradients(ctx.job, hidden, ctx.needs_input_grad[1])
        for chunk in ctx.job.chunks(len(hidden)):
            gradients.add(hidden[chunk], chunk, gradient[chunk])
        ctx.job.compare(hidden, gradient, gradients.hidden)
        found = zip(gradients.of_parameters(), parameters, strict=True)
        return None, gradients.hidden, *(None if value is None else value.to(p.dtype) for value, p in found)
