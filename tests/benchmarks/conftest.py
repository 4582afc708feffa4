"""Fixtures for the benchmarks' tests: small models, and benchmarks that run in this process."""

from __future__ import annotations

import gc

import largest
import peers
import pytest
import session
from harness import in_words
from workers import WorkerError

from hf_ckpt.models.tiny import tiny_model
from hf_ckpt.prediction.workload import Workload


class InProcess:
    """Replaces `workers.Worker`; the object lives in this process."""

    def __init__(self, make, *arguments):
        self.make, self.arguments, self.made = make, arguments, None

    def ask(self, name, *arguments):
        try:
            self.made = self.made or self.make(*self.arguments)
            return getattr(self.made, name)(*arguments)
        except Exception as error:
            raise WorkerError(in_words(error)) from error

    def close(self):
        if hasattr(self.made, "close"):
            self.made.close()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.close()


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """The config of a LLaMA of two blocks, as small as possible."""
    model = tiny_model("llama", layers=2, attention="sdpa")
    model.config.architectures = [type(model).__name__]
    folder = tmp_path_factory.mktemp("small")
    model.config.save_pretrained(folder)
    return str(folder / "config.json")


@pytest.fixture(scope="session")
def workload(config):
    return Workload(config, batch=4, tokens=64, dtype="float32")


@pytest.fixture(autouse=True)
def quick_collections():
    """Hide older objects from the garbage collector, which benchmarks call for every way."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def here(monkeypatch):
    """Run without worker processes, without changing the allocator, and with few timed steps."""
    monkeypatch.setattr(session, "keep_freed_memory", lambda: None)
    for module in (peers, largest):
        monkeypatch.setattr(module, "Worker", InProcess)
    monkeypatch.setattr(peers, "STEPS", 2)
