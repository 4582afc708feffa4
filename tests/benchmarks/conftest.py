"""Small models for benchmarks, and benchmarks that stay in this process."""

from __future__ import annotations

import gc

import forecaster
import largest
import peers
import pytest
import session
from helpers.in_process import InProcess

from hf_ckpt.models.tiny import FAMILIES, tiny_model
from hf_ckpt.prediction.workload import Workload


def config_of(family, layers, folder):
    model = tiny_model(family, layers=layers, hidden=32, attention="sdpa")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return str(folder / "config.json")


@pytest.fixture(scope="session")
def configs(tmp_path_factory):
    """Family -> config of a model whose activations outweigh its weights."""
    folder = tmp_path_factory.mktemp("configs")
    return {family: config_of(family, 5, folder / family) for family in FAMILIES}


@pytest.fixture(scope="session")
def workload(configs):
    """A LLaMA of five blocks with four sequences."""
    return Workload(configs["llama"], batch=4, tokens=160, dtype="float32")


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A LLaMA of two blocks with as little to compute as there can be."""
    config = config_of("llama", 2, tmp_path_factory.mktemp("small"))
    return Workload(config, batch=1, tokens=16, dtype="float32")


@pytest.fixture(autouse=True)
def quick_collections():
    """The garbage collector, which benchmarks call for every way, leaves alone what was there before the test."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread_a_process(monkeypatch):
    """Of the processes that tests start: several of them share the cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def own_allocator(monkeypatch):
    """Leaves this process's allocator as it is."""
    for module in (session, forecaster):
        monkeypatch.setattr(module, "keep_freed_memory", lambda: None)


@pytest.fixture
def here(monkeypatch, own_allocator):
    """Without processes, and with as few timed steps as there can be."""
    for module in (peers, largest):
        monkeypatch.setattr(module, "Worker", InProcess)
    monkeypatch.setattr(peers, "TAKES", 1)
    monkeypatch.setattr(peers, "STEPS", 2)
    monkeypatch.setattr(forecaster, "STEPS", 1)
