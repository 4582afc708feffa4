"""A process for each thing that is measured, so that nothing of one is left for the next."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from hf_ckpt.errors import HfCkptError, WorkerError

START = "spawn" if sys.platform == "win32" else "forkserver"
SECONDS = 1800.0
"""How long an answer may take."""


class Worker:
    """An object that lives in a fresh process, and whose methods are called from here, one at a time.

        with Worker(Thing, 1, 2) as thing:
            thing.ask("method", 3)

    Everything that goes there and back is pickled. Raises `WorkerError` for what is raised there, and when the process
    ends by itself or takes longer than `seconds`.
    """

    def __init__(
        self, make: Callable[..., Any], *arguments: Any, preload: Sequence[str] = (), seconds: float = SECONDS
    ) -> None:
        context: Any = multiprocessing.get_context(START)
        if START == "forkserver":
            context.set_forkserver_preload(list(preload))  # imported once for all processes
        self._seconds = seconds
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._made = False

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method there, and wait for what it returns."""
        if not self._made:
            self._answer("making it")
            self._made = True
        try:
            self._connection.send((name, arguments))
        except OSError as error:
            raise WorkerError(self._end_in_words()) from error
        return self._answer(name)

    def _answer(self, name: str) -> Any:
        if not self._connection.poll(self._seconds):
            self.close()
            raise WorkerError(f"{name} took longer than {self._seconds:g} s")
        try:
            succeeded, value = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise WorkerError(self._end_in_words()) from error
        if not succeeded:
            raise WorkerError(*value)
        return value

    def _end_in_words(self) -> str:
        self._process.join(timeout=10)
        return f"its process ended with exit code {self._process.exitcode}"

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(timeout=10)
            if self._process.is_alive():
                self._process.kill()
        self._process.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Make the object, then call its methods until nobody asks any more."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    with contextlib.suppress(EOFError, OSError):
        try:
            found = make(*arguments)
            connection.send((True, None))
        except Exception as error:
            connection.send((False, _told(error)))
            return
        while True:
            name, given = connection.recv()
            try:
                connection.send((True, getattr(found, name)(*given)))
            except Exception as error:
                connection.send((False, _told(error)))


def _told(error: Exception) -> tuple[str, str]:
    """In one line, and in full."""
    first = str(error).strip().partition("\n")[0]
    shown = first if isinstance(error, HfCkptError) else f"{type(error).__name__}: {first}"
    return shown, "".join(traceback.format_exception(error))
