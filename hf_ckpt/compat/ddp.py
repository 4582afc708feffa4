"""Processes that train together: ranks, notes between them, and torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt.compat.private import private


def data_parallel(model: nn.Module) -> Any | None:
    """Return the DistributedDataParallel that `model` is or compiles, if it has more than one rank; else None."""
    from torch.nn.parallel import DistributedDataParallel

    model = getattr(model, "_orig_mod", model)  # torch.compile goes around it
    if isinstance(model, DistributedDataParallel) and torch.distributed.get_world_size(model.process_group) > 1:
        return model
    return None


def own_reduction(wrapped: Any) -> str | None:
    """Name what makes a DistributedDataParallel reduce gradients in a way of its own; None where nothing does."""
    if getattr(wrapped, "_comm_hooks", None):
        return "its communication hook"
    # The first backward of a static graph reduces everything at its end, even under `no_sync`.
    return "`static_graph`" if wrapped.static_graph else None


def rank() -> int:
    """Return the rank of this process; 0 without torch.distributed."""
    return torch.distributed.get_rank() if is_distributed() else 0


def ranks() -> int:
    """Return how many processes train together; 1 without torch.distributed."""
    return torch.distributed.get_world_size() if is_distributed() else 1


def collectives(wrapped: Any) -> int:
    """Return how many collective operations this rank has started on the group of a DistributedDataParallel."""
    return int(wrapped.process_group._get_sequence_number_for_group())


def leave_note(key: str, text: str) -> None:
    """Write a text where all ranks of the process group can read it, without waiting for any of them."""
    private("torch.distributed.distributed_c10d._get_default_store")().set(key, text)


def forget_note(key: str) -> None:
    """Delete what `leave_note` wrote, where the store can. A note that stays does no harm: keys are not used again."""
    with contextlib.suppress(RuntimeError):
        private("torch.distributed.distributed_c10d._get_default_store")().delete_key(key)


def read_notes(keys: Sequence[str], seconds: float) -> list[str] | None:
    """Return the texts that ranks left, once all are there; None if that takes longer than `seconds`."""
    store = private("torch.distributed.distributed_c10d._get_default_store")()
    try:
        store.wait(list(keys), datetime.timedelta(seconds=seconds))
    except RuntimeError:
        return None
    return [store.get(key).decode() for key in keys]


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
