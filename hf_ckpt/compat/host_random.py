"""Random state of Python's `random` and of numpy's global functions, which torch's checkpoint does not preserve."""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy

_WORDS = "625I"
"""A Mersenne Twister in memory: 624 words, and the place among them."""
_Memory = ctypes.c_char * struct.calcsize(_WORDS)


class _Generator:
    """A generator whose state is read only if it may have changed: reading takes 10 to 30 us, and every block asks
    twice in each forward.

    Args:
        read: returns the state.
        normal_moved: whether the normal number that waits to be taken may be another one than in the state read last.
            Memory does not tell.
    """

    def __init__(self, read: Callable[[], Any], normal_moved: Callable[[Any], bool]) -> None:
        self._read, self._normal_moved = read, normal_moved
        self.memory: Any = None
        """Where the generator lies in memory; None if it is of an unknown kind."""
        self._bytes = b""
        """What was there when the state was read; empty before that."""
        self._state: Any = None

    def state(self) -> Any:
        """Return the state: the same object as before if no number was drawn since."""
        now = b"" if self.memory is None else self.memory.raw
        if not now or now != self._bytes or self._normal_moved(self._state):
            self._bytes, self._state = now, self._read()
        return self._state


class _OfNumpy(_Generator):
    """That of numpy's global functions, in whose place a script may put another one."""

    def __init__(self) -> None:
        super().__init__(lambda: numpy.random.get_state(legacy=False), lambda state: bool(state["has_gauss"]))
        self._bits: Any = None

    def state(self) -> Any:
        bits: Any = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
        if bits is not self._bits:
            known = type(bits).__name__ == "MT19937"
            self.memory = _Memory.from_address(bits.ctypes.state_address) if known else None
            self._bits, self._bytes = bits, b""
        return super().state()


def _of_python() -> _Generator:
    """That of Python's `random`. In CPython it lies behind the head of its object, with the place before the words."""
    found: Any = getattr(random, "_inst", None)
    generator = _Generator(random.getstate, lambda state: found.gauss_next is not state[2])
    head = object.__basicsize__
    if type(found) is random.Random and random.Random.__basicsize__ >= head + ctypes.sizeof(_Memory):
        memory = _Memory.from_address(id(found) + head)
        place, *words = struct.unpack(_WORDS, memory.raw)
        generator.memory = memory if (*words, place) == random.getstate()[1] else None
    return generator


_python, _numpy = _of_python(), _OfNumpy()


class HostRandomState:
    """The state of both generators at one moment."""

    __slots__ = ("of_numpy", "of_python")

    def __init__(self) -> None:
        self.of_python, self.of_numpy = _python.state(), _numpy.state()

    def may_have_moved(self) -> bool:
        """Whether a number was drawn since, or another seed was set, as far as that can be told."""
        return self.of_numpy is not _numpy.state() or self.of_python is not _python.state()

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
