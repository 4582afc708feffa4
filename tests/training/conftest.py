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
    """Give all blocks the same time and each action a fixed share of it, so that plans depend on bytes alone."""
    learn = Measurements.learn_times

    def learn_times(known, *seen):
        learn(known, *seen)
        known.times = dict.fromkeys(known.times, (1_000_000, 0, 2_000_000))

    def shares(known):
        times = {action: 0.6 + 0.05 * n for n, action in enumerate(known.actions[:-1])}
        times |= {action: 1.05 for action in times if action == FULL_SELECTIVE}
        return {
            (kind, action): share for kind in dict.fromkeys(known.kinds.values()) for action, share in times.items()
        }

    monkeypatch.setattr(Measurements, "learn_times", learn_times)
    monkeypatch.setattr(Measurements, "_shares_of_time", shares)
