"""Settings and fixtures of all tests, and checks that no test leaves anything behind."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys

import numpy
import pytest
import torch
import torch._dynamo
from accelerate.state import AcceleratorState, GradientState, PartialState
from hypothesis import settings
from torch._dynamo.backends.registry import lookup_backend
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.utils import logging as transformers_logging

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.engines import compiled
from hf_ckpt.engines.running import running
from hf_ckpt.logs import PLANS, forget_warnings
from hf_ckpt.measure.live import LiveBytes

torch.set_num_threads(1)  # several workers share the cores, and threads that wait for a core spin
if sys.platform == "linux":  # else gloo looks up the name of the host, which may take for ever
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COLUMNS", None)  # set by readline in the parent process
# Every run tries the same examples; a new failing example becomes a named test.
settings.register_profile("hf_ckpt", deadline=None, derandomize=True)
settings.load_profile("hf_ckpt")


def pytest_addoption(parser):
    parser.addoption("--backwards", action="store_true", help="run the tests in reverse order: none depends on another")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("--backwards"):
        items.reverse()


def seed():
    """Let a test draw the same numbers whatever ran before it. Only on the CPU, so that no device is initialised."""
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)


def pytest_collectstart():
    seed()  # for what modules draw when they are imported


@pytest.fixture(autouse=True, scope="module")
def nothing_old_to_collect():
    """Collect what imports and the modules before have left, and never look at the rest again.

    Many tests collect garbage, which takes a tenth of a second once libraries have been imported in between.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def the_same_random_numbers():
    seed()


@pytest.fixture(autouse=True)
def every_warning_may_be_given_again():
    """Let every test see the warnings that are given once per process."""
    forget_warnings()


@pytest.fixture(autouse=True)
def nothing_left_on_the_process():
    """Fail if a test leaves a class as `hf_ckpt.install()` changed it, or plans logged: later tests would see it."""
    names = (*compat.transformers.ENABLE_NAMES, *compat.transformers.DISABLE_NAMES)
    before = {name: vars(compat.transformers.PreTrainedModel)[name] for name in names}
    yield
    after = {name: vars(compat.transformers.PreTrainedModel)[name] for name in names}
    if after != before:
        hf_ckpt.uninstall()  # looks at every object of the process, which takes a tenth of a second
    assert after == before
    assert not PLANS.isEnabledFor(logging.INFO)


@pytest.fixture(autouse=True)
def nothing_left_by_accelerate():
    """End the state of accelerate, and its variables: a Trainer that compiles would make later ones compile, too."""
    before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_count_left_on():
    """Fail if a test leaves a count of live tensors on, which would slow later tests down."""
    yield
    counts = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, LiveBytes)]
    for mode in counts:
        mode.stop()
    assert not counts


@pytest.fixture(autouse=True)
def no_block_left_open():
    """Check that nothing records this thread as inside a block once it has ended."""
    yield
    assert (running.tape, running.choices, running.tiles) == (None, None, None)


@pytest.fixture
def nothing_compiled(monkeypatch):
    """Start without graphs that other tests compiled."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # pytest would store all of it
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled._compiled.cache_clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch):
    """Collect the graphs of compiled blocks, and compile them without the slow inductor."""
    found = []

    def compile_graph(graph, inputs):
        found.append(graph)
        return lookup_backend("aot_eager_decomp_partition")(graph, inputs)

    monkeypatch.setattr(compat.compiler, "compile_graph", compile_graph)
    return found


@pytest.fixture
def unwatched(monkeypatch):
    """Turn off the watch: a check holds tensors and may run a block again, and the test counts both."""
    monkeypatch.setattr("hf_ckpt.training.watch.Watch.on_forward", lambda *args: None)


@pytest.fixture
def everywhere():
    """`install()` for the whole process, undone after the test."""
    gc.collect()  # it also installs on models of earlier tests that are still there, and warns of some
    yield hf_ckpt.install
    hf_ckpt.uninstall()


@pytest.fixture
def transformers_log(caplog):
    """Records of transformers' own logger, which does not propagate to `caplog`."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logger = transformers_logging.get_logger("transformers")
    caplog.set_level(logging.WARNING, logger.name)  # commands that ran here have left it higher
    transformers_logging.get_logger("transformers.any").warning_once.__func__.cache_clear()
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
