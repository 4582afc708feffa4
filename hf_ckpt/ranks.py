"""The ranks of a DistributedDataParallel, as far as a guard against running out of memory needs them: what they have
come to, and the average of their gradients, taken when all of them are through with a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError

FINE, FAILED, GAVE_UP = range(3)
"""What a rank has come to."""
BUCKET_BYTES = 25 << 20
"""As torch's DistributedDataParallel reduces gradients."""


class Ranks:
    """All ranks of `wrapped`, seen from one of them. Raises `HfCkptError` for what reduces gradients its own way."""

    def __init__(self, wrapped: Any, guard: int) -> None:
        own = compat.own_reduction(wrapped)
        if own is not None:
            raise HfCkptError(f"OomGuard averages the gradients of all ranks itself, which {own} does not allow.")
        self.wrapped, self.group = wrapped, wrapped.process_group
        self.mine, self.all = compat.rank(), torch.distributed.get_process_group_ranks(self.group)
        self.patience = 60.0
        """Seconds to wait for other ranks to end a step that one of them could not."""
        self._guard, self._number = guard, 0
        """Which of the process's guards asks, and how many exchanges there were."""

    def collectives(self) -> int:
        """Collective operations that this rank has started."""
        return compat.collectives(self.wrapped)

    def exchange(self, come_to: int, level: int) -> tuple[int, int]:
        """The worst that a rank has come to, and the highest level. All ranks must call it."""
        device = next(self.wrapped.parameters()).device
        state = torch.tensor([come_to, level], device=device)
        torch.distributed.all_reduce(state, torch.distributed.ReduceOp.MAX, self.group)
        worst, highest = state.tolist()
        compat.forget_note(self._note(self.mine, self._number - 1))
        self._number += 1
        return int(worst), int(highest)

    def note(self, collectives: int) -> None:
        """Let others know, without meeting them, that this rank is through with a step, or has failed in it."""
        compat.leave_note(self._note(self.mine, self._number), str(collectives))

    def all_came_as_far(self, collectives: int) -> bool:
        """Whether all ranks left a note of as many collective operations: then none waits inside the step.

        False, too, when one leaves none within `patience`.
        """
        notes = [self._note(rank, self._number) for rank in self.all]
        return compat.read_notes(notes, self.patience) == [str(collectives)] * len(notes)

    def average(self) -> None:
        """Average gradients, bucket by bucket, as DistributedDataParallel does. One that a rank lacks is zero there."""
        ignored = getattr(self.wrapped, "parameters_to_ignore", ())
        named = self.wrapped.module.named_parameters()
        parameters = [found for name, found in named if found.requires_grad and name not in ignored]
        there = [found.grad is not None for found in parameters]
        used = torch.tensor(there, dtype=torch.int32, device=parameters[0].device)
        torch.distributed.all_reduce(used, torch.distributed.ReduceOp.MAX, self.group)
        gradients = [_gradient(found) for found, anywhere in zip(parameters, used.tolist(), strict=True) if anywhere]
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).mul_(1.0 / len(self.all))
            torch.distributed.all_reduce(flat, group=self.group)
            parts = torch.split(flat, [gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _note(self, rank: int, number: int) -> str:
        return f"hf_ckpt/{self._guard}/{number}/{rank}"


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type and device, about `BUCKET_BYTES` together."""
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        if bucket and (
            (gradient.dtype, gradient.device) != (bucket[0].dtype, bucket[0].device)
            or sum(other.nbytes for other in bucket) + gradient.nbytes > BUCKET_BYTES
        ):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
