"""What this thread runs: hooks on modules inside of a block find here the block that runs around them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol


class Intercepts(Protocol):
    """What hooks on routers need of `routers.Choices`."""

    def intercept(self, on: bool) -> None: ...


class RunsInTiles(Protocol):
    """What the forwards of feed-forwards need of `tiles.TiledRegion`."""

    def run_in_tiles(self, name: str, module: Any, forward: Callable[..., Any], hidden: Any) -> Any: ...


class _Running(threading.local):
    """What this thread runs: replicas of a model may run in separate threads.

    Code that sets one of the first three puts back at its end what was there before, because models may nest their
    blocks.
    """

    tape: Any = None
    """The `tape.Tape` of the block that runs now, if its cheap results are rebuilt."""
    choices: Intercepts | None = None
    """The choices of the block that runs now, if it has routers and is recomputed as a whole."""
    tiles: RunsInTiles | None = None
    """The checkpointing function of the block that runs now, if its feed-forwards run in tiles."""
    norm_output: Any = None
    """The `tape.NormOutput` of the block that ran last, if the next block can rebuild it."""


running = _Running()
