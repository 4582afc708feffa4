"""A block's forward runs a first time, and again whenever backward needs it: what differs between these runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Runs(NamedTuple):
    """The two ways in which a function runs."""

    first: Callable[..., Any]
    again: Callable[..., Any]


class FirstThenAgain:
    """Calls `first` once, and `again` from then on.

    It lets go of `first` when that begins. What only the first call needs, such as the caller's arguments, may so refer
    to the graph that this object belongs to.

    Args:
        first: the first call.
        again: all others.
        owner: the module whose forward this is. Until transformers 5.17, engines find the block by `__self__`.
    """

    __slots__ = ("__self__", "_again", "_first")

    def __init__(self, first: Callable[..., Any], again: Callable[..., Any], owner: Any = None) -> None:
        self._first: Callable[..., Any] | None = first
        self._again = again
        self.__self__ = owner

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        first = self._first
        if first is None:
            return self._again(*args, **keywords)
        self._first = None
        return first(*args, **keywords)
