"""Fixtures for tests that run out of memory and for tests that compare gradients bit by bit."""

from __future__ import annotations

import gc

import pytest
import torch

from hf_ckpt.spec.actions import FULL_SELECTIVE
from hf_ckpt.training import guard
from hf_ckpt.training.measurements import Measurements


@pytest.fixture
def host_memory(monkeypatch):
    """Pretend that the CPU has host memory: these tests check only that plans offload."""
    monkeypatch.setattr(guard, "lane_of", lambda device: device)


@pytest.fixture(scope="module")
def little_to_collect():
    """Hide objects of other tests from the garbage collector, which runs after every failure."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def one_thread():
    """Fix the order of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def steady_times(monkeypatch):
    """Give all calls the same time, and each action a fixed share of it: no plan depends on a clock."""

    def learn_times(known, batch, step, tried):
        known.timed += 1
        known.times[None] = (0, 0, 0)
        for kind in set(known.kinds[batch.state].values()):
            for number, action in enumerate(known.actions):
                known.times[kind, action] = (1_000_000, 0, 2_000_000)
                known.ratios[kind, action] = 1.05 if action == FULL_SELECTIVE else 0.6 + 0.05 * number

    monkeypatch.setattr(Measurements, "learn_times", learn_times)
