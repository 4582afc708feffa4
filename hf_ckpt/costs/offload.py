"""The costs of actions that keep tensors in host memory, from those of actions that keep them on the device."""

from __future__ import annotations

import dataclasses

from hf_ckpt.costs.costs import OFFLOADED, Cost, Costs
from hf_ckpt.costs.steps import Part
from hf_ckpt.spec.actions import FULL, Action

_OVERHEAD = 2
"""Time to start a copy, as a multiple of the time to start an operation."""


def with_offloading(
    costs: Costs, host_bandwidth: float, launch_nanoseconds: int, host_limit: int | None
) -> list[Costs]:
    """For each action that offloads, `costs` with it for as many calls as fit into host memory.

    No plan mixes these actions, so each may use the whole limit. The last call never offloads, because its backward
    follows at once. If nothing can be offloaded, returns `costs` unchanged.

    Args:
        costs: with actions that keep their tensors on the device.
        host_bandwidth: bytes per second of copies to and from pinned host memory; 0 if the device is the host.
        launch_nanoseconds: time to start an operation.
        host_limit: bytes of host memory that may be used. Buffers there are rounded up to powers of two. None for no
            offloading.
    """
    if host_limit is None or not host_bandwidth:
        return [costs]
    moving = []
    for base in OFFLOADED:
        places = [place for place, call in enumerate(costs.calls[:-1]) if base in call.costs]
        keeps = {place: costs.calls[place].costs[base].kept_bytes for place in places}
        sizes = {place: costs.input_bytes if base == FULL else max(0, kept) for place, kept in keeps.items()}
        largest = max(sizes.values(), default=0)
        # Each of several tensors is rounded up by itself, to less than twice its size.
        buffer = 1 << max(0, largest - 1).bit_length() if base == FULL else 2 * largest
        calls = list(costs.calls)
        for place in [place for place in places if place < host_limit // max(1, buffer)]:
            copying = round(sizes[place] / host_bandwidth * 1e9), _OVERHEAD * launch_nanoseconds
            cost = _moved(costs, place, base, sizes[place], *copying)
            calls[place] = dataclasses.replace(calls[place], costs={**calls[place].costs, OFFLOADED[base]: cost})
        if places:
            moving.append(dataclasses.replace(costs, calls=tuple(calls), actions=(*costs.actions, OFFLOADED[base])))
    return moving or [costs]


def _moved(costs: Costs, place: int, base: Action, size: int, copying: int, overhead: int) -> Cost:
    """The cost of a call that offloads `size` bytes, from that of keeping them on the device under `base`.

    Its backward prefetches the tensors of the call before. The model assumes that that call offloads as much, and that
    the calls that offload are the first ones of the step. The last of them waits for its own copy; the first call's
    cost includes that time.
    """
    cost, ahead = costs.calls[place].costs[base], size if place else 0
    # The input of the first block may be held elsewhere, too, so it is not freed.
    freed = size if place else max(0, size - costs.input_bytes)
    forward, backward = cost.forward, cost.backward
    peak = forward.peak if base == FULL else forward.peak + ahead  # the previous call's copies end with this one
    waits = overhead if place else overhead + copying
    return dataclasses.replace(
        cost,
        forward=Part(peak, forward.net - freed, max(forward.nanoseconds, copying) + overhead),
        backward=Part(backward.peak + size + ahead, backward.net + freed, max(backward.nanoseconds, copying) + waits),
    )
