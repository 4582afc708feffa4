"""Fixtures of tests that run out of memory."""

from __future__ import annotations

import gc

import pytest

from hf_ckpt.planner import escalate


@pytest.fixture
def host_memory(monkeypatch):
    """The CPU has no host memory beside its own. That a plan is taken is seen here; the engine's own tests move."""
    monkeypatch.setattr(escalate, "lane_of", lambda device: device)


@pytest.fixture(scope="module")
def little_to_collect():
    """The garbage collector runs after every failure; what other tests left need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
