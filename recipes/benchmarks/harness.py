"""The common part of benchmarks: figures that are written as they come, and processes of their own."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from machine import circumstances

from hf_ckpt.errors import HfCkptError
from hf_ckpt.spec.files import write_text

Case = dict[str, Any]
"""Figures as a dict for JSON; with the key `error` if measuring failed."""
KEEP_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "2147483647", "MALLOC_TOP_PAD_": "67108864", "MALLOC_MMAP_MAX_": "0"}
"""Makes processes keep freed memory, like accelerators' allocators. glibc returns large blocks to the system at once
(`man 3 mallopt`). Then new pages, rather than computation, would decide which way is the fastest."""


def failure(error: Exception) -> Case:
    """The first line of an error, with its type unless it is an error of hf_ckpt."""
    first = str(error).strip().partition("\n")[0]
    return {"error": first if isinstance(error, HfCkptError) else f"{type(error).__name__}: {first}"}


@dataclasses.dataclass
class Results:
    """Figures of a benchmark, written to `path` after each case."""

    settings: dict[str, Any]
    circumstances: dict[str, Any]
    cases: dict[str, Case] = dataclasses.field(default_factory=dict)
    path: Path | None = None

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read the figures in a file."""
        figures = json.loads(path.read_text(encoding="utf-8"))
        return cls(figures["settings"], figures["circumstances"], figures["cases"], path)

    @classmethod
    def begun(cls, path: Path | None, settings: dict[str, Any]) -> Results:
        """Start without figures, or with those of an earlier run in `path`.

        Raises `HfCkptError` if that run had other settings, another machine or other versions.
        """
        results = cls(settings, circumstances(), path=path)
        if path is None or not path.exists():
            return results
        before = cls.read(path)
        now, then = ({**some.settings, **some.circumstances, "date": None} for some in (results, before))
        changes = [f"{name} {then.get(name)} there and {now[name]} now" for name in now if now[name] != then.get(name)]
        if changes:
            raise HfCkptError(f"{path} has figures of another run ({', '.join(changes)}): give another file.")
        return before

    def add(self, name: str, measure: Callable[[], Case]) -> None:
        """Measure a case, or record its error, and write the file. A case without an error is not measured again."""
        if "error" not in self.cases.get(name, {"error": None}):
            return
        try:
            self.cases[name] = measure()
        except Exception as error:
            self.cases[name] = failure(error)
        if self.path is not None:
            figures = {"settings": self.settings, "circumstances": self.circumstances, "cases": self.cases}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(figures, indent=1) + "\n")  # an interruption leaves the file whole

    @property
    def good(self) -> dict[str, Case]:
        """The cases that did not fail."""
        return {name: case for name, case in self.cases.items() if "error" not in case}


class Worker(ProcessPoolExecutor):
    """An object in a fresh process, whose methods are called from here, one at a time."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        os.environ.update(KEEP_FREED_MEMORY)  # before the fork server starts
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["transformers.modeling_layers", "hf_ckpt.training.install"])
        super().__init__(1, context)
        self._made_by = make, arguments

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method in the process, and return its result; of an error, or if the process was killed, a `failure`.

        The first call makes the object.
        """
        try:
            return self.submit(_answer, self._made_by, name, arguments).result()
        except BrokenProcessPool:
            return {"error": "its process was killed, most likely because memory ran out"}


_objects: list[Any] = []
"""The object of this process, if it is a worker's and has made it."""


def _answer(made_by: tuple[Callable[..., Any], Any], name: str, arguments: Any) -> Any:
    """In the worker: make the object if there is none, and call its method. Output of libraries is dropped."""
    try:
        if not _objects:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            warnings.filterwarnings("ignore")
            _objects.append(made_by[0](*made_by[1]))
        return getattr(_objects[0], name)(*arguments)
    except Exception as error:
        return failure(error)
