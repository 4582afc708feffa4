"""torch's profiler as a record of the CPU's allocator: with memory and the user's marks only, and for one thread.

A plain `torch.profiler.profile` records every operation, which makes a step of 30 blocks ten times as slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from hf_ckpt.compat.private import private


class Recorded(NamedTuple):
    """An allocation, a release, or a mark."""

    name: str
    """Of a mark; empty for memory."""
    address: int = 0
    size: int = 0
    """Bytes; negative for a release."""


def profiler_is_active() -> bool:
    """Whether a profiler is active in this thread. torch allows only one."""
    return bool(private("torch._C._autograd._profiler_enabled")())


def start_allocation_record() -> None:
    """Record the CPU's allocations and the marks of this thread from now on, until `stop_allocation_record`."""
    settings = private("torch._C._profiler")
    config = settings.ProfilerConfig(
        settings.ProfilerState.KINETO,
        False,
        True,
        False,
        False,
        False,
        private("torch._C._profiler._ExperimentalConfig")(),
        "",
    )
    activities = {settings.ProfilerActivity.CPU}
    private("torch._C._autograd._prepare_profiler")(config, activities)
    private("torch._C._autograd._enable_profiler")(config, activities, {settings.RecordScope.USER_SCOPE})


def mark_in_record(name: str) -> None:
    """Add a mark to the record."""
    with torch.profiler.record_function(name):
        pass


def stop_allocation_record() -> Iterator[Recorded]:
    """Stop recording. Yields what was recorded, in the order of time."""
    memory = private("torch._C._profiler._EventType").Allocation
    events, roots = [], list(private("torch._C._autograd._disable_profiler")().experimental_event_tree())
    while roots:
        events.append(roots.pop())
        roots.extend(events[-1].children)
    for event in sorted(events, key=lambda event: int(event.start_time_ns)):
        kind, fields = event.typed
        if kind != memory:
            yield Recorded(event.name)
        elif fields.device.type == "cpu":
            yield Recorded("", fields.ptr, fields.alloc_size)
