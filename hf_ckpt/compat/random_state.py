"""The random state of Python's `random`, of numpy's global functions and of torch."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch

from hf_ckpt.compat.devices import accelerator_type, is_initialized

_WORDS = ctypes.c_uint32 * 624
"""The words of a Mersenne Twister. In memory, the index of the next word precedes them in Python's generator, and
follows them in numpy's."""
_Window = ctypes.c_char * 20
"""The index and the four words next to it, in memory."""


class _Host:
    """The generators of Python and numpy. Their states are read only if they may have changed: reading takes 20 to
    60 us, and every block asks twice in each forward.

    A draw advances the index, up to the last word; then all words are replaced, as they are by seeding. So the index
    and the words next to it show every change, except to a cached normal number.
    """

    def __init__(self) -> None:
        self._python: Any = getattr(random, "_inst", None)
        self._numpy: Any = None
        self._windows: list[Any] = []
        """The windows of both generators; empty if one is of an unknown kind."""
        self._seen: list[bytes] = []
        """Their contents when the states were read."""
        self._states: tuple[Any, Any] = None, None
        self._normal: Any = None
        """The normal number that Python's generator had cached then."""
        self._normal_of_numpy = True
        """Whether numpy's may have one cached, which the windows do not show."""

    def states(self) -> tuple[Any, Any]:
        """Return the states: the same object as before if no number was drawn since."""
        windows = self._windows
        if (
            windows
            and [window.raw for window in windows] == self._seen
            and numpy.random.get_bit_generator() is self._numpy  # type: ignore[attr-defined]
            and self._python.gauss_next is self._normal
            and not self._normal_of_numpy
        ):
            return self._states
        bits: Any = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
        if bits is not self._numpy:
            self._numpy, self._windows = bits, [*_windows_of_python(self._python), *_windows_of_numpy(bits)]
            self._windows = self._windows if len(self._windows) == 2 else []
        self._seen = [window.raw for window in self._windows]
        self._states = of_python, of_numpy = random.getstate(), numpy.random.get_state(legacy=False)
        self._normal, self._normal_of_numpy = of_python[2], bool(of_numpy["has_gauss"])
        return self._states


def _windows_of_python(found: Any) -> list[Any]:
    """Return the window of Python's generator. In CPython its index follows the object header."""
    head = object.__basicsize__
    if type(found) is not random.Random or random.Random.__basicsize__ < head + 4 + ctypes.sizeof(_WORDS):
        return []
    address = id(found) + head
    there = *_WORDS.from_address(address + 4), ctypes.c_uint32.from_address(address).value
    return [_Window.from_address(address)] if there == random.getstate()[1] else []


def _windows_of_numpy(bits: Any) -> list[Any]:
    """Return the window of numpy's generator; none if a script has replaced it by another kind."""
    if type(bits).__name__ != "MT19937":
        return []
    end = bits.ctypes.state_address + ctypes.sizeof(_WORDS) + 4
    return [_Window.from_address(end - ctypes.sizeof(_Window))]


_host = _Host()


class RandomState:
    """The random state at one moment: of Python and numpy and, unless `of_torch` is false, of torch.

    Args:
        devices: devices to include besides the CPU. Those that torch has not initialised are left out.
        of_torch: whether to include torch's state.
    """

    __slots__ = ("devices", "of_cpu", "of_host", "of_torch")

    def __init__(self, devices: Iterable[torch.device] = (), *, of_torch: bool = True) -> None:
        self.of_host = _host.states()
        self.of_torch = of_torch
        self.of_cpu: torch.Tensor | None = torch.get_rng_state() if of_torch else None
        self.devices = [(device, _of_device(device)) for device in devices if of_torch and _is_ready(device)]

    def may_have_moved(self) -> bool:
        """Whether a number may have been drawn or a seed set since."""
        return self.of_host_may_have_moved() or self.of_torch_has_moved()

    def of_host_may_have_moved(self) -> bool:
        """The same for the generators of Python and numpy alone."""
        return self.of_host is not _host.states()

    def of_torch_has_moved(self) -> bool:
        """The same for torch's generators alone."""
        return (self.of_cpu is not None and _bytes(self.of_cpu) != _bytes(torch.get_rng_state())) or any(
            _bytes(state) != _bytes(_of_device(device)) for device, state in self.devices
        )

    def restore(self) -> None:
        """Reset the generators to this state."""
        random.setstate(self.of_host[0])
        numpy.random.set_state(self.of_host[1])
        if self.of_cpu is not None:
            torch.set_rng_state(self.of_cpu)
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(state, device)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Reset the generators to this state inside this context; afterwards they continue as before."""
        with RandomState([device for device, _ in self.devices], of_torch=self.of_torch).kept():
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
    device_type = accelerator_type()
    if device_type is None:
        return []
    return [torch.device(device_type, number) for number in range(torch.accelerator.device_count())]


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
    found: bytes = (ctypes.c_char * state.nbytes).from_address(state.data_ptr()).raw
    return found
