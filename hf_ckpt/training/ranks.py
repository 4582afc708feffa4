"""What `OomGuard` needs of the ranks of a DistributedDataParallel.

One rank may run a step again while the others do not. So ranks tell each other how a step has ended, and their
gradients are averaged here, when all of them are through with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError

FINE, FAILED, GAVE_UP = range(3)
"""How a step has ended on a rank: it ran, it ran out of memory, or it did so with no tighter plan left."""
BUCKET_BYTES = 25 << 20
"""Gradients are averaged in pieces of about this many bytes, as torch's DistributedDataParallel does by default."""


class Ranks:
    """All ranks of a DistributedDataParallel module, seen from one of them.

    Args:
        wrapped: the DistributedDataParallel module.
        guard: number of the guard in this process, the same on all ranks.

    Raises `HfCkptError` where the module reduces gradients in its own way (communication hooks, `static_graph`).
    """

    def __init__(self, wrapped: Any, guard: int) -> None:
        own = compat.own_reduction(wrapped)
        if own is not None:
            raise HfCkptError(f"OomGuard averages the gradients of all ranks itself, which {own} does not allow.")
        self.wrapped, self.group = wrapped, wrapped.process_group
        self.mine, self.all = compat.rank(), torch.distributed.get_process_group_ranks(self.group)
        self.patience = 60.0
        """Seconds to wait for the notes of other ranks, after a step has failed on this one."""
        self._guard, self._number = guard, 0
        """The number of the guard, and how many exchanges there have been; both are part of a note's name."""

    def collectives(self) -> int:
        """Return how many collective operations this rank has started."""
        return compat.collectives(self.wrapped)

    def exchange(self, come_to: int, level: int) -> tuple[int, int]:
        """Return the worst end of the step on any rank (`FINE`, `FAILED` or `GAVE_UP`), and the highest `level`.

        All ranks must call it. `level` is the number of tighter plans that a rank has taken.
        """
        device = next(self.wrapped.parameters()).device
        state = torch.tensor([come_to, level], device=device)
        torch.distributed.all_reduce(state, torch.distributed.ReduceOp.MAX, self.group)
        worst, highest = state.tolist()
        compat.forget_note(self._note(self.mine, self._number - 1))
        self._number += 1
        return int(worst), int(highest)

    def note(self, collectives: int) -> None:
        """Leave a note for other ranks that this one has ended a step after so many collective operations.

        Ranks do not wait for each other here, so that one that has failed can leave a note, too.
        """
        compat.leave_note(self._note(self.mine, self._number), str(collectives))

    def all_came_as_far(self, collectives: int) -> bool:
        """Return whether all ranks left a note with this number of collective operations; then none waits in the step.

        It is False, too, when a rank leaves no note within `patience` seconds.
        """
        notes = [self._note(rank, self._number) for rank in self.all]
        return compat.read_notes(notes, self.patience) == [str(collectives)] * len(notes)

    def average(self) -> None:
        """Average the gradients over all ranks, as DistributedDataParallel does.

        A gradient that only other ranks have counts as zero on this one.
        """
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
    """Return a parameter's gradient, after setting it to zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield runs of neighbouring gradients of one type and device, of at most `BUCKET_BYTES` or a single gradient."""
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
