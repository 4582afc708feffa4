"""Processes that train together: ranks, and torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def data_parallel(model: nn.Module) -> Any | None:
    """Return the DistributedDataParallel that `model` is or compiles, if it has more than one rank; else None."""
    from torch.nn.parallel import DistributedDataParallel

    model = getattr(model, "_orig_mod", model)  # torch.compile goes around it
    if isinstance(model, DistributedDataParallel) and torch.distributed.get_world_size(model.process_group) > 1:
        return model
    return None


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors that zeros are to look like, and returns them instead."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.zeros_like.default:
            return func(*args, **(kwargs or {}))
        self.tensors.append(args[0])
        return args[0]


def reduction_buckets(model: nn.Module) -> list[torch.Tensor]:
    """Return the flat tensors in which a DistributedDataParallel reduces gradients; none for any other model.

    torch gives out only zeros that look like them, but it asks for these by an operation that a dispatch mode sees.
    """
    wrapped = data_parallel(model)
    seen = _Seen()
    if wrapped is not None:
        with seen:
            wrapped.reducer._get_zeros_like_grad_buckets()
    return seen.tensors


def rank() -> int:
    """Return the rank of this process; 0 without torch.distributed."""
    return torch.distributed.get_rank() if is_distributed() else 0


def ranks() -> int:
    """Return how many processes train together; 1 without torch.distributed."""
    return torch.distributed.get_world_size() if is_distributed() else 1


def is_distributed() -> bool:
    """Whether this process is one of several ranks."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def of_all_ranks(value: Any) -> list[Any]:
    """Return `value` of every rank, in rank order; `[value]` without torch.distributed. All ranks must call it."""
    if not is_distributed():
        return [value]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered
