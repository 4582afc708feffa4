"""Tokens a few at a time through the head, what comes behind it, and back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError

RowOperation = Callable[[torch.Tensor], torch.Tensor]
"""On the logits of each token by itself."""


class Source:
    """One call of the head: what it was given, and how it is run."""

    def __init__(self, module: nn.Module, run: RowOperation, tokens: int, like: torch.Tensor) -> None:
        self.dtype = like.dtype
        """Of its logits."""
        self.run = run
        """The module's own forward."""
        self.tokens = tokens
        """Tokens a chunk."""
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.versions = [(p, version_of(p)) for p in module.parameters()]
        self.taken = False
        """Whether something with a graph was made from its logits that they themselves are not part of."""
        self.linear = _plain_projection(module)
        self.device_type = like.device.type
        self.autocast_dtype = compat.autocast_dtype(self.device_type)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The plain head, under the autocast that it was called under."""
        with autocast(self.device_type, self.autocast_dtype):
            return self.run(hidden)

    def check(self) -> None:
        """Raises `HfCkptError` when its parameters are not those any more that it was called with."""
        if any(version_of(parameter) != version for parameter, version in self.versions):
            raise HfCkptError(
                "logits of a training forward were asked for after the parameters of the head had changed (by an "
                "optimizer's step?), which the chunked head would compute with the new ones. Ask for them before, or "
                'use "head": "full".'
            )


def _plain_projection(module: nn.Module) -> nn.Linear | None:
    """The module, if all it does is multiply by its weight and add its bias: not reparametrised, not quantised."""
    if type(module) is not nn.Linear or {name for name, _ in module.named_parameters()} - {"weight", "bias"}:
        return None
    plain = isinstance(module._parameters.get("weight"), nn.Parameter) and type(module.weight.data) is torch.Tensor
    return module if plain or compat.is_fake(module.weight.data) else None


def autocast(device_type: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """That autocast. Weights that it casts where no gradients are recorded are not kept: they would have none later."""
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=torch.is_grad_enabled())


def version_of(tensor: torch.Tensor) -> int:
    """How often it was changed in place; views share it."""
    return 0 if tensor.is_inference() else tensor._version


def applied(operations: Sequence[RowOperation], values: torch.Tensor) -> torch.Tensor:
    for operation in operations:
        values = operation(values)
    return values


class Job:
    """What is done with the values of each chunk."""

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
        """One row for each token: labels, places."""
        self.autocast_dtype = compat.autocast_dtype(source.device_type)
        self.result: torch.dtype | None = None
        """Of what came out, once something did."""
        self.needs_scale = source.dtype == torch.float16
        """Whether gradients can only be taken once the loss is scaled: float16 has no room for others."""

    def chunks(self, rows: int) -> Iterator[slice]:
        """The tokens of each chunk; one without any where there are none."""
        for start in range(0, max(rows, 1), self.source.tokens):
            yield slice(start, min(start + self.source.tokens, rows))

    def of(self, logits: torch.Tensor, chunk: slice) -> torch.Tensor:
        """The work on one chunk, under the autocast that it was asked for under."""
        with autocast(self.source.device_type, self.autocast_dtype):
            found = self.work(applied(self.operations, logits), None if self.beside is None else self.beside[chunk])
        self.result = found.dtype
        return found


class Gradients:
    """Of the head's input and of its parameters, summed up over chunks; float32 where the parameters have less."""

    def __init__(self, job: Job, hidden: torch.Tensor, wants_input: bool) -> None:
        job.source.check()
        self.job = job
        self.hidden = torch.zeros_like(hidden) if wants_input else None
        self.sums: dict[int, torch.Tensor] = {}
        """Number of a parameter -> its gradient."""
        self.weights: tuple[torch.Tensor, torch.Tensor | None] | None = None
        """Of a plain projection, in the type that it is computed in."""
        linear = job.source.linear
        if linear is not None:
            dtype = job.source.autocast_dtype or linear.weight.dtype
            self.weights = linear.weight.to(dtype), None if linear.bias is None else linear.bias.to(dtype)

    def add(self, rows: torch.Tensor, chunk: slice, gradient: torch.Tensor | None) -> torch.Tensor:
        """Run a chunk, and take its gradients; `gradient` is that of its result, or of each of them: 1 unless given."""
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
                if value is not None:  # autograd may give one tensor for two parameters, or an expanded one
                    key = value.untyped_storage()._cdata
                    self._sum(number, value if key not in memory and value.is_contiguous() else value.clone())
                    memory.add(key)
        return result.detach()

    def _through(self, rows: torch.Tensor, chunk: slice, gradient: torch.Tensor) -> None:
        """Back through the projection, the gradient of its weight summed up where it lies."""
        linear, weights = self.job.source.linear, self.weights
        assert linear is not None
        assert weights is not None
        if self.hidden is not None:
            self.hidden[chunk] = torch.mm(gradient, weights[0])
        for number, parameter in enumerate(self.job.source.parameters):
            if parameter is not linear.weight:
                self._sum(number, gradient.sum(0))
            elif gradient.dtype.itemsize < 4:  # piece by piece: what is made is added to what has twice its size
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
        """No more chunks will come."""
        self.weights = None

    def of_parameters(self) -> list[torch.Tensor | None]:
        """In their order."""
        return [self.sums.get(number) for number in range(len(self.job.source.parameters))]


