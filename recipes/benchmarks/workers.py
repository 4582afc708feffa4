"""Runs each measurement in a fresh process, so that none affects the next.

A `ProcessPoolExecutor` of one process or a `BaseManager` would not work: both hide the exit code of a killed process,
need private names to end a slow one, and break on an error that cannot be unpickled.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from harness import in_words

from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError

START = "spawn" if sys.platform == "win32" else "forkserver"
SECONDS = 1800.0
"""Timeout of an answer."""
PRELOAD = ["transformers", "hf_ckpt.forecast.forecast"]
"""Imported once for all processes. Installed packages only: Python 3.11's fork server does not see scripts."""


class WorkerError(HfCkptError, RuntimeError):
    """An error in another process. `details` is its traceback."""

    def __init__(self, shown: str, details: str = "") -> None:
        self.details = details
        super().__init__(shown)

    @property
    def out_of_memory(self) -> bool:
        """Whether the process ran out of memory."""
        return compat.is_out_of_memory(RuntimeError(str(self))) or "exit code -9" in str(self)


class Worker:
    """An object in a fresh process, whose methods are called from here, one at a time.

        with Worker(Thing, 1, 2) as thing:
            thing.ask("method", 3)

    Arguments and results are pickled. Raises `WorkerError` for errors in the process, and if it ends by itself or takes
    longer than `seconds`.
    """

    def __init__(self, make: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> None:
        context: Any = multiprocessing.get_context(START)
        if START == "forkserver":
            context.set_forkserver_preload(PRELOAD)
        self._seconds = seconds
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._made = False

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method in the process, and return its result."""
        if not self._made:
            self._answer("making it")
            self._made = True
        try:
            self._connection.send((name, arguments))
        except OSError as error:
            raise self._ended() from error
        return self._answer(name)

    def _answer(self, name: str) -> Any:
        if not self._connection.poll(self._seconds):
            self.close()
            raise WorkerError(f"{name} took longer than {self._seconds:g} s")
        try:
            succeeded, value = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._ended() from error
        if not succeeded:
            raise WorkerError(*value)
        return value

    def _ended(self) -> WorkerError:
        self._process.join(timeout=10)
        code = self._process.exitcode
        why = ", most likely because memory ran out: take a smaller batch, or fewer ways" if code == -9 else ""
        return WorkerError(f"its process ended with exit code {code}{why}")

    def close(self) -> None:
        """End the process. May be called again."""
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
    """Create the object, then call its methods until the connection closes. Output of libraries is dropped."""
    dropped = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(dropped, stream)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    with contextlib.suppress(EOFError, OSError):
        try:
            found = make(*arguments)
            connection.send((True, None))
        except Exception as error:
            connection.send((False, (in_words(error), traceback.format_exc())))
            return
        while True:
            name, given = connection.recv()
            try:
                connection.send((True, getattr(found, name)(*given)))
            except Exception as error:
                connection.send((False, (in_words(error), traceback.format_exc())))
