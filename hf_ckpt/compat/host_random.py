"""Random state of Python's `random` and of numpy's global functions, which torch's checkpoint does not preserve."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator
from typing import Any

import numpy

_BYTES = 4 * 625
"""Of a Mersenne Twister in memory: 624 words, and the place among them."""


class _OfNumpy:
    """The state of numpy's generator that was read last, which takes 30 us; every block asks twice in each forward."""

    def __init__(self) -> None:
        self.bits: Any = None
        self.memory = b""
        self.state: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return the state: the same object as before if no number was drawn since.

        A normal number that waits to be taken leaves no trace in memory. While one does, every state is a new object.
        """
        bits: Any = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
        known = type(bits).__name__ == "MT19937"
        memory = ctypes.string_at(bits.ctypes.state_address, _BYTES) if known else b""
        if bits is not self.bits or memory != self.memory or not known or self.state["has_gauss"]:
            self.bits, self.memory = bits, memory
            self.state = numpy.random.get_state(legacy=False)
        return self.state


_of_numpy = _OfNumpy()


class HostRandomState:
    """The state of both generators at one moment."""

    __slots__ = ("of_numpy", "of_python")

    def __init__(self) -> None:
        self.of_python = random.getstate()
        self.of_numpy = _of_numpy.read()

    def may_have_moved(self) -> bool:
        """Whether a number was drawn since, or another seed was set, as far as that can be told."""
        return self.of_numpy is not _of_numpy.read() or self.of_python != random.getstate()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside this context numbers are drawn from this state on; afterwards the generators go on as before."""
        now = HostRandomState()
        self._restore()
        try:
            yield
        finally:
            now._restore()

    def _restore(self) -> None:
        random.setstate(self.of_python)
        numpy.random.set_state(self.of_numpy)