def _scaled(gradient: torch.Tensor | None, by: torch.Tensor, wanted: torch.dtype) -> torch.Tensor | None:
    """The product, in place where the type is right already, and else made piece by piece."""
    if gradient is None:
        return None
    if gradient.dtype == wanted:
        return gradient.mul_(by)
    made = torch.empty_like(gradient, dtype=wanted)
    for piece in _pieces(gradient):
        made[piece] = gradient[piece] * by
    return made


def _pieces(tensor: torch.Tensor) -> Iterator[slice]:
    """Runs of rows that hold some millions of values."""
    rows = max(1, 2**22 * len(tensor) // max(1, tensor.numel()))
    return (slice(start, start + rows) for start in range(0, len(tensor), rows))


class Total(torch.autograd.Function):
    """The sum of all rows' losses, float32 at least, and its gradients while each chunk is there."""

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
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, *parameters = ctx.saved_tensors
        # Where no token has a label the loss is 0 / 0, and no gradient comes of it.
        gradient = torch.where(gradient.isfinite(), gradient, 0.0) if not len(hidden) else gradient
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:  # a second backward (the first one had them), or one that has to know the scale
            _, gradients = _differentiated(ctx.job, hidden, ctx.needs_input_grad[1], gradient)
            gradient = torch.ones_like(gradient)
        found = zip([gradients.hidden, *gradients.of_parameters()], [hidden, *parameters], strict=True)
        return None, *(_scaled(value, gradient, like.dtype) for value, like in found)


def _differentiated(
    job: Job, hidden: torch.Tensor, wants_input: bool, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, Gradients]:
    """The sum of all rows' losses, and its gradients times `scale`."""
    gradients = Gradients(job, hidden, wants_input)
    total = _added(_sum_of(gradients.add(hidden[chunk], chunk, scale)) for chunk in job.chunks(len(hidden)))
    gradients.done()
    return total, gradients


def _sum_of(losses: torch.Tensor) -> torch.Tensor:
    return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))


def _added(parts: Iterator[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, parts)


class Rows(torch.autograd.Function):
    """One row of results for every token; recomputed in backward."""

    @staticmethod
    def forward(ctx: Any, job: Job, hidden: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.job = job
        ctx.save_for_backward(hidden, *parameters)
        return torch.cat([job.of(job.source.logits(hidden[chunk]), chunk) for chunk in job.chunks(len(hidden))])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, *parameters = ctx.saved_tensors
        gradients = Gradients(ctx.job, hidden, ctx.needs_input_grad[1])
        for chunk in ctx.job.chunks(len(hidden)):
            gradients.add(hidden[chunk], chunk, gradient[chunk])
        found = zip(gradients.of_parameters(), parameters, strict=True)
        return None, gradients.hidden, *(None if value is None else value.to(p.dtype) for value, p in found)
