"""The random state of Python's `random`, of numpy's global functions and of torch."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch

from hf_ckpt.compat.devices import accelerator_type, is_initialized
from hf_ckpt.compat.torch import tree_leaves

_LOCK = threading.RLock()
"""Held while the generators are in a state of another moment. A block may be recomputed inside of another one."""


class RandomState:
    """The random state at one moment: of Python, numpy and torch.

    Args:
        devices: devices to include besides the CPU. Those that torch has not initialised are left out.
        of_torch: whether to include torch's state.
        of_host: whether to include the states of Python's `random` and of numpy; reading them takes 20 to 60 us.
    """

    __slots__ = ("devices", "of_cpu", "of_host", "of_torch")

    def __init__(self, devices: Iterable[torch.device] = (), *, of_torch: bool = True, of_host: bool = True) -> None:
        self.of_host = (random.getstate(), numpy.random.get_state(legacy=False)) if of_host else None
        self.of_torch = of_torch
        self.of_cpu: torch.Tensor | None = torch.get_rng_state() if of_torch else None
        self.devices = [(device, _of_device(device)) for device in devices if of_torch and _is_ready(device)]

    def may_have_moved(self) -> bool:
        """Whether a number may have been drawn or a seed set since."""
        return self.of_host_has_moved() or self.of_torch_has_moved()

    def of_host_has_moved(self) -> bool:
        """The same for the generators of Python and numpy alone, if they are included."""
        if self.of_host is None:
            return False
        of_python, of_numpy = self.of_host
        pairs = zip(tree_leaves(of_numpy), tree_leaves(numpy.random.get_state(legacy=False)), strict=False)
        return of_python != random.getstate() or not all(numpy.array_equal(one, other) for one, other in pairs)

    def of_torch_has_moved(self) -> bool:
        """The same for torch's generators alone."""
        return (self.of_cpu is not None and _bytes(self.of_cpu) != _bytes(torch.get_rng_state())) or any(
            _bytes(state) != _bytes(_of_device(device)) for device, state in self.devices
        )

    def restore(self) -> None:
        """Reset the generators to this state."""
        if self.of_host is not None:
            random.setstate(self.of_host[0])
            numpy.random.set_state(self.of_host[1])
        if self.of_cpu is not None:
            torch.set_rng_state(self.of_cpu)
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(state, device)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Reset the generators to this state inside this context; afterwards they continue as before.

        One thread at a time: generators belong to the process, and backwards may run in several threads.
        """
        devices = [device for device, _ in self.devices]
        with _LOCK, RandomState(devices, of_torch=self.of_torch, of_host=self.of_host is not None).kept():
            self.restore()
            yield

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Reset the generators to this state at the end of this context."""
        try:
            yield
        finally:
            self.restore()


def devices_of(values: Iterable[Any]) -> list[torch.device]:
    """Return the devices of all tensors among the values, each once, without the CPU."""
    return list({value.device: None for value in values if isinstance(value, torch.Tensor) and not value.is_cpu})


def all_devices() -> list[torch.device]:
    """Return every device of the machine's accelerator: `torch.manual_seed` sets the generators of all of them."""
    return [torch.device(accelerator_type() or "cpu", n) for n in range(torch.accelerator.device_count())]


def _is_ready(device: torch.device) -> bool:
    """Whether a device has a random state now: reading it would initialise a CUDA device."""
    module = getattr(torch, device.type, None)
    if not hasattr(module, "get_rng_state"):
        return False
    # `mps` needs no initialisation, and may say that there was none: https://github.com/pytorch/pytorch/issues/194478
    return device.type == "mps" or is_initialized(module)


def _of_device(device: torch.device) -> torch.Tensor:
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _bytes(state: torch.Tensor) -> bytes:
    """Return a state of torch as bytes, without an operation that dispatch modes would see."""
    # Not by numpy, which cannot read the tensors that a transform of torch.func wraps.
    # Nor by a type `ctypes.c_char * size`: it would be created anew for most calls, at twenty times the cost.
    return ctypes.string_at(state.data_ptr(), state.nbytes)
